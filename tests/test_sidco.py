"""SIDCo: thresholds by hand and from distributions, and adaptive stages."""

import math

import pytest
import torch
from scipy import integrate, special, stats

from lightning_sparse.context import Context
from lightning_sparse.contrib import sidco
from lightning_sparse.contrib.kernels import candidates
from lightning_sparse.contrib.sidco import SIDCo, adapted, fitted_threshold, gamma_threshold, pareto_threshold
from tests.support.inputs import calls_of
from tests.support.tiers import in_diagonals, one_in
from tests.support.updates import decoded, remainder
from tests.support.vectors import DENSITIES, INPUTS, SMOOTH, oracle, recorded

FITS = ["exponential", "gamma", "pareto"]


def scalar(x):
    return torch.tensor(x, dtype=torch.float64)


def threshold(values, density, stages, fit):
    return fitted_threshold(scalar(values), density, scalar(float(stages)), fit).item()


def test_exponential_stages_by_hand():
    # The mean is 2. One stage leaves the density at once, the first of two a quarter: 2 ln 4 = 2.77.
    values = [1.0] * 6 + [4.0, 6.0]
    assert threshold(values, 0.125, 1, "exponential") == pytest.approx(2 * math.log(8))
    # 4 and 6 exceed it, 1 beyond the smaller on average, and the second stage leaves a quarter of them, then 1/64.
    assert threshold(values, 1 / 16, 2, "exponential") == pytest.approx(4 + math.log(4))
    assert threshold(values, 1 / 256, 2, "exponential") == pytest.approx(4 + math.log(64))
    # Of three stages, the second and the third leave 1/8 each. No value exceeds 4 + ln 8 = 6.08, so the third stage
    # does not change this threshold.
    assert threshold(values, 1 / 256, 3, "exponential") == pytest.approx(4 + math.log(8))


def test_zeros_belong_to_no_distribution():
    """An eighth of all values is a quarter of the nonzero values."""
    values = [0.0] * 8 + [1.0] * 6 + [4.0, 6.0]
    assert threshold(values, 0.125, 1, "exponential") == pytest.approx(2 * math.log(4))
    for fit in FITS:
        assert math.isfinite(threshold(values, 0.125, 2, fit))
    # There are fewer nonzero values than the density requests, so none is excluded.
    assert threshold([0.0] * 8 + [1.0, 3.0], 0.3, 1, "exponential") == 0


def test_pareto_by_hand():
    # Mean 2 and variance 1: shape 3/2, scale 5.
    assert threshold([1.0, 3.0], 0.25, 1, "pareto") == pytest.approx(5 * (1 - 1 / 8) / 1.5)
    # Mean 2 and variance 4 are an exponential distribution: the shape is 0. The threshold is continuous there.
    assert pareto_threshold(scalar(2.0), scalar(4.0), scalar(0.25)).item() == pytest.approx(2 * math.log(4))
    for near in (1e-4, 1e-6, 1e-8, -1e-8, -1e-4):
        found = pareto_threshold(scalar(2.0), scalar(4.0 + near), scalar(0.001)).item()
        assert found == pytest.approx(2 * math.log(1000), rel=abs(near) + 1e-9)
    # 1 - (1 - x / 3)² has mean 1, variance 1/2, and the quantile 3 (1 - √δ).
    assert pareto_threshold(scalar(1.0), scalar(0.5), scalar(0.25)).item() == pytest.approx(1.5)


@pytest.mark.parametrize("shape", [0.01, 0.1, 0.5, 1.0, 2.0, 30.0, 1e4])
def test_gamma_quantiles_are_those_of_scipy(shape):
    """The shape of a gamma distribution follows from ln mean − mean ln; here the other way round, by the digamma."""
    mean = 3.0
    logs = math.log(mean / shape) + float(special.digamma(shape))
    s = math.log(mean) - logs
    estimate = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    assert estimate == pytest.approx(shape, rel=0.02)
    for fraction in (1e-6, 1e-3, 0.25, 0.9):
        found = gamma_threshold(scalar(mean), scalar(logs), scalar(fraction)).item()
        expected = mean / estimate * special.gammaincinv(estimate, 1 - fraction)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-30)
    assert gamma_threshold(scalar(mean), scalar(logs), scalar(1.0)).item() == 0


def test_gamma_by_hand():
    s = math.log(2) - math.log(3) / 2
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    expected = 2 / shape * special.gammaincinv(shape, 0.75)
    assert threshold([1.0, 3.0], 0.25, 1, "gamma") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("distribution", "published"),
    [(stats.norm, [0, 0.10, 0.69, 1.06, 1.26]), (stats.t(3), [4.64, 3.51, 1.14, 0.63, 0.41])],
    ids=["Gaussian", "Student t, 3 d.o.f."],
)
def test_what_each_number_of_stages_selects(distribution, published):
    """On Gaussian input more stages select more, on heavy tails less: entries over k at density 0.001."""

    def excess(limit):
        """Return the mean excess of magnitudes above a threshold, computed from the distribution."""
        return integrate.quad(distribution.sf, limit, math.inf)[0] / distribution.sf(limit)

    numel = 400_000
    x = scalar(distribution.isf((torch.arange(numel).double().numpy() + 0.5) / numel / 2))
    for stages, simulated in enumerate(published, 1):
        limit = -excess(0) * math.log(0.25 if stages > 1 else 0.001)
        for _ in range(stages - 1):
            limit -= excess(limit) * math.log(0.004) / (stages - 1)
        share = 2000 * distribution.sf(fitted_threshold(x, 0.001, scalar(float(stages)), "exponential").item())
        # The tolerance covers the share of the largest of 400,000 values in a mean, and the use of the smallest
        # exceedance instead of the limit.
        assert share == pytest.approx(2000 * distribution.sf(limit), rel=0.02)
        assert share == pytest.approx(simulated, rel=0.07, abs=0.005)  # of a sample of some thousand entries


@pytest.mark.parametrize(
    ("ratios", "best"),
    [
        ([0, 0.10, 0.69, 1.06, 1.26], 4),  # Gaussian
        ([4.64, 3.51, 1.14, 0.63, 0.41], 3),  # Student t, 3 d.o.f.
        ([1.02, 1.02, 1.02, 1.02, 1.02], None),  # Laplace
    ],
)
def test_stages_go_where_the_counts_are_right(ratios, best):
    for start in range(1, 6):
        state = scalar([start, 0, 0, 0, 0, 1])
        seen = []
        for _ in range(50):
            state = adapted(state, scalar(ratios[int(state[0]) - 1]))
            seen.append(int(state[0]))
        assert set(seen[-15:]) == {best or start}
        assert all(1 <= stages <= sidco.STAGES for stages in seen)
        # They change after five steps, by one.
        assert all(seen[i] == seen[i - 1] or (i % 5 == 4 and abs(seen[i] - seen[i - 1]) == 1) for i in range(1, 50))


def test_where_no_number_of_stages_is_right_they_turn_round():
    state = scalar([3, 0, 0, 0, 0, 1])
    for _ in range(100):
        state = adapted(state, scalar(9.0))
        assert 1 <= state[0] <= 5
    assert state.isfinite().all()


@one_in(2)
@pytest.mark.parametrize(("name", "fit"), in_diagonals(SMOOTH, FITS, 6))
def test_lands_between_two_and_four_thirds(name, fit):
    for numel in (100_003, 400_000):
        u = SMOOTH[name](numel)
        for density in DENSITIES:
            k = round(density * numel)
            chosen = SIDCo(density, fit).select(u)
            assert 2 * k / 3 <= len(chosen) <= 4 * k / 3, (numel, density, len(chosen) / k)
            assert torch.equal(chosen, oracle(u, len(chosen)))


@pytest.mark.parametrize(("name", "fit"), in_diagonals(["Gaussian", "Laplace", "Student 3", "Student 5"], FITS, 6))
def test_the_fit_serves_once_stages_have_adapted(name, fit, monkeypatch):
    exact = calls_of(candidates, "topk_from_maxima", monkeypatch)
    chooser, state = SIDCo(0.001, fit), {}
    for step in range(40):
        if step == 25:
            exact.clear()
        u = SMOOTH[name](300_000)
        chosen = chooser.choose(u, 300, Context.of(len(u), step=step, state=state))
        assert 200 <= len(chosen) <= 400
    assert len(exact) <= 3, "of 15"


@one_in(2)
@pytest.mark.parametrize(("name", "fit"), in_diagonals(INPUTS, FITS, 12))
def test_hostile_inputs(name, fit):
    for numel in (1, 2, 63, 1000, 131072, 300_007):
        u = INPUTS[name](numel)
        for density in (0.001, 0.01, 0.1, 0.3, 0.9, 1.0):
            chooser, state = SIDCo(density, fit), {}
            k = chooser.count(numel)
            chosen = chooser.choose(u, k, Context.of(numel, state=state))
            assert torch.equal(chosen, oracle(u, len(chosen))), (numel, density)
            assert 2 * k / 3 <= len(chosen) <= min(4 * k / 3, chooser.capacity(numel))
            assert density < 1 or len(chosen) == numel
            if state:
                assert state["stages"].isfinite().all(), "one broken step must not break those after it"


@pytest.mark.parametrize("fit", FITS)
def test_lands_on_recorded_gradients(fit):
    for density in (0.005, 0.05):
        state = {}
        for step, u in enumerate(recorded(density)):
            k = SIDCo(density, fit).count(u.numel())
            chosen = SIDCo(density, fit).choose(u, k, Context.of(u.numel(), step=step, state=state))
            assert -(-2 * k // 3) <= chosen.numel() <= 4 * k // 3


@pytest.mark.parametrize("fit", FITS)
def test_what_has_no_fit_is_selected_exactly_and_teaches_nothing(fit):
    u, state = torch.full((50_000,), -2.0), {}
    assert torch.equal(SIDCo(0.01, fit).choose(u, 500, Context.of(50_000, state=state)), torch.arange(500))
    if fit != "exponential":  # which has no spread to ask for
        assert state["stages"].tolist() == [3, 1, 1, 0, 0, 1]
    u[777] = torch.nan
    assert 777 in SIDCo(0.001, fit).select(u).tolist()


@pytest.mark.parametrize("fit", FITS)
def test_a_vector_with_two_thirds_of_k_entries_is_reproduced_exactly(fit):
    numel = 60_000
    compressor, u = SIDCo(0.01, fit), torch.zeros(numel)
    filled = torch.randperm(numel)[:400]
    u[filled] = torch.randn(400)
    assert torch.equal(decoded(compressor, u), u)
    assert not remainder(compressor, u).any()


@pytest.mark.parametrize("name", SMOOTH)
def test_contraction(name):
    numel, compressor = 50_000, SIDCo(0.01)
    u = SMOOTH[name](numel)
    count = len(compressor.select(u))
    rest = remainder(compressor, u).double().square().sum()
    assert 0 < rest <= (1 - count / numel) * u.double().square().sum() * (1 + 1e-12)


def test_bad_options():
    with pytest.raises(ValueError, match=r"SIDCo\(fit='weibull'\): choose from exponential, gamma, pareto"):
        SIDCo(fit="weibull")
