"""Codes of a few bits each, packed without gaps: 1 bit is 1 bit.

    packed = pack_codes(codes, 5)          # 5 bytes for every 8 codes below 2⁵
    unpack_codes(packed, 5, len(codes))    # the codes again

Codes of 1, 2, 4 or 8 bits fill bytes: the first code of a byte is in its lowest bits. Codes of other widths are sent as
several planes of such widths, one behind the other, the lower bits first: 5 bits are a plane of 4 and a plane of 1.

On the CPU 8 codes are packed as one 64-bit word, and bytes are unpacked by a table, both several times as fast as
comparing and shifting bytes. Kernels, where there are any, do either at once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.launch import at_a_time, kept, kernel, launch, uses_triton

if TYPE_CHECKING:
    import triton.language as tl

WORD = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""Width of a code to the word that holds as many codes, a byte each, as one byte does packed."""

TILE = 1024
"""Codes of a program of Triton's."""


def code_bytes(numel: int, bits: int) -> int:
    """Return how many bytes `numel` codes take: `bits` for every 8 codes."""
    return -(-numel // 8) * bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (1-D, integers from 0 to 2^bits - 1, bits up to 15) as bytes, uint8 of `code_bytes`."""
    codes, count = codes.contiguous(), codes.numel()
    packed = torch.empty(code_bytes(count, bits), dtype=torch.uint8, device=codes.device)
    if uses_triton(codes):
        if count:
            launch(_pack_codes, -(-count // TILE), codes, packed, count, packed.numel() // bits, BITS=bits, TILE=TILE)
        return packed
    if native.uses_native(codes):
        codes = codes if codes.itemsize == 1 else codes.to(torch.int16)
        native.run("pack_codes", codes, packed, count, packed.numel() // bits, bits, codes.itemsize)
        return packed
    if bits == 1 and codes.device.type == "cpu":
        packed.copy_(torch.from_numpy(np.packbits(codes.numpy(), bitorder="little")))
        return packed
    most = at_a_time(codes)
    scratch = torch.empty(min(most, count + 7) // 8, dtype=torch.int64, device=codes.device)
    for start in range(0, count, most):
        whole = codes[start : start + most]
        if whole.numel() % 8:
            whole = torch.nn.functional.pad(whole, (0, -whole.numel() % 8))
        for shift, width, plane in _planes(packed, bits):
            part = whole if bits <= 8 else whole >> shift & (1 << width) - 1
            words = part.to(torch.uint8).view(torch.int64)
            space = scratch[: words.numel()]
            if width < bits <= 8:
                words = torch.bitwise_right_shift(words, shift, out=space).bitwise_and_(_every_byte((1 << width) - 1))
            if width < 8:
                # A multiple of the codes' word has them side by side in its highest byte.
                size = WORD[width].itemsize
                words = torch.mul(words.view(WORD[width]), _gathering(width), out=space.view(WORD[width]))
                words.bitwise_right_shift_(8 * size - 8)
            else:
                words = words.view(torch.uint8)
            plane[start * width // 8 :][: words.numel()].copy_(words)
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes that `pack_codes` was given (1-D, of `numel`): uint8, or int16 if they have more than 8 bits."""
    native.check_part("codes", packed, code_bytes(numel, bits))
    packed = packed.contiguous()  # a column of gathered messages is not
    codes = torch.empty(-(-numel // 8) * 8, dtype=torch.int16 if bits > 8 else torch.uint8, device=packed.device)
    if uses_triton(packed):
        if numel:
            groups = packed.numel() // bits
            launch(_unpack_codes, -(-numel // TILE), packed, codes, numel, groups, BITS=bits, TILE=TILE)
        return codes[:numel]
    if native.uses_native(packed):
        native.run("unpack_codes", packed, codes, numel, packed.numel() // bits, bits)
        return codes[:numel]
    most = at_a_time(packed)
    scratch = torch.empty(min(most, codes.numel()), dtype=torch.uint8, device=packed.device)
    for start in range(0, codes.numel(), most):
        place = codes[start : start + most]
        for shift, width, plane in _planes(packed, bits):
            part = plane[start * width // 8 : (start + place.numel()) * width // 8]
            if width < 8:
                part = look_up_(_codes_of_bytes(width, packed), part, scratch[: place.numel()])
            if shift:
                place.bitwise_or_(part.to(place.dtype) << shift)
            else:
                place.copy_(part)
    return codes[:numel]


def look_up_(table: Tensor, packed: Tensor, out: Tensor) -> Tensor:
    """Write what a table has for each byte, one behind the other, to `out` (1-D), and return it.

    Args:
        table: (256, n).
        packed: uint8, 1-D.
        out: of the table's dtype, n times as long as `packed`; overwritten.
    """
    rows = out.view(-1, table.shape[1])
    if packed.device.type == "cpu":  # there several times as fast as torch; "wrap" as it would check each byte else
        np.take(table.numpy(), packed.numpy(), axis=0, out=rows.numpy(), mode="wrap")
    else:
        torch.index_select(table, 0, packed.int(), out=rows)
    return out


@kernel("count", "groups")
def _pack_codes(codes, packed, count, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write the bytes of every bit plane of `count` codes, which lie in `groups` of 8."""
    tile = tl.program_id(0).to(tl.int64)
    for step in tl.static_range(4):
        # Planes of 8, 4, 2 and 1 bits, where BITS has such a one. Before it lie those of more bits.
        if BITS >> (3 - step) & 1:
            places = tile * (TILE >> step) + tl.arange(0, TILE >> step)  # of its bytes, with 1 << step codes each
            byte = tl.zeros([TILE >> step], tl.int32)
            for number in tl.static_range(1 << step):
                index = (places << step) + number
                code = tl.load(codes + index, mask=index < count, other=0).to(tl.int32)
                code = code >> (BITS >> (4 - step) << (4 - step)) & ((1 << (8 >> step)) - 1)
                byte |= code << (number * (8 >> step))
            start = (BITS >> (4 - step) << (4 - step)) * groups.to(tl.int64)
            tl.store(packed + start + places, byte.to(tl.uint8), mask=places < groups * (8 >> step))


@kernel("count", "groups")
def _unpack_codes(packed, codes, count, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write the first `count` codes that the bit planes of `groups` of 8 codes hold."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    code = tl.zeros([TILE], tl.int32)
    for step in tl.static_range(4):
        if BITS >> (3 - step) & 1:
            start = (BITS >> (4 - step) << (4 - step)) * groups.to(tl.int64)
            byte = tl.load(packed + start + (index >> step), mask=index < count, other=0).to(tl.int32)
            part = byte >> (index % (1 << step) * (8 >> step)).to(tl.int32) & ((1 << (8 >> step)) - 1)
            code |= part << (BITS >> (4 - step) << (4 - step))
    tl.store(codes + index, code.to(codes.dtype.element_ty), mask=index < count)


def region_codes(numel: int, size: int) -> int:
    """Return how many codes each of `size` regions has: equally many, a multiple of 8."""
    return -(-numel // (8 * size)) * 8


def in_regions(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return packed codes of 1, 2, 4 or 8 bits (1-D) region by region, as rows; zeros fill up the last ones.

    Codes of these widths have one plane, so a row is what `pack_codes` makes of the region.
    """
    each = code_bytes(region_codes(packed.numel() // bits * 8, size), bits)
    return torch.nn.functional.pad(packed, (0, each * size - packed.numel())).view(size, each)


def _planes(packed: Tensor, bits: int) -> list[tuple[int, int, Tensor]]:
    """Return the lowest bit, the width and the bytes of each plane."""
    planes, shift, place, groups = [], 0, 0, packed.numel() // bits
    for width in (8, 8, 4, 2, 1):
        if bits - shift >= width:
            planes.append((shift, width, packed[place : place + groups * width]))
            shift, place = shift + width, place + groups * width
    return planes


@functools.cache
def _every_byte(value: int) -> int:
    """Return a 64-bit word with this byte eight times, as a signed number."""
    word = value * 0x0101010101010101
    return word - (1 << 64) if word >> 63 else word


@functools.cache
def _gathering(width: int) -> int:
    """Return the factor that moves the codes of a word, a byte each, side by side into its highest byte.

    Code i is moved up from bit 8i by (8 - width) · (last - i) bits, its byte's distance to the highest left out. What
    else the product has overlaps nowhere, so nothing is carried.
    """
    last = 8 // width - 1
    return sum(1 << (8 * last - (8 - width) * i) for i in range(last + 1))


def _codes_of_bytes(width: int, like: Tensor) -> Tensor:
    """Return the codes of 1, 2 or 4 bits that each byte holds, uint8 (256, 8 / width)."""

    def make() -> Tensor:
        places, shifts = (torch.arange(*each, device=like.device) for each in ((256,), (0, 8, width)))
        return (places.unsqueeze(1) >> shifts & (1 << width) - 1).to(torch.uint8)

    return kept((_codes_of_bytes, width), like, make)
