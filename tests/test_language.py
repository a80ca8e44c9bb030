"""The language model benchmark: its pure parts, and all contestants for some steps."""

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.baselines import RANK
from benchmarks.harness.ranks import check_weights
from benchmarks.language import LENGTH, METHODS, Run, missing_rates, neighbour, steps_to
from benchmarks.language_rank import Trainee, factor
from examples.models.gpt import GPT
from tests.processes import run_ranks
from tests.support.tiers import full

STEPS_TRAINED = 8


def test_rate_rises_for_a_tenth_and_ends_at_zero() -> None:
    assert [factor(step, 40) for step in (0, 3)] == pytest.approx([0.25, 1.0], abs=0.02)
    assert factor(20, 40) == pytest.approx(0.5)
    assert factor(40, 40) == pytest.approx(0.0)
    assert max(factor(step, 40) for step in range(41)) <= 1


def test_rates_stand_in_one_series() -> None:
    rates = [0.01]
    for _ in range(6):
        rates.append(neighbour(rates[-1], 1))
    assert rates == [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    assert [neighbour(rate, -1) for rate in rates[1:]] == rates[:-1]


def test_search_goes_on_beyond_the_grid_until_the_best_has_neighbours() -> None:
    grid = (0.1, 0.2, 0.5)
    assert missing_rates({}, grid) == [0.1, 0.2, 0.5]
    assert missing_rates({0.1: 3.0}, grid) == [0.2, 0.5]
    assert missing_rates({0.1: 3.0, 0.2: 2.0, 0.5: 2.5}, grid) == []
    assert missing_rates({0.1: 3.0, 0.2: 2.0, 0.5: 1.0}, grid) == [1.0]
    assert missing_rates({0.1: 1.0, 0.2: 2.0, 0.5: float("inf")}, grid) == [0.05]


def test_target_is_reached_between_two_evaluations() -> None:
    rows = [{"step": step, "val_loss": loss} for step, loss in [(0, 5.0), (50, 3.0), (100, 2.0), (150, 2.8)]]
    assert steps_to(2.5, rows) == 75
    assert steps_to(2.0, rows) == 100
    assert steps_to(1.9, rows) == float("inf")


def train_each(rank: int) -> list[tuple[str, float, float, int]]:
    """Train with every contestant on one sequence; return its losses before and after, and the bytes sent."""
    sequence = torch.arange(LENGTH + 1) % 7
    data = [(sequence[:-1], sequence[1:])] * 1000
    answers = []
    for method in METHODS["adamw"]:
        trainee = Trainee(Run("tune", "adamw", method, 0.005, 0), SimpleNamespace(train_set=data, val_set=data))
        before = trainee.loss()
        for _ in range(STEPS_TRAINED):
            trainee.step()
        check_weights(trainee.model)
        answers.append((method, before, trainee.loss(), trainee.sent_bytes()))
    return answers


@full
def test_every_contestant_trains_and_counts_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.language_rank.BATCH_SIZE", 1)
    monkeypatch.setattr("benchmarks.language_rank.VAL_SEQUENCES", 2)
    answers, others = run_ranks(2, train_each, patience=200)
    assert answers == others
    shapes = [tuple(parameter.shape) for parameter in GPT(context=LENGTH).parameters()]
    dense = 4 * sum(math.prod(shape) for shape in shapes)
    # A rank's share of a ring all-reduce between two is as long as the vector. All matrices here are large enough to be
    # factored, and torch's hook begins to after two dense steps.
    factors = 4 * sum(RANK * sum(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes)
    expected = {
        "ddp": STEPS_TRAINED * dense,
        "bf16": STEPS_TRAINED * dense // 2,
        "powersgd": 2 * dense + (STEPS_TRAINED - 2) * factors,
    }
    for method, before, after, sent in answers:
        assert after < before - 0.5, method
        if method in expected:
            assert sent == expected[method], method
        else:
            assert 0 < sent < 0.04 * STEPS_TRAINED * dense, method
