"""MajorityVote: the sign that most ranks sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.aggregators.mean import Mean
from lightning_sparse.compressors.base import Compressor, Update
from lightning_sparse.compressors.sign import Sign
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange


@dataclass(frozen=True)
class MajorityVote(Mean):
    """sign(Σ sign(u)) over the ranks, 0 on a tie (Bernstein et al. 2019, arXiv 1810.05291)."""

    averages = False

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        mean, applied = super().__call__(u, compressor, exchange, ctx)
        assert isinstance(mean, Tensor)
        return mean.sign_(), applied

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sign)
