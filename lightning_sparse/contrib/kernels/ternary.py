"""Rounds values to -1, 0 or 1 times a scale for each parameter, all parameters in one call, as TernGrad does.

row_table.py describes `rows`, which has one row for each parameter.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.contrib.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.contrib.kernels.row_table import Rows, _parameter_of, of_elements, row_table
from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import backend_of, operation
from lightning_sparse.kernels.gradient_table import bisections
from lightning_sparse.kernels.launch import kernel, launch, tl
from lightning_sparse.kernels.uniform import FACTORS, _noise, add_uniform_, key_and_step

TILE = 2048
"""Number of elements that one program processes."""


@operation
def round_to_ternary(u: Tensor, rows: Rows, own: Tensor, scales: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Return packed codes 0, 1 and 2 for `u`, and the values that they represent: -1, 0 and 1 times the scales, fp32.

    Args:
        u: 1-D, fp32; not changed.
        rows: rows of its parameters.
        own: limit of each parameter, fp32; `u` is clipped to ± this limit.
        scales: scale of each parameter, fp32, at least `own`.
        key: key of the random numbers for rounding; see `add_uniform_`.
    """
    limits, shares = torch.where(own > 0, own, 1), torch.where(scales > 0, own / scales, 0)
    x = (u / of_elements(limits, rows)).clamp_(-1, 1).mul_(of_elements(shares, rows))
    add_uniform_(x, key).round_()
    return pack_codes(x.to(torch.int8).add_(1).view(torch.uint8), 2), x * of_elements(scales, rows)


@round_to_ternary.by("triton", "native")
def _round_by_kernels(u: Tensor, rows: Rows, own: Tensor, scales: Tensor, key: int) -> tuple[Tensor, Tensor]:
    packed, update = torch.empty(code_bytes(len(u), 2), dtype=torch.uint8, device=u.device), torch.empty_like(u)
    if rows:
        args = (u, row_table(rows, u), own, scales, packed, update, *key_and_step(key), len(u), len(rows))
        if backend_of(u) == "native":
            native.run("round_to_ternary", *args)
        else:
            constants = {"STEPS": bisections(len(rows)), "FIRST": FACTORS[0], "SECOND": FACTORS[1], "TILE": TILE}
            launch(_round, -(-len(u) // TILE), *args, **constants)
    return packed, update


@operation
def ternary_values(codes: Tensor, rows: Rows, scales: Tensor, size: int) -> Tensor:
    """Return the mean values over `size` ranks, fp32, given the sums of their codes, 1-D, uint8 or int16."""
    return (codes.float() - size).div_(size).mul_(of_elements(scales, rows))


@ternary_values.by("triton", "native")
def _values_by_kernels(codes: Tensor, rows: Rows, scales: Tensor, size: int) -> Tensor:
    update = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
    if rows:
        native.check_part("scales", scales, rows[-1][3], torch.float32)
        codes = codes if codes.dtype is torch.uint8 else codes.to(torch.int16)
        args = (codes, row_table(rows, codes), scales, update, size, len(codes), len(rows))
        if backend_of(codes) == "native":
            native.run("ternary_values", *args, codes.itemsize)
        else:
            launch(_values, -(-len(codes) // TILE), *args, STEPS=bisections(len(rows)), TILE=TILE)
    return update


@operation
def sum_of_ternary(packed: Tensor, width: int) -> Tensor:
    """Return the sums over the ranks, int16, of `width` packed 2-bit codes from each: (ranks, bytes)."""
    total = torch.zeros(width, dtype=torch.int16, device=packed.device)
    for row in packed:  # one row at a time stays in the cache
        total.add_(unpack_codes(row, 2, width))
    return total


@sum_of_ternary.by("triton")
def _sum_by_triton(packed: Tensor, width: int) -> Tensor:
    # These codes have one plane, so all rows are unpacked as one.
    return unpack_codes(packed.reshape(-1), 2, width * len(packed)).view(-1, width).sum(0, dtype=torch.int16)


@kernel("key", "step", "many")
def _round(
    u,
    table,
    own,
    scales,
    packed,
    update,
    key,
    step,
    numel,
    many,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TILE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, 4)[None, :]
    index = start + tl.arange(0, TILE // 4)[:, None] * 4 + lane
    valid = index < numel
    x = tl.load(u + index, mask=valid, other=0.0)
    end = tl.minimum(start + TILE, numel) - 1
    parameter = _parameter_of(table, tl.minimum(index, end), start, end, many, STEPS)
    limit = tl.load(own + parameter)
    scale = tl.load(scales + parameter)
    x = tl.div_rn(x, tl.where(limit > 0, limit, 1.0))
    x = tl.where(x > 1, 1.0, tl.where(x < -1, -1.0, x))  # NaN stays NaN
    x = x * tl.where(scale > 0, tl.div_rn(limit, tl.where(scale > 0, scale, 1.0)), 0.0)
    # Round to the nearest integer, of two to the even one: for |x| < 2²², x + 1.5 · 2²³ has no fraction bits.
    x = (x + _noise(index, key, step, FIRST, SECOND) + 12582912.0) - 12582912.0
    byte = tl.sum(tl.where(valid, x.to(tl.int32) + 1, 0) << 2 * lane, 1)
    place = start // 4 + tl.arange(0, TILE // 4)
    # The number of bytes is that of a multiple of 8 codes; this multiple may exceed 31 bits.
    tl.store(packed + place, byte.to(tl.uint8), mask=place < (numel - 1) // 8 * 2 + 2)
    tl.store(update + index, x * scale, mask=valid)


@kernel("size", "many")
def _values(codes, table, scales, update, size, numel, many, STEPS: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    index = start + tl.arange(0, TILE)
    valid = index < numel
    end = tl.minimum(start + TILE, numel) - 1
    parameter = _parameter_of(table, tl.minimum(index, end), start, end, many, STEPS)
    x = (tl.load(codes + index, mask=valid, other=0).to(tl.int32) - size).to(tl.float32)
    x = tl.div_rn(x, tl.zeros_like(x) + size) * tl.load(scales + parameter)
    tl.store(update + index, x, mask=valid)
