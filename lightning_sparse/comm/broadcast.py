"""Tensors become rank 0's: all of some, or those that are not already."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_sparse.comm.base import Comm

AT_ONCE = 1 << 28
"""Most bytes of a message with several tensors in it: a copy of them."""


@torch.no_grad()
def broadcast(comm: Comm, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Overwrite tensors with rank 0's, by one message of all dtypes from `device`, where `comm` can send from."""
    longest_first = sorted(tensors, key=lambda x: (-x.element_size(), str(x.dtype)))  # aligned in the message, then
    parts = [_as_bytes(tensor.to(device)) for tensor in longest_first]
    message = torch.cat(parts)
    comm.broadcast(message, 0)  # as bytes: gloo does not know all dtypes
    if comm.rank == 0:
        return
    received = message.split([part.numel() for part in parts])
    views = [part.view(x.dtype).view(x.shape) for x, part in zip(longest_first, received, strict=True)]
    for _, pairs in itertools.groupby(zip(longest_first, views, strict=True), lambda pair: pair[0].dtype):
        own, theirs = zip(*pairs, strict=True)
        torch._foreach_copy_(own, theirs)


@torch.no_grad()
def broadcast_differing(comm: Comm, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Overwrite those tensors with rank 0's that are not equal on all ranks, bit by bit, as their hashes show.

    Most models start from equal weights, by a seed or a file: 100 million of them would take half a minute over
    100 Mbit/s, and their hashes take less than a second. All ranks call it, with tensors of the same shapes and dtypes.
    `comm.sent_bytes` is left as it is: it says what steps send.
    """
    if comm.size == 1 or not tensors:
        return
    sent = comm.sent_bytes
    with ThreadPoolExecutor() as pool:  # a processor hashes about 0.7 GB/s
        own = torch.tensor([*pool.map(_hash, tensors)], dtype=torch.int64, device=device)
    hashes = comm.all_gather_rows(own)
    differ = comm.to_host_async((hashes != hashes[0]).any(0))()
    batches: list[list[Tensor]] = []
    length = AT_ONCE
    for tensor in itertools.compress(tensors, differ):
        if length + tensor.nbytes > AT_ONCE:
            batches.append([])
            length = 0
        batches[-1].append(tensor)
        length += tensor.nbytes
    for batch in batches:
        broadcast(comm, batch, device)
    comm.sent_bytes = sent


def _hash(x: Tensor) -> int:
    """Return 64 bits of a cryptographic hash of a tensor's elements, in the order of its shape."""
    digest = hashlib.sha256(_as_bytes(x.detach().cpu()).numpy().data).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
