"""GaussianK: the entries above a threshold that would leave k of them if `u` were Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

from torch import Tensor

from lightning_sparse.compressors.base import Sparsifier, selection_bound
from lightning_sparse.compressors.formats import IndexFormat, ValueFormat
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.scan import Scan
from lightning_sparse.kernels.select import block_size, magnitude_bits, topk_indices
from lightning_sparse.kernels.threshold import gaussian_indices
from lightning_sparse.layout import Segment

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
        value_format: "float32", "bfloat16" or "int8"; what rounding takes stays in the residual.
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

    def capacity(self, numel: int, density: float | None = None) -> int:
        k = self.target(numel, density)
        return min(numel, 12 * k if self.refine == "paper" else selection_bound(k))

    def scan(self, numel: int, density: float | None = None) -> Scan | None:
        if self.refine == "paper":
            return None
        return Scan(numel, block_size(numel, self.target(numel, density)), moments=True)

    def select(self, u: Tensor, segment: Segment | None = None, ctx: Context | None = None) -> Tensor:
        """Return the int64 indices, ascending, of the entries of `u` (1-D, fp32) above the threshold."""
        ctx = ctx or Context()
        chosen = self.choose(u, segment, ctx)
        return chosen[chosen < u.numel()] if uses_triton(u) else chosen

    def choose(self, u: Tensor, segment: Segment | None, ctx: Context) -> Tensor:
        k, numel = self.target(u.numel(), ctx.density), u.numel()
        if k == numel:
            return topk_indices(u, k)
        z = NormalDist().inv_cdf(1 - k / numel / 2)
        if self.refine == "bracket":
            return gaussian_indices(u, k, z, ctx.scan)
        indices = _published_loop(u, k, z)
        room = self.capacity(numel, ctx.density)
        if 0 < indices.numel() <= room:
            return indices
        # Nothing is above the threshold of a `u` with a NaN or an infinity, whose moments are NaN.
        return topk_indices(u, room if indices.numel() else k)


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
