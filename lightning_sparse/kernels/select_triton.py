"""Exact top-k by Triton: a radix select of the threshold, a count per tile, and writing in order.

The same steps serve the block maxima and, of the chosen blocks (see `select.py`), the elements that reach the least of
these maxima. Those are copied once, so that the steps need not read the blocks again. All shapes follow from k, so the
host never waits for the device; no program waits for another, and no result depends on which comes first.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, launch

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

ADDED_UP = 4096
"""With more tiles than these, counts are added up beforehand, and not by each program for those before it."""


@dataclass(frozen=True)
class Blocks:
    """What the kernels look at: some blocks of `bits` (int32, 1-D), or all of it.

    Attributes:
        bits: numbers, of which the sign bit is ignored.
        indices: which blocks, int64, ascending; None is all of them.
        size: elements per block, a power of two. The last block may be cut short.
    """

    bits: Tensor
    indices: Tensor | None = None
    size: int = 64

    @property
    def count(self) -> int:
        """How many blocks these are."""
        return -(-self.bits.numel() // self.size) if self.indices is None else self.indices.numel()

    @property
    def tiles(self) -> int:
        """How many programs look at them."""
        return -(-self.count * self.size // TILE)

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel over all tiles."""
        gathered = self.indices is not None
        warps = 8 if self.size > 1 else 16  # an index for each element takes registers
        constants |= {"KEPT": False, "GATHER": gathered, "BLOCK": self.size, "TILE": TILE, "num_warps": warps}
        indices = self.bits if self.indices is None else self.indices
        launch(kernel, self.tiles, self.bits, indices, self.bits.numel(), self.count, *args, **constants)


class Kept:
    """The elements of some blocks that reach a bound, copied tile by tile; and the histogram of their first digit.

    Args:
        blocks: where to look.
        bound: int32, on the device.
        counts: zeros of `SCRATCH`, for the selection from these.
    """

    def __init__(self, blocks: Blocks, bound: Tensor, counts: Tensor) -> None:
        assert blocks.indices is not None
        self.blocks, self.tiles = blocks, blocks.tiles
        self.indices = blocks.indices
        room, device = blocks.tiles * TILE, bound.device
        self.found = torch.empty(room, dtype=torch.int32, device=device)
        self.places = torch.empty(room, dtype=torch.int16, device=device)
        self.numbers = torch.empty(blocks.tiles, dtype=torch.int32, device=device)
        blocks.launch(_keep, bound, self.found, self.places, self.numbers, counts)

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel over all tiles."""
        constants |= {"KEPT": True, "GATHER": False, "BLOCK": self.blocks.size, "TILE": TILE, "num_warps": 8}
        launch(kernel, self.tiles, self.found, self.numbers, self.blocks.bits.numel(), 0, *args, **constants)


def topk_triton(bits: Tensor, k: int, maxima: Tensor | None, size: int) -> Tensor:
    """Return the int64 indices of the k largest magnitudes (int32, 1-D), ascending; by Triton.

    Args:
        bits: at least k.
        k: how many.
        maxima: of the full blocks, at least k; None to look at all.
        size: elements per block.
    """
    counts = zeros(bits.device)
    if maxima is None:
        return select(Blocks(bits), counts[0], k, k)
    blocks = blocks_of_largest(bits, maxima, size, k, counts[0])
    return select(Kept(blocks, counts[0, THRESHOLD:], counts[1]), counts[1], k, k)


def zeros(device: torch.device) -> Tensor:
    """Return what two selections work with, see `SCRATCH`."""
    return torch.zeros(2, SCRATCH, dtype=torch.int32, device=device)


def blocks_of_largest(
    bits: Tensor, maxima: Tensor, size: int, k: int, counts: Tensor, tops: Tensor | None = None
) -> Blocks:
    """Return the blocks of the k largest maxima, and the end of `bits`, which belongs to no full block."""
    return Blocks(bits, select(Blocks(maxima), counts, k, k, tops=tops, end=maxima.numel() * size < bits.numel()), size)


def select(
    source: Blocks | Kept,
    counts: Tensor,
    k: int,
    size: int,
    *,
    limits: Tensor | None = None,
    tops: Tensor | None = None,
    end: bool = False,
) -> Tensor:
    """Return the int64 indices of the k largest magnitudes of a source that holds so many, ascending; by Triton.

    Args:
        source: where to look.
        counts: of `SCRATCH`, zeros but for what `source` has counted.
        k: how many.
        size: the length of the result; with `limits` it is padded with `len(bits)`.
        limits: int32, on the device: where the second number is not exceeded, all of `source` are selected.
        tops: int32 of `size`, to be overwritten with the magnitudes.
        end: whether to add the number of all elements that there are, as one index more.
    """
    limited = limits is not None
    _digits(source, counts, k, limits)
    tallies = torch.empty(2 * source.tiles, dtype=torch.int32, device=counts.device)
    source.launch(_count, counts, k, counts if limits is None else limits, tallies, source.tiles, LIMITED=limited)
    added_up = source.tiles > ADDED_UP
    if added_up:
        tallies = tallies.cumsum(0, dtype=torch.int32)
    indices = torch.empty(size + end, dtype=torch.int64, device=counts.device)
    places, blocks = (source.places, source.indices) if isinstance(source, Kept) else (indices, indices)
    args = (counts, tallies, indices, indices if tops is None else tops, places, blocks, source.tiles, size)
    source.launch(_write, *args, ADDED_UP=added_up, TOPS=tops is not None, END=end, PAD=limited)
    return indices


def kth_largest(blocks: Blocks, k: int) -> Tensor:
    """Return the k-th largest magnitude as one int32 on the device, by Triton: radix select, eight bits at a time."""
    counts = torch.zeros(SCRATCH, dtype=torch.int32, device=blocks.bits.device)
    _digits(blocks, counts, k, None)
    launch(_threshold, 1, counts, k)
    return counts[THRESHOLD : THRESHOLD + 1]


def _digits(source: Blocks | Kept, counts: Tensor, k: int, limits: Tensor | None) -> None:
    """Count the digits of those that have the digits before in common with the k-th largest."""
    for digit in range(isinstance(source, Kept), 4):
        args = (counts, k, counts if limits is None else limits)
        source.launch(_histogram, *args, DIGIT=digit, LIMITED=limits is not None)


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

    What was found out for the digits before, and is now, one program puts behind the histograms for the next kernel.
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
