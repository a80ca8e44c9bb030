"""Quantizes blocks of several parameters to 4 or 8 bits in one call; see `compressors/blocks.py`.

    scales, codes, update = quantize(u, places, bits, block)        # update: the dequantized values
    dequantize(scales, codes, places, bits, block, len(u))          # the same values

`places` holds start and stop of each parameter in `u`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import backend_of, operation
from lightning_sparse.kernels.gradient_table import _bisect, bisections
from lightning_sparse.kernels.launch import kept, kernel, launch, tl, to_device

Places = Sequence[tuple[int, int]]

TILE = 4096
"""Number of elements that one program processes."""
LONGEST = 8192
"""Number of elements of the longest block that Triton kernels take: a program keeps a block in registers."""


@operation
def quantize(u: Tensor, places: Places, bits: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, codes and the dequantized values of the blocks of some parameters.

    Args:
        u: 1-D, fp32; not changed.
        places: start and stop of each parameter, none of them empty. A new block begins at each start.
        bits: 4 or 8.
        block: number of elements of a block, even; the last block of a parameter may have fewer.

    Returns:
        Scales, bf16, 1-D; codes, uint8, 1-D; and values, fp32, of `u`'s length, undefined outside of the places.
    """
    rows = torch.cat([u[:0], *(pad(u[start:stop], (0, (start - stop) % block)) for start, stop in places)])
    rows = rows.view(-1, block)
    scales = scale_of(rows.abs().amax(1, keepdim=True), bits)
    # A scale is 0 for zeros, and for values so small that their steps vanish. The CPU may flush denormals to 0.
    steps = (rows / torch.where(scales > 0, scales, 1)).round_()
    update = torch.empty_like(u)
    _write_(update, places, block, steps * scales)
    return scales.bfloat16().view(-1), pack_steps(steps, bits).view(-1), update


@quantize.by("native")
@quantize.by("triton", when=lambda u, places, bits, block: block <= LONGEST)
def _quantize_by_kernels(u: Tensor, places: Places, bits: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = block_count(places, block)
    scales = torch.empty(blocks, dtype=torch.bfloat16, device=u.device)
    codes = torch.empty(blocks * block * bits // 8, dtype=torch.uint8, device=u.device)
    update = torch.empty_like(u)
    _call(_quantize, "quantize", u, places, bits, block, scales, codes, update)
    return scales, codes, update


@operation
def dequantize(scales: Tensor, codes: Tensor, places: Places, bits: int, block: int, numel: int) -> Tensor:
    """Return the values that `quantize` returned, fp32, of length `numel`; see `quantize` for the arguments."""
    update = torch.empty(numel, dtype=torch.float32, device=codes.device)
    steps = unpack_steps(codes.view(-1, block * bits // 8), bits)
    _write_(update, places, block, steps * scales.view(-1, 1))
    return update


@dequantize.by("native")
@dequantize.by("triton", when=lambda scales, codes, places, bits, block, numel: block <= LONGEST)
def _dequantize_by_kernels(scales: Tensor, codes: Tensor, places: Places, bits: int, block: int, numel: int) -> Tensor:
    update = torch.empty(numel, dtype=torch.float32, device=codes.device)
    _call(_dequantize, "dequantize", update, places, bits, block, scales, codes)
    return update


def block_count(places: Places, block: int) -> int:
    """Return the number of blocks of all parameters."""
    return sum(-(-(stop - start) // block) for start, stop in places)


def scale_of(largest: Tensor, bits: int) -> Tensor:
    """Return scales of blocks, given their largest magnitudes: fp32, rounded to bf16; NaN and infinity stay."""
    levels = (1 << bits - 1) - 1
    exact = largest / torch.full_like(largest, levels)  # torch divides by a number as a product on CUDA
    nearest = exact.bfloat16()
    scale = (nearest.view(torch.int16) + (nearest.float() < exact)).view(torch.bfloat16)
    # L steps must not overflow, so scales of the largest numbers round down: L + 1/2 steps still reach the value.
    too_large = (scale.float() * levels == math.inf) & (exact < math.inf)
    return (scale.view(torch.int16) - too_large.short()).view(torch.bfloat16).float()


def pack_steps(steps: Tensor, bits: int) -> Tensor:
    """Pack integer steps from -L to L, (..., n) fp32 with an even n, into bytes, (..., n * bits / 8), uint8."""
    if bits == 8:
        return steps.to(torch.int8).view(torch.uint8)
    # The lower four bits hold the first half of a row, and the upper ones the other half, each plus 8. Sums of signed
    # bytes wrap around.
    first, other = steps.chunk(2, -1)
    return torch.add(first, other, alpha=16).to(torch.int8).add_(8 + 16 * 8 - 256).view(torch.uint8)


def unpack_steps(packed: Tensor, bits: int) -> Tensor:
    """Return the steps that `pack_steps` packed, fp32."""
    if bits == 8:
        return packed.view(torch.int8).float()
    return torch.cat([packed & 15, packed >> 4], -1).float().sub_(8)


def _write_(update: Tensor, places: Places, block: int, rows: Tensor) -> None:
    """Write the blocks of parameters, (blocks, block), to their places."""
    counts = [-(-(stop - start) // block) for start, stop in places]
    for (start, stop), values in zip(places, rows.split(counts) if counts else (), strict=True):
        update[start:stop] = values.view(-1)[: stop - start]


def _call(
    kernel, name: str, x: Tensor, places: Places, bits: int, block: int, scales: Tensor, codes: Tensor, *out: Tensor
):
    if not places:
        return
    # NumPy, which Triton's interpreter uses, does not support bf16, so kernels take the bits as int16.
    arguments = (x, _table(places, block, x), scales.view(torch.int16), codes, *out)
    if backend_of(x) == "native":
        native.run(name, *arguments, len(places), bits, block)
        return
    half = 1 << (block // 2 - 1).bit_length()
    rows = max(1, TILE // (2 * half))
    constants = {"STEPS": bisections(len(places)), "BITS": bits, "BLOCK": block, "HALF": half, "ROWS": rows}
    launch(kernel, -(-len(scales) // rows), *arguments, len(scales), len(places), **constants)


def _table(places: Places, block: int, like: Tensor) -> Tensor:
    """Return the number of each parameter's first block, its start and its stop, int64 (3, parameters), cached."""

    def make() -> Tensor:
        starts, stops = torch.tensor(places, dtype=torch.int64, device="cpu").T
        counts = (stops - starts + block - 1) // block
        return to_device(torch.stack([counts.cumsum(0) - counts, starts, stops]), like.device)

    return kept((_table, tuple(places), block), like, make)


@kernel()
def _halves(
    table,
    rows,
    many,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the offsets of the two halves of this program's blocks; in 4 bits a byte holds an element of each half.

    For each block, the function returns:

    - its number, and whether such a block exists;
    - the offsets in the segment of its first half's elements;
    - masks of the existing elements in the first half, and in the other half;
    - the offsets of the first half's codes, and a mask of the existing codes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    block = tl.minimum(row, rows - 1)
    parameter = _bisect(table, block, many, STEPS)
    start = tl.load(table + many + parameter) + (block - tl.load(table + parameter)) * BLOCK
    count = tl.where(present, tl.load(table + 2 * many + parameter) - start, 0)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    within = lane < BLOCK // 2
    has_first = within & (lane < count)
    has_other = within & (lane + BLOCK // 2 < count)
    codes = row[:, None] * (BLOCK * BITS // 8) + lane
    return row, present, start[:, None] + lane, has_first, has_other, codes, within & present[:, None]


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
    row, present, first, has_first, has_other, place, has_code = _halves(
        table, rows, many, STEPS, BITS, BLOCK, HALF, ROWS
    )
    x = tl.load(u + first, mask=has_first, other=0.0)
    y = tl.load(u + first + BLOCK // 2, mask=has_other, other=0.0)
    # Magnitudes are compared as integers: NaN is larger than infinity.
    bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    # Round max / L up to the next number of bf16.
    levels = ((1 << (BITS - 1)) - 1) * 1.0
    exact = tl.div_rn(largest, tl.full([ROWS], levels, tl.float32))
    high = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    high = tl.where(exact != exact, 0x7FC0, high)
    # L steps must not overflow, so scales of the largest numbers round down: L + 1/2 steps still reach the value.
    too_large = ((high << 16).to(tl.float32, bitcast=True) * levels == float("inf")) & (exact < float("inf"))
    high = tl.where(too_large, high - 1, high)
    tl.store(scales + row, high.to(tl.int16), mask=present)
    scale = (high << 16).to(tl.float32, bitcast=True)[:, None]
    divisor = tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x)
    # Round to the nearest integer, of two to the even one: for |x| < 2²², x + 1.5 · 2²³ has no fraction bits.
    x = (tl.div_rn(x, divisor) + 12582912.0) - 12582912.0
    y = (tl.div_rn(y, divisor) + 12582912.0) - 12582912.0
    if BITS == 4:
        tl.store(codes + place, (x + 8 + 16 * (y + 8)).to(tl.int32).to(tl.uint8), mask=has_code)
    else:
        tl.store(codes + place, x.to(tl.int32).to(tl.uint8), mask=has_code)
        tl.store(codes + place + BLOCK // 2, y.to(tl.int32).to(tl.uint8), mask=has_code)
    tl.store(update + first, x * scale, mask=has_first)
    tl.store(update + first + BLOCK // 2, y * scale, mask=has_other)


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
    row, present, first, has_first, has_other, place, _ = _halves(table, rows, many, STEPS, BITS, BLOCK, HALF, ROWS)
    high = tl.load(scales + row, mask=present, other=0).to(tl.int32)
    scale = (high << 16).to(tl.float32, bitcast=True)[:, None]
    if BITS == 4:
        both = tl.load(codes + place, mask=has_first, other=0).to(tl.int32)
        x = (both & 15) - 8
        y = (both >> 4) - 8
    else:
        x = tl.load(codes + place, mask=has_first, other=0).to(tl.int8, bitcast=True)
        y = tl.load(codes + place + BLOCK // 2, mask=has_other, other=0).to(tl.int8, bitcast=True)
    tl.store(update + first, x.to(tl.float32) * scale, mask=has_first)
    tl.store(update + first + BLOCK // 2, y.to(tl.float32) * scale, mask=has_other)
