"""Tables of gradients' addresses, for kernels that process all gradients of a segment in one launch.

    table = gradient_table(grads, bounds)   # int64, on the device, cached
    _address(table, index, many, STEPS)     # in a kernel: address and start, for each index

Tables are cached by address, because gradients mostly stay at their addresses.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kept, kernel, tl, to_device

TILE = 4096
"""Number of consecutive elements of a segment that share an entry of the table's third part."""


class Placed(list[Tensor]):
    """Gradients whose table is at a fixed address, so that a CUDA graph can be replayed for other gradients.

    Args:
        table: their table.
    """

    def __init__(self, grads: Sequence[Tensor], table: Tensor) -> None:
        super().__init__(grads)
        self.table = table


def gradient_table(grads: Sequence[Tensor | None], bounds: Sequence[int]) -> Tensor:
    """Return a table of the gradients' addresses, int64, on their device; it is cached for these addresses.

    The first part holds the start of each gradient in the segment, and the second part its address. The third part has
    a number for each tile of 4,096 elements. If all of them belong to one gradient, it is the address of the tile's
    first element, else 0.

    Args:
        grads: 1-D, contiguous, of one dtype. The address of None is 0; at least one is not None.
        bounds: start of each gradient in the segment, and the segment's length as the last one.
    """
    if isinstance(grads, Placed):
        return grads.table
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
    """Return the number of steps that `_bisect` needs for `count` starts."""
    return (count - 1).bit_length()


@kernel()
def _bisect(starts, index, many, STEPS: tl.constexpr):
    """Return the number of the last of `many` ascending starts, the first one 0, that is at most each index."""
    # The result is one of first, ..., behind - 1.
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
    """Return the address in memory and the start in the segment of each index's gradient, int64."""
    first = _bisect(table, index, many, STEPS)
    return tl.load(table + many + first), tl.load(table + first)
