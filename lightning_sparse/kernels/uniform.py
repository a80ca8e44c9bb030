"""Uniform random numbers that are a function of a key and a position.

    add_uniform_(x, key)    # x[i] += a number in (-1/2, 1/2) that belongs to element i; the nearest whole number is x,
                            # rounded up or down at random, so that its expectation is x

Counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a hash of the position, in 32-bit
integers, which are the same on every device. A hash gives the numbers of two elements, 16 bits each. Triton's kernels
make the same numbers themselves, by `_noise`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

FACTORS = 0x7FEB352D, -0x7B935975
"""Of the hash "lowbias32" (Wellons 2018), as signed 32-bit numbers."""
GOLDEN = 0x9E3779B9
"""2³² times the golden ratio: a step far from 0 for small keys."""


def add_uniform_(x: Tensor, key: int, start: int = 0) -> Tensor:
    """Add the numbers of elements `start` and on to `x` (1-D, fp32), in place, and return it.

    The numbers are odd multiples of 2⁻¹⁶ in (-1/2, 1/2), each as likely as any other. Rounded to
    the nearest whole number, x + number has the expectation x, to 2⁻¹⁶. Whole numbers do not change, even with errors
    of fp32.

    Args:
        x: overwritten.
        key: 64 bits, such as `Context.key`.
        start: position of the first element.
    """
    first, step = key_and_step(key)
    odd, numel = start % 2, x.numel()
    word = torch.arange((odd + numel + 1) // 2, dtype=torch.int32, device=x.device)
    word.mul_(step).add_(_int32(first + start // 2 * step))
    for shift, factor in zip((15, 16), FACTORS, strict=True):
        word.bitwise_xor_(word >> shift).mul_(factor)
    word.bitwise_or_(0x00010001)  # an odd number in each half
    return x.add_(word.view(torch.int16)[odd : odd + numel].float(), alpha=2**-16)


def key_and_step(key: int) -> tuple[int, int]:
    """Return the word to hash for the first two elements, and its increment for each next two, modulo 2³²."""
    # Another odd step for each key: the sequences of two keys are not the same one, shifted.
    return _int32(key), _int32((key >> 32 ^ GOLDEN) | 1)


@kernel()
def _noise(index, key, step, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the numbers of elements, given int64 positions, the result of `key_and_step`, and `FACTORS`."""
    word = key + (index // 2).to(tl.int32) * step
    word = (word ^ (word >> 15)) * FIRST
    word = (word ^ (word >> 16)) * SECOND
    # The lower half for even positions, with its sign.
    lane = (word << (1 - index % 2).to(tl.int32) * 16) >> 16 | 1
    return lane.to(tl.float32) * (1 / 65536)


def _int32(number: int) -> int:
    """Return a number modulo 2³² as a signed one."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
