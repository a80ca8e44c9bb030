"""Ascending indices as bits: the lower bits as they are, of the upper ones the differences, in unary.

    upper, *lower = pack(indices, numel=1000, capacity=16, width=8)
    unpack(upper, lower, width=8)  # the indices again

Elias 1974; Fano 1971. Bit (index >> width) + i of `upper` is set for the i-th index.

On CUDA the host must not wait for a count. So lists of indices have a fixed length there, and are padded at the end
with the number of elements, which is no index; values that belong to it are zero.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import kernel, launch, uses_triton

if TYPE_CHECKING:
    import triton.language as tl

LOWER = {8: torch.uint8, 16: torch.int16}
"""Widths of the lower bits, beside 0, and what holds them."""

TILE = 1024
"""Indices that one program of the kernels works on."""

BYTES = 512
"""Bytes of upper bits that one program of the kernels works on, eight times as many bits."""


def upper_bytes(numel: int, capacity: int, width: int) -> int:
    """Return how many bytes the upper bits take."""
    return (capacity + (numel >> width) + 8) // 8


def pack(indices: Tensor, numel: int, capacity: int, width: int) -> tuple[Tensor, ...]:
    """Return indices as upper bits, uint8 of `upper_bytes`, and, unless `width` is 0, `capacity` lower parts.

    Args:
        indices: int64, ascending, distinct, at most `capacity` of them; `numel` at the end stands for no index.
        numel: all indices are below.
        capacity: what there is room for.
        width: of the lower bits: 0, 8 or 16.
    """
    size, device = upper_bytes(numel, capacity, width), indices.device
    lower = (torch.zeros(capacity, dtype=LOWER[width], device=device),) if width else ()
    if uses_triton(indices):
        words = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
        if count := indices.numel():
            args = (indices, words, *(lower or (words,)), count, numel)
            launch(_pack, -(-count // TILE), *args, WIDTH=width, TILE=TILE)
        return words.view(torch.uint8)[:size], *lower
    bits = torch.zeros(8 * size, dtype=torch.uint8, device=device)
    bits[(indices >> width) + torch.arange(indices.numel(), device=device)] = 1
    for part in lower:
        part[: indices.numel()] = indices.to(part.dtype)  # conversion keeps the lower bits
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=device)).sum(1, dtype=torch.uint8), *lower


def unpack(upper: Tensor, lower: Sequence[Tensor], width: int) -> Tensor:
    """Return the indices that `pack` was given: as many as bits are set, if the lower parts suffice."""
    bits = upper.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=upper.device) & 1
    places = bits.view(-1).nonzero().squeeze(1)
    indices = places.sub_(torch.arange(places.numel(), device=places.device))
    for part in lower:
        found = part[: indices.numel()].long() & (1 << width) - 1
        indices = (indices[: found.numel()] << width) | found
    return indices


def unpack_padded(
    upper: Tensor, lower: Sequence[Tensor], count: Tensor, numel: int, capacity: int, width: int
) -> Tensor:
    """Return `capacity` indices, by Triton: those that `pack` was given, the first `count`, and `numel` behind them.

    Args:
        count: one int32, on the device.
    """
    out = torch.full((capacity,), numel, dtype=torch.int64, device=upper.device)
    tiles = -(-upper.numel() // BYTES)
    counts = torch.empty(tiles, dtype=torch.int32, device=upper.device)
    launch(_count_bits, tiles, upper, counts, upper.numel(), TILE=BYTES)
    args = (upper, *(lower or (upper,)), counts.cumsum(0), count, out, upper.numel(), capacity)
    launch(_unpack, tiles, *args, WIDTH=width, TILE=BYTES, num_warps=8)
    return out


def gather(u: Tensor, indices: Tensor) -> Tensor:
    """Return `u[indices]`; zero for an index that is none, `len(u)`, where Triton works."""
    if not uses_triton(u):
        return u.index_select(0, indices)
    values = torch.empty(indices.numel(), dtype=torch.float32, device=u.device)
    if count := indices.numel():
        launch(_gather, -(-count // TILE), u, indices, values, count, u.numel(), TILE=TILE)
    return values


@kernel("count", "numel")
def _pack(indices, words, lower, count, numel, WIDTH: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + places, mask=places < count, other=numel)
    there = index < numel
    bit = (index >> WIDTH) + places
    # The order of these additions to a set does not matter.
    tl.atomic_or(words + (bit >> 5), (1 << (bit & 31)).to(tl.int32), mask=there, sem="relaxed")
    if WIDTH > 0:
        tl.store(lower + places, index.to(lower.dtype.element_ty), mask=there)


@kernel("nbytes")
def _count_bits(upper, counts, nbytes, TILE: tl.constexpr):
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    byte = tl.load(upper + places, mask=places < nbytes, other=0).to(tl.int32)
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    tl.store(counts + tl.program_id(0), tl.sum((byte + (byte >> 4)) & 0x0F))


@kernel("nbytes", "capacity")
def _unpack(upper, lower, counts, count, out, nbytes, capacity, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """`counts` says how many bits are set in a tile and all before it."""
    tile = tl.program_id(0)
    start = tile * TILE
    before = tl.load(counts + tile - 1, mask=tile > 0, other=0).to(tl.int32)
    places = start + tl.arange(0, TILE)
    byte = tl.load(upper + places, mask=places < nbytes, other=0).to(tl.int32)
    bits = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, [TILE * 8])
    rank = before + tl.cumsum(bits) - bits
    there = (bits > 0) & (rank < tl.minimum(tl.load(count), capacity))
    index = (start * 8 + tl.arange(0, TILE * 8) - rank).to(tl.int64) << WIDTH
    if WIDTH > 0:
        index |= tl.load(lower + rank, mask=there, other=0).to(tl.int64) & ((1 << WIDTH) - 1)
    tl.store(out + rank, index, mask=there)


@kernel("count", "numel")
def _gather(u, indices, values, count, numel, TILE: tl.constexpr):
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + places, mask=places < count, other=numel)
    tl.store(values + places, tl.load(u + index, mask=index < numel, other=0.0), mask=places < count)
