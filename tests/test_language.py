"""The pure parts of the language model benchmark."""

import pytest

from benchmarks.language import Run, neighbour, untried
from benchmarks.language_rank import factor


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
    assert untried({}, grid) == [0.1, 0.2, 0.5]
    assert untried({0.1: 3.0}, grid) == [0.2, 0.5]
    assert untried({0.1: 3.0, 0.2: 2.0, 0.5: 2.5}, grid) == []
    assert untried({0.1: 3.0, 0.2: 2.0, 0.5: 1.0}, grid) == [1.0]
    assert untried({0.1: 1.0, 0.2: 2.0, 0.5: float("inf")}, grid) == [0.05]


def test_runs_are_named_by_what_differs_from_the_default() -> None:
    assert str(Run("tune", "adamw", "topk", 0.002, 3)) == "adamw:topk:0.002:seed=3"
    assert str(Run("variant", "adamw", "topk", 0.002, 3, beta2=0.95)) == "adamw:topk:0.002:beta2=0.95:seed=3"
