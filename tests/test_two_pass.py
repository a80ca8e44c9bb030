"""TwoPass: no loss, equal results on all ranks, and bytes independent of the number of ranks."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, NonFiniteGradient, Reducer, simulate
from lightning_sparse.aggregators import Mean, TwoPass
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.compressors import Compressor, GaussianK, Identity, TopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.randk import RandK
from lightning_sparse.contrib.sidco import SIDCo
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.layout import Layout, Segment, cut
from lightning_sparse.memory import NoMemory, Residual
from lightning_sparse.state import resized
from tests.processes import run_ranks
from tests.support.tiers import full, one_in, tiers
from tests.support.training import KINDS, flat, gradients, kept
from tests.support.update_training import train as train_updates


@dataclass(frozen=True)
class Whole(Compressor):
    """Rounds to whole numbers."""

    def compress(self, u, ctx):
        return (u.round(),), u.round()

    def decode(self, payload, ctx):
        return payload[0]

    def nbytes(self, segment, density):
        return segment.numel  # not true, so that it is not too much to be used


def two_pass(compressor: Compressor, second: float = 1.0) -> Method:
    return Method(compressor, Residual(), TwoPass(second))


def take(comm, method: Method, us: list[list[list[float]]]) -> list[tuple[list[float], list[float]]]:
    """Return the result and the residual of this rank after each step."""
    reducer = Reducer(method, comm, granularity="model")
    taken = []
    for step in us:
        grads = {"w": torch.tensor(step[comm.rank])}
        reducer.reduce_(grads)
        taken.append((grads["w"].tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()))
    return taken


def test_entries_by_hand():
    """Rank 0 owns elements 0 and 1, rank 1 the others. One entry of each pair is sent, and one of its sums is kept."""
    us = [[[4.0, -2.0, 2.0, 6.0], [1.0, -3.0, -8.0, 1.0]], [[0.0] * 4, [0.0] * 4]]
    first, second = simulate(2, lambda comm: take(comm, two_pass(TopK(density=0.5)), us))
    # Rank 1 sends -3 of element 1, so the sums are 4 and -5. Rank 0 sends 6 of element 3: -8 and 7.
    assert first[0] == ([0.0, -2.5, -4.0, 0.0], [4.0, 0.0, 2.0, 0.0])
    assert second[0] == ([0.0, -2.5, -4.0, 0.0], [1.0, 0.0, 0.0, 7.0])
    # The owners' residuals are part of the next sums: 4 + 1 for rank 0, and 2 and 7 for rank 1, which keeps the 2.
    assert first[1] == ([2.5, 0.0, 0.0, 3.5], [0.0, 0.0, 0.0, 0.0])
    assert second[1] == ([2.5, 0.0, 0.0, 3.5], [0.0, 0.0, 2.0, 0.0])


def test_a_second_pass_twice_as_dense_by_hand():
    """As above, but owners send both sums of their region."""
    us = [[[4.0, -2.0, 2.0, 6.0], [1.0, -3.0, -8.0, 1.0]]]
    first, second = simulate(2, lambda comm: take(comm, two_pass(TopK(density=0.5), 2), us))
    assert first == [([2.0, -2.5, -4.0, 3.5], [0.0, 0.0, 2.0, 0.0])]
    assert second == [([2.0, -2.5, -4.0, 3.5], [1.0, 0.0, 0.0, 0.0])]


@pytest.mark.parametrize("size", [2, 8])
def test_bytes_of_a_denser_second_pass_are_those_announced(size):
    def rank(comm, second):
        reducer = Reducer(two_pass(TopK(density=0.01), second), comm, granularity="model")
        reducer.reduce_({"w": torch.randn(80_000, generator=torch.Generator().manual_seed(comm.rank))})
        return comm.sent_bytes, reducer.routing.nbytes(reducer.method.density)

    for second in (1, 3):
        for sent, announced in simulate(size, lambda comm: rank(comm, second)):  # noqa: B023
            assert (
                announced <= sent <= announced + 2 * (size - 1) * 48
            )  # header, checksum, counts and alignment of each
    (few, _), (many, _) = (simulate(size, lambda comm, x=x: rank(comm, x))[0] for x in (1, 3))
    assert many / few == pytest.approx(2, rel=0.15)  # indices of denser entries are shorter


def test_dense_updates_by_hand():
    us = [[[0.5, -1.5, 2.25, -0.25], [1.25, -0.75, 0.25, 3.5]]]
    first, second = simulate(2, lambda comm: take(comm, two_pass(Whole()), us))
    # Rank 1 sends 1 and -1: sums 1.5 and -2.5, means rounded to 1 and -1. Rank 0 sends 2 and 0: 2.25 and 3.5, to 1, 2.
    assert first[0] == ([1.0, -1.0, 1.0, 2.0], [-0.5, -0.5, 0.25, -0.25])
    assert second[0] == ([1.0, -1.0, 1.0, 2.0], [0.25, 0.25, 0.25, -0.5])


COMPRESSORS = [
    TopK(density=0.05),
    TopK(density=0.05, index_format="int32", value_format="int8"),
    GaussianK(density=0.05, value_format="bfloat16"),
    RandK(density=0.05),
    QSGD(bucket=64),
    Identity(),
]
SIZES = [1, 2, 3, 5, 8]


def train(comm, method: Method, kind: str, granularity: str, steps: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    reducer = Reducer(method, comm, granularity=granularity, bucket_cap_mb=0.001, seed=3)
    reducer.setup(gradients(kind, comm.rank, 0))
    reducer.routing._pays = lambda *_: True  # segments with fewer elements than ranks, too
    given = received = torch.zeros(())
    for step in range(steps):
        grads = gradients(kind, comm.rank, step)
        given = given + flat(grads)
        reducer.reduce_(grads)
        received = received + flat(grads)
    return given, received, kept(reducer)


CASES = [(compressor, 1.0, size) for compressor in COMPRESSORS for size in SIZES]
CASES += [(TopK(density=0.05), second, size) for second in (0.5, 3.0, 99.0) for size in SIZES]


@one_in(3)
@pytest.mark.parametrize(
    ("compressor", "second", "size"), tiers(CASES, [case for case in CASES if case[2] == 3][::3]), ids=repr
)
def test_equal_on_all_ranks_and_nothing_lost(compressor, second, size):
    for index, kind in enumerate(KINDS):
        granularity = ["layer", "bucket", "model"][index % 3]
        ranks = simulate(size, lambda comm, kind=kind: train(comm, two_pass(compressor, second), kind, granularity))  # noqa: B023
        assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks), kind
        given = sum(rank[0] for rank in ranks)
        found = size * ranks[0][1] + sum(rank[2] for rank in ranks)
        # As for all methods, see test_methods.
        largest = max(flat(gradients(kind, r, s)).abs().max() for r in range(size) for s in range(2)) * 4 * size
        assert (given - found).abs().max() <= largest * 2**-22 + 64 * 2**-149, kind


@pytest.mark.parametrize("compressor", [TopK(density=0.1), TopK(density=0.1, index_format="int32")], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_few_enough_entries_come_back_exactly(compressor, size):
    """No rank has more nonzero entries in a region than it sends. All are multiples of the number of ranks."""
    numel = 240 * size
    chosen = torch.arange(0, numel, 11)[: numel // 11]
    us = torch.zeros(size, numel)
    us[:, chosen] = torch.randint(1, 99, (len(chosen),), generator=torch.Generator().manual_seed(0)).float()
    us[:, chosen[::2]] *= -1
    us[0, chosen[::3]] *= 1 - 2 * size
    us *= size

    def rank(comm):
        reducer = Reducer(two_pass(compressor), comm, granularity="model")
        grads = {"w": us[comm.rank].clone()}
        reducer.reduce_(grads)
        assert not reducer.state_dict()["elements"]["residual"]["w"].any()
        return grads["w"]

    for result in simulate(size, rank):
        assert torch.equal(result, us.sum(0) / size)


def test_all_of_the_owners_part_goes_into_the_sum():
    """Two entries of rank 0's own region are larger than all others, and only one is sent. The other stays pending."""

    def rank(comm):
        reducer = Reducer(two_pass(TopK(density=0.1)), comm, granularity="model")
        seen = []
        for step in range(3):
            grads = {"w": torch.zeros(20)}
            if comm.rank == 0 and step == 0:
                grads["w"][:3] = torch.tensor([8.0, -6.0, 4.0])
            reducer.reduce_(grads)
            seen.append(grads["w"][:3].tolist())
        return seen

    assert simulate(2, rank) == [[[4.0, 0.0, 0.0], [0.0, -3.0, 0.0], [0.0, 0.0, 2.0]]] * 2


@full
@pytest.mark.parametrize(
    "compressor", [TopK(density=0.01, index_format="int32"), QSGD(bucket=64)], ids=["topk", "qsgd"]
)
def test_bytes_do_not_grow_with_the_number_of_ranks(compressor):
    numel, announced = 3 * 2**15, {}
    for size in (2, 4, 16, 32):

        def rank(comm):
            reducer = Reducer(two_pass(compressor), comm, granularity="model")
            reducer.reduce_({"w": torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))})
            return comm.sent_bytes, reducer.routing.nbytes(None)

        sent = simulate(size, rank)
        assert len(set(sent)) == 1, "every rank sends as much"
        busiest, announced[size] = sent[0]
        # Not announced: header and checksum of each message, 24 bytes, and a count, or parts filled up to 8 bytes.
        assert 24 <= (busiest - announced[size]) / (2 * (size - 1)) <= 24 + 8 + 2 * 7
    assert announced[32] < 2 * announced[2] < 2.1 * compressor.nbytes(Segment(0, ("w",), ((numel,),), 0), None)


def test_random_entries_differ_from_region_to_region_and_are_the_same_on_all_ranks():
    numel, size = 4000, 4

    def rank(comm):
        reducer = Reducer(two_pass(RandK(density=0.05)), comm, granularity="model")
        grads = {"w": torch.full((numel,), float(comm.rank + 1))}
        reducer.reduce_(grads)
        return grads["w"]

    results = simulate(size, rank)
    assert all(torch.equal(result, results[0]) for result in results)
    # Each entry is the mean of 1 to 4, never a part of it, because the owner sends the same entries as the others.
    assert results[0].unique().tolist() == [0.0, 2.5]
    places = [tuple(region.nonzero().view(-1).tolist()) for region in results[0].split(numel // size)]
    assert len(set(places)) == size
    assert {len(place) for place in places} == {50}


def test_regions_keep_the_parameters_apart():
    segment = Layout.of({"b": (5,), "m": (3, 4), "s": (), "none": (0, 2), "v": (4,)}, "model").segments[0]
    assert segment.names == ("v", "none", "s", "m", "b")
    regions = cut(segment, 4)  # 22 elements: 6, 6, 5 and 5
    assert [(region.names, region.shapes, region.start) for region in regions] == [
        (("v", "s", "m"), ((4,), (), (1, 1)), 0),
        (("m", "m"), ((1, 3), (1, 3)), 6),
        (("m", "m"), ((1, 1), (1, 4)), 12),
        (("b",), ((5,),), 17),
    ]
    # A matrix of five rows, 10 elements each, is cut into whole rows, and the rest of a row at either end.
    whole = Segment(0, ("w",), ((5, 2, 5),), 0)
    assert [region.shapes for region in cut(whole, 2)] == [((2, 2, 5), (1, 5)), ((1, 5), (2, 2, 5))]
    assert [region.shapes for region in cut(whole, 5)] == [((1, 2, 5),)] * 5
    assert [region.shapes for region in cut(whole, 12)][:4] == [((1, 5),), ((1, 5),), ((1, 4),), ((1, 4),)]
    few = cut(Segment(0, ("w",), ((2,),), 7), 3)
    assert [(region.numel, region.start) for region in few] == [(1, 7), (1, 8), (0, 9)]


@one_in(2)
@pytest.mark.parametrize("size", tiers(SIZES, [2, 3]))
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("compressor", [TopK(density=0.05), QSGD(bucket=64)], ids=["topk", "qsgd"])
def test_updates_are_equal_on_all_ranks_and_nothing_is_lost(optimizer, compressor, size):
    """Sent entries contain a momentum payout. Its unsent part goes back to the momentum, or into a residual."""
    ranks = simulate(size, lambda comm: train_updates(comm, optimizer, two_pass(compressor))[0])
    assert all(torch.equal(other, ranks[0]) for other in ranks)


@pytest.mark.parametrize("old", [2, 3])
def test_another_number_of_ranks_goes_on_with_all_that_owners_have_kept(old):
    method = two_pass(TopK(density=0.05))

    def before(comm):
        reducer = Reducer(method, comm, granularity="model")
        grads = gradients("normal", comm.rank, 0)
        given = flat(grads)
        reducer.reduce_(grads)
        return reducer.state_dict(), given - flat(grads)

    states, owed = zip(*simulate(old, before), strict=True)
    assert set(states[0]["elements"]) == {"residual"}
    assert not any(states[0]["segments"].values())

    def after(comm):
        reducer = Reducer(method, comm, granularity="layer")
        reducer.load_state_dict(resized(states, comm.rank, comm.size))
        reducer.setup(gradients("normal", 0, 0))
        return kept(reducer)

    # The mean of the kept parts over the ranks.
    left = sum(simulate(5 - old, after)) / (5 - old)
    torch.testing.assert_close(left, sum(owed) / old, rtol=0, atol=1e-5)


def test_same_numbers_over_processes():
    method = two_pass(TopK(density=0.05))
    threads = simulate(3, lambda comm: train(comm, method, "heavy", "bucket"))
    processes = run_ranks(3, lambda rank: train(ProcessGroupComm(), method, "heavy", "bucket"))
    for a, b in zip(threads, processes, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("place", [0, 50, 99])
def test_a_nan_in_any_region_is_named_on_all_ranks(place):
    def rank(comm):
        grads = {"a": torch.ones(50), "b": torch.ones(50)}
        if comm.rank == 1:
            grads["ab"[place >= 50]][place % 50] = torch.nan
        with pytest.raises(NonFiniteGradient) as caught:
            Reducer(two_pass(TopK(density=0.1)), comm, granularity="model").reduce_(grads)
        return str(caught.value)

    texts = simulate(3, rank)
    assert len(set(texts)) == 1
    assert f"'{'ab'[place >= 50]}' is not finite on rank 1 at step 0" in texts[0]


def test_finite_sums_that_overflow_are_no_error():
    def rank(comm):
        grads = {"w": torch.full((100,), 3e38)}
        Reducer(two_pass(TopK(density=0.5)), comm).reduce_(grads)
        return grads["w"]

    for result in simulate(2, rank):
        assert result.max() == torch.tensor(3e38)


def test_regions_would_share_the_state_of_a_segment():
    with pytest.raises(ValueError, match=r"TwoPass.* cannot aggregate what SIDCo"):
        two_pass(SIDCo(density=0.1))


def test_one_rank_is_the_compressor_alone():
    def rank(comm, aggregator):
        grads = gradients("heavy", 0, 0)
        Reducer(Method(TopK(density=0.05), aggregator=aggregator), comm, granularity="model").reduce_(grads)
        return flat(grads)

    assert torch.equal(*(simulate(1, lambda comm, a=a: rank(comm, a))[0] for a in (Mean(), TwoPass())))


def test_bad_input():
    with pytest.raises(ValueError, match=r"TwoPass\(second=0\): second must be a number above 0"):
        TwoPass(second=0)
    with pytest.raises(
        ValueError, match=r"TwoPass\(second=3\) cannot aggregate what QSGD\(.*\) sends. Leave second out"
    ):
        Method(QSGD(bucket=64), NoMemory(), TwoPass(second=3))
    with pytest.raises(ValueError, match=r"TwoPass\(second=1.0\) cannot aggregate what Sign\(\) sends. Use Mean"):
        Method(Sign(), NoMemory(), TwoPass())


def test_a_region_of_a_segment_draws_numbers_of_its_own():
    segment = Segment(0, ("w",), ((8,),), 0)
    numbers = {
        float(torch.rand((), generator=Context(region).generator(shared=True)))
        for region in (segment, *cut(segment, 4))
    }
    # The first region starts at the start of the segment, so they have the same number.
    assert len(numbers) == 4
