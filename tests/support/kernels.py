"""Where kernels are tested, on what, and a wire without threads."""

import importlib.util

import pytest
import torch

from lightning_sparse.comm import Comm
from lightning_sparse.kernels import (
    block_stats,
    changes,
    checks,
    chunks,
    codes,
    gradient_table,
    launch,
    pack,
    payout,
    quantize,
    rescaling,
    select_triton,
    threshold,
    write_back,
)
from tests.support.vectors import INPUTS, SMOOTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="where there is a GPU kernels do not run on the CPU")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
HOSTILE = {
    **INPUTS,
    "infinities": lambda d: torch.where(torch.rand(d) < 0.5, torch.inf, -torch.inf),
    "largest": lambda d: torch.full((d,), torch.finfo(torch.float32).max),
    "student": SMOOTH["Student 3"],
}
SOME = ["few values", "nan and inf"]
KERNELS = (
    block_stats,
    changes,
    checks,
    chunks,
    codes,
    gradient_table,
    pack,
    payout,
    quantize,
    rescaling,
    select_triton,
    threshold,
    write_back,
)


def is_kernel(value):
    """Whether it stands for a kernel, or is one that was launched already."""
    return isinstance(value, launch.Kernel) or (callable(value) and type(value).__module__.startswith("triton"))


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
