"""Entries above a threshold that starts at a Gaussian's and is refined until about k are left.

After one pass for block maxima and one for the moments, the maxima say where to look: a block whose maximum does not
reach the threshold has nothing to offer, and more than 4k/3 blocks that do are more than 4k/3 entries, without looking
into any.

On CUDA one program counts, among the largest 4k/3 + 1 maxima, what reaches a threshold, and the whole search runs
there. The result has a fixed length and is padded: the host waits for nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kernel, launch
from lightning_sparse.kernels.select import (
    block_size,
    count_reaching,
    ensure_stats,
    entries_reaching,
    largest,
    magnitude_bits,
    topk_from_maxima,
)
from lightning_sparse.kernels.select_kernels import THRESHOLD
from lightning_sparse.kernels.select_triton import Kept, blocks_of_largest, select, zeros

if TYPE_CHECKING:
    import triton.language as tl

OCTAVE = 1 << 23
"""A factor of two, in bits."""

AT_A_TIME = 4096
"""Maxima that the kernel counts at a time."""

ROUNDS = 12
"""Thresholds to try before the k largest are selected: enough to pin one down to 0.1 % once it is bracketed."""


def gaussian_indices(u: Tensor, k: int, z: float, stats: BlockStats | None = None) -> Tensor:
    """Return where the magnitude of `u` exceeds a threshold that leaves 2k/3 to 4k/3 entries.

    Args:
        u: 1-D, fp32. Left as it is.
        k: how many entries are wanted, 0 < k < len(u).
        z: where the search starts, in standard deviations beyond the absolute mean.
        stats: of `u`, with the block of `block_size(len(u), k)` and moments, where there is one already.

    Returns:
        int64 indices, ascending: of everything beyond a threshold, or of the k largest where none was found. Where
        Triton works they are padded with `len(u)` to a length of 4k/3, see `kernels/pack.py`.
    """
    bits = magnitude_bits("gaussian_indices", u)
    return _search_and_select(bits, k, z, ensure_stats(stats, u, block_size(bits.numel(), k), moments=True))


@operation
def _search_and_select(bits: Tensor, k: int, z: float, stats: BlockStats) -> Tensor:
    maxima = bits if stats.maxima is None else stats.maxima
    mean, deviation = stats.mean_and_deviation()
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
            indices, magnitudes = entries_reaching(bits, stats, threshold)
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
    return topk_from_maxima(bits, stats, k)


def _bits(x: float) -> int:
    """Return the bits of a non-negative number as fp32."""
    return int(torch.tensor(x, dtype=torch.float32, device="cpu").view(torch.int32))


@_search_and_select.by("triton")
def _by_triton(bits: Tensor, k: int, z: float, stats: BlockStats) -> Tensor:
    maxima, fewest, most = bits if stats.maxima is None else stats.maxima, -(-2 * k // 3), min(4 * k // 3, bits.numel())
    counts = zeros(bits.device)
    # No more blocks than these can hold the entries above any threshold that leaves enough and not too many.
    tops = torch.empty(min(most + 1, maxima.numel()), dtype=torch.int32, device=bits.device)
    blocks = blocks_of_largest(bits, maxima, stats.block, tops.numel(), counts[0], tops)
    limits = torch.empty(2, dtype=torch.int32, device=bits.device)
    assert stats.partial is not None
    double = struct.unpack("<q", struct.pack("<d", z))[0]  # as an argument z itself would lose half of its digits
    args = (tops, stats.partial, counts[0, THRESHOLD:], limits, tops.numel(), len(stats.partial), stats.numel, double)
    launch(_search, 1, *args, fewest, most, ROUNDS=ROUNDS, TILE=AT_A_TIME, num_warps=16)
    # Where none was found, or more than 4k/3 crowd in few blocks, the k largest, which lie in these blocks, too.
    return select(Kept(blocks, limits, counts[1]), counts[1], k, most, limits=limits)


@kernel("count", "tiles", "numel", "double", "fewest", "most")
def _search(
    tops,
    partial,
    least,
    limits,
    count,
    tiles,
    numel,
    double,
    fewest,
    most,
    ROUNDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the smallest magnitude that is sent, and `most`; or, if none was found, the least of `tops`, and -1.

    `tops` are the largest maxima, `double` are the bits of z.
    """
    total = tl.zeros([TILE], dtype=tl.float64)
    squares = tl.zeros([TILE], dtype=tl.float64)
    start = 0
    while start < tiles:
        tile = start + tl.arange(0, TILE)
        total += tl.load(partial + 2 * tile, mask=tile < tiles, other=0.0).to(tl.float64)
        squares += tl.load(partial + 2 * tile + 1, mask=tile < tiles, other=0.0).to(tl.float64)
        start += TILE
    mean = tl.sum(total) / numel
    deviation = tl.sqrt(tl.maximum(tl.sum(squares) / numel - mean * mean, 0.0))
    first = (tl.abs(mean) + double.to(tl.float64, bitcast=True) * deviation).to(tl.float32)
    threshold = first.to(tl.int32, bitcast=True) + 1
    # As in the loop above: without a spread there is nothing to start from.
    rounds = tl.where((deviation > 0) & (deviation < float("inf")) & (threshold > 0), ROUNDS, 0)
    low = 0
    high = 0x7FFFFFFF
    found = -1
    while rounds > 0:
        passing = 0
        start = 0
        while start < count:
            place = start + tl.arange(0, TILE)
            passing += tl.sum((tl.load(tops + place, mask=place < count, other=-1) >= threshold).to(tl.int32))
            start += TILE
        rounds -= 1
        if (passing >= fewest) & (passing <= most):
            found = threshold
            rounds = 0
        else:
            if passing > most:
                low = threshold
            else:
                high = threshold
            if (low > 0) & (high < 0x7FFFFFFF):
                # Without a sum that would need 32 bits.
                threshold = low + (high - low) // 2
            elif low > 0:
                threshold = low + tl.minimum(0x7FFFFFFF - low, 1 << 22)
            else:
                threshold = tl.maximum(high - (1 << 23), 1)
            if (threshold == low) | (threshold == high):
                rounds = 0
    tl.store(limits, tl.where(found > 0, found, tl.load(least)))
    tl.store(limits + 1, tl.where(found > 0, most, -1))
