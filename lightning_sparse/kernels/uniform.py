"""Uniform random numbers that are a function of a key and a position.

    add_uniform_(x, key)    # x[i] += the number of element i, in (-1/2, 1/2); the nearest integer to the sum is then
                            # x[i] rounded up or down at random, with the expectation x[i]

The generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). It hashes the
position in 32-bit integers, so all devices get the same numbers. One hash yields the numbers of two elements, 16 bits
each. Triton kernels compute the same numbers by `_noise`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, tl

FACTORS = 0x7FEB352D, -0x7B935975
"""The factors of the hash "lowbias32" (Wellons 2018), as signed 32-bit numbers."""
GOLDEN = 0x9E3779B9
"""2³² divided by the golden ratio: a step far from 0 for small keys."""


def add_uniform_(x: Tensor, key: int) -> Tensor:
    """Add the numbers of its elements to `x` (1-D, fp32), in place, and return `x`.

    The numbers are odd multiples of 2⁻¹⁶ in (-1/2, 1/2), all with the same probability. If x + number is rounded to the
    nearest integer, its expectation is x, to 2⁻¹⁶. An integer x does not change, even with fp32's rounding errors.

    Args:
        x: overwritten.
        key: 64 bits, such as `Context.key`.
    """
    first, step = key_and_step(key)
    numel = x.numel()
    word = torch.arange((numel + 1) // 2, dtype=torch.int32, device=x.device).mul_(step).add_(first)
    for shift, factor in zip((15, 16), FACTORS, strict=True):
        word.bitwise_xor_(word >> shift).mul_(factor)
    word.bitwise_or_(0x00010001)  # an odd number in each half
    return x.add_(word.view(torch.int16)[:numel].float(), alpha=2**-16)


def key_and_step(key: int) -> tuple[int, int]:
    """Return the word to hash for the first two elements, and its increment for each pair of elements, modulo 2³²."""
    # Each key has another odd step, so that the sequence of one key is not a shifted copy of another's.
    return _int32(key), _int32((key >> 32 ^ GOLDEN) | 1)


@kernel()
def _noise(index, key, step, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the random numbers of elements, given int64 positions, the result of `key_and_step`, and `FACTORS`."""
    word = key + (index // 2).to(tl.int32) * step
    word = (word ^ (word >> 15)) * FIRST
    word = (word ^ (word >> 16)) * SECOND
    # Even positions use the lower half as a signed number, odd positions the upper half.
    lane = (word << (1 - index % 2).to(tl.int32) * 16) >> 16 | 1
    return lane.to(tl.float32) * (1 / 65536)


def _int32(number: int) -> int:
    """Return an integer modulo 2³² as a signed number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
