"""RandK: a uniform choice, the same on all ranks, whose values travel alone."""

import math

import pytest
import torch

from lightning_sparse.compressors import RandK
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment

# Sparse, drawn with replacement until enough are distinct; and dense, a permutation.
DENSITIES = [0.05, 0.2, 0.4]


def segment(numel: int) -> Segment:
    return Segment(0, ("w",), ((numel,),), 0)


def test_by_hand():
    u = torch.tensor([1.0, -2.0, 3.0, -4.0])
    randk, ctx = RandK(density=0.5), Context(seed=3)
    first, second = randk.select(u, None, ctx).tolist()
    (values,) = payload = randk.compress(u, segment(4), ctx)
    assert values.tolist() == [u[first], u[second]]
    expected = [0.0] * 4
    expected[first], expected[second] = u[first].item(), u[second].item()
    assert randk.decompress(payload, segment(4), ctx).tolist() == expected
    rest = randk.remove_(u.clone(), payload, segment(4), ctx)
    assert rest.tolist() == [value - sent for value, sent in zip(u.tolist(), expected, strict=True)]


@pytest.mark.parametrize("numel", [1, 2, 7, 1000, 10_007])
@pytest.mark.parametrize("density", [0.001, 0.05, 0.249, 0.251, 0.9, 1.0])
def test_k_distinct_indices_in_order(numel, density):
    randk = RandK(density)
    for step in range(20):
        chosen = randk.select(torch.zeros(numel), None, Context(step=step))
        assert chosen.dtype == torch.int64
        assert len(chosen) == randk.target(numel)
        assert (chosen.diff() > 0).all()
        assert 0 <= chosen[0] <= chosen[-1] < numel


def test_an_empty_segment():
    assert RandK().select(torch.empty(0)).tolist() == []
    assert RandK().compress(torch.empty(0), segment(0), Context())[0].tolist() == []


def test_the_same_on_all_ranks_and_different_in_every_step_and_segment():
    def draw(**moment):
        return tuple(RandK(0.01).select(torch.zeros(5000), None, Context(**moment)).tolist())

    assert draw(rank=0) == draw(rank=7)
    assert len({draw(), draw(step=1), draw(segment=1), draw(seed=1)}) == 4


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    for density in DENSITIES:
        RandK(density).compress(torch.randn(1000, generator=torch.Generator()), segment(1000), Context())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("density", DENSITIES)
def test_uniform(density):
    numel, steps = 40, 4000
    counts = torch.zeros(numel)
    together = 0
    for step in range(steps):
        chosen = RandK(density).select(torch.zeros(numel), None, Context(step=step))
        counts[chosen] += 1
        together += {3, 31} <= set(chosen.tolist())
    k = round(density * numel)
    # Each index is chosen Binomial(steps, k / numel) times; 4.5 deviations for 40 of them.
    p = k / numel
    assert (counts - steps * p).abs().max() < 4.5 * math.sqrt(steps * p * (1 - p))
    # And a pair k (k - 1) / (numel (numel - 1)) of the times: without replacement, without preference.
    p = k * (k - 1) / (numel * (numel - 1))
    assert abs(together - steps * p) < 4 * math.sqrt(steps * p * (1 - p))


@pytest.mark.parametrize("density", DENSITIES)
def test_expected_error(density):
    """E‖u - C(u)‖² = (1 - k/d)‖u‖²."""
    numel, steps = 200, 2000
    u, randk = torch.randn(numel), RandK(density)
    squares = u.double().square()
    k = randk.target(numel)
    errors = []
    for step in range(steps):
        ctx = Context(step=step)
        rest = randk.remove_(u.clone(), randk.compress(u, segment(numel), ctx), segment(numel), ctx)
        errors.append(rest.double().square().sum())
    # A sum of k of d numbers drawn without replacement has variance k (d - k) / (d - 1) times that of the numbers.
    deviation = math.sqrt(k * (numel - k) / (numel - 1) * squares.var(correction=0) / steps)
    assert abs(torch.stack(errors).mean() - (1 - k / numel) * squares.sum()) < 4 * deviation


def test_an_input_that_is_zero_elsewhere_is_reproduced_exactly():
    randk, ctx = RandK(0.1), Context(step=5)
    chosen = randk.select(torch.empty(1001), None, ctx)
    u = torch.zeros(1001).index_copy(0, chosen, torch.randn(len(chosen)))
    payload = randk.compress(u, segment(1001), ctx)
    assert torch.equal(randk.decompress(payload, segment(1001), ctx), u)
    assert not randk.remove_(u, payload, segment(1001), ctx).any()


def test_payloads_may_be_added_up_on_the_way():
    randk, ctx, where = RandK(0.1), Context(), segment(500)
    u, v = torch.randn(500), torch.randn(500)
    (a,), (b,) = randk.compress(u, where, ctx), randk.compress(v, where, ctx)
    ((indices, values),) = randk.mean((torch.stack([a, b]),), where, ctx)
    assert torch.equal(indices, randk.select(u, where, ctx))
    assert torch.equal(values, (u + v)[indices] / 2)
    ((_, summed),) = randk.mean((((a + b) / 2)[None],), where, ctx)
    assert torch.equal(summed, values)
    assert torch.equal(a, u[indices])  # the payloads are left as they are
    assert a.numel() * a.element_size() == randk.nbytes(where, None) == 200


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_shows_even_where_it_was_not_drawn(bad):
    randk, ctx = RandK(0.01), Context()
    u = torch.randn(1000)
    chosen = randk.select(u, None, ctx).tolist()
    u[next(i for i in range(1000) if i not in chosen)] = bad
    (values,) = randk.compress(u, segment(1000), ctx)
    assert not torch.isfinite(values).all()


def test_large_finite_values_are_not_taken_for_broken():
    u = torch.full((1000,), 3e38)  # their sum is infinite
    (values,) = RandK(0.01).compress(u, segment(1000), Context())
    assert torch.equal(values, u[:10])
