"""TwoLevel: no loss, equal results on all ranks, and only parts of a segment leave a host."""

import dataclasses

import pytest
import torch

from lightning_sparse import METHODS, Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.aggregators import AllReduceMean, GlobalTopK, Mean, OkTopK, TwoLevel, TwoPass
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.contrib.scaled_sign import ScaledSign
from lightning_sparse.memory import Residual
from tests.processes import run_ranks
from tests.support.representatives import DISTINCT
from tests.support.tiers import full, one_in, tiers
from tests.support.training import KINDS, flat, gradients, kept, make, train


def two_level(between=None, ranks_per_node=2, compressor=None):
    return Method(
        compressor or TopK(density=0.05), aggregator=TwoLevel(between or Mean(), ranks_per_node=ranks_per_node)
    )


def test_by_hand():
    # Two hosts of two ranks. Rank 0 of a host adds up elements 0 and 1, rank 1 the others; each part sends one entry.
    us = [[3.0, 1.0, 0.0, 5.0], [1.0, 0.0, 1.0, -1.0], [0.0, 9.0, 2.0, 0.0], [0.0, -1.0, 2.0, 1.0]]
    # Means of the hosts: [2, .5, .5, 2] and [0, 4, 2, .5]. Host 0 sends elements 0 and 3, host 1 elements 1 and 2.

    def rank(comm):
        reducer = Reducer(two_level(compressor=TopK(density=0.5)), comm, granularity="model")
        grads = {"w": torch.tensor(us[comm.rank])}
        reducer.reduce_(grads)
        return grads["w"].tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()

    kept = [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert simulate(4, rank) == [([1.0, 2.0, 1.0, 1.0], kept[rank]) for rank in range(4)]


def test_dense_results_by_hand():
    us = [[3.0, 1.0, -1.0, 5.0], [1.0, 0.0, 0.0, -1.0], [0.0, 9.0, 3.0, 0.0], [-2.0, -1.0, 1.0, 2.0]]
    # Means of the hosts: [2, .5, -.5, 2] and [-1, 4, 2, 1]. Of each half is sent the mean magnitude, with the signs:
    # [1.25, 1.25, -1.25, 1.25] and [-2.5, 2.5, 1.5, 1.5].

    def rank(comm):
        reducer = Reducer(two_level(compressor=ScaledSign()), comm, granularity="model")
        grads = {"w": torch.tensor(us[comm.rank])}
        reducer.reduce_(grads)
        return grads["w"].tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()

    # Twice the unsent part of the rank's half of the host's mean.
    kept = [[1.5, -1.5, 0.0, 0.0], [0.0, 0.0, 1.5, 1.5], [3.0, 3.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]]
    assert simulate(4, rank) == [([-0.625, 1.875, 0.125, 1.375], kept[rank]) for rank in range(4)]


BETWEEN = [Mean(), GlobalTopK(), OkTopK(), ScaleCom(), TwoPass(second=3)]
# The exchange within a host does not depend on the exchange between hosts.
PLACES = [(1, 1), (3, 1), (2, 2), (3, 2)]
CASES = [(part, *place) for part in BETWEEN for place in PLACES] + [(Mean(), 1, 3), (OkTopK(), 2, 4)]


@full
@pytest.mark.parametrize(("between", "hosts", "ranks_per_node"), tiers(CASES, [(OkTopK(), 2, 2)]), ids=repr)
def test_equal_on_all_ranks_and_nothing_lost(between, hosts, ranks_per_node):
    size = hosts * ranks_per_node
    for kind in KINDS:
        ranks = simulate(size, lambda comm, kind=kind: train(comm, two_level(between, ranks_per_node), kind, "bucket"))
        assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks), kind
        given = sum(rank[0] for rank in ranks)
        found = size * ranks[0][1] + sum(rank[2] for rank in ranks)
        # As for all methods, see test_methods.
        largest = max(flat(gradients(kind, r, s)).abs().max() for r in range(size) for s in range(4)) * 4 * size
        assert (given - found).abs().max() <= largest * 2**-22 + 64 * 2**-149, kind


def takes_two_levels(name):
    return TwoLevel(make(name).aggregator, 2).supports(make(name).compressor)


def test_all_methods_take_two_levels_but_one_whose_matrices_would_be_cut():
    assert [name for name in DISTINCT if not takes_two_levels(name)] == ["powersgd"]


@pytest.mark.parametrize(
    ("name", "hosts", "ranks_per_node"),
    tiers(
        [(name, *place) for name in DISTINCT if takes_two_levels(name) for place in [(2, 2), (3, 2), (1, 3), (2, 1)]],
        [("int4", 2, 2), ("randk", 2, 2)],
    ),
)
def test_every_method_between_nodes(name, hosts, ranks_per_node):
    """Methods have the same properties as among all ranks, see test_methods."""
    size, alone = hosts * ranks_per_node, make(name)
    method = Method(alone.compressor, alone.memory, TwoLevel(alone.aggregator, ranks_per_node))
    for kind in KINDS:
        ranks = simulate(size, lambda comm, kind=kind: train(comm, method, kind, "bucket"))
        assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks), kind
        if METHODS[name].traits.conserves and not (kind in ("bf16", "mixed") and not alone.memory.error_feedback):
            given = sum(rank[0] for rank in ranks)
            found = size * ranks[0][1] + sum(rank[2] for rank in ranks)
            largest = max(flat(gradients(kind, r, s)).abs().max() for r in range(size) for s in range(4)) * 4 * size
            assert (given - found).abs().max() <= largest * 2**-22 + 64 * 2**-149, kind


@pytest.mark.parametrize("name", ["signsgd", "median", "trimmed_mean", "dense"])
def test_a_node_is_one_worker(name):
    """If elements are independent of each other, the result is that of one rank per node, with the nodes' means."""
    alone, us = make(name), torch.randint(-4, 5, (6, 50), generator=torch.Generator().manual_seed(1)).float()
    between = Method(alone.compressor, alone.memory, TwoLevel(alone.aggregator, 2))

    def reduced(comm, method, rows):
        grads = {"w": rows[comm.rank].clone()}
        Reducer(method, comm, granularity="model").reduce_(grads)
        return grads["w"]

    expected = simulate(3, lambda comm: reduced(comm, alone, us.view(3, 2, 50).mean(1)))[0]
    assert torch.equal(simulate(6, lambda comm: reduced(comm, between, us))[5], expected)


@full
@pytest.mark.parametrize("name", tiers(["qsgd", "terngrad"], ["qsgd"]))
def test_unbiased_methods_stay_so(name):
    alone, steps = make(name), 200
    method = Method(alone.compressor, alone.memory, TwoLevel(alone.aggregator, 2))
    us = torch.randn(4, 40, generator=torch.Generator().manual_seed(2)).clamp(-2, 2)  # TernGrad clips at 2.5 deviations

    def rank(comm):
        reducer, results = Reducer(method, comm, granularity="model"), []
        for _ in range(steps):
            grads = {"w": us[comm.rank].clone()}
            reducer.reduce_(grads)
            results.append(grads["w"])
        return torch.stack(results)

    results = simulate(4, rank)[0]
    error = (results.mean(0) - us.mean(0)).abs()
    # Six standard errors of the mean for each of 40 elements: 1e-7 that one is beyond; and rounding.
    assert (error <= 6 * results.std(0) / steps**0.5 + 1e-6).all()
    assert results.std(0).max() > 0


def test_rounded_values_stay_with_the_rank_that_sent_them():
    method = two_level(compressor=GaussianK(density=0.05, value_format="int8"))
    ranks = simulate(4, lambda comm: train(comm, method, "heavy", "model"))
    given, found = sum(rank[0] for rank in ranks), 4 * ranks[0][1] + sum(rank[2] for rank in ranks)
    assert (given - found).abs().max() <= 1e5 * 2**-22


def test_one_rank_per_host_is_the_aggregator_alone():
    alone = Method(TopK(density=0.05), Residual(), GlobalTopK())
    expected = simulate(3, lambda comm: train(comm, alone, "normal", "bucket"))
    got = simulate(3, lambda comm: train(comm, two_level(GlobalTopK(), 1), "normal", "bucket"))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=0)


@one_in(2)
@pytest.mark.parametrize("between", [OkTopK(), make("int4")], ids=["oktopk", "int4"])
def test_same_numbers_over_processes(between):
    method = two_level(between) if isinstance(between, OkTopK) else two_level(between.aggregator, 2, between.compressor)
    threads = simulate(4, lambda comm: train(comm, method, "heavy", "bucket"))
    processes = run_ranks(4, lambda rank: train(ProcessGroupComm(), method, "heavy", "bucket"))
    for a, b in zip(threads, processes, strict=True):
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("found", ["none", "others'"])
def test_a_rank_whose_boundaries_are_lost_goes_on_with_the_others(found):
    """Only rank 3 shares these boundaries. Ranks 0 and 2, which still have theirs, must stay in step with both."""

    def rank(comm):
        reducer = Reducer(two_level(OkTopK()), comm, granularity="model")
        given = received = 0
        for step in range(4):
            if step == 2:
                state = reducer.state_dict()
                for saved in state["segments"].values() if comm.rank == 1 else ():
                    del saved["boundaries"]
                    if found == "others'":
                        saved["boundaries"] = torch.tensor([7])
                reducer = Reducer(two_level(OkTopK()), comm, granularity="model")
                reducer.load_state_dict(state)
            grads = gradients("normal", comm.rank, step)
            given = given + flat(grads)
            reducer.reduce_(grads)
            received = received + flat(grads)
        return received, given - kept(reducer)

    ranks = simulate(4, rank)
    assert all(torch.equal(rank[0], ranks[0][0]) for rank in ranks)
    # Values up to 20 in all, a few fp32 roundings for each of 4 steps and ranks.
    assert (sum(rank[1] for rank in ranks) - 4 * ranks[0][0]).abs().max() <= 20 * 4 * 4 * 2**-23


def test_sends_a_part_of_the_segment():
    numel, density = 100_000, 0.01

    def rank(comm, aggregator):
        reducer = Reducer(Method(TopK(density=density), aggregator=aggregator), comm, granularity="model")
        reducer.reduce_({"w": torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))})
        return comm.sent_bytes, reducer.routing.nbytes(None), reducer.routing.dense_nbytes

    flat_, _, dense = simulate(8, lambda comm: rank(comm, Mean()))[0]
    # A quarter of the segment goes to 1 other host, instead of the whole segment to 7 other ranks. Headers are added.
    sent, announced, share = simulate(8, lambda comm: rank(comm, TwoLevel(Mean(), ranks_per_node=4)))[0]
    assert flat_ / 28 < sent < flat_ / 28 + 300
    # Not announced: 24 bytes to each of 7 ranks, and the header, count and padding of the message.
    assert 7 * 24 + 32 <= sent - announced <= 7 * 24 + 32 + 3 * 7
    assert share == dense / 4


def test_bad_input():
    with pytest.raises(ValueError, match=r"ranks_per_node=0"):
        TwoLevel(ranks_per_node=0)
    with pytest.raises(ValueError, match=r"two levels"):
        TwoLevel(TwoLevel())
    with pytest.raises(ValueError, match=r"AllReduceMean.* cannot aggregate what TopK.*Leave hierarchical out"):
        two_level(AllReduceMean())
    with pytest.raises(ValueError, match=r"ranks_per_node=2\) among 3 ranks: .* multiple"):
        simulate(3, lambda comm: Reducer(two_level(), comm))


@pytest.mark.parametrize("method", [two_level(), two_level(TwoPass(), 2, make("int4").compressor)], ids=str)
def test_nan_on_one_rank_is_named_on_all_ranks(method):
    def rank(comm):
        grads = gradients("normal", comm.rank, 0)
        if comm.rank == 2:
            grads["wide"][3, 3] = torch.nan
        with pytest.raises(NonFiniteGradient, match=r"'wide' is not finite on rank 2"):
            Reducer(method, comm).reduce_(grads)
        return True

    assert simulate(4, rank) == [True] * 4


@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_sums_of_a_node_that_overflow_are_no_error(ranks_per_node):
    def rank(comm):
        grads = {"w": torch.full((100,), 3e38)}
        Reducer(two_level(ranks_per_node=ranks_per_node), comm).reduce_(grads)
        return float(grads["w"].max())

    assert simulate(2 * ranks_per_node, rank) == pytest.approx([3e38] * 2 * ranks_per_node)


@pytest.mark.parametrize("numel", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_order_statistics_of_segments_with_fewer_elements_than_ranks(name, numel):
    def rank(comm):
        whole = method(name)
        grads = {"b": torch.arange(1.0, numel + 1) + comm.rank}
        reducer = Reducer(dataclasses.replace(whole, aggregator=TwoLevel(whole.aggregator, 2)), comm)
        reducer.reduce_(grads)
        return grads["b"]

    # The means of two nodes' two ranks: 0.5 and 2.5 above the first rank's.
    for found in simulate(4, rank):
        assert torch.equal(found, torch.arange(1.0, numel + 1) + 1.5)
