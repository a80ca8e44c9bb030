"""MSTopK: k entries selected with a threshold from a binary search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.encoding import IndexFormat, ValueFormat
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.candidates import keep_indices, largest_entries, largest_mask, sampled
from lightning_sparse.contrib.options import check
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.select import block_maxima, block_size, ensure_stats, magnitude_bits, topk_indices

SAMPLE = 1 << 16
"""Number of magnitudes for the mean."""


@dataclass(frozen=True)
class MSTopK(Sparsifier):
    """Sends all entries above one threshold, and fills up to k with entries between it and a lower threshold.

    Shi et al. 2021, arXiv 2010.10458. Thresholds are m + r(M − m), with m and M the mean and the largest of |u|. The
    paper finds r by N halvings of [0, 1]. It keeps the closest threshold that leaves at most k entries, and the closest
    one that leaves more. From the entries between the two it sends a run with a random start.

    After N rounds the two thresholds are neighbours on a grid of 2^N steps, and the entry of rank k + 1 lies between
    them. This implementation computes them from that entry. Block maxima find it faster than N passes could count. The
    grid starts at m, here the mean of 65,536 to 196,607 evenly spaced magnitudes. If more than 9k/8 entries reach the
    lower threshold (because they are equal, or because N is small), the k largest entries are sent.

        >>> import torch
        >>> MSTopK(density=0.4).select(torch.tensor([1.0, -3.0, 0.0, 2.0, -0.5]))
        tensor([1, 3])

    Attributes:
        density: fraction of entries to send, in (0, 1]; at least one is sent.
        rounds: N, 1 to 50. The two thresholds are (M − m) / 2^N apart.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.

    Raises:
        ValueError: a value out of range.
    """

    density: float = 0.001
    rounds: int = 30
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rounds", check("rounds", self.rounds, "MSTopK"))

    exposes_nonfinite = True  # with a NaN or an infinity there is no grid, and the k largest are sent

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        return block_maxima(numel, self.count(numel, density))

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        numel = u.numel()
        if k == numel:
            return topk_indices(u, k)
        bits = magnitude_bits("MSTopK", u)
        seed = ctx.key(shared=False) >> 1  # fits into int64
        # One more than the maximum: it includes the entry of rank k + 1, and reveals a band that is too wide.
        indices, magnitudes = largest_entries(bits, 9 * k // 8 + 1, ensure_stats(ctx.stats, u, block_size(numel, k)))
        mean = sampled(bits, SAMPLE, seed).view(torch.float32).mean(dtype=torch.float64)
        exact = largest_mask(magnitudes, k)
        keep = self._around_the_grid(magnitudes.view(torch.float32).double(), exact, mean, k, seed)
        return keep_indices(indices, keep, k, numel)

    def _around_the_grid(self, x: Tensor, exact: Tensor, mean: Tensor, k: int, seed: int) -> Tensor:
        """Return which of the largest magnitudes to send, exactly k.

        Args:
            x: the magnitudes, fp64, 1-D.
            exact: mask of the k largest; returned if no grid separates them.
            mean: of all magnitudes, the first point of the grid.
            k: how many to send, below len(x).
            seed: determines the start of the run.
        """
        steps = 2**self.rounds
        after = torch.where(exact, -math.inf, x).amax()  # of rank k + 1
        width = (x.amax() - mean) / steps
        point = ((after - mean) / width).floor().clamp(0, steps - 1)
        # The ends of the grid are not counted: nothing is above the last point, and everything above the first.
        upper = torch.where(point == steps - 1, math.inf, mean + width * (point + 1))
        lower = torch.where(point == 0, 0.0, mean + width * point)
        above = (x >= upper) & (x > after)
        band = (x >= lower) & above.logical_not()
        missing, reach = k - above.sum(), above.sum() + band.sum()
        start = torch.remainder(seed, (reach - k + 1).clamp(min=1))
        place = band.cumsum(0) - 1
        run = band & (place >= start) & (place < start + missing)
        return torch.where((reach >= k) & (reach <= 9 * k // 8), above | run, exact)
