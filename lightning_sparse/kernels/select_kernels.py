"""The kernels of `select_triton.py`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from lightning_sparse.kernels.launch import REORDERS, kernel, tl

TILE = 4096
"""Number of elements that one program searches; below 2^15, so that two counts fit into 32 bits."""

PART = 512
"""Number of a tile's kept elements to process at a time. Usually one in sixty is kept."""

SCRATCH = 4 * 256 + 16
"""Size of a selection's scratch memory. It begins with a histogram of each digit. From `FOUND` on it has two numbers
for each digit: the digits found so far, and the number of wanted entries that have them. Then the number of selected
entries follows."""

FOUND = 4 * 256
THRESHOLD = FOUND + 6
"""Offset of the k-th largest magnitude in the scratch memory. The number of selected entries equal to it follows."""


@kernel()
def _magnitudes(
    bits,
    indices,
    numel,
    count,
    start,
    KEPT: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """Return a tile's magnitudes, with a row for each block, and their positions in `bits`.

    A missing element has the magnitude -1. If elements were kept, the result is a part of the tile, from `start` on.
    """
    tile = tl.program_id(0).to(tl.int64)
    if KEPT:
        within = start + tl.arange(0, PART // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        positions = tile * TILE + within
        found = tl.load(bits + positions, mask=within < tl.load(indices + tile), other=-1)
    else:
        rows = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        blocks = rows
        if GATHER:
            blocks = tl.load(indices + rows, mask=rows < count, other=0)
        positions = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        valid = tl.broadcast_to((rows < count)[:, None], [TILE // BLOCK, BLOCK])
        # Loads are 16 bytes wide if rows are complete or missing. Only in the last tile a row may be incomplete.
        if (tl.max(blocks) + 1) * BLOCK <= numel:
            found = tl.load(bits + positions, mask=valid, other=0)
        else:
            valid &= positions < numel
            found = tl.load(bits + positions, mask=valid, other=0)
        found = tl.where(valid, found & 0x7FFFFFFF, -1)
    return found, positions


@kernel()
def _number(indices, KEPT: tl.constexpr, PART: tl.constexpr):
    """Return the number of elements of a tile to search: `PART`, or the number of kept elements, from `indices`."""
    number = PART
    if KEPT:
        number = tl.load(indices + tl.program_id(0))
    return number


@kernel()
def _digit(counts, k, limits, DIGIT: tl.constexpr, LIMITED: tl.constexpr):
    """Return the first digits, of eight bits each, of the k-th largest number, from the last digit's histogram.

    Program 0 stores these digits and the number of entries still wanted behind the histograms, for the next kernel.
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
    PART: tl.constexpr,
):
    prefix = 0
    if DIGIT > 0:
        prefix = _digit(counts, k, limits, DIGIT, LIMITED)
    bins = counts + DIGIT * 256
    start = 0
    number = _number(indices, KEPT, PART)
    while start < number:
        found, _ = _magnitudes(bits, indices, numel, count, start, KEPT, GATHER, BLOCK, TILE, PART)
        # Keeping the order goes through shared memory.
        found = tl.reshape(found, [PART], can_reorder=True) if REORDERS else tl.reshape(found, [PART])
        candidate = found >= 0
        if DIGIT > 0:
            candidate &= (found >> (32 - 8 * DIGIT)) == prefix
        digits = (found >> (24 - 8 * DIGIT)) & 255
        # Sums of integers do not depend on the order. A histogram of few elements takes no less time.
        if tl.sum(candidate.to(tl.int32)) > PART // 64:
            many = tl.histogram(digits, 256, mask=candidate)
            tl.atomic_add(bins + tl.arange(0, 256), many, mask=many > 0, sem="relaxed")
        else:
            tl.atomic_add(bins + digits, 1, mask=candidate, sem="relaxed")
        start += PART


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
    PART: tl.constexpr,
):
    found, _ = _magnitudes(bits, indices, numel, count, 0, KEPT, GATHER, BLOCK, TILE, TILE)
    found = tl.reshape(found, [TILE])
    keep = found >= tl.load(bound)
    one = keep.to(tl.int32)
    tile = tl.program_id(0).to(tl.int64)
    number = tl.sum(one)
    tl.store(numbers + tile, number)
    slots = tl.cumsum(one) - one
    tl.store(kept + tile * TILE + slots, found, mask=keep)
    tl.store(places + tile * TILE + slots, tl.arange(0, TILE).to(tl.int16), mask=keep)
    # A histogram of the few kept elements costs less than one of all elements.
    tl.debug_barrier()
    start = 0
    while start < number:
        within = start + tl.arange(0, PART)
        again = tl.load(kept + tile * TILE + within, mask=within < number, other=0)
        bins = tl.histogram((again >> 24) & 255, 256, mask=within < number)
        tl.atomic_add(counts + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")
        start += PART


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
    PART: tl.constexpr,
):
    limit = _digit(counts, k, limits, 4, LIMITED)
    above = 0
    ties = 0
    tile = tl.program_id(0)
    start = 0
    number = _number(indices, KEPT, PART)
    while start < number:
        found, _ = _magnitudes(bits, indices, numel, count, start, KEPT, GATHER, BLOCK, TILE, PART)
        above += tl.sum((found > limit).to(tl.int32))
        ties += tl.sum((found == limit).to(tl.int32))
        start += PART
    tl.store(tallies + tile, above)
    tl.store(tallies + tiles + tile, ties)


@kernel()
def _slots(found, limit, room, above_first, ties_first, PART: tl.constexpr):
    """Return magnitudes in order, the slot of each in the result, and whether it is selected."""
    found = tl.reshape(found, [PART])
    above = (found > limit).to(tl.int32)
    ties = (found == limit).to(tl.int32)
    # One prefix sum serves both counts, in the upper and the lower half of 32 bits.
    both = (above << 16) | ties
    before = tl.cumsum(both) - both
    ties_before = ties_first + (before & 0xFFFF)
    chosen = (above > 0) | ((ties > 0) & (ties_before < room))
    return found, above_first + (before >> 16) + tl.minimum(ties_before, room), chosen


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
    PART: tl.constexpr,
):
    limit = tl.load(counts + 1030)
    room = tl.load(counts + 1031)
    tile = tl.program_id(0)
    above_first = 0
    ties_first = 0
    if ADDED_UP:
        above_first += tl.load(tallies + tile - 1, mask=tile > 0, other=0)
        ties_first += tl.load(tallies + tiles + tile - 1) - tl.load(tallies + tiles - 1)
    else:
        first = 0
        while first < tile:
            others = first + tl.arange(0, 1024)
            above_first += tl.sum(tl.load(tallies + others, mask=others < tile, other=0))
            ties_first += tl.sum(tl.load(tallies + tiles + others, mask=others < tile, other=0))
            first += 1024
    start = 0
    if KEPT:
        number = tl.load(indices + tile)
        while start < number:
            found, positions = _magnitudes(bits, indices, numel, count, start, KEPT, GATHER, BLOCK, TILE, PART)
            found, slots, chosen = _slots(found, limit, room, above_first, ties_first, PART)
            place = tl.load(places + tl.reshape(positions, [PART]), mask=chosen, other=0).to(tl.int32)
            rows = blocks + tile.to(tl.int64) * (TILE // BLOCK) + place // BLOCK
            tl.store(out + slots, tl.load(rows, mask=chosen, other=0) * BLOCK + place % BLOCK, mask=chosen)
            above_first += tl.sum((found > limit).to(tl.int32))
            ties_first += tl.sum((found == limit).to(tl.int32))
            start += PART
    else:
        found, positions = _magnitudes(bits, indices, numel, count, start, KEPT, GATHER, BLOCK, TILE, PART)
        found, slots, chosen = _slots(found, limit, room, above_first, ties_first, PART)
        tl.store(out + slots, tl.reshape(positions.to(tl.int32), [PART]), mask=chosen)
        if TOPS:
            tl.store(tops + slots, found, mask=chosen)
    if END:  # noqa: SIM102 (a compile-time constant, unlike `tile`)
        if tile == 0:
            tl.store(out + size, numel.to(tl.int64))
    if PAD:
        slots = tile * TILE + tl.arange(0, TILE)
        behind = (slots >= tl.load(counts + 1032)) & (slots < size)
        tl.store(out + slots, tl.zeros([TILE], dtype=tl.int64) + numel, mask=behind)
