"""Selection by a threshold that was estimated: samples to estimate it from, and what it leaves.

    bits = magnitude_bits("owner", u)
    threshold = kth_magnitude(sampled(bits, 100_000, seed), 100)  # for example
    indices_reaching(bits, k, threshold, fewest, most, stats)

No estimate is trusted: where it leaves too few entries or too many, the k largest are selected.

On the CPU a threshold is cheaper than exact selection: the block maxima say where to look, and no histogram is needed.
On CUDA the host must not wait for a count, so the largest entries are selected exactly, a third more than are wanted,
and the threshold decides among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.select import (
    count_reaching,
    entries_reaching,
    kth_in_c,
    largest,
    topk_from_maxima,
)
from lightning_sparse.kernels.select_triton import Blocks, kth_largest


def sampled(bits: Tensor, size: int, seed: int) -> Tensor:
    """Return the magnitudes of evenly spaced elements, int32.

    Args:
        bits: int32, 1-D, of `magnitude_bits`.
        size: how many are wanted: `size` to 3 · `size` come, all where there are no more.
        seed: says where the first one is.
    """
    # Odd, so that it shares no factor with the usual lengths of rows: the sample would consist of a few columns.
    stride = max(1, bits.numel() // size) - 1 | 1
    return bits[seed % stride :: stride] & MAGNITUDE


@operation
def kth_magnitude(magnitudes: Tensor, k: int) -> Tensor:
    """Return the k-th largest of int32 magnitudes, 0 < k <= len(magnitudes), as one int32 on their device."""
    return torch.topk(magnitudes, k).values[-1:]


@kth_magnitude.by("triton")
def _kth_by_triton(magnitudes: Tensor, k: int) -> Tensor:
    return kth_largest(Blocks(magnitudes), k)


@kth_magnitude.by("native")
def _kth_in_c(magnitudes: Tensor, k: int) -> Tensor:
    return torch.tensor([kth_in_c(magnitudes, k)], dtype=torch.int32, device=magnitudes.device)


@operation
def indices_reaching(bits: Tensor, k: int, thresholds: Tensor, fewest: int, most: int, stats: BlockStats) -> Tensor:
    """Return where magnitudes reach a threshold.

    Args:
        bits: int32, 1-D, of `magnitude_bits`.
        k: how many entries are wanted, 0 < k < len(bits).
        thresholds: int32, 1-D, on the device, descending: the first one that at least `fewest` entries reach, counts.
        fewest, most: entries, fewest <= k <= most. If no threshold leaves so many, the k largest are selected.
        stats: of the vector, with the block of `block_size(len(bits), k)`.

    Returns:
        int64 indices, ascending. Where Triton works they are padded with `len(bits)` to a length of `most`.
    """
    maxima = bits if stats.maxima is None else stats.maxima
    for threshold in thresholds.tolist():
        # Every block that passes has an entry.
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
    # The first of the largest: a one, or the first zero where no threshold leaves enough.
    first = (counts >= fewest).int().argmax().view(1)
    keep, count = reached.index_select(0, first)[0], counts.index_select(0, first)
    keep = torch.where((count >= fewest) & (count <= most), keep, largest_mask(magnitudes, k))
    return keep_indices(indices, keep, most, bits.numel())


def largest_entries(bits: Tensor, count: int, stats: BlockStats) -> tuple[Tensor, Tensor]:
    """Return int64 indices, ascending, and int32 magnitudes of the `count` largest, or of all where there are fewer."""
    if count >= bits.numel():
        return torch.arange(bits.numel(), device=bits.device), bits & MAGNITUDE
    indices = topk_from_maxima(bits, stats, count)
    return indices, bits.index_select(0, indices) & MAGNITUDE


@operation
def largest_mask(magnitudes: Tensor, k: int) -> Tensor:
    """Return a bool mask of the k largest magnitudes, 0 < k <= len(magnitudes); of equal ones the first."""
    keep = torch.zeros_like(magnitudes, dtype=torch.bool)
    keep[largest(magnitudes, k)[0]] = True
    return keep


@largest_mask.by("triton")
def _mask_by_triton(magnitudes: Tensor, k: int) -> Tensor:
    kth = magnitudes.sort(descending=True).values[k - 1]
    above, ties = magnitudes > kth, magnitudes == kth
    return above | (ties & (ties.cumsum(0) <= k - above.sum()))


@operation
def keep_indices(indices: Tensor, keep: Tensor, size: int, numel: int) -> Tensor:
    """Return the indices, ascending, where `keep` is true, at most `size`; by Triton padded with `numel` to `size`."""
    return indices[keep]


@keep_indices.by("triton")
def _keep_and_pad(indices: Tensor, keep: Tensor, size: int, numel: int) -> Tensor:
    return torch.nn.functional.pad(torch.where(keep, indices, numel).sort().values, (0, size), value=numel)[:size]


@operation
def blocks_reaching(bits: Tensor, threshold: Tensor, stats: BlockStats) -> Tensor:
    """Return how many blocks hold a magnitude that reaches a threshold, int32 on the device, as a scalar there."""
    maxima = bits if stats.maxima is None else stats.maxima
    return torch.tensor(count_reaching(maxima, int(threshold)), device=bits.device)


@blocks_reaching.by("triton")
def _blocks_by_triton(bits: Tensor, threshold: Tensor, stats: BlockStats) -> Tensor:
    maxima = bits if stats.maxima is None else stats.maxima
    return (maxima & MAGNITUDE >= threshold).sum()


@operation
def narrowed(magnitudes: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Return those magnitudes for which the mask `above` is true, and the mask of these; with Triton all, and `above`.

    To leave some out, the host has to wait for their number.
    """
    return magnitudes[above], above[above]


narrowed.by("triton")(lambda magnitudes, above: (magnitudes, above))
