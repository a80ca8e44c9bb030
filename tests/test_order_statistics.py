"""Coordinate median and trimmed mean: by hand, and against torch's sort, with wrong values on some ranks."""

import math

import pytest
import torch

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.compressors import Identity, TopK
from lightning_sparse.contrib.order_statistics import CoordinateMedian, TrimmedMean, mean_of_middle, share_of
from lightning_sparse.memory import NoMemory
from tests.support.inputs import HOSTILE
from tests.support.tiers import tiers


def reduced(size, aggregator, row):
    """Return the result of all ranks' rows, after looking that it is the same on all ranks."""

    def rank(comm):
        grads = {"w": row(comm.rank)}
        Reducer(Method(Identity(), NoMemory(), aggregator), comm, granularity="model").reduce_(grads)
        return grads["w"]

    results = simulate(size, rank)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


ROWS = torch.tensor([[1.0, -2.0, 0.0], [3.0, -4.0, 0.0], [50.0, -3.0, -1.0], [-9.0, 9.0, 0.5], [2.0, -2.0, 1e30]])


@pytest.mark.parametrize(
    ("size", "aggregator", "expected"),
    [
        (5, CoordinateMedian(), [2.0, -2.0, 0.0]),
        (4, CoordinateMedian(), [2.0, -2.5, 0.0]),
        (3, CoordinateMedian(), [3.0, -3.0, 0.0]),
        (2, CoordinateMedian(), [2.0, -3.0, 0.0]),
        (1, CoordinateMedian(), [1.0, -2.0, 0.0]),
        (5, TrimmedMean(), [2.0, -7 / 3, 0.5 / 3]),
        (5, TrimmedMean(0.4), [2.0, -2.0, 0.0]),
        (5, TrimmedMean(0.19), [47 / 5, -2 / 5, 2e29]),  # nothing is left out
        (4, TrimmedMean(), [2.0, -2.5, 0.0]),
        (3, TrimmedMean(0.34), [3.0, -3.0, 0.0]),
    ],
)
def test_by_hand(size, aggregator, expected):
    assert torch.equal(reduced(size, aggregator, lambda rank: ROWS[rank].clone()), torch.tensor(expected))


def test_of_even_numbers_the_mean_of_two_large_values_stays_finite():
    for value in (3e38, -3e38, 1e-45):
        assert torch.equal(
            reduced(2, CoordinateMedian(), lambda rank, v=value: torch.full((3,), v)), torch.full((3,), value)
        )
    assert (
        reduced(2, CoordinateMedian(), lambda rank: torch.tensor([-3e38, 3e38])[rank].repeat(3)).tolist() == [0.0] * 3
    )


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("size", tiers([1, 2, 3, 5, 8], [3]))
def test_against_sort_and_equal_values_come_back(size, kind):
    """Covers lengths that no number of ranks divides, a region that is empty on the last ranks, and bf16."""
    for numel in (1000, 7, 1):
        rows = torch.stack([HOSTILE[kind](torch.Generator().manual_seed(r))[:numel] for r in range(size)])
        ordered = rows.double().sort(0).values
        middle = ordered[(size - 1) // 2 : size // 2 + 1].mean(0).float()
        assert torch.equal(reduced(size, CoordinateMedian(), lambda rank, rows=rows: rows[rank].clone()), middle)
        cut = int(0.3 * size)
        trimmed = ordered[cut : size - cut].mean(0).float()
        found = reduced(size, TrimmedMean(0.3), lambda rank, rows=rows: rows[rank].clone())
        torch.testing.assert_close(found, trimmed, rtol=2**-22, atol=0)
        same = HOSTILE[kind](torch.Generator().manual_seed(9))[:numel].to(torch.bfloat16)
        for aggregator in (CoordinateMedian(), TrimmedMean(0.3), TrimmedMean(0)):
            assert torch.equal(reduced(size, aggregator, lambda rank, same=same: same.clone()), same)


@pytest.mark.parametrize(("size", "aggregator", "wrong"), [(5, CoordinateMedian(), 2), (8, TrimmedMean(0.3), 2)])
def test_wrong_values_stay_between_those_of_honest_ranks(size, aggregator, wrong):
    honest = torch.randn(size - wrong, 500)
    for lies in (torch.full((wrong, 500), 1e38), torch.full((wrong, 500), -1e38), torch.randn(wrong, 500) * 1e20):
        rows = torch.cat([honest, lies])
        found = reduced(size, aggregator, lambda rank, rows=rows: rows[rank].clone())
        assert (found >= honest.amin(0)).all()
        assert (found <= honest.amax(0)).all()


def test_as_many_wrong_values_as_honest_ones_do_harm():
    """Shows that the test above can fail: the mean excludes 2 of 8 values at either end, but 3 are wrong."""
    rows = torch.cat([torch.randn(5, 500), torch.full((3, 500), 1e30)])
    assert reduced(8, TrimmedMean(0.3), lambda rank: rows[rank].clone()).amin() > 1e28


def test_a_nan_is_not_sorted_away():
    assert mean_of_middle(torch.tensor([[1.0], [math.nan], [2.0]]), 1).isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_a_value_that_would_be_left_out_is_an_error_all_the_same(name, bad):
    def rank(comm):
        grads = {"v": torch.ones(10), "w": torch.ones(100)}
        if comm.rank == 1:
            grads["w"][7] = bad
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 1 at step 0"):
            Reducer(method(name), comm, granularity="model").reduce_(grads)
        return True

    assert all(simulate(5, rank))


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_bytes_are_those_of_dense_gradients_and_no_dense_mean_takes_its_place(name):
    def rank(comm):
        grads = {"w": torch.full((8000,), 1e9 if comm.rank == 0 else 1.0)}
        Reducer(name, comm).reduce_(grads)
        return comm.sent_bytes, grads["w"].max().item()

    for sent, largest in simulate(8, rank):
        assert 0 <= sent - 2 * 4 * 8000 * 7 / 8 <= 7 * 2 * 40
        assert largest == 1


def test_the_share_is_the_decimal_number_that_was_written():
    assert share_of(0.29, 100) == 29  # 28 of the binary one
    assert share_of(0.49999999999, 2) == 0
    assert all(share_of(b / size, size) == b for size in range(1, 200) for b in range((size + 1) // 2))
    assert [share_of(0.45, size) for size in (1, 2, 3, 5, 9, 20)] == [0, 0, 1, 2, 4, 9]
    assert share_of(1e-7, 10) == 0
    # Next to a half, which is not allowed: some value remains.
    assert [share_of(math.nextafter(0.5, 0.0), size) for size in (1, 2, 3, 4, 100)] == [0, 0, 1, 1, 49]


@pytest.mark.parametrize("trim", [0.5, -0.1, math.nan, "0.1", True, None])
def test_bad_trims(trim):
    with pytest.raises(ValueError, match=r"TrimmedMean\(trim=.*must be in \[0, 0.5\)"):
        TrimmedMean(trim)


def test_entries_are_refused():
    with pytest.raises(ValueError, match=r"CoordinateMedian\(\) cannot aggregate what TopK\("):
        Method(TopK(), NoMemory(), CoordinateMedian())
