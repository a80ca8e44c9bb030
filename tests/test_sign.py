"""signSGD with majority vote, by hand."""

import pytest
import torch

from lightning_sparse import NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.compressors.sign import Sign
from lightning_sparse.context import Context
from tests.support.tiers import tiers
from tests.support.updates import decoded


def test_by_hand():
    """Three ranks vote on four entries."""
    given = {0: [1.0, -2.0, 0.5, 0.0], 1: [3.0, -1.0, -0.5, -1.0], 2: [-9.0, -1.0, -7.0, -1.0]}

    def rank(comm):
        grads = {"w": torch.tensor(given[comm.rank])}
        Reducer("signsgd", comm).reduce_(grads)
        return grads["w"].tolist()

    assert simulate(3, rank) == [[1.0, -1.0, -1.0, -1.0]] * 3


def test_signs_come_back_exactly_in_one_bit_each():
    u = torch.randn(1001).sign()
    assert torch.equal(decoded(Sign(), u), u)
    (payload,), _ = Sign().compress(u, Context.of(1001))
    assert payload.numel() == 126


def test_a_tie_of_two_ranks_is_zero():
    def rank(comm):
        grads = {"w": torch.tensor([1.0, 1.0 - 2 * comm.rank])}
        Reducer("signsgd", comm).reduce_(grads)
        return grads["w"].tolist()

    assert simulate(2, rank) == [[1.0, 0.0]] * 2


@pytest.mark.parametrize("size", tiers([63, 64, 129], [63, 64]))
def test_a_vote_stays_a_vote_where_a_dense_mean_would_be_cheaper(size):
    def rank(comm):
        grads = {"w": torch.tensor([1000.0 if comm.rank == 0 else -1.0])}
        Reducer("signsgd", comm).reduce_(grads)
        return grads["w"].item()

    assert set(simulate(size, rank)) == {-1.0}


@pytest.mark.parametrize("name", ["signsgd", "qsgd"])
def test_a_nan_that_no_bit_shows_is_an_error_on_all_ranks(name):
    def rank(comm):
        grads = {"v": torch.ones(10), "w": torch.ones(100)}
        if comm.rank == 1:
            grads["w"][7] = torch.nan
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 1 at step 0"):
            Reducer(method(name), comm, granularity="model").reduce_(grads)
        return True

    assert all(simulate(3, rank))
