"""QSGD, by hand and in expectation."""

import math

import pytest
import torch

from lightning_sparse.compressors.qsgd import QSGD
from lightning_sparse.context import Context
from tests.support.updates import decoded


def test_by_hand():
    """The norm is 5; with 5 levels 3 and -4 are levels themselves, so nothing is left to chance."""
    payload, update = QSGD(levels=5, bucket=2).compress(torch.tensor([3.0, -4.0, 0.0]), Context.of(3))
    norms, codes = payload
    assert norms.tolist() == pytest.approx([5.0, 0.0])
    assert codes.tolist() == [3, -4, 0, 0]
    assert update.tolist() == pytest.approx([3.0, -4.0, 0.0])


def test_one_entry_per_bucket_comes_back_exactly():
    u = torch.zeros(5 * 64)
    u[::64] = torch.tensor([1.0, -2.0, 0.5, 4.0, -8.0])
    assert torch.equal(decoded(QSGD(bucket=64), u), u)


def test_unbiased_and_within_the_published_variance():
    """E Q(v) = v, and E‖Q(v) - v‖² <= min(d/s², √d/s)‖v‖²."""
    numel, steps, levels = 64, 4000, 3
    u = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    total, squares = torch.zeros(numel, dtype=torch.float64), 0.0
    for step in range(steps):
        _, update = QSGD(levels, numel).compress(u, Context.of(numel, step=step))
        total += update.double()
        squares += float((update - u).double().square().sum())
    # A level's distance is ‖u‖/s, so each rounding has a variance of at most a quarter of its square; 4.5 deviations
    # for 64 means of `steps` draws.
    deviation = float(u.norm()) / levels / 2 / math.sqrt(steps)
    assert float((total / steps - u).abs().max()) < 4.5 * deviation
    bound = min(numel / levels**2, math.sqrt(numel) / levels) * float(u.double().square().sum())
    assert squares / steps <= bound


@pytest.mark.parametrize("options", [{"levels": 0}, {"levels": 128}, {"levels": 1.5}, {"bucket": 0}, {"bucket": True}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=rf"QSGD\({next(iter(options))}="):
        QSGD(**options)
