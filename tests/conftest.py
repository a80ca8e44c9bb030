"""What holds for all tests: fixed seeds, one thread, and uninitialised memory that shows."""

import os
import signal
from collections import Counter

# Before torch is imported. One thread each: a process that has used OpenMP cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = "1"
# Before torch 2.11 deterministic products on CUDA raise an error without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

# Triton decides when it is imported, which others do, whether kernels are compiled or interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.plugins.reliability"]

# Scripts that tests start.
collect_ignore = ["integration/fit.py", "compile_kernels.py", "run_kernels.py"]

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them all ranks that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # then torch.empty is filled with NaN


# Of the cases that a test has in the full tier, `make test-all` runs the first, and then one in so many.
ONE_IN = 27


def pytest_collection_modifyitems(items):
    """Mark as `exhaustive` what of the full tier `make test-all` leaves out; some tests are marked by hand."""
    seen = Counter()
    for item in items:
        if item.get_closest_marker("full"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % ONE_IN:
                item.add_marker("exhaustive")
            seen[test] += 1


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def use(monkeypatch):
    """Choose the kernels: "torch", "triton", or "native", the loops in C that the CPU takes where nothing is forced."""

    def choose(kernels):
        if kernels == "native":
            monkeypatch.delenv("LIGHTNING_SPARSE_KERNELS", raising=False)
        else:
            monkeypatch.setenv("LIGHTNING_SPARSE_KERNELS", kernels)

    return choose
