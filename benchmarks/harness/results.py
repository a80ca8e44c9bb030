"""CSV files of results: read, replace rows by key, write with library versions and hardware."""

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

RESULTS = Path(__file__).parents[1] / "results"

Row = dict[str, Any]


def command_line(doc: str | None, figure: bool = True) -> argparse.ArgumentParser:
    """Return a parser that prints a script's docstring as help; with `--out`, and `--figure` if the script draws."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder, default: benchmarks/results")
    if figure:
        parser.add_argument("--figure", action="store_true", help="measure nothing, draw what was measured")
    return parser


def load(path: Path) -> pd.DataFrame:
    """Read a CSV file; an empty table if there is none. Empty cells of text columns are ""."""
    if not path.exists():
        return pd.DataFrame()
    table = pd.read_csv(path)
    texts = table.select_dtypes(exclude=["number", "bool"]).columns
    return table.fillna(dict.fromkeys(texts, "")).astype(dict.fromkeys(texts, object))


def save(
    path: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str] | None = None, digits: int | None = None
) -> pd.DataFrame:
    """Write rows to a CSV file.

    Args:
        path: of the file. Its folder is made if it is missing.
        rows: one mapping per row, column to value; missing values are written as empty cells. Without rows the file is
            left as it is.
        key: rows of the file that agree with a new row in these columns are replaced, the others stay, text for text.
            None replaces the whole file.
        digits: significant digits of floats; None writes them in full.

    Returns:
        The table written, as text.
    """
    new = pd.DataFrame([{column: text(value, digits) for column, value in row.items()} for row in rows]).fillna("")
    if new.empty:
        return new
    if key is not None and path.exists():
        old = pd.read_csv(path, dtype=str, keep_default_na=False)
        replaced = set(new[list(key)].itertuples(index=False, name=None))
        kept = [row not in replaced for row in old[list(key)].itertuples(index=False, name=None)]
        new = pd.concat([old[kept], new]).fillna("")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.to_csv(path, index=False, lineterminator="\n")
    return new


def text(value: Any, digits: int | None = None) -> str:
    """Return the text of a cell."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) and digits else str(value)


def origin(*packages: str) -> Row:
    """Return the columns that say where figures come from: versions, processor, date."""
    return {
        **{name.replace("-", "_"): installed(name) for name in ("lightning_sparse", "torch", *packages)},
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def installed(package: str) -> str:
    """Return the version of a package, "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def device() -> Row:
    """Return the columns that say where figures of a GPU come from."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        **origin("triton"),
    }
