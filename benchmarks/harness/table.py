"""Reads and writes CSV files of results, replaces rows by key, and adds library versions and hardware."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

Row = dict[str, Any]


def load(path: Path) -> pd.DataFrame:
    """Read a CSV file; return an empty table if it does not exist. Empty cells of text columns are ""."""
    if not path.exists():
        return pd.DataFrame()
    table = pd.read_csv(path)
    texts = table.select_dtypes(exclude=["number", "bool"]).columns
    return table.fillna(dict.fromkeys(texts, "")).astype(dict.fromkeys(texts, object))


def load_texts(path: Path) -> pd.DataFrame:
    """Read all cells of a CSV file as text; return an empty table if the file does not exist."""
    return pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame()


def save(
    path: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str] | None = None, digits: int | None = None
) -> pd.DataFrame:
    """Write rows to a CSV file atomically: a reader, or an interruption, never sees a partial file.

    Args:
        path: path of the file. A missing folder is created.
        rows: one mapping per row, from column to value. Missing values become empty cells. Without rows, the file does
            not change.
        key: columns that identify a row. A new row replaces old rows with equal values in these columns. All other rows
            are kept unchanged. None replaces the whole file.
        digits: number of significant digits of floats; None writes all digits.

    Returns:
        The written table, as text.
    """
    new = pd.DataFrame([{column: text(value, digits) for column, value in row.items()} for row in rows]).fillna("")
    if new.empty:
        return new
    if key is not None and path.exists():
        old = load_texts(path)
        replaced = set(new[list(key)].itertuples(index=False, name=None))
        kept = [row not in replaced for row in old[list(key)].itertuples(index=False, name=None)]
        new = pd.concat([old[kept], new]).fillna("")
    with replacing(path) as temporary:
        new.to_csv(temporary, index=False, lineterminator="\n")
    return new


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def text(value: Any, digits: int | None = None) -> str:
    """Return the text of a cell."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) and digits else str(value)


def origin(*packages: str) -> Row:
    """Return the columns that describe the origin of results: versions, processor, date."""
    return {
        **{name.replace("-", "_"): installed(name) for name in ("lightning_sparse", "torch", *packages)},
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": cores(),
        "date": time.strftime("%Y-%m-%d"),
    }


def installed(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
