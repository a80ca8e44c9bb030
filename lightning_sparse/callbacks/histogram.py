"""Computes histograms and moments of many numbers in one pass, without prior knowledge of their range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lightning_sparse.callbacks.base import chunks

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BINS = 60
"""Number of bins of a written histogram; TensorBoard draws 30."""

REACH = 4.0
"""Half-width of a written histogram, in standard deviations."""

ROUNDING = 64 * 2**-53
"""Relative error of the moments' differences: each is a sum of at most 14 moments, with errors of a few 2⁻⁵³ each."""

SMALL = 0.01
"""Largest error of the skewness and of the kurtosis. If it may be larger, they are NaN."""


@dataclass(frozen=True)
class Summary:
    """Moments and a histogram of many numbers.

    Attributes:
        numel: count of the numbers.
        sums: sums of their first and second powers.
        mean: arithmetic mean.
        std: population standard deviation (the divisor is the count).
        skewness: third standardised moment; NaN if the standard deviation is below about 1e-4 of the mean.
        excess_kurtosis: fourth standardised moment minus 3; NaN if it is below about 1e-3 of the mean.
        ks_distance: Kolmogorov-Smirnov distance to the normal distribution of this mean and standard deviation; NaN if
            all numbers are equal.
        edges: ascending edges of the histogram's bins.
        counts: count in each bin; fractional if an edge divides a bin of `Distribution`.
    """

    numel: int
    sums: tuple[float, float]
    mean: float
    std: float
    skewness: float
    excess_kurtosis: float
    ks_distance: float
    edges: NDArray[np.float64]
    counts: NDArray[np.float64]

    def scalars(self, tag: str) -> dict[str, float]:
        """Return the statistics under their tags."""
        return {f"{tag}_{key}": getattr(self, key) for key in ("mean", "std", "skewness", "excess_kurtosis")} | {
            f"{tag}_ks_distance": self.ks_distance
        }

    def write(self, writer: SummaryWriter, tag: str, step: int) -> None:
        """Write the histogram to TensorBoard."""
        low, *limits = self.edges.tolist()
        total, squares = self.sums
        writer.add_histogram_raw(
            tag, low, limits[-1], self.numel, total, squares, limits, self.counts.tolist(), global_step=step
        )

    def standardised(self) -> Summary:
        """Return the summary of (x − mean) / std for the same numbers x."""
        edges = (self.edges - self.mean) / self.std
        return replace(self, sums=(0.0, float(self.numel)), mean=0.0, std=1.0, edges=edges)

    def normal_threshold(self, count: int) -> float:
        """Return the magnitude that `count` of the numbers would exceed if they were normally distributed."""
        return abs(self.mean) + NormalDist().inv_cdf(1 - count / (2 * self.numel)) * self.std


class Distribution:
    """Counts of a fine histogram and sums of powers. Distributions can be merged.

    A number's bin is the upper 16 bits of its fp32 representation: sign, exponent and seven bits of the mantissa. So
    the range need not be known in advance. From 9e-41 to 3e38 all bins have a relative width of 1/128 or less.
    """

    def __init__(self) -> None:
        self.numel = 0
        self.counts: Tensor | None = None
        self.sums: Tensor | None = None

    def add(self, parts: Sequence[Tensor], scale: float = 1.0) -> None:
        """Add the elements of 1-D tensors of any floating dtype, multiplied by `scale`."""
        if self.counts is None or self.sums is None:
            self.counts = torch.zeros(1 << 16, dtype=torch.int64, device=parts[0].device)
            self.sums = torch.zeros(4, dtype=torch.float64, device=parts[0].device)
        for chunk in chunks(parts):
            part = chunk.float() if scale == 1 else chunk.float() * scale
            # Arithmetic shift: -32768 is minus zero, -1 the NaN of largest magnitude, 0 plus zero.
            self.counts += torch.bincount((part.view(torch.int32) >> 16).add_(1 << 15), minlength=1 << 16)
            first = part.double()
            second = first * first
            self.sums += torch.stack([first.sum(), second.sum(), first.dot(second), second.dot(second)])
            self.numel += chunk.numel()

    def merge(self, other: Distribution) -> None:
        """Add the counts and sums of another distribution."""
        if self.counts is None or self.sums is None:
            self.counts, self.sums = other.counts, other.sums
        elif other.counts is not None and other.sums is not None:
            self.counts += other.counts
            self.sums += other.sums
        self.numel += other.numel

    def summary(self) -> Summary | None:
        """Return the summary; None if there are no numbers or if any number is not finite."""
        if self.counts is None or self.sums is None or self.numel == 0:
            return None
        sums = self.sums.tolist()
        if not all(map(math.isfinite, sums)):
            return None
        mean, second, third, fourth = (power / self.numel for power in sums)
        variance = second - mean**2
        # A variance below the rounding error of fp64 means that all numbers are equal.
        std = math.sqrt(variance) if variance > 1e-14 * second else 0.0
        counts = self.counts.cpu().numpy()
        # Sort the bins in ascending order: the negative number of largest magnitude comes first.
        counts = np.concatenate([counts[: 1 << 15][::-1], counts[1 << 15 :]])
        filled = counts.nonzero()[0]
        lefts, rights = _EDGES[filled], _EDGES[filled + 1]
        below = np.concatenate([[0], counts[filled].cumsum()]) / self.numel
        low, high = max(lefts[0], mean - REACH * std), min(rights[-1], mean + REACH * std)
        skewness = excess_kurtosis = distance = math.nan
        if std > 0:
            # Differences of powers lose digits if the spread is small beside the mean.
            if ROUNDING * abs(mean / std) ** 3 < SMALL:
                skewness = (third - 3 * mean * second + 2 * mean**3) / std**3
            if ROUNDING * (mean / std) ** 4 < SMALL:
                excess_kurtosis = (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / std**4 - 3
            left, right = special.ndtr((lefts - mean) / std), special.ndtr((rights - mean) / std)
            # The largest difference between the distribution functions is at an edge of a non-empty bin.
            distance = float(max(np.abs(left - below[:-1]).max(), np.abs(right - below[1:]).max()))
        else:
            low, high = lefts[0], rights[-1]
        edges = np.linspace(low, high, BINS + 1)
        # Assume that values are uniform within a fine bin.
        places = np.stack([lefts, rights], 1).reshape(-1)
        reached = np.interp(edges, places, np.stack([below[:-1], below[1:]], 1).reshape(-1))
        reached[0], reached[-1] = 0, 1
        return Summary(
            self.numel,
            (sums[0], sums[1]),
            mean,
            std,
            skewness,
            excess_kurtosis,
            distance,
            edges,
            np.diff(reached) * self.numel,
        )


def _edges() -> NDArray[np.float64]:
    infinity = 0x7F80  # the upper half of its bits; NaN have larger ones, and their bins stay empty
    finite = (np.arange(infinity, dtype=np.int32) << 16).view(np.float32).astype(np.float64)
    magnitudes = np.append(finite, np.full((1 << 15) + 1 - infinity, 2.0**128))
    return np.concatenate([-magnitudes[:0:-1], magnitudes])


_EDGES = _edges()
"""The 65,537 edges of the fine bins, ascending."""
