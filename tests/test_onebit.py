"""1-bit SGD: means of columns by hand and for random input, error feedback on both sides, and limits."""

import math

import pytest
import torch

from lightning_sparse import NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.context import Context
from lightning_sparse.contrib.onebit import OneBit
from lightning_sparse.kernels import launch
from lightning_sparse.layout import Segment, cut
from tests.support.tiers import one_in
from tests.support.updates import decoded


def context(*shapes: tuple[int, ...]) -> Context:
    return Context(Segment(0, tuple(f"p{index}" for index in range(len(shapes))), shapes, 0))


def test_by_hand():
    """A matrix of two columns, as rows of three, and a vector."""
    u = torch.tensor([1.0, -2.0, 3.0, -4.0, -6.0, -0.5, 0.0, 4.0])
    ctx = context((2, 3), (2,))
    (means, packed), update = OneBit().compress(u, ctx)
    # Means of the non-negatives of each column, then of the negatives. 0 is a non-negative. The mean of no value is 0.
    assert means.tolist() == [2.0, 0.0, 2.0, -2.0, -3.5, 0.0]
    assert packed.tolist() == [0b11000101]
    assert update.tolist() == [2.0, -2.0, 2.0, -3.5, -3.5, -3.5, 2.0, 2.0]
    assert OneBit().nbytes(ctx.segment, None) == 3 * 8 + 1


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zero_of_either_sign_is_no_negative(value):
    assert decoded(OneBit(), torch.tensor([value, -4.0])).tolist() == [0.0, -4.0]


@one_in(3)
@pytest.mark.parametrize("shape", [(40, 50), (1, 2000), (2000, 1), (10, 2, 5, 20), (2000,), ()])
@pytest.mark.parametrize("chunk", [64, 1 << 17])
def test_columns_are_decoded_to_their_means(shape, chunk, monkeypatch):
    """So the errors of a column's non-negatives, and of its negatives, add up to 0."""
    monkeypatch.setattr(launch, "CHUNK", chunk)
    u = torch.randn(max(1, math.prod(shape)), generator=torch.Generator().manual_seed(0))
    update = decoded(OneBit(), u, context(shape))
    for row, found in zip(*(x.double().view(shape[0] if len(shape) > 1 else 1, -1) for x in (u, update)), strict=True):
        for group in (row >= 0, row < 0):
            if group.any():
                assert found[group].unique().numel() == 1
                assert float(found[group][0]) == pytest.approx(float(row[group].mean()), rel=1e-5)


def test_two_values_for_each_column_come_back_exactly():
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (30, 77), generator=generator)
    upper = torch.randint(0, 99, (30, 1), generator=generator) * 2.0**-5
    lower = torch.randint(-99, 0, (30, 1), generator=generator) * 2.0**20
    u = torch.where(signs > 0, upper, lower).view(-1)
    assert torch.equal(decoded(OneBit(), u, context((30, 77))), u)


@pytest.mark.parametrize("scale", [1e37, 1.0, 1e-30])
def test_sums_of_a_column_stay_in_range(scale):
    u = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale
    update = decoded(OneBit(), u).double()
    assert float(update.max()) == pytest.approx(float(u[u >= 0].double().mean()), rel=1e-5)
    assert float(update.min()) == pytest.approx(float(u[u < 0].double().mean()), rel=1e-5)


def test_error_feedback_on_both_sides_by_hand():
    """Rank 0 owns elements 0 to 2, rank 1 the others. An owner's residual is the unsent part of a sum."""

    def rank(comm):
        given = [[4.0, 2.0, -6.0, 3.0, 5.0, -2.0], [1.0, 3.0, -2.0, 1.0, 5.0, 0.0]][comm.rank]
        grads = {"w": torch.tensor(given)}
        reducer = Reducer("onebit", comm, granularity="model")
        reducer.setup(grads)
        reducer.routing._pays = lambda *_: True
        reducer.reduce_(grads)
        return grads["w"].tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()

    # Rank 1 sends 2, 2, -2 of (1, 3, -2). With rank 0's own (4, 2, -6) the mean is 3, 2, -4, and 2.5, 2.5, -4 is sent.
    # Rank 0 sends 4, 4, -2 of (3, 5, -2). With rank 1's own (1, 5, 0) the mean is 2.5, 4.5, -1: 3.5, 3.5, -1 is sent.
    result = [2.5, 2.5, -4.0, 3.5, 3.5, -1.0]
    assert simulate(2, rank) == [
        (result, [1.0, -1.0, 0.0, -1.0, 1.0, 0.0]),
        (result, [-1.0, 1.0, 0.0, -2.0, 2.0, 0.0]),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_columns_stay_columns_in_regions(size):
    """If possible, ranks own whole columns, so equal columns come back exactly. A rank adds at most one column."""
    u = torch.where(torch.arange(30) % 3 == 0, 2.0, -1.0) * 2.0 ** torch.arange(40)[:, None]

    def rank(comm):
        grads = {"w": u.clone()}
        Reducer("onebit", comm, granularity="model").reduce_(grads)
        return grads["w"]

    assert all(torch.equal(result, u) for result in simulate(size, rank))
    regions = cut(context((40, 30)).segment, size)
    assert sum(region.numel for region in regions) == 1200
    assert sum(4 * OneBit.numbers * sum(shape[0] for shape in region.shapes) for region in regions) <= 8 * (40 + size)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [3, 99, 105])
def test_what_is_not_finite_is_named(value, place):
    def rank(comm) -> None:
        flat = torch.ones(110)
        flat[place] = value if comm.rank == 1 else 1
        grads = {"w": flat[:100].view(10, 10), "b": flat[100:]}
        with pytest.raises(NonFiniteGradient, match=f"'{'w' if place < 100 else 'b'}' is not finite on rank 1"):
            Reducer("onebit", comm, granularity="model").reduce_(grads)

    simulate(2, rank)


def test_bytes_do_not_grow_with_the_number_of_ranks():
    for size in (2, 4, 16):

        def rank(comm, size=size):
            grads = {"w": torch.randn(16, 16 * 256, generator=torch.Generator().manual_seed(comm.rank))}
            Reducer("onebit", comm, granularity="model").reduce_(grads)
            return comm.sent_bytes

        for sent in simulate(size, rank):
            # A bit each way, two means for each column and direction, and two headers to each of the others.
            exact = 2 * (size - 1) / size * (16 * 16 * 256 / 8 + 16 * 8)
            assert 0 <= sent - exact <= 2 * (size - 1) * 40


def test_the_row_has_no_options_but_its_aggregators():
    assert str(method("onebit")) == "OneBit() + Residual() + TwoPass()"
    with pytest.raises(TypeError, match="'onebit' has no option 'levels'; it has second"):
        method("onebit", levels=2)
    with pytest.raises(ValueError, match=r"second=2.*\) cannot aggregate what OneBit\(\) sends. Leave second out:"):
        method("onebit", second=2)
