"""The benchmark of the exchange of updates: its pure functions, and every variant for some steps."""

import pandas as pd
import pytest
import torch

from benchmarks import updates
from benchmarks.harness import results
from benchmarks.harness.training import Data
from benchmarks.language import LENGTH
from benchmarks.updates import VARIANTS, Run, steps_to, summary, train
from examples.models.gpt import GPT
from tests.support.tiers import one_in, tiers


def test_all_that_is_committed_belongs_to_a_run_of_the_benchmark():
    table = results.load(results.RESULTS / "updates.csv")
    found = set(table[list(Run._fields)].itertuples(index=False, name=None))
    assert found
    assert found <= set(updates.TRIED)
    assert {run.variant for run in updates.TRIED} <= VARIANTS.keys()


def test_a_target_is_reached_between_two_evaluations():
    curve = pd.DataFrame({"step": [0, 100, 200], "val_loss": [5.0, 3.0, 2.0]})
    assert steps_to(curve, 2.6) == pytest.approx(140)
    assert pd.isna(steps_to(curve, 1.0))


def test_a_long_run_stands_beside_a_short_one_as_it_was_after_as_many_steps():
    dense = 8 * sum(param.numel() for param in GPT(context=LENGTH).parameters()) // 2  # two ranks, of a step
    rows = [
        Run(variant, 2, 1.0, 0.1, 0, steps)._asdict() | {"step": step, "val_loss": 3 - step, "sent_bytes": dense * step}
        for variant, steps in (("long", 2), ("short", 1))
        for step in range(steps + 1)
    ]
    found = summary(pd.DataFrame(rows))
    assert list(zip(found.variant, found.steps, found.val_loss, strict=True)) == [
        ("long", 1, 2),
        ("short", 1, 2),
        ("long", 2, 1),
    ]
    assert set(found.percent) == {100}


@one_in(2)
@pytest.mark.parametrize("variant", tiers(VARIANTS, ["payout rescaled too", "late"]))
def test_every_variant_trains_and_keeps_weights_equal(variant, monkeypatch):
    monkeypatch.setattr(updates, "BATCH_SIZE", 1)
    rule = VARIANTS[variant].rule
    steps = max(4, rule.local_steps if rule else 1)  # weights are equal after each exchange
    monkeypatch.setattr(updates, "EVERY", steps)
    sequence = torch.arange(LENGTH + 1) % 7
    batch, held_out = ((sequence[None, :-1].expand(n, -1), sequence[None, 1:].expand(n, -1)) for n in (1, 2))
    points = train(Run(variant, 2, 0.05, 0.005, 0, steps), Data(lambda numbers: batch, 100, held_out))
    assert [point["step"] for point in points] == [0, steps]
    assert points[1]["val_loss"] < points[0]["val_loss"]
    assert (points[1]["sent_bytes"] > 0) == (not VARIANTS[variant].alone)


def test_a_variant_is_compared_with_dense_training_of_the_same_seeds():
    rows = [("dense", 0, 2.0), ("dense", 1, 3.0), ("topk", 1, 2.5), ("masked", 0, 2.5), ("masked", 1, 2.5)]
    above = updates.above_dense(pd.DataFrame(rows, columns=["variant", "seed", "val_loss"]))
    assert above.mean(axis=1).to_dict() == {"dense": 0.0, "topk": -0.5, "masked": 0.0}
