"""GaussianK: selects the entries above a threshold that k entries would exceed if `u` were Gaussian."""

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
    authors' code. Real gradients have heavier tails than a Gaussian, so the threshold is refined:

    - "bracket", the default, searches between a threshold that is too low and one that is too high. It stops when 2k/3
      to 4k/3 entries are left. If ties or clusters do not allow that, it selects the k largest.
    - "paper" is the published loop, for reproduction. It tests at most three thresholds. Below 2k/3 entries it halves
      the threshold, and above 4k/3 it multiplies the threshold by 1.5. The loop does not use earlier tests: on Laplace
      input at density 0.005 it finds 3.78k, then 0.52k, then 10.19k entries, and sends the last. Therefore a payload
      has room for 12k entries. If the loop finds more, the largest 12k are sent; if it finds none, the largest k.

    Attributes:
        density: fraction ρ of entries to send, in (0, 1]; at least one is sent.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.
        refine: "bracket" or "paper", the search for a threshold that leaves neither too many entries nor too few.
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

    @property
    def depends_on_step(self) -> bool:  # type: ignore[override]
        """Whether the host waits for the device."""
        return self.refine == "paper"

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
        # If `u` has a NaN or an infinity, its moments are NaN, and no entry exceeds the threshold.
        return topk_indices(u, capacity if indices.numel() else k)


def _published_loop(u: Tensor, k: int, z: float) -> Tensor:
    """Return the indices that the published loop finds last."""
    magnitude_bits("GaussianK", u)  # raises an error unless `u` is 1-D fp32
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
