"""The tiers: `make test` leaves out what is marked `full` or `exhaustive`, `make test-all` the latter."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

full, exhaustive = pytest.mark.full, pytest.mark.exhaustive


def tiers(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return all cases as parameters; those that are not among `quick` belong to the full tier."""
    cases = list(cases)
    assert all(case in cases for case in quick), f"not among the cases: {[case for case in quick if case not in cases]}"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=full)
        for case in cases
    ]


def in_diagonals(rows: Iterable[Any], columns: Iterable[Any], every: int) -> list[Any]:
    """Return all pairs as parameters; the quick tier has one in `every`, along diagonals.

    With `every` no more than there are columns, each row takes part.
    """
    rows, columns = list(rows), list(columns)
    pairs = [(row, column) for row in rows for column in columns]
    places = [(i + j) % every for i in range(len(rows)) for j in range(len(columns))]
    return [pair if not place else pytest.param(*pair, marks=full) for pair, place in zip(pairs, places, strict=True)]
