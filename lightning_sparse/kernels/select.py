"""Selects the k entries of largest magnitude, at about the cost of reading the data.

    indices = topk_indices(u, k)  # int64, ascending; exact; of equal magnitudes the lowest index first

Block maxima make this cheap. Let T be the k-th largest maximum of blocks of B consecutive elements. At least k elements
reach T, so the k largest lie in blocks whose maximum reaches T. It is enough to search k such blocks. If m < k maxima
exceed T, the first k - m blocks with the maximum T hold the first k - m elements equal to T. At density 0.001 and
B = 64, 6.4 % of the data remain to be searched. Dr. Top-k (Gaihre et al. 2021, arXiv 2109.08219) calls such maxima
delegates.

Magnitudes are compared as integers, by their bits without the sign. This is the order of |u|. NaN is larger than
infinity, so non-finite entries are always selected and detected.

This file has the algorithm for the CPU, with loops in C. The kernels for CUDA are in `select_triton.py`. Plain torch
searches all of the data and needs no block maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.block_stats import CHUNK, MAGNITUDE, BlockStats, chunk_size
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.select_triton import topk_triton

BLOCKS_PER_ENTRY = 3
"""Fewest blocks per selected entry: with fewer, too many blocks hold an entry."""

SCANNED = 64
"""Number of elements of a block when loops in C search all blocks."""


def topk_indices(u: Tensor, k: int, stats: BlockStats | None = None) -> Tensor:
    """Return the indices of the k entries of largest magnitude.

    Args:
        u: 1-D, fp32; not changed.
        k: number of entries; if `u` has fewer, all are selected.
        stats: statistics of `u`, with the block of `block_size(len(u), k)`, or None.

    Returns:
        min(k, len(u)) int64 indices, ascending. NaN counts as larger than infinity; of equal magnitudes the lowest
        index comes first.

    Raises:
        ValueError: `u` is not 1-D or k is negative.
        TypeError: `u` is not fp32.
    """
    bits = magnitude_bits("topk_indices", u)
    if k < 0:
        raise ValueError(f"topk_indices(k={k}): k must not be negative.")
    numel = bits.numel()
    if k == 0 or k >= numel:
        return torch.arange(min(k, numel), device=u.device)
    return topk_from_maxima(bits, ensure_stats(stats, u, block_size(numel, k)), k)


def ensure_stats(stats: BlockStats | None, u: Tensor, block: int, *, moments: bool = False) -> BlockStats:
    """Return `stats` if they are filled and fit, else new block statistics of `u`."""
    if (
        stats is not None
        and stats.done
        and (stats.numel, stats.block) == (u.numel(), block)
        and stats.moments >= moments
    ):
        return stats
    new = BlockStats(u.numel(), block, moments=moments)
    return new.read(u) if block > 1 or moments else new  # otherwise there is nothing to compute


def magnitude_bits(owner: str, u: Tensor) -> Tensor:
    """Return an int32 view of `u`, whose bits without the sign are magnitudes. Raise unless `u` is 1-D fp32."""
    if u.dim() != 1:
        raise ValueError(f"{owner}: u must be 1-D, got shape {tuple(u.shape)}. Flatten it first.")
    if u.dtype != torch.float32:
        raise TypeError(f"{owner}: u must be torch.float32, got {u.dtype}.")
    return u.detach().contiguous().view(torch.int32)


def block_size(numel: int, k: int) -> int:
    """Return the number of elements that share a maximum; 1 if maxima would not save time."""
    return next((block for block in (64, 32, 16) if numel >= BLOCKS_PER_ENTRY * block * k), 1)


def block_maxima(numel: int, k: int) -> BlockStats | None:
    """Return statistics to fill with block maxima for finding the k largest; None if maxima would not save time."""
    block = block_size(numel, k)
    return BlockStats(numel, block) if block > 1 else None


@operation
def topk_from_maxima(bits: Tensor, stats: BlockStats, k: int) -> Tensor:
    """Return the int64 indices of the k largest magnitudes, ascending, given at least k block maxima."""
    return largest(bits, k)[0]


@topk_from_maxima.by("triton")
def _from_maxima_by_triton(bits: Tensor, stats: BlockStats, k: int) -> Tensor:
    return topk_triton(bits, k, stats.maxima, stats.block)


@topk_from_maxima.by("native")
def _from_maxima_in_c(bits: Tensor, stats: BlockStats, k: int) -> Tensor:
    if stats.maxima is None:
        return largest(bits, k)[0]
    blocks, tops = largest(stats.maxima, k)
    indices, magnitudes = _entries_of_blocks(bits, blocks, stats.block, int(tops.min()), enough=k)
    return indices.index_select(0, largest(magnitudes, k)[0])


@operation
def largest(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ascending indices and magnitudes of the k largest, 0 < k <= len(bits); searches all elements."""
    magnitudes = bits & MAGNITUDE
    least = torch.topk(magnitudes, k, sorted=False).values.amin()
    above, ties = magnitudes > least, magnitudes == least
    indices = (above | ties & (ties.cumsum(0) <= k - above.sum())).nonzero().squeeze(1)
    return indices, magnitudes.index_select(0, indices)


@largest.by("native")
def _largest_in_c(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    threshold = kth_in_c(bits, k)
    indices, magnitudes = _entries_of_blocks(bits, None, SCANNED, threshold, enough=k)
    extra = indices.numel() - k
    if extra == 0:
        return indices, magnitudes
    keep = magnitudes > threshold
    keep[nonzero(magnitudes == threshold)[:-extra]] = True
    kept = nonzero(keep)
    return indices.index_select(0, kept), magnitudes.index_select(0, kept)


def kth_in_c(bits: Tensor, k: int) -> int:
    """Return the bits of the k-th largest magnitude; computed in C."""
    result = torch.empty(1, dtype=torch.int64, device=bits.device)
    native.run("kth_largest", bits.contiguous(), result, len(bits), k)
    return int(result)


def count_reaching(bits: Tensor, threshold: int) -> int:
    """Return the number of magnitudes that reach a threshold."""
    size = chunk_size(bits.numel())
    scratch = torch.empty(min(size, bits.numel()), dtype=torch.int32, device=bits.device)  # stays in the cache
    chunks = (torch.bitwise_and(part, MAGNITUDE, out=scratch[: part.numel()]) for part in bits.split(size))
    return sum(int((chunk >= threshold).count_nonzero()) for chunk in chunks)


@operation
def entries_reaching(bits: Tensor, stats: BlockStats, threshold: int) -> tuple[Tensor, Tensor]:
    """Return ascending indices and magnitudes of all entries that reach a threshold."""
    magnitudes = bits & MAGNITUDE
    indices = (magnitudes >= threshold).nonzero().squeeze(1)
    return indices, magnitudes.index_select(0, indices)


@entries_reaching.by("native")
def _reaching_in_c(bits: Tensor, stats: BlockStats, threshold: int) -> tuple[Tensor, Tensor]:
    if stats.maxima is None:
        return _entries_of_blocks(bits, None, SCANNED, threshold)
    blocks, _ = _entries_of_blocks(stats.maxima, None, SCANNED, threshold)
    return _entries_of_blocks(bits, blocks, stats.block, threshold)


def _entries_of_blocks(
    bits: Tensor, blocks: Tensor | None, block: int, threshold: int, enough: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return ascending indices and magnitudes of the entries in some blocks, and at the end, that reach a threshold.

    Args:
        bits: int32, 1-D.
        blocks: numbers of the blocks to search, int64, ascending; None searches all.
        block: number of elements per block, a power of two.
        threshold: bits of the smallest magnitude wanted.
        enough: number of entries wanted, the first of equal ones. Once they are found, later entries must exceed the
            threshold. Otherwise all entries of a constant or mostly zero input would be returned.
    """
    if blocks is not None and bits.numel() % block:
        blocks = torch.cat([blocks, blocks.new_tensor([bits.numel() // block])])
    many, size = -(-bits.numel() // block) if blocks is None else len(blocks), CHUNK // 32 // block
    count = torch.zeros(1, dtype=torch.int64, device=bits.device)
    indices = torch.empty(min(size, many) * block, dtype=torch.int64, device=bits.device)  # for one call
    magnitudes = torch.empty(len(indices), dtype=torch.int32, device=bits.device)
    limits = block, bits.numel(), max(threshold, 0), bits.numel() if enough is None else enough
    parts, before = [], 0
    for first in range(0, max(1, many), size):
        tensors = bits, blocks, indices, magnitudes, count
        native.run("entries_of_blocks", *tensors, first, min(first + size, many), *limits)
        found = int(count) - before
        parts.append((indices[:found].clone(), magnitudes[:found].clone()))
        before += found
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])


def nonzero(mask: Tensor) -> Tensor:
    """Return the flat indices of the true elements of a bool mask, int64, ascending."""
    mask = mask.view(-1)
    numel = mask.numel()
    if mask.is_cuda or numel < 1 << 14 or numel % 8 or int(mask.count_nonzero()) > numel >> 4:
        return mask.nonzero().squeeze(1)
    # Few elements are true: find 64-bit words with a true element, then search these. 3× faster than one nonzero().
    words = mask.view(torch.int64).nonzero().squeeze(1)
    within = mask.view(-1, 8).index_select(0, words).view(-1).nonzero().squeeze(1)
    return words.index_select(0, within >> 3).mul_(8).add_(within & 7)
