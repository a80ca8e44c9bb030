"""Encodes entries as a count, values and indices, whose sizes follow from the segment's length and the capacity.

    payload, rounded = encoding.encode(entries, numel, capacity)   # rounded: the same entries with decoded values
    encoding.decode(payload, numel, capacity)                      # rounded, padded to the capacity

Indices are exact in every format. The rounding error of a value format stays in the residual, because the update is
the rounded one.

"compact" indices are Elias-Fano coded (Elias 1974; Fano 1971). The lower w bits of each index are stored unchanged,
with w = 0, 8 or 16. The differences of the upper bits are stored in unary, as one bit array. With the best w, each of k
indices below d takes about w + 1 + d / (2ʷ k) bits: 12.9 bits at a density of 0.001.

"int8" and "int4" values are even steps of a scale, as in `Blocks`. Each 64 entries, in the order of the indices, share
a scale. Selected entries have similar magnitudes, so their error is smaller. In 4 bits, the largest thousandth of
Gaussian values has a relative error of 0.055; all values, in blocks of 64, have 0.11. For Student's t with 5 degrees of
freedom the errors are 0.09 and 0.15.

"int2" values are a sign and one of two magnitudes: 2.5 bits each. The two magnitudes are the means of the larger and of
the smaller magnitudes among 128 entries. An entry is larger if it exceeds the mean magnitude. If there are zeros, they
stay zero, and all other entries count as larger. Ten entries or fewer are sent in fp32, which takes no more bytes.
SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) uses such a codebook of bin means for each tensor. Here each group of
128 entries has one, because a segment may hold layers of very different scale.
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
"""Number of entries that share a scale of 2 bytes."""


@dataclass(frozen=True)
class Encoding:
    """The formats of indices and values.

    Attributes:
        index_format: "compact" or "int32".
        value_format: "float32"; "bfloat16"; "int8" or "int4", with a scale for each 64 entries; or "int2", with two
            fp32 magnitudes for each 128 entries.
    """

    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def encode(self, entries: Entries, numel: int, capacity: int) -> tuple[Payload, Entries]:
        """Return entries, (..., n) with n at most `capacity`, as a payload, and the entries with decoded values.

        Each row of the entries becomes one payload: a row of each part.

        Raises:
            ValueError: there are more entries than `capacity`; Triton kernels would write outside the payload.
        """
        if (each := entries.indices.shape[-1]) > capacity:
            raise ValueError(
                f"{each} entries of {numel} elements are to be sent, but the capacity is {capacity}: override "
                f"`capacity` in the compressor, or choose fewer."
            )
        return _encode(*entries, numel, capacity, self)

    def decode(self, payload: Payload, numel: int, capacity: int) -> Entries:
        """Return the entries of one payload or of several, as rows; each row is padded to `capacity`.

        Raises:
            ValueError: `encode` never returns such a payload. Triton kernels do not check, as the host would wait.
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
        count: number of indices in each row, int32, (..., 1).

    Raises:
        ValueError: `encode_indices` never returns such bytes. Triton kernels do not check, as the host would wait.
    """
    width = _lower_bits(numel, capacity, index_format)
    check_counts(count, capacity)
    if width is not None:
        return unpack_bits(parts[0], parts[1:], count, numel, capacity, width)
    return check_indices(
        torch.where(torch.arange(capacity, device=count.device) < count, parts[0], numel), numel, count
    )


def format_of(capacity: int, value_format: ValueFormat) -> ValueFormat:
    """Return the format in which `capacity` values are sent: fp32 instead of "int2" if "int2" takes no fewer bytes."""
    few = value_format == "int2" and 0 < 4 * capacity <= sum(
        size * dtype.itemsize for size, dtype in _two_bits(capacity)
    )
    return "float32" if few else value_format


def value_parts(capacity: int, value_format: ValueFormat) -> int:
    """Return the number of tensors that `encode_values` returns."""
    value_format = format_of(capacity, value_format)
    return 2 if value_format in BITS or value_format == "int2" else 1


def value_bytes(capacity: int, value_format: ValueFormat) -> int:
    """Return the size in bytes of the tensors that `encode_values` returns."""
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
    """Return the number of lower bits of an index that are stored unchanged; None if int32 takes no more bytes."""
    if index_format == "int32":
        return None
    sizes = {width: upper_bytes(numel, capacity, width) + width // 8 * capacity for width in (0, *LOWER)}
    best = min(sizes, key=lambda width: sizes[width])
    return best if sizes[best] < 4 * capacity else None


def _fill(x: Tensor, size: int) -> Tensor:
    """Return `x` padded at the end with zeros to the length `size`."""
    if x.shape[-1] == size:
        return x
    out = torch.zeros(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    out[..., : x.shape[-1]] = x
    return out
