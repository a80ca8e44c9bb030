"""GaussianK: the entries above a threshold that would leave k of them if `u` were Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

from torch import Tensor

from lightning_sparse.compressors.encoding import IndexFormat, ValueFormat
from lightning_sparse.compressors.sparsifier import Sparsifier, selection_bound
from lightning_sparse.context import Context
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.select import block_size, magnitude_bits, topk_indices
from lightning_sparse.kernels.threshold import gaussian_indices

Refine = Literal["bracket", "paper"]


@dataclass(frozen=True)
class GaussianK(Sparsifier):
    """Sends the entries whose magnitude exceeds a threshold taken from the mean μ and deviation σ of `u`.

    Shi et al. 2019, arXiv 1911.08772. The first threshold is μ + zσ with z = Φ⁻¹(1 - ρ/2), two-sided as in the
    authors' code. Real gradients have heavier tails than a Gaussian, so it has to be refined:

    - "bracket" keeps thresholds that are known to be too low and too high and looks in between until 2k/3 to 4k/3
      entries are left; where ties or clusters do not allow that, it selects the k largest. The default.
    - "paper" is the published loop, for reproduction: at most three tests, the threshold halved below 2k/3 entries
      and multiplied by 1.5 above 4k/3. It forgets what it has learned: on Laplace input at density 0.005 the tests see
      3.78k, 0.52k and again 10.19k entries, and that is what it sends. Therefore it has room for 12k entries; the
      largest 12k are sent where it finds more, and the largest k where it finds none.

    Attributes:
        density: fraction ρ of entries to send, in (0, 1]; at least one is sent.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.
        refine: what to do about a threshold that leaves too many or too few.
    """

    density: float = 0.001
    refine: Refine = "bracket"
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refine not in get_args(Refine):
            raise ValueError(f"GaussianK(refine={self.refine!r}): choose from {', '.join(get_args(Refine))}.")

    exposes_nonfinite = True  # the moments of a u with a NaN or an infinity are NaN; then the k largest are sent

    def capacity(self, numel: int, density: float | None = None) -> int:
        k = self.count(numel, density)
        return min(numel, 12 * k if self.refine == "paper" else selection_bound(k))

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        if self.refine == "paper":
            return None
        return BlockStats(numel, block_size(numel, self.count(numel, density)), moments=True)

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        numel = u.numel()
        if k == numel:
            return topk_indices(u, k)
        z = NormalDist().inv_cdf(1 - k / numel / 2)
        if self.refine == "bracket":
            return gaussian_indices(u, k, z, ctx.stats)
        indices = _published_loop(u, k, z)
        capacity = self.capacity(numel, ctx.density)
        if 0 < indices.numel() <= capacity:
            return indices
        # Nothing is above the threshold of a `u` with a NaN or an infinity, whose moments are NaN.
        return topk_indices(u, capacity if indices.numel() else k)


def _published_loop(u: Tensor, k: int, z: float) -> Tensor:
    """Return the indices that the published loop ends with."""
    magnitude_bits("GaussianK", u)  # refuses what is not 1-D fp32
    t = u.mean() + z * u.std()
    magnitudes = u.abs()
    for _ in range(3):
        indices = (magnitudes > t).nonzero().squeeze(1)
        if indices.numel() < 2 * k / 3:
            t = 0.5 * t
        elif indices.numel() > 4 * k / 3:
            t = 1.5 * t
        else:
            break
    return indices
