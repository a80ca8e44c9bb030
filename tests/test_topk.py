"""TopK: its payload by hand and in general."""

import pytest
import torch

from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from tests.support.updates import decoded, remainder


def test_by_hand():
    u = torch.tensor([0.5, -4.0, 3.0, -0.1, -3.0])
    topk = TopK(density=0.4)
    assert topk.select(u).tolist() == [1, 2]
    assert decoded(topk, u).tolist() == [0.0, -4.0, 3.0, 0.0, 0.0]
    assert remainder(topk, u).tolist() == pytest.approx([0.5, 0.0, 0.0, -0.1, -3.0])


def test_the_context_may_ask_for_another_density():
    u = torch.randn(1000)
    assert len(TopK(density=0.1).select(u)) == 100
    assert len(TopK(density=0.1).select(u, density=0.25)) == 250
    payload, _ = TopK(density=0.1).compress(u, Context.of(1000, density=0.25))
    assert payload[0].tolist() == [250]
    assert len(TopK().select(u)) == 1
    assert len(TopK().select(u[:3])) == 1
    assert len(TopK(density=1.0).select(u)) == 1000


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_a_sparse_vector_is_reproduced_exactly(density):
    numel = 50_001
    u, topk = torch.zeros(numel), TopK(density)
    chosen = torch.randperm(numel)[: topk.count(numel)]
    u[chosen] = torch.randn(len(chosen))
    assert torch.equal(decoded(topk, u), u)
    assert not remainder(topk, u).any()


@pytest.mark.parametrize("draw", [torch.randn, torch.ones, lambda d: torch.randn(d) ** 7])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_contraction(draw, density):
    u, topk = draw(20_011), TopK(density)
    k = topk.count(20_011)
    rest = remainder(topk, u).double()
    # For entries of equal magnitude both sides are equal.
    assert rest.square().sum() <= (1 - k / 20_011) * u.double().square().sum() * (1 + 1e-12)


@pytest.mark.parametrize("density", [0, 1.5, -0.1, float("nan"), True, "a"])
def test_refuses_a_density_outside_of_0_to_1(density):
    with pytest.raises(ValueError, match=r"TopK\(density=.*\): density must be in \(0, 1\]"):
        TopK(density=density)
