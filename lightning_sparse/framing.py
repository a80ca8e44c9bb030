"""Packs several tensors into one message with a header and a checksum.

    message = seal(parts, fingerprint, status)
    intact(words_on_host(message))               # True unless a word was changed, moved or lost
    unframe(message, parts, HEADER_BYTES)        # the parts, as views of the message

Parts are aligned to 8 bytes, so that they can be read without a copy. The last 8 bytes are the checksum. They make the
weighted sum of all 4-byte words a constant, with a weight for each position.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels.checks import weigh, write_header_
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kept, to_device
from lightning_sparse.kernels.messages import CHECKSUM_BYTES, HEADER_BYTES, Parts, aligned

INTACT = 0x5EED5EED5EED5EED
"""Weighted sum of an undamaged message's words. It is not 0, because a message of zeros has that sum."""
BLOCK = 1024
"""Words per block. A word's weight is its weight within the block times the block's weight, which needs two short
tables only."""
BLOCKS_FROM = 1 << 40
"""First position from which the weights of blocks are hashed."""
IN_CACHE = 64
"""Blocks of each message that the CPU processes at a time."""


def seal(parts: Sequence[Tensor], fingerprint: int | Tensor, status: Tensor) -> Tensor:
    """Return a message as bytes: a header (fingerprint, status), the parts one after the other, and a checksum.

    If parts have several rows, the result has one message per row. `Parts` are consumed.
    """
    if isinstance(parts, Parts) and parts.messages is not None:
        messages, start = parts.messages, INTACT
        parts.messages = None
    else:
        start = 0  # the copied constants contain the start of the checksum
        constants = kept((seal,), status, lambda: to_device(torch.tensor([0, 0, INTACT], device="cpu"), status.device))
        lead = parts[0].shape[:-1] if parts else ()
        header, end = constants.view(torch.uint8).expand(*lead, -1).split([HEADER_BYTES, CHECKSUM_BYTES], -1)
        messages = torch.cat([header, *_pieces(parts, header[..., :CHECKSUM_BYTES]), end], -1)
    _write_header_(messages, fingerprint, status, start)
    return messages


@operation
def _write_header_(messages: Tensor, fingerprint: int | Tensor, status: Tensor, start: int) -> None:
    """Write header and checksum of messages. With Triton, the checksum field plus `start` is `INTACT` at first."""
    words = words_on_host(messages)
    words[:, 0], words[:, 1] = int(fingerprint), int(status)
    words[:, -1] = INTACT - _weighted_sums(words.view(np.int32)[:, :-2])
    if messages.device.type != "cpu":
        messages.copy_(torch.from_numpy(words.view(np.uint8)).view(messages.shape))


@_write_header_.by("triton")
def _write_header_by_triton_(messages: Tensor, fingerprint: int | Tensor, status: Tensor, start: int) -> None:
    write_header_(messages, fingerprint, status, start, *_weights_of(messages.shape[-1] // 4 - 2, messages))


def partial_sums(messages: Tensor) -> Tensor:
    """Return, with Triton, partial sums of each message's weighted words without its checksum, as rows."""
    words = messages.view(torch.int32)[..., :-2]
    return weigh(words, *_weights_of(words.shape[-1], words))


def join_rows(rows: Sequence[Sequence[Tensor]], nbytes: int, device: torch.device) -> Tensor:
    """Join each list of 1-D tensors, aligned to 8 bytes, to a row of `nbytes` bytes with zeros at its end."""
    blank = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pieces = [piece for row in rows for piece in (*_pieces(row, blank), blank[: nbytes - joined_bytes(row)])]
    return torch.cat(pieces).view(len(rows), nbytes)


def joined_bytes(parts: Sequence[Tensor]) -> int:
    """Return the length of joined tensors in bytes, each aligned to 8 bytes."""
    return sum(map(_aligned, parts))


def intact(words: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each message, a row of `words_on_host`, is undamaged."""
    whole: NDArray[np.bool_] = _weighted_sums(words.view(np.int32)[:, :-2]) + words[:, -1] == INTACT
    return whole


def words_on_host(messages: Tensor) -> NDArray[np.int64]:
    """Return the 8-byte words of messages as rows; on the CPU it is a view."""
    return messages.view(-1, messages.shape[-1]).cpu().numpy().view(np.int64)


def unframe(messages: Tensor, like: Sequence[Tensor], start: int = 0) -> tuple[Tensor, ...]:
    """Return the tensors in messages of `seal` or `join_rows`, as views.

    Args:
        like: tensors with the same row lengths and dtypes as the parts.
        start: offset of the first part in bytes; for `seal` it is `HEADER_BYTES`.
    """
    parts = []
    for part in like:
        parts.append(messages[..., start : start + _row_bytes(part)].view(part.dtype))
        start += _aligned(part)
    return tuple(parts)


@operation
def weighted_sum(words: Tensor) -> Tensor:
    """Return Σ wᵢ·words[..., i] modulo 2⁶⁴, with odd 64-bit weights wᵢ.

    A change of one word changes the sum, because an odd weight has an inverse. Swapping two words x and y also changes
    the sum, unless 2⁶⁴ divides (x - y)(wᵢ - wⱼ). Words have 32 bits, so 2³² would have to divide the difference of two
    weights, which are hashes of the positions. (A swap of two 64-bit words that differ only in the highest bit would
    always go unnoticed.)
    """
    sums = _weighted_sums(words.reshape(words.shape[:-1].numel(), words.shape[-1]).cpu().numpy())
    return torch.from_numpy(sums).view(words.shape[:-1]).to(words.device)


@weighted_sum.by("triton")
def _weighted_sum_by_triton(words: Tensor) -> Tensor:
    lead, count = words.shape[:-1], words.shape[-1]
    return weigh(words.reshape(lead.numel(), count), *_weights_of(count, words)).sum(1).view(lead)


def _weighted_sums(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return `weighted_sum` of each row, on the host."""
    # NumPy's integer matrix product is several times faster than torch's products and sums. Both wrap around.
    count = rows.shape[1]
    blocks = count // BLOCK
    weights, of_blocks = _weights_on_host(BLOCK, 0), _weights_on_host(blocks + 1, BLOCKS_FROM)
    rest = rows[:, blocks * BLOCK :].astype(np.int64)
    sums: NDArray[np.int64] = rest @ weights[: rest.shape[1]] * of_blocks[-1]
    for first in range(0, blocks, IN_CACHE):
        last = min(first + IN_CACHE, blocks)
        full = rows[:, first * BLOCK : last * BLOCK].reshape(-1, last - first, BLOCK).astype(np.int64)
        sums += full @ weights @ of_blocks[first:last]
    return sums


def _weights_of(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the positions within a block, and the weights of the blocks of `count` words."""
    blocks, device = count // BLOCK, like.device
    within = kept((_weights, BLOCK), like, lambda: _weights(BLOCK, 0, device))
    return within, kept((_weights, blocks, "blocks"), like, lambda: _weights(blocks + 1, BLOCKS_FROM, device))


@functools.lru_cache(maxsize=4096)
def _weights_on_host(count: int, start: int) -> NDArray[np.int64]:
    return _weights(count, start, torch.device("cpu")).numpy()  # type: ignore[no-any-return]


def _weights(count: int, start: int, device: torch.device) -> Tensor:
    """Return odd int64 hashes of the positions from `start`: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = torch.arange(start + 1, start + count + 1, device=device) * -0x61C8864680B583EB  # the golden ratio's 2⁶⁴ part
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1


def _pieces(parts: Sequence[Tensor], blank: Tensor) -> list[Tensor]:
    pieces = []
    for part in parts:
        if part.stride(-1) != 1:  # torch calls one element contiguous with any stride, but cannot view it as bytes
            part = part.clone(memory_format=torch.contiguous_format)
        pieces.append(part.contiguous().view(torch.uint8))
        if padding := -pieces[-1].shape[-1] % 8:
            pieces.append(blank[..., :padding])
    return pieces


def _row_bytes(part: Tensor) -> int:
    return part.shape[-1] * part.element_size()


def _aligned(part: Tensor) -> int:
    return aligned(_row_bytes(part))
