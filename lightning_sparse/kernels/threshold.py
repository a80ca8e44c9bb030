"""Selects entries above a threshold, which starts at a Gaussian's and is refined until about k entries exceed it.

One pass computes the block maxima, and one the moments. Then the maxima narrow down the search. If a block's maximum
does not reach the threshold, none of its entries does. If more than 4k/3 maxima reach the threshold, so do more than
4k/3 entries, and no block needs to be searched.

On CUDA one program runs the whole search. It counts the maxima that reach a threshold, among the largest 4k/3 + 1. The
result has a fixed length and is padded, so the host never waits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kernel, launch, tl
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

OCTAVE = 1 << 23
"""A factor of two, as a difference of bits."""

AT_A_TIME = 4096
"""Number of maxima that the kernel counts at a time."""

ROUNDS = 12
"""Most thresholds to try before the k largest are selected: enough to find one to 0.1 % once it is bracketed."""


def gaussian_indices(u: Tensor, k: int, z: float, stats: BlockStats | None = None) -> Tensor:
    """Return the indices of entries whose magnitude exceeds a threshold that leaves 2k/3 to 4k/3 entries.

    Args:
        u: 1-D, fp32; not changed.
        k: number of entries wanted, 0 < k < len(u).
        z: the first threshold, in standard deviations above the absolute mean.
        stats: statistics of `u`, with the block of `block_size(len(u), k)` and moments, or None.

    Returns:
        int64 indices, ascending, of the entries beyond the threshold, or of the k largest if no threshold was found.
        Triton kernels pad them with `len(u)` to a length of 4k/3; see `kernels/pack.py`.
    """
    bits = magnitude_bits("gaussian_indices", u)
    return _search_and_select(bits, k, z, ensure_stats(stats, u, block_size(bits.numel(), k), moments=True))


@operation
def _search_and_select(bits: Tensor, k: int, z: float, stats: BlockStats) -> Tensor:
    maxima = bits if stats.maxima is None else stats.maxima
    mean, deviation = stats.mean_and_deviation()
    fewest, most = -(-2 * k // 3), 4 * k // 3
    # Without a positive, finite deviation there is no first threshold. A NaN or an infinity makes the moments NaN,
    # large numbers overflow, small ones vanish, and constants have no spread.
    rounds = ROUNDS if 0 < deviation < math.inf else 0
    # In bits, an octave is a factor of two, and the middle of two numbers is about their geometric mean.
    low, high, threshold = 0, MAGNITUDE, _bits(abs(mean) + z * deviation) + 1
    for _ in range(rounds):
        # Every block that passes has an entry to send, and few have two. So the maxima decide when to search blocks.
        passing = count_reaching(maxima, threshold)
        if fewest <= passing <= most:
            indices, magnitudes = entries_reaching(bits, stats, threshold)
            # If few blocks hold more than 4k/3 entries, the k largest are among the entries found.
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
    # If a threshold leaves at most `most` entries, these blocks hold all of them.
    tops = torch.empty(min(most + 1, maxima.numel()), dtype=torch.int32, device=bits.device)
    blocks = blocks_of_largest(bits, maxima, stats.block, tops.numel(), counts[0], tops)
    limits = torch.empty(2, dtype=torch.int32, device=bits.device)
    assert stats.partial is not None
    double = struct.unpack("<q", struct.pack("<d", z))[0]  # Triton would pass a float as fp32
    args = (tops, stats.partial, counts[0, THRESHOLD:], limits, tops.numel(), len(stats.partial), stats.numel, double)
    launch(_search, 1, *args, fewest, most, ROUNDS=ROUNDS, TILE=AT_A_TIME, num_warps=16)
    # If no threshold was found, or more than 4k/3 entries exceed it, the k largest are selected from the same blocks.
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
    """Store the smallest magnitude to send, and `most`; or, if no threshold was found, the least of `tops`, and -1.

    `tops` holds the largest maxima, and `double` the bits of z.
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
    # Triton takes the bits of 0.0 as an int32.
    z = double.to(tl.int64).to(tl.float64, bitcast=True)
    first = (tl.abs(mean) + z * deviation).to(tl.float32)
    threshold = first.to(tl.int32, bitcast=True) + 1
    # As in the loop above, there is no first threshold without a spread.
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
                # low + high could exceed 31 bits.
                threshold = low + (high - low) // 2
            elif low > 0:
                threshold = low + tl.minimum(0x7FFFFFFF - low, 1 << 22)
            else:
                threshold = tl.maximum(high - (1 << 23), 1)
            if (threshold == low) | (threshold == high):
                rounds = 0
    tl.store(limits, tl.where(found > 0, found, tl.load(least)))
    tl.store(limits + 1, tl.where(found > 0, most, -1))
