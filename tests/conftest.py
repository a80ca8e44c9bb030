"""Settings of all tests: fixed seeds, one thread, and NaN in uninitialised memory."""

import gc
import os
import signal
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

# Set before torch is imported. Use one thread, because a process that has used OpenMP cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = "1"
# Otherwise a process that is forked while a thread of another test ends may wait for ever for a lock of MKL.
os.environ["MKL_DISABLE_FAST_MM"] = "1"
# Without this variable, deterministic products on CUDA raise an error before torch 2.11.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# For each connection torch's store looks up the name of 127.0.0.1. If a DNS server drops the query, that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch

# Triton decides at import time whether kernels are compiled or interpreted on the CPU, and other packages import it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.plugins.reliability"]

# Scripts that tests start.
collect_ignore = ["integration/fit.py", "compile_kernels.py", "run_kernels.py"]

# While pytest collects the tests, garbage collections would take a third of the time, and find nothing.
gc.disable()

# If a shell starts the tests in the background, they and the ranks that they start would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
# Then torch.empty is filled with NaN. Unlike torch.use_deterministic_algorithms, this does not import torch's compiler.
torch.set_deterministic_debug_mode("error")


# Of the full tier, `make test-all` runs the first case of a test without quick cases, and one of others in this number.
# Each commit has another sample, so that all cases run in the course of time.
ONE_IN = 40
# Tests here start processes, so `make test` runs one quick case of each, and `make test-all` the others.
PROCESSES = Path(__file__).parent / "integration"


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def _commit():
    """Return the number of the commit; 0 without git or outside of a repository."""
    here = Path(__file__).parent
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(git.stdout, 16)


def pytest_collection_modifyitems(items):
    """Mark cases: `full` by `one_in`, `exhaustive` if `make test-all` skips them, `later` if `make test` alone does."""
    interpreted = not torch.cuda.is_available()  # with a GPU, all these cases take seconds
    places = defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("one_in") if interpreted else None
        if mark and not item.get_closest_marker("full") and sum(_place(item, places)) % mark.args[0]:
            item.add_marker("full")
    quick = Counter(_test(item) for item in items if not item.get_closest_marker("full"))
    seen, commit = Counter(), _commit()
    for item in items:
        if not item.get_closest_marker("full"):
            if interpreted and PROCESSES in item.path.parents and seen[_test(item)] != commit % quick[_test(item)]:
                item.add_marker("later")
            seen[_test(item)] += 1
        else:
            counted, place = (item.path, commit % ONE_IN) if _test(item) in quick else (_test(item), 0)
            if seen[counted] % ONE_IN != place:
                item.add_marker("exhaustive")
            seen[counted] += 1


def _test(item):
    return item.nodeid.partition("[")[0]


def _place(item, places):
    """Yield the number of the case in each `parametrize` mark of its test. Cases that are marked full do not count."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        case = tuple(id(item.callspec.params[name.strip()]) for name in names)
        numbers = places[_test(item), tuple(names)]
        yield numbers.setdefault(case, len(numbers))


@pytest.fixture(autouse=True)
def _seed():
    # Until CUDA is in use, torch.manual_seed keeps a stack trace of each call, which takes longer than many tests.
    (torch.manual_seed if torch.cuda.is_available() else torch.random.default_generator.manual_seed)(0)


@pytest.fixture
def use(monkeypatch):
    """Choose the kernels: "torch", "triton", or "native", the C kernels that are the CPU's default."""

    def choose(kernels):
        if kernels == "native":
            monkeypatch.delenv("LIGHTNING_SPARSE_KERNELS", raising=False)
        else:
            monkeypatch.setenv("LIGHTNING_SPARSE_KERNELS", kernels)

    return choose
