"""Aggregators: every rank's `u` to one update, bit-identical on all ranks, and the part of `u` that went into it.

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
    """Turns the `u` of all ranks into their mean, or into another result that all ranks agree on."""

    state: tuple[StateSpec, ...] = ()
    """What it keeps in the segment's state."""

    averages: bool = True
    """Whether the result approximates the mean, so that a dense mean may replace the method where it sends less."""

    applies_all_sent: bool = False
    """Whether all that a rank compresses at first goes into the result, so that it is known before others answer."""

    shards_segment: bool = False
    """Whether ranks divide a segment among them, so that statistics of all of `u` are of no use to the compressor."""

    ranks_per_link: int = 1
    """How many ranks share a network card, and divide a segment among them."""

    @abc.abstractmethod
    def __call__(self, u: Tensor, compressor: C, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        """Aggregate.

        Args:
            u: this rank's compensated gradient, 1-D fp32. May be overwritten if `compressor` sends it as it is.

        Returns:
            The update, equal to the last bit on all ranks, and the part of this rank's `u` that went into it.
        """

    @abc.abstractmethod
    def nbytes(self, compressor: C, segment: Segment, density: float | None, size: int) -> float:
        """Return how many bytes a rank sends for a segment among `size` ranks, without counts and headers."""

    @abc.abstractmethod
    def messages(self, size: int) -> int:
        """Return how many messages of a segment's exchange follow one another, among `size` ranks."""

    def capacity(self, compressor: C, numel: int, density: float | None, size: int) -> int:
        """Return how many entries the result of `numel` elements has at most among `size` ranks, if it is entries."""
        assert isinstance(compressor, Sparsifier)
        return size * compressor.capacity(numel, density)

    def supports(self, compressor: Compressor) -> bool:
        """Return whether the payloads of `compressor` can be aggregated this way."""
        return True

    def check_size(self, size: int) -> None:
        """Raise ValueError unless it works among `size` ranks."""


def sends_entries(compressor: Compressor) -> TypeGuard[Sparsifier]:
    """Return whether each rank sends entries of its own choice, indices and values."""
    return isinstance(compressor, Sparsifier) and not compressor.summable
