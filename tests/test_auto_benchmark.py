"""The benchmark of `auto_ddp`: its models, its committed rows, and the time of a step."""

from types import SimpleNamespace

import pytest

pytest.importorskip("pytorch_lightning")
pytest.importorskip("pandas")

from benchmarks import auto
from benchmarks.auto import MODELS, Case, cases
from benchmarks.harness import results


def test_models_have_the_parameters_that_they_are_called_by():
    for million, (width, _) in MODELS.items():
        assert 4 * (width**2 + width) / 1e6 == pytest.approx(million, rel=0.025)
    table = results.load(results.RESULTS / "auto.csv")
    found = set(table[list(Case._fields)].itertuples(index=False, name=None))
    assert found
    assert found <= set(cases(list(auto.RATES), [*MODELS], [2, 4]))


def test_the_time_of_a_step_excludes_the_collective_of_the_benchmark(monkeypatch):
    now, calls = [0], []

    def gather(value):
        now[0] += 100
        calls.append(value)
        return [value]

    monkeypatch.setattr(auto, "gather", gather)
    monkeypatch.setattr(auto, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    times, trainer = auto.Times(leave_out=2), SimpleNamespace(strategy=None, should_stop=False)
    while not trainer.should_stop:
        now[0] += 1
        times.on_train_batch_end(trainer)
    assert times.timed == [1] * 12
    assert calls == [False, False, False, True]  # after each third step, until more than ten seconds are over
