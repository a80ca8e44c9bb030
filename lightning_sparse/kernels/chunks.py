"""The k entries of largest magnitude of each chunk of consecutive elements.

    indices = chunktopk(u, k=4)  # int64, ascending; four of each 4,096 elements

On the CPU block maxima narrow down the search, as in `select.py`. A chunk's k largest entries lie in the k blocks with
the largest maxima. On CUDA one program selects from one chunk. It holds the chunk in registers and finds the threshold
bit by bit. So one launch reads the data once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kernel, launch, tl
from lightning_sparse.kernels.select import block_size, ensure_stats, magnitude_bits, nonzero, topk_indices

CHUNK = 4096
"""Number of consecutive elements of a chunk: a position in a chunk takes 12 bits."""

AT_A_TIME = 256 * CHUNK
"""Number of elements to process at a time on the CPU, to bound the memory that is needed."""


def chunktopk(u: Tensor, k: int, k_last: int, stats: BlockStats | None = None) -> Tensor:
    """Return the indices of the k entries of largest magnitude of each chunk.

    Args:
        u: 1-D, fp32; not changed.
        k: number of entries of each full chunk, 1 to `CHUNK`.
        k_last: number of entries among the elements behind the last full chunk, at most k.
        stats: statistics of `u`, with the block of `block_size(CHUNK, k)`, or None. Not used on CUDA.

    Returns:
        int64 indices, ascending. NaN counts as larger than infinity; of equal magnitudes the lowest index comes first.

    Raises:
        ValueError: `u` is not 1-D.
        TypeError: `u` is not fp32.
    """
    return _select(magnitude_bits("chunktopk", u), k, k_last, stats)


@operation
def _select(bits: Tensor, k: int, k_last: int, stats: BlockStats | None) -> Tensor:
    # CPUs with the loops in C use this code, too. So it processes little at a time, and uses block maxima.
    u, full = bits.view(torch.float32), bits.numel() // CHUNK
    end, block = full * CHUNK, block_size(CHUNK, k)
    maxima = ensure_stats(stats, u, block).maxima if full else None
    parts: list[Tensor] = []
    for start in range(0, end, AT_A_TIME):
        some = bits[start : min(start + AT_A_TIME, end)]
        if maxima is None:
            indices = _largest_of_rows((some & MAGNITUDE).view(-1, CHUNK), k)
        else:
            stop = start + some.numel()
            indices = _by_maxima(some.view(-1, block), maxima[start // block : stop // block], k)
        parts.append(indices + start)
    return torch.cat([*parts, topk_indices(u[end:], k_last) + end])


@_select.by("triton")
def _select_by_triton(bits: Tensor, k: int, k_last: int, stats: BlockStats | None) -> Tensor:
    indices = torch.empty(bits.numel() // CHUNK * k + k_last, dtype=torch.int64, device=bits.device)
    if programs := -(-bits.numel() // CHUNK):
        launch(_chunktopk, programs, bits, indices, bits.numel(), k, k_last, CHUNK=CHUNK, num_warps=8)
    return indices


@operation
def check_ascending(indices: Tensor, numel: int) -> None:
    """Check non-negative indices, (..., n). Triton kernels do not check, as the host would wait.

    Raises:
        ValueError: the indices are not strictly ascending, or not below `numel`.
    """
    if indices.numel() and not bool((indices[..., -1] < numel).all() & (indices.diff() > 0).all()):
        raise ValueError(f"A payload holds indices of {numel} elements that do not ascend: it is corrupt.")


# Triton kernels do not check, as the host would have to wait.
check_ascending.by("triton")(lambda indices, numel: None)


def _by_maxima(blocks: Tensor, maxima: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes of each chunk, ascending, given all blocks of the chunks."""
    block = blocks.shape[1]
    chosen = _largest_of_rows(maxima.view(-1, CHUNK // block), k)
    # At least k entries of a chunk reach the least of its chosen maxima.
    least = maxima.index_select(0, chosen).view(-1, k).amin(1)
    found = blocks.index_select(0, chosen).bitwise_and_(MAGNITUDE).view(-1, k * block)
    hits = nonzero(found >= least.unsqueeze(1))
    # The table has a row of hits for each chunk. Rows are padded with -1, which is never chosen.
    row, cuts = _cuts(hits, k * block, len(least))
    widest = int(cuts.diff().max())
    table = torch.full((len(least), widest), -1, dtype=torch.int32, device=least.device)
    shift = torch.arange(len(least), device=least.device) * widest - cuts[:-1]
    places = torch.arange(hits.numel(), device=hits.device) + shift.index_select(0, row)
    table.view(-1).index_copy_(0, places, found.view(-1).index_select(0, hits))
    hits = hits.index_select(0, _largest_of_rows(table, k) - shift.repeat_interleave(k))
    return chosen.index_select(0, hits // block).mul_(block).add_(hits % block)


def _largest_of_rows(rows: Tensor, k: int) -> Tensor:
    """Return the flat int64 indices of the k largest numbers of each row; of equal numbers the first ones."""
    count, width = rows.shape
    least = torch.topk(rows, k, dim=1, sorted=False).values.amin(1)
    hits = nonzero(rows >= least.unsqueeze(1))
    if hits.numel() == count * k:
        return hits
    # Numbers equal to the least fill the places that the larger numbers of their row leave.
    row, cuts = _cuts(hits, width, count)
    tied = rows.view(-1).index_select(0, hits) == least.index_select(0, row)
    ties = torch.nn.functional.pad(tied.cumsum(0), (1, 0))
    before = ties.index_select(0, cuts)
    room = k - cuts.diff() + before.diff()
    return hits[~tied | (ties[1:] <= (before[:-1] + room).index_select(0, row))]


def _cuts(hits: Tensor, width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each position, and the bounds of each row among the ascending positions, (rows + 1)."""
    row = hits // width
    return row, torch.searchsorted(row, torch.arange(rows + 1, device=row.device))


@kernel("numel", "k", "k_last")
def _chunktopk(bits, indices, numel, k, k_last, CHUNK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    positions = chunk * CHUNK + tl.arange(0, CHUNK)
    # Loads without a mask are 16 bytes wide, whatever the length is.
    if (chunk + 1) * CHUNK <= numel:
        found = tl.load(bits + positions) & 0x7FFFFFFF
        wanted = k
    else:
        found = tl.where(positions < numel, tl.load(bits + positions, mask=positions < numel, other=0) & 0x7FFFFFFF, -1)
        wanted = k_last
    # Find the largest number that `wanted` magnitudes reach, from the highest bit down.
    limit = 0
    bit = 1 << 30
    while bit > 0:
        if tl.sum((found >= (limit | bit)).to(tl.int32)) >= wanted:
            limit |= bit
        bit = bit >> 1
    above = (found > limit).to(tl.int32)
    ties = (found == limit).to(tl.int32)
    # One prefix sum serves both counts, in the upper and the lower half of 32 bits.
    both = (above << 16) | ties
    before = tl.cumsum(both) - both
    room = wanted - tl.sum(above)
    ties_before = before & 0xFFFF
    chosen = (above > 0) | ((ties > 0) & (ties_before < room))
    tl.store(indices + chunk * k + (before >> 16) + tl.minimum(ties_before, room), positions, mask=chosen)
