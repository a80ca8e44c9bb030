"""Aggregators: every rank's `u` to one result, bit-identical on all ranks, and what of mine went into it."""

from __future__ import annotations

import abc

from torch import Tensor

from lightning_sparse.comm import Comm
from lightning_sparse.compressors.base import Agreed, Compressor, Payload
from lightning_sparse.context import Context, Entry
from lightning_sparse.layout import Segment


class Aggregator(abc.ABC):
    """Turns the `u` of all ranks into their mean, or another agreed result."""

    entries: tuple[Entry, ...] = ()
    """What it keeps in the segment's state."""

    sharing: int = 1
    """How many ranks use one network card and divide a segment among them."""

    @abc.abstractmethod
    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        """Exchange.

        Args:
            u: this rank's compensated gradient, 1-D fp32. May be overwritten where `compressor` sends it as it is.

        Returns:
            The agreed result, equal to the last bit on all ranks, and what of `u` went into it, as a payload of
            `compressor`: the memory keeps the rest.
        """

    @abc.abstractmethod
    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        """Return how many bytes a rank sends for a segment among `size` ranks, without counts and headers."""

    @abc.abstractmethod
    def rounds(self, size: int) -> int:
        """Return how many messages a segment's exchange takes one after the other, among `size` ranks."""

    def supports(self, compressor: Compressor) -> bool:
        """Return whether the payloads of `compressor` can be aggregated this way."""
        return True

    def check_size(self, size: int) -> None:  # noqa: B027
        """Raise ValueError unless it works among `size` ranks."""
