"""The language model benchmark: its pure functions, and all methods for some steps."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks.harness import results, training
from benchmarks.harness.baselines import RANK
from benchmarks.harness.launch import check_weights
from benchmarks.harness.results import RESULTS
from benchmarks.harness.training import Data, factor
from benchmarks.language import (
    DEFAULT,
    EARLY,
    LARGE_TWICE,
    LENGTH,
    METHODS,
    MORE_SEEDS,
    REPEATED,
    SHORT,
    TRIED,
    UPDATES,
    Run,
    best_rates,
    first_losses,
    missing_runs,
    trainee,
)
from examples.models.gpt import GPT
from tests.processes import run_ranks
from tests.support.tiers import full

STEPS_TRAINED = 8


def test_rate_rises_for_a_tenth_and_ends_at_zero() -> None:
    assert [factor(step, 40) for step in (0, 3)] == pytest.approx([0.25, 1.0], abs=0.02)
    assert factor(20, 40) == pytest.approx(0.5)
    assert factor(40, 40) == pytest.approx(0.0)
    assert max(factor(step, 40) for step in range(41)) <= 1


def test_every_contestant_is_compared_at_full_length_and_only_what_is_missing_is_trained(tmp_path: Path) -> None:
    long = ("final", "equal", "eight")
    compared = {(optimizer, name) for part, optimizer, names, _ in TRIED if part in long for name in names}
    assert compared == {(optimizer, name) for optimizer, names in METHODS.items() for name in names}
    assert missing_runs(RESULTS / "language.csv") == []
    runs = missing_runs(tmp_path / "language.csv")
    once = sum(len(names) * len(rates) for _, _, names, rates in TRIED)
    begun = [run for run in runs if run.part in EARLY.values()]
    assert {(run.method, run.seed) for run in begun} == {(name, seed) for _, _, name in REPEATED for seed in (0, 1, 2)}
    again = len(REPEATED) + sum(part == "final" for part, _, _ in REPEATED) + 2 * len(SHORT)
    assert len(runs) == len(set(runs)) == once + len(MORE_SEEDS) * again + len(begun) + len(LARGE_TWICE)
    assert {run[:4] for run in runs if run.seed in MORE_SEEDS} <= {run[:4] for run in runs if run.seed == 0}
    results.save(tmp_path / "language.csv", [runs[0]._asdict()])
    assert missing_runs(tmp_path / "language.csv") == runs[1:]


def test_every_committed_training_belongs_to_a_run_of_the_benchmark(tmp_path: Path) -> None:
    table = results.load(RESULTS / "language.csv")
    found = set(table[list(Run._fields)].itertuples(index=False, name=None))
    assert found
    assert found <= set(missing_runs(tmp_path / "language.csv"))


def train_each(rank: int) -> list[tuple[str, float, float, int]]:
    """Train with every method on one sequence; return its losses before and after, and the bytes sent."""
    sequence = torch.arange(LENGTH + 1) % 7
    batch, held_out = ((sequence[None, :-1].expand(n, -1), sequence[None, 1:].expand(n, -1)) for n in (1, 2))
    data = Data(lambda numbers: batch, 1000, held_out)
    answers = []
    for method in METHODS["adamw"]:
        run = Run("tune", "adamw", method, 0.005, 0)
        trained = trainee(run, data, most=STEPS_TRAINED)
        before, _ = trained.evaluate()
        for _ in range(STEPS_TRAINED):
            trained.step()
        check_weights(trained.model)
        answers.append((method, before, trained.evaluate()[0], trained.sent_bytes))
    return answers


def test_trainings_of_one_model_and_seed_start_alike() -> None:
    rows = [("final", 0, 0, 5.28), ("final", 0, 50, 4.0), ("tune", 100, 0, 5.3), ("large", 0, 0, 5.24)]
    table = pd.DataFrame(rows, columns=["part", "seed", "step", "val_loss"])
    assert first_losses(Run("final", "adamw", "topk", 0.1, 0), table) == {5.28}
    assert first_losses(Run("large", "adamw", "topk", 0.1, 0), table) == {5.24}
    assert first_losses(Run("large", "adamw", "topk", 0.1, 1), table) == set()


def test_a_rate_with_fewer_seeds_is_not_the_best_and_the_default_has_that_of_ddp() -> None:
    rows = [("ddp", 0.1, 2.0), ("ddp", 0.1, 2.1), ("ddp", 0.2, 1.9), ("ddp", 0.3, 2.2), ("ddp", 0.3, 2.3)]
    rows += [("topk", 0.1, 2.0), ("topk", 0.2, 1.9), (DEFAULT, 0.1, 2.0), (DEFAULT, 0.2, 1.0)]
    best = best_rates(pd.DataFrame(rows, columns=["method", "lr", "val_loss"]))
    assert best.to_dict() == {"ddp": 0.1, "topk": 0.2, DEFAULT: 0.1}


def test_step_times_of_local_methods_are_medians_of_single_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One step in each turn is disturbed, and one exchanges: 80 ms in each eighth step, and 1/16 of that in a step."""
    turn = {"number": 0, "columns": {"method": "local_sgd"}, "every": 16, "ms": [10.0] * 6 + [50.0, 90.0]}
    turn |= {"sent_bytes": 8.0, "tx_bytes": 8.0, "cpu_ms": 1.0, "foreign_load": 0.0}
    monkeypatch.setattr(training, "run_ranks", lambda *_: ([turn] * 5, [{"ratio_to_expected": 1.0}]))
    training.save_times(tmp_path / "times.csv", "no module", {"rate": "1gbit"}, 2)
    (ms,) = results.load(tmp_path / "times.csv")["median_ms"]
    assert ms == 10 + 80 / 16


@full
def test_every_contestant_trains_and_counts_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.language.BATCH_SIZE", 1)
    answers, others = run_ranks(2, train_each, patience=200)
    assert answers == others
    shapes = [tuple(parameter.shape) for parameter in GPT(context=LENGTH).parameters()]
    dense = 4 * sum(math.prod(shape) for shape in shapes)
    # With two ranks, a rank sends the length of the vector in a ring all-reduce. All matrices here are large enough to
    # be factored. Torch's hook factors them after two dense steps.
    factors = 4 * sum(RANK * sum(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes)
    expected = {
        "ddp": STEPS_TRAINED * dense,
        "bf16": STEPS_TRAINED * dense // 2,
        "powersgd": 2 * dense + (STEPS_TRAINED - 2) * factors,
    }
    for method, before, after, sent in answers:
        assert after < before - (0.5 if UPDATES.get(method, 1) == 1 else 0.2), method  # of several steps one exchange
        if method in expected:
            assert sent == expected[method], method
        else:
            one = dict.fromkeys(["local_sgd", "local_sgd, every 75", "diloco"], 0.13)  # exchange in eight steps
            share = {"int4": 0.15, **one}.get(method, 0.04)
            assert 0 < sent < share * STEPS_TRAINED * dense, method
