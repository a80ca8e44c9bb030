"""Runs every Triton kernel on small inputs and checks the results, for use with compute-sanitizer, which is slow.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.run_kernels
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.run_kernels --small

Without torch's cache each tensor is a separate allocation, so reads past its end are detected.
"""

import os
import sys
from unittest import mock

import torch

from benchmarks.selection import Step, sparsifiers
from lightning_sparse import METHODS, Comm, Reducer, method, simulate
from lightning_sparse.kernels import graphs, launch
from tests.support.kernels import Echo
from tests.support.update_training import exchanged_twice

SMALL = {"TopK", "GaussianK", "ChunkTopK"}
"""The sparsifiers of a small run."""


def select(device: str, small: bool) -> None:
    """Take two steps with every sparsifier, on lengths of whole tiles, and cut short."""
    for numel in (4096, 70_001 if device == "cuda" else 5001)[small:]:
        for density in (0.01,) if small else (0.001, 0.01, 0.1):
            for name, sparsifier in sparsifiers(density).items():
                if small and name not in SMALL:
                    continue
                step = Step(torch.randn(numel, device=device), density, sparsifier)
                for _ in range(2):
                    step.check(name)


def reduce_(device: str, small: bool) -> None:
    """Take two steps of a model with long, short and empty parameters; nothing may be lost."""
    names = sorted(name for name, spec in METHODS.items() if "density" in spec.options and spec.traits.conserves)
    for name in ["topk", "gaussiank", "chunktopk"] if small else names:
        for dtype in (torch.float32, torch.bfloat16):
            shapes = {"w": (90, 91), "none": (0,), "b": (91,), "v": (130, 129)}
            steps = [{key: torch.randn(shape, device=device).to(dtype) for key, shape in shapes.items()} for _ in "ab"]
            given = {key: sum(step[key].float() for step in steps) for key in shapes}

            def rank(comm: Comm, name: str = name, steps: list[dict[str, torch.Tensor]] = steps) -> Reducer:
                reducer = Reducer(method(name, density=0.01), comm)
                for step in steps:
                    reducer.reduce_(step)
                return reducer

            kept = simulate(1, rank)[0].state_dict()["elements"]["residual"]
            for key, whole in given.items():
                sent = sum(step[key].float() for step in steps)
                torch.testing.assert_close(kept[key].to(device) + sent, whole, rtol=0, atol=1e-5)


def quantize(device: str, small: bool) -> None:
    """Take a step with every method that sends all values, by this package's kernels and by plain torch."""
    for name in ("int4", "onebit") if small else ("int4", "int8", "onebit", "terngrad", "signsgd"):
        for dtype in (torch.float32, torch.bfloat16):
            shapes = {"w": (90, 91), "none": (0,), "b": (91,), "conv": (33, 3, 3, 3), "v": (3, 2100)}
            given, found = {key: torch.randn(shape, device=device).to(dtype) for key, shape in shapes.items()}, []
            for kernels in ("triton", "torch"):
                with mock.patch.dict(os.environ, {launch.KERNELS: kernels}):
                    grads = {key: grad.clone() for key, grad in given.items()}
                    Reducer(method(name), Echo(1), granularity="model").reduce_(grads)
                    found.append(grads)
            torch.testing.assert_close(*found, rtol=2**-7, atol=1e-5)  # if sums differ, bf16's last bit may differ


def updates(device: str, small: bool) -> None:
    """Exchange updates twice, by this package's kernels and by plain torch."""
    for optimizer in ("adamw",) if small else ("adamw", "adamax", "nesterov"):
        found = {}
        for kernels in ("triton", "torch"):
            with mock.patch.dict(os.environ, {launch.KERNELS: kernels}):
                found[kernels] = exchanged_twice(optimizer, torch.float32, device)
        torch.testing.assert_close(found["triton"][:2], found["torch"][:2], rtol=1e-5, atol=1e-5)


def main(device: str, small: bool = False) -> None:
    """Run all, or a few of the methods on one length."""
    torch.manual_seed(0)
    # Without torch's cache, tensors cannot be allocated while a CUDA graph is captured, and the sanitizer reports this.
    with mock.patch.object(graphs, "can_capture", return_value=False):
        for part in (select, reduce_, quantize, updates):
            part(device, small)
            print(f"{part.__name__.strip('_')}: right", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu", small="--small" in sys.argv[1:])
