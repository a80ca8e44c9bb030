"""Random numbers by position: they depend only on key and position, and are uniform and independent."""

import math

import pytest
import torch

from lightning_sparse.context import Context
from lightning_sparse.kernels.uniform import FACTORS, GOLDEN, add_uniform_

KEYS = [0, 1, 2**32, 2**64 - 1, *(Context.of(9, step=step, rank=step % 3).key(shared=False) for step in range(4))]


def uniform(key: int, numel: int) -> torch.Tensor:
    return add_uniform_(torch.zeros(numel), key)


def test_by_hand():
    """The hash in Python's own whole numbers."""
    key, word = 0x0123456789ABCDEF, 1 << 32
    expected = []
    for position in range(5):
        x = (key + position // 2 * ((key >> 32 ^ GOLDEN) | 1)) % word
        for shift, factor in zip((15, 16), FACTORS, strict=True):
            signed = x - word * (x >> 31)
            x = ((signed ^ (signed >> shift)) * factor) % word
        lane = x >> 16 * (position % 2) & 0xFFFF
        expected.append((lane - 0x10000 * (lane >> 15) | 1) / 65536)
    assert uniform(key, 5).tolist() == expected
    found = add_uniform_(torch.tensor([1.0, -1.0]), key)
    assert torch.equal(found, uniform(key, 2) + torch.tensor([1.0, -1.0]))
    assert uniform(key, 0).numel() == 0


@pytest.mark.parametrize("key", KEYS)
def test_numbers_are_uniform_and_neighbours_independent(key):
    numel = 1 << 20
    centred = uniform(key, numel).double()
    assert centred.abs().max() <= 0.5 - 2**-16
    # The mean of n uniform numbers has the variance 1 / 12n, a product of two centred ones 1 / 144.
    assert centred.mean().abs() < 5 / math.sqrt(12 * numel)
    for lag in (1, 2, 3, 4, 8, 64, 512, 1 << 17):
        assert (centred[lag:] * centred[:-lag]).mean().abs() < 5 / 12 / math.sqrt(numel - lag), lag
    # Chi-squared of 256 classes, of which each of 255 degrees of freedom has the variance 2.
    counts = torch.histc(centred, 256, -0.5, 0.5)
    assert ((counts - numel / 256).square() / (numel / 256)).sum() < 255 + 5 * math.sqrt(510)


def test_ranks_steps_and_segments_draw_independent_numbers():
    numel = 1 << 18
    keys = {
        Context.of(9, seed=seed, step=step, rank=rank).key(shared=False)
        for seed in (0, 1)
        for step in range(4)
        for rank in range(3)
    }
    assert len(keys) == 24
    drawn = torch.stack([uniform(key, numel) for key in sorted(keys)]).double()
    correlations = 12 * (drawn @ drawn.T) / numel
    assert (correlations - torch.eye(24)).abs().max() < 6 / math.sqrt(numel)
    assert Context.of(9, rank=1).key(shared=True) == Context.of(9, rank=2).key(shared=True)
