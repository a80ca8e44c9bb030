"""signSGD with majority vote, by hand."""

import pytest
import torch

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.context import Context
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.memory import Momentum, NoMemory
from tests.support.tiers import later, one_in, tiers
from tests.support.updates import decoded


def test_by_hand():
    """Three ranks vote on four entries; of the last, 0 counts as positive."""
    given = {0: [1.0, -2.0, 0.5, 0.0], 1: [3.0, -1.0, -0.5, -1.0], 2: [-9.0, -1.0, -7.0, -1.0]}

    def rank(comm):
        grads = {"w": torch.tensor(given[comm.rank])}
        Reducer("signsgd", comm).reduce_(grads)
        return grads["w"].tolist()

    assert simulate(3, rank) == [[1.0, -1.0, -1.0, -1.0]] * 3


def test_signs_come_back_exactly_in_one_bit_each():
    u = torch.randn(1001).sign()
    assert torch.equal(decoded(Sign(), u), u)
    (used, signs), _ = Sign().compress(u, Context.of(1001))
    assert (used.numel(), signs.numel()) == (1, 126)


def vote(comm, rows, steps=1, name="signsgd"):
    """Return the results of this rank's row of gradients, in each step the same."""
    reducer, results = Reducer(name, comm, granularity="model"), []
    for _ in range(steps):
        grads = {"w": torch.tensor(rows[comm.rank])}
        reducer.reduce_(grads)
        results.append(grads["w"].tolist())
    return results


def test_on_a_tie_ranks_decide_in_turn():
    rows = [[1.0, 1.0, -1.0], [1.0, -1.0, 1.0]]
    expected = [rows[0], rows[1], rows[1], rows[0]]
    assert simulate(2, lambda comm: vote(comm, rows, steps=4)) == [expected] * 2
    # Two ranks vote against two. Rank t decides in step t; after four steps, ranks decide in another order.
    rows = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]
    assert simulate(4, lambda comm: vote(comm, rows, steps=5))[3] == [*rows, rows[2]]


def test_a_rank_does_not_vote_in_a_row_of_zeros():
    """Four rows of an embedding: used by no rank, by rank 2 only, by 1 and 2, which disagree, and by all."""
    two = [[0.0, 0.0], [-3.0, 1.0], [1.0, 0.0], [-1.0, -1.0]]
    rows = [
        [[0.0, 0.0], [0.0, -0.0], [0.0, 0.0], [1.0, 1.0]],
        [[0.0, 0.0], [0.0, 0.0], [-1.0, -1.0], [1.0, -1.0]],
        two,
    ]
    first, second, third = simulate(3, lambda comm: vote(comm, rows, steps=3))[0]
    # Rank 1 decides the third row at its own turn, and at the turn of rank 0, which does not vote there.
    assert first == second == [[0.0, 0.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]
    assert third == [[0.0, 0.0], [-1.0, 1.0], [1.0, 1.0], [1.0, -1.0]]


@pytest.mark.parametrize("size", tiers([1, 2, 3, 5, 8, 64, 129], [2, 3]))
def test_every_majority_is_right(size):
    """The first i ranks vote for element i. The sum of 129 votes does not fit into 8 bits with a sign."""

    def rank(comm):
        grads = {"w": torch.where(torch.arange(size + 1) > comm.rank, 1e-30, -1e30)}
        Reducer("signsgd", comm).reduce_(grads)
        return grads["w"]

    votes = torch.arange(size + 1)
    # With half of the votes each, rank 0 decides in the first step.
    expected = torch.where(2 * votes >= size, 1.0, -1.0)
    for result in simulate(size, rank):
        assert torch.equal(result, expected)


@one_in(3)
@pytest.mark.parametrize("shape", [(7, 3, 3, 3), (100, 40), (1, 4000), (4000, 1), (4000,), (1,)])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_votes_are_those_of_a_count_in_one_place(size, shape):
    """Uses random signs, with some rows of zeros on each rank, in two segments and steps."""

    def given(rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        grads = {name: torch.randn(shape, generator=generator) for name in "ab"}
        for grad in grads.values():
            if grad.dim() > 1:
                grad[torch.rand(shape[0], generator=generator) < 0.5] = 0
        return grads

    def rank(comm):
        reducer, results = Reducer("signsgd", comm, granularity="layer"), []
        for step in range(2):
            grads = given(comm.rank, step)
            reducer.reduce_(grads)
            results.append(grads)
        return results

    ranks = simulate(size, rank)
    for step in range(2):
        for index, name in enumerate("ba"):  # the order of the segments
            signs = torch.stack([given(r, step)[name] for r in range(size)]).sign()
            turn = signs.roll(-(step + index), 0)
            first = torch.zeros(shape)
            for row in turn.flip(0):
                first = torch.where(row != 0, row, first)
            total = signs.sum(0)
            expected = torch.where(total == 0, first, total.sign())
            for results in ranks:
                assert torch.equal(results[step][name], expected)


def test_bytes_are_two_bits_for_each_element():
    """An all-gather of the signs of 8 ranks would take 7 bits. Each of 40 rows takes another bit; headers are added."""

    def rank(comm):
        Reducer("signsgd", comm, granularity="model").reduce_({"w": torch.randn(40, 1600)})
        return comm.sent_bytes

    for sent in simulate(8, rank):
        assert 0 <= sent - 2 * 64_000 * 7 / 8 / 8 - 7 * 5 <= 7 * 2 * 40


def test_signum_by_hand():
    """The momentum is 0.1 · (3, -1), then 0.9 of that plus 0.1 · (-2, 5). Sending does not change the momentum."""

    def rank(comm):
        reducer, seen = Reducer("signum", comm), []
        for gradient in ([3.0, -1.0], [-2.0, 5.0]):
            grads = {"w": torch.tensor(gradient)}
            reducer.reduce_(grads)
            seen.append((grads["w"].tolist(), reducer.state_dict()["elements"]["momentum"]["w"].tolist()))
        return seen

    for first, second in simulate(3, rank):
        assert first == ([1.0, -1.0], pytest.approx([0.3, -0.1]))
        assert second == ([1.0, 1.0], pytest.approx([0.07, 0.41]))


def test_signum_with_another_beta_and_none():
    def rank(comm, beta):
        reducer = Reducer(Method(Sign(), Momentum(beta), MajorityVote()), comm)
        for gradient in (10.0, -1.0):
            grads = {"w": torch.tensor([gradient])}
            reducer.reduce_(grads)
        return grads["w"].item()

    assert simulate(1, lambda comm: rank(comm, 0.5)) == [1.0]
    assert simulate(1, lambda comm: rank(comm, 0)) == [-1.0]


def test_momentum_waits_while_a_parameter_is_unused():
    def rank(comm):
        reducer = Reducer("signum", comm, granularity="model")
        reducer.reduce_({"v": torch.ones(3), "w": torch.ones(3)})
        (segment,) = reducer.layout.segments
        flat = [torch.ones(3), torch.ones(3)]
        reducer.reduce_segment_(segment, flat, unused=["w"])
        kept = reducer.state_dict()["elements"]["momentum"]
        return [grad.tolist() for grad in flat], kept["v"].tolist(), kept["w"].tolist()

    (results, v, w), _ = simulate(2, rank)
    assert results == [[0.0] * 3, [1.0] * 3]
    assert v == pytest.approx([0.19] * 3)
    assert w == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("beta", [1, -0.1, "0.9", True])
def test_bad_betas(beta):
    with pytest.raises(ValueError, match=r"Momentum\(beta=.*must be in \[0, 1\)"):
        Momentum(beta)


def test_votes_of_what_is_no_sign_are_refused():
    with pytest.raises(ValueError, match=r"MajorityVote\(\) cannot aggregate what QSGD\("):
        Method(QSGD(), NoMemory(), MajorityVote())


@later
@one_in(2)
@pytest.mark.parametrize("size", tiers([63, 64, 129], [63, 64]))
def test_a_vote_stays_a_vote_where_a_dense_mean_would_be_cheaper(size):
    def rank(comm):
        grads = {"w": torch.tensor([1000.0 if comm.rank == 0 else -1.0])}
        Reducer("signsgd", comm).reduce_(grads)
        return grads["w"].item()

    assert set(simulate(size, rank)) == {-1.0}


@pytest.mark.parametrize("name", ["signsgd", "signum", "qsgd"])
def test_a_nan_that_no_bit_shows_is_an_error_on_all_ranks(name):
    def rank(comm):
        grads = {"v": torch.ones(10), "w": torch.ones(100)}
        if comm.rank == 1:
            grads["w"][7] = torch.nan
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 1 at step 0"):
            Reducer(method(name), comm, granularity="model").reduce_(grads)
        return True

    assert all(simulate(3, rank))


def test_signs_have_no_residual():
    """It would change by 1 in each step, whatever the size of the gradient."""
    with pytest.raises(ValueError, match="which may be larger than what is sent"):
        Method(Sign(), aggregator=MajorityVote())
