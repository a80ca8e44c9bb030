"""Uniform random numbers that are a function of a key and a position, made where they are needed.

    add_uniform_(x, key, start=0)    # x[i] += a number in (0, 1) that belongs to element start + i; the floor is x,
                                     # rounded up or down at random, so that its expectation is x

Counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a hash of the position, in 32-bit
integers, which are the same on every device. A hash gives the numbers of two elements, 16 bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import at_a_time

FACTORS = 0x7FEB352D, -0x7B935975
"""Of the hash "lowbias32" (Wellons 2018), as signed 32-bit numbers."""
GOLDEN = 0x9E3779B9
"""2³² times the golden ratio: a step far from 0 for small keys."""


def add_uniform_(x: Tensor, key: int, start: int = 0, offset: float = 0.0) -> Tensor:
    """Add a number in (0, 1) and `offset` to each element of `x`, in place, and return it.

    The numbers are odd multiples of 2⁻¹⁷, each as likely as any other. So the expectation of the floor of x + number is
    x, to 2⁻¹⁷.

    Args:
        x: 1-D, fp32, contiguous.
        key: 64 bits, such as `Context.key`.
        start: position of the first element.
        offset: added as well.
    """
    most, odd = at_a_time(x), start % 2
    # Another odd step for each key: the sequences of two keys are not the same one, shifted.
    step, count = (key >> 32 ^ GOLDEN) | 1, min(most, x.numel()) // 2 + 1
    linear = torch.arange(count, dtype=torch.int32, device=x.device).mul_(_int32(step))
    words, shifted = torch.empty_like(linear), torch.empty_like(linear)
    noise = torch.empty(2 * count, dtype=torch.float32, device=x.device)
    for place in range(0, x.numel(), most):
        part = x[place : place + most]
        count = (odd + part.numel() + 1) // 2
        word = torch.add(linear[:count], _int32(key + (start + place) // 2 * step), out=words[:count])
        for shift, factor in zip((15, 16), FACTORS, strict=True):
            word.bitwise_xor_(torch.bitwise_right_shift(word, shift, out=shifted[:count])).mul_(factor)
        lanes = word.view(torch.int16)[odd : odd + part.numel()]
        part.add_(noise[: part.numel()].copy_(lanes), alpha=2**-16).add_(offset + 0.5 + 2**-17)
    return x


def _int32(number: int) -> int:
    """Return a number modulo 2³² as a signed one."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
