"""The benchmark of a whole training step, with a small model on the CPU."""

import pytest

from benchmarks.gpt import METHODS, PRECISIONS, SMALL, Contestant, measured
from tests.processes import run_ranks
from tests.support.tiers import full


def rehearse(rank):
    return list(measured(SMALL, batch=2, turns=2, steps=1, device="cpu"))


@full
def test_every_contestant_is_checked_and_timed():
    (rows,) = run_ranks(1, rehearse)
    cases = [(precision, name) for precision in PRECISIONS for name in ("ddp", *METHODS)]
    assert [(row["precision"], row["contestant"]) for row in rows] == cases
    for row in rows:
        assert row["ms"] > 0
        assert row["floor_ms"] > 0
        updates = "updates" in row["contestant"]
        counted = {"bf16-mixed": 60 if updates else 16, "bf16-true": 74 if updates else 12}
        assert row["counted_bytes"] == counted[row["precision"]]
        if row["contestant"] != "ddp":
            assert row["limit_ms"] == pytest.approx(1.6 * row["floor_ms"] + 1)
            assert row["within"] == (row["added_ms"] <= row["limit_ms"])


def lose_something(rank):
    contestant = Contestant("topk", SMALL, "bf16-mixed", 2, "cpu")
    reducer = contestant.wrapped.reducer
    reduce_segment_ = reducer.reduce_segment_

    def reduce_wrongly_(segment, grads, *args):
        reduce_segment_(segment, grads, *args)
        grads[0].add_(1)

    reducer.reduce_segment_ = reduce_wrongly_
    with pytest.raises(SystemExit, match="topk loses a part of"):
        contestant.check()
    contestant = Contestant("topk updates", SMALL, "bf16-mixed", 2, "cpu")
    contestant.step = lambda: [param.detach().add_(1) for param in contestant.model.parameters()]
    with pytest.raises(SystemExit, match="topk updates changes"):
        contestant.check_updates()
    return True


def test_wrong_results_get_no_times():
    assert run_ranks(1, lose_something) == [True]
