"""How entries travel: a count, values and indices, of sizes that follow from the segment's length and the capacity.

    payload, rounded = encoding.encode(entries, numel, capacity)   # rounded: the same entries with decoded values
    encoding.decode(payload, numel, capacity)                      # rounded, padded to the capacity

Indices are exact in every format. The rounding error of a value format stays in the residual, because the update is
the rounded one.

"compact" indices are Elias-Fano coded (Elias 1974; Fano 1971): the lower w bits of each as they are, w = 0, 8 or 16,
and the differences of the upper bits in unary, as one bit array. k indices below d take about w + 1 + d / (2ʷ k) bits
each, for the best w: 12.9 bits at a density of 0.001.

"int8" and "int4" values are even steps of a scale, as in `Blocks`, one for each 64 entries in the order of the indices.
What is selected is alike in magnitude: of the largest thousandth of a Gaussian, 4 bits have a relative error of 0.055,
of all of it, in blocks of as many, one of 0.11; of Student's t with 5 degrees of freedom 0.09 and 0.15.

"int2" values are a sign and one of two magnitudes, which are the means of the larger and of the smaller magnitudes of
128 entries: 2.5 bits each. Those above the mean magnitude are the larger ones; if there are zeros, which stay zero, all
others. Ten entries or fewer travel in fp32, which is no longer. It is a codebook of bin means as SparseLoCo has it
(Sarfi et al. 2025, arXiv 2508.15706), for each 128 entries instead of each tensor, as a segment may have layers of
very different scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Entries, Payload
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.messages import Parts
from lightning_sparse.kernels.pack import (
    LOWER,
    check_counts,
    check_indices,
    pack_bits,
    pack_entries_,
    unpack_bits,
    upper_bytes,
)
from lightning_sparse.kernels.quantize import pack_steps, scale_of, unpack_steps
from lightning_sparse.kernels.two_bits import GROUP, round_to_two_bits, two_bit_values

IndexFormat = Literal["compact", "int32"]
ValueFormat = Literal["float32", "bfloat16", "int8", "int4", "int2"]
BITS = {"int8": 8, "int4": 4}
BLOCK = 64
"""Entries that share a scale, of 2 bytes."""


@dataclass(frozen=True)
class Encoding:
    """A format of the indices and one of the values.

    Attributes:
        index_format: "compact" or "int32".
        value_format: "float32", "bfloat16", "int8" and "int4" with a scale for each 64 entries, or "int2" with two fp32
            magnitudes for each 128 of them.
    """

    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def encode(self, entries: Entries, numel: int, capacity: int) -> tuple[Payload, Entries]:
        """Return entries, (..., n) with n at most `capacity`, as a payload, and the entries with decoded values.

        Several rows become as many payloads, the rows of each part.
        """
        return _encode(*entries, numel, capacity, self)

    def decode(self, payload: Payload, numel: int, capacity: int) -> Entries:
        """Return the entries of one payload or of several, as rows; each row is padded to `capacity`.

        Raises:
            ValueError: no `encode` makes such a payload. Not where Triton works: the host does not look.
        """
        split = 1 + value_parts(capacity, self.value_format)
        indices = decode_indices(payload[split:], payload[0], numel, capacity, self.index_format)
        return Entries(indices, decode_values(payload[1:split], capacity, self.value_format))

    def nbytes(self, numel: int, capacity: int) -> int:
        """Return the size in bytes of a payload, without its count."""
        width = _lower_bits(numel, capacity, self.index_format)
        indices = 4 * capacity if width is None else upper_bytes(numel, capacity, width) + width // 8 * capacity
        return indices + value_bytes(capacity, self.value_format)


@operation
def _encode(indices: Tensor, values: Tensor, numel: int, capacity: int, encoding: Encoding) -> tuple[Payload, Entries]:
    count = (indices < numel).sum(-1, keepdim=True, dtype=torch.int32)
    encoded = encode_values(values, capacity, encoding.value_format)
    payload = (count, *encoded, *encode_indices(indices, numel, capacity, encoding.index_format))
    return payload, Entries(indices, decode_values(encoded, capacity, encoding.value_format)[..., : values.shape[-1]])


def _in_one_launch(indices: Tensor, values: Tensor, numel: int, capacity: int, encoding: Encoding) -> bool:
    packed = _lower_bits(numel, capacity, encoding.index_format) is not None
    return packed and format_of(capacity, encoding.value_format) in ("float32", "int2")


@_encode.by("triton", when=_in_one_launch)
def _encode_by_triton(
    indices: Tensor, values: Tensor, numel: int, capacity: int, encoding: Encoding
) -> tuple[Payload, Entries]:
    width, form = _lower_bits(numel, capacity, encoding.index_format), format_of(capacity, encoding.value_format)
    assert width is not None
    of_values = [(capacity, torch.float32)] if form == "float32" else _two_bits(capacity)
    upper = 1 + len(of_values)
    lengths = [(1, torch.int32), *of_values, (upper_bytes(numel, capacity, width), torch.uint8)]
    lengths += [(capacity, LOWER[width])] if width else []
    parts = Parts.of(indices.shape[:-1], lengths, indices.device)
    out = parts[1] if form == "float32" else None
    pack_entries_(indices, values, parts[0], out, parts.words(upper), parts[upper + 1 :], numel)
    return parts, Entries(indices, values if out is not None else round_to_two_bits(values, *parts[1:3]))


def encode_indices(indices: Tensor, numel: int, capacity: int, index_format: IndexFormat) -> tuple[Tensor, ...]:
    """Return int64 indices, (..., n), ascending and below `numel`, or padded with it, as one or two tensors."""
    width = _lower_bits(numel, capacity, index_format)
    return (_fill(indices.int(), capacity),) if width is None else pack_bits(indices, numel, capacity, width)


def decode_indices(parts: Payload, count: Tensor, numel: int, capacity: int, index_format: IndexFormat) -> Tensor:
    """Return the int64 indices of `encode_indices`, (..., capacity), padded.

    Args:
        count: how many they are, int32, (..., 1).

    Raises:
        ValueError: no `encode_indices` makes such bytes. Not where Triton works: the host does not look.
    """
    width = _lower_bits(numel, capacity, index_format)
    check_counts(count, capacity)
    if width is not None:
        return unpack_bits(parts[0], parts[1:], count, numel, capacity, width)
    return check_indices(
        torch.where(torch.arange(capacity, device=count.device) < count, parts[0], numel), numel, count
    )


def format_of(capacity: int, value_format: ValueFormat) -> ValueFormat:
    """Return in which format so many values travel: fp32 in place of "int2" if they are too few to be shorter in it."""
    few = value_format == "int2" and 0 < 4 * capacity <= sum(
        size * dtype.itemsize for size, dtype in _two_bits(capacity)
    )
    return "float32" if few else value_format


def value_parts(capacity: int, value_format: ValueFormat) -> int:
    """Return how many tensors `encode_values` makes."""
    value_format = format_of(capacity, value_format)
    return 2 if value_format in BITS or value_format == "int2" else 1


def value_bytes(capacity: int, value_format: ValueFormat) -> int:
    """Return the size in bytes of what `encode_values` makes."""
    value_format = format_of(capacity, value_format)
    if bits := BITS.get(value_format):
        return 2 * -(-capacity // BLOCK) + -(-capacity * bits // 8)
    if value_format == "int2":
        return sum(size * dtype.itemsize for size, dtype in _two_bits(capacity))
    return {"float32": 4, "bfloat16": 2}[value_format] * capacity


def encode_values(values: Tensor, capacity: int, value_format: ValueFormat) -> Payload:
    """Return fp32 values, (..., n) with n at most `capacity`, as one or two tensors. Non-finite values stay so."""
    value_format = format_of(capacity, value_format)
    if value_format == "int2":
        parts = tuple(values.new_empty(*values.shape[:-1], size, dtype=dtype) for size, dtype in _two_bits(capacity))
        round_to_two_bits(values, *parts)
        return parts
    if value_format == "float32":
        return (_fill(values, capacity),)
    if value_format == "bfloat16":
        rounded = values.bfloat16()
        # Rounding up must not make an infinity.
        largest = torch.finfo(torch.bfloat16).max
        return (_fill(torch.where(values.isfinite(), rounded.clamp(-largest, largest), rounded), capacity),)
    bits, blocks = BITS[value_format], -(-capacity // BLOCK)
    rows = _fill(values, blocks * BLOCK).unflatten(-1, (blocks, BLOCK))
    scales = scale_of(rows.abs().amax(-1), bits)
    scale = scales.unsqueeze(-1)
    # A non-finite value makes the scale non-finite.
    steps = torch.where(scale > 0, rows / scale, 0).round_().nan_to_num_(0, 0, 0).flatten(-2)
    nbytes = -(-capacity * bits // 8)
    return scales.bfloat16(), pack_steps(steps[..., : nbytes * 8 // bits], bits)


def decode_values(parts: Payload, capacity: int, value_format: ValueFormat) -> Tensor:
    """Return the fp32 values of `encode_values`, (..., capacity)."""
    value_format = format_of(capacity, value_format)
    if value_format == "int2":
        return two_bit_values(parts[0], parts[1], capacity)
    if value_format not in BITS:
        return parts[0].float()
    (scales, codes), bits = parts, BITS[value_format]
    blocks = scales.shape[-1]
    rows = _fill(unpack_steps(codes, bits), blocks * BLOCK).unflatten(-1, (blocks, BLOCK))
    decoded: Tensor = rows.mul_(scales.unsqueeze(-1)).flatten(-2)
    return decoded[..., :capacity]


def _two_bits(capacity: int) -> list[tuple[int, torch.dtype]]:
    """Return lengths and dtypes of the parts of "int2"."""
    groups = -(-capacity // GROUP)
    return [(2 * groups, torch.float32), (groups * GROUP // 4, torch.uint8)]


def _lower_bits(numel: int, capacity: int, index_format: IndexFormat) -> int | None:
    """Return how many lower bits of an index are stored as they are; None where four bytes an index are no more."""
    if index_format == "int32":
        return None
    sizes = {width: upper_bytes(numel, capacity, width) + width // 8 * capacity for width in (0, *LOWER)}
    best = min(sizes, key=lambda width: sizes[width])
    return best if sizes[best] < 4 * capacity else None


def _fill(x: Tensor, size: int) -> Tensor:
    """Return `x` with zeros behind, as long as `size`."""
    if x.shape[-1] == size:
        return x
    out = torch.zeros(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    out[..., : x.shape[-1]] = x
    return out
