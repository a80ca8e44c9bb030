"""Tables of the rows of a segment's parameters, for kernels that process all rows in one launch.

    table = row_table(rows, u)                         # int64, on the device; cached
    _row_of(table, index, first, last, many, STEPS)    # in a kernel: the number of each index's row

`rows` is the result of `rows_of` in contrib/rows.py, with five numbers for each parameter. The first two are its start
and stop in the segment. Then follow the number of its first row, that of its last row plus one, and the row length.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_sparse.kernels.gradient_table import _bisect
from lightning_sparse.kernels.launch import kept, kernel, tl, to_device

Rows = Sequence[tuple[int, int, int, int, int]]

LONGEST = 1024
"""Most elements of a piece, which is a part of a row that is summed together."""


def row_table(rows: Rows, like: Tensor) -> Tensor:
    """Return each parameter's start, first row, row length and first piece, int64 (4, parameters), cached.

    Pieces are numbered consecutively, row by row.
    """

    def make() -> Tensor:
        starts, _, firsts, _, lengths = zip(*rows, strict=True)
        return to_device(torch.tensor([starts, firsts, lengths, first_pieces(rows)[:-1]], device="cpu"), like.device)

    return kept((row_table, tuple(rows)), like, make)


def of_elements(values: Tensor, rows: Rows, start: int = 0, stop: int | None = None) -> Tensor:
    """Return, for each element of the segment from `start` to `stop`, the value of its row (values: 1-D)."""
    parts = [values[:0]]
    for begin, end, first, _, length in rows:
        left, right = max(begin, start) - begin, min(end, end if stop is None else stop) - begin
        if left < right:
            one, last = left // length, -(-right // length)
            spread = values[first + one : first + last].unsqueeze(1).expand(-1, length).reshape(-1)
            parts.append(spread[left - one * length :][: right - left])
    return torch.cat(parts)


def piece_length(rows: Rows) -> int:
    """Return the most elements of a piece, a power of two that is no larger than the longest row needs."""
    return min(LONGEST, max(64, 1 << (longest_row(rows) - 1).bit_length()))


def longest_row(rows: Rows) -> int:
    """Return the number of elements of the longest row."""
    return max(length for *_, length in rows)


def first_pieces(rows: Rows) -> list[int]:
    """Return the number of the first piece of each parameter, and the number of all pieces as the last one."""
    piece = piece_length(rows)
    return [0, *accumulate((last - first) * -(-length // piece) for _, _, first, last, length in rows)]


@kernel()
def _parameter_of(table, index, first, last, many, STEPS: tl.constexpr):
    """Return the number of each index's parameter. Indices from `first` to `last` nearly always share one."""
    number = _bisect(table, first, many, STEPS)
    behind = _bisect(table, last, many, STEPS)
    parameter = (index * 0).to(tl.int32) + number
    while number < behind:
        number += 1
        parameter += (index >= tl.load(table + number)).to(tl.int32)
    return parameter


@kernel()
def _row_of(table, index, first, last, many, STEPS: tl.constexpr):
    """Return the number of each index's row; see `_parameter_of` for the arguments."""
    parameter = _parameter_of(table, index, first, last, many, STEPS)
    # Offsets in a segment have 31 bits, and a 64-bit division is several times slower.
    within = (index - tl.load(table + parameter)).to(tl.int32)
    return tl.load(table + many + parameter).to(tl.int32) + within // tl.load(table + 2 * many + parameter).to(tl.int32)
