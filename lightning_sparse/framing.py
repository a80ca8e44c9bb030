"""Several tensors in one message, with a checksum.

    message = frame(parts)
    intact(message)                  # True unless a word was changed, moved or lost
    unframe(message, like=parts)     # the parts again, as views

Parts are aligned to 8 bytes, to be read where they lie. The last 8 bytes make the sum of all 4-byte words, each times a
weight of its position, a constant.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels.checks import add_weighted_
from lightning_sparse.kernels.launch import to_device, uses_triton

CHECKSUM_BYTES = 8
"""At the end of each message."""
INTACT = 0x5EED5EED5EED5EED
"""The weighted sum of an undamaged message's words: not 0, which is the sum of a message of zeros."""
BLOCK = 1024
"""Words whose weights are multiplied with a common weight of their block, so that few weights have to be made."""


def frame(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, as bytes, each aligned to 8, with a checksum behind.

    Parts with several rows become as many messages, as rows.
    """
    constants = (_kept_constants if type(parts[0]) is Tensor else _constants)(parts[0].device)
    blank, end = constants.expand(*parts[0].shape[:-1], -1).split(CHECKSUM_BYTES, -1)
    message = torch.cat([*_pieces(parts, blank), end], -1)
    _add_weighted_(message.view(torch.int64)[..., -1], message.view(torch.int32)[..., :-2], -1)
    return message


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


def unframe(messages: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of `frame` or `join`, as views, given some with rows of the same lengths and dtypes."""
    parts, start = [], 0
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
    count, device = words.shape[-1], words.device
    blocks = count // BLOCK
    # Weights are kept, but not tensors of another kind, such as torch's fake ones, which belong to their own mode.
    weights = _kept_weights if type(words) is Tensor else _weights
    within, of_block = weights(BLOCK, 0, device), weights(blocks + 1, 1 << 40, device)
    if uses_triton(words):
        add_weighted_(out, words, within, of_block, sign)
        return
    full = words[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)) if blocks else words[..., :0].unsqueeze(-2)
    rest = words[..., blocks * BLOCK :]
    sums = [(rest * within[: rest.shape[-1]]).sum(-1) * of_block[-1]]
    if blocks:
        sums.append(((full * within).sum(-1) * of_block[:-1]).sum(-1))
    out.add_(sum(sums[1:], sums[0]), alpha=sign)


def _weights(count: int, start: int, device: torch.device) -> Tensor:
    """Return hashes of the positions from `start` on, odd int64: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = torch.arange(start + 1, start + count + 1, device=device) * -0x61C8864680B583EB  # the golden ratio's 2⁶⁴ part
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1


_kept_weights = functools.lru_cache(maxsize=64)(_weights)


def _constants(device: torch.device) -> Tensor:
    """Return eight zeros to align with, and a checksum of no words, as bytes."""
    return to_device(torch.tensor([0, INTACT]), device).view(torch.uint8)


_kept_constants = functools.cache(_constants)


def _pieces(parts: Sequence[Tensor], blank: Tensor) -> list[Tensor]:
    pieces = []
    for part in parts:
        pieces += [part.contiguous().view(torch.uint8), blank[..., : _aligned(part) - _row_bytes(part)]]
    return pieces


def _row_bytes(part: Tensor) -> int:
    return part.shape[-1] * part.element_size()


def _aligned(part: Tensor) -> int:
    return (_row_bytes(part) + 7) // 8 * 8
