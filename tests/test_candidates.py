"""Candidates above a threshold: plain torch, and Triton, which selects the largest first."""

import importlib.util

import pytest
import torch

from lightning_sparse.compressors.chunktopk import ChunkTopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels import candidates
from lightning_sparse.contrib.mstopk import MSTopK
from lightning_sparse.contrib.sampled_topk import SampledTopK
from lightning_sparse.contrib.sidco import SIDCo
from lightning_sparse.kernels import launch
from lightning_sparse.kernels.chunks import CHUNK, chunktopk
from lightning_sparse.kernels.select import block_size, ensure_stats, magnitude_bits
from tests.support.kernels import DEVICE, HOSTILE, SOME
from tests.support.tiers import in_diagonals, one_in, tiers
from tests.support.vectors import oracle

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# numpy's, in which the interpreter calculates.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def reaching(u, k, thresholds, fewest, most):
    bits = magnitude_bits("test", u)
    stats = ensure_stats(None, u, block_size(len(u), k))
    limits = torch.tensor(thresholds, dtype=torch.float32, device=u.device).view(torch.int32)
    found = candidates.indices_reaching(bits, k, limits, fewest, most, stats)
    return found[found < len(u)].cpu()


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
def test_thresholds_by_hand(kernels, monkeypatch):
    monkeypatch.setenv(launch.KERNELS, kernels)
    u = torch.tensor([0.5, -4.0, 3.0, -0.1, -3.0, 2.0, 0.0], device=DEVICE if kernels == "triton" else "cpu")
    assert reaching(u, 3, [3.0], 2, 4).tolist() == [1, 2, 4]
    assert reaching(u, 3, [3.5], 2, 4).tolist() == [1, 2, 4]  # one is too few: the three largest
    assert reaching(u, 3, [5.0, 3.5, 2.0, 0.1], 2, 4).tolist() == [1, 2, 4, 5]  # the first that leaves two
    assert reaching(u, 3, [5.0, 0.1], 2, 4).tolist() == [1, 2, 4]  # six are too many
    assert reaching(u, 2, [0.0], 2, 3).tolist() == [1, 2]  # of equal ones the first
    assert reaching(u, 3, [torch.nan], 2, 4).tolist() == [1, 2, 4]
    assert reaching(u, 6, [0.1], 5, 8).tolist() == [0, 1, 2, 3, 4, 5]
    assert reaching(u, 6, [0.0], 5, 8).tolist() == [0, 1, 2, 3, 4, 5, 6]  # seven are no more than eight


ESTIMATES = [SampledTopK(0.05), SIDCo(0.01), SIDCo(0.05, "gamma"), SIDCo(0.01, "pareto"), MSTopK(0.01)]


@one_in(2)
@needs_triton
@pytest.mark.parametrize(("compressor", "name"), in_diagonals([*ESTIMATES, MSTopK(0.05, rounds=8)], HOSTILE, 11))
def test_estimates_equal_the_reference(compressor, name, monkeypatch):
    for numel in (1, 700, 7001):
        u = HOSTILE[name](numel)
        found = {}
        for kernels, x in (("torch", u), ("triton", u.to(DEVICE))):
            monkeypatch.setenv(launch.KERNELS, kernels)
            state = {}
            k = compressor.count(numel)
            indices = compressor.choose(x, k, Context.of(numel, state=state)).cpu()
            assert (indices.diff() > 0).logical_or(indices[1:] == numel).all()
            assert indices.numel() <= compressor.capacity(numel)
            found[kernels] = (indices[indices < numel], state.get("stages", torch.zeros(6)).cpu())
        (mine, stages), (reference, expected) = found["triton"], found["torch"]
        assert torch.equal(mine, reference)
        # Sums of fp64 in another order.
        torch.testing.assert_close(stages, expected.to(stages.dtype), rtol=1e-9, atol=0)


@needs_triton
@pytest.mark.parametrize("name", tiers(HOSTILE, SOME))
def test_chunks_equal_the_oracle(name, monkeypatch):
    monkeypatch.setenv(launch.KERNELS, "triton")
    for numel, k in ((1, 1), (63, 4), (CHUNK, 1), (CHUNK, CHUNK), (2 * CHUNK + 700, 41), (CHUNK + 1, 205)):
        u = HOSTILE[name](numel)
        rest = numel % CHUNK
        last = min(rest, max(1, k * rest // CHUNK))
        expected = [
            oracle(part, k if len(part) == CHUNK else last) + CHUNK * i for i, part in enumerate(u.split(CHUNK))
        ]
        assert torch.equal(chunktopk(u.to(DEVICE), k, last).cpu(), torch.cat(expected)), (numel, k)
    assert chunktopk(torch.empty(0, device=DEVICE), 4, 0).tolist() == []


@needs_triton
@pytest.mark.parametrize("value_format", ["float32", "int2"])
def test_chunks_come_back_by_triton(value_format, monkeypatch):
    u, ctx, compressor = torch.randn(CHUNK + 900), Context.of(CHUNK + 900), ChunkTopK(0.005, value_format)
    monkeypatch.setenv(launch.KERNELS, "torch")
    expected, _ = compressor.compress(u, ctx)
    monkeypatch.setenv(launch.KERNELS, "triton")
    payload, update = compressor.compress(u.to(DEVICE), ctx)
    assert all(torch.equal(part.cpu(), reference) for part, reference in zip(payload, expected, strict=True))
    assert all(map(torch.equal, compressor.decode(payload, ctx), update))
