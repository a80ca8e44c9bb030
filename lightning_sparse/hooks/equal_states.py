"""Makes the states of optimizers and gradient scalers equal on all ranks: their means, or rank 0's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.comm.broadcast import as_bytes
from lightning_sparse.shards import local, state_like


@torch.no_grad()
def average_states(comm: ProcessGroupComm, optimizer: Optimizer) -> None:
    """Make an optimizer's state equal on all ranks. All ranks call it.

    Floating-point tensors become their mean over the ranks. If the `state_dict` still differs among ranks, for example
    because of different counts of steps, all ranks load rank 0's. There is no mean if ranks have states of different
    parameters, or if a state has other values than numbers and floating-point tensors, as quantized moments. Of sharded
    parameters, states are this rank's part.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    values = [[(key, local(x)) for key, x in optimizer.state.get(param, {}).items()] for param in params]
    tensors = [x for state in values for _, x in state if _is_averaged(x)]
    is_plain = all(_is_averaged(x) or _is_number(x) for state in values for _, x in state)
    kinds = [[(key, type(x).__name__, getattr(x, "shape", None)) for key, x in state] for state in values]
    if _are_equal(comm, kinds, params[0].device) and is_plain:
        for x in filter(Tensor.numel, tensors):
            x.copy_(comm.all_reduce(x.float()).div_(comm.size))
    own = optimizer.state_dict()
    if not _are_equal(comm, own, params[0].device):
        whole = _from_rank_0(comm, _parts(own))
        if "state" in whole:
            states = whole["state"].items()
            whole["state"] = {i: {key: state_like(params[i], x) for key, x in each.items()} for i, each in states}
        optimizer.load_state_dict(whole)


def take_rank_0s(comm: ProcessGroupComm, scalers: Iterable[Any]) -> None:
    """Let gradient scalers take the loss scale of rank 0. All ranks call it, with the same scalers."""
    for scaler in scalers:
        scaler.load_state_dict(_from_rank_0(comm, scaler.state_dict()))


def _is_averaged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0


def _is_number(x: Any) -> bool:
    """Return whether a value of an optimizer's state is a number, a text or None."""
    return x.dim() == 0 if isinstance(x, Tensor) else x is None or isinstance(x, bool | int | float | str)


def _from_rank_0(comm: ProcessGroupComm, value: Any) -> Any:
    """Return rank 0's value. All ranks call it."""
    values = [value]
    dist.broadcast_object_list(values, comm.ranks[0], group=comm.group)
    return values[0]


def _are_equal(comm: ProcessGroupComm, value: Any, device: torch.device) -> bool:
    """Return whether a value has the same hash on all ranks."""
    digest = hashlib.sha256()
    _add(digest, value)
    own = torch.tensor([int.from_bytes(digest.digest()[:8], "little", signed=True)], device=device)
    found = comm.all_gather_rows(own)
    return not bool((found != found[0]).any())


def _add(digest: Any, value: Any) -> None:
    """Add numbers, texts and tensors to a hash, in dictionaries and sequences. Of other objects, it is their class."""
    if isinstance(value, dict):
        value = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, list | tuple):
        for each in (len(value), *value):
            _add(digest, each)
    elif isinstance(value, Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(as_bytes(local(value).detach().cpu()).numpy().data)
    else:
        digest.update(repr(value if _is_number(value) else type(value)).encode())


def _parts(value: Any) -> Any:
    """Return a value in which sharded tensors are this rank's part."""
    if isinstance(value, dict):
        return {key: _parts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_parts, value))
    return local(value)
