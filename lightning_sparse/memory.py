"""Memories: what a rank keeps of what it did not send, and how it comes back into the next step."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors.base import Agreed, Compressor, Payload
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels import scan
from lightning_sparse.kernels.write_back import add_entries_
from lightning_sparse.layout import Segment


class Memory(abc.ABC):
    """One rank's memory of one segment; all of it lies in the state."""

    entries: tuple[Entry, ...] = ()
    """What it keeps in the segment's state."""

    keeps: bool = True
    """Whether it has a use for what rounding took; finding that out costs passes over the data."""

    needs_lr: bool = False
    """Whether it asks for `Context.lr`."""

    @abc.abstractmethod
    def compensate(self, grads: list[Tensor], segment: Segment, ctx: Context) -> Tensor:
        """Combine the gradients with what was kept.

        Args:
            grads: one 1-D gradient per parameter of the segment, of any floating dtype; left as they are. They count
                `ctx.scale` times.

        Returns:
            u, 1-D fp32 of the segment's length; it may be a buffer of the state.
        """

    @abc.abstractmethod
    def keep(
        self, u: Tensor, used: Payload, lost: Agreed | None, compressor: Compressor, segment: Segment, ctx: Context
    ) -> None:
        """Remember what of `u` was not used.

        Args:
            used: what went into the result, as a payload of `compressor`.
            lost: what rounding took from the result when it was written to 16-bit gradients; equal on all ranks, so
                every rank keeps all of it.
        """

    def gain(self, ctx: Context) -> float:
        """Return how much of `u` one unit of gradient is; the result is divided by it when it is handed out.

        Zero means that nothing moves: the step is left out and the state stays. Equal on all ranks.
        """
        return 1.0


def add_(x: Tensor, term: Agreed | None) -> None:
    """Add a result, dense or in entries, to `x`, in place."""
    if isinstance(term, Tensor):
        x.add_(term)
    else:
        for indices, values in term or ():
            add_entries_(x, indices, values)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forgets what was not sent."""

    keeps = False

    entries = (Entry("u", per="scratch"),)

    def compensate(self, grads: list[Tensor], segment: Segment, ctx: Context) -> Tensor:
        u = ctx.state["u"]
        for part, grad in zip(segment.views(u), grads, strict=True):
            part.copy_(grad)
        return u if ctx.scale == 1 else u.mul_(ctx.scale)

    def keep(
        self, u: Tensor, used: Payload, lost: Agreed | None, compressor: Compressor, segment: Segment, ctx: Context
    ) -> None:
        pass


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback (Seide et al. 2014; Stich et al. 2018, arXiv 1809.07599): u = g + e, e ← u − used."""

    entries = (Entry("residual"),)

    def compensate(self, grads: list[Tensor], segment: Segment, ctx: Context) -> Tensor:
        u = ctx.state["residual"]
        # In place: the residual is u until `keep` takes out what was used.
        return scan.add_(u, segment.bounds, grads, ctx.scale, ctx.scan)

    def keep(
        self, u: Tensor, used: Payload, lost: Agreed | None, compressor: Compressor, segment: Segment, ctx: Context
    ) -> None:
        compressor.remove_(u, used, segment, ctx)
        add_(u, lost)
