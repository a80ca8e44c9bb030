"""The k entries of largest magnitude, at about the cost of reading the data.

    indices = topk_indices(u, k)  # int64, ascending; exact; of equal magnitudes the lowest index first

Block maxima make this cheap. Let T be the k-th largest of the maxima of blocks of B consecutive elements. At least k
elements reach T, so the k largest lie in blocks whose maximum reaches T, and k blocks are enough: if m < k maxima
exceed T, the first k - m blocks that equal it hold the first k - m elements that equal it. At density 0.001 and B = 64
this leaves 6.4 % of the data to look at. It is the delegate idea of Dr. Top-k (Gaihre et al. 2021, arXiv 2109.08219).

Magnitudes are compared as integers, the bits without the sign: the order of |u|, with NaN above infinity above all
finite numbers, so that whatever is broken is selected and seen.

On CUDA the same is done twice by kernels, for the maxima and for the elements of the chosen blocks: a radix select of
the threshold, a count per tile, and writing in order from the sums of these counts. All shapes follow from k, so that
the host waits for nothing, and no order depends on which program comes first.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, launch, uses_triton
from lightning_sparse.kernels.scan import CHUNK, MAGNITUDE, Scan, chunk_size

if TYPE_CHECKING:
    import triton.language as tl

BLOCKS_PER_ENTRY = 3
"""With fewer blocks than this per entry wanted, too many blocks hold one."""

DIRECT = 1 << 16
"""Up to this many elements one `torch.topk` is as fast as narrowing down by a histogram first."""

TILE = 4096
"""Elements that one program of the kernels looks at; below 2^15, so that two counts fit into 32 bits."""


def topk_indices(u: Tensor, k: int, scan: Scan | None = None) -> Tensor:
    """Return where the k entries of largest magnitude are.

    Args:
        u: 1-D, fp32. Left as it is.
        k: how many; more than there are means all.
        scan: of `u`, with the block of `block_size(len(u), k)`, where there is one already.

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
    return largest_of_blocks(bits, fresh(scan, u, block_size(numel, k)), k)


def fresh(scan: Scan | None, u: Tensor, block: int, *, moments: bool = False) -> Scan:
    """Return a scan of `u`: the one given, if it has been filled, or a new one."""
    if scan is not None and scan.done and (scan.numel, scan.block) == (u.numel(), block) and scan.moments >= moments:
        return scan
    new = Scan(u.numel(), block, moments=moments)
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


def largest_of_blocks(bits: Tensor, scan: Scan, k: int) -> Tensor:
    """Return the int64 indices of the k largest magnitudes, ascending, given at least k block maxima."""
    if uses_triton(bits):
        blocks = None if scan.maxima is None else largest_in(Blocks(scan.maxima), k)
        return largest_in(Blocks.of(bits, blocks, scan.block), k)
    if scan.maxima is None:
        return largest(bits, k)[0]
    blocks, tops = largest(scan.maxima, k)
    indices, magnitudes = _entries_of_blocks(bits, blocks, scan.block, int(tops.min()), enough=k)
    return indices.index_select(0, largest(magnitudes, k)[0])


def largest(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and magnitudes of the k largest, 0 < k <= len(bits), looking at all of them."""
    threshold = _kth_largest(bits, k)
    indices, magnitudes = _entries(bits, threshold, enough=k)
    extra = indices.numel() - k
    if extra == 0:
        return indices, magnitudes
    keep = magnitudes > threshold
    keep[_nonzero(magnitudes == threshold)[:-extra]] = True
    kept = _nonzero(keep)
    return indices.index_select(0, kept), magnitudes.index_select(0, kept)


def count_reaching(bits: Tensor, threshold: int) -> int:
    """Return how many magnitudes reach a threshold."""
    return sum(int((chunk >= threshold).count_nonzero()) for _, chunk in _chunks(bits))


def entries_reaching(bits: Tensor, scan: Scan, threshold: int) -> tuple[Tensor, Tensor]:
    """Return indices, ascending, and magnitudes of all entries that reach a threshold; looks only where some do."""
    if scan.maxima is None:
        return _entries(bits, threshold)
    return _entries_of_blocks(bits, _entries(scan.maxima, threshold)[0], scan.block, threshold)


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
    shift, stop = block.bit_length() - 1, bits.numel() // block * block
    rows = bits[:stop].view(-1, block)
    size = CHUNK // 4 // block
    scratch = torch.empty(min(size, blocks.numel()), block, dtype=torch.int32, device=bits.device)
    indices, magnitudes, count = [], [], 0
    for some in blocks.split(size):
        found = torch.index_select(rows, 0, some, out=scratch[: some.numel()]).bitwise_and_(MAGNITUDE).view(-1)
        hits = _nonzero(found >= threshold + (enough is not None and count >= enough))
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
    indices, magnitudes, count = [], [], 0
    for start, chunk in _chunks(bits):
        hits = _nonzero(chunk >= threshold + (enough is not None and count >= enough))
        magnitudes.append(chunk.index_select(0, hits))
        indices.append(hits.add_(start))
        count += hits.numel()
    return torch.cat(indices), torch.cat(magnitudes)


def _kth_largest(bits: Tensor, k: int) -> int:
    """Return the k-th largest magnitude, as bits."""
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
        alike.append(lower.index_select(0, _nonzero((lower >= 0).logical_and_(lower < 1 << 16))))
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


def _nonzero(mask: Tensor) -> Tensor:
    """Return where a bool mask is true, int64, ascending."""
    numel = mask.numel()
    if mask.is_cuda or numel < 1 << 14 or numel % 8 or int(mask.count_nonzero()) > numel >> 4:
        return mask.nonzero().squeeze(1)
    # Few are true: find the groups of eight that hold one, as 64-bit words, then look into these. Three times faster.
    words = mask.view(torch.int64).nonzero().squeeze(1)
    within = mask.view(-1, 8).index_select(0, words).view(-1).nonzero().squeeze(1)
    return words.index_select(0, within >> 3).mul_(8).add_(within & 7)


@dataclass(frozen=True)
class Blocks:
    """What the kernels look at: some blocks of `bits` (int32, 1-D), or all of it.

    Attributes:
        bits: numbers, of which the sign bit is ignored.
        indices: which blocks, int64, ascending; None is all of them.
        size: elements per block, a power of two. The last block may be cut short.
    """

    bits: Tensor
    indices: Tensor | None = None
    size: int = 64

    @classmethod
    def of(cls, bits: Tensor, indices: Tensor | None, size: int) -> Blocks:
        """Return these blocks and the end of `bits`, which belongs to no full block."""
        if indices is None:
            return cls(bits)
        full = bits.numel() // size
        end = full * size < bits.numel()
        return cls(bits, torch.nn.functional.pad(indices, (0, 1), value=full) if end else indices, size)

    @property
    def count(self) -> int:
        """How many blocks these are."""
        return -(-self.bits.numel() // self.size) if self.indices is None else self.indices.numel()

    @property
    def tiles(self) -> int:
        """How many programs look at them."""
        return -(-self.count * self.size // TILE)

    def look(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """Run a kernel over all tiles."""
        gathered = self.indices is not None
        constants |= {"GATHER": gathered, "BLOCK": self.size, "TILE": TILE, "num_warps": 8}
        indices = self.bits if self.indices is None else self.indices
        launch(kernel, self.tiles, self.bits, indices, self.bits.numel(), self.count, *args, **constants)


def largest_in(blocks: Blocks, k: int) -> Tensor:
    """Return the int64 indices of the k largest magnitudes in blocks that hold so many, ascending; by Triton."""
    threshold = kth_largest(blocks, k)
    return indices_above(blocks, threshold, counts_above(blocks, threshold), k, ties_up_to=k)


def kth_largest(blocks: Blocks, k: int, when: Tensor | None = None) -> Tensor:
    """Return the k-th largest magnitude as one int32 on the device, by Triton: radix select, eight bits at a time.

    Where `when`, one int32 on the device, is zero, it does next to nothing and returns nothing of use.
    """
    counts = torch.zeros(4, 256, dtype=torch.int32, device=blocks.bits.device)
    for digit in range(4):
        blocks.look(_histogram, counts, k, counts if when is None else when, DIGIT=digit, WHEN=when is not None)
    threshold = torch.empty(1, dtype=torch.int32, device=counts.device)
    launch(_threshold, 1, counts, k, threshold)
    return threshold


def counts_above(blocks: Blocks, threshold: Tensor) -> Tensor:
    """Count, by Triton, the magnitudes above a threshold and those equal to it.

    Returns:
        int64 of shape (2, tiles): how many there are in a tile and all before it, above and equal.
    """
    counts = torch.empty(2, blocks.tiles, dtype=torch.int32, device=threshold.device)
    blocks.look(_count, threshold, counts, blocks.tiles)
    return counts.cumsum(1)


def indices_above(
    blocks: Blocks, threshold: Tensor, counts: Tensor, size: int, *, ties_up_to: int, when: Tensor | None = None
) -> Tensor:
    """Write, by Triton, where the magnitudes above a threshold are, and the first of those equal to it.

    Args:
        threshold: one int32 on the device.
        counts: of `counts_above`.
        size: how many indices there are; with `when`, at most, and `len(blocks.bits)` stands behind them.
        ties_up_to: magnitudes equal to the threshold are taken, in order, until there are so many in all.
        when: one int32 on the device; where it is zero, no magnitude equal to the threshold is taken.

    Returns:
        int64 indices into `blocks.bits`, ascending.
    """
    indices = torch.empty(size, dtype=torch.int64, device=threshold.device)
    if when is not None:
        indices.fill_(blocks.bits.numel())
    args = (threshold, counts, indices, ties_up_to, blocks.tiles, counts if when is None else when)
    blocks.look(_write, *args, WHEN=when is not None)
    return indices


@kernel()
def _magnitudes(bits, indices, numel, count, GATHER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's magnitudes, -1 where there is nothing, and where in `bits` they are."""
    rows = tl.program_id(0).to(tl.int64) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    blocks = rows
    if GATHER:
        blocks = tl.load(indices + rows, mask=rows < count, other=0)
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = tl.broadcast_to((rows < count)[:, None], [TILE // BLOCK, BLOCK])
    # Loads are 16 bytes wide where a whole row is there or not; only in the last tile it may be cut short.
    if (tl.max(blocks) + 1) * BLOCK <= numel:
        found = tl.load(bits + places, mask=there, other=0)
    else:
        there &= places < numel
        found = tl.load(bits + places, mask=there, other=0)
    return tl.reshape(tl.where(there, found & 0x7FFFFFFF, -1), [TILE]), tl.reshape(places, [TILE])


@kernel()
def _digits(counts, k, DIGITS: tl.constexpr):
    """Return the first digits, of eight bits each, of the k-th largest number, from a histogram of each digit."""
    prefix = 0
    bins = tl.arange(0, 256)
    for digit in tl.static_range(DIGITS):
        count = tl.load(counts + digit * 256 + bins)
        reaching = tl.cumsum(count, reverse=True)
        chosen = tl.max(tl.where(reaching >= k, bins, 0))
        k -= tl.sum(tl.where(bins > chosen, count, 0))
        prefix = (prefix << 8) | chosen
    return prefix


@kernel("numel", "count", "k")
def _histogram(
    bits,
    indices,
    numel,
    count,
    counts,
    k,
    when,
    DIGIT: tl.constexpr,
    WHEN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    if WHEN:  # noqa: SIM102 (known when it is compiled, unlike the rest)
        if tl.load(when) == 0:
            return
    found, _ = _magnitudes(bits, indices, numel, count, GATHER, BLOCK, TILE)
    candidate = found >= 0
    if DIGIT > 0:
        candidate &= (found >> (32 - 8 * DIGIT)) == _digits(counts, k, DIGIT)
    bins = tl.histogram((found >> (24 - 8 * DIGIT)) & 255, 256, mask=candidate)
    # Whole numbers: their sum does not depend on the order.
    tl.atomic_add(counts + DIGIT * 256 + tl.arange(0, 256), bins, mask=bins > 0, sem="relaxed")


@kernel("k")
def _threshold(counts, k, threshold):
    tl.store(threshold, _digits(counts, k, 4))


@kernel("numel", "count", "tiles")
def _count(
    bits,
    indices,
    numel,
    count,
    threshold,
    counts,
    tiles,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, _ = _magnitudes(bits, indices, numel, count, GATHER, BLOCK, TILE)
    limit = tl.load(threshold)
    tile = tl.program_id(0)
    tl.store(counts + tile, tl.sum((found > limit).to(tl.int32)))
    tl.store(counts + tiles + tile, tl.sum((found == limit).to(tl.int32)))


@kernel("numel", "count", "ties_up_to", "tiles")
def _write(
    bits,
    indices,
    numel,
    count,
    threshold,
    counts,
    out,
    ties_up_to,
    tiles,
    when,
    WHEN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    found, places = _magnitudes(bits, indices, numel, count, GATHER, BLOCK, TILE)
    limit = tl.load(threshold)
    above = (found > limit).to(tl.int32)
    ties = (found == limit).to(tl.int32)
    # One sum for both counts, in the upper and the lower half of 32 bits; of what is before each element.
    both = (above << 16) | ties
    before = tl.cumsum(both) - both
    tile = tl.program_id(0)
    above_before = tl.load(counts + tile - 1, mask=tile > 0, other=0) + (before >> 16)
    ties_before = tl.load(counts + tiles + tile - 1, mask=tile > 0, other=0) + (before & 0xFFFF)
    room = tl.maximum(ties_up_to - tl.load(counts + tiles - 1), 0)
    if WHEN:
        room = tl.where(tl.load(when) != 0, room, 0)
    chosen = (above > 0) | ((ties > 0) & (ties_before < room))
    tl.store(out + above_before + tl.minimum(ties_before, room), places, mask=chosen)
