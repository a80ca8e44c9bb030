"""Computes a few numbers of each row of a segment's parameters, in one call or, with Triton, in two launches.

    upper, lower = signed_means(u, rows)    # of the non-negatives of each row, and of its negatives

row_table.py describes `rows`. Plain torch sums in fp64, so nothing is out of range. Kernels sum each piece of a row in
fp32, and then add up the pieces in fp64. The order is always the same, so the same u gives the same bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sparse.contrib.kernels.row_table import Rows, first_pieces, longest_row, piece_length, row_table
from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import backend_of, operation
from lightning_sparse.kernels.gradient_table import _bisect, bisections
from lightning_sparse.kernels.launch import kernel, launch, tl

TILE = 1024
"""Number of elements that one program processes, from one piece or several."""
AT_A_TIME = 512
"""Number of pieces whose sums one program adds up at a time, from one row or several."""
SUMS = {"used": 1, "magnitudes": 1, "means": 3, "clipped": 2, "norms": 1}
"""Kinds of numbers, with the number of sums of each piece. cpu/row_numbers.c relies on this order; it has no norms."""


@operation
def used_rows(u: Tensor, rows: Rows) -> Tensor:
    """Return 1 for each row of `u` with an element other than 0, else 0; uint8."""
    return torch.cat([(x != 0).any(1) for x in _rows(u, rows)]).to(torch.uint8)


@operation
def mean_magnitudes(u: Tensor, rows: Rows) -> Tensor:
    """Return the mean magnitude of each row of `u`, fp32 (1, rows)."""
    return torch.cat([x.abs().mean(1, dtype=torch.float64) for x in _rows(u, rows)]).float().unsqueeze(0)


@operation
def signed_means(u: Tensor, rows: Rows) -> Tensor:
    """Return means of each row's non-negative and of its negative elements, 0 if there are none: fp32 (2, rows)."""
    parts = []
    for x in _rows(u, rows):
        positive = (x >= 0).sum(1)
        sums = [part.sum(1, dtype=torch.float64) for part in (x.clamp(min=0), x.clamp(max=0))]  # NaN is in both sums
        counts = positive.clamp(min=1), (x.shape[1] - positive).clamp(min=1)
        parts.append(torch.stack([total / count for total, count in zip(sums, counts, strict=True)]))
    return torch.cat(parts, 1).float()


@operation
def clipped_maxima(u: Tensor, rows: Rows, clip: float) -> Tensor:
    """Return the largest magnitude of each row of `u`, or `clip` times its root mean square if that is less, fp32."""
    parts = []
    for x in _rows(u, rows):
        norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        # 1e30 replaces infinity, which times 0 is NaN.
        parts.append(torch.minimum(x.abs().amax(1), norms * (min(clip, 1e30) / math.sqrt(x.shape[1]))))
    return torch.cat(parts).float()


def norms_of_rows(u: Tensor, rows: Rows) -> Tensor:
    """Return the 2-norm of each row of `u`, fp32, even if squares of its elements are out of range; by Triton."""
    return _numbers(u, rows, "norms")[0]


def _rows(u: Tensor, rows: Rows) -> list[Tensor]:
    """Return an empty tensor, and then the rows of each parameter, (rows, length)."""
    return [u[:0].view(0, 1), *(u[start:stop].view(-1, length) for start, stop, *_, length in rows)]


def _numbers(
    u: Tensor, rows: Rows, kind: str, *, many: int = 1, dtype: torch.dtype = torch.float32, clip: float = 0.0
) -> Tensor:
    """Return `many` numbers of each row, (many, rows), computed by kernels."""
    count = rows[-1][3] if rows else 0
    out = torch.empty(many, count, dtype=dtype, device=u.device)
    if rows and backend_of(u) == "native":
        native.run("row_numbers", u, row_table(rows, u), out, [*SUMS].index(kind), clip, count, len(u), len(rows))
    elif rows:
        table, piece, pieces = row_table(rows, u), piece_length(rows), first_pieces(rows)[-1]
        partial = torch.empty(pieces, SUMS[kind], dtype=torch.float64, device=u.device)
        constants = {"KIND": kind, "SUMS": SUMS[kind], "STEPS": bisections(len(rows)), "PIECE": piece}
        each = TILE // piece
        launch(_of_pieces, -(-pieces // each), u, table, partial, pieces, len(rows), PIECES=each, **constants)
        wide = min(1 << (-(-longest_row(rows) // piece) - 1).bit_length(), AT_A_TIME)
        each = AT_A_TIME // wide
        numbers = clip, count, len(rows)
        launch(_of_rows, -(-count // each), partial, table, out, *numbers, ROWS=each, WIDE=wide, **constants)
    return out


used_rows.by("triton", "native")(lambda u, rows: _numbers(u, rows, "used", dtype=torch.uint8)[0])
mean_magnitudes.by("triton", "native")(lambda u, rows: _numbers(u, rows, "magnitudes"))
signed_means.by("triton", "native")(lambda u, rows: _numbers(u, rows, "means", many=2))
# 1e30 replaces infinity, which times 0 is NaN.
clipped_maxima.by("triton", "native")(lambda u, rows, clip: _numbers(u, rows, "clipped", clip=min(clip, 1e30))[0])


@kernel("pieces", "many")
def _of_pieces(
    u,
    table,
    partial,
    pieces,
    many,
    KIND: tl.constexpr,
    SUMS: tl.constexpr,
    STEPS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)
    present = number < pieces
    number = tl.minimum(number, pieces - 1)
    parameter = _bisect(table + 3 * many, number, many, STEPS)
    length = tl.load(table + 2 * many + parameter)
    each = (length + PIECE - 1) // PIECE
    within = number - tl.load(table + 3 * many + parameter)
    begin = within % each * PIECE
    start = tl.load(table + parameter) + within // each * length + begin
    count = tl.where(present, tl.minimum(length - begin, PIECE), 0)
    lane = tl.arange(0, PIECE)[None, :]
    x = tl.load(u + start[:, None] + lane, mask=lane < count[:, None], other=0.0)
    bits = x.to(tl.int32, bitcast=True)
    # Magnitudes are compared as integers: NaN is larger than infinity.
    largest = tl.max(bits & 0x7FFFFFFF, 1)
    out = partial + number * SUMS
    if KIND == "used":
        tl.store(out, (largest != 0).to(tl.float64), mask=present)
    elif KIND == "clipped" or KIND == "norms":
        # Multiply by a power of two that makes the largest element 1 or more. Then no relevant square is out of range.
        factor = ((254 - tl.minimum(largest >> 23, 253)) << 23).to(tl.float32, bitcast=True)
        x = x * factor[:, None]
        factor = factor.to(tl.float64)
        tl.store(out, tl.sum(x * x, 1).to(tl.float64) / (factor * factor), mask=present)
        if KIND == "clipped":
            tl.store(out + 1, largest.to(tl.float32, bitcast=True).to(tl.float64), mask=present)
    else:
        # If a sum of a piece might be out of range, multiply its elements by 0.5 / PIECE.
        factor = tl.where(largest < 0x77000000, 1.0, 0.5 / PIECE)
        x = x * factor[:, None]
        if KIND == "magnitudes":
            tl.store(out, tl.sum(tl.abs(x), 1).to(tl.float64) / factor, mask=present)
        else:
            # NaN is in both sums.
            tl.store(out, tl.sum(tl.where(x < 0, 0.0, x), 1).to(tl.float64) / factor, mask=present)
            tl.store(out + 1, tl.sum(tl.where(x > 0, 0.0, x), 1).to(tl.float64) / factor, mask=present)
            negative = (bits < 0) & (bits << 1 != 0)  # even if the factor makes the element 0
            tl.store(out + 2, tl.sum(negative.to(tl.int32), 1).to(tl.float64), mask=present)


@kernel("clip", "rows", "many")
def _of_rows(
    partial,
    table,
    out,
    clip,
    rows,
    many,
    KIND: tl.constexpr,
    SUMS: tl.constexpr,
    STEPS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    row = tl.minimum(row, rows - 1)
    parameter = _bisect(table + many, row, many, STEPS)
    length = tl.load(table + 2 * many + parameter)
    each = (length + PIECE - 1) // PIECE
    first = tl.load(table + 3 * many + parameter) + (row - tl.load(table + many + parameter)) * each
    lane = tl.arange(0, WIDE)[None, :]
    one = tl.zeros([ROWS, WIDE], tl.float64)
    two = tl.zeros([ROWS, WIDE], tl.float64)
    three = tl.zeros([ROWS, WIDE], tl.float64)
    most = tl.max(each)
    done = most * 0
    while done < most:
        there = done + lane < each[:, None]
        place = partial + (first[:, None] + done + lane) * SUMS
        one += tl.load(place, mask=there, other=0.0)
        if KIND == "clipped":
            two = tl.maximum(two, tl.load(place + 1, mask=there, other=0.0))
        if KIND == "means":
            two += tl.load(place + 1, mask=there, other=0.0)
            three += tl.load(place + 2, mask=there, other=0.0)
        done += WIDE
    total = tl.sum(one, 1)
    if KIND == "used":
        tl.store(out + row, (total > 0).to(tl.uint8), mask=present)
    elif KIND == "clipped":
        largest = tl.max(two, 1)
        limit = tl.sqrt(total / length) * clip
        tl.store(out + row, tl.where(limit >= largest, largest, limit).to(tl.float32), mask=present)  # NaN stays NaN
    elif KIND == "norms":
        tl.store(out + row, tl.sqrt(total).to(tl.float32), mask=present)
    elif KIND == "magnitudes":
        tl.store(out + row, (total / length).to(tl.float32), mask=present)
    else:
        negatives = tl.sum(three, 1)
        upper = total / tl.maximum(length - negatives, 1.0)
        lower = tl.sum(two, 1) / tl.maximum(negatives, 1.0)
        tl.store(out + row, upper.to(tl.float32), mask=present)
        tl.store(out + rows + row, lower.to(tl.float32), mask=present)
