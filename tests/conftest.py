"""What holds for all tests: fixed seeds, one thread, and uninitialised memory that shows.

With `--reliability FILE`, what tests marked like this have shown becomes a table in FILE, between the lines
`<!-- reliability -->` and `<!-- end -->`, a row per case:

    @pytest.mark.reliability("killed while it writes a checkpoint", checked="the checkpoint before it is complete")
    @pytest.mark.parametrize("name", METHODS)

Tests that share case and `checked` share the row. Methods are counted by the values of a test's parameters; a test that
goes through them itself says so: `methods=METHODS`.
"""

import os
import signal
from pathlib import Path

# Before torch is imported. One thread each: a process that has used OpenMP cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

# Triton decides when it is imported, which others do, whether kernels are compiled or interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from lightning_sparse import METHODS

# Scripts that tests start.
collect_ignore = ["integration/fit.py", "compile_kernels.py", "run_kernels.py"]

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them all ranks that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # then torch.empty is filled with NaN


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


ROWS = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--reliability", metavar="FILE", help="write what the tests marked `reliability` showed into a table in FILE"
    )


def pytest_configure(config):
    config.stash[ROWS] = {}  # (case, checked) to the methods seen and, by test, the outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    for marker in item.iter_markers("reliability"):
        (case,), checked, methods = marker.args, marker.kwargs["checked"], marker.kwargs.get("methods", ())
        seen, outcomes = item.config.stash[ROWS].setdefault((case, checked), (set(), {}))
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        seen.update(methods, (value for value in params if isinstance(value, str) and value in {*METHODS, "ddp"}))
        if report.when == "call" or not report.passed:
            outcomes[item.nodeid] = report.outcome
    return report


def pytest_sessionfinish(session):
    if path := session.config.getoption("--reliability"):
        lines = ["| case | methods | what was checked | result |", "|---|---|---|---|"]
        for (case, checked), (seen, outcomes) in session.config.stash[ROWS].items():
            bad = [outcome for outcome in outcomes.values() if outcome != "passed"]
            result = f"{', '.join(sorted(set(bad)))}: {len(bad)} of {len(outcomes)} tests" if bad else "passed"
            lines.append(f"| {case} | {len(seen - {'ddp'}) or ''} | {checked} | {result} |")
        start, end = "<!-- reliability -->\n", "<!-- end -->"
        text = Path(path).read_text()
        before, _, rest = text.partition(start)
        Path(path).write_text(before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2])
