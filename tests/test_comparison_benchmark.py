"""The comparison of all methods: its trainings, its summary, and a few steps with each method."""

import math

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks import comparison
from benchmarks.comparison import TASKS, Run, Task, contestants, finals, made, missing_runs, train
from benchmarks.harness.training import Data
from lightning_sparse import METHODS
from tests.support.tiers import full, one_in, tiers


def ended(*runs):
    """Return a table of trainings: method, learning rate, seed, final loss."""
    rows = [
        {"contestant": name, "lr": lr, "seed": seed, "step": step, "val_loss": loss, "accuracy": 50.0, "sent_bytes": 8}
        for name, lr, seed, loss in runs
        for step, loss in ((0, 3.0), (300, loss))
    ]
    return pd.DataFrame(rows)


def test_the_best_rate_of_the_grid_gets_more_seeds(monkeypatch):
    monkeypatch.setattr(comparison, "contestants", lambda task: ["topk", "onebit"])
    monkeypatch.setitem(TASKS, "gpt_sgd", TASKS["gpt_sgd"]._replace(rates=(0.1, 0.2)))
    first = missing_runs("gpt_sgd", ended(("topk", 0.1, 0, 2.0)))
    assert first == [("topk", 0.2, 0), ("onebit", 0.1, 0), ("onebit", 0.2, 0)]
    grid = ended(("topk", 0.1, 0, 2.0), ("topk", 0.2, 0, 1.5), ("onebit", 0.1, 0, 1.0), ("onebit", 0.2, 0, math.inf))
    assert missing_runs("gpt_sgd", grid) == [
        (name, lr, s) for s in (1, 2) for name, lr in (("topk", 0.2), ("onebit", 0.1))
    ]
    more = pd.concat([grid, ended(("topk", 0.2, 1, 1.7), ("topk", 0.2, 2, 1.6), ("onebit", 0.1, 1, 1.0))])
    assert missing_runs("gpt_sgd", more) == [("onebit", 0.1, 2)]
    topk, onebit = finals(more).itertuples()
    assert (topk.loss, topk.low, topk.high, topk.lr, topk.seeds) == (pytest.approx(1.6), 1.5, 1.7, 0.2, 3)
    assert onebit.seeds == 2


def test_a_rate_at_which_a_seed_diverges_is_given_up(monkeypatch):
    monkeypatch.setattr(comparison, "contestants", lambda task: ["onebit"])
    monkeypatch.setitem(TASKS, "gpt_sgd", TASKS["gpt_sgd"]._replace(rates=(0.1, 0.2)))
    table = ended(("onebit", 0.1, 0, 1.0), ("onebit", 0.2, 0, 1.2), ("onebit", 0.1, 1, math.inf))
    assert missing_runs("gpt_sgd", table) == [("onebit", 0.2, 1), ("onebit", 0.2, 2)]


def test_contestants_exchange_what_the_strategy_would_or_what_their_name_says():
    assert made("gpt_sgd", "topk").update_rule is None
    assert made("gpt_sgd", "topk updates").update_rule is not None
    assert made("gpt_adamw", "topk").update_rule is not None
    assert made("gpt_adamw", "topk gradients").update_rule is None
    assert made("gpt_adamw", "int4").update_rule is None
    assert made("digits_sgd", "local_sgd").local_steps == 50
    assert set(METHODS) < set(contestants("digits_sgd"))


@full
@one_in(3)
@pytest.mark.parametrize("name", tiers(contestants("gpt_sgd"), ["topk", "signsgd", "sparseloco"]))
def test_every_contestant_learns(name, monkeypatch):
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    data = Data(lambda numbers: (x[numbers], y[numbers]), 64, (x, y))
    model = lambda: nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 2))  # noqa: E731
    monkeypatch.setitem(TASKS, "gpt_sgd", Task(lambda: data, model, 16, "sgd", ()))
    points = train("gpt_sgd", Run(name, 0.001 if name.startswith("sign") else 0.01, 0), data, steps=100)
    assert [point["step"] for point in points] == [0, 50, 100]
    assert points[2]["val_loss"] < points[0]["val_loss"]
    assert points[2]["sent_bytes"] > points[1]["sent_bytes"] > 0


def test_a_training_that_diverges_ends_early(monkeypatch):
    monkeypatch.setattr(comparison, "EVERY", 2)
    x, y = torch.randn(64, 20), torch.randint(2, (64,))
    data = Data(lambda numbers: (x[numbers], y[numbers]), 64, (x, y))
    monkeypatch.setitem(TASKS, "gpt_sgd", Task(lambda: data, lambda: nn.Linear(20, 2), 16, "sgd", ()))
    points = train("gpt_sgd", Run("dense", 1e6, 0), data, steps=100)
    assert points[-1]["step"] < 100
    assert points[-1]["val_loss"] == math.inf
