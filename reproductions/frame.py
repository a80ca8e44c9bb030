"""Common code of all findings: config as options, interruptible runs, a CSV file, a figure and a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.harness import plots, table
from benchmarks.harness.table import Row

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """A claim of a paper, and its reproduction.

    Attributes:
        name: name of the command, the CSV file and the figure.
        config: default by name of each setting: an `int`, a `float` or a `str`. A setting is an option of the command
            line and a column of the CSV file. Numbers must be above 0, except that a seed may be 0.
        key: columns that identify a run.
        cases: function from config to the key columns of each run. It raises ValueError if the config is invalid.
        run: function from key columns and config to the results: further columns of one row or of several rows.
        draw: function from the table of all runs to a figure.
        verdict: function from this table to a sentence that says whether the finding held.
        digits: number of significant digits of floats in the CSV file.
    """

    name: str
    config: Config
    key: tuple[str, ...]
    cases: Callable[[Config], list[Row]]
    run: Callable[[Row, Config], Row | list[Row]]
    draw: Callable[[pd.DataFrame], Any]
    verdict: Callable[[pd.DataFrame], str]
    digits: int = 4

    def __post_init__(self) -> None:
        if both := {*self.key} & {*self.config}:
            raise ValueError(f"Finding {self.name!r}: {', '.join(sorted(both))} cannot be config and key.")

    @property
    def figure(self) -> plots.Figure:
        """Return the figure."""
        return plots.Figure(self.name, lambda out: self.draw(table.load(self.path(out))), (self.name,))

    def path(self, out: Path) -> Path:
        """Return the path of the CSV file in the folder `out`. The figure's path differs only in the suffix."""
        return out / f"{self.name}.csv"


def reproduce(finding: Finding, config: Config, out: Path) -> None:
    """Do the runs that the CSV file lacks, and write each when it ends. Then draw the figure and print the verdict.

    Raises:
        SystemExit: the config is invalid or differs from that of the file, or the user pressed Ctrl-C.
    """
    config = checked(config)
    path = finding.path(out)
    known = texts_of(finding, out)
    for name, value in config.items():
        others = sorted(set(known[name]) - {table.text(value, finding.digits)}) if len(known) else []
        if others:
            raise SystemExit(
                f"{path} was created with {name}={others[0]}, not {value}: give another folder, --out, or delete it."
            )
    cases = cases_of(finding, config)
    todo = missing(finding, cases, known)
    print(f"{finding.name}: {len(todo)} of {len(cases)} runs to do, {', '.join(f'{k}={v}' for k, v in config.items())}")
    torch.set_num_threads(1)  # ranks are threads or forked processes
    started = time.perf_counter()
    try:
        for number, case in enumerate(todo, 1):
            before = time.perf_counter()
            found = finding.run(case, config)
            rows = found if isinstance(found, list) else [found]
            seconds = time.perf_counter() - before
            stamp = {**config, "seconds": seconds, **table.origin("scikit-learn")}
            table.save(path, [{**case, **row, **stamp} for row in rows], finding.key, finding.digits)
            left = (time.perf_counter() - started) / number * (len(todo) - number)
            said = ", ".join(
                f"{name}={table.text(value, 3)}" for name, value in (case | rows[-1]).items() if value != ""
            )
            print(f"[{number}/{len(todo)}] {said} ({seconds:.1f} s, about {left:.0f} s left)", flush=True)
    except KeyboardInterrupt:
        kept = f"{path} contains all completed runs" if path.exists() else "No run is complete"
        raise SystemExit(f"\nInterrupted. {kept}; run the same command to continue.") from None
    redraw(finding, out)


def redraw(finding: Finding, out: Path) -> None:
    """Draw the figure from the CSV file, and print the verdict.

    Raises:
        SystemExit: the file does not exist, or it lacks runs.
    """
    path = finding.path(out)
    texts = texts_of(finding, out)
    command = f"python -m reproductions {finding.name} --out {out}"
    if texts.empty:
        raise SystemExit(f"{path}: there is nothing to draw yet; run: {command}")
    config = {name: type(default)(texts[name].iloc[0]) for name, default in finding.config.items()}
    cases = cases_of(finding, config)
    if lacking := missing(finding, cases, texts):
        raise SystemExit(f"{path} lacks {len(lacking)} runs of {len(cases)}; run again: {command}")
    found = table.load(path)
    finding.figure.write(out)
    print(finding.verdict(found))


def texts_of(finding: Finding, out: Path) -> pd.DataFrame:
    """Return the runs in a folder's CSV file as text; no runs if there is no file.

    Raises:
        SystemExit: the file does not belong to this finding.
    """
    if out.exists() and not out.is_dir():
        raise SystemExit(f"--out {out}: this is a file; give a folder.")
    path = finding.path(out)
    try:
        texts = table.load_texts(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} is not a table ({error}): give another folder, --out, or delete it.") from None
    if len(texts) and (absent := {*finding.key, *finding.config} - {*texts}):
        raise SystemExit(
            f"{path} does not belong to {finding.name!r}, because it has no column {', '.join(sorted(absent))}: give "
            f"another folder, --out, or delete it."
        )
    return texts


def cases_of(finding: Finding, config: Config) -> list[Row]:
    """Return the key columns of each run; exit if the config is invalid."""
    try:
        return finding.cases(config)
    except ValueError as error:
        raise SystemExit(f"{finding.name}: {error}") from None


def missing(finding: Finding, cases: Iterable[Row], known: pd.DataFrame) -> list[Row]:
    """Return the cases for which a table of texts has no row."""
    key = list(finding.key)
    done = set(known[key].itertuples(index=False, name=None)) if len(known) else set()
    return [case for case in cases if tuple(table.text(case[name], finding.digits) for name in key) not in done]


def checked(config: Config) -> Config:
    """Return the config; exit if a number is out of range."""
    for name, value in config.items():
        least = 0 if name == "seed" else None
        if not isinstance(value, str) and not (value > 0 or value == least):
            raise SystemExit(f"--{name} {value}: must be a number {'0 or more' if least == 0 else 'above 0'}.")
        if name == "density" and value > 1:
            raise SystemExit(f"--density {value}: must be a share of the entries, at most 1.")
    return config


def held(yes: bool) -> str:
    """Return the first words of a verdict."""
    return "Held here: " if yes else "Did not hold here: "
