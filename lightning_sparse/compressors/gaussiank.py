"""GaussianK: selects the entries above a threshold that k entries would exceed if `u` were Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from lightning_sparse.compressors.encoding import IndexFormat, ValueFormat
from lightning_sparse.compressors.sparsifier import Sparsifier, selection_bound
from lightning_sparse.context import Context
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.select import block_size, topk_indices
from lightning_sparse.kernels.threshold import gaussian_indices


@dataclass(frozen=True)
class GaussianK(Sparsifier):
    """Sends the entries whose magnitude exceeds a threshold taken from the mean μ and deviation σ of `u`.

    Shi et al. 2019, arXiv 1911.08772. The first threshold is |μ| + zσ with z = Φ⁻¹(1 - ρ/2), two-sided as in the
    authors' code. Real gradients have heavier tails than a Gaussian, so the threshold is refined. A search between
    a threshold that is too low and one that is too high stops when 2k/3 to 4k/3 entries are left. If ties or clusters
    do not allow that, the k largest are selected. `lightning_sparse.contrib` has the published search.

    Attributes:
        density: fraction ρ of entries to send, in (0, 1]; at least one is sent.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.
    """

    density: float = 0.001
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    depends_on_step = False
    exposes_nonfinite = True  # the moments of a u with a NaN or an infinity are NaN; then the k largest are sent

    def capacity(self, numel: int, density: float | None = None) -> int:
        return min(numel, selection_bound(self.count(numel, density)))

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        return BlockStats(numel, block_size(numel, self.count(numel, density)), moments=True)

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        numel = u.numel()
        if k == numel:
            return topk_indices(u, k)
        return self.find(u, k, NormalDist().inv_cdf(1 - k / numel / 2), ctx)

    def find(self, u: Tensor, k: int, z: float, ctx: Context) -> Tensor:
        """Return the indices of about k entries, below `len(u)`; the first threshold is μ + zσ."""
        return gaussian_indices(u, k, z, ctx.stats)
