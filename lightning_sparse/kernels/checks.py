"""What is checked of every exchange where Triton works, in a launch each: checksums, received messages, sent entries.

    add_weighted_(sums, words, within, of_block, -1)     # sums -= Σ weight · word, of each row
    judge(messages, sums, intact, sent, senders, worst)  # the worst status that the messages tell of
    note_broken(u, indices, own, worst)                  # and this rank's own, if an entry of u is not finite

The same in plain torch is in `framing.py` and `exchange.py`, by a dozen operations each. Statuses are explained there.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, launch

if TYPE_CHECKING:
    import triton.language as tl

TILE = 1024
"""Words that one program weighs, entries that one looks at, and messages that are judged at a time."""


def add_weighted_(sums: Tensor, words: Tensor, within: Tensor, of_block: Tensor, sign: int) -> None:
    """Add `sign` times Σ within[i % b]·of_block[i // b]·words[..., i] to each of `sums`, modulo 2⁶⁴, with b = 1024.

    Args:
        sums: int64, one for each row of `words`, evenly spaced in memory; overwritten.
        words: (..., n), whole numbers, rows evenly spaced in memory.
        within, of_block: weights, int64.
        sign: 1 or -1.
    """
    rows, count = sums.numel(), words.shape[-1]
    if rows and count:
        tiles = -(-count // TILE)
        strides = (words.stride(-2), sums.stride(-1)) if sums.dim() else (0, 0)
        args = (words, within, of_block, sums, count, within.numel(), tiles, *strides)
        launch(_add_weighted, rows * tiles, *args, SIGN=sign, TILE=TILE)


@kernel("count", "block", "tiles", "words_each", "sums_each")
def _add_weighted(
    words, within, of_block, sums, count, block, tiles, words_each, sums_each, SIGN: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) // tiles
    positions = (tl.program_id(0) - row * tiles) * TILE + tl.arange(0, TILE)
    valid = positions < count
    word = tl.load(words + row * words_each + positions, mask=valid, other=0).to(tl.int64)
    weight = tl.load(within + positions % block, mask=valid, other=0)
    weight *= tl.load(of_block + positions // block, mask=valid, other=0)
    # Sums modulo 2⁶⁴ do not depend on the order.
    tl.atomic_add(sums + row * sums_each, SIGN * tl.sum(word * weight), sem="relaxed")


def judge(
    messages: Tensor, sums: Tensor, sent: Tensor, senders: Tensor, worst: Tensor, intact: int, corrupt: int, late: int
) -> Tensor:
    """Return the least of `worst` and of what each message says, as a new int64 scalar.

    Args:
        messages: int64, (P, words): a fingerprint, a status, anything, a checksum.
        sums: int64, (P): the weighted sum of all words of each but its checksum.
        sent: int64: the fingerprint that each must have.
        senders: int64, (P), or one for all: the status to which the error codes are added.
        worst: int64 scalar.
        intact: what sum and checksum must add up to.
        corrupt: code of a message that does not.
        late: code of a message with another fingerprint.
    """
    out = torch.empty_like(worst)
    args = (messages, sums, sent, senders, worst, out, len(messages), messages.shape[-1])
    launch(_judge, 1, *args, INTACT=intact, CORRUPT=corrupt, LATE=late, TILE=TILE)
    return out


@kernel("rows", "each")
def _judge(
    messages,
    sums,
    sent,
    senders,
    worst,
    out,
    rows,
    each,
    INTACT: tl.constexpr,
    CORRUPT: tl.constexpr,
    LATE: tl.constexpr,
    TILE: tl.constexpr,
):
    least = tl.load(worst)
    start = 0
    while start < rows:
        row = start + tl.arange(0, TILE)
        valid = row < rows
        message = messages + row.to(tl.int64) * each
        sender = tl.load(senders + row, mask=valid, other=0)
        same = tl.load(message, mask=valid, other=0) == tl.load(sent)
        status = tl.where(same, tl.load(message + 1, mask=valid, other=0), sender + LATE)
        checksum = tl.load(message + each - 1, mask=valid, other=0)
        status = tl.where(tl.load(sums + row, mask=valid, other=0) + checksum == INTACT, status, sender + CORRUPT)
        least = tl.minimum(least, tl.min(tl.where(valid, status, least)))
        start += TILE
    tl.store(out, least)


def note_broken(u: Tensor, indices: Tensor, own: int, worst: Tensor, ok: int) -> Tensor:
    """Return the least of `worst` and of `own` plus the first index where `u` is not finite, as a new int64 scalar.

    Args:
        u: 1-D, fp32.
        indices: where to look, int64, 1-D; may be padded with `len(u)`.
        own: what the index is added to.
        worst: int64 scalar; if it is not `ok`, it stays.
        ok: what it is where nothing is known.
    """
    out = worst.clone()
    if count := indices.numel():
        args = (u, indices, worst, out, own, count, u.numel())
        launch(_note_broken, -(-count // TILE), *args, OK=ok, TILE=TILE)
    return out


@kernel("own", "count", "numel")
def _note_broken(u, indices, worst, out, own, count, numel, OK: tl.constexpr, TILE: tl.constexpr):
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + positions, mask=positions < count, other=numel)
    valid = index < numel
    bits = tl.load(u + index, mask=valid, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    first = tl.min(tl.where(valid & (bits >= 0x7F800000), index, numel))
    # Minima do not depend on the order; what was known before is read where nobody writes.
    if first < numel:  # noqa: SIM102 (`and` is not for tensors)
        if tl.load(worst) == OK:
            tl.atomic_min(out, own + first, sem="relaxed")
