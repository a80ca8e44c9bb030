"""Several tensors in one message, with a header and a checksum.

    message = seal(parts, fingerprint, status)
    intact(words_on_host(message))               # True unless a word was changed, moved or lost
    unframe(message, parts, HEADER_BYTES)        # the parts again, as views

Parts are aligned to 8 bytes, to be read where they lie. The last 8 bytes make the sum of all 4-byte words, each times a
weight of its position, a constant.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.kernels.checks import add_weighted_, weigh, write_header_
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kept, to_device
from lightning_sparse.kernels.messages import CHECKSUM_BYTES, HEADER_BYTES, Parts, aligned

INTACT = 0x5EED5EED5EED5EED
"""The weighted sum of an undamaged message's words: not 0, which is the sum of a message of zeros."""
BLOCK = 1024
"""Words whose weights are multiplied with a common weight of their block, so that few weights have to be made."""
BLOCKS_FROM = 1 << 40
"""Position from which on the weights of blocks are hashed."""
IN_CACHE = 64
"""Blocks of each message that are worked on at a time on the CPU."""


def seal(parts: Sequence[Tensor], fingerprint: int | Tensor, status: Tensor) -> Tensor:
    """Return a header, (fingerprint, status), and tensors one after the other, as bytes, with a checksum behind.

    Parts with several rows become as many messages, as rows. `Parts` are used up.
    """
    if isinstance(parts, Parts) and parts.messages is not None:
        messages, start = parts.messages, INTACT
        parts.messages = None
    else:
        start = 0  # the checksum's start is in what is copied
        constants = kept((seal,), status, lambda: to_device(torch.tensor([0, 0, INTACT], device="cpu"), status.device))
        lead = parts[0].shape[:-1] if parts else ()
        header, end = constants.view(torch.uint8).expand(*lead, -1).split([HEADER_BYTES, CHECKSUM_BYTES], -1)
        messages = torch.cat([header, *_pieces(parts, header[..., :CHECKSUM_BYTES]), end], -1)
    _write_header_(messages, fingerprint, status, start)
    return messages


@operation
def _write_header_(messages: Tensor, fingerprint: int | Tensor, status: Tensor, start: int) -> None:
    """Write header and checksum of messages; by Triton `start` is what the checksum lacks of `INTACT` as it is."""
    words = words_on_host(messages)
    words[:, 0], words[:, 1] = int(fingerprint), int(status)
    words[:, -1] = INTACT - _weighted_sums(words.view(np.int32)[:, :-2])
    if messages.is_cuda:
        messages.copy_(torch.from_numpy(words.view(np.uint8)).view(messages.shape))


@_write_header_.by("triton")
def _write_header_by_triton_(messages: Tensor, fingerprint: int | Tensor, status: Tensor, start: int) -> None:
    write_header_(messages, fingerprint, status, start, *_weights_of(messages.shape[-1] // 4 - 2, messages))


def partial_sums(messages: Tensor) -> Tensor:
    """Return sums of weighted words, without the checksum, of each of some messages, as rows; by Triton."""
    words = messages.view(torch.int32)[..., :-2]
    return weigh(words, *_weights_of(words.shape[-1], words))


def join(parts: Sequence[Tensor], nbytes: int) -> Tensor:
    """Return tensors (1-D) one after the other, as bytes, each aligned to 8, with zeros behind; see `unframe`."""
    return join_rows([parts], nbytes, parts[0].device)[0]


def join_rows(rows: Sequence[Sequence[Tensor]], nbytes: int, device: torch.device) -> Tensor:
    """Return several lists of tensors, each as by `join`, as rows."""
    blank = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pieces = [piece for row in rows for piece in (*_pieces(row, blank), blank[: nbytes - joined_bytes(row)])]
    return torch.cat(pieces).view(len(rows), nbytes)


def joined_bytes(parts: Sequence[Tensor]) -> int:
    """Return how many bytes tensors take one after the other, each aligned to 8."""
    return sum(map(_aligned, parts))


def intact(words: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return of each message, a row of `words_on_host`, whether nothing has happened to it."""
    whole: NDArray[np.bool_] = _weighted_sums(words.view(np.int32)[:, :-2]) + words[:, -1] == INTACT
    return whole


def words_on_host(messages: Tensor) -> NDArray[np.int64]:
    """Return the 8-byte words of messages, as rows; on the CPU a view."""
    return messages.view(-1, messages.shape[-1]).cpu().numpy().view(np.int64)


def unframe(messages: Tensor, like: Sequence[Tensor], start: int = 0) -> tuple[Tensor, ...]:
    """Return the tensors of `seal` or `join`, as views, given some with rows of the same lengths and dtypes.

    Those of `seal` start at `HEADER_BYTES`.
    """
    parts = []
    for part in like:
        parts.append(messages[..., start : start + _row_bytes(part)].view(part.dtype))
        start += _aligned(part)
    return tuple(parts)


@operation
def weighted_sum(words: Tensor) -> Tensor:
    """Return Σ wᵢ·words[..., i] modulo 2⁶⁴, with odd 64-bit weights wᵢ.

    A change of one word changes the sum, because an odd weight has an inverse. So do two words x and y that change
    places, unless 2⁶⁴ divides (x - y)(wᵢ - wⱼ): words have 32 bits, so 2³² has to divide a difference of weights, which
    are hashes of the positions. (Of 64-bit words, two that differ in the highest bit alone could always be swapped.)
    """
    sums = _weighted_sums(words.reshape(words.shape[:-1].numel(), words.shape[-1]).cpu().numpy())
    return torch.from_numpy(sums).view(words.shape[:-1]).to(words.device)


@weighted_sum.by("triton")
def _weighted_sum_by_triton(words: Tensor) -> Tensor:
    total = torch.zeros(words.shape[:-1], dtype=torch.int64, device=words.device)
    add_weighted_(total, words, *_weights_of(words.shape[-1], words))
    return total


def _weighted_sums(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return what `weighted_sum` does, of rows on the host."""
    # numpy multiplies integer matrices several times as fast as torch's products and sums; both wrap around.
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
    """Return weights of the positions within a block, and of so many words' blocks."""
    blocks, device = count // BLOCK, like.device
    within = kept((_weights, BLOCK), like, lambda: _weights(BLOCK, 0, device))
    return within, kept((_weights, blocks, "blocks"), like, lambda: _weights(blocks + 1, BLOCKS_FROM, device))


@functools.lru_cache(maxsize=4096)
def _weights_on_host(count: int, start: int) -> NDArray[np.int64]:
    return _weights(count, start, torch.device("cpu")).numpy()  # type: ignore[no-any-return]


def _weights(count: int, start: int, device: torch.device) -> Tensor:
    """Return hashes of the positions from `start` on, odd int64: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = torch.arange(start + 1, start + count + 1, device=device) * -0x61C8864680B583EB  # the golden ratio's 2⁶⁴ part
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1


def _pieces(parts: Sequence[Tensor], blank: Tensor) -> list[Tensor]:
    pieces = []
    for part in parts:
        if part.stride(-1) != 1:  # also of one element, which torch calls contiguous, but does not view as bytes
            part = part.clone(memory_format=torch.contiguous_format)
        pieces.append(part.contiguous().view(torch.uint8))
        if padding := -pieces[-1].shape[-1] % 8:
            pieces.append(blank[..., :padding])
    return pieces


def _row_bytes(part: Tensor) -> int:
    return part.shape[-1] * part.element_size()


def _aligned(part: Tensor) -> int:
    return aligned(_row_bytes(part))
