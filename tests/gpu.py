"""Tests, checks and benchmarks that need a GPU. Each part has a time limit.

    python3 -m tests.gpu quick                               # the first run of three, 345 seconds
    python3 -m tests.gpu quick second                        # the second, 415 seconds
    python3 -m tests.gpu quick third                         # trainings on one GPU and slow links, 335 seconds
    python3 -m tests.gpu quick kernels gpt --out ~/results   # parts by name, such as failed parts
    python3 -m tests.gpu quick --rehearse                    # on a CPU with mocks, as a test of these parts
    python3 -m tests.gpu full                                # all parts without time limits of a short run: `make gpu`

Parts that check results run in parallel. Parts that measure times run alone. A part that reaches its limit is killed
with all its child processes, and the other parts continue. The environment variable BUDGET is the limit of the whole
run in seconds. Run the command in the root of the repository, with any Python that has torch and the packages of the
extra `dev`. It needs no network and installs nothing.

The output folder is `--out`, or the folder given by OUT. `gpu.csv` has a row for each promise and is written after
each part. `log.txt` has the output of all parts. The folder also contains the CSV files of the benchmarks. A part that
runs again replaces its rows.
The exit status is 0 if all promises hold, 1 if a promise does not hold or was not tested, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tests.triton_cache import CACHE, TRITON, unpack

ROOT = Path(__file__).parents[1]
HOLDS, BROKEN, OPEN = "holds", "does not hold", "not shown"
LEAST = 10.0
"""A part starts only if at least this number of seconds is left."""
RESERVE = 5.0
"""Seconds of the budget for the summary."""
GRACE = 2.0
"""Seconds from SIGTERM to SIGKILL. After SIGTERM, pytest and compute-sanitizer write their results."""
SHOWN = {HOLDS: 300, BROKEN: 1200, OPEN: 700}
"""Number of characters of a part's output to print, by verdict; `log.txt` contains the whole output."""
PRINTED = 8000
"""Largest total number of characters of all parts' output to print."""
REHEARSED = 400.0
"""Limit of a part in a rehearsal, in seconds, because a CPU is slower than a GPU."""
LOG_BYTES = 1 << 20
"""Size of the end of each part's output in `log.txt`."""
Rows = list[dict[str, str]]
Judge = Callable[[Rows], str]


def read(file: Path) -> Rows:
    """Return the rows of a CSV file."""
    return list(csv.DictReader(file.read_text().splitlines()))


# Verdicts on the rows of a benchmark.


def within(rows: Iterable[Mapping[str, str]]) -> str:
    """Say whether all rows with a limit are within it."""
    said = [row["within"] for row in rows if row.get("within")]
    return OPEN if not said else HOLDS if set(said) == {"True"} else BROKEN


def topk_steps(rows: Rows) -> Rows:
    """Return the rows of whole steps with TopK at the smallest density in a CUDA graph, which is device time only."""
    rows = [row for row in rows if (row["part"], row["contestant"]) == ("step", "TopK, CUDA graph")]
    least = min((float(row["density"]) for row in rows), default=0.0)
    return [row for row in rows if float(row["density"]) == least]


TIMES_FASTER = {25_000_000: 3, 100_000_000: 4, 400_000_000: 4}
"""Required speed-up of a step with TopK over a step with torch.topk, by number of elements."""


def for_all_lengths(judge: Judge) -> Judge:
    """Return a judge for which a promise holds only if it holds for all lengths of `TIMES_FASTER`."""

    def judged(rows: Rows) -> str:
        rows = topk_steps(rows)
        verdict = judge(rows)
        there = TIMES_FASTER.keys() <= {int(row["numel"]) for row in rows}
        return OPEN if verdict == HOLDS and not there else verdict

    return judged


def faster(rows: Rows) -> str:
    """Say whether all steps reach the speed-ups over torch.topk in `TIMES_FASTER`."""
    shares = {int(row["numel"]): float(row["times_torch.topk"]) for row in rows}
    enough = [shares[numel] <= 1 / times for numel, times in TIMES_FASTER.items() if numel in shares]
    return OPEN if not enough else HOLDS if all(enough) else BROKEN


def at_most(column: str) -> Judge:
    """Return a judge: a column of the one row of `segment.csv` that has a limit for it."""

    def judge(rows: Rows) -> str:
        found = [row for row in rows if row.get(f"limit_{column}")]
        if not found or not re.search("H[12]00", found[0]["device"]):
            return OPEN  # on another GPU the limits mean nothing
        return HOLDS if float(found[0][column]) <= float(found[0][f"limit_{column}"]) else BROKEN

    return judge


def beside_products(rows: Rows) -> str:
    """Say whether a segment of `topk` beside products takes at most twice its own time and the host's."""
    for row in rows:
        if (row["method"], row["ranks"]) == ("topk", "2"):
            limit = 2 * float(row["device_us"]) + float(row["host_us"])
            return HOLDS if float(row["beside_us"]) <= limit else BROKEN
    return OPEN


def adds_little(contestant: str) -> Judge:
    """Return a judge of whether a row of GPT-2 small in bf16-mixed is within its limit."""
    return lambda rows: within(
        row for row in rows if (row["precision"], row["contestant"]) == ("bf16-mixed", contestant)
    )


def trains_as_dense(rows: Rows) -> str:
    """Say whether each training is at most 1 % above dense, at the last step that both have reached."""
    loss = {(row["part"], row["seed"], int(row["step"]), row["method"]): float(row["val_loss"]) for row in rows}
    last: dict[tuple[str, str], float] = {}
    for (part, seed, step, _), dense in sorted(item for item in loss.items() if item[0][3] == "dense"):
        if (ours := loss.get((part, seed, step, "topk by default"))) is not None and step:
            last[part, seed] = ours / dense
    return OPEN if not last else HOLDS if max(last.values()) <= 1.01 else BROKEN


def is_fast_over_links(rows: Rows) -> str:
    """Say whether a step with `topk` at 1 Gbit/s takes at most a third of the time with DDP."""
    ms = {row["method"]: float(row["median_ms"]) for row in rows if row["rate"] == "1gbit"}
    if not ms.keys() >= {"ddp", "topk by default"}:
        return OPEN
    return HOLDS if 3 * ms["topk by default"] <= ms["ddp"] else BROKEN


# The parts.


@dataclass(frozen=True)
class Part:
    """A command, and the promises that it shows.

    Attributes:
        command: for the shell, with {python} and {out}.
        seconds: its limit.
        promises: each with a function of the rows of `file`; None: it holds if the command succeeds.
        file: the CSV file that the command writes into {out}.
        needs: programs and Python packages without which the command shows nothing.
        group: parts of one group run side by side, groups one after the other.
        rehearsal: stands for `command` on a CPU.
    """

    command: str
    seconds: float
    promises: Mapping[str, Judge | None]
    file: str = ""
    needs: Sequence[str] = ()
    group: int = 0
    rehearsal: str = ""


# Plugins of other packages are disabled: some warn when they are loaded, and here a warning is an error.
PYTEST = (
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {python} -m pytest -p xdist.plugin --dist loadgroup -v -p no:cacheprovider "
    "--tb=short --durations=5"
)
KERNEL_TESTS = "tests/test_kernels.py tests/test_payout.py tests/test_graphs.py"
QUICK = (
    "-m 'not full and not exhaustive' "
    "-k 'not native and not bases and not loops and not in_c and not large_inputs' "
    f"{KERNEL_TESTS}"
)
ON_CUDA = "tests/integration/test_cuda.py -m '' -k"
SMALL = "--numel 20000 --repetitions 2"
SEGMENT = {
    "a segment of 7.09 M elements takes at most 150 μs of an H100 or H200": at_most("device_us"),
    "and at most 600 μs of the host": at_most("host_us"),
    "beside products it takes at most twice its time and the host's": beside_products,
}
SELECTION = {
    "a step with TopK takes the device at most 2.0, 1.5, 1.3 times its 12 bytes at 25, 100, 400 M elements": (
        for_all_lengths(within)
    ),
    "there it is 3, 4, 4 times as fast as with torch.topk": for_all_lengths(faster),
}
GPT = {
    "topk adds at most 1.6 floors and 1 ms to a step of GPT-2 small, bf16-mixed": adds_little("topk"),
    "and so do updates after the step": adds_little("topk updates"),
    "and updates within backward": adds_little("topk updates within backward"),
}
SANITIZER = "compute-sanitizer --error-exitcode 1 --tool"
MEMCHECK = f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 {SANITIZER} memcheck {{python}} -m tests.run_kernels"
# `first` and `second`, or `second` and `third`, fill fifteen minutes of a lent GPU, with the machine's start.
FIRST = {
    "probe": Part(
        "{python} -m tests.gpu_probe",
        45,
        {"torch and Triton work on this GPU": None},
        rehearsal="{python} -m tests.gpu_probe --rehearse",
    ),
    "kernels": Part(
        f"{PYTEST} -n 8 {QUICK}",
        120,
        {"kernels select, add, pack, rescale and pay out as plain torch does": None},
        needs=("triton", "xdist"),
        group=1,
        rehearsal=f"{PYTEST} -n 2 -m 'not full and not exhaustive' -k oracle tests/test_kernels.py",
    ),
    "nccl": Part(
        "{python} -m tests.wired",
        120,
        {"every collective goes through NCCL, the weights stay the same, and no step waits for the device": None},
        needs=("triton",),
        group=1,
        rehearsal="{python} -m tests.wired",
    ),
    "lightning": Part(
        f"{PYTEST} -n 4 {ON_CUDA} 'not cpu and (one_rank or streams or collectives or alike or spawned)'",
        125,
        {"Lightning trains over NCCL and gloo: gradients, updates, updates within backward and delayed": None},
        needs=("xdist",),
        group=1,
        rehearsal=f"{PYTEST} -n 2 {ON_CUDA} 'cpu and (one_rank or streams or collectives or alike or spawned)'",
    ),
    "segment": Part(
        "{python} -m benchmarks.segment --out {out}",
        60,
        SEGMENT,
        "segment.csv",
        needs=("triton",),
        group=2,
        rehearsal="{python} -m benchmarks.segment --rehearse --repetitions 3 --out {out}",
    ),
    "selection": Part(
        "{python} -m benchmarks.selection --parts cuda --contestants torch.topk TopK GaussianK --density 0.001 "
        "--numel 25000000 100000000 400000000 --repetitions 10 --out {out}",
        80,
        SELECTION,
        "selection_cuda.csv",
        needs=("triton",),
        group=3,
        rehearsal="{python} -m benchmarks.selection --parts cuda --rehearse --contestants torch.topk TopK GaussianK "
        f"{SMALL} --density 0.01 --out {{out}}",
    ),
}
SECOND = {
    "gpt": Part(
        "{python} -m benchmarks.gpt --turns 6 --precisions bf16-mixed --contestants ddp topk 'topk, whole model' "
        "'topk updates' 'topk updates within backward' --out {out}",
        110,
        GPT,
        "gpt_cuda.csv",
        needs=("triton",),
        group=4,
        rehearsal="{python} -m benchmarks.gpt --rehearse --turns 2 --out {out}",
    ),
    "nowait": Part(
        f"{PYTEST} -n 13 {ON_CUDA} 'not cpu and (no_step or plain_torch or captured or (two_ranks and some))'",
        150,
        {"no step of 21 methods waits for the device, two runs end with the same bits, two ranks train": None},
        needs=("triton", "xdist"),
        group=5,
        rehearsal=f"{PYTEST} -n 2 {ON_CUDA} 'cpu and ((no_step and topk) or plain_torch or (two_ranks and some))'",
    ),
    "users": Part(
        f"{PYTEST} -n 4 {ON_CUDA} 'not cpu and (programs or loss_scale)'",
        150,
        {"programs of users train in fp32 and in 16-mixed, and ranks end with equal weights": None},
        needs=("xdist",),
        group=5,
        rehearsal=f"{PYTEST} -n 1 {ON_CUDA} 'cpu and programs and True-1'",
    ),
    "memcheck": Part(
        f"{MEMCHECK} --small",
        140,
        {"no kernel reads or writes outside its tensors": None},
        needs=("compute-sanitizer", "triton"),
        group=5,
        rehearsal="TRITON_INTERPRET=1 {python} -m tests.run_kernels --small",
    ),
}
THIRD = {
    "losses": Part(
        "{python} -m benchmarks.gpu_training --out {out}",
        180,
        {"trainings with 11 and 85 M parameters by default end at most 1 % above dense": trains_as_dense},
        "gpu_training.csv",
        needs=("triton",),
        group=6,
        rehearsal="{python} -m benchmarks.gpu_training --rehearse --parts '11 M, P = 2' --out {out}",
    ),
    "links": Part(
        "{python} -m benchmarks.gpu_training --links --rates 1gbit --out {out}",
        140,
        {"at 1 Gbit/s steps of GPT-2 small by default take at most a third of those with ddp": is_fast_over_links},
        "gpu_links.csv",
        needs=("triton", "tc"),
        group=7,
        rehearsal="{python} -m benchmarks.gpu_training --rehearse --links --rates loopback --out {out}",
    ),
}
PARTS = FIRST | SECOND | THIRD
RUNS = {"first": (FIRST, 330), "second": (SECOND, 400), "third": (THIRD, 330)}
"""Parts of a quick run, and its BUDGET in seconds unless one is set."""
FULL_LIMIT = 1800
FULL = {
    "kernels": replace(
        FIRST["kernels"],
        command=f"{PYTEST} -n 8 -m '' {KERNEL_TESTS}",
        group=0,
    ),
    "nccl": replace(FIRST["nccl"], group=1),
    "lightning": replace(FIRST["lightning"], command=f"{PYTEST} -n 4 {ON_CUDA} 'not cpu'", group=2),
    "memcheck": replace(SECOND["memcheck"], command=MEMCHECK, group=3),
    "racecheck": Part(
        f"{SANITIZER} racecheck {{python}} -m tests.run_kernels --small",
        0,
        {"no kernel has a race in shared memory": None},
        needs=("compute-sanitizer", "triton"),
        group=4,
    ),
    "segment": replace(FIRST["segment"], group=5),
    "selection": replace(
        FIRST["selection"],
        command="{python} -m benchmarks.selection --parts cuda --repetitions 10 --out {out}",
        group=6,
    ),
    "gpt": replace(SECOND["gpt"], command="{python} -m benchmarks.gpt --turns 8 --out {out}", group=7),
}
FULL = {name: replace(part, seconds=FULL_LIMIT) for name, part in FULL.items()}


# The runner.


class Ended(NamedTuple):
    """How a part has ended.

    Attributes:
        said: in words, such as "holds" or "cut off after 120 s".
        succeeded: whether its command did; None if that is not known.
        seconds: it took.
        output: of its processes.
    """

    said: str
    succeeded: bool | None
    seconds: float
    output: str


class Running:
    """A running part, in a separate process group."""

    def __init__(self, command: str, seconds: float, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by `end`
        self._seconds = seconds
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            shell=True,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def look(self) -> Ended | None:
        """Return how the part has ended, or None if it runs. Kill the part at its limit."""
        status, seconds = self._process.poll(), time.monotonic() - self._began
        if status is None and seconds < self._seconds:
            return None
        return self.end(f"cut off after {self._seconds:.0f} s" if status is None else "")

    def end(self, why: str) -> Ended:
        """Kill all remaining processes of the part. Workers of a failed test outlive the test, and hold the GPU.

        Args:
            why: reason for the early end, in words; empty if the part has ended by itself.
        """
        seconds, status = time.monotonic() - self._began, self._process.poll()
        if status is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.seek(0)
        output = self._log.read()
        self._log.close()
        if status is None:
            return Ended(why, None, seconds, output)
        return Ended("ended" if status == 0 else f"ended with status {status}", status == 0, seconds, output)

    def _signal(self, which: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)


def environment(out: Path, rehearse: bool) -> dict[str, str]:
    """Return the environment of all parts."""
    values = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    values |= {"PATIENCE": "90"}  # seconds after which a test says where a rank hangs
    values |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(CACHE))}
    # In a rehearsal nothing may find a GPU that is there: its tests would compile.
    return os.environ | values | {"OUT": str(out)} | ({"CUDA_VISIBLE_DEVICES": ""} if rehearse else {})


def missing(part: Part, rehearse: bool) -> str:
    """Return the first program or package that a part needs and that is not there, or an empty text."""
    for name in part.needs:
        if name in ("compute-sanitizer", "tc"):
            if not rehearse and not shutil.which(name):
                return name
        elif importlib.util.find_spec(name) is None:
            return {"triton": "Triton", "xdist": "pytest-xdist"}[name]
    return ""


def verdicts(part: Part, ended: Ended, out: Path, began: float) -> dict[str, str]:
    """Return the verdicts on a part's promises."""
    file = out / part.file
    # Ignore the rows of an earlier run.
    rows = read(file) if part.file and file.exists() and file.stat().st_mtime >= began else []
    unless = {None: OPEN, True: HOLDS, False: BROKEN}[ended.succeeded]
    if part.file:
        # A benchmark refuses wrong results by its status. Rows that it wrote before its limit count.
        return {
            promise: BROKEN if unless == BROKEN else judge(rows) for promise, judge in part.promises.items() if judge
        }
    if "-m pytest" in part.command and unless == HOLDS and "PASSED" not in ended.output:
        unless = OPEN  # all tests were skipped, such as those for NCCL on a torch without it
    return dict.fromkeys(part.promises, unless)


def counted(output: str) -> str:
    """Return how many tests of a part have passed and failed, by pytest's lines; an empty text if there are none."""
    passed, failed = (
        len(re.findall(rf"\b{word}\b.*::|::.*\b{word}\b", output)) for word in ("PASSED", "(?:FAILED|ERROR)")
    )
    return f", {passed} passed, {failed} failed" if passed + failed else ""


class Report:
    """Writes and prints the results of each part as soon as it ends."""

    def __init__(self, out: Path, origin: Mapping[str, str], parts: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._origin, self._file = out, origin, out / "gpu.csv"
        self._most = PRINTED // max(1, parts)
        known = read(self._file) if self._file.exists() else []
        self.rows: dict[tuple[str, str], dict[str, str]] = {(row["part"], row["promise"]): row for row in known}
        self.shown: dict[tuple[str, str], dict[str, str]] = {}

    def add(self, name: str, ended: Ended, found: Mapping[str, str]) -> None:
        """Keep how a part has ended."""
        said = f"{ended.said}{counted(ended.output)}"
        for promise, verdict in found.items():
            row = {"promise": promise, "part": name, "verdict": verdict, "seconds": f"{ended.seconds:.1f}"}
            row |= {"ended": said, **self._origin}
            self.rows[name, promise] = self.shown[name, promise] = row
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        with self._file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows.values())
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n===== {name}: {said}, {ended.seconds:.0f} s\n{ended.output[-LOG_BYTES:]}\n")
        worst = next((verdict for verdict in (BROKEN, OPEN) if verdict in found.values()), HOLDS)
        print(
            f"\n== {name}: {said}, {ended.seconds:.0f} s\n{ended.output[-min(self._most, SHOWN[worst]) :].strip()}",
            flush=True,
        )

    def end(self) -> int:
        """Print all verdicts; return the exit status."""
        print()
        for row in self.shown.values():
            print(f"{row['verdict']:14} {float(row['seconds']):6.1f} s  {row['promise']} ({row['part']})")
        return int(any(row["verdict"] != HOLDS for row in self.shown.values()))


def run(parts: Mapping[str, Part], out: Path, budget: float, rehearse: bool, origin: Mapping[str, str]) -> int:
    """Run parts, group by group; return the exit status."""
    report, end = Report(out, origin, len(parts)), time.monotonic() + budget
    variables = environment(out, rehearse)
    running: dict[str, tuple[Running, float]] = {}

    def settle(name: str, ended: Ended, began: float) -> None:
        report.add(name, ended, verdicts(parts[name], ended, out, began))

    try:
        for group in sorted({part.group for part in parts.values()}):
            for name, part in parts.items():
                if part.group != group:
                    continue
                left = end - time.monotonic() - RESERVE
                if lacking := missing(part, rehearse):
                    settle(name, Ended(f"not run: {lacking} is not installed", None, 0, ""), time.time())
                elif left < LEAST:
                    why = f"not run: {max(0, left):.0f} s are left of BUDGET={budget:g}, and a part needs {LEAST:.0f}"
                    settle(name, Ended(why, None, 0, ""), time.time())
                else:
                    command = (part.rehearsal if rehearse else part.command).format(
                        python=f"'{sys.executable}'", out=f"'{out}'"
                    )
                    limit = min(REHEARSED if rehearse else part.seconds, left)
                    running[name] = Running(command, limit, variables), time.time()
            while running:
                for name, (process, began) in list(running.items()):
                    if (ended := process.look()) is not None:
                        del running[name]
                        settle(name, ended, began)
                time.sleep(0.1)
    except KeyboardInterrupt:
        for name, (process, began) in running.items():
            settle(name, process.end("interrupted"), began)
        report.end()
        print("Interrupted. What the parts above have shown is kept.")
        return 130
    return report.end()


def chosen_parts(mode: str, names: Sequence[str], rehearse: bool) -> tuple[dict[str, Part], float]:
    """Return the parts to run, by name, and the budget in seconds unless one is set.

    Raises:
        ValueError: an unknown part.
    """
    known = FULL if mode == "full" else PARTS
    runs: dict[str, tuple[Mapping[str, Part], float]] = {} if mode == "full" else dict(RUNS)
    names = names or (list(known) if mode == "full" or rehearse else ["first"])
    parts: dict[str, Part] = {}
    for name in names:
        if name not in known and name not in runs:
            raise ValueError(f"unknown part {name!r}: choose from {', '.join([*runs, *known])}")
        parts |= runs[name][0] if name in runs else {name: known[name]}
    if mode == "full" or rehearse:
        return parts, sum(REHEARSED if rehearse else part.seconds for part in parts.values())
    return parts, max((budget for name, (_, budget) in runs.items() if name in names), default=RUNS["second"][1])


def described(rehearse: bool) -> Iterator[str]:
    """Yield a line for each thing about this machine that makes results mean less; exit without a GPU."""
    import torch

    if rehearse:
        yield "A rehearsal on the CPU, with stand-ins: verdicts about times mean nothing."
        return
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here. Rehearse on the CPU: python -m tests.gpu quick --rehearse")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    yield f"{name}, torch {torch.__version__}"
    if capability < (7, 0):
        yield f"{name} is older than compute capability 7.0, which Triton needs: kernels are plain torch."
    elif capability != (9, 0):
        yield f"{name} is no H100 or H200: times in μs are not judged, and a carried cache is not hit."
    version = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    if not version:
        yield "Triton is not installed: the parts that need it are not run."
    elif version != TRITON:
        yield f"Triton {version} is installed: a cache made for {TRITON} is not hit, and all kernels are compiled here."


def budget_of(given: str | None, usual: float) -> float:
    """Return the budget in seconds that BUDGET says.

    Raises:
        ValueError: it is no positive number.
    """
    try:
        budget = usual if given is None else float(given)
    except ValueError:
        budget = 0.0
    if not 0 < budget < float("inf"):
        raise ValueError(f"BUDGET={given!r}: give the seconds that the whole run may take, such as BUDGET=330.")
    return budget


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["quick", "full"], help="three runs of up to seven minutes each, or everything")
    known = f"quick: {', '.join([*RUNS, *PARTS])}; default: first. full: {', '.join(FULL)}; default: all"
    parser.add_argument("parts", nargs="*", metavar="part", help=known)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, with stand-ins; default: all parts")
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, help=f"where results are written, default: {folder}")
    given = parser.parse_args(arguments)
    if given.rehearse and given.mode == "full":
        parser.error("--rehearse goes with quick")
    try:
        parts, usual = chosen_parts(given.mode, given.parts, given.rehearse)
        budget = budget_of(os.environ.get("BUDGET"), usual)
    except ValueError as error:
        parser.error(str(error))
    if given.rehearse and given.out is None and not os.environ.get("OUT"):
        parser.error("--rehearse needs --out: a rehearsal must not replace results of a GPU")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that measured results are kept
    for line in described(given.rehearse):
        print(line, flush=True)
    if not given.rehearse and (unpacked := unpack()):
        print(unpacked)
    sys.exit(run(parts, (given.out or folder).expanduser().resolve(), budget, given.rehearse, origin(given.rehearse)))


def origin(rehearse: bool) -> dict[str, str]:
    """Return the columns that say where verdicts come from."""
    import torch

    name = "CPU, a rehearsal" if rehearse else torch.cuda.get_device_name()
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    return {"device": name, "torch": torch.__version__, "triton": triton, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    main()
