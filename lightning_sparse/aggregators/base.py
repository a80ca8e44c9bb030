"""Aggregators: combine the `u` of all ranks into one update, bit-identical on all ranks.

update, applied = aggregator(u, compressor, exchange, ctx)   # the memory keeps u - applied
"""

from __future__ import annotations

import abc
from typing import Generic, TypeGuard, TypeVar

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Update
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.exchange import Exchange
from lightning_sparse.layout import Segment

C = TypeVar("C", bound=Compressor)


class Aggregator(abc.ABC, Generic[C]):
    """Combines the `u` of all ranks into their mean, or into another result that all ranks agree on."""

    state: tuple[StateSpec, ...] = ()
    """Tensors that it keeps in the segment's state."""

    averages: bool = True
    """Whether the result approximates the mean. If so, a dense mean may replace the method if it sends fewer bytes."""

    applies_all_sent: bool = False
    """Whether the result contains all entries that a rank sends. If so, it is known before the exchange."""

    shards_segment: bool = False
    """Whether ranks divide a segment among them. If so, the compressor cannot use statistics of the whole `u`."""

    rounds: int = 1
    """Number of times that a rank sends a message to each other rank, one after the other."""

    ranks_per_link: int = 1
    """Number of ranks that share a network card and divide a segment among them."""

    def node_of(self, rank: int) -> range:
        """Return the ranks that share a network card with a rank, itself among them."""
        first = rank // self.ranks_per_link * self.ranks_per_link
        return range(first, first + self.ranks_per_link)

    @abc.abstractmethod
    def __call__(self, u: Tensor, compressor: C, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        """Compress, exchange and combine.

        Args:
            u: this rank's compensated gradient, 1-D fp32. It may be overwritten if `compressor` sends it unchanged.
            compressor: the compressor of the method.
            exchange: the exchange of this segment.
            ctx: the segment, its state, and the settings of this step.

        Returns:
            The update, bit-identical on all ranks, and the part of this rank's `u` that went into it.
        """

    @abc.abstractmethod
    def nbytes(self, compressor: C, segment: Segment, density: float | None, size: int) -> float:
        """Return the number of bytes that a rank sends for a segment with `size` ranks, without counts and headers."""

    def messages(self, size: int) -> int:
        """Return the number of consecutive messages in a segment's exchange with `size` ranks."""
        return self.rounds * (size - 1)

    def capacity(self, compressor: C, numel: int, density: float | None, size: int) -> int:
        """Return the largest number of entries in the result of `numel` elements with `size` ranks, if it is sparse."""
        assert isinstance(compressor, Sparsifier)
        return size * compressor.capacity(numel, density)

    def supports(self, compressor: Compressor) -> bool:
        """Return whether this aggregator supports the payloads of `compressor`."""
        return True

    def check_size(self, size: int) -> None:
        """Raise ValueError unless the aggregator supports `size` ranks."""


def sends_entries(compressor: Compressor) -> TypeGuard[Sparsifier]:
    """Return whether each rank selects its entries independently and sends indices and values."""
    return isinstance(compressor, Sparsifier) and not compressor.summable
