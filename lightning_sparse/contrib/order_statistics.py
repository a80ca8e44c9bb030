"""CoordinateMedian and TrimmedMean: a few ranks cannot move the result far, regardless of their values."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Identity, Update
from lightning_sparse.context import Context
from lightning_sparse.contrib.options import check
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.launch import at_a_time
from lightning_sparse.layout import Segment


class OrderStatistic(Aggregator[Identity]):
    """The mean of the middle values over the ranks, for each coordinate.

    1. Each rank sends its values of region r of the segment to rank r.
    2. The owner of a region sorts the P values of each coordinate, and drops `dropped` values at either end. It
       averages the others in fp64, so that equal values give exactly this value.
    3. All ranks gather the results.

    A rank sends 2d(P − 1)/P words, like a dense all-reduce. An all-gather of all values would take d(P − 1) words.
    """

    averages = False  # a dense mean must not replace it, because one rank can move a mean arbitrarily
    rounds = 2
    shards_segment = True

    @abc.abstractmethod
    def dropped(self, size: int) -> int:
        """Return the number of values to drop at either end of `size` values; at least one value remains."""

    def __call__(self, u: Tensor, compressor: Identity, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        size, numel = exchange.size, u.numel()
        _, applied = exchange.compress(u, compressor)
        width = -(-numel // size)
        regions = torch.nn.functional.pad(u, (0, size * width - numel)).view(size, width)
        (received,) = exchange.all_to_all((regions,))

        result, each = torch.empty_like(received[0]), max(1, at_a_time(u) // size)
        for start in range(0, width, each):
            place = result[start : start + each]
            place.copy_(mean_of_middle(received[:, start : start + each], self.dropped(size)))
        (results,) = exchange.all_gather((result,))
        return results.reshape(-1)[:numel], applied

    def nbytes(self, compressor: Identity, segment: Segment, density: float | None, size: int) -> float:
        return 2 * (size - 1) * 4 * -(-segment.numel // size)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Identity)


@dataclass(frozen=True)
class CoordinateMedian(OrderStatistic):
    """The median of each coordinate over the ranks; for an even number of ranks, the mean of the middle two.

    Yin et al. 2018, arXiv 1803.01498. If honest ranks are the majority, it lies between values of honest ranks.
    """

    def dropped(self, size: int) -> int:
        return (size - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(OrderStatistic):
    """The mean of each coordinate over the ranks, without the ⌊trim · P⌋ largest and the ⌊trim · P⌋ smallest values.

    Yin et al. 2018, arXiv 1803.01498. If at most ⌊trim · P⌋ ranks have wrong values, it lies between values of honest
    ranks. If ⌊trim · P⌋ is 0, as with the default and P below 4, it is the plain mean.

    Attributes:
        trim: β, the share of ranks that is dropped at either end, in [0, 0.5).
    """

    trim: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "trim", check("trim", self.trim, "TrimmedMean"))

    def dropped(self, size: int) -> int:
        return share_of(self.trim, size)


def share_of(share: float, size: int) -> int:
    """Return ⌊share · size⌋ for the number below 1/2 that the user wrote, such as 0.29 or 1/3.

    Its binary representation may be smaller, by up to 2⁻⁵³ of the number. The correction for this must not turn the
    largest number below 1/2 into 1/2.
    """
    return min(int(Fraction(share) * size * (1 + Fraction(1, 1 << 52))), (size - 1) // 2)


def mean_of_middle(values: Tensor, dropped: int) -> Tensor:
    """Return the mean over the first dimension of `values` without the ends, fp64 (n).

    Args:
        values: fp32 (P, n); not modified.
        dropped: number of values to drop at either end, less than half of P.
    """
    rows = list(values)
    # Odd-even transposition sort: P rounds of ordering neighbours sort all rows. For P = 8 on the CPU it is 4× faster
    # than `sort`, which also returns indices. A NaN of any row remains in the result.
    for start in range(len(rows) if dropped else 0):
        for i in range(start % 2, len(rows) - 1, 2):
            rows[i : i + 2] = torch.minimum(*rows[i : i + 2]), torch.maximum(*rows[i : i + 2])
    kept = rows[dropped : len(rows) - dropped]
    total: Tensor = kept[0].double()
    for row in kept[1:]:
        total.add_(row)
    return total / len(kept)
