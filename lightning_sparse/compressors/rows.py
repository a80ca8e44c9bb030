"""The rows of a segment's parameters, and their signs as codes of one bit.

Tiles are for plain torch; where Triton works, kernels/row_table.py says where the rows are.

A row of a weight is what belongs to one of its outputs: `weight[i]`, all further dimensions together. A vector or a
scalar is one row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import at_a_time
from lightning_sparse.layout import Segment


class Rows(NamedTuple):
    """The rows of one parameter.

    Attributes:
        start, stop: offsets of the parameter in the segment, in elements.
        first, last: numbers of its first row and of the one behind its last.
        length: elements of a row.
    """

    start: int
    stop: int
    first: int
    last: int
    length: int


@functools.lru_cache(maxsize=4096)
def rows_of(segment: Segment, *, whole: bool = False) -> tuple[Rows, ...]:
    """Return the rows of each parameter that has elements; if `whole`, each parameter is one row."""
    found, first = [], 0
    for shape, (start, stop) in zip(segment.shapes, pairwise(segment.bounds), strict=True):
        if start < stop:
            last = first + (1 if whole or len(shape) < 2 else shape[0])
            found.append(Rows(start, stop, first, last, (stop - start) // (last - first)))
            first = last
    return tuple(found)


def row_count(segment: Segment, *, whole: bool = False) -> int:
    """Return how many rows there are."""
    rows = rows_of(segment, whole=whole)
    return rows[-1].last if rows else 0


class Tile(NamedTuple):
    """Some whole rows, or a part of one row, that fit into the cache; `start` to `stop` are elements of the segment."""

    start: int
    stop: int
    first: int
    last: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the tile's part of a tensor of the segment's length, (rows, elements of each)."""
        return flat[self.start : self.stop].view(self.last - self.first, -1)


def tiles(rows: Rows, x: Tensor) -> Iterator[Tile]:
    """Cut a parameter of the segment that `x` belongs to into tiles of `at_a_time(x)` elements at most."""
    most = at_a_time(x)
    if rows.length > most:
        for first in range(rows.first, rows.last):
            begin = rows.start + (first - rows.first) * rows.length
            for start in range(begin, begin + rows.length, most):
                yield Tile(start, min(start + most, begin + rows.length), first, first + 1)
        return
    each = most // rows.length
    for first in range(rows.first, rows.last, each):
        last = min(first + each, rows.last)
        begin = rows.start - rows.first * rows.length
        yield Tile(begin + first * rows.length, begin + last * rows.length, first, last)


def groups(rows: Rows, x: Tensor) -> Iterator[list[Tile]]:
    """Yield the tiles of a parameter that together have whole rows: one of some rows, or all those of a long row."""
    for _, group in itertools.groupby(tiles(rows, x), key=lambda tile: tile.first):
        yield list(group)


def scratch_for(x: Tensor) -> Tensor:
    """Return fp32 memory for a tile of the segment that `x` belongs to. A fresh one for each would cost a pass."""
    return torch.empty(min(at_a_time(x), x.numel()), dtype=torch.float32, device=x.device)


def write_scaled_(out: Tensor, rows: Tensor, factors: Tensor) -> None:
    """Write rows times a factor of each to `out`, of which the last row may be shorter.

    Args:
        out: fp32, 1-D; overwritten.
        rows: fp32, (n, length), n · length at least the length of `out`.
        factors: (n, 1).
    """
    if out.numel() == rows.numel():
        torch.mul(rows, factors, out=out.view(rows.shape))
    else:
        out.copy_((rows * factors).view(-1)[: out.numel()])


def negative_masks_(out: Tensor, x: Tensor) -> Tensor:
    """Write -1 (all bits set) where `x` is negative and 0 elsewhere to `out`'s memory, and return it as int32.

    By the sign bit, which is several times as fast on the CPU as to compare; -0 becomes 0 first.

    Args:
        out: fp32, of x's shape; overwritten by whole numbers.
        x: fp32; left as it is.
    """
    return torch.add(x, 0.0, out=out).view(torch.int32).bitwise_right_shift_(31)


def choose_(masks: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Overwrite masks by `upper` where they are 0 and by `lower` where they are -1, bit by bit.

    Args:
        masks: int32, (rows, n), of `negative_masks_`; the memory of an fp32 tensor, which has the values afterwards.
        upper, lower: fp32, (rows, 1).
    """
    upper, lower = upper.view(torch.int32), lower.view(torch.int32)
    masks.bitwise_and_(upper ^ lower).bitwise_xor_(upper)
