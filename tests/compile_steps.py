"""Compiles the kernels of whole steps for a GPU, without using one, with their real arguments.

    python -m tests.compile_steps 90    # compute capability 9.0

Before it compiles, Triton inspects each argument: whether a number is 1 or a multiple of 16, and the alignment of
pointers. No kernel runs. tests/test_kernels.py runs this as a script, because Triton decides at import time whether it
compiles.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lightning_sparse import Reducer, method
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels import launch
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.kernels import KERNELS, Echo

STEPS: list[tuple[str, dict[str, Any], torch.dtype, dict[str, tuple[int, ...]]]] = [
    ("topk", {"density": 0.001}, torch.float32, {"w": (1200, 1000), "b": (1000,), "nothing": (0,), "v": (77, 3)}),
    ("topk", {"density": 0.05}, torch.float32, {"one": (1,), "w": (5000,)}),
    ("topk", {"density": 0.0001}, torch.float32, {"w": (200_000,)}),
    ("gaussiank", {"density": 0.001}, torch.bfloat16, {"w": (1200, 1000), "b": (1000,)}),
    ("gaussiank", {"density": 0.1}, torch.float16, {"w": (1200, 100)}),
    ("gaussiank", {"index_format": "int32", "value_format": "int8"}, torch.float32, {"w": (100_000,)}),
    ("gaussiank", {"density": 0.3}, torch.float32, {"w": (100_000,)}),
    ("randk", {"density": 0.01}, torch.float32, {"w": (100_000,)}),
    ("gtopk", {"density": 0.001}, torch.float32, {"w": (1200, 100)}),
    ("gtopk", {"density": 0.05}, torch.bfloat16, {"w": (5000,)}),
    ("oktopk", {"density": 0.001}, torch.float32, {"w": (1200, 100)}),
    ("oktopk", {"density": 0.01}, torch.bfloat16, {"w": (50_000,)}),
    ("scalecom", {"density": 0.001}, torch.float32, {"w": (1200, 100)}),
    ("chunktopk", {"density": 0.001}, torch.float32, {"w": (1200, 100)}),
    ("int4", {}, torch.float32, {"w": (1200, 101), "b": (101,)}),
    ("int8", {}, torch.bfloat16, {"w": (1200, 100)}),
    ("qsgd", {}, torch.float32, {"w": (1200, 101)}),
    ("terngrad", {}, torch.float32, {"w": (1200, 101)}),
    ("signsgd", {}, torch.float32, {"w": (1200, 101), "b": (101,)}),
    ("onebit", {}, torch.bfloat16, {"w": (1200, 100), "nothing": (0,), "conv": (64, 3, 3, 3)}),
]


class Driver:
    """The part of a GPU driver that Triton calls before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def compile_only(note: Callable[[Any, dict[str, Any]], object], capability: int) -> None:
    """Have all launches of this process compile their kernel, and run nothing.

    Args:
        note: gets each kernel that is compiled or found in the cache, and its constants.
        capability: of the device, 90 for 9.0.
    """
    os.environ[launch.KERNELS] = "triton"
    driver.set_active(Driver(capability))

    def compiled(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        kernel = kernel.load() if isinstance(kernel, launch.Kernel) else kernel
        note(kernel.warmup(*args, grid=(programs,), **launch.OPTIONS, **constants), constants)

    for module in KERNELS:
        module.launch = compiled
    torch.use_deterministic_algorithms(False)
    empty = torch.empty
    torch.empty = lambda *args, **options: empty(*args, **options).zero_()  # indices that no kernel has written
    Exchange._raise = lambda *_, **__: None  # type: ignore[assignment,method-assign]  # nobody has judged the messages


def exchange_updates(dtype: torch.dtype, shapes: dict[str, Any], ranks: int, steps: int = 1) -> None:
    """Exchange updates of AdamW."""
    model = nn.ParameterDict({key: torch.ones(shape, dtype=dtype) for key, shape in shapes.items()})
    optimizer = torch.optim.AdamW(model.parameters())
    reducer = Reducer(method("topk", density=0.001), Echo(ranks), granularity="model", exchanged="update")
    updates = DeltaExchange(reducer, model, [optimizer])
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        updates.begin(optimizer)
        optimizer.step()
        updates.exchange(optimizer)


def main() -> None:
    """Print which numbers of warps each kernel was launched with, as JSON."""
    launched: dict[str, set[int]] = {}

    def note(kernel: Any, constants: dict[str, Any]) -> None:
        launched.setdefault(kernel.name, set()).add(constants.get("num_warps", 4))  # Triton's own choice

    compile_only(note, int(sys.argv[1]))
    for name, options, dtype, shapes in STEPS:
        grads = {key: torch.ones(shape, dtype=dtype) for key, shape in shapes.items()}
        Reducer(method(name, **options), Echo(2), granularity="model").reduce_(grads)
    for dtype in (torch.float32, torch.bfloat16):
        exchange_updates(dtype, {"w": (1200, 1000), "b": (1000,), "nothing": (0,)}, 2)
    print(json.dumps({name: sorted(warps) for name, warps in launched.items()}))


if __name__ == "__main__":
    main()
