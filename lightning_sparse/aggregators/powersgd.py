"""PowerSGD: the factors of matrices of low rank, summed by all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Update
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class PowerSGD(Aggregator[LowRank]):
    """P̂ P̂ᵀ M̄ with M̄ the mean of the ranks' matrices (Vogels et al. 2019, arXiv 1905.13727).

    With M this rank's matrix and Q₀ as in `LowRank`:

    1. All-reduce P = mean of M Q₀, and beside it the mean of what travels exactly.
    2. Every rank makes the same basis P̂ of P, matrix by matrix.
    3. All-reduce Q = mean of Mᵀ P̂. The result is P̂ Qᵀ; Q is kept for the next step.

    Applied is P̂ P̂ᵀ M, this rank's own share of the result, so Σ u = P · result + Σ residuals. To take out the result
    instead, as the authors' code does, conserves as well and gives the same results. But then the differences between
    ranks never leave the residuals: they grow and cost digits, and no longer cancel if a rank misses a step.

    Results are equal to the last bit on all ranks: on CPUs of any kind, and on GPUs of one kind, where bases are
    cuSOLVER's and products cuBLAS's.
    """

    def __call__(self, u: Tensor, compressor: LowRank, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        products, exact = compressor.left_products(u, ctx)
        exchange.check_finite(u, products, exact)
        exchange.agree()
        # Divided before the sums, so that they stay in range.
        means = exchange.all_reduce(torch.cat([products, exact]).div_(exchange.size))
        product, mean = means.split([products.numel(), exact.numel()])
        left = compressor.orthonormal(product, ctx)
        own = compressor.right_products(u, left, ctx)
        right = own / exchange.size
        if right.numel():
            exchange.check_sum(exchange.all_reduce(right))
        ctx.state["right"] = right
        return compressor.decode((left, right, mean), ctx), compressor.decode((left, own, exact), ctx)

    def nbytes(self, compressor: LowRank, segment: Segment, density: float | None, size: int) -> float:
        return 2 * compressor.nbytes(segment, density) * (size - 1) / size

    def messages(self, size: int) -> int:
        return 5 * (size - 1)  # headers, and two rings of all-reduce

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, LowRank)
