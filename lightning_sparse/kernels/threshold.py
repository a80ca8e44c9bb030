"""Entries above a threshold that starts at a Gaussian's and is refined until about k are left.

After one pass for block maxima and one for the moments, the maxima say where to look: a block whose maximum does not
reach the threshold has nothing to offer, and more than 4k/3 blocks that do are more than 4k/3 entries, without looking
into any.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sparse.kernels.select import (
    MAGNITUDE,
    block_maxima,
    block_size,
    chunk_size,
    count_reaching,
    entries_reaching,
    largest,
    largest_of_blocks,
    magnitude_bits,
)

OCTAVE = 1 << 23
"""A factor of two, in bits."""

ROUNDS = 12
"""Thresholds to try before the k largest are selected: enough to pin one down to 0.1 % once it is bracketed."""


def gaussian_indices(u: Tensor, k: int, z: float) -> Tensor:
    """Return where the magnitude of `u` exceeds a threshold that leaves 2k/3 to 4k/3 entries.

    Args:
        u: 1-D, fp32. Left as it is.
        k: how many entries are wanted, 0 < k < len(u).
        z: where the search starts, in standard deviations beyond the absolute mean.

    Returns:
        int64 indices, ascending: of everything beyond a threshold, or of the k largest where none was found.
    """
    bits = magnitude_bits("gaussian_indices", u)
    block = block_size(bits.numel(), k)
    maxima = block_maxima(bits, block)
    mean, deviation = _moments(u)
    fewest, most = -(-2 * k // 3), 4 * k // 3
    start = abs(mean) + z * deviation
    # A NaN or an infinity makes the moments NaN, large numbers overflow, small ones vanish, constants have no spread:
    # nothing to start from.
    rounds = ROUNDS if 0 < deviation < math.inf else 0
    # In bits, a step of the exponent is a factor of two and the middle of two numbers about their geometric mean.
    low, high, threshold = 0, MAGNITUDE, _bits(start) + 1
    for _ in range(rounds):
        if count_reaching(maxima, threshold) > most:
            low = threshold
        else:
            indices, magnitudes = entries_reaching(bits, maxima, block, threshold)
            if len(indices) > most:
                # They crowd in few blocks, and all lie at hand.
                return indices.index_select(0, largest(magnitudes, k)[0])
            if len(indices) >= fewest:
                return indices
            high = threshold
        if low and high < MAGNITUDE:
            threshold = (low + high) // 2
        elif low:
            threshold = min(low + OCTAVE // 2, MAGNITUDE)
        else:
            threshold = max(high - OCTAVE, 1)
        if threshold in (low, high):
            break
    return largest_of_blocks(bits, maxima, block, k)


def _moments(u: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of `u`, in one pass. Precise enough for a threshold that will be refined."""
    total = squares = 0.0
    for chunk in u.detach().split(chunk_size(u.numel())):
        total += float(chunk.sum())
        squares += float(chunk.dot(chunk))
    mean = total / u.numel()
    return mean, math.sqrt(max(0.0, squares / u.numel() - mean * mean))


def _bits(x: float) -> int:
    """Return the bits of a non-negative number as fp32."""
    return int(torch.tensor(x).view(torch.int32))
