"""How much code there is, and how much of it one segment passes through, as numbers to hold against another commit.

    python -m benchmarks.structure
    PYTHONPATH=../before python benchmarks/structure.py   # another commit's working copy

Printed: functions called, files entered, and calls from one file to another, while one of two ranks (threads) reduces a
segment of 100,000 elements in its third step; and lines per folder, the longest file and the longest class.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lightning_sparse
from lightning_sparse import Comm, Reducer, method, simulate

PACKAGE = Path(lightning_sparse.__file__).parent
NUMEL, STEPS = 100_000, 3


def calls(name: str) -> tuple[int, int, int]:
    """Return functions called, files entered and calls from file to file on rank 0, of the package alone."""
    seen: list[tuple[str, str]] = []  # the caller's file, and the called function's

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        called = frame.f_code.co_filename
        if event == "call" and called.startswith(str(PACKAGE)) and frame.f_code.co_name != "reduce_":
            above = frame.f_back
            while above is not None and not above.f_code.co_filename.startswith(str(PACKAGE)):
                above = above.f_back
            seen.append((above.f_code.co_filename if above else "", called))

    def rank(comm: Comm) -> None:
        reducer = Reducer(method(name, density=0.001), comm)
        for step in range(STEPS):
            grads = {"w": torch.randn(NUMEL, generator=torch.Generator().manual_seed(comm.rank))}
            if comm.rank == 0 and step == STEPS - 1:
                sys.setprofile(profile)
            reducer.reduce_(grads)
            sys.setprofile(None)

    simulate(2, rank)
    return len(seen), len({called for _, called in seen}), sum(caller != called for caller, called in seen)


def main() -> None:
    """Print all."""
    for name in ("topk", "gtopk", "oktopk"):
        functions, files, crossings = calls(name)
        print(f"{name}: {functions} calls, {files} files, {crossings} from one file to another")
    lines = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    folders: Counter[str] = Counter()
    for path, count in lines.items():
        folders[path.parts[0] if len(path.parts) > 1 else "top level"] += count
    print(f"{sum(lines.values()):,} lines in {len(lines)} files: {dict(sorted(folders.items()))}")
    classes = {
        f"{node.name} in {path}": (node.end_lineno or 0) - node.lineno + 1
        for path in lines
        for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    longest, largest = max(lines, key=lambda path: lines[path]), max(classes, key=lambda name: classes[name])
    print(f"longest file: {longest}, {lines[longest]} lines; longest class: {largest}, {classes[largest]} lines")


if __name__ == "__main__":
    main()
