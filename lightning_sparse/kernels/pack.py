"""Packs ascending indices: stores their lower bits unchanged, and the differences of their upper bits in unary.

    upper, *lower = pack_bits(indices, numel=1000, capacity=16, width=8)
    unpack_bits(upper, lower, count, numel=1000, capacity=16, width=8)  # the indices again, padded to 16

This is Elias-Fano coding (Elias 1974; Fano 1971). Bit (index >> width) + i of `upper` is set for the i-th index.

On CUDA the host must not wait for a count. So lists of indices have a fixed length there. They are padded at the end
with the number of elements, which is not a valid index. Values of the padding are zero. On any device, lists of
different lengths are padded in the same way to form the rows of one tensor.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kernel, launch, tl

LOWER = {8: torch.uint8, 16: torch.int16}
"""Maps the width of the lower bits, unless it is 0, to the dtype that holds them."""

TILE = 1024
"""Number of indices that one program of the kernels processes."""

BYTES = 512
"""Number of bytes of upper bits that one program of the kernels processes."""


ADDED_UP = 4096
"""With more tiles than this, a prefix sum of their counts is computed first; otherwise each program sums them."""


def upper_bytes(numel: int, capacity: int, width: int) -> int:
    """Return the number of bytes that the upper bits take."""
    return (capacity + (numel >> width) + 8) // 8


@operation
def pack_bits(indices: Tensor, numel: int, capacity: int, width: int) -> tuple[Tensor, ...]:
    """Return indices as upper bits, uint8 of `upper_bytes`, and, unless `width` is 0, `capacity` lower parts.

    Args:
        indices: int64, (..., n), with n at most `capacity`. Each row is ascending and distinct, and may be padded with
            `numel` at the end.
        numel: number of elements; all indices are below it.
        capacity: most indices that a row can hold.
        width: number of lower bits: 0, 8 or 16.
    """
    size, device = upper_bytes(numel, capacity, width), indices.device
    *lead, each = indices.shape
    lower = (torch.zeros(*lead, capacity, dtype=LOWER[width], device=device),) if width else ()
    bits = torch.zeros(*lead, 8 * size, dtype=torch.uint8, device=device)
    many = math.prod(lead)
    rows = (indices.reshape(many, each), bits.view(many, -1), *(part.view(many, -1) for part in lower))
    for row, bit, *parts in zip(*rows, strict=True):
        row = row[: int((row < numel).sum())]
        bit[(row >> width) + torch.arange(row.numel(), device=device)] = 1
        for part in parts:
            part[: row.numel()] = row.to(part.dtype)  # conversion keeps the lower bits
    bits = bits.view(*lead, size, 8) << torch.arange(8, dtype=torch.uint8, device=device)
    return bits.sum(-1, dtype=torch.uint8), *lower


@pack_bits.by("triton")
def _pack_by_triton(indices: Tensor, numel: int, capacity: int, width: int) -> tuple[Tensor, ...]:
    size, lead, device = upper_bytes(numel, capacity, width), indices.shape[:-1], indices.device
    lower = (torch.zeros(*lead, capacity, dtype=LOWER[width], device=device),) if width else ()
    words = torch.zeros(*lead, -(-size // 4), dtype=torch.int32, device=device)
    _launch_pack(indices, words, lower, numel, width)
    return words.view(torch.uint8)[..., :size], *lower


def pack_entries_(
    indices: Tensor,
    values: Tensor,
    count: Tensor,
    out: Tensor | None,
    words: Tensor,
    lower: Sequence[Tensor],
    numel: int,
) -> None:
    """Write the result of `pack_bits`, the number of indices, and the values, in one launch; by Triton.

    Args:
        indices: as in `pack_bits`.
        values: fp32, one per index.
        count: int32, (..., 1). Like the next three, zeros whose rows are evenly spaced in memory; overwritten.
        out: fp32, (..., capacity); None if the values are not to be written.
        words: int32, (..., n).
        lower: tensors of a dtype of `LOWER`, (..., capacity), or none.
        numel: as in `pack_bits`.
    """
    width = next(width for width, dtype in {0: None, **LOWER}.items() if not lower or dtype == lower[0].dtype)
    _launch_pack(indices, words, lower, numel, width, count, values.contiguous(), out)


def _launch_pack(
    indices: Tensor,
    words: Tensor,
    lower: Sequence[Tensor],
    numel: int,
    width: int,
    said: Tensor | None = None,
    values: Tensor | None = None,
    written: Tensor | None = None,
) -> None:
    indices, each = indices.contiguous(), indices.shape[-1]
    count, out = words if said is None else said, words if written is None else written
    values = words if values is None else values
    (low,) = lower or (words,)
    strides = [part.stride(-2) if part.dim() > 1 else 0 for part in (words, low, count, out)]
    if total := indices.numel():
        args = (indices, words, low, values, count, out, total, each, *strides, numel)
        launch(
            _pack,
            -(-total // TILE),
            *args,
            WIDTH=width,
            COUNTS=said is not None,
            VALUES=written is not None,
            TILE=TILE,
            num_warps=8,
        )


@operation
def unpack_bits(upper: Tensor, lower: Sequence[Tensor], count: Tensor, numel: int, capacity: int, width: int) -> Tensor:
    """Return the indices that `pack_bits` packed, int64, (..., capacity), padded with `numel`.

    Args:
        upper: uint8, (..., `upper_bytes`).
        lower: as returned by `pack_bits`.
        count: number of indices in each row, int32, (..., 1).
        numel, capacity, width: as given to `pack_bits`.

    Raises:
        ValueError: the number of indices differs from `count`, or the indices are not valid. Triton kernels do not
            check, as the host would wait: a corrupt payload yields wrong indices, none of them negative.
    """
    *lead, size = upper.shape
    out = torch.full((*lead, capacity), numel, dtype=torch.int64, device=upper.device)
    bits = upper.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=upper.device) & 1
    rows = (out.view(-1, capacity), bits.view(-1, 8 * size), *(part.reshape(-1, capacity) for part in lower))
    for said, row, bit, *parts in zip(count.view(-1).tolist(), *rows, strict=True):
        indices = bit.nonzero().squeeze(1)
        if indices.numel() != said:
            raise ValueError(f"A payload of {said} entries holds {indices.numel()} indices: it is corrupt.")
        indices.sub_(torch.arange(indices.numel(), device=indices.device))
        for part in parts:
            indices = (indices << width) | (part[: indices.numel()].long() & (1 << width) - 1)
        row[: indices.numel()] = indices
    return check_indices(out, numel, count)


@unpack_bits.by("triton")
def _unpack_by_triton(
    upper: Tensor, lower: Sequence[Tensor], count: Tensor, numel: int, capacity: int, width: int
) -> Tensor:
    *lead, size = upper.shape
    tiles = -(-size // BYTES)
    counts = torch.empty(*lead, tiles, dtype=torch.int32, device=upper.device)
    out = torch.empty(*lead, capacity, dtype=torch.int64, device=upper.device)
    (low,) = lower or (upper,)
    # Rows are still in the received messages, evenly spaced.
    each = [part.stride(-2) if lead else 0 for part in (upper, low, count)]
    launch(_count_bits, counts.numel(), upper, counts, size, tiles, each[0], TILE=BYTES)
    added_up = tiles > ADDED_UP
    args = (upper, low, counts.cumsum(-1) if added_up else counts, count, out, size, tiles, capacity, numel, *each)
    launch(_unpack, counts.numel(), *args, WIDTH=width, ADDED_UP=added_up, TILE=BYTES, num_warps=8)
    return out


@operation
def check_counts(count: Tensor, capacity: int) -> None:
    """Check received numbers of entries. Triton kernels do not check, as the host would wait.

    Raises:
        ValueError: a number is below 0 or above `capacity`.
    """
    wrong = [given for given in count.view(-1).tolist() if not 0 <= given <= capacity]
    if wrong:
        raise ValueError(f"A payload for at most {capacity} entries says it holds {wrong[0]}: it is corrupt.")


# Triton kernels do not check, as the host would have to wait.
check_counts.by("triton")(lambda count, capacity: None)


@operation
def check_indices(indices: Tensor, numel: int, count: Tensor | None = None) -> Tensor:
    """Return received indices, (..., n), as int64. Triton kernels clamp the indices instead of checking them.

    So corrupt indices cannot access memory out of range, and the host does not wait for the device.

    Args:
        indices: received, of any integer dtype.
        numel: number of elements; all indices are below it, except padding at the end, which is `numel`.
        count: expected number of indices in each row, (..., 1); None accepts any number.

    Raises:
        ValueError: the indices are not strictly ascending, or not within `numel` elements, or their number is wrong.
    """
    indices = indices.long()
    if indices.numel():
        least, most = map(int, indices.aminmax())
        if least < 0 or most > numel:
            raise ValueError(f"A payload holds indices {least} to {most} of {numel} elements: it is corrupt.")
        later = indices[..., 1:]
        if not bool(((later > indices[..., :-1]) | (later == numel)).all()):
            raise ValueError(f"A payload holds indices of {numel} elements that do not ascend: it is corrupt.")
    if count is not None:
        found = (indices < numel).sum(-1, keepdim=True)
        if not torch.equal(found, count.long()):
            raise ValueError(f"{int(count.sum())} entries came with {int(found.sum())} indices: a payload is corrupt.")
    return indices


# Every kernel ignores indices that are not below `numel`.
check_indices.by("triton")(lambda indices, numel, count=None: indices.long().clamp_(min=0))


@operation
def gather(u: Tensor, indices: Tensor) -> Tensor:
    """Return `u[indices]`; the value of padding, whose index is `len(u)`, is zero."""
    if not indices.numel() or int(indices[-1]) < u.numel():
        return u.index_select(0, indices)
    valid = indices < u.numel()
    values = torch.zeros(indices.numel(), dtype=torch.float32, device=u.device)
    return values.masked_scatter_(valid, u.index_select(0, indices[valid]))


@gather.by("triton")
def _gather_by_triton(u: Tensor, indices: Tensor) -> Tensor:
    values = torch.empty(indices.numel(), dtype=torch.float32, device=u.device)
    if count := indices.numel():
        launch(_gather, -(-count // TILE), u, indices, values, count, u.numel(), TILE=TILE)
    return values


@kernel("total", "each", "words_each", "lower_each", "count_each", "out_each", "numel")
def _pack(
    indices,
    words,
    lower,
    values,
    count,
    out,
    total,
    each,
    words_each,
    lower_each,
    count_each,
    out_each,
    numel,
    WIDTH: tl.constexpr,
    COUNTS: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    # Positions have 64 bits, because the number of all indices may exceed 32 bits.
    positions = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + positions, mask=positions < total, other=numel)
    valid = index < numel
    row = positions // each
    place = positions - row * each
    bit = (index >> WIDTH) + place
    # These bits may be set in any order.
    word = words + row * words_each + (bit >> 5)
    tl.atomic_or(word, (1 << (bit & 31)).to(tl.int32), mask=valid, sem="relaxed")
    if WIDTH > 0:
        tl.store(lower + row * lower_each + place, index.to(lower.dtype.element_ty), mask=valid)
    if VALUES:
        tl.store(out + row * out_each + place, tl.load(values + positions, mask=valid, other=0.0), mask=valid)
    if COUNTS:
        # The program that has a row's last index writes the count; a row without indices keeps its zero.
        after = tl.load(indices + positions + 1, mask=valid & (place + 1 < each), other=numel)
        tl.store(count + row * count_each, (place + 1).to(tl.int32), mask=valid & (after >= numel))


@kernel("nbytes", "tiles", "upper_each")
def _count_bits(upper, counts, nbytes, tiles, upper_each, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) // tiles
    positions = (tl.program_id(0) - row * tiles) * TILE + tl.arange(0, TILE)
    byte = tl.load(upper + row * upper_each + positions, mask=positions < nbytes, other=0).to(tl.int32)
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    tl.store(counts + tl.program_id(0), tl.sum((byte + (byte >> 4)) & 0x0F))


@kernel("nbytes", "tiles", "capacity", "numel", "upper_each", "lower_each", "count_each")
def _unpack(
    upper,
    lower,
    counts,
    count,
    out,
    nbytes,
    tiles,
    capacity,
    numel,
    upper_each,
    lower_each,
    count_each,
    WIDTH: tl.constexpr,
    ADDED_UP: tl.constexpr,
    TILE: tl.constexpr,
):
    """`counts` holds the number of set bits in each tile, or its prefix sum over the tiles of a row if `ADDED_UP`."""
    row = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0) - row * tiles
    start = tile * TILE
    if ADDED_UP:
        before = tl.load(counts + tl.program_id(0) - 1, mask=tile > 0, other=0).to(tl.int32)
        whole = tl.load(counts + (row + 1) * tiles - 1).to(tl.int32)
    else:
        before = 0
        whole = 0
        first = 0
        while first < tiles:
            others = first + tl.arange(0, 1024)
            some = tl.load(counts + row * tiles + others, mask=others < tiles, other=0)
            before += tl.sum(tl.where(others < tile, some, 0))
            whole += tl.sum(some)
            first += 1024
    positions = start + tl.arange(0, TILE)
    byte = tl.load(upper + row * upper_each + positions, mask=positions < nbytes, other=0).to(tl.int32)
    bits = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, [TILE * 8])
    rank = before + tl.cumsum(bits) - bits
    room = tl.minimum(tl.load(count + row * count_each), capacity)
    valid = (bits > 0) & (rank < room)
    index = (start * 8 + tl.arange(0, TILE * 8) - rank) << WIDTH
    if WIDTH > 0:
        index |= tl.load(lower + row * lower_each + rank, mask=valid, other=0).to(tl.int64) & ((1 << WIDTH) - 1)
    tl.store(out + row * capacity + rank, index, mask=valid)
    # Write the padding behind the indices. There are more bits than indices, so all of it is written.
    place = start * 8 + tl.arange(0, TILE * 8)
    behind = tl.minimum(whole, room)
    tl.store(out + row * capacity + place, tl.zeros_like(place) + numel, mask=(place >= behind) & (place < capacity))


@kernel("count", "numel")
def _gather(u, indices, values, count, numel, TILE: tl.constexpr):
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + positions, mask=positions < count, other=numel)
    tl.store(values + positions, tl.load(u + index, mask=index < numel, other=0.0), mask=positions < count)
