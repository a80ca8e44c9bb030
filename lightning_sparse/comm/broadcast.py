"""Broadcasts tensors from rank 0: all tensors, or only the tensors whose hashes differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_sparse._compat import preserve_versions
from lightning_sparse.comm.base import Comm

AT_ONCE = 1 << 28
"""Largest size in bytes of a message that combines several tensors. The message is a copy of them."""


@torch.no_grad()
def broadcast(comm: Comm, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Overwrite tensors with rank 0's, in one message for all dtypes.

    Args:
        tensors: tensors to overwrite; all ranks pass equal shapes and dtypes.
        device: device of the message, one that `comm` can send from.
    """
    longest_first = sorted(tensors, key=lambda x: (-x.element_size(), str(x.dtype)))  # keeps them aligned
    parts = [as_bytes(tensor.to(device)) for tensor in longest_first]
    message = torch.cat(parts)
    comm.broadcast(message, 0)  # as bytes, because gloo does not support all dtypes
    if comm.rank == 0:
        return
    received = message.split([part.numel() for part in parts])
    views = [part.view(x.dtype).view(x.shape) for x, part in zip(longest_first, received, strict=True)]
    for _, pairs in itertools.groupby(zip(longest_first, views, strict=True), lambda pair: pair[0].dtype):
        own, theirs = zip(*pairs, strict=True)
        # Another module's buffers may be saved for its backward pass, which does not depend on them in training. A
        # frozen module may have been loaded in inference mode.
        with preserve_versions(own), torch.inference_mode():
            torch._foreach_copy_(own, theirs)


@torch.no_grad()
def broadcast_differing(comm: Comm, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Overwrite tensors with rank 0's if their hashes differ between ranks.

    Most models start from equal weights, from a seed or a file. Sending 100 million weights over 100 Mbit/s would take
    half a minute; comparing their hashes takes less than a second. All ranks call this function with tensors of equal
    shapes and dtypes. `comm.sent_bytes` does not change, because it counts the bytes of training steps.
    """
    if comm.size == 1 or not tensors:
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the pool's threads copy in the default stream
    with ThreadPoolExecutor() as pool:  # one core hashes about 0.7 GB/s
        own = torch.tensor([*pool.map(_hash, tensors)], dtype=torch.int64, device=device)
    with comm.uncounted():
        hashes = comm.all_gather(own)
    differ = comm.to_host_async((hashes != hashes[0]).any(0))()
    batches: list[list[Tensor]] = []
    length = AT_ONCE
    for tensor in itertools.compress(tensors, differ):
        if length + tensor.nbytes > AT_ONCE:
            batches.append([])
            length = 0
        batches[-1].append(tensor)
        length += tensor.nbytes
    with comm.uncounted():
        for batch in batches:
            broadcast(comm, batch, device)


def _hash(x: Tensor) -> int:
    """Return 64 bits of a cryptographic hash of a tensor's elements in row-major order."""
    digest = hashlib.sha256(as_bytes(x.detach().cpu()).numpy().data).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def as_bytes(x: Tensor) -> Tensor:
    """Return the elements of a tensor in row-major order as bytes, 1-D uint8."""
    return x.contiguous().view(-1).view(torch.uint8)
