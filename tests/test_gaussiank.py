"""GaussianK: selects 2k/3 to 4k/3 entries, or runs the published search."""

import math

import pytest
import torch

from lightning_sparse.compressors import GaussianK
from lightning_sparse.context import Context
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from lightning_sparse.kernels import select, threshold
from tests.support.tiers import one_in, tiers
from tests.support.updates import decoded, remainder
from tests.support.vectors import DENSITIES, INPUTS, SMOOTH, laplace, oracle, recorded, student


@pytest.mark.parametrize("kind", [GaussianK, PublishedGaussianK])
def test_by_hand(kind):
    u = torch.tensor([0.0, -3.0, 0.0, 1.0, 0.0, 0.0, -1.0, 0.0, 3.0, 0.0])  # mean 0, variance 2
    # k = 2: z = Φ⁻¹(1 - 0.2 / 2) = 1.28, so the threshold is 1.8, and two entries are above it.
    assert kind(0.2).select(u).tolist() == [1, 8]
    # k = 4: z = 0.84, so the threshold is 1.2; two are too few, above half of it there are four.
    assert kind(0.4).select(u).tolist() == [1, 3, 6, 8]
    assert remainder(kind(0.2), u).tolist() == [0, 0, 0, 1, 0, 0, -1, 0, 0, 0]


@one_in(2)
@pytest.mark.parametrize("name", tiers(SMOOTH, ["Gaussian", "Laplace", "mixed scales"]))
def test_lands_between_two_and_four_thirds(name, monkeypatch):
    def give_up(*_):
        raise AssertionError("fell back to exact selection")

    monkeypatch.setattr(threshold, "topk_from_maxima", give_up)
    for numel in (100_003, 400_000):
        u = SMOOTH[name](numel)
        for density in DENSITIES:
            k = round(density * numel)
            chosen = GaussianK(density).select(u)
            assert 2 * k / 3 <= len(chosen) <= 4 * k / 3, (name, numel, density, len(chosen) / k)
            # The selected entries are the largest: all entries above a threshold, and no others.
            assert torch.equal(chosen, oracle(u, len(chosen)))


@one_in(2)
@pytest.mark.parametrize("kind", [GaussianK, PublishedGaussianK])
@pytest.mark.parametrize("name", tiers(INPUTS, ["normal", "few values", "nan and inf"]))
def test_hostile_inputs(name, kind):
    for numel in (1, 2, 63, 1000, 131072, 300_007):
        u = INPUTS[name](numel)
        for density in (0.001, 0.01, 0.1, 1.0):
            gaussiank = kind(density)
            k = gaussiank.count(numel)
            chosen = gaussiank.select(u)
            assert torch.equal(chosen, oracle(u, len(chosen)))
            assert 1 <= len(chosen) <= gaussiank.capacity(numel)
            if kind is GaussianK:
                assert 2 * k / 3 <= len(chosen) <= 4 * k / 3


@one_in(2)
@pytest.mark.parametrize(
    ("draw", "density", "expected"),
    [
        (torch.randn, 0.001, 1.00),
        (torch.randn, 0.01, 1.00),
        (laplace, 0.001, 0.93),
        (lambda d: student(d, 5), 0.001, 0.21),
        (laplace, 0.005, 10.19),
        (laplace, 0.01, 6.51),
        (lambda d: student(d, 5), 0.01, 5.49),
    ],
)
def test_the_published_loop_and_its_defect(draw, density, expected):
    """The numbers are computed from the distributions: nnz/k at the last of the three tests."""
    numel = 2_000_000
    k = density * numel
    ratio = len(PublishedGaussianK(density).select(draw(numel))) / k
    # 4 standard deviations of a count, half a digit of the table, and the error of the sample's standard deviation. Its
    # relative error is at most 1 / sqrt(numel) times 3, and the tails fall with at most the tenth power there.
    assert abs(ratio - expected) < 4 * math.sqrt(expected / k) + 0.005 + 30 / math.sqrt(numel) * expected


def test_the_published_loop_is_bounded_and_never_empty():
    gaussiank = PublishedGaussianK(0.01)
    shifted = torch.randn(10_000) - 50  # the threshold is negative: everything is above it
    assert torch.equal(gaussiank.select(shifted), oracle(shifted, 1200))
    assert gaussiank.capacity(10_000) == 1200
    assert gaussiank.capacity(50) == 12
    assert PublishedGaussianK(0.5).capacity(10) == 10
    broken = torch.randn(10_000)
    broken[77] = torch.nan  # the threshold is NaN: nothing is above it
    assert torch.equal(gaussiank.select(broken), oracle(broken, 100))


@pytest.mark.parametrize("kind", [GaussianK, PublishedGaussianK])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_is_sent(kind, bad):
    u = torch.randn(5000)
    u[4999] = bad
    assert 4999 in kind(0.001).select(u).tolist()


@pytest.mark.parametrize("density", [0.001, 0.03])
@pytest.mark.parametrize("share", [0.1, 2 / 3])
def test_a_vector_with_two_thirds_of_k_entries_is_reproduced_exactly(density, share):
    numel = 60_000
    gaussiank, u = GaussianK(density), torch.zeros(numel)
    filled = torch.randperm(numel)[: round(share * gaussiank.count(numel))]
    u[filled] = torch.randn(len(filled))
    assert torch.equal(decoded(gaussiank, u), u)
    assert not remainder(gaussiank, u).any()


def test_a_vector_of_k_equal_magnitudes_is_reproduced_exactly():
    numel = 60_000
    u = torch.zeros(numel)
    u[torch.randperm(numel)[:60]] = -0.5
    assert torch.equal(decoded(GaussianK(), u), u)


@pytest.mark.parametrize("name", SMOOTH)
def test_contraction(name):
    numel, gaussiank = 50_000, GaussianK(0.01)
    u = SMOOTH[name](numel)
    count = len(gaussiank.select(u))
    rest = remainder(gaussiank, u).double().square().sum()
    assert 0 < rest <= (1 - count / numel) * u.double().square().sum() * (1 + 1e-12)


def test_the_length_of_a_payload_is_fixed():
    lengths = set()
    for draw in SMOOTH.values():
        (_, values, *indices), _ = GaussianK(0.01).compress(draw(10_000), Context.of(10_000))
        lengths.add((len(values), *map(len, indices)))
    # Room for 4/3 of 100; of the indices a byte each, and 134 + 10,000 / 256 bits.
    assert lengths == {(134, 22, 134)}


def test_looks_only_into_blocks_that_can_pass(monkeypatch):
    seen = []

    def spy(bits, blocks, *args, **more):
        seen.extend([] if blocks is None else [len(blocks)])  # None are all maxima
        return entries_of_blocks(bits, blocks, *args, **more)

    entries_of_blocks = select._entries_of_blocks
    monkeypatch.setattr(select, "_entries_of_blocks", spy)
    for draw in SMOOTH.values():
        GaussianK().select(draw(400_000))
    assert seen
    assert max(seen) <= 4 * 400 / 3


def test_the_context_may_ask_for_another_density():
    u = torch.randn(100_000)
    assert 2 / 3 * 5000 <= len(GaussianK().select(u, density=0.05)) <= 4 / 3 * 5000


def test_refuses_what_it_does_not_know():
    for kind in (GaussianK, PublishedGaussianK):
        with pytest.raises(ValueError, match=r"must be 1-D"):
            kind(0.5).select(torch.randn(3, 4))
        with pytest.raises(TypeError, match=r"must be torch.float32"):
            kind(0.5).select(torch.randn(3).double())


@pytest.mark.parametrize("density", [0.001, 0.005, 0.01, 0.05])
def test_lands_between_two_and_four_thirds_on_recorded_gradients(density):
    for u in recorded(density):
        k = GaussianK(density).count(u.numel())
        assert -(-2 * k // 3) <= GaussianK(density).select(u).numel() <= 4 * k // 3
