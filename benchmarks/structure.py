"""How much code there is, and how much of it one segment passes through, as numbers to hold against another commit.

    python -m benchmarks.structure
    PYTHONPATH=../before python benchmarks/structure.py   # another commit's working copy

Printed: functions called, files entered, and calls from one file to another, while one of two ranks (threads) reduces a
segment of 100,000 elements in its third step; and lines, the longest file and the longest class.
"""

from __future__ import annotations

import ast
import sys
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
        if event == "call" and file_of(frame) and frame.f_code.co_name != "reduce_":
            above = frame.f_back
            while above is not None and not file_of(above):
                above = above.f_back
            seen.append((file_of(above) if above else "", file_of(frame)))

    def file_of(frame: FrameType) -> str:
        file = frame.f_code.co_filename
        return file if file.startswith(str(PACKAGE)) else ""

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


if __name__ == "__main__":
    for name in ("topk", "gtopk", "oktopk"):
        print("{}: {} calls, {} files, {} from one file to another".format(name, *calls(name)))
    sources = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    files = sorted((len(source.splitlines()), str(path)) for path, source in sources.items())
    classes = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{node.name} in {path}")
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]
    print(f"{sum(count for count, _ in files):,} lines in {len(files)} files; longest: {files[-1]}, {max(classes)}")
