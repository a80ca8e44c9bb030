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


class SparseDDPStrategy(SparseDDP, DDPStrategy):  # type: ignore[misc]  # the same base under Lightning's other name
    """`SparseDDP` for this namespace."""

    __doc__ = SparseDDP.__doc__
    _namespace = "lightning.pytorch"


class AutoDDPStrategy(AutoDDP, SparseDDP, DDPStrategy):  # type: ignore[misc]
    """`AutoDDP` for this namespace."""

    __doc__ = AutoDDP.__doc__
    _namespace = "lightning.pytorch"


class SparseHSDPStrategy(SparseHSDP, ModelParallelStrategy):  # type: ignore[misc]
    """`SparseHSDP` for this namespace."""

    __doc__ = SparseHSDP.__doc__
    _namespace = "lightning.pytorch"


class AutoHSDPStrategy(AutoHSDP, SparseHSDP, ModelParallelStrategy):  # type: ignore[misc]
    """`AutoHSDP` for this namespace."""

    __doc__ = AutoHSDP.__doc__
    _namespace = "lightning.pytorch"


class FabricSparseDDPStrategy(FabricSparseDDP, FabricDDPStrategy):  # type: ignore[misc]
    """`FabricSparseDDP` for this namespace."""

    __doc__ = FabricSparseDDP.__doc__
    _namespace = "lightning.pytorch"


class FabricSparseHSDPStrategy(FabricSparseHSDP, FabricModelParallelStrategy):  # type: ignore[misc]
    """`FabricSparseHSDP` for this namespace."""

    __doc__ = FabricSparseHSDP.__doc__
    _namespace = "lightning.pytorch"


SparseDDPStrategy.register_strategies(StrategyRegistry)
AutoDDPStrategy.register_strategies(StrategyRegistry)
SparseHSDPStrategy.register_strategies(StrategyRegistry)
AutoHSDPStrategy.register_strategies(StrategyRegistry)
FabricSparseDDPStrategy.register_strategies(STRATEGY_REGISTRY)
FabricSparseHSDPStrategy.register_strategies(STRATEGY_REGISTRY)
