"""Codes of a few bits each, packed without gaps: 1 bit is 1 bit.

    packed = pack_codes(codes, 5)          # 5 bytes for every 8 codes below 2⁵
    unpack_codes(packed, 5, len(codes))    # the codes again

Codes of 1, 2, 4 or 8 bits fill bytes: the first code of a byte is in its lowest bits. Codes of other widths are split
into planes of such widths, which are concatenated, the lower bits first. 5 bits are a plane of 4 and a plane of 1.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kernel, launch, tl

TILE = 1024
"""Number of codes that one Triton program processes."""


def code_bytes(numel: int, bits: int) -> int:
    """Return the number of bytes of `numel` codes: `bits` bytes for every 8 codes."""
    return -(-numel // 8) * bits


@operation
def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (1-D, integers from 0 to 2^bits - 1, up to 15 bits) into `code_bytes` bytes, uint8."""
    padded = torch.nn.functional.pad(codes.int(), (0, -codes.numel() % 8))
    planes = [padded[:0]]
    for shift, width in _planes(bits):
        parts = (padded >> shift & (1 << width) - 1).view(-1, 8 // width)
        planes.append((parts << torch.arange(0, 8, width, device=codes.device)).sum(1))
    return torch.cat(planes).to(torch.uint8)


@pack_codes.by("triton")
def _pack_by_triton(codes: Tensor, bits: int) -> Tensor:
    codes, count = codes.contiguous(), codes.numel()
    packed = torch.empty(code_bytes(count, bits), dtype=torch.uint8, device=codes.device)
    if count:
        launch(_pack_codes, -(-count // TILE), codes, packed, count, packed.numel() // bits, BITS=bits, TILE=TILE)
    return packed


@pack_codes.by("native")
def _pack_in_c(codes: Tensor, bits: int) -> Tensor:
    codes = (codes if codes.itemsize == 1 and bits <= 8 else codes.to(torch.int16)).contiguous()
    packed = torch.empty(code_bytes(codes.numel(), bits), dtype=torch.uint8, device=codes.device)
    native.run("pack_codes", codes, packed, codes.numel(), packed.numel() // bits, bits, codes.itemsize)
    return packed


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the `numel` codes that `pack_codes` packed, 1-D: uint8, or int16 if they have more than 8 bits."""
    native.check_part("codes", packed, code_bytes(numel, bits), torch.uint8)
    return _unpack(packed.contiguous(), bits, numel)  # a column of gathered messages is not contiguous


@operation
def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    codes = torch.zeros(-(-numel // 8) * 8, dtype=torch.int16 if bits > 8 else torch.uint8, device=packed.device)
    start, groups = 0, packed.numel() // bits
    for shift, width in _planes(bits):
        plane = packed[start : start + codes.numel() * width // 8].unsqueeze(1)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        codes |= (plane >> shifts & (1 << width) - 1).view(-1).to(codes.dtype) << shift
        start += groups * width
    return codes[:numel]


@_unpack.by("triton")
def _unpack_by_triton(packed: Tensor, bits: int, numel: int) -> Tensor:
    codes = _room_for(packed, bits, numel)
    if numel:
        groups = packed.numel() // bits
        launch(_unpack_codes, -(-numel // TILE), packed, codes, numel, groups, BITS=bits, TILE=TILE)
    return codes[:numel]


@_unpack.by("native")
def _unpack_in_c(packed: Tensor, bits: int, numel: int) -> Tensor:
    codes = _room_for(packed, bits, numel)
    native.run("unpack_codes", packed, codes, numel, packed.numel() // bits, bits)
    return codes[:numel]


def _room_for(packed: Tensor, bits: int, numel: int) -> Tensor:
    dtype = torch.int16 if bits > 8 else torch.uint8
    return torch.empty(-(-numel // 8) * 8, dtype=dtype, device=packed.device)


def _planes(bits: int) -> list[tuple[int, int]]:
    """Return the lowest bit and the width of each plane."""
    planes, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits - shift >= width:
            planes.append((shift, width))
            shift += width
    return planes


@kernel("count", "groups")
def _pack_codes(codes, packed, count, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write the bytes of all bit planes of `count` codes, in `groups` groups of 8."""
    tile = tl.program_id(0).to(tl.int64)
    for step in tl.static_range(4):
        # Planes of 8, 4, 2 and 1 bits, if BITS has such a plane. Planes of more bits come first.
        if BITS >> (3 - step) & 1:
            places = tile * (TILE >> step) + tl.arange(0, TILE >> step)  # bytes of the plane, with 1 << step codes each
            byte = tl.zeros([TILE >> step], tl.int32)
            for number in tl.static_range(1 << step):
                index = (places << step) + number
                code = tl.load(codes + index, mask=index < count, other=0).to(tl.int32)
                code = code >> (BITS >> (4 - step) << (4 - step)) & ((1 << (8 >> step)) - 1)
                byte |= code << (number * (8 >> step))
            start = (BITS >> (4 - step) << (4 - step)) * groups.to(tl.int64)
            tl.store(packed + start + places, byte.to(tl.uint8), mask=places >> (3 - step) < groups)


@kernel("count", "groups")
def _unpack_codes(packed, codes, count, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write the first `count` codes from bit planes of `groups` groups of 8 codes."""
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
    """Return the number of codes of each of `size` regions: the same for all, a multiple of 8."""
    return -(-numel // (8 * size)) * 8


def in_regions(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return packed codes of 1, 2, 4 or 8 bits (1-D) as rows, one for each region; zeros pad the last rows.

    Codes of these widths have one plane, so a row equals the packed codes of its region.
    """
    each = code_bytes(region_codes(packed.numel() // bits * 8, size), bits)
    return torch.nn.functional.pad(packed, (0, each * size - packed.numel())).view(size, each)
