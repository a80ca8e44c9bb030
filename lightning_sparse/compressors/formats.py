"""How entries travel: indices and values as bytes, of a length that follows from the segment's length and the count.

Indices are exact in every format. What a value format rounds away stays in the residual, because a payload stands for
what comes out of it.

"compact" indices are Elias and Fano's (Elias 1974; Fano 1971): the lower bits as they are, here in whole bytes, and of
the upper bits the differences, in unary, as one bit array. Where d elements hold k entries that takes about
w + 1 + d / (2ʷ k) bits an entry, with w = 0, 8 or 16, whichever is least: 12.9 bits at a density of 0.001.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.pack import LOWER, pack, unpack, upper_bytes

IndexFormat = Literal["compact", "int32"]
ValueFormat = Literal["float32", "bfloat16", "int8"]


def encode_indices(indices: Tensor, numel: int, capacity: int, form: IndexFormat) -> tuple[Tensor, ...]:
    """Return int64 indices, (..., n), ascending, below `numel`, and at most `capacity` of them, as one or two tensors.

    They may be padded, see `kernels/pack.py`.
    """
    width = _width(numel, capacity, form)
    return (_padded(indices.int(), capacity),) if width is None else pack(indices, numel, capacity, width)


def decode_indices(parts: tuple[Tensor, ...], count: Tensor, numel: int, capacity: int, form: IndexFormat) -> Tensor:
    """Return the int64 indices of `encode_indices`, (..., capacity), padded.

    Args:
        count: how many they are, int32, (..., 1).

    Raises:
        ValueError: no `encode_indices` makes such bytes. Not by Triton: the host does not look.
    """
    width = _width(numel, capacity, form)
    if not uses_triton(count) and bool(((count < 0) | (count > capacity)).any()):
        said = next(said for said in count.view(-1).tolist() if not 0 <= said <= capacity)
        raise ValueError(f"A payload for at most {capacity} entries says it holds {said}: it is corrupt.")
    if width is None:
        indices = torch.where(torch.arange(capacity, device=count.device) < count, parts[0], numel)
    else:
        indices = unpack(parts[0], parts[1:], count, numel, capacity, width)
    indices = received_indices(indices, numel)
    if not uses_triton(count):
        found = (indices < numel).sum(-1, keepdim=True)
        if not torch.equal(found, count.long()):
            raise ValueError(f"{int(count.sum())} entries came with {int(found.sum())} indices: a payload is corrupt.")
    return indices


def received_indices(indices: Tensor, numel: int) -> Tensor:
    """Return indices that were received, (..., n), as int64; by Triton such as do no harm, however damaged.

    Raises:
        ValueError: they do not ascend, without repetition, within `numel` elements; `numel` at the end stands for no
            index. Not by Triton: the host does not look.
    """
    indices = indices.long()
    if uses_triton(indices):
        return indices.clamp_(min=0)  # what is not below `numel` is left out everywhere
    if not indices.numel():
        return indices
    least, most = map(int, indices.aminmax())
    if least < 0 or most > numel:
        raise ValueError(f"A payload holds indices {least} to {most} of {numel} elements: it is corrupt.")
    later = indices[..., 1:]
    if not bool(((later > indices[..., :-1]) | (later == numel)).all()):
        raise ValueError(f"A payload holds indices of {numel} elements that do not ascend: it is corrupt.")
    return indices


def index_bytes(numel: int, capacity: int, form: IndexFormat) -> int:
    """Return how many bytes the indices take."""
    width = _width(numel, capacity, form)
    return 4 * capacity if width is None else upper_bytes(numel, capacity, width) + width // 8 * capacity


def encode_values(values: Tensor, capacity: int, form: ValueFormat) -> tuple[Tensor, ...]:
    """Return fp32 values, (..., n), at most `capacity` of them, as one or two tensors. What is not finite stays so."""
    if form == "float32":
        return (_padded(values, capacity),)
    if form == "bfloat16":
        rounded = values.bfloat16()
        # Rounding up must not make an infinity.
        largest = torch.finfo(torch.bfloat16).max
        return (_padded(torch.where(values.isfinite(), rounded.clamp(-largest, largest), rounded), capacity),)
    scale = values.abs().amax(-1, keepdim=True) / 127 if values.numel() else values.new_zeros(*values.shape[:-1], 1)
    codes = torch.where(scale > 0, values / scale, 0).round()
    # In a payload with something that is not finite the scale shows it.
    return scale, _padded(codes.nan_to_num(0, 0, 0).to(torch.int8), capacity)


def decode_values(parts: tuple[Tensor, ...], form: ValueFormat) -> Tensor:
    """Return the fp32 values of `encode_values`, (..., capacity)."""
    if form == "int8":
        largest = torch.finfo(torch.float32).max  # 127 times a rounded 127th of it may lie above
        return parts[1].float().mul_(parts[0]).clamp_(-largest, largest)
    return parts[0].float()


def value_bytes(capacity: int, form: ValueFormat) -> int:
    """Return how many bytes the values take."""
    return {"float32": 4 * capacity, "bfloat16": 2 * capacity, "int8": 4 + capacity}[form]


def _width(numel: int, capacity: int, form: IndexFormat) -> int | None:
    """Return how many lower bits are kept as they are; None where four bytes an index are no more."""
    if form == "int32":
        return None
    sizes = {width: upper_bytes(numel, capacity, width) + width // 8 * capacity for width in (0, *LOWER)}
    best = min(sizes, key=lambda width: sizes[width])
    return best if sizes[best] < 4 * capacity else None


def _padded(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] == size:
        return x
    out = torch.zeros(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    out[..., : x.shape[-1]] = x
    return out
