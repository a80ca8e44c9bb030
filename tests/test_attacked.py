"""Simulated attacks: the payloads of attackers by hand, and no effect on honest ranks and memories."""

import itertools
import math

import pytest
import torch

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.aggregators import AllReduceMean, Mean, TwoPass
from lightning_sparse.compressors import Identity, TopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.order_statistics import CoordinateMedian
from lightning_sparse.contrib.robust import Attacked
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.kernels.uniform import add_uniform_
from lightning_sparse.memory import Momentum, NoMemory, Residual
from tests.support.representatives import DISTINCT
from tests.support.tiers import tiers
from tests.support.training import flat, gradients, make


def run(size, made, steps=1, value=lambda rank: torch.full((1000,), rank + 1.0), seed=0):
    """Return the results of some steps with equal gradients, and each rank's state."""

    def rank(comm):
        reducer, results = Reducer(made, comm, granularity="model", seed=seed), []
        for _ in range(steps):
            grads = {"w": value(comm.rank)}
            reducer.reduce_(grads)
            results.append(grads["w"])
        return results, reducer.state_dict()["elements"]

    ranks = simulate(size, rank)
    assert all(torch.equal(a, b) for results, _ in ranks for a, b in zip(results, ranks[0][0], strict=True))
    return ranks[0][0], [kept for _, kept in ranks]


def mean_under(attack, share):
    return Method(Identity(), NoMemory(), Attacked(AllReduceMean(), attack, share))


def test_the_last_ranks_negate():
    """The last two of 5 ranks with 1, 2, 3, 4, 5 negate: (1 + 2 + 3 - 4 - 5) / 5. None of 2 ranks negates."""
    assert torch.allclose(run(5, mean_under("negate", 0.45))[0][0], torch.tensor(-0.6))
    assert torch.equal(run(5, mean_under("negate", 0.2))[0][0], torch.full((1000,), 1.0))
    assert torch.equal(run(2, mean_under("negate", 0.45))[0][0], torch.full((1000,), 1.5))


def test_signs_are_flipped_at_random_anew_by_each_rank_and_step():
    made = Method(Identity(), NoMemory(), Attacked(Mean(), "flip", 0.4))
    results, _ = run(5, made, 2, lambda rank: torch.full((1000,), 10.0**rank))
    signs = []
    for result in results:
        rest = (5 * result.double() - 111).round()  # of ±1000 and ±10000
        assert set(rest.tolist()) == {-11000.0, -9000.0, 9000.0, 11000.0}
        signs += [rest.sign(), (rest.abs() == 11000).double() * 2 - 1]
    for one in signs:
        assert abs(one.mean()) < 5 / 1000**0.5
    for i, j in ((0, 1), (0, 2), (1, 3), (2, 3)):
        assert abs((signs[i] * signs[j]).mean()) < 5 / 1000**0.5
    again, _ = run(5, made, 2, lambda rank: torch.full((1000,), 10.0**rank))
    assert torch.equal(torch.stack(results), torch.stack(again))
    other, _ = run(5, made, 2, lambda rank: torch.full((1000,), 10.0**rank), seed=1)
    assert not torch.equal(results[0], other[0])


def test_one_factor_from_a_hundredth_to_a_hundred():
    results, _ = run(3, mean_under("scale", 0.34), 100, lambda rank: torch.full((2,), float(rank == 2)))
    factors = 3 * torch.stack(results)
    assert torch.equal(factors[:, 0], factors[:, 1])
    assert factors.min() >= 0.01
    assert factors.max() <= 100
    logs = factors[:, 0].log10()
    assert abs(logs.mean()) < 5 * (4 / 12**0.5) / 100**0.5  # of a uniform distribution from -2 to 2
    assert logs.std() == pytest.approx(4 / 12**0.5, rel=0.25)


@pytest.mark.parametrize("attack", ["scale", "flip", "negate"])
def test_votes_and_medians_withstand_what_a_mean_does_not(attack):
    """Seven ranks agree on the signs; three attack."""
    value = lambda rank: torch.tensor([1.0, -2.0, 3.0, -4.0]).repeat(250)  # noqa: E731
    honest = value(0)
    for compressor, aggregator, expected in (
        (Sign(), MajorityVote(), honest.sign()),
        (Identity(), CoordinateMedian(), honest),
    ):
        results, _ = run(7, Method(compressor, NoMemory(), Attacked(aggregator, attack, 0.43)), 5, value)
        assert all(torch.equal(result, expected) for result in results)
    results, _ = run(7, mean_under(attack, 0.43), 5, value)
    assert not any(torch.allclose(result, honest, rtol=0.1) for result in results)


@pytest.mark.parametrize(
    ("name", "attack"),
    tiers(
        itertools.product(DISTINCT, ["scale", "flip", "negate"]),
        [("dense", "negate"), ("topk", "flip"), ("median", "scale"), ("signsgd", "scale"), ("powersgd", "flip")],
    ),
)
def test_any_method_can_be_attacked_and_a_share_of_none_changes_nothing(name, attack):
    chosen = make(name)

    def rank(comm, share):
        given = Method(chosen.compressor, chosen.memory, Attacked(chosen.aggregator, attack, share))
        reducer, out = Reducer(given, comm, granularity="model", bucket_cap_mb=0.001), []
        for step in range(3):
            grads = gradients("normal", comm.rank, step)
            reducer.reduce_(grads)
            out.append(flat(grads))
        return torch.stack(out)

    honest = simulate(3, lambda comm: rank(comm, 0))
    attacked = simulate(3, lambda comm: rank(comm, 0.4))
    assert all(torch.equal(result, attacked[0]) for result in attacked)
    assert attacked[0].isfinite().all()
    # With a share of 0.3, none of three ranks attacks.
    assert torch.equal(simulate(3, lambda comm: rank(comm, 0.3))[0], honest[0])
    # If the other two ranks agree, one of three changes no sign and no median. But on some elements they disagree.
    assert (attack == "scale" and isinstance(chosen.compressor, Sign)) or not torch.equal(attacked[0], honest[0])


def test_an_attacker_keeps_what_an_honest_rank_would():
    """Its residual and its momentum belong to its original u and gradients."""
    value = lambda rank: torch.tensor([5.0, -1.0, 2.0, -4.0])  # noqa: E731
    for attack in ("flip", "negate"):
        attacked = run(2, Method(TopK(0.25), Residual(), Attacked(Mean(), attack, 0.49)), 3, value)[1]
        assert all(torch.equal(kept["residual"]["w"], attacked[0]["residual"]["w"]) for kept in attacked)
    three = run(3, Method(TopK(0.25), Residual(), Attacked(Mean(), "negate", 0.4)), 3, value)[1]
    assert torch.equal(three[2]["residual"]["w"], three[0]["residual"]["w"])
    momenta = run(3, Method(Sign(), Momentum(), Attacked(MajorityVote(), "flip", 0.4)), 3, value)[1]
    assert torch.equal(momenta[2]["momentum"]["w"], momenta[0]["momentum"]["w"])


def test_attackers_do_not_hide_a_nan():
    def rank(comm):
        grads = {"w": torch.ones(10)}
        if comm.rank == 2:
            grads["w"][3] = math.nan
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 2"):
            Reducer(Method(Sign(), NoMemory(), Attacked(MajorityVote(), "flip", 0.4)), comm).reduce_(grads)

    simulate(3, rank)


def test_random_numbers_are_not_those_of_the_compressor():
    ctx = Context.of(1000, rank=2)
    u = torch.ones(1000)
    numbers = Attacked(Mean(), "flip", 0.4).factor(u, ctx)
    own = add_uniform_(torch.zeros(1000), ctx.key(shared=False)).sub_(0.5).sign()
    assert abs((numbers * own).mean()) < 5 / 1000**0.5


@pytest.mark.parametrize("share", [0.5, -0.1, 1, math.nan, "0.3", True])
def test_bad_shares(share):
    with pytest.raises(
        ValueError, match=r"Attacked\(share=.*must be in \[0, 0.5\), the share of the ranks that attack"
    ):
        Attacked(MajorityVote(), "negate", share)


def test_bad_input():
    with pytest.raises(ValueError, match=r"Attacked\(attack='lie'\): choose from scale, flip, negate"):
        Attacked(Mean(), "lie", 0.1)
    with pytest.raises(TypeError, match=r"Attacked\(aggregator=Residual\(\)\): aggregator must be an Aggregator"):
        Attacked(Residual(), "negate", 0.1)
    with pytest.raises(ValueError, match=r"Attacked\(.*cannot aggregate what TopK"):
        Method(TopK(), NoMemory(), Attacked(MajorityVote(), "negate", 0.1))
    assert method("median").aggregator == CoordinateMedian()


def test_what_an_attacker_has_sent_whole_leaves_no_residual():
    """This holds even though all-reduce overwrites its input with the mean."""
    found, expected = (
        run(3, Method(Identity(), Residual(), Attacked(a, "negate", 0.4)), 3) for a in (AllReduceMean(), Mean())
    )
    assert all(torch.allclose(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert not any(per_name["w"].any() for elements in found[1] for per_name in elements.values())


def test_the_room_for_entries_is_that_of_the_aggregator():
    inner, chosen = TwoPass(second=3), TopK(0.05)
    room = Attacked(inner, "negate", 0).capacity(chosen, 2000, None, 2)
    assert room == inner.capacity(chosen, 2000, None, 2) > 2 * chosen.capacity(2000, None)
