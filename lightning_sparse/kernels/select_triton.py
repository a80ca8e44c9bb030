"""Exact top-k by Triton: a radix select of the threshold, a count per tile, and writing in order.

The same steps serve the block maxima and, of the chosen blocks (see `select.py`), the elements that reach the least of
these maxima. Those are copied once, so that the steps need not read the blocks again. All shapes follow from k, so the
host never waits for the device; no program waits for another, and no result depends on which comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import launch
from lightning_sparse.kernels.select_kernels import (
    PART,
    SCRATCH,
    THRESHOLD,
    TILE,
    _count,
    _histogram,
    _keep,
    _threshold,
    _write,
)

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
        shape = {"KEPT": False, "GATHER": gathered, "BLOCK": self.size, "TILE": TILE, "PART": TILE, "num_warps": warps}
        indices = self.bits if self.indices is None else self.indices
        launch(kernel, self.tiles, self.bits, indices, self.bits.numel(), self.count, *args, **shape | constants)


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
        blocks.launch(_keep, bound, self.found, self.places, self.numbers, counts, PART=PART)

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel over all tiles."""
        constants |= {"KEPT": True, "GATHER": False, "BLOCK": self.blocks.size, "TILE": TILE, "PART": PART}
        args = (self.found, self.numbers, self.blocks.bits.numel(), 0, *args)
        launch(kernel, self.tiles, *args, **constants, num_warps=4)


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
