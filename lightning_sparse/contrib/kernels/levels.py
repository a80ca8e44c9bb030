"""Rounds values at random to a few levels of their bucket's norm, in a few launches or one call, as QSGD does.

    norms, packed, update = round_to_levels(u, levels, bits, bucket, key)    # payload and update
    level_values(norms, packed, levels, bits, bucket, len(u))                # the same update

row_numbers.py describes how norms are summed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sparse.contrib.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.contrib.kernels.row_numbers import norms_of_rows
from lightning_sparse.contrib.kernels.row_table import Rows
from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import at_a_time, kernel, launch, tl
from lightning_sparse.kernels.uniform import FACTORS, _noise, add_uniform_, key_and_step

TILE = 1024
"""Number of elements that one program processes."""


@operation
def round_to_levels(u: Tensor, levels: int, bits: int, bucket: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of each bucket, packed codes, and the values that they represent, fp32.

    Args:
        u: 1-D, fp32; not changed.
        levels: number of levels above 0; the code of 0 is `levels`.
        bits: number of bits of a code, at most 8.
        bucket: number of elements that share a norm.
        key: key of the random numbers for rounding; see `add_uniform_`.
    """
    # If the last bucket is not full, it is padded with zeros and forms a separate piece.
    rows, full = pad(u, (0, -len(u) % bucket)).view(-1, bucket), len(u) // bucket
    pieces = [*rows[:full].split(max(1, at_a_time(u) // bucket)), rows[full:]]
    norms = torch.cat([_norms(piece) for piece in pieces])
    steps = _of_elements(norms / levels, bucket, len(u))
    x = u / torch.where(steps > 0, steps, 1)
    # By rounding, the largest value may exceed its norm. Then its level would exceed `levels`.
    add_uniform_(x, key).round_().clamp_(-levels, levels)
    codes = x.to(torch.int8).add_(levels).view(torch.uint8)  # wraps around above 127
    return norms, pack_codes(codes, bits), x * steps


@round_to_levels.by("triton")
def _round_by_triton(u: Tensor, levels: int, bits: int, bucket: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    numel, update = len(u), torch.empty_like(u)
    norms = norms_of_rows(u, _buckets(numel, bucket))
    codes = torch.empty(numel, dtype=torch.uint8, device=u.device)
    if numel:
        constants = {"FIRST": FACTORS[0], "SECOND": FACTORS[1], "TILE": TILE}
        args = (u, norms, codes, update, *key_and_step(key), numel, levels, bucket)
        launch(_round_to_levels, -(-numel // TILE), *args, **constants)
    return norms, pack_codes(codes, bits), update


@round_to_levels.by("native")
def _round_in_c(u: Tensor, levels: int, bits: int, bucket: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    numel, update = len(u), torch.empty_like(u)
    norms = torch.empty(-(-numel // bucket), dtype=torch.float32, device=u.device)
    packed = torch.empty(code_bytes(numel, bits), dtype=torch.uint8, device=u.device)
    native.run("round_to_levels", u, norms, packed, update, *key_and_step(key), numel, levels, bits, bucket)
    return norms, packed, update


def level_values(norms: Tensor, packed: Tensor, levels: int, bits: int, bucket: int, numel: int) -> Tensor:
    """Return the values of `numel` codes, fp32; see `round_to_levels` for the arguments."""
    native.check_part("norms", norms, -(-numel // bucket), torch.float32)
    native.check_part("codes", packed, code_bytes(numel, bits), torch.uint8)
    return _values(norms, packed, levels, bits, bucket, numel)


@operation
def _values(norms: Tensor, packed: Tensor, levels: int, bits: int, bucket: int, numel: int) -> Tensor:
    return (unpack_codes(packed, bits, numel).float() - levels) * _of_elements(norms / levels, bucket, numel)


@_values.by("triton")
def _values_by_triton(norms: Tensor, packed: Tensor, levels: int, bits: int, bucket: int, numel: int) -> Tensor:
    update = torch.empty(numel, dtype=torch.float32, device=packed.device)
    if numel:
        codes = unpack_codes(packed, bits, numel)
        launch(_level_values, -(-numel // TILE), codes, norms, update, numel, levels, bucket, TILE=TILE)
    return update


@_values.by("native")
def _values_in_c(norms: Tensor, packed: Tensor, levels: int, bits: int, bucket: int, numel: int) -> Tensor:
    update = torch.empty(numel, dtype=torch.float32, device=packed.device)
    native.run("level_values", norms, packed, update, numel, levels, bits, bucket)
    return update


def _buckets(numel: int, bucket: int) -> Rows:
    """Return the full buckets as rows of equal length, and a last bucket with fewer elements separately."""
    full = numel // bucket
    rows = [(0, full * bucket, 0, full, bucket), (full * bucket, numel, full, full + 1, numel - full * bucket)]
    return [row for row in rows if row[0] < row[1]]


def _norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of each row, fp32. In fp64, all squares are in range."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.float()


def _of_elements(values: Tensor, bucket: int, numel: int) -> Tensor:
    return values.repeat_interleave(bucket)[:numel]


@kernel("key", "step", "levels", "bucket")
def _round_to_levels(
    u,
    norms,
    codes,
    update,
    key,
    step,
    numel,
    levels,
    bucket,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = index < numel
    x = tl.load(u + index, mask=valid, other=0.0)
    # Offsets in a segment have 31 bits, and a 64-bit division is several times slower.
    norm = tl.load(norms + index.to(tl.int32) // bucket, mask=valid, other=0.0)
    most = tl.zeros_like(x) + levels
    level = tl.div_rn(norm, most)
    x = tl.div_rn(x, tl.where(level > 0, level, 1.0)) + _noise(index, key, step, FIRST, SECOND)
    # By rounding, the largest value may exceed its norm. NaN stays NaN.
    x = tl.where(x > most, most, tl.where(x < -most, -most, x))
    # Round to the nearest integer, of two to the even one: for |x| < 2²², x + 1.5 · 2²³ has no fraction bits.
    x = (x + 12582912.0) - 12582912.0
    tl.store(codes + index, (x.to(tl.int32) + levels).to(tl.uint8), mask=valid)
    tl.store(update + index, x * level, mask=valid)


@kernel("levels", "bucket")
def _level_values(codes, norms, update, numel, levels, bucket, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = index < numel
    x = (tl.load(codes + index, mask=valid, other=0).to(tl.int32) - levels).to(tl.float32)
    norm = tl.load(norms + index.to(tl.int32) // bucket, mask=valid, other=0.0)
    tl.store(update + index, x * tl.div_rn(norm, tl.zeros_like(x) + levels), mask=valid)
