"""Block maxima and moments of u for the selection, computed in one pass, if possible in the pass that forms u.

    stats = BlockStats(len(u), block=64)
    add_with_stats_(u, parts, grads, 1.0, stats)   # u += gradients; fills stats.maxima
    stats = BlockStats(len(u), block=64).read(u)   # of a u that is complete

On the CPU the data is processed in chunks that stay in cache. A fresh temporary of u's length would cost more than
reading u, because its pages have to be mapped first. On CUDA one launch reads the gradients, at any addresses, and u,
and writes u and its maxima: about 12 bytes per element.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.gradient_table import TILE, _address, bisections, gradient_table
from lightning_sparse.kernels.launch import kernel, launch, same_dtype, tl
from lightning_sparse.kernels.native import run

MAGNITUDE = 0x7FFFFFFF
"""Mask of the bits of an fp32 number except its sign."""

CHUNK = 1 << 20
"""Most elements to process at a time: 4 MB. Chunks have a fifth of the data if that is less, but at least 0.5 MB."""


class BlockStats:
    """Block maxima of a vector and, on request, its moments.

    Args:
        numel: length of the vector.
        block: number of elements that share a maximum, a power of two up to 64. With 1, no maxima are stored.
        moments: whether to compute the sums for mean and deviation.

    Attributes:
        maxima: largest magnitude of each full block, int32, as bits without the sign; NaN counts as larger than
            infinity. Elements behind the last full block belong to no block. None with block 1, and until the vector
            has been read.
        partial: sums of each tile's elements and of their squares, (tiles, 2) fp32, on the device. Only Triton kernels
            set it.
    """

    def __init__(self, numel: int, block: int, *, moments: bool = False) -> None:
        self.numel = numel
        self.block = block
        self.moments = moments
        self.done = False  # whether the vector has been read
        self.maxima: Tensor | None = None
        self.partial: Tensor | None = None
        self._total = self._squares = 0.0

    def read(self, u: Tensor) -> BlockStats:
        """Compute the statistics of a complete vector (1-D, fp32)."""
        _read(u, self)
        return self

    def over(self, u: Tensor, form: Callable[[int, int], None] | None = None, size: int | None = None) -> BlockStats:
        """Compute the statistics by plain torch or in C, part by part, after forming each part.

        Args:
            u: 1-D, fp32.
            form: function that writes a part of `u`, given its bounds; None if `u` is complete.
            size: number of elements of a part, a multiple of 64.
        """
        size = size or chunk_size(self.numel)
        assert size % self.block == 0
        self._total = self._squares = 0.0
        blocks = self.numel // self.block
        if self.block > 1:
            self.maxima = torch.empty(blocks, dtype=torch.int32, device=u.device)
        for start in range(0, self.numel, size):
            chunk = u[start : start + size]
            if form is not None:
                form(start, start + chunk.numel())
            full = chunk.numel() // self.block * self.block
            if self.maxima is not None and full:
                block_maxima_(chunk[:full], self.maxima[start // self.block : (start + full) // self.block])
            if self.moments:
                self._total += float(chunk.sum())
                self._squares += float(chunk.dot(chunk))
        self.done = True
        return self

    def mean_and_deviation(self) -> tuple[float, float]:
        """Return mean and standard deviation, precise enough for a threshold that is refined later."""
        if self.partial is not None:
            self._total, self._squares = self.partial.sum(0, dtype=torch.float64).tolist()
        mean = self._total / self.numel
        return mean, math.sqrt(max(0.0, self._squares / self.numel - mean * mean))


@operation
def block_maxima_(u: Tensor, out: Tensor) -> None:
    """Write the largest magnitude of each block of `u` (1-D, fp32) to `out` (int32), one for each block."""
    torch.amax((u.view(torch.int32) & MAGNITUDE).view(len(out), -1), 1, out=out)


@block_maxima_.by("native", when=lambda u, out: u.is_contiguous())
def _block_maxima_in_c(u: Tensor, out: Tensor) -> None:
    run("block_maxima", u, out, len(out), len(u) // len(out))


@operation
def _read(u: Tensor, stats: BlockStats) -> None:
    stats.over(u)


@_read.by("triton")
def _read_by_triton(u: Tensor, stats: BlockStats) -> None:
    _by_triton(u.detach().contiguous(), stats, [], (), 1.0)


def for_kernel(stats: BlockStats | None, u: Tensor, tiles: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Return the arguments that let a kernel compute block statistics of tiles of u: tensors to fill, and constants.

    If a statistic is not wanted, its tensor is `u`, and the kernel does not write it.
    """
    maxima = partial = u
    if stats is not None and stats.block > 1:
        if stats.maxima is None:
            stats.maxima = torch.empty(stats.numel // stats.block, dtype=torch.int32, device=u.device)
        maxima = stats.maxima
    if stats is not None and stats.moments:
        if stats.partial is None:
            stats.partial = torch.empty(tiles, 2, dtype=torch.float32, device=u.device)
        partial = stats.partial
    if stats is not None:
        stats.done = True
    constants = {"MAXIMA": maxima is not u, "MOMENTS": partial is not u, "TILE": TILE, "PART": 256, "num_warps": 8}
    return (maxima, partial), {**constants, "BLOCK": 64 if stats is None else max(stats.block, 16)}


def _by_triton(
    u: Tensor, stats: BlockStats | None, grads: Sequence[Tensor], bounds: Sequence[int], scale: float | Tensor
) -> None:
    """Add gradients of one dtype, if any, to u, and fill `stats` unless it is None, in one launch."""
    numel = u.numel()
    tiles = -(-numel // TILE)
    outputs, constants = for_kernel(stats, u, tiles)
    table = gradient_table(grads, bounds) if grads else u
    if tiles:
        launch(
            _add_with_stats,
            tiles,
            u,
            grads[0] if grads else u,
            table,
            scale,
            *outputs,
            len(grads),
            numel,
            ADD=bool(grads),
            STEPS=bisections(len(grads)) if grads else 0,
            LOAD=isinstance(scale, Tensor),
            **constants,
        )


@kernel("scale", "many", "numel")
def _add_with_stats(
    u,
    typed,
    table,
    scale,
    maxima,
    partial,
    many,
    numel,
    ADD: tl.constexpr,
    STEPS: tl.constexpr,  # Triton 3.6's interpreter takes no tensor as a range, with NumPy 2.5
    LOAD: tl.constexpr,
    MAXIMA: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """`table` comes from `gradient_table`; `typed` only gives the gradients' dtype."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, TILE // BLOCK)
    within = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    offsets = tile * TILE + within
    if ADD:
        factor = scale
        if LOAD:
            factor = tl.load(scale)
        address = tl.load(table + 2 * many + tile)
        if address != 0:
            # Loads without a mask from aligned memory are 16 bytes wide, whatever the length is.
            if address % 16 == 0:
                grad = tl.load(tl.multiple_of(address.to(tl.pointer_type(typed.dtype.element_ty)), 16) + within)
            else:
                grad = tl.load(address.to(tl.pointer_type(typed.dtype.element_ty)) + within)
            x = tl.fma(grad.to(tl.float32), factor, tl.load(u + offsets))
            tl.store(u + offsets, x)
        else:
            # This rare case works on small parts, so that it takes no registers from the common case.
            for part in range(TILE // PART):
                index = tile * TILE + part * PART + tl.arange(0, PART)
                valid = index < numel
                addresses, starts = _address(table, index, many, STEPS)
                places = addresses.to(tl.pointer_type(typed.dtype.element_ty)) + (index - starts)
                grad = tl.load(places, mask=valid, other=0.0).to(tl.float32)
                tl.store(u + index, tl.fma(grad, factor, tl.load(u + index, mask=valid, other=0.0)), mask=valid)
            tl.debug_barrier()
            x = tl.load(u + offsets, mask=offsets < numel, other=0.0)
    elif (tile + 1) * TILE <= numel:
        x = tl.load(u + offsets)
    else:
        x = tl.load(u + offsets, mask=offsets < numel, other=0.0)
    _store_stats(x, tile, maxima, partial, numel, MAXIMA, MOMENTS, BLOCK, TILE)


@kernel()
def _store_stats(
    x,
    tile,
    maxima,
    partial,
    numel,
    MAXIMA: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write block maxima and sums of a tile, (TILE // BLOCK, BLOCK), which is padded with zeros."""
    if MAXIMA:
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        rows = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        tl.store(maxima + rows, largest, mask=rows < numel // BLOCK)
    if MOMENTS:
        tl.store(partial + 2 * tile, tl.sum(x))
        tl.store(partial + 2 * tile + 1, tl.sum(x * x))


@operation
def add_with_stats_(
    u: Tensor, bounds: Sequence[int], grads: Sequence[Tensor], scale: float | Tensor, stats: BlockStats | None
) -> Tensor:
    """Add `scale` times the gradients to u (1-D, fp32), in place, and compute block statistics of the sum.

    Args:
        u: overwritten with the sum.
        bounds: start of each gradient in u, and u's length as the last one.
        grads: 1-D, of any floating dtype; not changed.
        scale: factor on the gradients: a number, or an fp32 scalar on u's device.
        stats: statistics to fill, of u's length; None if they are not wanted.
    """

    def form(start: int, stop: int) -> None:
        parts = list(overlaps(bounds, start, stop))
        terms = [grads[index][left - bounds[index] : right - bounds[index]] for index, left, right in parts]
        _add([u[left:right] for _, left, right in parts], terms, scale)

    if stats is None:
        form(0, u.numel())
    else:
        stats.over(u, form)
    return u


@add_with_stats_.by("triton")
def _add_with_stats_by_triton(
    u: Tensor, bounds: Sequence[int], grads: Sequence[Tensor], scale: float | Tensor, stats: BlockStats | None
) -> Tensor:
    if same_dtype(grads):
        _by_triton(u, stats, [grad.contiguous() for grad in grads], bounds, scale)
        return u
    add_with_stats_.reference(u, bounds, grads, scale, None)
    if stats is not None:
        stats.read(u)
    return u


def overlaps(bounds: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the index of each part that overlaps a range, and the start and stop of the overlap.

    Args:
        bounds: start of each part, and the end of the last one.
        start: start of the range.
        stop: end of the range, exclusive.
    """
    index = bisect.bisect_right(bounds, start) - 1
    while index < len(bounds) - 1 and bounds[index] < stop:
        left, right = max(bounds[index], start), min(bounds[index + 1], stop)
        if left < right:
            yield index, left, right
        index += 1


def _add(targets: Sequence[Tensor], terms: Sequence[Tensor], scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        terms, scale = [term.float() * scale for term in terms], 1.0
    if targets:
        torch._foreach_add_(list(targets), list(terms), alpha=scale)


def chunk_size(numel: int) -> int:
    """Return the length of a chunk, a multiple of every block size."""
    return max(1 << 17, min(CHUNK, numel // 5 // 64 * 64))
