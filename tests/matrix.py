"""Runs the quick tests with other versions of torch, Lightning and Python, and writes the results as a table.

    python -m tests.matrix            # every row, one after the other
    python -m tests.matrix oldest     # only this row; the other rows of the table are kept

Each row uses a fresh environment in a temporary folder. Only Python is required. If a row's Python version is missing,
the row uses the current Python, and the table shows its version.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "matrix.csv"
TABLE = ROOT / "docs" / "matrix.md"

# Row to Python, and constraints for pip.
ROWS = {
    "oldest": ("3.10", None),  # of everything that setup.cfg names, its lower bound
    "2.11": ("3.12", ["torch==2.11.*"]),
    "2.13": ("3.11", ["torch==2.13.*"]),
    "2.14": ("3.13", ["torch==2.14.*"]),
    "newest": ("3.15", []),
}
TESTS = (
    ["tests", "-m", "not full and not exhaustive", "-n", "2", "--dist", "loadgroup"],
    # Compile the kernels with the compilers of other versions.
    [
        "tests/test_kernels.py::test_whole_steps_compile_for_gpus",
        "tests/test_kernels.py::test_kernels_compile_for_gpus",
    ],
)
COLUMNS = ("row", "torch", "lightning", "triton", "python", "passed", "skipped", "failed", "failures", "date")
VERSIONS = """
import importlib.metadata, importlib.util, platform, torch
of = importlib.metadata.version
triton = of("triton") if importlib.util.find_spec("triton") else ""
print(torch.__version__, of("pytorch-lightning"), platform.python_version(), triton, sep=",")
"""


def lower_bounds() -> list[str]:
    """Return a constraint for each requirement of the package and of the tests: the oldest version that it allows."""
    lines = (ROOT / "setup.cfg").read_text() + (ROOT / "pyproject.toml").read_text()
    named = re.finditer(r'^ +"?([\w-]+)(?:\[.*\])?>=([\d.]+)', lines, re.MULTILINE)
    tools = (
        "ruff",
        "mypy",
        "mkdocs-material",
        "mkdocstrings",
    )  # for developers: the newest
    return [f"{found[1]}=={found[2]}" for found in named if found[1] not in tools]


def python_of(version: str) -> str:
    """Return a Python of that version which runs, or else the present one."""
    found = shutil.which(f"python{version}")
    runs = found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
    return found if found and runs else sys.executable


def tested(row: str) -> dict[str, object]:
    """Make a row's environment, run the tests in it, and return the row of the table."""
    version, constraints = ROWS[row]
    with tempfile.TemporaryDirectory(prefix="matrix") as folder:
        subprocess.run([python_of(version), "-m", "venv", f"{folder}/venv"], check=True)
        python = f"{folder}/venv/bin/python"
        limits = Path(folder, "constraints.txt")
        limits.write_text("\n".join(lower_bounds() if constraints is None else constraints))
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", str(limits)]
        subprocess.run([*pip[:-2], "--upgrade", "pip>=25.1"], check=True)  # the first with --group
        subprocess.run([*pip, "--editable", ".[cli,cuda,examples]", "--group", "dev"], cwd=ROOT, check=True)
        said = subprocess.run([python, "-c", VERSIONS], cwd=folder, check=True, capture_output=True, text=True).stdout
        torch, lightning, own, triton = said.strip().split(",")
        # Old versions of other packages use features that their dependencies have deprecated since.
        tolerated = ["-W", "default::DeprecationWarning"] if constraints is None else []
        outcomes: list[tuple[str, str, str]] = []
        for number, tests in enumerate(TESTS):
            report = Path(folder, f"report{number}.xml")
            command = [python, "-m", "pytest", *tolerated, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
            subprocess.run([*command, *tests], cwd=ROOT, check=False)
            outcomes += outcomes_of(report) if report.exists() else [("pytest", "failed", "it did not start")]
    failures = [f"{name}: {why}" for name, outcome, why in outcomes if outcome == "failed"]
    counts = {kind: sum(outcome == kind for _, outcome, _ in outcomes) for kind in ("passed", "skipped", "failed")}
    about = {"row": row, "torch": torch, "lightning": lightning, "triton": triton or "none", "python": own}
    return {**about, **counts, "failures": " / ".join(failures), "date": date.today().isoformat()}


def outcomes_of(report: Path) -> Iterator[tuple[str, str, str]]:
    """Go through pytest's report: each test's name, passed, skipped or failed, and the first line of why."""
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
        why = "" if found is None else (found.get("message") or "").split("\n")[0][:200]
        yield f"{case.get('classname')}.{case.get('name')}", outcome, why


def write(rows: dict[str, dict[str, object]]) -> None:
    """Write the table, as CSV and to be read."""
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[row] for row in ROWS if row in rows)
    shown = ("torch", "lightning", "triton", "python", "passed", "skipped", "failed")
    titles = {"lightning": "Lightning", "triton": "Triton", "python": "Python"}
    lines = [
        "# Versions",
        "",
        "`make matrix` runs the quick tests on a CPU, each row in a fresh environment. It writes this page;",
        "do not edit it. Kernels run in Triton's interpreter, and are compiled for GPUs. The oldest row has the lowest",
        "supported version of every package. The newest has the versions that pip chose.",
        "",
        "| | " + " | ".join(titles.get(name, name) for name in shown) + " | date |",
        "|---" * (len(shown) + 2) + "|",
    ]
    lines += [
        f"| {row} | " + " | ".join(str(rows[row][name]) for name in shown) + f" | {rows[row]['date']} |"
        for row in ROWS
        if row in rows
    ]
    for row in ROWS:
        if row in rows and rows[row]["failures"]:
            lines += [
                "",
                f"Failed in the row {row}:",
                "",
                *(f"- {each}" for each in str(rows[row]["failures"]).split(" / ")),
            ]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")


def main(names: list[str]) -> None:
    """Run the rows with these names, or all, and update the table after each."""
    if unknown := set(names) - ROWS.keys():
        sys.exit(f"python -m tests.matrix {' '.join(sorted(unknown))}: choose from {', '.join(ROWS)}.")
    rows: dict[str, dict[str, object]] = {}
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            rows = {row["row"]: dict(row) for row in csv.DictReader(file)}
    for name in names or ROWS:
        rows[name] = tested(name)
        write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
