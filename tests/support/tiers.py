"""Test tiers.

- `make test` skips tests marked `full`, `exhaustive` or `later`.
- `make test-all` runs those marked `later`, and a sample of those marked `full`.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

full, exhaustive, later = pytest.mark.full, pytest.mark.exhaustive, pytest.mark.later


def tiers(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return all cases as parameters. Cases that are not in `quick` belong to the full tier."""
    cases = list(cases)
    assert all(case in cases for case in quick), f"not among the cases: {[case for case in quick if case not in cases]}"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=full)
        for case in cases
    ]


def in_full(*cases: Any) -> list[Any]:
    """Return cases of the full tier, after the quick tier's: `[quick, *in_full(case, case)]`."""
    return tiers(cases, [])


def in_diagonals(rows: Iterable[Any], columns: Iterable[Any], every: int) -> list[Any]:
    """Return all pairs as parameters. The quick tier has one pair in `every`, along diagonals.

    If `every` is at most the number of columns, each row is part of the quick tier.
    """
    rows, columns = list(rows), list(columns)
    pairs = [(row, column) for row in rows for column in columns]
    places = [(i + j) % every for i in range(len(rows)) for j in range(len(columns))]
    return [pair if not place else pytest.param(*pair, marks=full) for pair, place in zip(pairs, places, strict=True)]


def one_in(every: int) -> pytest.MarkDecorator:
    """Return a mark: of all cases of a test, the quick tier has one in `every`, along diagonals."""
    return pytest.mark.one_in(every)
