"""Fake CUDA tensors without values, and fake kernels that only record their launch.

torch's fake tensors have a device and a shape, but no values. So a step's operations on the device can be observed
without a GPU.
"""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_sparse.contrib import randk
from lightning_sparse.exchange import OK
from lightning_sparse.kernels import launch
from tests.support.kernels import KERNELS, Echo, is_kernel

CUDA = torch.device("cuda", 0)


class HostWait(AssertionError):
    """An operation that makes the host wait for the device."""


class Operations(TorchFunctionMode):
    """Replaces tensor methods by operations. Their Python implementation would access the missing device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return taken(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            part = taken(x, index)
            return torch.ops.aten.copy_(part, value) if isinstance(value, torch.Tensor) else part.fill_(value)
        if func is torch.Tensor.contiguous and not args[0].is_contiguous():
            return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def taken(x, index):
    dim = 0
    for item in index if isinstance(index, tuple) else (index,):
        if item is Ellipsis:
            dim = x.dim() - sum(isinstance(other, (slice, int)) for other in index)
        elif isinstance(item, slice):
            x, dim = torch.ops.aten.slice.Tensor(x, dim, item.start, item.stop), dim + 1
        elif item is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(item, int):
            x = x.select(dim, item)
        else:
            x = torch.ops.aten.index.Tensor(x, [None] * dim + [item])
    return x


class Counting(Echo):
    """Counts values that the host reads, and allows reading only after the step.

    Args:
        first_may_wait: whether the first step may read values earlier, because an aggregator may need to know that all
            ranks are at the same step.
    """

    def __init__(self, size, first_may_wait=False):
        super().__init__(size)
        self.first_may_wait = first_may_wait
        self.fetched = self.steps = 0

    def to_host_async(self, x):
        assert x.device == CUDA
        self.fetched += 1
        begun = self.steps

        def wait():
            if begun == self.steps and not (self.first_may_wait and begun == 0):
                raise HostWait("looked at within the step")
            return zeros(*x.shape) if x.dim() else OK  # a scalar is a status

        return wait

    def _all_gather(self, x):
        return x.new_empty(self.size, *x.shape)  # NCCL would fill it

    def _timed(self, nbytes, collective, x, *args):
        assert x.device == CUDA
        return super()._timed(nbytes, collective, x, *args)

    def _all_to_all_v(self, x, send, receive):
        return x.new_empty(sum(receive))


def zeros(first=None, *others):
    return 0 if first is None else [zeros(*others) for _ in range(first)]


@contextlib.contextmanager
def on_fake_cuda():
    """Allow fake CUDA tensors; yield the list of the names of launched kernels, in order."""
    launched = []

    class Launched:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            def run(*args, **constants):
                # On a GPU Triton rejects CPU tensors, but its interpreter on a machine without a GPU does not.
                wrong = [x.device for x in args if isinstance(x, torch.Tensor) and x.device != CUDA]
                assert not wrong, f"{self.name} got a tensor on {wrong[0]}"
                launched.append(self.name)

            return run

    with contextlib.ExitStack() as stack:

        def replace(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        stack.enter_context(mock.patch.dict(os.environ, {launch.KERNELS: "triton"}))
        for module in KERNELS:
            for name, value in list(vars(module).items()):
                if is_kernel(value):
                    replace(module, name, Launched(name))
        replace(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
        replace(torch.cuda, "is_current_stream_capturing", lambda: False)
        replace(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)
        )
        replace(torch.Tensor, "record_stream", lambda x, stream: None)
        replace(launch, "KEEPS", (torch.Tensor, torch._subclasses.FakeTensor))  # cached while the mode is active
        replace(launch, "_kept", launch.Cache())
        replace(torch._subclasses.FakeTensor, "data_ptr", lambda self: 0)
        # This function runs on the host.
        replace(randk, "draw", lambda numel, k, generator: torch.empty(k, dtype=torch.int64))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(Operations())
        yield launched
