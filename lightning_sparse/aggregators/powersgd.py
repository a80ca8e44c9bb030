"""PowerSGD: sums the factors of low-rank matrices by all-reduce."""

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
    """Computes P̂ P̂ᵀ M̄ with the mean M̄ of the ranks' matrices (Vogels et al. 2019, arXiv 1905.13727).

    M is this rank's matrix, and Q₀ is defined in `LowRank`:

    1. All-reduce P = mean of M Q₀, together with the mean of the elements that are sent exactly.
    2. Every rank computes the same basis P̂ of P, matrix by matrix.
    3. All-reduce Q = mean of Mᵀ P̂. The result is P̂ Qᵀ, and Q is kept for the next step.

    The applied part is P̂ P̂ᵀ M, this rank's share of the result, so Σ u = P · result + Σ residuals. The authors' code
    subtracts the result instead, which also conserves the sum and gives the same results. But then the differences
    between ranks never leave the residuals. They grow and cost precision, and they no longer cancel if a rank misses a
    step.

    Results are bit-identical on all ranks if ranks use CPUs of any type, or GPUs of one type. GPUs compute bases with
    cuSOLVER and products with cuBLAS.
    """

    rounds = 5  # headers, and two rings of all-reduce

    def __call__(self, u: Tensor, compressor: LowRank, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        products, exact = compressor.left_products(u, ctx)
        exchange.check_finite(u, products, exact)
        exchange.agree()
        # Divide before the sums, so that they stay in range.
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

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, LowRank)
