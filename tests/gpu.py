"""All that needs a GPU, in parts of less than ten minutes each, and which promises hold.

    python3 -m tests.gpu                                     # all parts, one after the other: about half an hour
    python3 -m tests.gpu kernels lightning --out ~/results   # some of them

Runs from the root of the repository with whatever Python has torch and what the extra `dev` lists; it needs no network
and installs nothing. Results, and gpu.csv with a row for each promise, are written to `--out`; a part that is run again
replaces its rows, so that parts may be run by several commands. The exit status is 1 unless all that was asked for
holds.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 560
"""A part is cut off after these."""
HOLDS, BROKEN, OPEN = "holds", "does not hold", "not shown"
Rows = list[dict[str, str]]


def read(file: Path) -> Rows:
    """Return the rows of a CSV file."""
    return list(csv.DictReader(file.read_text().splitlines()))


def within(rows: Iterable[dict[str, str]]) -> str:
    """Say whether all rows with a limit are within it."""
    said = [row["within"] for row in rows if row.get("within")]
    return OPEN if not said else HOLDS if set(said) == {"True"} else BROKEN


def topk_steps(rows: Rows) -> Rows:
    """Return the rows of whole steps with TopK at the smallest density, from a cold cache where that was asked."""
    rows = [row for row in rows if (row["part"], row["contestant"]) == ("step", "TopK")]
    rows = [row for row in rows if row.get("cache", "cold") == "cold"]
    least = min((float(row["density"]) for row in rows), default=0.0)
    return [row for row in rows if float(row["density"]) == least]


def faster(rows: Rows) -> str:
    """Say whether steps with TopK are so many times faster than those with torch.topk as is promised."""
    wanted = {1_000_000: 1, 25_000_000: 3, 100_000_000: 4, 400_000_000: 4}
    shares = {int(row["numel"]): float(row["times_torch.topk"]) for row in topk_steps(rows)}
    if not wanted.keys() <= shares.keys():
        return OPEN
    return HOLDS if all(shares[numel] <= 1 / times for numel, times in wanted.items()) else BROKEN


@dataclass(frozen=True)
class Part:
    """A command, and what it shows.

    Attributes:
        command: what Python runs, with `--out` behind it if there is a `file`.
        promises: each with a function of the rows of `file`; None: it holds if the command succeeds.
        file: what the command writes.
        tool: what it needs beside Python, and how it is called.
    """

    command: str
    promises: dict[str, Callable[[Rows], str] | None]
    file: str = ""
    tool: str = ""


PARTS = {
    "kernels": Part(
        "-m pytest -q -m '' tests/test_kernels.py",
        {"kernels select, add and pack to the same bits as plain torch": None},
    ),
    "updates": Part(
        "-m pytest -q -m '' tests/test_payout.py",
        {"kernels form, rescale and pay out updates as plain torch does": None},
    ),
    "lightning": Part(
        "-m pytest -q -m '' tests/integration/test_cuda.py -k 'not cpu'",
        {"Lightning trains over NCCL; no step waits for the device; every run ends with the same bits": None},
    ),
    "memcheck": Part(
        "-m tests.run_kernels",
        {"no kernel reads or writes where it must not": None},
        tool="compute-sanitizer --tool memcheck --error-exitcode 1",
    ),
    "racecheck": Part(
        "-m tests.run_kernels",
        {"no kernel has a race": None},
        tool="compute-sanitizer --tool racecheck --error-exitcode 1",
    ),
    "selection": Part(
        "-m benchmarks.selection --parts cuda --repetitions 10 --density 0.001",
        {
            "a step with TopK takes at most its limit of copies, and its scratch": lambda rows: within(
                topk_steps(rows)
            ),
            "a step with TopK is up to 4 times faster than with torch.topk": faster,
        },
        file="selection_cuda.csv",
    ),
    "gpt": Part(
        "-m benchmarks.gpt --turns 8",
        {"what a step of GPT-2 takes longer than with DDP is within its limit": within},
        file="gpt_cuda.csv",
    ),
}


def run(name: str, out: Path, python: str = sys.executable) -> dict[str, str]:
    """Run a part and return what became of its promises."""
    part = PARTS[name]
    if part.tool and not shutil.which(part.tool.partition(" ")[0]):
        print(f"{part.tool.partition(' ')[0]} is not installed: {name} was not run")
        return dict.fromkeys(part.promises, OPEN)
    command = f"exec {part.tool} '{python}' {part.command}" + (f" --out '{out}'" if part.file else "")
    # Without torch's cache each tensor is an allocation of its own, so that nobody reads past its end unseen.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if name == "memcheck" else {})
    started = time.time()
    try:
        status = subprocess.run(command, shell=True, cwd=ROOT, env=environment, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"{name} was cut off after {SECONDS} seconds")
        status = None
    file = out / part.file
    # Not of an earlier run.
    rows = read(file) if part.file and file.exists() and file.stat().st_mtime >= started else []
    unless = OPEN if status is None else BROKEN
    return {
        promise: (HOLDS if status == 0 else unless) if judge is None else judge(rows) if rows else unless
        for promise, judge in part.promises.items()
    }


def main(arguments: Any = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"unknown part {min(unknown)!r}: choose from {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here")
    report(given.parts or list(PARTS), given.out.expanduser().resolve(), {"device": torch.cuda.get_device_name()})


def report(parts: Iterable[str], out: Path, origin: dict[str, str]) -> None:
    """Run parts, keep what each has shown, and print all that is known; exit with 1 unless theirs hold."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "gpu.csv"
    known = {row["promise"]: row for row in read(file)} if file.exists() else {}
    asked: set[str] = set()
    for name in parts:
        print(f"\n== {name}", flush=True)
        for promise, verdict in run(name, out).items():
            known[promise] = {"promise": promise, "part": name, "verdict": verdict, **origin}
            asked.add(promise)
        with file.open("w", newline="") as opened:  # after each part, as the next may be the last
            writer = csv.DictWriter(opened, ["promise", "part", "verdict", *origin], restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(known.values())
    print()
    for name, part in PARTS.items():
        for promise in part.promises:
            print(f"{known.get(promise, {}).get('verdict', OPEN):14} {promise} ({name})")
    sys.exit(int(any(known[promise]["verdict"] != HOLDS for promise in asked)))


if __name__ == "__main__":
    main()
