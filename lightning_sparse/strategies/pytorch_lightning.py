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


class SparseDDPStrategy(SparseDDP, DDPStrategy):
    """`SparseDDP` for this namespace."""

    __doc__ = SparseDDP.__doc__
    _namespace = "pytorch_lightning"


class AutoDDPStrategy(AutoDDP, SparseDDP, DDPStrategy):
    """`AutoDDP` for this namespace."""

    __doc__ = AutoDDP.__doc__
    _namespace = "pytorch_lightning"


class SparseHSDPStrategy(SparseHSDP, ModelParallelStrategy):
    """`SparseHSDP` for this namespace."""

    __doc__ = SparseHSDP.__doc__
    _namespace = "pytorch_lightning"


class AutoHSDPStrategy(AutoHSDP, SparseHSDP, ModelParallelStrategy):  # type: ignore[misc]
    """`AutoHSDP` for this namespace."""

    __doc__ = AutoHSDP.__doc__
    _namespace = "pytorch_lightning"


class FabricSparseDDPStrategy(FabricSparseDDP, FabricDDPStrategy):
    """`FabricSparseDDP` for this namespace."""

    __doc__ = FabricSparseDDP.__doc__
    _namespace = "pytorch_lightning"


class FabricSparseHSDPStrategy(FabricSparseHSDP, FabricModelParallelStrategy):
    """`FabricSparseHSDP` for this namespace."""

    __doc__ = FabricSparseHSDP.__doc__
    _namespace = "pytorch_lightning"


SparseDDPStrategy.register_strategies(StrategyRegistry)
AutoDDPStrategy.register_strategies(StrategyRegistry)
SparseHSDPStrategy.register_strategies(StrategyRegistry)
AutoHSDPStrategy.register_strategies(StrategyRegistry)
FabricSparseDDPStrategy.register_strategies(STRATEGY_REGISTRY)
FabricSparseHSDPStrategy.register_strategies(STRATEGY_REGISTRY)
