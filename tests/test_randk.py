"""RandK: a uniform choice, equal on all ranks, which sends values without indices."""

import math

import pytest
import torch

from lightning_sparse.context import Context
from lightning_sparse.contrib.randk import RandK
from lightning_sparse.layout import Segment
from tests.support.tiers import one_in
from tests.support.updates import decoded, remainder

# Sparse, drawn with replacement until enough are distinct; and dense, a permutation.
DENSITIES = [0.05, 0.2, 0.4]


def draw(numel: int, density: float, index: int = 0, **moment: int) -> torch.Tensor:
    ctx = Context(Segment(index, ("w",), ((numel,),), 0), **moment)
    randk = RandK(density)
    return randk.choose(torch.zeros(numel), randk.count(numel), ctx)


def test_by_hand():
    u = torch.tensor([1.0, -2.0, 3.0, -4.0])
    randk, ctx = RandK(density=0.5), Context.of(4, seed=3)
    first, second = draw(4, 0.5, seed=3).tolist()
    (values,), _ = randk.compress(u, ctx)
    assert values.tolist() == [u[first], u[second]]
    expected = [0.0] * 4
    expected[first], expected[second] = u[first].item(), u[second].item()
    assert decoded(randk, u, ctx).tolist() == expected
    assert remainder(randk, u, ctx).tolist() == [value - sent for value, sent in zip(u.tolist(), expected, strict=True)]


@pytest.mark.parametrize("numel", [1, 2, 7, 1000, 10_007])
@pytest.mark.parametrize("density", [0.001, 0.05, 0.249, 0.251, 0.9, 1.0])
def test_k_distinct_indices_in_order(numel, density):
    for step in range(20):
        chosen = draw(numel, density, step=step)
        assert chosen.dtype == torch.int64
        assert len(chosen) == RandK(density).count(numel)
        assert (chosen.diff() > 0).all()
        assert 0 <= chosen[0] <= chosen[-1] < numel


def test_an_empty_segment():
    assert RandK().select(torch.empty(0)).tolist() == []
    (values,), _ = RandK().compress(torch.empty(0), Context.of(0))
    assert values.tolist() == []


def test_the_same_on_all_ranks_and_different_in_every_step_and_segment():
    def drawn(**moment):
        return tuple(draw(5000, 0.01, **moment).tolist())

    assert drawn(rank=0) == drawn(rank=7)
    assert len({drawn(), drawn(step=1), drawn(index=1), drawn(seed=1)}) == 4


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for density in DENSITIES:
        RandK(density).compress(torch.randn(1000, generator=torch.Generator()), Context.of(1000))
    assert torch.equal(torch.get_rng_state(), before)


@one_in(3)
@pytest.mark.parametrize("density", DENSITIES)
def test_uniform(density):
    numel, steps = 40, 4000
    counts = torch.zeros(numel)
    together = 0
    for step in range(steps):
        chosen = draw(numel, density, step=step)
        counts[chosen] += 1
        together += {3, 31} <= set(chosen.tolist())
    k = round(density * numel)
    # Each index is chosen Binomial(steps, k / numel) times; 4.5 deviations for 40 of them.
    p = k / numel
    assert (counts - steps * p).abs().max() < 4.5 * math.sqrt(steps * p * (1 - p))
    # And a pair k (k - 1) / (numel (numel - 1)) of the times: without replacement, without preference.
    p = k * (k - 1) / (numel * (numel - 1))
    assert abs(together - steps * p) < 4 * math.sqrt(steps * p * (1 - p))


@one_in(3)
@pytest.mark.parametrize("density", DENSITIES)
def test_expected_error(density):
    """E‖u - C(u)‖² = (1 - k/d)‖u‖²."""
    numel, steps = 200, 2000
    u, randk = torch.randn(numel), RandK(density)
    squares = u.double().square()
    k = randk.count(numel)
    errors = [remainder(randk, u, Context.of(numel, step=step)).double().square().sum() for step in range(steps)]
    # A sum of k of d numbers drawn without replacement has variance k (d - k) / (d - 1) times that of the numbers.
    deviation = math.sqrt(k * (numel - k) / (numel - 1) * squares.var(correction=0) / steps)
    assert abs(torch.stack(errors).mean() - (1 - k / numel) * squares.sum()) < 4 * deviation


def test_an_input_that_is_zero_elsewhere_is_reproduced_exactly():
    randk, ctx = RandK(0.1), Context.of(1001, step=5)
    chosen = draw(1001, 0.1, step=5)
    u = torch.zeros(1001).index_copy(0, chosen, torch.randn(len(chosen)))
    assert torch.equal(decoded(randk, u, ctx), u)
    assert not remainder(randk, u, ctx).any()


def test_payloads_are_values_at_the_same_indices():
    randk, ctx = RandK(0.1), Context.of(500)
    u, v = torch.randn(500), torch.randn(500)
    ((a,), one), ((b,), other) = randk.compress(u, ctx), randk.compress(v, ctx)
    assert torch.equal(one.indices, other.indices)
    indices, values = randk.mean((torch.stack([a, b]),), ctx)
    assert torch.equal(indices, draw(500, 0.1).expand(2, -1))
    assert torch.equal(values, torch.stack([u[indices[0]], v[indices[0]]]) / 2)
    assert a.numel() * a.element_size() == randk.nbytes(ctx.segment, None) == 200
