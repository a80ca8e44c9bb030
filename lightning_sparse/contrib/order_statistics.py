"""CoordinateMedian and TrimmedMean: a few ranks with wrong values, however large, cannot move the result far."""

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
    """The mean of the middle ones of the ranks' values, coordinate by coordinate.

    1. Each rank sends its values of region r of the segment to rank r.
    2. The owner of a region sorts the P values of each coordinate, drops as many at either end as `dropped` says, and
       takes the mean of the others, in fp64: equal values come back exactly.
    3. All gather the results.

    So 2d(P − 1)/P words are sent, as by dense all-reduce, where an all-gather of all values takes d(P − 1).
    """

    averages = False  # the mean that would take its place is what one rank can move at will
    shards_segment = True

    @abc.abstractmethod
    def dropped(self, size: int) -> int:
        """Return how many of `size` values are left out at either end; at least one remains."""

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

    def messages(self, size: int) -> int:
        return 2 * (size - 1)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Identity)


@dataclass(frozen=True)
class CoordinateMedian(OrderStatistic):
    """The median of each coordinate over the ranks; of an even number the mean of the middle two.

    Yin et al. 2018, arXiv 1803.01498. It lies between values of honest ranks as long as those are the majority.
    """

    def dropped(self, size: int) -> int:
        return (size - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(OrderStatistic):
    """The mean of each coordinate over the ranks, without the ⌊trim · P⌋ largest and as many smallest values.

    Yin et al. 2018, arXiv 1803.01498. With wrong values on no more ranks than are dropped at one end, it lies between
    values of honest ranks. Where ⌊trim · P⌋ is 0, as with the default and P below 4, it is the plain mean.

    Attributes:
        trim: β, the share of the ranks that is left out at either end, in [0, 0.5).
    """

    trim: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "trim", check("trim", self.trim, "TrimmedMean"))

    def dropped(self, size: int) -> int:
        return share_of(self.trim, size)


def share_of(share: float, size: int) -> int:
    """Return ⌊share · size⌋ of the number below 1/2 that the user wrote, be it 0.29 or 1/3.

    A binary one is less by up to 2⁻⁵³ of it. What is added for that may not make a half of the last one below 1/2.
    """
    return min(int(Fraction(share) * size * (1 + Fraction(1, 1 << 52))), (size - 1) // 2)


def mean_of_middle(values: Tensor, dropped: int) -> Tensor:
    """Return the mean over the first dimension of `values`, (P, n) fp32, without the ends: (n), fp64.

    Args:
        values: left as they are.
        dropped: how many of P are left out at either end, less than half of them.
    """
    rows = list(values)
    # Odd-even transposition: after P rounds of neighbours put in order all are. Four times as fast as `sort` for P = 8
    # on the CPU, without its indices; and a NaN of any row ends in the result.
    for start in range(len(rows) if dropped else 0):
        for i in range(start % 2, len(rows) - 1, 2):
            rows[i : i + 2] = torch.minimum(*rows[i : i + 2]), torch.maximum(*rows[i : i + 2])
    kept = rows[dropped : len(rows) - dropped]
    total: Tensor = kept[0].double()
    for row in kept[1:]:
        total.add_(row)
    return total / len(kept)
