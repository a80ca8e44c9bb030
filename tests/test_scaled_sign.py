"""EF-signSGD: by hand, as the best approximation with one bit and a scale, and on cases in which signSGD fails."""

import math

import pytest
import torch
from torch import nn

from lightning_sparse import Reducer, method, simulate
from lightning_sparse.context import Context
from lightning_sparse.contrib.scaled_sign import ScaledSign
from lightning_sparse.layout import Segment
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support import inputs
from tests.support.tiers import full, tiers
from tests.support.updates import decoded


def test_by_hand():
    """The mean magnitudes are 2 and 1. Each parameter has one, for any shape."""
    ctx = Context(Segment(0, ("w", "b"), ((2, 2), (3,)), 0))
    (scales, packed), update = ScaledSign().compress(torch.tensor([3.0, -1.0, -4.0, 0.0, -1.0, 1.0, 1.0]), ctx)
    assert scales.tolist() == [2.0, 1.0]
    assert packed.tolist() == [0b1101001]
    assert update.tolist() == [2.0, -2.0, -2.0, 2.0, -1.0, 1.0, 1.0]
    assert ScaledSign().nbytes(ctx.segment, None) == 8 + 1


HOSTILE = {
    **inputs.HOSTILE,
    "huge": lambda g: torch.randn(1000, generator=g) * 1e37,
    "bf16": lambda g: torch.randn(1000, generator=g).bfloat16().float(),
}


@pytest.mark.parametrize("numel", [1, 7, 1000])
@pytest.mark.parametrize("kind", HOSTILE)
def test_contraction_is_exactly_as_published(kind, numel):
    """‖p - C(p)‖² = (1 - δ)‖p‖² with δ = ‖p‖₁² / (d‖p‖²), which no other multiple of the sign undercuts."""
    p = HOSTILE[kind](torch.Generator().manual_seed(0))[:numel]
    left = (p.double() - decoded(ScaledSign(), p).double()).square().sum()
    square = p.double().square().sum()
    assert float(left) == pytest.approx(float(square - p.double().abs().sum() ** 2 / numel), abs=1e-6 * float(square))


@pytest.mark.parametrize("numel", [1, 8, 999])
def test_equal_magnitudes_come_back_exactly(numel):
    p = 0.375 * (1.0 - 2 * torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(decoded(ScaledSign(), p), p)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mean_whose_sum_overflows_is_finite_and_any_other_has_the_bits_of_sum_and_division(size):
    ranks = torch.randn(size, 999, generator=torch.Generator().manual_seed(0))

    def rank(comm):
        huge, plain = {"w": torch.full((100,), 3e38)}, {"w": ranks[comm.rank].clone()}
        Reducer("efsignsgd", comm).reduce_(huge)
        Reducer("efsignsgd", comm).reduce_(plain)
        return float(huge["w"].max()), plain["w"]

    total = sum(decoded(ScaledSign(), own) for own in ranks)
    for largest, mean in simulate(size, rank):
        assert largest == pytest.approx(3e38)
        assert torch.equal(mean, total / size)


EPSILON = 0.5
ROWS = torch.tensor([[1 + EPSILON, -1 + EPSILON], [-1 + EPSILON, 1 + EPSILON]])


def loss(x: torch.Tensor) -> float:
    return float((ROWS @ x).square().sum())


def train(name: str, size: int, steps: int = 300) -> tuple[float, float]:
    """Minimize ⟨a₁, x⟩² + ⟨a₂, x⟩² with a₁, a₂ = ±(1, -1) + ε(1, 1), one term at random each step on each rank.

    Returns:
        The loss at the end, and the least one seen.
    """

    def rank(comm) -> tuple[float, float]:
        model = nn.Module()
        model.x = nn.Parameter(torch.tensor([1.0, 1.0]))
        optimizer = torch.optim.SGD([model.x], lr=0.05)
        updates = method(name).update_rule is not None
        reducer = Reducer(name, comm, exchanged="update" if updates else "gradient")
        exchange = DeltaExchange(reducer, model, [optimizer]) if updates else None
        generator = torch.Generator().manual_seed(comm.rank)
        losses = []
        for _ in range(steps):
            row = ROWS[int(torch.randint(2, (), generator=generator))]
            model.x.grad = 2 * (row @ model.x.detach()) * row
            if exchange is None:
                reducer.reduce_({"x": model.x.grad})
            if exchange is not None:
                exchange.begin(optimizer)
            optimizer.step()
            if exchange is not None:
                exchange.exchange(optimizer)
            losses.append(loss(model.x.detach()))
        return losses[-1], min(losses)

    return simulate(size, rank)[0]


@full
@pytest.mark.parametrize("size", tiers([1, 2, 3], [2]))
def test_the_published_counter_example(size):
    """Karimireddy et al. 2019: every sign is ±(1, -1), so signSGD never changes x₁ + x₂; error feedback does.

    With x₁ + x₂ = 2 the loss is at least 2ε² · 4, its value at the start.
    """
    _, least = train("signsgd", size)
    assert least >= 8 * EPSILON**2 - 1e-5
    last, _ = train("efsignsgd", size)
    assert last < 1e-6


def test_the_row():
    assert str(method("efsignsgd")) == "ScaledSign() + Residual() + Mean() + UpdateRule(momentum='keep', rescale=False)"
    with pytest.raises(
        TypeError, match="'efsignsgd' has no option 'density'; it has local_steps, momentum, rescale, outer_lr, outer_m"
    ):
        method("efsignsgd", density=0.1)


def test_the_rate_is_inside_the_memory():
    """p = ηg + e: half the learning rate, or a learning rate of 0, does not change the residual."""

    def rank(comm):
        model = nn.Module()
        model.x = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([model.x], lr=1.0)
        exchange = DeltaExchange(Reducer("efsignsgd", comm, exchanged="update"), model, [optimizer])
        seen = []
        for rate in (1.0, 0.5, 0.0, 0.0):
            optimizer.param_groups[0]["lr"] = rate
            model.x.grad = torch.tensor([3.0, -1.0])
            exchange.begin(optimizer)
            optimizer.step()
            exchange.exchange(optimizer)
            seen.append(model.x.detach().tolist())
        return seen

    # p = (3, -1): sent (2, -2), kept (1, 1). Then p = (1.5 + 1, -0.5 + 1) = (2.5, 0.5): sent (1.5, 1.5), kept (1, -1).
    # At a rate of 0 that is sent, and then nothing is left.
    assert simulate(1, rank) == [[[-2.0, 2.0], [-3.5, 0.5], [-4.5, 1.5], [-4.5, 1.5]]]
    assert math.isclose(2.5 - 1.5, 1.0)
