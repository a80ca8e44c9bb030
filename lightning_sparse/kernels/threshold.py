"""Entries above a threshold that starts at a Gaussian's and is refined until about k are left.

After one pass for block maxima and one for the moments, the maxima say where to look: a block whose maximum does not
reach the threshold has nothing to offer, and more than 4k/3 blocks that do are more than 4k/3 entries, without looking
into any.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_sparse.kernels.scan import MAGNITUDE, Scan
from lightning_sparse.kernels.select import (
    block_size,
    count_reaching,
    entries_reaching,
    fresh,
    largest,
    largest_of_blocks,
    magnitude_bits,
)

OCTAVE = 1 << 23
"""A factor of two, in bits."""

ROUNDS = 12
"""Thresholds to try before the k largest are selected: enough to pin one down to 0.1 % once it is bracketed."""


def gaussian_indices(u: Tensor, k: int, z: float, scan: Scan | None = None) -> Tensor:
    """Return where the magnitude of `u` exceeds a threshold that leaves 2k/3 to 4k/3 entries.

    Args:
        u: 1-D, fp32. Left as it is.
        k: how many entries are wanted, 0 < k < len(u).
        z: where the search starts, in standard deviations beyond the absolute mean.
        scan: of `u`, with the block of `block_size(len(u), k)` and moments, where there is one already.

    Returns:
        int64 indices, ascending: of everything beyond a threshold, or of the k largest where none was found.
    """
    bits = magnitude_bits("gaussian_indices", u)
    scan = fresh(scan, u, block_size(bits.numel(), k), moments=True)
    maxima = bits if scan.maxima is None else scan.maxima
    mean, deviation = scan.mean_and_deviation()
    fewest, most = -(-2 * k // 3), 4 * k // 3
    # A NaN or an infinity makes the moments NaN, large numbers overflow, small ones vanish, constants have no spread:
    # nothing to start from.
    rounds = ROUNDS if 0 < deviation < math.inf else 0
    # In bits, a step of the exponent is a factor of two and the middle of two numbers about their geometric mean.
    low, high, threshold = 0, MAGNITUDE, _bits(abs(mean) + z * deviation) + 1
    for _ in range(rounds):
        # Every block that passes has an entry to send, and few have two: so the maxima alone tell when to look.
        passing = count_reaching(maxima, threshold)
        if fewest <= passing <= most:
            indices, magnitudes = entries_reaching(bits, scan, threshold)
            # More than 4k/3 crowd in few blocks; then the k largest lie at hand.
            return indices if len(indices) <= most else indices.index_select(0, largest(magnitudes, k)[0])
        if passing > most:
            low = threshold
        else:
            high = threshold
        if low and high < MAGNITUDE:
            threshold = (low + high) // 2
        elif low:
            threshold = min(low + OCTAVE // 2, MAGNITUDE)
        else:
            threshold = max(high - OCTAVE, 1)
        if threshold in (low, high):
            break
    return largest_of_blocks(bits, scan, k)


def _bits(x: float) -> int:
    """Return the bits of a non-negative number as fp32."""
    return int(torch.tensor(x).view(torch.int32))
