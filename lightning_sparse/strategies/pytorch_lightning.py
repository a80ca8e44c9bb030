"""The strategy for `import pytorch_lightning`."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.strategies.sparse_ddp import SparseDDP


class SparseDDPStrategy(SparseDDP, DDPStrategy):
    """`SparseDDP` for this namespace."""

    __doc__ = SparseDDP.__doc__
    _namespace = "pytorch_lightning"


SparseDDPStrategy.register_strategies(StrategyRegistry)
