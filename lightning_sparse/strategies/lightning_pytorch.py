"""The strategy for `import lightning.pytorch`."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.strategies.sparse_ddp import SparseDDP


class SparseDDPStrategy(SparseDDP, DDPStrategy):  # type: ignore[misc]  # the same base under Lightning's other name
    """`SparseDDP` for this namespace."""

    __doc__ = SparseDDP.__doc__
    _namespace = "lightning.pytorch"


SparseDDPStrategy.register_strategies(StrategyRegistry)
