"""What holds for all tests: fixed seeds, one thread, and uninitialised memory that shows."""

import os

# Before torch is imported. One thread each: a process that has used OpenMP cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

collect_ignore = ["integration/fit.py"]  # a script, which the tests of the strategy start

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # then torch.empty is filled with NaN


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
