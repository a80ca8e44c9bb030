"""Exact top-k by Triton: a radix select of the threshold, a count per tile, and writing in order.

The same three steps serve the block maxima and the elements of the chosen blocks (see `select.py`). All shapes follow
from k, so the host never waits for the device, and no result depends on which program comes first.
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

    @classmethod
    def of(cls, bits: Tensor, indices: Tensor | None, size: int) -> Blocks:
        """Return these blocks and the end of `bits`, which belongs to no full block."""
        if indices is None:
            return cls(bits)
        full = bits.numel() // size
        end = full * size < bits.numel()
        return cls(bits, torch.nn.functional.pad(indices, (0, 1), value=full) if end else indices, size)

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
        constants |= {"GATHER": gathered, "BLOCK": self.size, "TILE": TILE, "num_warps": 8}
        indices = self.bits if self.indices is None else self.indices
        launch(kernel, self.tiles, self.bits, indices, self.bits.numel(), self.count, *args, **constants)


def topk_triton(blocks: Blocks, k: int) -> Tensor:
    """Return the int64 indices of the k largest magnitudes in blocks that hold so many, ascending; by Triton."""
    threshold = kth_largest(blocks, k)
    return indices_above(blocks, threshold, counts_above(blocks, threshold), k, ties_up_to=k)


def kth_largest(blocks: Blocks, k: int, when: Tensor | None = None) -> Tensor:
    """Return the k-th largest magnitude as one int32 on the device, by Triton: radix select, eight bits at a time.

    Where `when`, one int32 on the device, is zero, it does next to nothing and returns nothing of use.
    """
    counts = torch.zeros(4, 256, dtype=torch.int32, device=blocks.bits.device)
    for digit in range(4):
        blocks.launch(_histogram, counts, k, counts if when is None else when, DIGIT=digit, WHEN=when is not None)
    threshold = torch.empty(1, dtype=torch.int32, device=counts.device)
    launch(_threshold, 1, counts, k, threshold)
    return threshold


def counts_above(blocks: Blocks, threshold: Tensor) -> Tensor:
    """Count, by Triton, the magnitudes above a threshold and those equal to it.

    Returns:
        int64 of shape (2, tiles): how many there are in a tile and all before it, above and equal.
    """
    counts = torch.empty(2, blocks.tiles, dtype=torch.int32, device=threshold.device)
    blocks.launch(_count, threshold, counts, blocks.tiles)
    return counts.cumsum(1)


def indices_above(
    blocks: Blocks, threshold: Tensor, counts: Tensor, size: int, *, ties_up_to: int, when: Tensor | None = None
) -> Tensor:
    """Write, by Triton, where the magnitudes above a threshold are, and the first of those equal to it.

    Args:
        threshold: one int32 on the device.
        counts: of `counts_above`.
        size: how many indices there are; with `when`, at most, and `len(blocks.bits)` stands behind them.
        ties_up_to: magnitudes equal to the threshold are taken, in order, until there are so many in all.
        when: one int32 on the device; where it is zero, no magnitude equal to the threshold is taken.

    Returns:
        int64 indices into `blocks.bits`, ascending.
    """
    indices = torch.empty(size, dtype=torch.int64, device=threshold.device)
    if when is not None:
        indices.fill_(blocks.bits.numel())
    args = (threshold, counts, indices, ties_up_to, blocks.tiles, counts if when is None else when)
    blocks.launch(_write, *args, WHEN=when is not None)
    return indices


@kernel()
def _magnitudes(bits, indices, numel, count, GATHER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's magnitudes, -1 where there is nothing, and where in `bits` they are, a row for each block."""
    rows = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
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
    return tl.where(valid, found & 0x7FFFFFFF, -1), positions


@kernel()
def _digits(counts, k, DIGITS: tl.constexpr):
    """Return the first digits, of eight bits each, of the k-th largest number, from a histogram of each digit."""
    prefix = 0
    bins = tl.arange(0, 256)
    for digit in tl.static_range(DIGITS):
        count = tl.load(counts + digit * 256 + bins)
        reaching = tl.cumsum(count, reverse=True)
        chosen = tl.max(tl.where(reaching >= k, bins, 0))
        k -= tl.sum(tl.where(bins > chosen, count, 0))
        prefix = (prefix << 8) | chosen
    return prefix


@kernel("numel", "count", "k")
def _histogram(
    bits,
    indices,
    numel,
    count,
    counts,
    k,
    when,
    DIGIT: tl.constexpr,
    WHEN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    if WHEN:  # noqa: SIM102 (known when it is compiled, unlike the rest)
        if tl.load(when) == 0:
            return
    found, _ = _magnitudes(bits, indices, numel, count, GATHER, BLOCK, TILE)
    found = tl.reshape(found, [TILE], can_reorder=True)  # an order would cost a way through shared memory
    candidate = found >= 0
    if DIGIT > 0:
        candidate &= (found >> (32 - 8 * DIGIT)) == _digits(counts, k, DIGIT)
    bins = tl.histogram((found >> (24 - 8 * DIGIT)) & 255, 256, mask=candidate)
    # Whole numbers: their sum does not depend on the order.
    tl.atomic_add(counts + DIGIT * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")


@kernel("k")
def _threshold(counts, k, threshold):
    tl.store(threshold, _digits(counts, k, 4))


@kernel("numel", "count", "tiles")
def _count(
    bits,
    indices,
    numel,
    count,
    threshold,
    counts,
    tiles,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, _ = _magnitudes(bits, indices, numel, count, GATHER, BLOCK, TILE)
    limit = tl.load(threshold)
    tile = tl.program_id(0)
    tl.store(counts + tile, tl.sum((found > limit).to(tl.int32)))
    tl.store(counts + tiles + tile, tl.sum((found == limit).to(tl.int32)))


@kernel("numel", "count", "ties_up_to", "tiles")
def _write(
    bits,
    indices,
    numel,
    count,
    threshold,
    counts,
    out,
    ties_up_to,
    tiles,
    when,
    WHEN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, positions = _magnitudes(bits, indices, numel, count, GATHER, BLOCK, TILE)
    found, positions = tl.reshape(found, [TILE]), tl.reshape(positions, [TILE])
    limit = tl.load(threshold)
    above = (found > limit).to(tl.int32)
    ties = (found == limit).to(tl.int32)
    # One sum for both counts, in the upper and the lower half of 32 bits; of what is before each element.
    both = (above << 16) | ties
    before = tl.cumsum(both) - both
    tile = tl.program_id(0)
    above_before = tl.load(counts + tile - 1, mask=tile > 0, other=0) + (before >> 16)
    ties_before = tl.load(counts + tiles + tile - 1, mask=tile > 0, other=0) + (before & 0xFFFF)
    room = tl.maximum(ties_up_to - tl.load(counts + tiles - 1), 0)
    if WHEN:
        room = tl.where(tl.load(when) != 0, room, 0)
    chosen = (above > 0) | ((ties > 0) & (ties_before < room))
    tl.store(out + above_before + tl.minimum(ties_before, room), positions, mask=chosen)
