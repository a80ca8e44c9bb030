"""PowerSGD: results by hand, exact cases, its state, and its limits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.aggregators import Mean, PowerSGD, TwoLevel, TwoPass
from lightning_sparse.comm import Comm, ProcessGroupComm
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.context import Context
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.layout import Segment
from lightning_sparse.state import resized
from tests.processes import run_ranks
from tests.support.tiers import later, one_in, tiers

EPS = 2.0**-24


def context(*shapes: tuple[int, ...]) -> Context:
    return Context(Segment(0, tuple(f"p{index}" for index in range(len(shapes))), shapes, 0))


def padded(rows: list[list[float]]) -> Tensor:
    """Return a matrix of 5 · 5, the smallest of which rank 1 is less than half."""
    matrix = torch.zeros(5, 5)
    matrix[: len(rows), : len(rows[0])] = torch.tensor(rows)
    return matrix


def low_rank(rank: int, rows: int, columns: int, seed: int) -> Tensor:
    """Return a matrix whose singular values, `rank` of them, lie between 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(size, rank, generator=generator)).Q for size in (rows, columns))
    return left * torch.linspace(1, 2, rank) @ right.T


def test_by_hand():
    """Q₀ is the first column's unit vector, so P is the mean's first column, (3, 4), and P̂ = (0.6, 0.8).

    The mean is [[3, 1], [4, 2]]: Q = (5, 2.2), and P̂ Qᵀ = [[3, 1.32], [4, 1.76]]. Rank 0 has twice the mean. Its part
    [[6, 2.64], [8, 3.52]] is in the result. Rank 1 has only its bias.
    """
    given = [padded([[6.0, 2.0], [8.0, 4.0]]), torch.zeros(5, 5)]

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        reducer = Reducer(method("powersgd", rank=1), comm, granularity="model")
        grads = {"w": given[comm.rank].clone(), "b": torch.tensor([comm.rank - 7.0, 3.0])}
        reducer.setup(grads)
        reducer.states[0]["right"] = torch.tensor([9.0, 0, 0, 0, 0])  # only its direction counts
        reducer.reduce_(grads)
        kept = reducer.state_dict()["elements"]["residual"]
        assert not kept["b"].any()
        return grads["w"], grads["b"], kept["w"], reducer.states[0]["right"]

    (result, bias, kept, right), other = simulate(2, rank)
    torch.testing.assert_close(result, padded([[3.0, 1.32], [4.0, 1.76]]))
    assert bias.tolist() == [-6.5, 3.0]
    torch.testing.assert_close(kept, padded([[0.0, -0.64], [0.0, 0.48]]), rtol=0, atol=10 * EPS)
    torch.testing.assert_close(right.abs(), torch.tensor([5.0, 2.2, 0, 0, 0]))
    assert torch.equal(other[0], result)
    assert torch.equal(other[3], right)
    assert not other[2].any()


@one_in(2)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_a_mean_of_low_rank_comes_back(size, granularity):
    """Each rank's matrix has a rank of 3, and their mean, as the columns lie in one space."""
    shapes = {"w": (40, 70), "conv": (16, 4, 5, 5), "b": (40,)}
    own = {name: torch.randn(size, 3, 3, generator=torch.Generator().manual_seed(1)) for name in ("w", "conv")}

    def gradients(rank: int) -> dict[str, Tensor]:
        grads = {"b": torch.randn(40, generator=torch.Generator().manual_seed(rank))}
        for seed, name in enumerate(("w", "conv")):
            rows, columns = shapes[name][0], math.prod(shapes[name][1:])
            mixed = (
                low_rank(3, rows, 3, seed) @ (own[name][rank] + 3 * torch.eye(3)) @ low_rank(3, 3, columns, seed + 2)
            )
            grads[name] = mixed.view(shapes[name])
        return grads

    mean = {name: sum(gradients(rank)[name].double() for rank in range(size)) / size for name in shapes}

    def rank(comm: Comm) -> tuple[float, float]:
        reducer = Reducer(method("powersgd", rank=3), comm, granularity=granularity)
        off = []
        for _ in range(3):
            grads = gradients(comm.rank)
            reducer.reduce_(grads)
            largest = max(float((grads[name] - mean[name]).abs().max()) for name in mean)
            off.append(largest)
        return off

    # Products of up to 100 terms have errors of at most 50 units in the last place of their terms' norms, about 20. At
    # first P has the condition of a random matrix. Later it has the condition of the mean, whose singular values differ
    # by a factor below 10.
    for off in simulate(size, rank):
        assert off[0] < 1e-3
        assert max(off[1:]) < 50 * EPS * 20 * 10


def test_against_the_published_algorithm_in_fp64():
    """Three ranks, eight steps. Both kinds of residuals give the same results: u minus the rank's own share, and, as in
    the authors' code, u minus the result.
    """
    size, steps = 3, 8
    given = torch.randn(steps, size, 30, 40, generator=torch.Generator().manual_seed(0))
    start = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))

    def published(own: bool) -> list[Tensor]:
        right, kept, outs = start.double(), torch.zeros(size, 30, 40).double(), []
        for grads in given.double():
            u = grads + kept
            left = torch.linalg.qr((u @ right).mean(0)).Q
            shares = u.mT @ left
            right = shares.mean(0)
            outs.append(left @ right.T)
            kept = u - left @ shares.mT if own else u - outs[-1]
        return outs

    def rank(comm: Comm) -> list[Tensor]:
        reducer = Reducer(method("powersgd", rank=2), comm)
        reducer.setup({"w": torch.empty(30, 40)})
        reducer.states[0]["right"] = start.T.reshape(-1).clone()
        outs = []
        for grads in given:
            outs.append({"w": grads[comm.rank].clone()})
            reducer.reduce_(outs[-1])
        return [out["w"].double() for out in outs]

    for found in simulate(size, rank):
        for out, own, authors in zip(found, published(True), published(False), strict=True):
            torch.testing.assert_close(own, authors, rtol=0, atol=1e-12)
            # Values of about 1; rounding errors of sums of up to 40 are carried on from step to step.
            torch.testing.assert_close(out, own, rtol=0, atol=1e-4)


def test_one_rank_more_does_not_come_back():
    u = low_rank(4, 40, 70, 0).view(-1)
    _, update = LowRank(3).compress(u, context((40, 70)))
    assert (update - u).norm() > 0.1
    _, update = LowRank(4).compress(u, context((40, 70)))
    assert (update - u).norm() < 1e-4


def test_steps_turn_to_the_largest_singular_vectors():
    """Without a residual, the error decreases to the least error of all matrices of this rank."""
    u = torch.randn(60 * 50, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(u.view(60, 50))
    best = values[4:].norm()
    ctx, compressor = context((60, 50)), LowRank(4)
    left = [float((u - compressor.compress(u, ctx)[1]).norm() / best) for _ in range(100)]
    assert left[0] > 1.05
    assert 1 - 1e-6 < left[-1] < 1.001
    assert sorted(left[:20], reverse=True) == left[:20]


def test_what_was_a_column_of_zeros_is_looked_for_anew():
    """After matrices of zeros, and for entries in rows and columns that were empty before."""
    first, second = torch.zeros(20, 30), torch.zeros(20, 30)
    first[:5, :9] = torch.outer(torch.arange(1.0, 6), torch.arange(1.0, 10))
    second[5:, 9:] = torch.outer(torch.arange(1.0, 16), torch.arange(1.0, 22))
    compressor, ctx = LowRank(2), Context(context((20, 30)).segment, seed=1)
    for matrix, after in ((torch.zeros(20, 30), 0), (first, 0), (first, 0), (first + second, 1), (second, 0)):
        for _ in range(1 + after):
            _, update = compressor.compress(matrix.view(-1), ctx)
            assert update.isfinite().all()
        assert (update.view(20, 30) - matrix).abs().max() <= matrix.abs().max() * 1e-4


@pytest.mark.parametrize(
    ("shapes", "rank"), [([(20, 30)], 12), ([(20, 30)], 10**9), ([(9,), (), (1, 50), (0, 4), (3, 0)], 1), ([(4, 4)], 1)]
)
def test_what_does_not_pay_travels_as_it_is(shapes, rank):
    """2 (n + m) · rank = 2 · 50 · 6 = 600 is not less than 20 · 30."""
    ctx = context(*shapes)
    u = torch.randn(ctx.segment.numel, generator=torch.Generator().manual_seed(0))
    (left, right, exact), update = LowRank(rank).compress(u, ctx)
    assert left.numel() == right.numel() == 0
    assert torch.equal(update, u)
    assert torch.equal(exact, u)

    def step(comm: Comm, name: str, **options: int) -> Tensor:
        flat = torch.randn(ctx.segment.numel, generator=torch.Generator().manual_seed(comm.rank))
        parts = zip(ctx.segment.names, ctx.segment.views(flat), shapes, strict=True)
        grads = {key: part.view(shape) for key, part, shape in parts}
        Reducer(method(name, **options), comm, granularity="model").reduce_(grads)
        return flat

    for found, expected in zip(
        simulate(3, lambda comm: step(comm, "powersgd", rank=rank)),
        simulate(3, lambda comm: step(comm, "dense")),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_bytes():
    segment = Segment(0, ("w", "conv", "b", "small"), ((100, 50), (16, 4, 5, 5), (7,), (3, 3)), 0)
    assert LowRank(2).nbytes(segment, None) == 4 * (2 * 150 + 2 * 116 + 7 + 9)
    # Both factors and the rest travel by all-reduce.
    assert PowerSGD().nbytes(LowRank(2), segment, None, 8) == 2 * 7 / 8 * LowRank(2).nbytes(segment, None)
    u = torch.zeros(segment.numel)
    payload, _ = LowRank(2).compress(u, Context(segment))
    assert sum(part.numel() for part in payload) == 2 * 150 + 2 * 116 + 7 + 9


def with_threads(rank: int) -> Tensor:
    torch.set_num_threads(1 + rank)
    reducer = Reducer(method("powersgd"), ProcessGroupComm())
    for step in range(2):
        grads = {"w": torch.randn(100_000, 16, generator=torch.Generator().manual_seed(10 * step + rank))}
        reducer.reduce_(grads)
    return grads["w"]


@pytest.mark.parametrize(("aggregator", "early"), [(PowerSGD(), False), (Mean(), False), (Mean(), True)])
def test_autocast_of_the_caller_does_not_round_products(aggregator, early, use):
    """In a LightningModule with manual optimization, an optimizer steps, and ranks exchange, under autocast."""
    use("torch")  # the loops in C ignore autocast

    def rank(comm: Comm) -> list[Tensor]:
        results = []
        for mixed in (False, True):
            grads = {"w": low_rank(1, 40, 30, seed=comm.rank)}
            reducer = Reducer(Method(LowRank(2), aggregator=aggregator), comm)
            reducer.setup(grads)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                pending = reducer.begin(reducer.layout.segments[0], [grads["w"].view(-1)])
                if early:
                    reducer.compress(pending)
                reducer.finish(pending)
            results.append(grads["w"])
        return results

    for exact, mixed in simulate(2, rank):
        assert torch.equal(mixed, exact)


@later
def test_ranks_with_other_numbers_of_threads_get_the_same_bits():
    """With LAPACK's QR and this number of rows, nearly all results differed if there was a second thread."""
    assert torch.equal(*run_ranks(2, with_threads))


@later
def test_what_ranks_differ_in_does_not_add_up():
    """Ranks have opposite gradients beside a common one. Their sum never shows them, and residuals are bounded."""
    generator = torch.Generator().manual_seed(0)
    common, apart = torch.randn(2, 30, 40, generator=generator)

    def rank(comm: Comm) -> list[float]:
        reducer = Reducer(method("powersgd", rank=4), comm)
        norms = []
        for _ in range(200):
            reducer.reduce_({"w": common + (1 - 2 * comm.rank) * 3 * apart})
            norms.append(float(reducer.states[0]["residual"].norm()))
        return norms

    for norms in simulate(2, rank):
        # If the result itself were taken out of u, 3 · ‖apart‖ more would stay in every step.
        assert max(norms[100:]) < 1.5 * max(norms[:100])
        assert max(norms) < 200 * 3 * float(apart.norm()) / 5


def test_the_mean_of_own_subspaces():
    """Factors are gathered, not summed, so ranks have different bases. The mean of three rank-1 matrices has rank 3."""
    given = [low_rank(1, 20, 30, seed) for seed in range(3)]

    def rank(comm: Comm) -> Tensor:
        grads = {"w": given[comm.rank].clone()}
        Reducer(Method(LowRank(1), aggregator=Mean()), comm).reduce_(grads)
        return grads["w"]

    for result in simulate(3, rank):
        torch.testing.assert_close(result, sum(given) / 3, rtol=0, atol=100 * EPS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 599, 605])
def test_what_is_not_finite_is_named(bad, place):
    """In the matrix, which is multiplied, and in a vector. The gradients at these positions were zero before."""

    def rank(comm: Comm) -> str:
        reducer = Reducer(method("powersgd", rank=1), comm, granularity="model")
        for step in range(3):
            flat = torch.zeros(610)
            flat[30:590] = 1
            if step == 2 and comm.rank == 1:
                flat[place] = bad
            grads = {"w": flat[:600].view(20, 30), "b": flat[600:]}
            if step < 2:
                reducer.reduce_(grads)
        with pytest.raises(NonFiniteGradient) as caught:
            reducer.reduce_(grads)
        return str(caught.value)

    (text,) = set(simulate(2, rank))
    assert f"'{'w' if place < 600 else 'b'}' is not finite on rank 1 at step 2" in text


@pytest.mark.parametrize("value", [1e38, 3e38])
def test_finite_gradients_whose_products_are_not_are_an_error_on_all_ranks(value):
    """The matrix has 200 · 200 numbers near the largest of fp32. The norms of its columns exceed the range of fp32."""

    def rank(comm: Comm) -> str:
        reducer = Reducer(method("powersgd", rank=1), comm)
        with pytest.raises(NonFiniteGradient) as caught:
            reducer.reduce_({"w": torch.full((200, 200), value)})
        return str(caught.value)

    (text,) = set(simulate(2, rank))
    assert "The gradients from 'w' on are too large for the compressor on rank 0 at step 0" in text


def test_right_factors_are_saved_and_go_to_other_numbers_of_ranks_and_start_anew_in_other_partitions():
    def grads(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {"w": torch.randn(20, 30, generator=generator), "v": torch.randn(15, 25, generator=generator)}

    def train(comm: Comm) -> dict:
        reducer = Reducer(method("powersgd", rank=2), comm, granularity="layer")
        for step in range(3):
            reducer.reduce_(grads(10 * step + comm.rank))
        return reducer.state_dict()

    before = simulate(2, train)
    kept = before[0]["segments"]["w"]["right"]
    assert kept.shape == (2 * 30,)
    assert torch.equal(before[1]["segments"]["w"]["right"], kept)

    def go_on(comm: Comm, granularity: str, rank: int) -> tuple[Tensor | None, Tensor]:
        reducer = Reducer(method("powersgd", rank=rank), comm, granularity=granularity)
        reducer.load_state_dict(resized(before, comm.rank, comm.size))
        reducer.setup(grads(0))
        found = reducer.states[-1].get("right")
        given = grads(comm.rank)
        reducer.reduce_(given)
        return None if found is None else found.clone(), given["w"]

    for granularity, rank in (("layer", 2), ("model", 2), ("layer", 3)):
        results = simulate(3, lambda comm: go_on(comm, granularity, rank))  # noqa: B023
        for found, result in results:
            assert (found is None) if granularity == "model" else torch.equal(found, kept)
            assert torch.equal(result, results[0][1])


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "2", None])
def test_a_rank_that_makes_no_sense_is_refused(rank):
    with pytest.raises(ValueError, match=r"LowRank\(rank=.*\): rank must be a whole number of columns, 1 or more"):
        method("powersgd", rank=rank)


def test_options():
    assert method("powersgd").compressor == LowRank(4)
    assert repr(method("powersgd", rank=np.int64(2))) == repr(method("powersgd", rank=2))
    with pytest.raises(TypeError, match="'powersgd' has no option 'density'; it has rank"):
        method("powersgd", density=0.1)


@pytest.mark.parametrize(
    ("compressor", "aggregator"),
    [
        (LowRank(), TwoPass()),
        (LowRank(), ScaleCom()),
        (LowRank(), TwoLevel(PowerSGD(), 2)),
        (LowRank(), TwoLevel(Mean(), 2)),
        (TopK(), PowerSGD()),
    ],
)
def test_pairs_that_make_no_sense_are_refused_by_name(compressor, aggregator):
    message = rf"{type(aggregator).__name__}\(.*\) cannot aggregate what {type(compressor).__name__}\("
    with pytest.raises(ValueError, match=message):
        Method(compressor, aggregator=aggregator)


@later
@pytest.mark.parametrize("size", tiers([2, 4], [2]))
def test_many_segments_over_gloo(size):
    """Two all-reduces for each of 40 segments, in the order in which they come."""
    from lightning_sparse import ProcessGroupComm
    from tests.processes import run_ranks

    def train(comm: Comm) -> Tensor:
        reducer = Reducer(method("powersgd", rank=2), comm, granularity="layer")
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            grads = {str(index): torch.randn(10 + index, 17, generator=generator) for index in range(40)}
            reducer.reduce_(grads)
        return torch.cat([grad.view(-1) for grad in grads.values()])

    first, *others = run_ranks(size, lambda rank: train(ProcessGroupComm()))
    assert all(torch.equal(other, first) for other in others)
    # Among more than two ranks gloo adds up in another order.
    torch.testing.assert_close(first, simulate(size, train)[0], rtol=0, atol=0 if size == 2 else 1e-4)
