"""Where kernels are tested, on what, and a wire without threads."""

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
    """Whether it stands for a kernel, or is one that was launched already."""
    return isinstance(value, launch.Kernel) or (callable(value) and type(value).__module__.startswith("triton"))


def with_kernels():
    """Return the modules that have kernels, their own or imported ones."""
    names = [
        f"{package.__name__}.{module.name}"
        for package in (kernels, contrib_kernels)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != native.LIBRARY.stem  # no module
    ]
    modules = map(importlib.import_module, sorted(names))
    return tuple(x for x in modules if any(map(is_kernel, vars(x).values())))


def device_of(kernels):
    """Where these kernels work."""
    return DEVICE if kernels == "triton" else "cpu"


KERNELS = with_kernels()


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Make it an error, in all threads, that the host waits for the device; the CPU has nothing of the kind."""
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
    """Ranks that all send the same: the interpreter is no place for threads."""

    def __init__(self, size):
        super().__init__(0, size)

    def _all_reduce(self, x, op):
        x.mul_(self.size)

    def _all_gather(self, x):
        return [x.clone() for _ in range(self.size)]

    def _broadcast(self, x, src):
        pass

    def _all_to_all_v(self, x, send, receive):
        return torch.cat([x[:count] for count in receive])
