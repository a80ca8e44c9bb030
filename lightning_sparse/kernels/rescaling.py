"""Computes the factors that rescale updates in two launches per segment; see `lightning_sparse.momentum`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.gradient_table import gradient_table
from lightning_sparse.kernels.launch import kept, kernel, launch, same_dtype, tl, to_device
from lightning_sparse.kernels.native import run, table, takes

PIECE = 8192
"""Number of elements of a parameter that one program sums."""
AT_A_TIME = 256
"""Number of pieces whose sums one program adds up at a time."""


@operation
def rescaling(
    first: Sequence[Tensor | None],
    second: Sequence[Tensor | None],
    bounds: Sequence[int],
    numbers: Tensor,
    size: int,
    settled: int,
) -> tuple[Tensor, Tensor]:
    """Return f = 1/√(q + (1 − q)/P) and r = (1 − f) · decay of each parameter, 1-D fp32; 1 and 0 without moments.

    1 − q is min(t/settled, 1) · (1 − Σm̂²/Σv̂) / (1 − c), with the last fraction between 0 and 1.

    Args:
        first: m of each parameter, 1-D, contiguous; None if it has no moments. At least one is not None.
        second: v of each parameter, in the same form.
        bounds: start of each parameter in the segment, and the segment's length as the last one.
        numbers: (5, parameters) fp32, on their device. The first two rows are the bias corrections 1 − β₁ᵗ and
            1 − β₂ᵗ. The third is c, the part of a gradient's noise in the first moment. The fourth is the decay, the
            share of the weights that decoupled weight decay subtracted. The last is t, the number of steps: 0 without
            moments, and infinity if the optimizer keeps no count.
        size: P, the number of ranks.
        settled: number of steps after which the estimate of q counts in full.
    """
    each = [_squared(x) for x in first], second
    sums = torch.stack([torch.stack([_sum(x, numbers) for x in moments]) for moments in each])
    return _from_sums(sums, numbers, size, settled)


@rescaling.by("native", when=lambda first, second, *_: takes((*first, *second)))
def _rescaling_in_c(first, second, bounds, numbers, size, settled):
    sums = numbers.new_empty(2, len(first))
    run("moment_sums", table(first, bounds), table(second, bounds), sums, len(first), bounds[-1])
    return _from_sums(sums, numbers, size, settled)


def _from_sums(sums: Tensor, numbers: Tensor, size: int, settled: int) -> tuple[Tensor, Tensor]:
    """Return f and r from the sums of m² and of v, (2, parameters)."""
    of_first, of_second, noise, decay, steps = numbers
    ratio = sums[0] / of_first.square() / (sums[1] / of_second).clamp(min=1e-37)
    noisy = (steps / settled).clamp(max=1) * ((1 - ratio) / (1 - noise)).clamp(0, 1)
    factors = torch.rsqrt(1 - noisy + noisy / size)
    return factors, (1 - factors) * decay


def _squared(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.linalg.vector_norm(x, dtype=torch.float32).square()


def _sum(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(()) if x is None else x.sum(dtype=torch.float32)


@rescaling.by("triton", when=lambda first, second, *_: same_dtype([x for x in (*first, *second) if x is not None]))
def _rescaling_by_triton(first, second, bounds, numbers, size, settled):
    some, many = next(x for x in first if x is not None), len(first)
    starts = [0, *accumulate(-(-(stop - start) // PIECE) for start, stop in pairwise(bounds))]
    pieces = starts[-1]

    def make() -> Tensor:
        owners = [number for number, (first, last) in enumerate(pairwise(starts)) for _ in range(first, last)]
        return to_device(torch.tensor([*starts, *bounds, *owners], device="cpu"), numbers.device)

    table = kept((rescaling, *bounds), numbers, make)
    partial = torch.empty(2, pieces, dtype=torch.float32, device=numbers.device)
    tables = gradient_table(first, bounds), gradient_table(second, bounds)
    launch(_sums, pieces, *tables, some, table, partial, many, pieces, PIECE=PIECE, num_warps=8)
    out = torch.empty(2, many, dtype=torch.float32, device=numbers.device)
    launch(_factors, many, partial, table, numbers, out, float(size), float(settled), many, pieces, AT_A_TIME=AT_A_TIME)
    return out[0], out[1]


@kernel("many", "pieces")
def _sums(firsts, seconds, moment, table, partial, many, pieces, PIECE: tl.constexpr):
    """`firsts` and `seconds` come from `gradient_table`; `moment` only gives the moments' dtype."""
    piece = tl.program_id(0)
    number = tl.load(table + 2 * many + 2 + piece)
    length = tl.load(table + many + 2 + number) - tl.load(table + many + 1 + number)
    index = (piece - tl.load(table + number)) * PIECE + tl.arange(0, PIECE)
    address, root = tl.load(firsts + many + number), tl.load(seconds + many + number)
    valid = index < tl.where(address != 0, length, 0)
    m = tl.load(address.to(tl.pointer_type(moment.dtype.element_ty)) + index, mask=valid, other=0.0).to(tl.float32)
    v = tl.load(root.to(tl.pointer_type(moment.dtype.element_ty)) + index, mask=valid, other=0.0).to(tl.float32)
    tl.store(partial + piece, tl.sum(m * m))
    tl.store(partial + pieces + piece, tl.sum(v))


@kernel("size", "settled", "many", "pieces")
def _factors(partial, table, numbers, out, size, settled, many, pieces, AT_A_TIME: tl.constexpr):
    number = tl.program_id(0)
    piece, last = tl.load(table + number), tl.load(table + number + 1)
    first = tl.zeros((AT_A_TIME,), tl.float32)
    second = tl.zeros((AT_A_TIME,), tl.float32)
    while piece < last:
        places = piece + tl.arange(0, AT_A_TIME)
        first += tl.load(partial + places, mask=places < last, other=0.0)
        second += tl.load(partial + pieces + places, mask=places < last, other=0.0)
        piece += AT_A_TIME
    correction = tl.load(numbers + number)
    mean = tl.sum(second) / tl.load(numbers + many + number)
    ratio = tl.sum(first) / (correction * correction) / tl.where(mean < 1e-37, 1e-37, mean)
    noisy = (1 - ratio) / (1 - tl.load(numbers + 2 * many + number))
    noisy = tl.where(noisy < 0, 0.0, tl.where(noisy > 1, 1.0, noisy))  # NaN stays NaN
    noisy *= tl.minimum(tl.load(numbers + 4 * many + number) / settled, 1.0)
    factor = 1 / tl.sqrt(1 - noisy + noisy / size)
    tl.store(out + number, factor)
    tl.store(out + many + number, (1 - factor) * tl.load(numbers + 3 * many + number))
