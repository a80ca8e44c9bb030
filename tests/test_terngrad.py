"""TernGrad: by hand, in expectation, and with a scale shared by all ranks."""

import math

import pytest
import torch

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.aggregators import TwoPass
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.shared_scale import SharedScale
from lightning_sparse.contrib.terngrad import TernGrad
from lightning_sparse.kernels import launch
from lightning_sparse.memory import NoMemory
from tests.support.rounding import check_rounding
from tests.support.tiers import in_diagonals, later, tiers
from tests.support.updates import decoded


def test_by_hand():
    """A value whose magnitude is the scale or 0 is not rounded at random."""
    compressor, ctx = TernGrad(), Context.of(5)
    (scales, packed), update = compressor.compress(torch.tensor([2.0, -2.0, 0.0, 0.0, 2.0]), ctx)
    assert scales.tolist() == [2.0]
    # Codes 2, 0, 1, 1 in a byte, 2 in the next.
    assert packed.tolist() == [0b01010010, 0b10]
    assert update.tolist() == [2.0, -2.0, 0.0, 0.0, 2.0]
    assert compressor.nbytes(ctx.segment, None) == 4 + 2


def test_clipping_by_hand():
    """The sum of squares is 100, of 100 elements: σ is 1."""
    u = torch.full((100,), 0.9)
    u[7] = -math.sqrt(100 - 99 * 0.81)
    assert TernGrad().scales(u, Context.of(100)).tolist() == pytest.approx([2.5])
    assert TernGrad(clip=math.inf).scales(u, Context.of(100)).tolist() == pytest.approx([-float(u[7])])
    assert decoded(TernGrad(), u)[7] == pytest.approx(-2.5)


@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_ternary_values_come_back_exactly(numel):
    """A single element and equal elements are not clipped either."""
    for value in (-3.7, 1e-42, 3.4e38):
        u = torch.full((numel,), value)
        assert torch.equal(decoded(TernGrad(), u), u)
    signs = torch.randint(-1, 2, (numel,), generator=torch.Generator().manual_seed(0)) * 0.3
    assert torch.equal(decoded(TernGrad(clip=math.inf), signs), signs)
    assert not decoded(TernGrad(clip=math.inf), torch.zeros(numel)).any()


INPUTS = {
    "normal": lambda g: torch.randn(200, generator=g),
    "heavy": lambda g: torch.randn(200, generator=g) / torch.rand(200, generator=g).clamp(min=1e-3),
    "equal": lambda g: torch.full((200,), -2.5),
    "few": lambda g: torch.randn(200, generator=g) * (torch.arange(200) % 16 == 0),
}


@pytest.mark.parametrize(("kind", "clip"), in_diagonals(INPUTS, [2.5, math.inf], 4))
def test_unbiased_and_within_the_variance_of_one_level(kind, clip):
    """For clipped v, E Q(v) = v and E‖Q(v) - v‖² = Σ|v|(s - |v|) <= √d‖v‖², which is QSGD's bound for one level."""
    u = INPUTS[kind](torch.Generator().manual_seed(1))
    limit = min(float(u.abs().max()), clip * math.sqrt(float(u.double().square().mean())))
    v = u.double().clamp(-limit, limit)
    error = check_rounding(
        lambda step: TernGrad(clip).compress(u, Context.of(200, step=step))[1], v, torch.tensor(limit), draws=1000
    )
    assert error == pytest.approx(float((v.abs() * (limit - v.abs())).sum()), abs=1e-5 * limit * limit)
    assert error <= math.sqrt(200) * float(v.square().sum())


@later
def test_parameters_have_scales_of_their_own_that_ranks_share():
    """The larger scale is rank 1's for the first parameter, and rank 0's for the other. Sums are multiples of it."""
    given = [
        {"a": torch.full((8,), 1.0), "b": torch.full((3, 5), -6.0)},
        {"a": torch.full((8,), 3.0), "b": torch.zeros(3, 5)},
    ]

    def rank(comm):
        outs = []
        reducer = Reducer("terngrad", comm, granularity="model")
        reducer.setup(given[0])
        reducer.routing._pays = lambda *_: True
        for _ in range(200):
            grads = {name: grad.clone() for name, grad in given[comm.rank].items()}
            reducer.reduce_(grads)
            outs.append(grads)
        return outs

    ranks = simulate(2, rank)
    for mine, other in zip(*ranks, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    a = torch.stack([out["a"] for out in ranks[0]])
    # Rank 1 always sends 1 · 3, rank 0 in one of three cases.
    assert set(a.view(-1).tolist()) == {1.5, 3.0}
    # The mean of 1,600 draws of 0 or 3, halved: its variance is 1/3 · 2/3 · 9 / 4 / 1600.
    assert abs(float(a.mean()) - 2) < 5 * math.sqrt(0.5 / 1600)
    assert {float(x) for out in ranks[0] for x in out["b"].view(-1)} == {-3.0}


@pytest.mark.parametrize("size", tiers([1, 2, 3, 8, 129], [1, 2, 3, 8]))
def test_sums_of_many_ranks_are_exact(size):
    """For element i, the first i ranks send 1, and the others -1. Sums are from -P to P, in nine bits for 129 ranks."""

    def rank(comm):
        grads = {"w": torch.where(torch.arange(size + 1) > comm.rank, 1.0, -1.0)}
        reducer = Reducer("terngrad", comm)
        reducer.setup(grads)
        reducer.routing._pays = lambda *_: True
        reducer.reduce_(grads)
        return grads["w"]

    expected = (2 * torch.arange(size + 1) - size) / size
    assert all(torch.equal(out, expected) for out in simulate(size, rank))


def test_bytes():
    """2 bits to the owners, and sums of 8 ranks, 0 to 16, in 5 bits."""

    def rank(comm):
        Reducer("terngrad", comm, granularity="model").reduce_({"w": torch.randn(8 * 8000)})
        return comm.sent_bytes

    for sent in simulate(8, rank):
        # And the scale, and three headers to each of the others.
        assert 0 <= sent - 7 * 8000 * (2 + 5) / 8 <= 7 * (3 * 40)


@pytest.mark.parametrize("chunk", [64, 1 << 10])
def test_pieces_that_stay_in_cache_change_nothing(chunk, monkeypatch):
    u = torch.randn(5001, generator=torch.Generator().manual_seed(0))
    (scales, packed), update = TernGrad().compress(u, Context.of(5001))
    monkeypatch.setattr(launch, "CHUNK", chunk)
    # The scale is a sum of other parts.
    torch.testing.assert_close(TernGrad().scales(u, Context.of(5001)), scales)
    again, found = TernGrad().quantize(u, scales, scales, Context.of(5001))
    assert torch.equal(again, packed)
    assert torch.equal(found, update)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_on_all_ranks(value):
    def rank(comm):
        grads = {"v": torch.ones(10), "w": torch.ones(1000)}
        if comm.rank == 1:
            grads["w"][700] = value
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 1 at step 0"):
            Reducer("terngrad", comm, granularity="model").reduce_(grads)
        return True

    assert all(simulate(3, rank))


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, "2.5", True, None])
def test_bad_options(clip):
    with pytest.raises(ValueError, match=r"TernGrad\(clip=.*a number above 0"):
        method("terngrad", clip=clip)


def test_parts_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"SharedScale\(\) cannot aggregate what TopK"):
        Method(TopK(), NoMemory(), SharedScale())
    with pytest.raises(ValueError, match=r"TwoPass\(.*\) cannot aggregate what TernGrad"):
        Method(TernGrad(), NoMemory(), TwoPass())
    with pytest.raises(ValueError, match=r"Residual\(\) keeps the errors of TernGrad\(.*\), which may be larger"):
        Method(TernGrad())
    assert Method(TernGrad(), NoMemory()), "with scales of each rank's own"
