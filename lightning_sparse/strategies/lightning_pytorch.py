"""The strategies for `import lightning.pytorch` and `import lightning.fabric`."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_sparse.strategies.auto import AutoDDP
from lightning_sparse.strategies.auto_hsdp import AutoHSDP
from lightning_sparse.strategies.fabric import FabricSparseDDP
from lightning_sparse.strategies.fabric_hsdp import FabricSparseHSDP
from lightning_sparse.strategies.hsdp import SparseHSDP
from lightning_sparse.strategies.sparse_ddp import SparseDDP


class SparseDDPStrategy(SparseDDP, DDPStrategy, lightning="lightning.pytorch"):  # type: ignore[misc]  # the same base under Lightning's other name
    """`SparseDDP` for this namespace."""


class AutoDDPStrategy(AutoDDP, SparseDDP, DDPStrategy, lightning="lightning.pytorch"):  # type: ignore[misc]
    """`AutoDDP` for this namespace."""


class SparseHSDPStrategy(SparseHSDP, ModelParallelStrategy, lightning="lightning.pytorch"):  # type: ignore[misc]
    """`SparseHSDP` for this namespace."""


class AutoHSDPStrategy(AutoHSDP, SparseHSDP, ModelParallelStrategy, lightning="lightning.pytorch"):  # type: ignore[misc]
    """`AutoHSDP` for this namespace."""


class FabricSparseDDPStrategy(FabricSparseDDP, FabricDDPStrategy, lightning="lightning.pytorch"):  # type: ignore[misc]
    """`FabricSparseDDP` for this namespace."""


class FabricSparseHSDPStrategy(FabricSparseHSDP, FabricModelParallelStrategy, lightning="lightning.pytorch"):  # type: ignore[misc]
    """`FabricSparseHSDP` for this namespace."""


SparseDDPStrategy.register_strategies(StrategyRegistry)
AutoDDPStrategy.register_strategies(StrategyRegistry)
SparseHSDPStrategy.register_strategies(StrategyRegistry)
AutoHSDPStrategy.register_strategies(StrategyRegistry)
FabricSparseDDPStrategy.register_strategies(STRATEGY_REGISTRY)
FabricSparseHSDPStrategy.register_strategies(STRATEGY_REGISTRY)
