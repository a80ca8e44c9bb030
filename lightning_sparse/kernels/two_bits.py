"""Rounds values to two bits: a sign, and one of two magnitudes of each group of 128 values.

    update = round_to_two_bits(values, table, packed)   # writes both tensors; returns the decoded values
    two_bit_values(table, packed, 1000)                 # these values again

The larger magnitude is the mean of all magnitudes above a group's mean magnitude. The smaller one is the mean of the
others. If there are zeros, they stay zero, and the larger one is the mean of all other magnitudes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kernel, launch, tl

GROUP = 128
"""Number of values that share two magnitudes."""
GROUPS = 4
"""Number of groups that one program processes."""


@operation
def round_to_two_bits(values: Tensor, table: Tensor, packed: Tensor) -> Tensor:
    """Write the magnitudes and the codes of values; return the decoded values, fp32, of the same shape.

    Value i of quarter q of a group has bits 2q and 2q + 1 of byte i. The first bit says whether the value is
    larger, the second whether it is negative.

    Args:
        values: fp32, (..., n); not changed. Zeros replace missing values of a group.
        table: fp32, (..., 2 · groups): the smaller and the larger magnitude. Overwritten.
        packed: uint8, (..., 32 · groups). Overwritten.
    """
    *lead, each = values.shape
    groups = packed.shape[-1] // (GROUP // 4)
    rows = torch.zeros(*lead, groups * GROUP, dtype=torch.float32, device=values.device)
    rows[..., :each] = values
    rows = rows.view(*lead, groups, GROUP)
    magnitudes = rows.abs().double()  # in fp64 these sums are accurate and stay in range
    zeros = magnitudes.amin(-1, keepdim=True) == 0
    larger = magnitudes > torch.where(zeros, 0, magnitudes.mean(-1, keepdim=True))
    means = [(magnitudes * chosen).sum(-1) / chosen.sum(-1).clamp(min=1) for chosen in (larger.logical_not(), larger)]
    table.copy_(torch.stack(means, -1).float().view(table.shape))
    codes = (larger.to(torch.uint8) + 2 * (rows < 0).to(torch.uint8)).view(*lead, groups, 4, GROUP // 4)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=values.device)
    packed.copy_((codes << shifts.unsqueeze(-1)).sum(-2, dtype=torch.uint8).view(packed.shape))
    return _by_torch(table, packed)[..., :each]


@round_to_two_bits.by("triton")
def _round_by_triton(values: Tensor, table: Tensor, packed: Tensor) -> Tensor:
    *lead, each = values.shape
    groups, values = packed.shape[-1] // (GROUP // 4), values.contiguous()
    update = torch.empty_like(values)
    if total := math.prod(lead) * groups:
        strides = [part.stride(-2) if lead else 0 for part in (table, packed)]
        launch(_round, -(-total // GROUPS), values, table, packed, update, total, groups, each, *strides, MANY=GROUPS)
    return update


def _lie_at_once(values: Tensor, table: Tensor, packed: Tensor) -> bool:
    return table.is_contiguous() and packed.is_contiguous()


@round_to_two_bits.by("native", when=_lie_at_once)
def _round_in_c(values: Tensor, table: Tensor, packed: Tensor) -> Tensor:
    *lead, each = values.shape
    groups, values = packed.shape[-1] // (GROUP // 4), values.contiguous()
    update = torch.empty_like(values)
    native.run("round_to_two_bits", values, table, packed, update, math.prod(lead), each, groups)
    return update


def two_bit_values(table: Tensor, packed: Tensor, count: int) -> Tensor:
    """Return the first `count` values of each row, fp32, from the magnitudes and codes of `round_to_two_bits`.

    Raises:
        TypeError, ValueError: see `check_part`.
    """
    rows, groups = math.prod(packed.shape[:-1]), packed.shape[-1] // (GROUP // 4)
    native.check_part("codes", packed, rows * -(-count // GROUP) * (GROUP // 4), torch.uint8)
    native.check_part("magnitudes", table, 2 * rows * groups, torch.float32)
    return _values_of(packed, table, count)


@operation
def _values_of(packed: Tensor, table: Tensor, count: int) -> Tensor:
    return _by_torch(table, packed)[..., :count]


@_values_of.by("triton")
def _values_by_triton(packed: Tensor, table: Tensor, count: int) -> Tensor:
    *lead, size = packed.shape
    groups = size // (GROUP // 4)
    out = torch.empty(*lead, count, dtype=torch.float32, device=packed.device)
    if total := math.prod(lead) * groups:
        strides = [part.stride(-2) if lead else 0 for part in (table, packed)]
        launch(_values, -(-total // GROUPS), table, packed, out, total, groups, count, *strides, MANY=GROUPS)
    return out


@_values_of.by("native")
def _values_in_c(packed: Tensor, table: Tensor, count: int) -> Tensor:
    *lead, size = packed.shape
    out = torch.empty(*lead, count, dtype=torch.float32, device=packed.device)
    args = math.prod(lead), count, size // (GROUP // 4)
    native.run("two_bit_values", table.contiguous(), packed.contiguous(), out, *args)
    return out


def _by_torch(table: Tensor, packed: Tensor) -> Tensor:
    *lead, size = packed.shape
    groups = 4 * size // GROUP
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    codes = packed.reshape(*lead, groups, 1, GROUP // 4) >> shifts.unsqueeze(-1)
    smaller, larger = table.reshape(*lead, groups, 2, 1, 1).unbind(-3)
    magnitudes = torch.where(codes & 1 == 1, larger, smaller)
    return torch.where(codes & 2 == 2, -magnitudes, magnitudes).view(*lead, groups * GROUP)


@kernel("total", "groups", "each", "table_each", "packed_each")
def _round(values, table, packed, update, total, groups, each, table_each, packed_each, MANY: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    row = group // groups
    block = group - row * groups
    quarter = tl.arange(0, 4)[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    place = block[:, None, None] * 128 + quarter * 32 + lane
    there = (group < total)[:, None, None] & (place < each)
    x = tl.load(values + row[:, None, None] * each + place, mask=there, other=0.0)
    magnitude = tl.abs(x).to(tl.float64)
    has_zero = tl.min(tl.min(magnitude, 2), 1) == 0
    mean = tl.where(has_zero, 0.0, tl.sum(tl.sum(magnitude, 2), 1) / 128)
    is_larger = magnitude > mean[:, None, None]
    many = tl.sum(tl.sum(is_larger.to(tl.int32), 2), 1)
    larger = tl.sum(tl.sum(tl.where(is_larger, magnitude, 0.0), 2), 1) / tl.maximum(many, 1)
    smaller = tl.sum(tl.sum(tl.where(is_larger, 0.0, magnitude), 2), 1) / tl.maximum(128 - many, 1)
    larger = larger.to(tl.float32)
    smaller = smaller.to(tl.float32)
    pair = table + row * table_each + 2 * block
    tl.store(pair, smaller, mask=group < total)
    tl.store(pair + 1, larger, mask=group < total)
    code = is_larger.to(tl.int32) + 2 * (x < 0).to(tl.int32)
    byte = tl.sum(code << (2 * quarter), 1)
    bytes_at = (row * packed_each + block * 32)[:, None] + tl.arange(0, 32)[None, :]
    tl.store(packed + bytes_at, byte.to(tl.uint8), mask=(group < total)[:, None])
    rounded = tl.where(is_larger, larger[:, None, None], smaller[:, None, None])
    tl.store(update + row[:, None, None] * each + place, tl.where(x < 0, -rounded, rounded), mask=there)


@kernel("total", "groups", "each", "table_each", "packed_each")
def _values(table, packed, out, total, groups, each, table_each, packed_each, MANY: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    row = group // groups
    block = group - row * groups
    pair = table + row * table_each + 2 * block
    smaller = tl.load(pair, mask=group < total, other=0.0)[:, None, None]
    larger = tl.load(pair + 1, mask=group < total, other=0.0)[:, None, None]
    quarter = tl.arange(0, 4)[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    byte_at = (row * packed_each + block * 32)[:, None, None] + lane
    byte = tl.load(packed + byte_at, mask=(group < total)[:, None, None], other=0).to(tl.int32)
    code = (byte >> (2 * quarter)) & 3
    magnitude = tl.where((code & 1) > 0, larger, smaller)
    place = block[:, None, None] * 128 + quarter * 32 + lane
    there = (group < total)[:, None, None] & (place < each)
    tl.store(out + row[:, None, None] * each + place, tl.where(code > 1, -magnitude, magnitude), mask=there)
