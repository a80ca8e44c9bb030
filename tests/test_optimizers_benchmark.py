"""The benchmark of optimizers: its pure functions, and each optimizer for some steps."""

import pandas as pd
import pytest
import torch

from benchmarks import optimizers
from benchmarks.harness import results
from benchmarks.harness.training import Data
from benchmarks.language import LENGTH
from benchmarks.optimizers import BEST, OTHERS, RATES, TRIED, Run, sparse_runs, summary, train
from tests.support.tiers import full, tiers


def test_all_that_was_to_be_tried_is_committed_at_the_rates_that_are_best_for_dense_training():
    table = results.load(results.RESULTS / "optimizers.csv")
    found = set(table[list(Run._fields)].itertuples(index=False, name=None))
    assert found == {*TRIED, *sparse_runs(table)}
    assert {run.optimizer for run in sparse_runs(table)} == OTHERS.keys()
    dense = table.query("exchanged == 'dense' and step == step.max()")
    best = {name: runs.loc[runs.val_loss.idxmin()].lr for name, runs in dense.groupby("optimizer")}
    assert {name: lr for name, lr in best.items() if name not in OTHERS} == BEST
    for name, rates in RATES.items():
        assert min(rates) < BEST[name] < max(rates), "or more would have to be tried"


def test_losses_are_those_that_dense_training_has_after_so_many_steps():
    curves = {
        Run("AdamW", "dense", 0.2): [5.0, 4.0, 3.0],
        Run("AdamW", "dense", 0.1): [5.0, 3.0, 2.0],
        Run("AdamW", "updates", 0.1): [5.0, 4.0, 2.5],
        Run("AdamW", "gradients", 0.1): [5.0, 4.0, 1.0],
    }
    rows = [
        run._asdict() | {"step": 100 * i, "val_loss": x} for run, losses in curves.items() for i, x in enumerate(losses)
    ]
    found = summary(pd.DataFrame(rows)).set_index(["exchanged", "lr"])
    assert found.dense_steps["dense", 0.2] == pytest.approx(100)
    assert found.dense_steps["updates", 0.1] == pytest.approx(150)
    assert pd.isna(found.dense_steps["gradients", 0.1])


@full
@pytest.mark.parametrize("name", tiers(RATES, ["Lion"]))
def test_every_optimizer_trains_and_keeps_weights_equal(name, monkeypatch):
    monkeypatch.setattr(optimizers, "BATCH_SIZE", 1)
    monkeypatch.setattr(optimizers, "STEPS", 4)
    monkeypatch.setattr(optimizers, "EVERY", 4)
    sequence = torch.arange(LENGTH + 1) % 7
    batch, held_out = ((sequence[None, :-1].expand(n, -1), sequence[None, 1:].expand(n, -1)) for n in (1, 2))
    for exchanged in (*optimizers.METHODS, "gradients", "updates"):
        points = train(Run(name, exchanged, 5 * BEST[name]), Data(lambda numbers: batch, 100, held_out))
        assert [point["step"] for point in points] == [0, 4]
        assert points[1]["val_loss"] < points[0]["val_loss"]
        assert points[1]["sent_bytes"] > 0
