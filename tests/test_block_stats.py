"""Block statistics from the pass that computes u equal those of a separate pass over u."""

from itertools import accumulate

import pytest
import torch

from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from lightning_sparse.kernels import block_stats as kernel
from lightning_sparse.kernels.block_stats import BlockStats, add_with_stats_
from tests.support.kernels import HOSTILE, needs_native
from tests.support.tiers import tiers

LENGTHS = [[1], [63], [64, 1], [5, 0, 130, 1, 700, 64], [131072, 1], [100_000] * 3, [3] * 90_000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("lengths", tiers(LENGTHS, LENGTHS[:-1]))
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_adding_and_scanning_at_once(lengths, block, dtype, kernels, use):
    use(kernels)
    generator = torch.Generator().manual_seed(len(lengths))
    bounds = [0, *accumulate(lengths)]
    grads = [torch.randn(length, generator=generator).to(dtype) for length in lengths]
    u = torch.randn(bounds[-1], generator=generator)
    u[0], grads[-1][-1] = torch.nan, -torch.inf
    expected = u + 0.5 * torch.cat(grads).float()
    stats = BlockStats(len(u), block, moments=True)
    assert add_with_stats_(u, bounds, grads, 0.5, stats) is u
    torch.testing.assert_close(u, expected, rtol=0, atol=0, equal_nan=True)
    again = BlockStats(len(u), block, moments=True).read(u)
    assert stats.done
    if block == 1:
        assert stats.maxima is None
    else:
        full = len(u) // block * block
        bits = u[:full].view(torch.int32) & kernel.MAGNITUDE
        assert torch.equal(stats.maxima, bits.view(-1, block).amax(1))
        assert torch.equal(stats.maxima, again.maxima)
    assert stats._total != stats._total or (stats._total, stats._squares) == (again._total, again._squares)


@needs_native
@pytest.mark.parametrize("name", HOSTILE)
def test_the_loop_in_c_finds_the_same_maxima(name, use):
    """Tensors may have any address, and need not be contiguous."""
    for numel in (1, 63, 64, 4096 + 63, 9001):
        u = HOSTILE[name](numel + 1)
        for part in (u[1:], u[:numel], torch.stack([u, u], 1)[:numel, 0]):
            for block in (16, 64):
                found = []
                for kernels in ("torch", "native"):
                    use(kernels)
                    found.append(BlockStats(numel, block).read(part).maxima)
                assert torch.equal(*found)


def test_moments():
    u = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 3 + 1
    mean, deviation = BlockStats(len(u), 64, moments=True).read(u).mean_and_deviation()
    # 300,000 terms added up in fp32, pairwise within a chunk: far below 1e-5 of the sum.
    assert mean == pytest.approx(u.double().mean().item(), rel=1e-5)
    assert deviation == pytest.approx(u.double().std(correction=0).item(), rel=1e-5)


def test_blocks_of_one_need_no_scan_and_the_published_search_scans_for_itself():
    assert TopK(0.5).block_stats(1000) is None
    assert TopK(0.001).block_stats(1000).block == 64
    assert GaussianK(0.001).block_stats(1000).moments
    assert PublishedGaussianK(0.001).block_stats(1000) is None
