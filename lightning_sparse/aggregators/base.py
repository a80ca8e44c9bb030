"""Aggregators: every rank's `u` to one result, bit-identical on all ranks, and what of mine went into it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors.base import Agreed, Compressor, Payload, first_broken_parameter
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.layout import Segment

NOT_FINITE = (
    "Training cannot go on from here: start from the last checkpoint. Look for a loss that is NaN or inf, lower the "
    "learning rate, or clip the gradients; on_nonfinite='skip' leaves such steps out."
)


CHECKSUM_BYTES = 8
"""At the end of each message that is `packed`."""


class NonFiniteGradient(RuntimeError):
    """A gradient holds a NaN or an infinity; raised on all ranks."""


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


@dataclass(frozen=True)
class Mean(Aggregator):
    """Mean by all-gather: every rank receives all payloads and adds them up in rank order."""

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        payload = compressor.compress(u, segment, ctx)
        return compressor.mean(all_gather_payloads(payload, u, segment, comm, ctx), segment, ctx), payload

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * (size - 1)

    def rounds(self, size: int) -> int:
        return size - 1


@dataclass(frozen=True)
class AllReduceMean(Aggregator):
    """Mean by all-reduce, for payloads that may be added up as they are: everything, or values at shared indices."""

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        payload = compressor.compress(u, segment, ctx)
        # Sums carry no header, so it goes ahead.
        check_headers(torch.stack(comm.all_gather(header(payload, u, segment, ctx))), segment, comm, ctx)
        # Summed in place where the payload is u itself: a dense segment must not cost a second buffer.
        total = tuple(part if part is u else part.clone() for part in payload)
        for part in total:
            # Divided before, as DDP does: equal to the last bit at two ranks, and sums stay in range.
            comm.all_reduce(part.div_(comm.size))
        return compressor.mean(tuple(part[None] for part in total), segment, ctx), payload

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return 2 * compressor.nbytes(segment, density) * (size - 1) / size

    def rounds(self, size: int) -> int:
        return 3 * (size - 1)

    def supports(self, compressor: Compressor) -> bool:
        return compressor.summable


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
    look(rows, lambda rows: _judge(rows, segment, step), comm, ctx, at_once=at_once)


def look(words: Tensor, judge: Callable[[Any], None], comm: Comm, ctx: Context, *, at_once: bool = False) -> None:
    """Have words judged that are all zero if all is well; `judge` raises what they say.

    On CUDA the host would have to wait for them. So there it is raised one step later, and until then `Context.sound`
    sees to it that the weights come to no harm.

    Args:
        words: int64.
        judge: takes them as `Tensor.tolist` returns them.
        at_once: whether to wait, because what comes next depends on it.
    """
    fetched = comm.fetch(words)
    if at_once or not uses_triton(words):
        judge(fetched())
        return
    well = (words == 0).all()
    ctx.sound = well if ctx.sound is None else ctx.sound & well
    ctx.later.append(lambda: judge(fetched()))


def doubt(ctx: Context, device: torch.device) -> Tensor:
    """Return, for the others, whether this rank knows of something wrong in the step: int64, one element, 0 if not."""
    if ctx.sound is None:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return ctx.sound.logical_not().long().view(1)


def heed(doubts: Tensor, ctx: Context) -> None:
    """Take the `doubt` of other ranks for one's own. They tell what it is, see `look`."""
    if ctx.sound is not None:
        ctx.sound = ctx.sound & (doubts == 0).all()


def _judge(rows: Sequence[Sequence[int]], segment: Segment, step: int) -> None:
    for rank, (_, _, *sums) in enumerate(rows):
        if any(sums):
            raise damaged(f"of rank {rank} at step {step}, segment {segment.index} ({segment.names[0]!r} and on),")
    for rank, (fingerprint, *_) in enumerate(rows):
        if fingerprint != rows[0][0]:
            raise out_of_step(rank, 0, segment, step)
    for rank, (_, wrong, *_) in enumerate(rows):
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


def all_gather_payloads(payload: Payload, u: Tensor, segment: Segment, comm: Comm, ctx: Context) -> Payload:
    """Exchange payloads of equal shapes, in one collective, and check the headers that travel with them.

    Returns:
        All ranks' payloads, in rank order, as the rows of each part.
    """
    parts = (header(payload, u, segment, ctx), *payload)
    messages = torch.stack(comm.all_gather(packed(parts)))
    headers, *payloads = unpacked(messages, parts)
    check_headers(headers, segment, comm, ctx, messages=messages)
    return tuple(payloads)


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, as bytes. Each starts at a multiple of 8, to be read where it lies.

    At the end there are 8 bytes that make all words, of 8 bytes each, add up to zero: TCP's own checksum has 16 bits,
    and ranks that read different values would drift apart. Parts with several rows make as many messages, as rows.
    """
    blank = torch.zeros(*parts[0].shape[:-1], CHECKSUM_BYTES, dtype=torch.uint8, device=parts[0].device)
    pieces = []
    for part in parts:
        pieces += [part.contiguous().view(torch.uint8), blank[..., : _room(part) - _nbytes(part)]]
    wire = torch.cat([*pieces, blank], -1)
    torch.neg(checksum(wire), out=wire[..., -CHECKSUM_BYTES:].view(torch.int64)[..., 0])
    return wire


def checksum(message: Tensor) -> Tensor:
    """Return what is zero for a `packed` message that nothing has happened to; for several, as rows, one each."""
    return message.view(torch.int64).sum(-1)


def intact(messages: Tensor, comm: Comm, ctx: Context) -> Tensor:
    """Return what `packed` has made, of all ranks, as rows; raise ValueError if it was damaged on its way."""
    step = ctx.step

    def judge(sums: list[int]) -> None:
        for rank, wrong in enumerate(sums):
            if wrong:
                raise damaged(f"of rank {rank} at step {step}")

    look(checksum(messages), judge, comm, ctx)
    return messages


def unpacked(wire: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of `packed`, as views, given some of the same lengths and dtypes."""
    parts, start = [], 0
    for part in like:
        parts.append(wire[..., start : start + _nbytes(part)].view(part.dtype))
        start += _room(part)
    return tuple(parts)


def _nbytes(part: Tensor) -> int:
    """Return how many bytes a row takes."""
    return part.shape[-1] * part.element_size()


def _room(part: Tensor) -> int:
    return (_nbytes(part) + 7) // 8 * 8
