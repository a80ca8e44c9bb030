"""CSV files of results in the format of `table`, and the command line of a benchmark."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.harness.table import Row, installed, load, origin, save, text

__all__ = ["RESULTS", "Row", "command_line", "device", "installed", "load", "origin", "save", "text"]

RESULTS = Path(__file__).parents[1] / "results"


def command_line(doc: str | None, figure: bool = True) -> argparse.ArgumentParser:
    """Return a parser with a script's docstring as help, with `--out`, and with `--figure` if the script draws one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results. Default: benchmarks/results")
    if figure:
        parser.add_argument("--figure", action="store_true", help="only draw the figure from existing results")
    return parser


def missing(table: pd.DataFrame, runs: Sequence[Any]) -> list[Any]:
    """Return the runs (named tuples) for which a table has no row with equal fields."""
    done = set(table.reindex(columns=runs[0]._fields).itertuples(index=False, name=None))
    return [run for run in runs if run not in done]


def save_each(path: Path, runs: Sequence[Any], do: Callable[[Any], list[Row]], digits: int | None = None) -> None:
    """Do the runs (named tuples). After each run write its rows, which replace rows with equal fields."""
    for run in runs:
        print(run, end=": ", flush=True)
        started = time.time()
        rows = do(run)
        save(path, [run._asdict() | row | origin() for row in rows], run._fields, digits)
        print(f"{rows[-1]}, {time.time() - started:.0f} s", flush=True)


def device() -> Row:
    """Return the columns that describe the GPU and its software."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        **origin("triton"),
    }
