"""SampledTopK, DGC's selection: the threshold of a sample, by hand and in general."""

import math

import pytest
import torch

from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels import candidates
from lightning_sparse.contrib.sampled_topk import SampledTopK
from tests.support.inputs import calls_of
from tests.support.tiers import one_in, tiers
from tests.support.updates import decoded, remainder
from tests.support.vectors import INPUTS, SMOOTH, oracle, recorded

# Every third element is sampled, 100,000 of them, and the 100th largest is the threshold.
NUMEL, DENSITY, K = 300_000, 0.001, 300


def sampled_positions():
    return torch.arange(Context.of(NUMEL).generator(shared=False).initial_seed() % 3, NUMEL, 3)


def others():
    rest = torch.ones(NUMEL, dtype=torch.bool)
    rest[sampled_positions()] = False
    return rest.nonzero().squeeze(1)


def select(u):
    return SampledTopK(DENSITY).select(u)


def test_the_threshold_is_the_100th_largest_of_the_sample():
    u = torch.randn(NUMEL // 3).repeat_interleave(3)  # whichever third is sampled
    u[::2] *= -1
    assert torch.equal(select(u), oracle(u, 300))
    u[others()] *= 0.5  # now fewer reach the threshold
    threshold = u[sampled_positions()].abs().sort(descending=True).values[99]
    ladder = [(u.abs() >= threshold * 0.8**times).count_nonzero().item() for times in range(11)]
    assert ladder[0] == 100
    found = next(count for count in ladder if count >= 240)
    assert len(select(u)) == (found if found <= 390 else 300)


def with_entries(among_the_sample, elsewhere, rest=0.0):
    """Return u with these values, the first ones at sampled positions."""
    u = torch.full((NUMEL,), rest)
    for values, places in ((among_the_sample, sampled_positions()), (elsewhere, others())):
        u[places[torch.randperm(len(places))[: len(values)]]] = torch.tensor(values)
    return u


def test_a_threshold_that_leaves_too_few_is_lowered():
    u = with_entries([-10.0] * 100, [9.0] * 150 + [7.9] * 100)  # 10, then 8
    assert torch.equal(select(u), oracle(u, 250))
    u = with_entries([-10.0] * 100, [9.0] * 139 + [7.9] * 100)  # 239 are too few, so 6.4
    assert torch.equal(select(u), oracle(u, 339))


def test_more_than_1_3_k_are_cut_to_the_k_largest():
    assert torch.equal(select(with_entries([10.0] * 100, [-10.0] * 290)).diff() > 0, torch.ones(389, dtype=torch.bool))
    u = with_entries([10.0] * 100, [-10.0] * 291)
    assert torch.equal(select(u), oracle(u, 300))


def test_after_ten_times_the_k_largest_are_sent():
    """0.8 to the power of ten is 0.107."""
    u = with_entries([10.0] * 100, [1.08] * 150)
    assert torch.equal(select(u), oracle(u, 250))
    u = with_entries([10.0] * 100, [1.07] * 150, rest=0.5)
    assert torch.equal(select(u), oracle(u, 300))


def test_below_300_entries_it_is_exact():
    u = torch.randn(299_000)
    assert torch.equal(SampledTopK(0.001).select(u), oracle(u, 299))


@pytest.mark.parametrize("name", tiers(SMOOTH, ["Gaussian", "Laplace", "mixed scales"]))
def test_lands_between_0_8_and_1_3_k_and_rarely_by_exact_selection(name, monkeypatch):
    exact = calls_of(candidates, "topk_from_maxima", monkeypatch)
    u, sampled = SMOOTH[name](400_000), SampledTopK(0.005)
    draws = {len(sampled.choose(u, 2000, Context.of(len(u), step=step))) for step in range(20)}
    assert len(draws) > 5, "another sample in each step"
    assert 0.8 * 2000 <= min(draws) <= max(draws) <= 1.3 * 2000
    # With 100 entries above a threshold, or 75 to 130 with the steps of 0.8, fewer than 2 % of selections are exact.
    assert len(exact) <= 3
    chosen = sampled.select(u)
    assert torch.equal(chosen, oracle(u, len(chosen)))


@one_in(3)
@pytest.mark.parametrize("name", tiers(INPUTS, ["normal", "few values", "nan and inf"]))
def test_hostile_inputs(name):
    for numel in (1, 63, 3001, 131072, 300_007):
        u = INPUTS[name](numel)
        for density in (0.001, 0.01, 0.1, 0.9, 1.0):
            sampled = SampledTopK(density)
            k = sampled.count(numel)
            chosen = sampled.select(u)
            assert torch.equal(chosen, oracle(u, len(chosen))), (numel, density)
            assert math.ceil(0.8 * k) <= len(chosen) <= min(sampled.capacity(numel), max(k, 1.3 * k))
            assert density < 1 or len(chosen) == numel


@pytest.mark.parametrize("density", [0.02, 0.05])
def test_lands_on_recorded_gradients(density):
    for u in recorded(density, steps=6):
        k = SampledTopK(density).count(u.numel())
        assert k > 300
        assert 0.8 * k <= SampledTopK(density).select(u).numel() <= 1.3 * k


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_is_sent(bad):
    u = torch.randn(NUMEL)
    for where in (int(sampled_positions()[7]), int(others()[7])):
        broken = u.clone()
        broken[where] = bad
        assert where in select(broken).tolist()
    u[: 2 * K] = bad  # the threshold itself is broken
    assert 0 < len(select(u)) <= 1.3 * K
    assert not u[select(u)].isfinite().any()


def test_a_vector_with_three_quarters_of_k_entries_is_reproduced_exactly():
    """The sample has about 75 of them, so its 100th largest is zero."""
    u = torch.zeros(NUMEL)
    filled = torch.randperm(NUMEL)[:225]
    u[filled] = torch.randn(225)
    assert torch.equal(decoded(SampledTopK(DENSITY), u), u)
    assert not remainder(SampledTopK(DENSITY), u).any()


@pytest.mark.parametrize("name", SMOOTH)
def test_contraction(name):
    u, sampled = SMOOTH[name](100_000), SampledTopK(0.01)
    count = len(sampled.select(u))
    rest = remainder(sampled, u).double().square().sum()
    assert 0 < rest <= (1 - count / 100_000) * u.double().square().sum() * (1 + 1e-12)


def test_ranks_and_steps_draw_samples_of_their_own():
    bits = torch.arange(10_000, dtype=torch.int32)
    contexts = [Context.of(1, step=step, rank=rank) for step in range(20) for rank in range(2)]
    starts = {int(candidates.sampled(bits, 100, ctx.generator(shared=False).initial_seed())[0]) for ctx in contexts}
    assert len(starts) > 25  # of 99 places
    assert max(starts) < 99
    assert candidates.sampled(bits, 100, 5).tolist() == list(range(5, 10_000, 99))
    assert candidates.sampled(bits, 10_000, 5).tolist() == list(range(10_000))
    assert candidates.sampled(torch.tensor([-1], dtype=torch.int32), 7, 5).tolist() == [0x7FFFFFFF]
