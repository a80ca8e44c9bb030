"""Packs the signs of a segment's rows into bits, decodes them, and counts votes: all parameters in one call.

    packed, update = write_signs(u, rows, upper, lower)    # a bit for each sign, and its value
    read_signs(packed, rows, upper, lower)                 # the same update

row_table.py describes `rows`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.contrib.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.contrib.kernels.row_table import Rows, _row_of, of_elements, row_table
from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import backend_of, operation
from lightning_sparse.kernels.gradient_table import bisections
from lightning_sparse.kernels.launch import kernel, launch, tl

TILE = 1024
"""Number of elements that one program processes."""


@operation
def write_signs(u: Tensor, rows: Rows, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs as packed codes, 0 as positive and NaN as negative, and the values that they represent, fp32.

    Args:
        u: 1-D, fp32; not changed.
        rows: rows of its parameters.
        upper, lower: values of positive and of negative signs in each row, fp32.
    """
    packed = pack_codes((u >= 0).to(torch.uint8), 1)
    return packed, _values_of_signs(packed, rows, upper, lower)


@write_signs.by("triton", "native")
def _write_by_kernels(u: Tensor, rows: Rows, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    packed, update = torch.empty(code_bytes(len(u), 1), dtype=torch.uint8, device=u.device), torch.empty_like(u)
    if rows:
        args = (u, row_table(rows, u), upper, lower, packed, update, len(u), len(rows))
        if backend_of(u) == "native":
            native.run("write_signs", *args)
        else:
            launch(_write_signs, -(-len(u) // TILE), *args, STEPS=bisections(len(rows)), TILE=TILE)
    return packed, update


def read_signs(packed: Tensor, rows: Rows, upper: Tensor, lower: Tensor) -> Tensor:
    """Return the values that packed signs represent, fp32; see `write_signs` for the arguments."""
    native.check_part("signs", packed, code_bytes(rows[-1][1] if rows else 0, 1), torch.uint8)
    return _values_of_signs(packed.contiguous(), rows, upper, lower)  # a column of gathered messages is not contiguous


@operation
def _values_of_signs(packed: Tensor, rows: Rows, upper: Tensor, lower: Tensor) -> Tensor:
    positive = unpack_codes(packed, 1, rows[-1][1] if rows else 0).bool()
    return torch.where(positive, of_elements(upper, rows), of_elements(lower, rows))


@_values_of_signs.by("triton", "native")
def _read_by_kernels(packed: Tensor, rows: Rows, upper: Tensor, lower: Tensor) -> Tensor:
    numel = rows[-1][1] if rows else 0
    update = torch.empty(numel, dtype=torch.float32, device=packed.device)
    if rows:
        args = (packed, row_table(rows, packed), upper, lower, update, numel, len(rows))
        if backend_of(packed) == "native":
            native.run("read_signs", *args)
        else:
            launch(_read_signs, -(-numel // TILE), *args, STEPS=bisections(len(rows)), TILE=TILE)
    return update


@operation
def count_votes(votes: Tensor, used: Tensor, rows: Rows, start: int, turn: int) -> Tensor:
    """Return the signs that most ranks sent for a region of a segment, as packed codes; zeros behind the segment's end.

    Args:
        votes: packed signs of the region, from each rank, uint8 (ranks, bytes).
        used: 1 if a rank votes in a row of the segment, else 0; uint8 (ranks, rows or more), contiguous.
        rows: rows of the segment.
        start: offset of the region in the segment, in elements.
        turn: the rank whose vote decides a tie; if it does not vote, the next rank that votes.
    """
    # CPUs with the loops in C use this code, too, so numbers have few bits.
    size, width, numel = len(votes), 8 * votes.shape[1], rows[-1][1] if rows else 0
    start, stop = min(start, numel), min(start + width, numel)
    total = torch.zeros(stop - start, dtype=torch.int16, device=votes.device)  # 8 bits would be too few for 128 votes
    decisive = torch.zeros(stop - start, dtype=torch.int8, device=votes.device)
    for place in range(size):
        voter = (turn + place) % size
        vote = unpack_codes(votes[voter], 1, stop - start).view(torch.int8).mul_(2).sub_(1)
        vote.mul_(of_elements(used[voter], rows, start, stop).view(torch.int8))
        total.add_(vote)
        decisive.add_(vote * (1 - decisive.abs()))
    # The number is never 0 if a rank votes. The code, from the sign bit, is 1 for positive.
    won = total.mul_(2).add_(decisive).bitwise_right_shift_(15).add_(1).to(torch.uint8)
    return pack_codes(torch.nn.functional.pad(won, (0, width - len(won))), 1)


@count_votes.by("triton")
def _count_by_triton(votes: Tensor, used: Tensor, rows: Rows, start: int, turn: int) -> Tensor:
    won = torch.empty(votes.shape[1], dtype=torch.uint8, device=votes.device)
    if len(won):
        size, each, numel = len(votes), used.shape[1], rows[-1][1]
        numbers = start, numel, size, turn, votes.stride(0), each, len(won), len(rows)
        constants = {"STEPS": bisections(len(rows)), "TILE": TILE}
        launch(_count_votes, -(-8 * len(won) // TILE), votes, used, row_table(rows, votes), won, *numbers, **constants)
    return won


@kernel("many")
def _write_signs(u, table, upper, lower, packed, update, numel, many, STEPS: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, 8)[None, :]
    index = start + tl.arange(0, TILE // 8)[:, None] * 8 + lane
    valid = index < numel
    x = tl.load(u + index, mask=valid, other=-1.0)
    end = tl.minimum(start + TILE, numel) - 1
    row = _row_of(table, tl.minimum(index, end), start, end, many, STEPS)
    bits = x.to(tl.int32, bitcast=True)
    positive = ((bits >= 0) | (bits << 1 == 0)) & (x == x)
    byte = tl.sum(positive.to(tl.int32) << lane, 1)
    place = start // 8 + tl.arange(0, TILE // 8)
    tl.store(packed + place, byte.to(tl.uint8), mask=place * 8 < numel)
    value = tl.load(tl.where(positive, upper + row, lower + row))
    tl.store(update + index, value, mask=valid)


@kernel("many")
def _read_signs(packed, table, upper, lower, update, numel, many, STEPS: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    index = start + tl.arange(0, TILE)
    valid = index < numel
    end = tl.minimum(start + TILE, numel) - 1
    row = _row_of(table, tl.minimum(index, end), start, end, many, STEPS)
    positive = tl.load(packed + index // 8, mask=valid, other=0).to(tl.int32) >> (index % 8).to(tl.int32) & 1
    value = tl.load(tl.where(positive == 1, upper + row, lower + row))
    tl.store(update + index, value, mask=valid)


@kernel("begin", "size", "turn", "votes_each", "used_each", "width", "many")
def _count_votes(
    votes,
    used,
    table,
    won,
    begin,
    numel,
    size,
    turn,
    votes_each,
    used_each,
    width,
    many,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    place = start // 8 + tl.arange(0, TILE // 8)
    lane = tl.arange(0, 8)[None, :]
    index = begin + place[:, None] * 8 + lane
    valid = index < numel
    end = tl.minimum(begin + start + TILE, numel) - 1
    row = _row_of(table, tl.minimum(index, end), tl.minimum(begin + start, end), end, many, STEPS)
    total = tl.zeros([TILE // 8, 8], tl.int32)
    decisive = total
    voter = turn.to(tl.int64)
    for _ in range(size):
        byte = tl.load(votes + voter * votes_each + place, mask=place < width, other=0).to(tl.int32)
        vote = ((byte[:, None] >> lane & 1) * 2 - 1) * tl.load(used + voter * used_each + row).to(tl.int32)
        total += vote
        decisive = tl.where(decisive == 0, vote, decisive)
        voter = tl.where(voter + 1 < size, voter + 1, 0)
    # The number is never 0 if a rank votes. The code is 1 for positive.
    code = (valid & (2 * total + decisive >= 0)).to(tl.int32)
    tl.store(won + place, tl.sum(code << lane, 1).to(tl.uint8), mask=place < width)
