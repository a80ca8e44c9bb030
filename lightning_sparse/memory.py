"""Memories: keep the part of the gradients that a rank did not send, and add it to the next step."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Entries, Update, add_
from lightning_sparse.context import Context, Replayable, StateSpec
from lightning_sparse.kernels.block_stats import add_with_stats_
from lightning_sparse.kernels.pack import gather
from lightning_sparse.kernels.payout import add_with_payout_
from lightning_sparse.kernels.write_back import add_entries_
from lightning_sparse.options import check


class Memory(Replayable, abc.ABC):
    """One rank's memory of one segment. The segment's state holds all its data."""

    state: tuple[StateSpec, ...] = ()
    """Tensors that it keeps in the segment's state."""

    error_feedback: bool = True
    """Whether it keeps rounding errors. Computing them costs one pass over the data."""

    @abc.abstractmethod
    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        """Combine the gradients with the state.

        Args:
            grads: one 1-D gradient per parameter of the segment, of any floating dtype; not modified. They are
                multiplied by `ctx.scale`.
            ctx: the segment, its state, and block statistics to fill in.

        Returns:
            u, 1-D fp32 of the segment's length; it may be a buffer of the state.
        """

    def update(self, u: Tensor, applied: Update, rounding_error: Update | None, ctx: Context) -> None:
        """Update the state after the exchange.

        Args:
            u: result of `compensate`; may be modified.
            applied: the part of u that went into the result.
            rounding_error: exact minus written result if gradients are 16-bit; None if nothing was rounded, or without
                `error_feedback`.
            ctx: as in `compensate`.
        """


@dataclass(frozen=True)
class NoMemory(Memory):
    """Discards the entries that were not sent."""

    error_feedback = depends_on_step = False
    state = (StateSpec("u", per="scratch"),)

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        u = ctx.state["u"]
        torch._foreach_copy_(list(ctx.segment.views(u)), grads)
        return u if ctx.scale == 1 else u.mul_(ctx.scale)


@dataclass(frozen=True)
class Residual(Memory):
    """Error feedback (Seide et al. 2014; Stich et al. 2018, arXiv 1809.07599): u = g + e, e ← u − applied.

    With a payout p (see `Context`), u = g + e + p. For an applied entry, e becomes u − applied. For any other entry, e
    becomes e + g, and p stays in the optimizer's momentum, which still contains it.
    """

    depends_on_step = False
    state = (StateSpec("residual"),)

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        residual, bounds, payout = ctx.state["residual"], ctx.segment.bounds, ctx.payout
        if payout is not None:
            u = ctx.graphs.buffer_like(residual)
            return add_with_payout_(residual, bounds, grads, ctx.scale, payout, ctx.stats, u)
        # In place: the residual's buffer holds u until the applied part is subtracted.
        return add_with_stats_(residual, bounds, grads, ctx.scale, ctx.stats)

    def update(self, u: Tensor, applied: Update, rounding_error: Update | None, ctx: Context) -> None:
        residual = ctx.state["residual"]
        add_(u, applied, -1)
        if u is not residual:
            assert isinstance(applied, Entries), "only selected entries can be paid out"
            for indices, _ in applied.lists:
                add_entries_(residual, indices, gather(u, indices) - gather(residual, indices))
        if rounding_error is not None:
            add_(residual, rounding_error)


@dataclass(frozen=True)
class DecayingResidual(Residual):
    """Error feedback with decay: u = g + decay · e (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706).

    Attributes:
        decay: factor on the residual at each exchange, in (0, 1].
    """

    decay: float = 0.95

    depends_on_step = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", check("decay", self.decay, "DecayingResidual"))

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        ctx.state["residual"].mul_(self.decay)
        return super().compensate(grads, ctx)


@dataclass(frozen=True)
class Momentum(Memory):
    """Sends momentum instead of the gradient (Bernstein et al. 2018, arXiv 1802.04434): u = m ← βm + (1 − β)g.

    Sent entries are not subtracted, so this is not error feedback. With the sign as compressor it is "Signum". Use it
    with an optimizer without momentum.

    Attributes:
        beta: β, in [0, 1).
    """

    beta: float = 0.9

    error_feedback = depends_on_step = False
    state = (StateSpec("momentum", resize="mean"),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", check("beta", self.beta, "Momentum"))

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        momentum = ctx.state["momentum"].mul_(self.beta)
        return add_with_stats_(momentum, ctx.segment.bounds, grads, ctx.scale * (1 - self.beta), ctx.stats)
