"""The k entries of largest magnitude, at about the cost of reading the data.

    indices = topk_indices(u, k)  # int64, ascending; exact; of equal magnitudes the lowest index first

Block maxima make this cheap. Let T be the k-th largest of the maxima of blocks of B consecutive elements. At least k
elements reach T, so the k largest lie in blocks whose maximum reaches T, and k blocks are enough: if m < k maxima
exceed T, the first k - m blocks that equal it hold the first k - m elements that equal it. At density 0.001 and B = 64
this leaves 6.4 % of the data to look at. It is the delegate idea of Dr. Top-k (Gaihre et al. 2021, arXiv 2109.08219).

Magnitudes are compared as integers, the bits without the sign: the order of |u|, with NaN above infinity above all
finite numbers, so that whatever is broken is selected and seen.

The CPU's algorithm is in this file, by loops in C where they were compiled, and else by plain torch; the kernels for
CUDA are in `select_triton.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.block_stats import CHUNK, MAGNITUDE, BlockStats, chunk_size
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.select_triton import topk_triton

BLOCKS_PER_ENTRY = 3
"""With fewer blocks than this per entry wanted, too many blocks hold one."""

DIRECT = 1 << 16
"""Up to this many elements one `torch.topk` is as fast as narrowing down by a histogram first."""

SCANNED = 64
"""Elements of a block where loops in C look into all."""


def topk_indices(u: Tensor, k: int, stats: BlockStats | None = None) -> Tensor:
    """Return where the k entries of largest magnitude are.

    Args:
        u: 1-D, fp32. Left as it is.
        k: how many; more than there are means all.
        stats: of `u`, with the block of `block_size(len(u), k)`, where there is one already.

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
    """Return block statistics of `u`: those given, if they have been filled, or new ones."""
    if (
        stats is not None
        and stats.done
        and (stats.numel, stats.block) == (u.numel(), block)
        and stats.moments >= moments
    ):
        return stats
    new = BlockStats(u.numel(), block, moments=moments)
    return new.read(u) if block > 1 or moments else new  # otherwise there is nothing to find out


def magnitude_bits(owner: str, u: Tensor) -> Tensor:
    """Return `u` seen as int32: its magnitudes, once the sign bit is masked out. Raise unless it is 1-D fp32."""
    if u.dim() != 1:
        raise ValueError(f"{owner}: u must be 1-D, got shape {tuple(u.shape)}. Flatten it first.")
    if u.dtype != torch.float32:
        raise TypeError(f"{owner}: u must be torch.float32, got {u.dtype}.")
    return u.detach().contiguous().view(torch.int32)


def block_size(numel: int, k: int) -> int:
    """Return how many elements share a maximum; 1 where maxima would not pay."""
    return next((block for block in (64, 32, 16) if numel >= BLOCKS_PER_ENTRY * block * k), 1)


def block_maxima(numel: int, k: int) -> BlockStats | None:
    """Return statistics with room for the block maxima that the k largest are found by; None where they do not pay."""
    block = block_size(numel, k)
    return BlockStats(numel, block) if block > 1 else None


def topk_from_maxima(bits: Tensor, stats: BlockStats, k: int) -> Tensor:
    """Return the int64 indices of the k largest magnitudes, ascending, given at least k block maxima."""
    if uses_triton(bits):
        return topk_triton(bits, k, stats.maxima, stats.block)
    if stats.maxima is None:
        return topk_cpu(bits, k)[0]
    blocks, tops = topk_cpu(stats.maxima, k)
    indices, magnitudes = _entries_of_blocks(bits, blocks, stats.block, int(tops.min()), enough=k)
    return indices.index_select(0, topk_cpu(magnitudes, k)[0])


def topk_cpu(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and magnitudes of the k largest, 0 < k <= len(bits), looking at all of them."""
    threshold = kth_largest_cpu(bits, k)
    indices, magnitudes = _entries(bits, threshold, enough=k)
    extra = indices.numel() - k
    if extra == 0:
        return indices, magnitudes
    keep = magnitudes > threshold
    keep[nonzero(magnitudes == threshold)[:-extra]] = True
    kept = nonzero(keep)
    return indices.index_select(0, kept), magnitudes.index_select(0, kept)


def count_reaching(bits: Tensor, threshold: int) -> int:
    """Return how many magnitudes reach a threshold."""
    return sum(int((chunk >= threshold).count_nonzero()) for _, chunk in _chunks(bits))


def entries_reaching(bits: Tensor, stats: BlockStats, threshold: int) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and magnitudes of all entries that reach a threshold; looks only where some do."""
    if stats.maxima is None:
        return _entries(bits, threshold)
    return _entries_of_blocks(bits, _entries(stats.maxima, threshold)[0], stats.block, threshold)


def _entries_of_blocks(
    bits: Tensor, blocks: Tensor, block: int, threshold: int, enough: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and magnitudes of the entries of some blocks, and of the end, that reach a threshold.

    Args:
        bits: int32, 1-D.
        blocks: which blocks to look into, int64, ascending.
        block: elements per block, a power of two.
        threshold: smallest magnitude wanted, as bits.
        enough: so many are wanted, the first of equal ones: once they are found, later ones have to be larger than the
            threshold. Without this a constant or mostly zero input would return all it has.
    """
    if native.uses_native(bits):
        if bits.numel() % block:
            blocks = torch.cat([blocks, blocks.new_tensor([bits.numel() // block])])
        return _entries_in_c(bits, blocks, block, threshold, enough)
    shift, stop = block.bit_length() - 1, bits.numel() // block * block
    rows = bits[:stop].view(-1, block)
    size = CHUNK // 4 // block
    scratch = torch.empty(min(size, blocks.numel()), block, dtype=torch.int32, device=bits.device)
    indices, magnitudes, count = [], [], 0
    for some in blocks.split(size):
        found = torch.index_select(rows, 0, some, out=scratch[: some.numel()]).bitwise_and_(MAGNITUDE).view(-1)
        hits = nonzero(found >= threshold + (enough is not None and count >= enough))
        magnitudes.append(found.index_select(0, hits))
        # Shift and mask take a fifth of the time of // and %.
        indices.append(some.index_select(0, hits >> shift).mul_(block).add_(hits & (block - 1)))
        count += hits.numel()
    if stop < bits.numel():
        tail, tail_magnitudes = _entries(bits[stop:], threshold)
        indices.append(tail.add_(stop))
        magnitudes.append(tail_magnitudes)
    return torch.cat(indices), torch.cat(magnitudes)


def _entries(bits: Tensor, threshold: int, enough: int | None = None) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and magnitudes of all entries that reach a threshold; `enough` as above."""
    if native.uses_native(bits):
        return _entries_in_c(bits, None, SCANNED, threshold, enough)
    indices, magnitudes, count = [], [], 0
    for start, chunk in _chunks(bits):
        hits = nonzero(chunk >= threshold + (enough is not None and count >= enough))
        magnitudes.append(chunk.index_select(0, hits))
        indices.append(hits.add_(start))
        count += hits.numel()
    return torch.cat(indices), torch.cat(magnitudes)


def _entries_in_c(
    bits: Tensor, blocks: Tensor | None, block: int, threshold: int, enough: int | None
) -> tuple[Tensor, Tensor]:
    """Return entries of some blocks, of which the last may be short, or of all; `enough` as above."""
    many, size = -(-bits.numel() // block) if blocks is None else len(blocks), CHUNK // 32 // block
    count = torch.zeros(1, dtype=torch.int64, device=bits.device)
    indices = torch.empty(min(size, many) * block + 1, dtype=torch.int64, device=bits.device)  # of one call
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


def kth_largest_cpu(bits: Tensor, k: int) -> int:
    """Return the k-th largest magnitude, as bits."""
    if native.uses_native(bits):
        result = torch.empty(1, dtype=torch.int64, device=bits.device)
        native.run("kth_largest", bits.contiguous(), result, len(bits), k)
        return int(result)
    if bits.numel() <= DIRECT:
        magnitudes = bits & MAGNITUDE
        # Where most are equal, as after a threshold or among zeros, sorting takes longest and is not needed.
        least = magnitudes.min()
        if int((magnitudes > least).count_nonzero()) < k:
            return int(least)
        return int(torch.topk(magnitudes, k, sorted=False).values.min())
    # Radix select: first the upper 16 bits, then the lower 15 of those that agree in them, usually below 1 %.
    counts = torch.zeros(1 << 15, dtype=torch.int64, device=bits.device)
    for _, chunk in _chunks(bits):
        counts += torch.bincount(chunk.bitwise_right_shift_(16), minlength=1 << 15)
    upper, above = _bin_of(counts, k)
    alike = []
    for _, chunk in _chunks(bits):
        lower = chunk.sub_(upper << 16)
        alike.append(lower.index_select(0, nonzero((lower >= 0).logical_and_(lower < 1 << 16))))
    lower = torch.cat(alike)
    return (upper << 16) + _bin_of(torch.bincount(lower, minlength=1 << 16), k - above)[0]


def _bin_of(counts: Tensor, k: int) -> tuple[int, int]:
    """Return the bin that holds the k-th largest, and how many are in the bins above it."""
    reached = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(reached, k))
    return counts.numel() - 1 - place, int(reached[place - 1]) if place else 0


def _chunks(bits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield offset and magnitudes of one chunk after the other; each overwrites the last, and may be overwritten."""
    size = chunk_size(bits.numel())
    scratch = torch.empty(min(size, bits.numel()), dtype=torch.int32, device=bits.device)
    for start in range(0, max(1, bits.numel()), size):
        chunk = bits[start : start + size]
        yield start, torch.bitwise_and(chunk, MAGNITUDE, out=scratch[: chunk.numel()])


def nonzero(mask: Tensor) -> Tensor:
    """Return where a bool mask is true, int64, ascending, as if it were flat."""
    mask = mask.view(-1)
    numel = mask.numel()
    if mask.is_cuda or numel < 1 << 14 or numel % 8 or int(mask.count_nonzero()) > numel >> 4:
        return mask.nonzero().squeeze(1)
    # Few are true: find the groups of eight that hold one, as 64-bit words, then look into these. Three times faster.
    words = mask.view(torch.int64).nonzero().squeeze(1)
    within = mask.view(-1, 8).index_select(0, words).view(-1).nonzero().squeeze(1)
    return words.index_select(0, within >> 3).mul_(8).add_(within & 7)
