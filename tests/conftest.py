"""Settings of all tests: fixed seeds, one thread, and NaN in uninitialised memory."""

import os
import signal
from collections import Counter

# Set before torch is imported. Use one thread, because a process that has used OpenMP cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = "1"
# Without this variable, deterministic products on CUDA raise an error before torch 2.11.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

# Triton decides at import time whether kernels are compiled or interpreted on the CPU, and other packages import it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.plugins.reliability"]

# Scripts that tests start.
collect_ignore = ["integration/fit.py", "compile_kernels.py", "run_kernels.py"]

# If a shell starts the tests in the background, they and the ranks that they start would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # then torch.empty is filled with NaN


# Of a test's cases in the full tier, `make test-all` runs the first and then one in this number.
ONE_IN = 27


def pytest_collection_modifyitems(items):
    """Mark the cases of the full tier that `make test-all` skips as `exhaustive`; some tests are marked by hand."""
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
    """Choose the kernels: "torch", "triton", or "native", the C kernels that are the CPU's default."""

    def choose(kernels):
        if kernels == "native":
            monkeypatch.delenv("LIGHTNING_SPARSE_KERNELS", raising=False)
        else:
            monkeypatch.setenv("LIGHTNING_SPARSE_KERNELS", kernels)

    return choose
