"""The rows of a segment's parameters, for the `Rows` of kernels/row_table.py.

A row of a weight belongs to one of its outputs: `weight[i]` with all further dimensions. A vector or a scalar is one
row.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import NamedTuple

from lightning_sparse.layout import Segment


class Rows(NamedTuple):
    """The rows of one parameter.

    Attributes:
        start, stop: offsets of the parameter in the segment, in elements.
        first, last: number of its first row, and of its last row plus one.
        length: elements of a row.
    """

    start: int
    stop: int
    first: int
    last: int
    length: int


@functools.cache  # no limit: segments are used in turn, so a smaller cache would never hit
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
    """Return the number of rows."""
    rows = rows_of(segment, whole=whole)
    return rows[-1].last if rows else 0
