"""Selects entries by an estimated threshold: draws samples for the estimate, and finds the entries that reach it.

    bits = magnitude_bits("owner", u)
    threshold = kth_magnitude(sampled(bits, 100_000, seed), 100)  # for example
    indices_reaching(bits, k, threshold, fewest, most, stats)

If an estimate leaves too few entries or too many, the k largest are selected instead.

On the CPU a threshold is cheaper than exact selection: the block maxima narrow down the search, and no histogram is
needed. On CUDA the host must not wait for a count. So one entry more than the most that may be sent is selected
exactly, and the threshold decides among these entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.select import count_reaching, entries_reaching, largest, topk_from_maxima


def sampled(bits: Tensor, size: int, seed: int) -> Tensor:
    """Return the magnitudes of evenly spaced elements, int32.

    Args:
        bits: int32, 1-D, from `magnitude_bits`.
        size: number of elements wanted; the result has `size` to 3 · `size`, or all if there are no more.
        seed: determines the first element.
    """
    # Odd, so that it shares no factor with usual row lengths. Otherwise the sample would consist of a few columns.
    stride = max(1, bits.numel() // size) - 1 | 1
    return bits[seed % stride :: stride] & MAGNITUDE


def kth_magnitude(magnitudes: Tensor, k: int) -> Tensor:
    """Return the k-th largest of int32 magnitudes, 0 < k <= len(magnitudes), as one int32 on their device."""
    return torch.topk(magnitudes, k).values[-1:]


@operation
def indices_reaching(bits: Tensor, k: int, thresholds: Tensor, fewest: int, most: int, stats: BlockStats) -> Tensor:
    """Return the indices of entries whose magnitude reaches a threshold.

    Args:
        bits: int32, 1-D, from `magnitude_bits`.
        k: number of entries wanted, 0 < k < len(bits).
        thresholds: int32, 1-D, on the device, descending. The first one that at least `fewest` entries reach is used.
        fewest, most: limits of the number of entries, fewest <= k <= most. If it is out of range, the k largest entries
            are selected.
        stats: statistics of the vector, with the block of `block_size(len(bits), k)`.

    Returns:
        int64 indices, ascending. Triton kernels pad them with `len(bits)` to the length `most`.
    """
    maxima = bits if stats.maxima is None else stats.maxima
    for threshold in thresholds.tolist():
        # Every block that passes has at least one entry.
        if count_reaching(maxima, threshold) > most:
            break
        indices, magnitudes = entries_reaching(bits, stats, threshold)
        if indices.numel() > most:
            return indices.index_select(0, largest(magnitudes, k)[0])
        if indices.numel() >= fewest:
            return indices
    return topk_from_maxima(bits, stats, k)


@indices_reaching.by("triton")
def _among_the_largest(bits: Tensor, k: int, thresholds: Tensor, fewest: int, most: int, stats: BlockStats) -> Tensor:
    most = min(most, bits.numel())
    indices, magnitudes = largest_entries(bits, most + 1, stats)
    reached = magnitudes >= thresholds.unsqueeze(1)
    counts = reached.sum(1)
    # argmax returns the first one, or the first zero if no threshold leaves enough entries.
    first = (counts >= fewest).int().argmax().view(1)
    keep, count = reached.index_select(0, first)[0], counts.index_select(0, first)
    keep = torch.where((count >= fewest) & (count <= most), keep, largest_mask(magnitudes, k))
    return keep_indices(indices, keep, most, bits.numel())


def largest_entries(bits: Tensor, count: int, stats: BlockStats) -> tuple[Tensor, Tensor]:
    """Return ascending int64 indices and int32 magnitudes of the `count` largest, or of all if there are fewer."""
    if count >= bits.numel():
        return torch.arange(bits.numel(), device=bits.device), bits & MAGNITUDE
    indices = topk_from_maxima(bits, stats, count)
    return indices, bits.index_select(0, indices) & MAGNITUDE


def largest_mask(magnitudes: Tensor, k: int) -> Tensor:
    """Return a bool mask of the k largest magnitudes, 0 < k <= len(magnitudes); of equal ones the first."""
    kth = magnitudes.sort(descending=True).values[k - 1]
    above, ties = magnitudes > kth, magnitudes == kth
    return above | (ties & (ties.cumsum(0) <= k - above.sum()))


@operation
def keep_indices(indices: Tensor, keep: Tensor, size: int, numel: int) -> Tensor:
    """Return the ascending indices whose `keep` is true, at most `size`; Triton pads them with `numel` to `size`."""
    return indices[keep]


@keep_indices.by("triton")
def _keep_and_pad(indices: Tensor, keep: Tensor, size: int, numel: int) -> Tensor:
    return torch.nn.functional.pad(torch.where(keep, indices, numel).sort().values, (0, size), value=numel)[:size]


def blocks_reaching(bits: Tensor, threshold: Tensor, stats: BlockStats) -> Tensor:
    """Return the number of blocks that hold a magnitude of at least an int32 threshold; a scalar on the device."""
    maxima = bits if stats.maxima is None else stats.maxima
    return (maxima & MAGNITUDE >= threshold).sum()


@operation
def narrowed(magnitudes: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Return the magnitudes for which the mask `above` is true, and their mask; Triton returns both unchanged.

    To leave out magnitudes, the host would have to wait for their number.
    """
    return magnitudes[above], above[above]


narrowed.by("triton")(lambda magnitudes, above: (magnitudes, above))
