"""The benchmark of one segment, with a small segment on the CPU."""

import pytest
import torch

from benchmarks import segment
from benchmarks.harness import rehearsal
from tests.support.tiers import full, in_full

SHAPES = {"weight": (90, 80), "bias": (80,)}


@full
@pytest.mark.parametrize("name", ["topk", *in_full("topk updates", "gaussiank", "int4")])
def test_every_contestant_is_checked_and_timed(name):
    with rehearsal.rehearsal():
        row = segment.measure(name, 2, SHAPES, 3, "cpu")
        row |= segment.profiled(segment.case(name, 2, SHAPES, "cpu"), "cpu", show=False)
    assert (row["method"], row["ranks"], row["numel"]) == (name, 2, 7280)
    assert all(
        row[column] > 0 for column in ("device_us", "host_us", "beside_us", "add_us", "launches", "busy_us", "counted")
    )
    assert ("within" in row) is (name == "topk")


def test_a_device_that_waits_for_the_host_is_kept_asleep_longer(monkeypatch):
    """Else its time would be the host's."""
    slept = []
    monkeypatch.setitem(rehearsal.STAND_INS, "_sleep", slept.append)
    monkeypatch.setattr(segment, "UNTIMED", 0)
    monkeypatch.setattr(rehearsal.Event, "query", lambda self: slept[-1] < 10 * segment.SLEEP)
    made = segment.Case(lambda: None, lambda: None, lambda: None, None)
    with rehearsal.rehearsal():
        device_us, host_us = segment.alone(made, 2)
    assert [cycles // segment.SLEEP for cycles in slept] == [1, 4, 16, 16]
    assert len(device_us) == len(host_us) == 2


def test_wrong_results_get_no_times(monkeypatch):
    made = segment.case("topk", 2, SHAPES, "cpu")
    made.check()
    monkeypatch.setattr(
        segment, "residuals", lambda reducer: {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    )
    with pytest.raises(SystemExit, match="topk, P = 2, loses a part of"):
        made.check()
    updates = segment.case("topk updates", 2, SHAPES, "cpu")
    updates.before()
    updates.run()
    monkeypatch.setattr(segment.DeltaExchange, "exchange", lambda self, optimizer: None)
    with pytest.raises(SystemExit, match="topk updates, P = 2, changes 7,280 of 7,280"):
        updates.check()


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU here"):
        rehearsal.device_of_run(rehearse=False)
