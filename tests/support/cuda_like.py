"""Fake CUDA tensors that are computed on the CPU, to test plain torch code for CUDA without a GPU.

    simulate_on_cuda(2, lambda comm: comm.all_reduce(torch.ones(3, device=CUDA)))

Unlike torch's fake tensors, they have values: the host may read them, and results can be compared.
"""

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sparse import simulate
from lightning_sparse.comm import Comm
from lightning_sparse.kernels import launch

T = TypeVar("T")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
COPIES = (Tensor.copy_, torch._foreach_copy_)
HOST_ONLY = (Tensor.numpy, Tensor.__array__)


class WrongDevice(AssertionError):
    """An operation on tensors of two devices, or an operation that exists only on the host."""


class OnCuda(Tensor):
    """A tensor that claims to be on CUDA."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = CUDA
    is_cuda = True


class CudaLike(TorchFunctionMode):
    """Places results on CUDA if the inputs are on CUDA or CUDA is requested. Only copies may involve both devices.

    This is stricter than CUDA, which accepts scalars and indices from the host.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor)]
        asked = [x for x in given if isinstance(x, torch.device)] or [CPU] * (func is Tensor.cpu)
        devices = {x.device for x in given if isinstance(x, (Tensor, torch.Generator))}
        devices.update(() if tensors else asked)
        if (len(devices) > 1 and func not in COPIES) or (CUDA in devices and func in HOST_ONLY):
            raise WrongDevice(f"{func.__name__} of {[(x.device.type, tuple(x.shape)) for x in tensors] or devices}")
        device = next(iter(asked or [x.device for x in tensors]), CPU)
        result = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))

        def placed(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, OnCuda) == (device == CUDA):
                return x
            own = x.clone() if any(x is tensor for tensor in tensors) else x
            return own.as_subclass(OnCuda if device == CUDA else Tensor)

        return tree_map(placed, result) if any(isinstance(x, Tensor) for x in tree_leaves(result)) else result


def to_host(x: Any) -> Any:
    """Replace a device by the CPU; return any other argument unchanged."""
    return CPU if isinstance(x, torch.device) else x


def simulate_on_cuda(size: int, fn: Callable[[Comm], T]) -> list[T]:
    """Run `fn` once per rank like `simulate`, with fake CUDA tensors and without Triton."""

    def rank(comm: Comm) -> T:
        with CudaLike():
            return fn(comm)

    stream = SimpleNamespace(cuda_stream=0)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_stream", lambda device: stream),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "Event", lambda: event),
            (Tensor, "record_stream", lambda x, stream: None),
            (launch, "KEEPS", (Tensor, OnCuda)),
            (launch, "_kept", launch.Cache()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(os.environ, {launch.KERNELS: "torch"}))
        return simulate(size, rank)
