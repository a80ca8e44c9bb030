"""Exact top-k by Triton: a radix select of the threshold, a count for each tile, and a pass that writes in order.

These steps run first on the block maxima. They run again on the elements of the chosen blocks (see `select.py`) that
reach the least of these maxima. Those elements are copied once, so that the steps need not read the blocks again. All
shapes follow from k, so the host never waits for the device. No program waits for another, and the result does not
depend on their order.
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
    _write,
)

ADDED_UP = 4096
"""With more tiles than this, a prefix sum of the counts is computed first; otherwise each program sums them."""


@dataclass(frozen=True)
class Blocks:
    """The elements that kernels search: some blocks of `bits` (int32, 1-D), or all of them.

    Attributes:
        bits: numbers whose sign bit is ignored.
        indices: numbers of the blocks, int64, ascending; None means all blocks.
        size: number of elements per block, a power of two. The last block may have fewer.
    """

    bits: Tensor
    indices: Tensor | None = None
    size: int = 64

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.bits.numel() // self.size) if self.indices is None else self.indices.numel()

    @property
    def tiles(self) -> int:
        """The number of programs that search them."""
        return -(-self.count * self.size // TILE)

    def launch(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel over all tiles."""
        gathered = self.indices is not None
        warps = 8 if self.size > 1 else 16  # with one index per element, a program needs more registers
        shape = {"KEPT": False, "GATHER": gathered, "BLOCK": self.size, "TILE": TILE, "PART": TILE, "num_warps": warps}
        indices = self.bits if self.indices is None else self.indices
        launch(kernel, self.tiles, self.bits, indices, self.bits.numel(), self.count, *args, **shape | constants)


class Kept:
    """Copies the elements of some blocks that reach a bound, tile by tile, and computes their first digit's histogram.

    Args:
        blocks: the blocks to search.
        bound: int32, on the device.
        counts: zeros of size `SCRATCH`, for the selection from the kept elements.
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
    """Return the int64 indices of the k largest magnitudes, ascending; by Triton.

    Args:
        bits: int32, 1-D, at least k.
        k: number of indices.
        maxima: maxima of the full blocks, at least k; None searches all elements.
        size: number of elements per block.
    """
    counts = zeros(bits.device)
    if maxima is None:
        return select(Blocks(bits), counts[0], k, k)
    blocks = blocks_of_largest(bits, maxima, size, k, counts[0])
    return select(Kept(blocks, counts[0, THRESHOLD:], counts[1]), counts[1], k, k)


def zeros(device: torch.device) -> Tensor:
    """Return the scratch memory of two selections, zeros; see `SCRATCH`."""
    return torch.zeros(2, SCRATCH, dtype=torch.int32, device=device)


def blocks_of_largest(
    bits: Tensor, maxima: Tensor, size: int, k: int, counts: Tensor, tops: Tensor | None = None
) -> Blocks:
    """Return the blocks of the k largest maxima, and the block at the end of `bits` if it is not full."""
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
    """Return the int64 indices of the k largest magnitudes of a source, at least k, ascending; by Triton.

    Args:
        source: the elements to search.
        counts: size `SCRATCH`; zeros except the histogram that `source` has computed.
        k: number of indices.
        size: the length of the result; with `limits` it is padded with `len(bits)`.
        limits: int32, on the device: if `source` has at most `limits[1]` elements, all of them are selected.
        tops: int32 of length `size`; overwritten with the magnitudes.
        end: whether to append the number of all elements as one more index.
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


def _digits(source: Blocks | Kept, counts: Tensor, k: int, limits: Tensor | None) -> None:
    """Compute the histogram of each digit, of numbers that share all earlier digits with the k-th largest one."""
    for digit in range(isinstance(source, Kept), 4):
        args = (counts, k, counts if limits is None else limits)
        source.launch(_histogram, *args, DIGIT=digit, LIMITED=limits is not None)
