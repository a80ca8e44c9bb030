"""The network benchmark: its command line, its rows and figures, and the options of DDP that all methods share."""

import shutil
import sys

import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from benchmarks import network, network_rank
from benchmarks.harness import plots, results
from benchmarks.harness.baselines import CONTESTANTS, Options
from benchmarks.harness.table import load_texts
from benchmarks.harness.workloads import build
from tests.processes import run_ranks
from tests.support.tiers import full, later


def text_of(figure):
    texts = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    plots.plt.close(figure)
    return texts


@full
def test_a_figure_gives_the_density_of_its_rows_and_refuses_several(tmp_path):
    assert "density 0.01," in text_of(network.draw_trainings(results.RESULTS))
    assert "density 0.001," in text_of(network.draw_steps(results.RESULTS))
    shutil.copy(results.RESULTS / "network_paced.csv", tmp_path)
    for name, draw in (("network_real", network.draw_trainings), ("network", network.draw_steps)):
        table = load_texts(results.RESULTS / f"{name}.csv")
        table.loc[table.index[-20:], "density"] = "0.25"
        table.loc[table.index[-20:], "workload"] = table.workload[0]
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        with pytest.raises(ValueError, match=r"cannot show runs with densities 0\.0.* and 0\.25"):
            draw(tmp_path)


def test_without_links_committed_rows_stay(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(network, "missing", lambda: "this is a test")
    monkeypatch.setattr(sys, "argv", ["network", "--rates", "1gbit"])
    with pytest.raises(SystemExit):
        network.parse()
    assert "cannot be created here: this is a test. To measure over loopback, give --out" in capsys.readouterr().err
    for arguments in (["--out", str(tmp_path), "--rates", "1gbit"], ["--rates", "loopback"]):
        monkeypatch.setattr(sys, "argv", ["network", *arguments])
        assert network.parse().rates == ["loopback"]


@pytest.mark.parametrize("workload", ["mlp", "mlp_adamw", "real", "real_resnet20"])
def test_a_run_without_options_replaces_all_rows_of_its_links(workload, monkeypatch):
    table = results.load(results.RESULTS / ("network_real.csv" if "real" in workload else "network.csv"))
    mine = table.query("workload == @workload and workers == 4 and ranks_per_host == 1 and rate != 'loopback'")
    monkeypatch.setattr(network, "missing", lambda: "")
    monkeypatch.setattr(sys, "argv", ["network", "--workload", workload])
    args = network.parse()
    assert sorted(args.rates) == sorted(mine.rate.unique())
    assert {row["contestant"] for row in network.contestants(args)} >= set(mine.contestant)


def test_each_method_has_one_row():
    record = {"ms": [1.0, 2.0, 3.0], "cpu_ms": 1.0, "foreign_load": 0.0, "params": 8, "sent_bytes": 5.0}
    record |= {"tx_bytes": 6.0, "peak_bytes": 2e6}
    rows = network.summarise([{"contestant": name, **record} for name in ("ddp", "topk")], 2, 1.0)
    assert [(row["contestant"], row["median_ms"], row["sent_bytes_per_step"]) for row in rows] == [
        ("ddp", 2.0, 5),
        ("topk", 2.0, 5),
    ]
    for name in ("network", "network_paced", "network_gpt2", "within_backward"):
        table = pd.read_csv(results.RESULTS / f"{name}.csv")
        assert set(table.contestant) <= CONTESTANTS.keys(), name


def options_of_ddp(rank):
    found = {}
    for name in ("idle_hook", "ddp", "fp16", "bf16", "naive_topk", "topk", "int4"):
        model = build("real_resnet20", 0.0, rank)
        ddp = CONTESTANTS[name].wrap(model, Options(0.01), None).module
        found[name] = ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default
    return found


def test_all_methods_take_the_same_options_of_ddp():
    (found,) = run_ranks(1, options_of_ddp)
    assert set(found.values()) == {(False, 25 * 2**20, True)}, found


def forward_passes(rank, out):
    trains = []
    loss = network_rank.cross_entropy

    def cross_entropy(scores, labels):
        trains.append(scores.requires_grad)
        return loss(scores, labels)

    network_rank.cross_entropy = cross_entropy
    job = {"workload": "real_resnet20", "compute": 0.0, "ranks_per_host": 1, "density": 0.01, "seconds": 0.0}
    network_rank.work({**job, "out": out, "todo": [{"contestant": "ddp", "learning_rate": 0.01}]})
    return trains


@later
def test_the_first_training_is_warm(tmp_path):
    pytest.importorskip("sklearn")
    (trains,) = run_ranks(1, forward_passes, str(tmp_path / "records"))
    assert trains == [True, True, False, *[True] * 10, False]
