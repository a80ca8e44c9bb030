"""Where a segment's gradients lie in memory, for kernels that go through all of them in one launch.

table = gradient_table(grads, bounds)   # int64, on the device; kept, as gradients stay where they are
_address(table, index, many, STEPS)     # in a kernel: the address and the gradient's start, of each index
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kept, kernel, to_device

if TYPE_CHECKING:
    import triton.language as tl

TILE = 4096
"""Consecutive elements of a segment that the table knows about together."""


def gradient_table(grads: Sequence[Tensor | None], bounds: Sequence[int]) -> Tensor:
    """Return where gradients lie, int64, on their device: kept for as long as they lie there.

    The first part has the start of each gradient in the segment, the second part its address. The third part has, of
    each tile of 4,096 elements, the address of the first where all of them are of one gradient, and 0 elsewhere.

    Args:
        grads: 1-D, contiguous, of one dtype. The address of None is 0; at least one is not None.
        bounds: where each gradient starts in the segment, and the segment's length as the last one.
    """
    some = next(grad for grad in grads if grad is not None)
    addresses, size = tuple(0 if grad is None else grad.data_ptr() for grad in grads), some.element_size()
    there = [grad is not None for grad in grads]

    def make() -> Tensor:
        table = torch.zeros(2 * len(grads) + -(-bounds[-1] // TILE), dtype=torch.int64, device="cpu")
        table[: 2 * len(grads)] = torch.tensor([*bounds[:-1], *addresses], device="cpu")
        for start, stop, address, is_there in zip(bounds, bounds[1:], addresses, there, strict=False):
            first, last = -(-start // TILE), stop // TILE
            if first < last and is_there:
                offsets = torch.arange(first, last, device="cpu") * TILE - start
                table[2 * len(grads) :][first:last] = address + size * offsets
        return to_device(table, some.device)

    return kept((gradient_table, addresses, size, *bounds), some, make)


def bisections(count: int) -> int:
    """Return how many steps `_bisect` takes among so many starts."""
    return (count - 1).bit_length()


@kernel()
def _bisect(starts, index, many, STEPS: tl.constexpr):
    """Return which of `many` ascending starts, the first of them 0, is the last at each index or before it."""
    # It is one of first, ..., behind - 1.
    first = (index * 0).to(tl.int32)
    behind = first + many
    for _ in range(STEPS):
        middle = (first + behind) // 2
        reached = tl.load(starts + middle, mask=middle < many, other=0x7FFFFFFFFFFFFFFF) <= index
        first = tl.where(reached, middle, first)
        behind = tl.where(reached, behind, middle)
    return first


@kernel()
def _address(table, index, many, STEPS: tl.constexpr):
    """Return, of the gradients that have the indices, the address in memory and the start in the segment, int64."""
    first = _bisect(table, index, many, STEPS)
    return tl.load(table + many + first), tl.load(table + first)
