"""Triton kernels that check every exchange: checksums, received messages and sent entries, one launch for each.

    write_header_(messages, fingerprint, status, ...)    # header, checksum
    weigh(words, within, of_block)                       # weighted sums
    worst_status(messages, sums, sent, senders, ...)     # in messages
    note_broken(u, indices, own, worst, ok)              # in u

`framing.py` and `exchange.py` do the same with NumPy and explain the statuses.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, launch, tl

TILE = 1024
"""Number of words that one program weighs, and of entries that one program checks."""

ROWS, PARTS = 16, 64
"""Number of messages checked at a time, and of parts of their sums."""


def weigh(words: Tensor, within: Tensor, of_block: Tensor) -> Tensor:
    """Return parts of each row's Σ within[i % b]·of_block[i // b]·words[row, i], modulo 2⁶⁴, with b = 1024.

    Args:
        words: integers, (rows, n), whose rows are evenly spaced in memory.
        within, of_block: weights, int64.

    Returns:
        int64, (rows, tiles); the sum over tiles is that of the row.
    """
    rows, count = words.shape
    tiles = -(-count // TILE)
    sums = torch.empty(rows, tiles, dtype=torch.int64, device=words.device)
    if sums.numel():
        args = (words, within, of_block, sums, sums, 0, sums, 0, count, within.numel(), tiles, words.stride(0), tiles)
        launch(_weigh, rows * tiles, *args, HEADER=False, LOAD=False, TILE=TILE)
    return sums


def write_header_(
    messages: Tensor, fingerprint: int | Tensor, status: Tensor, start: int, within: Tensor, of_block: Tensor
) -> None:
    """Write the first 16 bytes of messages, and add `start` minus the weighted sum of all words to the last 8.

    Args:
        messages: uint8, (..., n), n a multiple of 8; overwritten.
        fingerprint: below 2⁶³, or an int64 scalar on the device.
        status: int64 scalar.
        start: an integer.
        within, of_block: weights, int64.
    """
    count = messages.shape[-1] // 4 - 2
    tiles, rows = -(-count // TILE), messages.numel() // messages.shape[-1]
    heads = messages.view(torch.int64)
    args = (messages.view(torch.int32), within, of_block, heads[..., -1:], heads, fingerprint, status, start)
    constants = {"HEADER": True, "LOAD": isinstance(fingerprint, Tensor), "TILE": TILE}
    each = heads.shape[-1]
    launch(_weigh, rows * tiles, *args, count, within.numel(), tiles, 2 * each, each, **constants)


@kernel("fingerprint", "start", "count", "block", "tiles", "words_each", "sums_each")
def _weigh(
    words,
    within,
    of_block,
    sums,
    heads,
    fingerprint,
    status,
    start,
    count,
    block,
    tiles,
    words_each,
    sums_each,
    HEADER: tl.constexpr,
    LOAD: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0) - row * tiles
    positions = tile * TILE + tl.arange(0, TILE)
    valid = positions < count
    weight = tl.load(within + positions % block, mask=valid, other=0)
    weight *= tl.load(of_block + positions // block, mask=valid, other=0)
    if HEADER:
        # This program writes the four words of the header, so it does not read them from memory.
        word = tl.load(words + row * words_each + positions, mask=valid & (positions >= 4), other=0).to(tl.int64)
        own = fingerprint
        if LOAD:
            own = tl.load(fingerprint)
        known = tl.load(status)
        word = tl.where(positions // 2 == 0, own, tl.where(positions // 2 == 1, known, word))
        word = tl.where((positions < 4) & (positions % 2 == 0), word << 32, word)
        word = tl.where(positions < 4, word >> 32, word)
        total = -tl.sum(word * weight)
        if tile == 0:
            tl.store(heads + row * sums_each, own)
            tl.store(heads + row * sums_each + 1, known)
            total += start
        # Sums modulo 2⁶⁴ do not depend on the order.
        tl.atomic_add(sums + row * sums_each, total, sem="relaxed")
    else:
        word = tl.load(words + row * words_each + positions, mask=valid, other=0).to(tl.int64)
        tl.store(sums + row * sums_each + tile, tl.sum(word * weight))


def worst_status(
    messages: Tensor,
    sums: Tensor,
    sent: int | Tensor,
    senders: Tensor,
    worst: Tensor,
    intact: int,
    corrupt: int,
    late: int,
    ok: int,
) -> tuple[Tensor, Tensor]:
    """Return the least of `worst` and of all messages' statuses, an int64 scalar, and whether it is `ok`, a bool.

    Args:
        messages: int64, (P, words): fingerprint, status, contents and checksum of each message.
        sums: int64, (P, n): parts of the weighted sum of each message's words except its checksum.
        sent: the fingerprint that each message must have, below 2⁶³, or an int64 scalar.
        senders: int64, (P), or one for all messages: the status to which an error code is added.
        worst: int64 scalar.
        intact: the sum that a message's parts and its checksum must have.
        corrupt: error code of a message with another sum.
        late: error code of a message with another fingerprint.
        ok: the status without an error.
    """
    out, fine = torch.empty_like(worst), torch.empty((), dtype=torch.bool, device=worst.device)
    args = (messages, sums, sent, senders, worst, out, fine, len(messages), messages.shape[-1], sums.shape[-1])
    constants = {"LOAD": isinstance(sent, Tensor), "INTACT": intact, "CORRUPT": corrupt, "LATE": late, "OK": ok}
    launch(_worst_status, 1, *args, **constants, ROWS=ROWS, TILE=PARTS)
    return out, fine


@kernel("sent", "rows", "each", "parts")
def _worst_status(
    messages,
    sums,
    sent,
    senders,
    worst,
    out,
    fine,
    rows,
    each,
    parts,
    LOAD: tl.constexpr,
    INTACT: tl.constexpr,
    CORRUPT: tl.constexpr,
    LATE: tl.constexpr,
    OK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    expected = sent
    if LOAD:
        expected = tl.load(sent)
    least = tl.load(worst)
    start = 0
    while start < rows:
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        message = messages + row.to(tl.int64) * each
        total = tl.load(message + each - 1, mask=valid, other=0)
        first = 0
        while first < parts:
            part = first + tl.arange(0, TILE)
            places = row.to(tl.int64)[:, None] * parts + part[None, :]
            total += tl.sum(tl.load(sums + places, mask=valid[:, None] & (part < parts)[None, :], other=0), axis=1)
            first += TILE
        sender = tl.load(senders + row, mask=valid, other=0)
        same = tl.load(message, mask=valid, other=0) == expected
        status = tl.where(same, tl.load(message + 1, mask=valid, other=0), sender + LATE)
        status = tl.where(total == INTACT, status, sender + CORRUPT)
        least = tl.minimum(least, tl.min(tl.where(valid, status, least)))
        start += ROWS
    tl.store(out, least)
    tl.store(fine, least == OK)


def note_broken(u: Tensor, indices: Tensor | None, own: int, worst: Tensor, ok: int, *, place: bool = True) -> Tensor:
    """Return the least of `worst` and of `own` plus the index of the first non-finite element, a new int64 scalar.

    Args:
        u: 1-D, fp32, or of another floating dtype.
        indices: indices to check, int64, 1-D; may be padded with `len(u)`. None checks all elements.
        own: the number to which the index is added.
        worst: int64 scalar; if it is not `ok`, it is returned unchanged.
        ok: the status without an error.
        place: whether to add the index to `own`; if False, `own` alone counts.
    """
    out = worst.clone()
    if count := u.numel() if indices is None else indices.numel():
        args = (u, u if indices is None else indices, worst, out, own, count, u.numel())
        launch(_note_broken, -(-count // TILE), *args, OK=ok, TILE=TILE, ALL=indices is None, PLACE=place)
    return out


@kernel("own", "count", "numel")
def _note_broken(
    u,
    indices,
    worst,
    out,
    own,
    count,
    numel,
    OK: tl.constexpr,
    TILE: tl.constexpr,
    ALL: tl.constexpr,
    PLACE: tl.constexpr,
):
    positions = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = positions
    if not ALL:
        index = tl.load(indices + positions, mask=positions < count, other=numel)
    valid = index < numel
    bits = tl.load(u + index, mask=valid, other=0.0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    first = tl.min(tl.where(valid & (bits >= 0x7F800000), index, numel))
    # Minima do not depend on the order. The earlier status is read from `worst`, which no program writes.
    if first < numel:  # noqa: SIM102 (`and` is not for tensors)
        if tl.load(worst) == OK:
            # The sum is int64, although Triton may treat `own` as a narrower number.
            tl.atomic_min(out, own + (first if PLACE else tl.zeros_like(first)), sem="relaxed")
