"""Blocks of some parameters in 4 or 8 bits, all of them in one launch; `compressors/blocks.py` says what they are.

    table = block_table(places, block, like)                        # where parameters and their blocks are; kept
    quantize_(u, table, bits, block, scales, codes, update)         # u to scales and codes, and what they stand for
    dequantize_(scales, codes, table, bits, block, update)          # these back to what they stand for

Only for where `uses_triton`; the CPU works on a piece at a time, which stays in its cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.gradient_table import _found, bisections
from lightning_sparse.kernels.launch import kept, kernel, launch, to_device

if TYPE_CHECKING:
    import triton.language as tl

TILE = 4096
"""Elements of a program."""


def block_table(places: Sequence[tuple[int, int]], block: int, like: Tensor) -> Tensor:
    """Return of each parameter the number of its first block, its start and its stop, int64 (3, parameters); kept.

    Args:
        places: start and stop of each parameter, none of them empty; a parameter begins with a block of its own.
        block: elements of a block; the last one of a parameter may have fewer.
        like: on the device where the table shall be.
    """

    def make() -> Tensor:
        starts, stops = torch.tensor(places, dtype=torch.int64).T
        counts = (stops - starts + block - 1) // block
        return to_device(torch.stack([counts.cumsum(0) - counts, starts, stops]), like.device)

    return kept((block_table, tuple(places), block), like, make)


def quantize_(u: Tensor, table: Tensor, bits: int, block: int, scales: Tensor, codes: Tensor, update: Tensor) -> None:
    """Write scales, codes and what they stand for.

    Args:
        u: 1-D, fp32.
        table: of `block_table`.
        bits: 4 or 8.
        block: elements of a block, even.
        scales: bf16 (blocks). Overwritten.
        codes: uint8 (blocks, block * bits / 8). Overwritten.
        update: 1-D, fp32, as long as `u`. Overwritten at the table's places.
    """
    _launched(_quantize, u, table, bits, block, scales, codes, update)


def dequantize_(scales: Tensor, codes: Tensor, table: Tensor, bits: int, block: int, update: Tensor) -> None:
    """Write what scales and codes stand for to the table's places in `update`; shapes as for `quantize_`."""
    _launched(_dequantize, update, table, bits, block, scales, codes)


def _launched(kernel, x: Tensor, table: Tensor, bits: int, block: int, scales: Tensor, codes: Tensor, *out: Tensor):
    half = 1 << (block // 2 - 1).bit_length()
    rows = max(1, TILE // (2 * half))
    many = table.shape[1]
    # The interpreter's numpy does not know bf16's bits; 16 bits are 16 bits.
    arguments = (x, table, scales.view(torch.int16), codes, *out, len(scales), many)
    constants = {"STEPS": bisections(many), "BITS": bits, "BLOCK": block, "HALF": half, "ROWS": rows}
    if programs := -(-len(scales) // rows):
        launch(kernel, programs, *arguments, **constants)


@kernel()
def _places(table, row, many, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where each block starts, and how many elements it has, int64."""
    parameter = _found(table, row, many, STEPS)
    start = tl.load(table + many + parameter) + (row - tl.load(table + parameter)) * BLOCK
    return start, tl.minimum(tl.load(table + 2 * many + parameter) - start, BLOCK)


@kernel("rows", "many")
def _quantize(
    u,
    table,
    scales,
    codes,
    update,
    rows,
    many,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    start, count = _places(table, tl.minimum(row, rows - 1), many, STEPS, BLOCK)
    count = tl.where(present, count, 0)
    # Two halves of each block: 4 bits have an element of each in a byte.
    lane = tl.arange(0, HALF)[None, :]
    within = lane < BLOCK // 2
    first = start[:, None] + lane
    has_first = within & (lane < count[:, None])
    has_other = within & (lane + BLOCK // 2 < count[:, None])
    x = tl.load(u + first, mask=has_first, other=0.0)
    y = tl.load(u + first + BLOCK // 2, mask=has_other, other=0.0)
    # Magnitudes as whole numbers, of which NaN is the largest, above infinity.
    bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    # max / L, up to the next number of bf16.
    levels = ((1 << (BITS - 1)) - 1) * 1.0
    exact = tl.div_rn(largest, tl.full([ROWS], levels, tl.float32))
    high = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    high = tl.where(exact != exact, 0x7FC0, high)
    # L steps must not overflow: down for the largest numbers of all, where L + 1/2 steps still reach the value.
    too_large = ((high << 16).to(tl.float32, bitcast=True) * levels == float("inf")) & (exact < float("inf"))
    high = tl.where(too_large, high - 1, high)
    tl.store(scales + row, high.to(tl.int16), mask=present)
    scale = (high << 16).to(tl.float32, bitcast=True)
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    # To the nearest whole number, of two the even one: below 2²² a sum with 1.5 · 2²³ has no place for more.
    x = (tl.div_rn(x, divisor + tl.zeros_like(x)) + 12582912.0) - 12582912.0
    y = (tl.div_rn(y, divisor + tl.zeros_like(y)) + 12582912.0) - 12582912.0
    place = row[:, None] * (BLOCK * BITS // 8) + lane
    if BITS == 4:
        tl.store(codes + place, (x + 8 + 16 * (y + 8)).to(tl.int32).to(tl.uint8), mask=within & present[:, None])
    else:
        tl.store(codes + place, x.to(tl.int32).to(tl.uint8), mask=within & present[:, None])
        tl.store(codes + place + BLOCK // 2, y.to(tl.int32).to(tl.uint8), mask=within & present[:, None])
    tl.store(update + first, x * scale[:, None], mask=has_first)
    tl.store(update + first + BLOCK // 2, y * scale[:, None], mask=has_other)


@kernel("rows", "many")
def _dequantize(
    update,
    table,
    scales,
    codes,
    rows,
    many,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    start, count = _places(table, tl.minimum(row, rows - 1), many, STEPS, BLOCK)
    count = tl.where(present, count, 0)
    lane = tl.arange(0, HALF)[None, :]
    within = lane < BLOCK // 2
    first = start[:, None] + lane
    has_first = within & (lane < count[:, None])
    has_other = within & (lane + BLOCK // 2 < count[:, None])
    high = tl.load(scales + row, mask=present, other=0).to(tl.int32)
    scale = (high << 16).to(tl.float32, bitcast=True)[:, None]
    place = row[:, None] * (BLOCK * BITS // 8) + lane
    if BITS == 4:
        both = tl.load(codes + place, mask=has_first, other=0).to(tl.int32)
        x = (both & 15) - 8
        y = (both >> 4) - 8
    else:
        x = tl.load(codes + place, mask=has_first, other=0).to(tl.int8, bitcast=True)
        y = tl.load(codes + place + BLOCK // 2, mask=has_other, other=0).to(tl.int8, bitcast=True)
    tl.store(update + first, x.to(tl.float32) * scale, mask=has_first)
    tl.store(update + first + BLOCK // 2, y.to(tl.float32) * scale, mask=has_other)
