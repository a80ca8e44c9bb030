"""The strategies for `import pytorch_lightning` and `import lightning_fabric`."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_sparse.strategies.auto import AutoDDP
from lightning_sparse.strategies.auto_hsdp import AutoHSDP
from lightning_sparse.strategies.fabric import FabricSparseDDP
from lightning_sparse.strategies.fabric_hsdp import FabricSparseHSDP
from lightning_sparse.strategies.hsdp import SparseHSDP
from lightning_sparse.strategies.sparse_ddp import SparseDDP


class SparseDDPStrategy(SparseDDP, DDPStrategy, lightning="pytorch_lightning"):
    """`SparseDDP` for this namespace."""


class AutoDDPStrategy(AutoDDP, SparseDDP, DDPStrategy, lightning="pytorch_lightning"):
    """`AutoDDP` for this namespace."""


class SparseHSDPStrategy(SparseHSDP, ModelParallelStrategy, lightning="pytorch_lightning"):
    """`SparseHSDP` for this namespace."""


class AutoHSDPStrategy(AutoHSDP, SparseHSDP, ModelParallelStrategy, lightning="pytorch_lightning"):  # type: ignore[misc]
    """`AutoHSDP` for this namespace."""


class FabricSparseDDPStrategy(FabricSparseDDP, FabricDDPStrategy, lightning="pytorch_lightning"):
    """`FabricSparseDDP` for this namespace."""


class FabricSparseHSDPStrategy(FabricSparseHSDP, FabricModelParallelStrategy, lightning="pytorch_lightning"):
    """`FabricSparseHSDP` for this namespace."""


SparseDDPStrategy.register_strategies(StrategyRegistry)
AutoDDPStrategy.register_strategies(StrategyRegistry)
SparseHSDPStrategy.register_strategies(StrategyRegistry)
AutoHSDPStrategy.register_strategies(StrategyRegistry)
FabricSparseDDPStrategy.register_strategies(STRATEGY_REGISTRY)
FabricSparseHSDPStrategy.register_strategies(STRATEGY_REGISTRY)
