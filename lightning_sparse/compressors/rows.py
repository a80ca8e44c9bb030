"""The rows of a segment's parameters, and their signs as codes of one bit.

Tiles are for plain torch; where Triton works, kernels/row_table.py says where the rows are.

A row of a weight is what belongs to one of its outputs: `weight[i]`, all further dimensions together. A vector or a
scalar is one row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.kernels.codes import look_up_
from lightning_sparse.kernels.launch import at_a_time, kept
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


def nonnegative(x: Tensor) -> Tensor:
    """Return 1 where `x` is 0 or above, and 0 elsewhere, also for NaN; uint8."""
    found = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    if x.device.type == "cpu":  # there several times as fast as torch
        np.greater_equal(x.numpy(), 0, out=found.numpy())
    else:
        torch.ge(x, 0, out=found)
    return found.view(torch.uint8)


def values_of_signs(packed: Tensor, rows: Sequence[Rows], upper: Tensor, lower: Tensor) -> Tensor:
    """Return what packed signs stand for, fp32: `upper` of the row for 1, and `lower` for 0.

    Args:
        packed: uint8, codes of 1 bit for all elements.
        rows: of the segment, as `rows_of` returns them.
        upper, lower: fp32, 1-D, a value for each row.
    """
    update = torch.empty(rows[-1].stop if rows else 0, dtype=torch.float32, device=packed.device)
    # By bits, so that each value comes out as it is, NaN and infinity too.
    bits, lower = update.view(torch.int32), lower.view(torch.int32).unsqueeze(1)
    changed, masks = upper.view(torch.int32).unsqueeze(1) ^ lower, _masks_of_bytes(packed)
    scratch = torch.empty(min(at_a_time(update), len(update)) + 16, dtype=torch.int32, device=packed.device)
    for each in rows:
        # Of one row a table has the values themselves.
        values = masks & changed[each.first] ^ lower[each.first] if each.last - each.first == 1 else None
        for tile in tiles(each, update):
            out, own = tile.of(bits), slice(tile.first, tile.last)
            first, last = tile.start // 8, -(-tile.stop // 8)
            if values is not None and 8 * (last - first) == out.numel():  # the tile begins and ends with a byte
                look_up_(values, packed[first:last], out)
                continue
            found = look_up_(masks, packed[first:last], scratch[: 8 * (last - first)])
            found = found[tile.start - 8 * first :][: out.numel()].view(out.shape)
            torch.bitwise_and(found, changed[own], out=out).bitwise_xor_(lower[own])
    return update


def _masks_of_bytes(like: Tensor) -> Tensor:
    """Return for each byte -1 (all bits set) for the bits that are 1, and 0 for the others, int32 (256, 8)."""

    def make() -> Tensor:
        places, shifts = (torch.arange(count, device=like.device) for count in (256, 8))
        return (-(places.unsqueeze(1) >> shifts & 1)).to(torch.int32)

    return kept(_masks_of_bytes, like, make)
