"""Devices and inputs for tests of kernels, and a `Comm` without threads."""

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator

import pytest
import torch

from lightning_sparse import kernels
from lightning_sparse.comm import Comm
from lightning_sparse.contrib import kernels as contrib_kernels
from lightning_sparse.kernels import launch, native
from tests.support.vectors import INPUTS, SMOOTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_native = pytest.mark.skipif(native.library() is None, reason="kernels/cpu was not compiled")
EITHER = [pytest.param("triton", marks=needs_triton), pytest.param("native", marks=needs_native)]
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="where there is a GPU kernels do not run on the CPU")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
HOSTILE = {
    **INPUTS,
    "infinities": lambda d: torch.where(torch.rand(d) < 0.5, torch.inf, -torch.inf),
    "largest": lambda d: torch.full((d,), torch.finfo(torch.float32).max),
    "student": SMOOTH["Student 3"],
}
SOME = ["few values", "nan and inf"]


def is_kernel(value):
    """Return whether a value is a kernel, launched or not."""
    return isinstance(value, launch.Kernel) or (callable(value) and type(value).__module__.startswith("triton.runtime"))


def with_kernels():
    """Return the modules that contain kernels, including imported kernels."""
    names = [
        f"{package.__name__}.{module.name}"
        for package in (kernels, contrib_kernels)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != native.LIBRARY.stem  # not a module
    ]
    modules = map(importlib.import_module, sorted(names))
    return tuple(x for x in modules if any(map(is_kernel, vars(x).values())))


def device_of(kernels):
    """Return the device of these kernels."""
    return DEVICE if kernels == "triton" else "cpu"


KERNELS = with_kernels()


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Raise an error in any thread if the host waits for the device. On the CPU this has no effect."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Echo(Comm):
    """A `Comm` whose ranks all send the same payload. It needs no threads, which Triton's interpreter cannot use."""

    def __init__(self, size):
        super().__init__(0, size)

    def _all_reduce(self, x, op):
        x.mul_(self.size)

    def _all_gather(self, x):
        return torch.stack([x] * self.size)

    def _broadcast(self, x, src):
        pass

    def _all_to_all_v(self, x, send, receive):
        return torch.cat([x[:count] for count in receive])
