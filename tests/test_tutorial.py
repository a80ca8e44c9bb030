"""The tutorial notebook runs, and shows that a sparse strategy needs the link less."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import full

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tutorial.ipynb"


@full
def test_the_notebook_runs_and_the_sparse_strategy_needs_the_link_less(tmp_path):
    """The notebook itself compares weights after a resume. The link's seconds are computed, so no load changes them."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    text = NOTEBOOK.read_text()
    assert "STEPS = 120" in text
    (tmp_path / NOTEBOOK.name).write_text(text.replace("STEPS = 120", "STEPS = 40"))
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", NOTEBOOK.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = tmp_path / "runs" / "tutorial"
    stock, sparse, resumed = (
        [json.loads(line) for line in (runs / name / "curve.jsonl").read_text().splitlines()]
        for name in ("ddp", "sparse", "resumed")
    )
    assert [point["step"] for point in sparse] == [point["step"] for point in stock]
    assert all(points[-1]["loss"] < points[0]["loss"] - 0.5 for points in (stock, sparse))
    assert sparse[-1]["link"] < 0.1 * stock[-1]["link"]
    assert [(point["step"], point["loss"]) for point in resumed] == [
        (point["step"], point["loss"]) for point in sparse[len(sparse) // 2 :]
    ]
    cells = json.loads((tmp_path / NOTEBOOK.name).read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4  # three curves, and the histograms
