"""Entries above a threshold that starts at a Gaussian's and is refined until about k are left.

After one pass for block maxima and one for the moments, the maxima say where to look: a block whose maximum does not
reach the threshold has nothing to offer, and more than 4k/3 blocks that do are more than 4k/3 entries, without looking
into any.

On CUDA the largest 4k/3 + 1 maxima are sorted, so that one small kernel can count what reaches a threshold in a few
steps, and the whole search runs there. The result has a fixed length and is padded: the host waits for nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats
from lightning_sparse.kernels.launch import kernel, launch, uses_triton
from lightning_sparse.kernels.select import (
    block_size,
    count_reaching,
    ensure_stats,
    entries_reaching,
    magnitude_bits,
    topk_cpu,
    topk_from_maxima,
)
from lightning_sparse.kernels.select_triton import Blocks, counts_above, indices_above, kth_largest, topk_triton

if TYPE_CHECKING:
    import triton.language as tl

OCTAVE = 1 << 23
"""A factor of two, in bits."""

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
    stats = ensure_stats(stats, u, block_size(bits.numel(), k), moments=True)
    if uses_triton(u):
        return _by_triton(bits, k, z, stats)
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
            return indices if len(indices) <= most else indices.index_select(0, topk_cpu(magnitudes, k)[0])
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
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _by_triton(bits: Tensor, k: int, z: float, stats: BlockStats) -> Tensor:
    maxima, fewest, most = bits if stats.maxima is None else stats.maxima, -(-2 * k // 3), min(4 * k // 3, bits.numel())
    # No more blocks than these can hold the entries above any threshold that leaves enough and not too many.
    candidates = topk_triton(Blocks(maxima), min(most + 1, maxima.numel()))
    tops = (maxima.index_select(0, candidates) & MAGNITUDE).sort(descending=True).values
    assert stats.sums is not None
    mean, square = (stats.sums / stats.numel).unbind()
    deviation = (square - mean * mean).clamp(min=0).sqrt()
    first = (mean.abs() + z * deviation).float().view(torch.int32) + 1
    # As in the loop above: without a spread there is nothing to start from, which 0 says.
    first = torch.where((deviation > 0) & (deviation < math.inf), first, 0)
    limit = torch.empty(1, dtype=torch.int32, device=bits.device)
    launch(_search, 1, tops, first, limit, tops.numel(), fewest, most, ROUNDS=ROUNDS, num_warps=1)
    blocks = Blocks.of(bits, candidates, stats.block)
    counts = counts_above(blocks, limit)
    # None was found, or more than 4k/3 crowd in few blocks: then the k largest, which lie in these blocks, too.
    exact = ((limit < 0) | (counts[0, -1:] > most)).int()
    threshold = torch.where(exact > 0, kth_largest(blocks, k, exact), limit)
    counts = counts_above(blocks, threshold)
    return indices_above(blocks, threshold, counts, most, ties_up_to=k, when=exact)


@kernel("count", "fewest", "most")
def _search(tops, first, limit, count, fewest, most, ROUNDS: tl.constexpr):
    """Store the largest magnitude that is not sent, -1 for none found; `tops` are the largest maxima, descending."""
    low = 0
    high = 0x7FFFFFFF
    threshold = tl.load(first)
    found = -1
    rounds = tl.where(threshold > 0, ROUNDS, 0)
    while rounds > 0:
        passing = 0
        behind = count
        while passing < behind:
            middle = (passing + behind) // 2
            if tl.load(tops + middle) >= threshold:
                passing = middle + 1
            else:
                behind = middle
        rounds -= 1
        if (passing >= fewest) & (passing <= most):
            found = threshold - 1
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
    tl.store(limit, found)
