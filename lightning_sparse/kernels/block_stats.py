"""What one pass over u can find out for the selection, if possible the same pass that makes u.

    stats = BlockStats(len(u), block=64)
    add_with_stats_(u, parts, grads, 1.0, stats)   # u += gradients, and stats.maxima is there
    stats = BlockStats(len(u), block=64).read(u)  # where u is there already

On CPU the data is worked on in chunks that stay in cache, because a fresh temporary of u's length costs more than
reading u: its pages have to be mapped first. On CUDA one kernel reads gradient and u, writes u and its maxima: about
12 bytes an element.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, launch, uses_triton

if TYPE_CHECKING:
    import triton.language as tl

MAGNITUDE = 0x7FFFFFFF
"""The bits of an fp32 number without its sign."""

CHUNK = 1 << 20
"""Elements that are worked on at a time: 4 MB, or a fifth of the data where that is less, but not below 0.5 MB."""

TILE = 4096
"""Elements that one program of the kernel works on; a multiple of every block size."""

FUSED = 1 << 20
"""Gradients from this length on are added by the kernel that scans; a launch for each shorter one would cost more than
reading u once more. An estimate: no GPU has been asked yet."""


class BlockStats:
    """Block maxima of a vector, and its moments where they are wanted.

    Args:
        numel: its length.
        block: elements that share a maximum, a power of two up to 64. A block of one is its own maximum: nothing is
            stored then.
        moments: whether the sums for mean and deviation are wanted.

    Attributes:
        maxima: largest magnitude of each full block, int32, as bits without the sign; NaN counts as larger than
            infinity. What is left at the end belongs to no block. None until the vector was read, and with block 1.
        sums: of all elements and of their squares, fp64, where the kernel has found them; they stay on the device.
    """

    def __init__(self, numel: int, block: int, *, moments: bool = False) -> None:
        self.numel = numel
        self.block = block
        self.moments = moments
        self.done = False  # whether the vector was read
        self.maxima: Tensor | None = None
        self.sums: Tensor | None = None
        self._total = self._squares = 0.0

    def read(self, u: Tensor) -> BlockStats:
        """Read a vector that is there already (1-D, fp32)."""
        return self._by_triton(u.detach().contiguous()) if uses_triton(u) else self._over(u)

    def _over(
        self, u: Tensor, parts: Sequence[tuple[int, int, Tensor]] = (), scale: float | Tensor = 1.0
    ) -> BlockStats:
        size = chunk_size(self.numel)
        pending = list(reversed(parts))
        blocks = self.numel // self.block
        if self.block > 1:
            self.maxima = torch.empty(blocks, dtype=torch.int32, device=u.device)
            scratch = torch.empty(min(size, self.numel), dtype=torch.int32, device=u.device)
        for start in range(0, self.numel, size):
            chunk = u[start : start + size]
            stop = start + chunk.numel()
            targets, terms = [], []
            while pending and pending[-1][0] < stop:
                first, last, grad = pending[-1]
                left, right = max(first, start), min(last, stop)
                targets.append(u[left:right])
                terms.append(grad[left - first : right - first])
                if last > stop:
                    break
                pending.pop()
            _add(targets, terms, scale)
            full = chunk.numel() // self.block * self.block
            if self.maxima is not None and full:
                magnitudes = torch.bitwise_and(chunk[:full].view(torch.int32), MAGNITUDE, out=scratch[:full])
                out = self.maxima[start // self.block : (start + full) // self.block]
                torch.amax(magnitudes.view(-1, self.block), 1, out=out)
            if self.moments:
                self._total += float(chunk.sum())
                self._squares += float(chunk.dot(chunk))
        self.done = True
        return self

    def _by_triton(
        self, u: Tensor, parts: Sequence[tuple[int, int, Tensor]] = (), scale: float | Tensor = 1.0
    ) -> BlockStats:
        tiles = -(-self.numel // TILE)
        partial = torch.empty(tiles if self.moments else 0, 2, dtype=torch.float32, device=u.device)
        if self.block > 1:
            self.maxima = torch.empty(self.numel // self.block, dtype=torch.int32, device=u.device)
        factor = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=torch.float32, device=u.device)
        runs, targets, terms = _runs(u, parts, tiles)
        _add(targets, terms, scale)
        for first, last, start, grad in runs:
            launch(
                _add_with_stats,
                last - first,
                u,
                u if grad is None else grad,
                factor,
                u if self.maxima is None else self.maxima,
                partial,
                first,
                start,
                self.numel,
                ADD=grad is not None,
                MAXIMA=self.maxima is not None,
                MOMENTS=self.moments,
                BLOCK=max(self.block, 16),
                TILE=TILE,
                num_warps=8,
            )
        if self.moments:
            self.sums = partial.sum(0, dtype=torch.float64)
        self.done = True
        return self

    def mean_and_deviation(self) -> tuple[float, float]:
        """Return mean and standard deviation; precise enough for a threshold that will be refined."""
        if self.sums is not None:
            self._total, self._squares = self.sums.tolist()
        mean = self._total / self.numel
        return mean, math.sqrt(max(0.0, self._squares / self.numel - mean * mean))


Run = tuple[int, int, int, Tensor | None]


def _runs(
    u: Tensor, parts: Sequence[tuple[int, int, Tensor]], tiles: int
) -> tuple[list[Run], list[Tensor], list[Tensor]]:
    """Divide the work between the kernel and a plain addition before it.

    Returns:
        The launches, as (first tile, last tile, where the gradient starts in u, gradient or None to read only), which
        go through each tile once; and slices of u with what has to be added to them before: short gradients, and what
        a long one has left and right of its full tiles.
    """
    runs: list[Run] = []
    targets, terms = [], []
    done = 0
    for start, stop, grad in parts:
        first, last = -(-start // TILE), stop // TILE
        if stop - start < FUSED or first >= last or not grad.is_contiguous():
            first = last = -(-stop // TILE)
        else:
            if done < first:
                runs.append((done, first, 0, None))
            runs.append((first, last, start, grad))
            done = last
        for left, right in ((start, min(stop, first * TILE)), (last * TILE, stop)):
            if left < right:
                targets.append(u[left:right])
                terms.append(grad[left - start : right - start])
    if done < tiles:
        runs.append((done, tiles, 0, None))
    return runs, targets, terms


@kernel("first", "numel")
def _add_with_stats(
    u,
    grad,
    scale,
    maxima,
    partial,
    first,
    start,
    numel,
    ADD: tl.constexpr,
    MAXIMA: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64) + first
    rows = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Loads without a mask are 16 bytes wide whatever the length is. Tiles with a gradient are always full.
    if ADD:
        x = tl.fma(tl.load(grad + (offsets - start)).to(tl.float32), tl.load(scale), tl.load(u + offsets))
        tl.store(u + offsets, x)
    elif (tile + 1) * TILE <= numel:
        x = tl.load(u + offsets)
    else:
        x = tl.load(u + offsets, mask=offsets < numel, other=0.0)
    if MAXIMA:
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        tl.store(maxima + rows, largest, mask=rows < numel // BLOCK)
    if MOMENTS:
        tl.store(partial + 2 * tile, tl.sum(x))
        tl.store(partial + 2 * tile + 1, tl.sum(x * x))


def add_with_stats_(
    u: Tensor, bounds: Sequence[int], grads: Sequence[Tensor], scale: float | Tensor, stats: BlockStats | None
) -> Tensor:
    """Add `scale` times the gradients to u (1-D, fp32), in place, and scan the sum on the way if it is wanted.

    Args:
        u: overwritten with the sum.
        bounds: where each gradient starts in u, and its length as the last one.
        grads: 1-D, of any floating dtype; left as they are.
        scale: factor on the gradients: a number, or an fp32 scalar on u's device.
        stats: of u's length, filled; None adds only.
    """
    parts = list(zip(bounds[:-1], bounds[1:], grads, strict=True))
    if stats is None:
        _add([u[start:stop] for start, stop, _ in parts], grads, scale)
    elif uses_triton(u):
        stats._by_triton(u, parts, scale)
    else:
        stats._over(u, parts, scale)
    return u


def _add(targets: Sequence[Tensor], terms: Sequence[Tensor], scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        terms, scale = [term.float() * scale for term in terms], 1.0
    if targets:
        torch._foreach_add_(list(targets), list(terms), alpha=scale)


def chunk_size(numel: int) -> int:
    """Return the length of a chunk: a multiple of every block size."""
    return max(1 << 17, min(CHUNK, numel // 5 // 64 * 64))
