"""What one pass over u can find out for the selection, if possible the same pass that makes u.

    scan = Scan(len(u), block=64)
    add_(u, parts, grads, 1.0, scan)   # u += gradients, and scan.maxima is there
    scan = Scan(len(u), block=64).read(u)  # where u is there already

The data is worked on in chunks that stay in cache, because a fresh temporary of u's length costs more than reading u:
its pages have to be mapped first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF
"""The bits of an fp32 number without its sign."""

CHUNK = 1 << 20
"""Elements that are worked on at a time: 4 MB, or a fifth of the data where that is less, but not below 0.5 MB."""


class Scan:
    """Block maxima of a vector, and its moments where they are wanted.

    Args:
        numel: its length.
        block: elements that share a maximum, a power of two up to 64. A block of one is its own maximum: nothing is
            stored then.
        moments: whether the sums for mean and deviation are wanted.

    Attributes:
        maxima: largest magnitude of each full block, int32, as bits without the sign; NaN counts as larger than
            infinity. What is left at the end belongs to no block. None until the vector was read, and with block 1.
    """

    def __init__(self, numel: int, block: int, *, moments: bool = False) -> None:
        self.numel = numel
        self.block = block
        self.moments = moments
        self.done = False  # whether the vector was read
        self.maxima: Tensor | None = None
        self._total = self._squares = 0.0

    def read(self, u: Tensor) -> Scan:
        """Read a vector that is there already (1-D, fp32)."""
        return self._over(u)

    def _over(self, u: Tensor, parts: Sequence[tuple[int, int, Tensor]] = (), scale: float = 1.0) -> Scan:
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
            if targets:
                torch._foreach_add_(targets, terms, alpha=scale)
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

    def mean_and_deviation(self) -> tuple[float, float]:
        """Return mean and standard deviation; precise enough for a threshold that will be refined."""
        mean = self._total / self.numel
        return mean, math.sqrt(max(0.0, self._squares / self.numel - mean * mean))


def add_(u: Tensor, bounds: Sequence[int], grads: Sequence[Tensor], scale: float, scan: Scan | None) -> Tensor:
    """Add `scale` times the gradients to u (1-D, fp32), in place, and scan the sum on the way if it is wanted.

    Args:
        u: overwritten with the sum.
        bounds: where each gradient starts in u, and its length as the last one.
        grads: 1-D, of any floating dtype; left as they are.
        scale: factor on the gradients.
        scan: of u's length, filled; None adds only.
    """
    parts = list(zip(bounds[:-1], bounds[1:], grads, strict=True))
    if scan is None:
        torch._foreach_add_([u[start:stop] for start, stop, _ in parts], list(grads), alpha=scale)
    else:
        scan._over(u, parts, scale)
    return u


def chunk_size(numel: int) -> int:
    """Return the length of a chunk: a multiple of every block size."""
    return max(1 << 17, min(CHUNK, numel // 5 // 64 * 64))
