"""Several tensors in one message, with a checksum.

    message = frame(parts)
    intact(message)                  # True unless a word was changed, moved or lost
    unframe(message, like=parts)     # the parts again, as views

Parts are aligned to 8 bytes, to be read where they lie. The last 8 bytes make the sum of all 4-byte words, each times a
weight of its position, a constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.kernels.checks import add_weighted_, weigh, write_header_
from lightning_sparse.kernels.launch import kept, to_device, uses_triton
from lightning_sparse.kernels.messages import CHECKSUM_BYTES, HEADER_BYTES, Parts, aligned

INTACT = 0x5EED5EED5EED5EED
"""The weighted sum of an undamaged message's words: not 0, which is the sum of a message of zeros."""
BLOCK = 1024
"""Words whose weights are multiplied with a common weight of their block, so that few weights have to be made."""
IN_CACHE = 64
"""Blocks of each message that are worked on at a time on the CPU."""


def frame(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, as bytes, each aligned to 8, with a checksum behind.

    Parts with several rows become as many messages, as rows.
    """
    like = parts[0]
    constants = kept((frame,), like, lambda: to_device(torch.tensor([0, INTACT]), like.device)).view(torch.uint8)
    blank, end = constants.expand(*parts[0].shape[:-1], -1).split(CHECKSUM_BYTES, -1)
    message = torch.cat([*_pieces(parts, blank), end], -1)
    _add_weighted_(message.view(torch.int64)[..., -1], message.view(torch.int32)[..., :-2], -1)
    return message


def seal(parts: Sequence[Tensor], fingerprint: int | Tensor, status: Tensor) -> Tensor:
    """Return what `frame` makes of a header, (fingerprint, status), and parts; by Triton. `Parts` are used up."""
    if isinstance(parts, Parts) and parts.messages is not None:
        messages, start = parts.messages, INTACT
        parts.messages = None
    else:
        start = 0  # the checksum's start is in what is copied
        constants = kept((seal,), status, lambda: to_device(torch.tensor([0, 0, INTACT]), status.device))
        lead = parts[0].shape[:-1] if parts else ()
        header, end = constants.view(torch.uint8).expand(*lead, -1).split([HEADER_BYTES, CHECKSUM_BYTES], -1)
        messages = torch.cat([header, *_pieces(parts, header[..., :CHECKSUM_BYTES]), end], -1)
    write_header_(messages, fingerprint, status, start, *_weights_of(messages.shape[-1] // 4 - 2, messages))
    return messages


def partial_sums(messages: Tensor) -> Tensor:
    """Return sums of weighted words, without the checksum, of each of some messages, as rows; by Triton."""
    words = messages.view(torch.int32)[..., :-2]
    return weigh(words, *_weights_of(words.shape[-1], words))


def join(parts: Sequence[Tensor], nbytes: int) -> Tensor:
    """Return tensors (1-D) one after the other, as bytes, each aligned to 8, with zeros behind; see `unframe`."""
    blank = torch.zeros(nbytes, dtype=torch.uint8, device=parts[0].device)
    return torch.cat([*_pieces(parts, blank), blank[: nbytes - joined_bytes(parts)]])


def joined_bytes(parts: Sequence[Tensor]) -> int:
    """Return how many bytes tensors take one after the other, each aligned to 8."""
    return sum(map(_aligned, parts))


def intact(messages: Tensor) -> Tensor:
    """Return whether nothing has happened to a message of `frame`, a bool; for several, as rows, one each."""
    return weighted_sum(messages.view(torch.int32)[..., :-2]) + messages.view(torch.int64)[..., -1] == INTACT


def unframe(messages: Tensor, like: Sequence[Tensor], start: int = 0) -> tuple[Tensor, ...]:
    """Return the tensors of `frame` or `join`, as views, given some with rows of the same lengths and dtypes.

    Those of `seal` start at `HEADER_BYTES`.
    """
    parts = []
    for part in like:
        parts.append(messages[..., start : start + _row_bytes(part)].view(part.dtype))
        start += _aligned(part)
    return tuple(parts)


def weighted_sum(words: Tensor) -> Tensor:
    """Return Σ wᵢ·words[..., i] modulo 2⁶⁴, with odd 64-bit weights wᵢ.

    A change of one word changes the sum, because an odd weight has an inverse. So do two words x and y that change
    places, unless 2⁶⁴ divides (x - y)(wᵢ - wⱼ): words have 32 bits, so 2³² has to divide a difference of weights, which
    are hashes of the positions. (Of 64-bit words, two that differ in the highest bit alone could always be swapped.)
    """
    sums = torch.zeros(words.shape[:-1], dtype=torch.int64, device=words.device)
    _add_weighted_(sums, words, 1)
    return sums


def _add_weighted_(out: Tensor, words: Tensor, sign: int) -> None:
    """Add `sign` times the weighted sum of each row of words to `out`, in place."""
    count = words.shape[-1]
    blocks = count // BLOCK
    within, of_block = _weights_of(count, words)
    if uses_triton(words):
        add_weighted_(out, words, within, of_block, sign)
        return
    # numpy multiplies integer matrices several times as fast as torch's products and sums; both wrap around.
    rows, weights, of_blocks = words.reshape(out.numel(), count).numpy(), within.numpy(), of_block.numpy()
    rest = rows[:, blocks * BLOCK :].astype(np.int64)
    sums = rest @ weights[: rest.shape[1]] * of_blocks[-1]
    for first in range(0, blocks, IN_CACHE):
        last = min(first + IN_CACHE, blocks)
        full = rows[:, first * BLOCK : last * BLOCK].reshape(-1, last - first, BLOCK).astype(np.int64)
        sums += full @ weights @ of_blocks[first:last]
    out.add_(torch.from_numpy(sums).view(out.shape), alpha=sign)


def _weights_of(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of the positions within a block, and of so many words' blocks."""
    blocks, device = count // BLOCK, like.device
    within = kept((_weights, BLOCK), like, lambda: _weights(BLOCK, 0, device))
    return within, kept((_weights, blocks, "blocks"), like, lambda: _weights(blocks + 1, 1 << 40, device))


def _weights(count: int, start: int, device: torch.device) -> Tensor:
    """Return hashes of the positions from `start` on, odd int64: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = torch.arange(start + 1, start + count + 1, device=device) * -0x61C8864680B583EB  # the golden ratio's 2⁶⁴ part
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1


def _pieces(parts: Sequence[Tensor], blank: Tensor) -> list[Tensor]:
    pieces = []
    for part in parts:
        pieces += [part.contiguous().view(torch.uint8), blank[..., : _aligned(part) - _row_bytes(part)]]
    return pieces


def _row_bytes(part: Tensor) -> int:
    return part.shape[-1] * part.element_size()


def _aligned(part: Tensor) -> int:
    return aligned(_row_bytes(part))
