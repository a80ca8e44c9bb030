"""Stands for CUDA graphs on a CPU: records operations and kernels, and repeats them on the same tensors."""

import contextlib
import sys
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_sparse.kernels import graphs, launch
from tests.support.kernels import DEVICE, KERNELS


class Recorder(TorchDispatchMode):
    """Notes each operation of torch as a function that repeats it.

    Attributes:
        calls: the functions, of operations and of kernels.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero"), f"{name}: the host would wait"
        if not func.is_view and not name.startswith(("aten::empty", "aten::new_empty")):
            self.calls.append(lambda: self._again(func, args, kwargs, result))
        return result

    @staticmethod
    def _again(func, args, kwargs, result):
        given = {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() not in given:
                old.copy_(new)


@contextlib.contextmanager
def recorded_graphs(replayed):
    """Note each replayed function. On the CPU, record and repeat captured functions.

    A capture runs no kernel: afterwards, its inputs have their contents from before.
    """
    recorders = []
    real, on_cuda = launch.launch, graphs.capture

    def noted(function, inputs, pool, stream):
        captured = (on_cuda if DEVICE == "cuda" else capture)(function, inputs, pool, stream)

        def replay():
            replayed.append(function)
            captured.replay()

        return captured._replace(replay=replay)

    def launching(kernel, programs, *args, **constants):
        with _disable_current_modes():  # the interpreter's operations
            real(kernel, programs, *args, **constants)
        if recorders:
            recorders[-1].calls.append(lambda: real(kernel, programs, *args, **constants))

    def capture(function, inputs, pool, stream):
        addresses = [x.data_ptr() for x in inputs]
        before = [x.clone() for x in inputs]
        recorder = Recorder()
        recorders.append(recorder)
        with recorder, launch.constants_of(mock.Mock(cuda_stream=0)) as constants:
            result = function()
        recorders.pop()
        for x, old in zip(inputs, before, strict=True):
            x.copy_(old)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.data_ptr() not in addresses:
                x.zero_()  # no kernel has run

        def replay():
            for call in recorder.calls:
                call()

        return graphs.Captured(replay, result, constants)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(graphs, "capture", noted))
        if DEVICE == "cuda":
            yield
            return
        for owner, name, value in (
            (graphs, "can_capture", lambda x: x.numel() > 0),
            (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
            (torch.cuda, "Stream", lambda device, priority: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for module in (*KERNELS, *sys.modules.values()):
            if getattr(module, "__name__", "").startswith("lightning_sparse.") and vars(module).get("launch") is real:
                stack.enter_context(mock.patch.object(module, "launch", launching))
        yield
