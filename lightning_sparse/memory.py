"""Memories: the part of the gradients that a rank keeps, and how it comes back into the next step."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors.base import Update
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.kernels.block_stats import add_with_stats_


class Memory(abc.ABC):
    """One rank's memory of one segment; all of it lies in the state."""

    state: tuple[StateSpec, ...] = ()
    """What it keeps in the segment's state."""

    error_feedback: bool = True
    """Whether u is kept: the applied part is subtracted from it, and rounding errors are added, in place."""

    @abc.abstractmethod
    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        """Combine the gradients with what was kept.

        Args:
            grads: one 1-D gradient per parameter of the segment, of any floating dtype; left as they are. They count
                `ctx.scale` times.
            ctx: the segment, its state, and block statistics to fill in.

        Returns:
            u, 1-D fp32 of the segment's length; it may be a buffer of the state.
        """

    def update(self, u: Tensor, applied: Update, ctx: Context) -> None:  # noqa: B027
        """Change the state after the exchange; with error feedback the applied part is subtracted from `u` by now."""


@dataclass(frozen=True)
class NoMemory(Memory):
    """Forgets the part that was not sent."""

    error_feedback = False
    state = (StateSpec("u", per="scratch"),)

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        u = ctx.state["u"]
        for part, grad in zip(ctx.segment.views(u), grads, strict=True):
            part.copy_(grad)
        return u if ctx.scale == 1 else u.mul_(ctx.scale)


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback (Seide et al. 2014; Stich et al. 2018, arXiv 1809.07599): u = g + e, e ← u − applied."""

    state = (StateSpec("residual"),)

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        # In place: the buffer of the residual is u until the applied part is subtracted.
        return add_with_stats_(ctx.state["residual"], ctx.segment.bounds, grads, ctx.scale, ctx.stats)
