"""Blocks: all values in 4 or 8 bits, with a scale for each block."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length, exact_values, write_exact_
from lightning_sparse.compressors.rows import write_scaled_
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import at_a_time
from lightning_sparse.kernels.native import check_part, uses_kernels
from lightning_sparse.kernels.quantize import dequantize_, quantize_
from lightning_sparse.layout import Segment
from lightning_sparse.options import check

LARGE = 1e37
"""Of a block whose values are below it, the scale times any number of steps is finite."""


@dataclass(frozen=True)
class Blocks(Compressor):
    """Q(v) = s · round(v / s) for each block v of consecutive elements of a parameter, with s = max|v| / L.

    Block-wise quantization: Dettmers et al. 2022, arXiv 2110.02861; here with even steps, L = 7 or 127 on either side
    of 0. s travels in bf16, rounded up, so that the largest value stays within L steps. Parameters of less than two
    dimensions, biases and norms, travel exactly, in fp32.

    Attributes:
        bits: 4 or 8, of each value.
        block: elements that share a scale. Of Student's t with 3 degrees of freedom, the relative error in 4 bits is
            0.14 with blocks of 32 (0.563 bytes an element), 0.18 with 64 (0.531), 0.23 with 128 (0.516).
    """

    bits: int
    block: int = 64

    exposes_nonfinite = True  # the scale of a block with a NaN or an infinity is one
    by_parameter = True

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in (4, 8):
            raise ValueError(f"Blocks(bits={self.bits!r}): choose 4 or 8.")
        object.__setattr__(self, "block", check("block", self.block, "Blocks"))

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        check_length(u, ctx)
        pieces = _pieces(ctx.segment, self.block, at_a_time(u))
        scales = torch.empty(pieces.rows, 1, dtype=torch.bfloat16, device=u.device)
        codes = torch.empty(pieces.rows, self._row_bytes, dtype=torch.uint8, device=u.device)
        update = torch.empty_like(u)
        if uses_kernels(u):
            quantize_(u, pieces.parameters, self.bits, self.block, scales, codes, update)
        else:
            # On the CPU first for values that are not too large, in fewer operations; but then the host has to look.
            for careful in (False, True) if u.device.type == "cpu" else (True,):
                largest = self._quantize(u, pieces, careful, scales, codes, update)
                if not careful and bool((largest < LARGE).all()):  # NaN is not
                    break
        exact = exact_values(u, pieces.vectors)
        write_exact_(update, pieces.vectors, exact)
        return (scales.view(-1), codes.view(-1), exact), update

    def _quantize(
        self, u: Tensor, pieces: _Pieces, careful: bool, scales: Tensor, codes: Tensor, update: Tensor
    ) -> Tensor:
        """Write scales, codes and the update of all pieces; return the largest magnitude of each block, (blocks, 1)."""
        maxima = torch.empty(pieces.rows, 1, dtype=torch.float32, device=u.device)
        # A fresh temporary for each piece would cost as much as the arithmetic: its pages have to be mapped first.
        scratch = torch.empty(pieces.longest, self.block, dtype=torch.float32, device=u.device)
        for start, stop, first, last in pieces.matrices:
            x, steps, whole = u[start:stop], scratch[: last - first], stop - start == (last - first) * self.block
            rows = (x if whole else torch.nn.functional.pad(x, (0, self.block - len(x)))).view(-1, self.block)
            largest = torch.amax(torch.abs(rows, out=steps), 1, keepdim=True, out=maxima[first:last])
            scale = (scale_of if careful else _scale_of_usual)(largest, self.bits)
            scales[first:last].copy_(scale)
            # A block of zeros has the scale 0, no other one is below the least number above 0.
            torch.div(rows, scale.clamp(min=2.0**-149), out=steps).round_()
            pack_steps(steps, self.bits, codes[first:last])
            write_scaled_(update[start:stop], steps, scale)
        return maxima

    def decode(self, payload: Payload, ctx: Context) -> Update:
        scales, codes, exact = payload
        pieces = _pieces(ctx.segment, self.block, at_a_time(codes))
        check_part("scales", scales, pieces.rows)
        check_part("codes", codes, pieces.rows * self._row_bytes)
        rows, scales = codes.view(-1, self._row_bytes), scales.view(-1, 1)
        update = torch.empty(ctx.segment.numel, dtype=torch.float32, device=codes.device)
        if uses_kernels(codes):
            dequantize_(scales, rows, pieces.parameters, self.bits, self.block, update)
        else:
            scratch = torch.empty(pieces.longest, self.block, dtype=torch.float32, device=codes.device)
            for start, stop, first, last in pieces.matrices:
                steps = scratch[: last - first]
                unpack_steps(rows[first:last], self.bits, steps)
                write_scaled_(update[start:stop], steps, scales[first:last])
        write_exact_(update, pieces.vectors, exact)
        return update

    def nbytes(self, segment: Segment, density: float | None) -> int:
        pieces = _pieces(segment, self.block, sys.maxsize)
        return pieces.rows * (2 + self._row_bytes) + 4 * sum(stop - start for start, stop in pieces.vectors)

    @property
    def _row_bytes(self) -> int:
        return self.block * self.bits // 8


def scale_of(largest: Tensor, bits: int) -> Tensor:
    """Return the scale of blocks with these largest magnitudes, fp32, as a number of bf16; NaN and infinity stay."""
    levels = (1 << bits - 1) - 1
    exact = largest / levels
    nearest = exact.bfloat16()
    scale = (nearest.view(torch.int16) + (nearest.float() < exact)).view(torch.bfloat16)
    # L steps must not overflow: down for the largest numbers of all, where L + 1/2 steps still reach the value.
    too_large = (scale.float() * levels == math.inf) & (exact < math.inf)
    return (scale.view(torch.int16) - too_large.short()).view(torch.bfloat16).float()


def _scale_of_usual(largest: Tensor, bits: int) -> Tensor:
    """Return the same in two operations for magnitudes below `LARGE`, and anything for others."""
    # Up to the next number of bf16.
    return (largest / ((1 << bits - 1) - 1)).view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def pack_steps(steps: Tensor, bits: int, out: Tensor) -> Tensor:
    """Write whole numbers of steps, -L to L, (..., even) in fp32, as bytes, (..., even * bits / 8), uint8."""
    if bits == 8:
        out.view(torch.int8).copy_(steps)
        return out
    # The first half of a row in the lower four bits, the other in the upper ones, each 8 higher than it is. On the CPU
    # conversion to signed bytes is several times as fast as to unsigned ones; their sum wraps around.
    first, other = steps.chunk(2, -1)
    out.view(torch.int8).copy_(torch.add(first, other, alpha=16)).add_(8 + 16 * 8 - 256)
    return out


def unpack_steps(packed: Tensor, bits: int, out: Tensor) -> Tensor:
    """Write the numbers of steps that `pack_steps` has written as bytes, in fp32."""
    if bits == 8:
        return out.copy_(packed.view(torch.int8))
    first, other = out.chunk(2, -1)
    first.copy_(packed & 15)
    other.copy_(packed >> 4)
    return out.sub_(8)


class _Pieces(NamedTuple):
    """Where a segment's blocks are.

    Attributes:
        parameters: start and stop of those of two or more dimensions that have elements.
        matrices: start and stop of pieces of these, and of the pieces' blocks.
        vectors: start and stop of the other parameters.
        rows: the number of blocks.
        longest: the most blocks of a piece.
    """

    parameters: tuple[tuple[int, int], ...]
    matrices: tuple[tuple[int, int, int, int], ...]
    vectors: tuple[tuple[int, int], ...]
    rows: int
    longest: int


@functools.lru_cache(maxsize=4096)
def _pieces(segment: Segment, block: int, most: int) -> _Pieces:
    """Return the pieces of a segment, of at most about `most` elements."""
    parameters, matrices, vectors, rows = [], [], [], 0
    each = max(1, most // block) * block
    for shape, (start, stop) in zip(segment.shapes, pairwise(segment.bounds), strict=True):
        if len(shape) < 2:
            vectors.append((start, stop))
            continue
        if start < stop:
            parameters.append((start, stop))
        # The last block, if it is not full, is a piece of its own.
        full = stop - (stop - start) % block
        for first, last in pairwise([*range(start, full, each), *sorted({full, stop})]):
            matrices.append((first, last, rows, rows := rows - (first - last) // block))
    longest = max((last - first for *_, first, last in matrices), default=0)
    return _Pieces(tuple(parameters), tuple(matrices), tuple(vectors), rows, longest)
