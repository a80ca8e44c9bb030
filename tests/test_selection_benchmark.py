"""The selection benchmark on CUDA: its comparison and its figure."""

import csv

import pytest
import torch

from benchmarks import selection
from benchmarks.harness.rehearsal import rehearsal
from lightning_sparse.compressors import TopK
from lightning_sparse.kernels.chunks import CHUNK
from tests import run_kernels
from tests.support.tiers import full


def timed(part, contestant, ms, **more):
    return {"part": part, "contestant": contestant, "ms": ms, **more}


def test_times_are_held_against_the_floor_and_against_each_other():
    rows = [
        timed("copy", "copy_", 2.0),
        timed("selection", "torch.topk", 30.0),
        timed("selection", "TopK", 3.0),
        timed("step", "torch.topk", 42.0),
        timed("step", "TopK", 3.9, scratch=0.21),
        timed("step", "GaussianK", 7.8),
        timed("step", "TopK, CUDA graph", 3.9),
    ]
    copy, naive, exact, step_naive, step, gaussian, graph = selection.compared(rows, 400_000_000, 0.001)
    assert copy["times_floor"] == pytest.approx(2 / 3)
    assert naive["times_TopK"] == 10
    assert exact["times_torch.topk"] == pytest.approx(0.1)
    assert step_naive["times_floor"] == 14
    assert gaussian["times_TopK"] == pytest.approx(2)
    # 1.3 floors are allowed, which both keep to, and 0.2 of scratch.
    assert (step["limit"], step["within"]) == (1.3, False)
    assert (graph["limit"], graph["within"]) == (1.3, True)
    assert "limit" not in gaussian
    step["scratch"] = 0.2
    assert [row.get("within") for row in selection.compared([copy, step], 400_000_000, 0.001)] == [None, True]


def test_chunks_are_checked_all_at_once(monkeypatch):
    """Chunk by chunk the host would wait for the device 400,000 times at 400 million elements."""
    u = torch.randint(-50, 50, (100 * CHUNK + 77,)).float()  # ties, of which the first are right
    chosen = selection.sparsifiers(0.001)["ChunkTopK"].select(u)
    calls, check = [], selection.check
    monkeypatch.setattr(selection, "check", lambda *args: (calls.append(args), check(*args)))
    selection.check("ChunkTopK", u, chosen, 0.001)
    assert len(calls) == 2  # and one for the last, which is shorter
    for wrong in (chosen[1:], chosen[:-1], chosen + 1, chosen[:0]):
        with pytest.raises(SystemExit, match="TopK selects wrong entries"):
            selection.check("ChunkTopK", u, wrong, 0.001)


@full
def test_steps_leave_a_trace_of_every_contestant():
    torch.manual_seed(0)
    with rehearsal():
        rows = list(selection.on_device(10_000, 0.01, 2, "cpu"))
    names = {"torch.topk", "torch.sort", "GaussianK as published", *selection.sparsifiers(0.01)}
    graphs = {"TopK, CUDA graph", "GaussianK, CUDA graph"}
    assert {row["contestant"] for row in rows if row["part"] == "step"} == names | graphs
    assert {row["contestant"] for row in rows if row["part"] == "selection"} == names
    assert rows[0]["bytes_per_s"] > 0


def test_a_step_that_keeps_the_wrong_rest_gets_no_times():
    class Forgetful(TopK):
        def compress(self, u, ctx):
            payload, _ = super().compress(u, ctx)
            return payload, u

    with pytest.raises(SystemExit, match="keeps a wrong residual"):
        selection.Step(torch.randn(1000), 0.01, Forgetful(0.01)).check("TopK")


@full
def test_what_runs_under_the_sanitizer_checks_its_results():
    run_kernels.main("cpu")


def test_who_does_not_fit_is_left_out(capsys):
    with selection.skipped_if_out_of_memory("torch.sort"):
        raise torch.OutOfMemoryError
    assert "torch.sort: not enough memory" in capsys.readouterr().out


@full
def test_the_least_that_a_selection_needs_is_one_read():
    plots = pytest.importorskip("benchmarks.harness.plots")
    figure = selection.draw(selection.results.RESULTS)
    table = selection.results.load(selection.results.RESULTS / "selection_cpu.csv")
    read = table.query("part == 'selection' and contestant == 'read (sum)' and density == 0.001 and cache == 'cold'")
    (dotted,) = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert list(dotted.get_ydata()) == list(read.sort_values("numel").ms)
    assert "Dotted: one read" in " ".join(text.get_text() for text in figure.texts)
    plots.plt.close(figure)


@full
def test_the_figure_shows_time_against_length(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    result = tmp_path / "selection_cuda.csv"
    with result.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["part", "contestant", "numel", "density", "ms", "device"])
        writer.writeheader()
        for numel in (1000, 1_000_000):
            for part, name in (("copy", "copy_"), ("selection", "TopK"), ("step", "TopK")):
                case = {"numel": numel, "density": 0.001, "ms": numel / 1e6, "device": "a GPU"}
                writer.writerow({"part": part, "contestant": name} | case)
    for figure in selection.figures():
        figure.write(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["selection_cuda.png"]
