"""Several tensors in one message, with a checksum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHECKSUM_BYTES = 8
"""At the end of each message that is `packed`."""


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, as bytes. Each starts at a multiple of 8, to be read where it lies.

    At the end there are 8 bytes that make all words, of 8 bytes each, add up to zero: TCP's own checksum has 16 bits,
    and ranks that read different values would drift apart. Parts with several rows make as many messages, as rows.
    """
    blank = torch.zeros(*parts[0].shape[:-1], CHECKSUM_BYTES, dtype=torch.uint8, device=parts[0].device)
    pieces = []
    for part in parts:
        pieces += [part.contiguous().view(torch.uint8), blank[..., : _room(part) - _nbytes(part)]]
    wire = torch.cat([*pieces, blank], -1)
    torch.neg(checksum(wire), out=wire[..., -CHECKSUM_BYTES:].view(torch.int64)[..., 0])
    return wire


def checksum(message: Tensor) -> Tensor:
    """Return what is zero for a `packed` message that nothing has happened to; for several, as rows, one each."""
    return message.view(torch.int64).sum(-1)


def unpacked(wire: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of `packed`, as views, given some of the same lengths and dtypes."""
    parts, start = [], 0
    for part in like:
        parts.append(wire[..., start : start + _nbytes(part)].view(part.dtype))
        start += _room(part)
    return tuple(parts)


def _nbytes(part: Tensor) -> int:
    """Return how many bytes a row takes."""
    return part.shape[-1] * part.element_size()


def _room(part: Tensor) -> int:
    return (_nbytes(part) + 7) // 8 * 8
