"""The kernels of `select_triton.py`: what each program does."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_sparse.kernels.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

TILE = 4096
"""Elements that one program of the kernels looks at; below 2^15, so that two counts fit into 32 bits."""

SCRATCH = 4 * 256 + 16
"""Numbers that a selection works with: a histogram of each digit; after each digit the digits so far and how many are
still wanted of those that have them, at `FOUND`; and how many are selected."""

FOUND = 4 * 256
THRESHOLD = FOUND + 6
"""Where the k-th largest magnitude is, in the end; behind it how many of its equals are selected."""


@kernel()
def _magnitudes(
    bits, indices, numel, count, KEPT: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Return a tile's magnitudes, -1 where there is nothing, and where in `bits` they are, a row for each block."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    if KEPT:
        # `indices` has how many there are.
        positions = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        valid = positions - tile * TILE < tl.load(indices + tile)
        found = tl.load(bits + positions, mask=valid, other=-1)
    else:
        blocks = rows
        if GATHER:
            blocks = tl.load(indices + rows, mask=rows < count, other=0)
        positions = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        valid = tl.broadcast_to((rows < count)[:, None], [TILE // BLOCK, BLOCK])
        # Loads are 16 bytes wide where a whole row is there or not; only in the last tile it may be cut short.
        if (tl.max(blocks) + 1) * BLOCK <= numel:
            found = tl.load(bits + positions, mask=valid, other=0)
        else:
            valid &= positions < numel
            found = tl.load(bits + positions, mask=valid, other=0)
        found = tl.where(valid, found & 0x7FFFFFFF, -1)
    return found, positions


@kernel()
def _digit(counts, k, limits, DIGIT: tl.constexpr, LIMITED: tl.constexpr):
    """Return the first digits, of eight bits each, of the k-th largest number, from the histogram of the last of them.

    Program 0 stores the digits found so far and the remaining count behind the histograms, for the next kernel.
    """
    bins = tl.arange(0, 256)
    count = tl.load(counts + (DIGIT - 1) * 256 + bins)
    found = counts + 1024
    if DIGIT == 1:
        prefix = 0
        left = k
        if LIMITED:
            total = tl.sum(count)
            left = tl.where(total <= tl.load(limits + 1), total, k)
        if tl.program_id(0) == 0:
            tl.store(found + 8, left)
    else:
        prefix = tl.load(found + 2 * DIGIT - 4)
        left = tl.load(found + 2 * DIGIT - 3)
    reaching = tl.cumsum(count, reverse=True)
    chosen = tl.max(tl.where(reaching >= left, bins, 0))
    left -= tl.sum(tl.where(bins > chosen, count, 0))
    prefix = (prefix << 8) | chosen
    if tl.program_id(0) == 0:
        tl.store(found + 2 * DIGIT - 2, prefix)
        tl.store(found + 2 * DIGIT - 1, left)
    return prefix


@kernel("numel", "count", "k")
def _histogram(
    bits,
    indices,
    numel,
    count,
    counts,
    k,
    limits,
    DIGIT: tl.constexpr,
    LIMITED: tl.constexpr,
    KEPT: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, _ = _magnitudes(bits, indices, numel, count, KEPT, GATHER, BLOCK, TILE)
    found = tl.reshape(found, [TILE], can_reorder=True)  # an order would cost a way through shared memory
    candidate = found >= 0
    if DIGIT > 0:
        candidate &= (found >> (32 - 8 * DIGIT)) == _digit(counts, k, limits, DIGIT, LIMITED)
    bins = tl.histogram((found >> (24 - 8 * DIGIT)) & 255, 256, mask=candidate)
    # Whole numbers: their sum does not depend on the order.
    tl.atomic_add(counts + DIGIT * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")


@kernel("k")
def _threshold(counts, k):
    _digit(counts, k, counts, 4, False)


@kernel("numel", "count")
def _keep(
    bits,
    indices,
    numel,
    count,
    bound,
    kept,
    places,
    numbers,
    counts,
    KEPT: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, _ = _magnitudes(bits, indices, numel, count, KEPT, GATHER, BLOCK, TILE)
    found = tl.reshape(found, [TILE])
    keep = found >= tl.load(bound)
    bins = tl.histogram((found >> 24) & 255, 256, mask=keep)
    tl.atomic_add(counts + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")
    one = keep.to(tl.int32)
    tile = tl.program_id(0).to(tl.int64)
    tl.store(numbers + tile, tl.sum(one))
    slots = tl.cumsum(one) - one
    tl.store(kept + tile * TILE + slots, found, mask=keep)
    tl.store(places + tile * TILE + slots, tl.arange(0, TILE).to(tl.int16), mask=keep)


@kernel("numel", "count", "k", "tiles")
def _count(
    bits,
    indices,
    numel,
    count,
    counts,
    k,
    limits,
    tallies,
    tiles,
    LIMITED: tl.constexpr,
    KEPT: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, _ = _magnitudes(bits, indices, numel, count, KEPT, GATHER, BLOCK, TILE)
    limit = _digit(counts, k, limits, 4, LIMITED)
    tile = tl.program_id(0)
    tl.store(tallies + tile, tl.sum((found > limit).to(tl.int32)))
    tl.store(tallies + tiles + tile, tl.sum((found == limit).to(tl.int32)))


@kernel("numel", "count", "tiles", "size")
def _write(
    bits,
    indices,
    numel,
    count,
    counts,
    tallies,
    out,
    tops,
    places,
    blocks,
    tiles,
    size,
    ADDED_UP: tl.constexpr,
    TOPS: tl.constexpr,
    END: tl.constexpr,
    PAD: tl.constexpr,
    KEPT: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, positions = _magnitudes(bits, indices, numel, count, KEPT, GATHER, BLOCK, TILE)
    found, positions = tl.reshape(found, [TILE]), tl.reshape(positions.to(tl.int32), [TILE])
    limit = tl.load(counts + 1030)
    room = tl.load(counts + 1031)
    above = (found > limit).to(tl.int32)
    ties = (found == limit).to(tl.int32)
    # One sum for both counts, in the upper and the lower half of 32 bits; of what is before each element.
    both = (above << 16) | ties
    before = tl.cumsum(both) - both
    tile = tl.program_id(0)
    above_before = before >> 16
    ties_before = before & 0xFFFF
    if ADDED_UP:
        above_before += tl.load(tallies + tile - 1, mask=tile > 0, other=0)
        ties_before += tl.load(tallies + tiles + tile - 1) - tl.load(tallies + tiles - 1)
    else:
        start = 0
        while start < tile:
            others = start + tl.arange(0, 1024)
            above_before += tl.sum(tl.load(tallies + others, mask=others < tile, other=0))
            ties_before += tl.sum(tl.load(tallies + tiles + others, mask=others < tile, other=0))
            start += 1024
    chosen = (above > 0) | ((ties > 0) & (ties_before < room))
    slots = above_before + tl.minimum(ties_before, room)
    if KEPT:
        place = tl.load(places + positions, mask=chosen, other=0).to(tl.int32)
        rows = blocks + tile.to(tl.int64) * (TILE // BLOCK) + place // BLOCK
        positions = tl.load(rows, mask=chosen, other=0) * BLOCK + place % BLOCK
    tl.store(out + slots, positions, mask=chosen)
    if TOPS:
        tl.store(tops + slots, found, mask=chosen)
    if END:  # noqa: SIM102 (known when it is compiled, unlike the rest)
        if tile == 0:
            tl.store(out + size, numel.to(tl.int64))
    if PAD:
        slots = tile * TILE + tl.arange(0, TILE)
        behind = (slots >= tl.load(counts + 1032)) & (slots < size)
        tl.store(out + slots, tl.zeros([TILE], dtype=tl.int64) + numel, mask=behind)
