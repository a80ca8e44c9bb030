"""What ranks tell each other beside payloads, and when the host looks at it.

A header goes ahead of a segment's payload or with it, and messages have a checksum. Where the host knows what they say,
an error is raised at once. On CUDA it would have to wait for that, so it looks one step later; until then the device
knows whether the step is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.aggregators.messages import checksum
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors.base import Payload, first_broken_parameter
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.layout import Segment

NOT_FINITE = (
    "Training cannot go on from here: start from the last checkpoint. Look for a loss that is NaN or inf, lower the "
    "learning rate, or clip the gradients; on_nonfinite='skip' leaves such steps out."
)


class NonFiniteGradient(RuntimeError):
    """A gradient holds a NaN or an infinity; raised on all ranks."""


def header(payload: Payload, u: Tensor, segment: Segment, ctx: Context) -> Tensor:
    """Return what travels before every payload: the fingerprint and what is wrong.

    0 is for nothing, n for a gradient that is not finite at the segment's n-th element, or on CUDA in that element's
    parameter, -1 for a payload that is not finite although `u` is.
    """
    if uses_triton(u):
        words = torch.full((2,), ctx.fingerprint, dtype=torch.int64, device=u.device)
        words[1:] = first_broken_parameter(u, segment) if ctx.broken is None else ctx.broken
        return words
    wrong = 0
    floats = [part for part in payload if part.is_floating_point()]
    # A sum of finite values may overflow, so it only raises the suspicion; `isfinite` of everything costs ten times
    # as much.
    if not all(torch.isfinite(part.sum()) for part in floats):
        broken = (~torch.isfinite(u)).nonzero()
        if len(broken):
            wrong = 1 + int(broken[0])
        elif not all(torch.isfinite(part).all() for part in floats):
            wrong = -1
    return torch.tensor([ctx.fingerprint, wrong], dtype=torch.int64, device=u.device)


def check_headers(
    headers: Tensor,
    segment: Segment,
    comm: Comm,
    ctx: Context,
    *,
    messages: Tensor | None = None,
    at_once: bool = False,
) -> None:
    """Raise, on all ranks alike, if ranks are out of step or a gradient is not finite; here, if a message is damaged.

    Args:
        headers: of all ranks, as rows.
        messages: which they came in, where these are `packed`.
        at_once: see `look`.
    """
    sums = () if messages is None else (checksum(messages)[:, None],)
    step = ctx.step
    rows = torch.cat([headers[:, :1] - ctx.fingerprint, headers[:, 1:], *sums], 1)
    look(rows, lambda rows: _judge(rows, comm.ranks, segment, step), comm, ctx, at_once=at_once)


def look(words: Tensor, judge: Callable[[Any], None], comm: Comm, ctx: Context, *, at_once: bool = False) -> None:
    """Have words judged that are all zero if all is well; `judge` raises what they say.

    On CUDA the host would have to wait for them. So there it is raised one step later, and until then `Context.sound`
    sees to it that the weights come to no harm.

    Args:
        words: int64.
        judge: takes them as `Tensor.tolist` returns them.
        at_once: whether to wait, because what comes next depends on it.
    """
    fetched = comm.to_host_async(words)
    if at_once or not uses_triton(words):
        judge(fetched())
        return
    well = (words == 0).all()
    ctx.sound = well if ctx.sound is None else ctx.sound & well
    ctx.later.append(lambda: judge(fetched()))


def look_by_rank(
    words: Tensor, error: Callable[[int], Exception], ranks: Sequence[int], comm: Comm, ctx: Context
) -> None:
    """`look` at one word of each of some ranks; what is raised is the `error` of the first whose word is not zero."""

    def judge(words: list[int]) -> None:
        for rank, wrong in zip(ranks, words, strict=True):
            if wrong:
                raise error(rank)

    look(words, judge, comm, ctx)


def doubt(ctx: Context, device: torch.device) -> Tensor:
    """Return, for the others, whether this rank knows of something wrong in the step: int64, one element, 0 if not."""
    if ctx.sound is None:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return ctx.sound.logical_not().long().view(1)


def heed(doubts: Tensor, ctx: Context) -> None:
    """Take the `doubt` of other ranks for one's own. They tell what it is, see `look`."""
    if ctx.sound is not None:
        ctx.sound = ctx.sound & (doubts == 0).all()


def _judge(rows: Sequence[Sequence[int]], ranks: Sequence[int], segment: Segment, step: int) -> None:
    for rank, (_, _, *sums) in zip(ranks, rows, strict=True):
        if any(sums):
            raise damaged(f"of rank {rank} at step {step}, segment {segment.index} ({segment.names[0]!r} and on),")
    for rank, (fingerprint, *_) in zip(ranks, rows, strict=True):
        if fingerprint != rows[0][0]:
            raise out_of_step(rank, ranks[0], segment, step)
    for rank, (_, wrong, *_) in zip(ranks, rows, strict=True):
        if wrong:
            raise not_finite(wrong, rank, segment, step)


def damaged(which: str) -> ValueError:
    """Return the error for a message whose checksum is wrong."""
    return ValueError(
        f"A message {which} is corrupt: its checksum is wrong. It was damaged on its way, or ranks run different "
        f"versions."
    )


def out_of_step(rank: int, other: int, segment: Segment, step: int) -> RankFailure:
    """Return the error for two ranks whose fingerprints differ."""
    return RankFailure(
        f"Ranks are out of step: at step {step}, segment {segment.index} ({segment.names[0]!r} and on), "
        f"rank {rank} and rank {other} differ in method, density, learning rate, step or model, or in having been "
        f"loaded or reset. Give all ranks the same settings and the same number of batches."
    )


def not_finite(wrong: int, rank: int, segment: Segment, step: int) -> RuntimeError:
    """Return the error for what a rank's header says."""
    if not -1 <= wrong <= segment.numel:
        return RankFailure(f"A header of rank {rank} at step {step} blames element {wrong}: it is corrupt.")
    what = (
        f"The gradient of {segment.owner(wrong - 1)!r} is not finite"
        if wrong > 0
        else f"The gradients from {segment.names[0]!r} on are too large for the compressor"
    )
    return NonFiniteGradient(f"{what} on rank {rank} at step {step}. {NOT_FINITE}")


def intact(messages: Tensor, comm: Comm, ctx: Context, sender: int | None = None) -> Tensor:
    """Return what `packed` has made, of all ranks or of one `sender`, as rows; raise ValueError if it was damaged."""
    step, senders = ctx.step, comm.ranks if sender is None else (comm.ranks[sender],)
    look_by_rank(checksum(messages), lambda rank: damaged(f"of rank {rank} at step {step}"), senders, comm, ctx)
    return messages
