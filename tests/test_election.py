"""Election coding: exhaustive for few workers, and training as if no worker were wrong."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import Method, NonFiniteGradient, Reducer, simulate
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.robust import (
    Attacked,
    PartSampler,
    bernoulli_allocation,
    deterministic_allocation,
    local_vote,
)
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.memory import NoMemory
from tests.support.tiers import full, tiers

CASES = [(n, b) for n in range(1, 12, 2) for b in range((n + 1) // 2)]


def all_signs(n):
    """Return all 2ⁿ inputs of n signs, (2ⁿ, n)."""
    return torch.tensor(list(itertools.product((-1, 1), repeat=n)))


@pytest.mark.parametrize(("n", "b"), tiers(CASES, [(n, b) for n, b in CASES if n <= 7]))
def test_b_workers_may_vote_as_they_like_and_no_more(n, b):
    """Every sign input, and every choice of b workers; they do most harm by voting against the true majority."""
    allocation = deterministic_allocation(n, b)
    signs = all_signs(n)
    local = (signs @ allocation.long().T).sign()
    assert (local != 0).all()  # no ties
    truth = signs.sum(1).sign()
    for wrong in itertools.combinations(range(n), b):
        votes = local.clone()
        votes[:, list(wrong)] = -truth[:, None].expand(-1, b)
        assert torch.equal(votes.sum(1).sign(), truth)
    broken = []
    for wrong in itertools.combinations(range(n), b + 1):
        votes = local.index_fill(1, torch.tensor(wrong), 0).sum(1) - (b + 1) * truth
        broken.append(not torch.equal(votes.sign(), truth))
    assert any(broken)


def test_redundancy_is_that_of_the_construction():
    means = {(n, b): deterministic_allocation(n, b).sum(1).double().mean().item() for n, b in CASES}
    expected = {(5, 1): 4.2, (7, 1): 5.571, (7, 2): 6.143, (9, 1): 6.556, (9, 2): 7.222, (9, 3): 8.111}
    assert {case: round(means[case], 3) for case in expected} == expected
    # Worker 0 has one part alone. Worker 1 has 2b + 1 = 3 parts from the next part.
    assert [row.nonzero().view(-1).tolist() for row in deterministic_allocation(7, 1)[:2]] == [[0], [1, 2, 3]]


def test_parts_drawn_at_random():
    drawn = torch.stack([bernoulli_allocation(21, 0.3, seed) for seed in range(50)])
    assert abs(drawn.double().mean() - 0.3) < 5 * (0.3 * 0.7 / drawn.numel()) ** 0.5
    assert torch.equal(bernoulli_allocation(21, 0.3, 4), drawn[4])
    sparse = bernoulli_allocation(9, 1e-9)
    assert torch.equal(sparse, torch.eye(9, dtype=torch.bool))  # no worker without a part, no part without a worker
    assert bernoulli_allocation(9, 1.0).all()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def gradients(net):
    return {name: param.grad for name, param in net.named_parameters()}


def test_a_local_vote_by_hand():
    """Gradients of w·x are x: signs (+, -, -), (+, +, -), (+, -, 0); of an even number the first one decides."""
    w = torch.zeros(3, requires_grad=True)
    frozen = torch.zeros(3)
    xs = [torch.tensor([1.0, -9.0, -2.0]), torch.tensor([5.0, 1.0, -1.0]), torch.tensor([0.1, -0.1, 0.0])]
    loss = local_vote(((w * x).sum() + i for i, x in enumerate(xs)), [w, frozen])
    assert loss.item() == 1  # the mean of 0, 1 and 2
    loss.backward()
    assert w.grad.tolist() == [1, -1, -1]
    w.grad = None
    (3 * local_vote([(w * x).sum() for x in xs[1:]], [w])).backward()
    assert w.grad.tolist() == [3, 3, -3]
    assert frozen.grad is None


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_votes_are_those_of_a_count(count, dtype):
    w, unused = torch.zeros(50, 4, dtype=dtype, requires_grad=True), torch.zeros(3, requires_grad=True)
    xs = torch.randn(count, 50, 4).mul(torch.rand(count, 50, 4) < 0.7).to(dtype)
    local_vote([(w * x).sum() for x in xs], [w, unused]).backward()
    signs = xs.float().sign()
    first = torch.zeros(50, 4)
    for sign in signs.flip(0):
        first = torch.where(sign != 0, sign, first)
    assert torch.equal(w.grad, torch.where(signs.sum(0) == 0, first, signs.sum(0).sign()).to(dtype))
    assert unused.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_of_one_part_is_an_error_on_all_ranks(bad):
    def rank(comm):
        w = torch.zeros(3, requires_grad=True)
        xs = torch.ones(3, 3)
        if comm.rank == 1:
            xs[2, 1] = bad
        local_vote([(w * x).sum() for x in xs], [w]).backward()
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 1"):
            Reducer("signsgd", comm).reduce_({"w": w.grad})

    simulate(3, rank)


def parts_of(n, size, allocation, rank, epochs=1, count=103):
    data = TensorDataset(torch.arange(count))
    sampler = PartSampler(data, allocation, size, rank=rank, seed=5)
    batches = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loader = DataLoader(data, batch_size=sampler.batch_size, sampler=sampler)
        batches.append([x.split(size) for (x,) in loader])
        assert len(loader) == len(batches[-1]) == 103 // (n * size)
    return batches


@pytest.mark.parametrize(("n", "size"), [(5, 4), (7, 1), (3, 11), (1, 103)])
def test_workers_of_a_part_get_the_same_examples(n, size):
    for allocation in (deterministic_allocation(n, 0), bernoulli_allocation(n, 0.4, seed=n)):
        ranks = [parts_of(n, size, allocation, rank, epochs=2) for rank in range(n)]
        for epoch in range(2):
            seen = []
            for step in range(103 // (n * size)):
                parts = {}
                for row, batches in zip(allocation, ranks, strict=True):
                    mine = batches[epoch][step]
                    assert len(mine) == row.sum()
                    for number, part in zip(row.nonzero().view(-1).tolist(), mine, strict=True):
                        assert parts.setdefault(number, part.tolist()) == part.tolist()
                assert sorted(parts) == list(range(n))
                seen += [index for part in parts.values() for index in part]
            assert len(set(seen)) == len(seen) == 103 // (n * size) * n * size  # no example twice
        assert n == 1 or ranks[0][0][0][0].tolist() != ranks[0][1][0][0].tolist()  # another order


def train(comm, allocation, share, attack):
    net = nets[comm.rank]
    sampler = PartSampler(DATA, allocation, 4, rank=comm.rank)
    aggregator = Attacked(MajorityVote(), attack, share) if share else MajorityVote()
    reducer = Reducer(Method(Sign(), NoMemory(), aggregator), comm)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(DATA, batch_size=sampler.batch_size, sampler=sampler):
            optimizer.zero_grad()
            losses = (nn.functional.cross_entropy(net(a), b) for a, b in zip(x.split(4), y.split(4), strict=True))
            local_vote(losses, net.parameters()).backward()
            reducer.reduce_(gradients(net))
            optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


nets: list[nn.Module] = []
GENERATOR = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(60, 6, generator=GENERATOR), torch.randint(0, 3, (60,), generator=GENERATOR))


def trained(allocation, share=0.0, attack="negate"):
    nets[:] = [Net() for _ in allocation]  # one after the other: they seed the global generator
    results = simulate(len(allocation), lambda comm: train(comm, allocation, share, attack))
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


@full
@pytest.mark.parametrize(("n", "b", "share"), tiers([(5, 1, 0.2), (5, 2, 0.4), (7, 2, 0.29)], [(5, 1, 0.2)]))
def test_training_goes_bit_for_bit_as_if_nobody_attacked(n, b, share):
    one_part_each = torch.eye(n, dtype=torch.bool)
    honest = trained(one_part_each)
    for attack in ("negate", "flip"):
        assert torch.equal(trained(deterministic_allocation(n, b), share, attack), honest)
        assert not torch.equal(trained(one_part_each, share, attack), honest)  # so the attack does harm
    assert torch.equal(trained(deterministic_allocation(n, b)), honest)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: deterministic_allocation(6, 1), r"deterministic_allocation\(workers=6\): workers must be odd"),
        (lambda: deterministic_allocation(0, 0), "workers must be odd"),
        (lambda: deterministic_allocation(5.0, 1), r"workers=5.0\): workers must be odd"),
        (lambda: deterministic_allocation(5, 3), r"workers=5, byzantine=3\): no vote tolerates so many; at most 2"),
        (lambda: deterministic_allocation(5, -1), r"byzantine=-1\): byzantine must be a whole number of workers"),
        (lambda: deterministic_allocation(5, True), r"byzantine=True\)"),
        (lambda: bernoulli_allocation(4, 0.5), r"bernoulli_allocation\(workers=4\): workers must be odd"),
        (lambda: bernoulli_allocation(5, 0), r"probability=0\): probability must be in \(0, 1\]"),
        (lambda: bernoulli_allocation(5, math.nan), "probability must be in"),
        (lambda: bernoulli_allocation(5, 0.5, seed=0.5), "seed=0.5 must be a whole number"),
        (lambda: PartSampler(range(8), torch.eye(3).bool(), 3, rank=0), "8 examples are too few for 3 parts"),
        (lambda: PartSampler(range(8), torch.eye(3).bool(), 0, rank=0), r"part_size=0\): part_size must be a whole"),
        (lambda: PartSampler(range(8), torch.eye(3), 1, rank=0), "it must be a square matrix of bool"),
        (lambda: PartSampler(range(8), torch.zeros(3, 3).bool(), 1, rank=0), "with a part for each worker"),
        (lambda: PartSampler(range(8), torch.ones(3, 2).bool(), 1, rank=0), "it must be a square matrix"),
        (lambda: PartSampler(range(8), torch.eye(3).bool(), 1, rank=3), "rank"),
        (lambda: local_vote([], [torch.zeros(1, requires_grad=True)]), "of 0 losses and 1 trained parameters"),
        (lambda: local_vote([torch.zeros(())], [torch.zeros(1)]), "of 0 losses and 0 trained parameters"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
