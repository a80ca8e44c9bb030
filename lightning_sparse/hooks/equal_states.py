"""Makes gradients and the states of optimizers and gradient scalers equal on all ranks: their means, or rank 0's."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.comm import Comm, ProcessGroupComm
from lightning_sparse.comm.broadcast import as_bytes
from lightning_sparse.shards import load_optimizer, local, parameters_of

KEPT = "lightning_sparse: kept"
"""Stands for an object that ranks do not send, such as a function: each keeps its own."""


@torch.no_grad()
def average_states(comm: ProcessGroupComm, optimizer: Optimizer) -> None:
    """Make an optimizer's state equal on all ranks. All ranks call it.

    Floating-point tensors become their mean over the ranks. If the `state_dict` still differs among ranks, for example
    because of different counts of steps, all ranks load rank 0's. There is no mean if ranks have states of different
    parameters, or if a state has quantized moments or other objects. The states of sharded parameters are this rank's
    part.
    """
    params = parameters_of([optimizer])
    if not params:
        return
    values = [[(key, local(x)) for key, x in optimizer.state.get(param, {}).items()] for param in params]
    tensors = [x for state in values for _, x in state if _is_averaged(x)]
    is_plain = all(_is_averaged(x) or _is_number(x) for state in values for _, x in state)
    kinds = [[(key, f"{type(x)}", _is_averaged(x), getattr(x, "shape", None)) for key, x in each] for each in values]
    if _are_equal(comm, kinds, params[0].device) and is_plain:
        for x in filter(Tensor.numel, tensors):
            x.copy_(comm.all_reduce(x.float().contiguous()).div_(comm.size))  # NCCL takes no other strides
    own = optimizer.state_dict()
    if not _are_equal(comm, own, params[0].device):
        load_optimizer(optimizer, _merged(own, _from_first(comm, _sent(own), params[0].device)))


@torch.no_grad()
def share_states(comm: Comm, node: Comm, optimizer: Optimizer) -> None:
    """Let the ranks of each node take the optimizer's state of its first rank, unless they have equal states.

    Args:
        comm: this rank's connection to all ranks, which call it.
        node: its connection to the ranks of its node.
    """
    own, device = optimizer.state_dict(), local(parameters_of([optimizer])[0]).device
    digests = _digests(comm, own, device).view(-1, node.size)
    if not bool((digests != digests[:, :1]).any()):
        return
    # A call within a node is a call of all ranks, so all nodes make the same ones.
    first = _from_first(node, _sent(own), device)
    if node.rank:
        load_optimizer(optimizer, _merged(own, first))


@torch.no_grad()
def average_waiting_gradients(comm: ProcessGroupComm, optimizers: Iterable[Optimizer]) -> None:
    """Replace the gradients that wait for a step by their means over the ranks. All ranks call it.

    A rank without a gradient counts as zeros. Loss scales must be equal. Sparse gradients stay. Sharded models have
    none, and DistributedDataParallel averages whole gradients in the next backward pass.
    """
    params = parameters_of(optimizers)
    waits = [param.grad is not None and not param.grad.is_sparse for param in params]
    senders = comm.all_reduce(torch.tensor(waits, dtype=torch.float32, device=params[0].device)).tolist()
    for param in (param for param, count in zip(params, senders, strict=True) if count):
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grad = local(param.grad)
        grad.copy_(comm.all_reduce(grad.float().contiguous()).div_(comm.size))


def take_rank_0s(comm: Comm, scalers: Iterable[Any], device: torch.device) -> None:
    """Let gradient scalers take the loss scale of rank 0. All ranks call it, with the same scalers.

    Args:
        device: a device that `comm` can send from.
    """
    with comm.uncounted():
        for scaler in scalers:
            scaler.load_state_dict(_from_first(comm, scaler.state_dict(), device))


def _is_averaged(x: Any) -> bool:
    return type(x) is Tensor and x.is_floating_point() and x.dim() > 0 and x.layout is torch.strided


def _is_number(x: Any) -> bool:
    """Return whether a value of an optimizer's state is a number, a text or None."""
    return x.dim() == 0 if isinstance(x, Tensor) else x is None or isinstance(x, Number | str)


def _from_first(comm: Comm, value: Any, device: torch.device) -> Any:
    """Return the value of the first rank. All ranks call it."""
    message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    length = int(comm.broadcast(torch.tensor([message.numel()], device=device), 0))
    message = comm.broadcast(message if comm.rank == 0 else message.new_empty(length), 0)
    return pickle.loads(message.cpu().numpy().tobytes())


def _digests(comm: Comm, value: Any, device: torch.device) -> Tensor:
    """Return hashes of each rank's value."""
    digest = hashlib.sha256()
    _add(digest, value)
    return comm.all_gather(torch.tensor([int.from_bytes(digest.digest()[:8], "little", signed=True)], device=device))


def _are_equal(comm: ProcessGroupComm, value: Any, device: torch.device) -> bool:
    """Return whether a value has the same hash on all ranks."""
    found = _digests(comm, value, device)
    return not bool((found != found[0]).any())


def _add(digest: Any, value: Any) -> None:
    """Add numbers, texts and tensors to a hash, in dictionaries and sequences. Of other objects, it is their class."""
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, list | tuple):
        for each in (len(value), *value):
            _add(digest, each)
    elif isinstance(value, Tensor):
        part = local(value).detach().cpu()
        is_plain = type(part) in (Tensor, torch.nn.Parameter) and part.layout is torch.strided
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        digest.update(as_bytes(part).numpy().data if is_plain else pickle.dumps(part))
    else:
        digest.update(repr(value if _is_number(value) else type(value)).encode())


def _sent(value: Any) -> Any:
    """Return a value as rank 0 sends it: tensors on the host, this rank's part of sharded ones, and `KEPT`."""
    if isinstance(value, Mapping):
        return {key: _sent(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_sent, value)]
    if isinstance(value, Tensor):
        return local(value).detach().cpu()
    return value if _is_number(value) else KEPT


def _merged(own: Any, sent: Any) -> Any:
    """Return rank 0's value with this rank's objects in place of `KEPT`, and its kinds of sequences."""
    if isinstance(sent, str) and sent == KEPT:
        return own
    if isinstance(sent, dict):
        has = own if isinstance(own, Mapping) else {}
        return {key: _merged(has.get(key), each) for key, each in sent.items()}
    if isinstance(sent, list):
        mine = own if isinstance(own, list | tuple) and len(own) == len(sent) else [None] * len(sent)
        parts = [_merged(each, its) for each, its in zip(mine, sent, strict=True)]
        return type(own)(*parts) if hasattr(own, "_fields") else tuple(parts) if isinstance(own, tuple) else parts
    return sent
