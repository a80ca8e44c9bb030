"""Exact selection against a naive oracle, for random and hostile inputs."""

import pytest
import torch

from lightning_sparse.kernels import select
from lightning_sparse.kernels.select import topk_indices
from tests.support.kernels import needs_native
from tests.support.tiers import tiers
from tests.support.vectors import INPUTS, oracle

# One element, less than a block, exact blocks, tails of one to 63 elements, more than one chunk of 2^17.
LENGTHS = (1, 2, 63, 64, 65, 1000, 4096 + 63, 131072, 131072 * 2 + 1, 300_007)


@pytest.fixture(autouse=True, params=["torch", pytest.param("native", marks=needs_native)])
def _kernels(request, use):
    use(request.param)


@pytest.mark.parametrize("name", tiers(INPUTS, ["nan and inf"]))
def test_equals_the_oracle(name):
    for numel in LENGTHS:
        u = INPUTS[name](numel)
        counts = {1, *(round(numel * density) for density in (0.001, 0.004, 0.01, 0.02, 0.07, 0.5)), numel - 1, numel}
        for k in counts - {0}:
            before = u.clone()
            torch.testing.assert_close(topk_indices(u, k), oracle(u, k), rtol=0, atol=0, msg=f"{name}, {numel}, {k}")
            assert torch.equal(u.view(torch.int32), before.view(torch.int32))


def test_every_branch_is_reached():
    numel = max(LENGTHS)
    sizes = {select.block_size(numel, round(numel * density)) for density in (0.001, 0.01, 0.02, 0.5)}
    assert sizes == {64, 32, 16, 1}
    assert numel > 2 * select.chunk_size(numel)  # several chunks


def test_by_hand():
    u = torch.tensor([1.0, -3.0, 2.0, -2.0, 0.0, 3.0])
    assert topk_indices(u, 1).tolist() == [1]  # -3 before 3: the lower index
    assert topk_indices(u, 2).tolist() == [1, 5]
    assert topk_indices(u, 3).tolist() == [1, 2, 5]
    assert topk_indices(u, 4).tolist() == [1, 2, 3, 5]


def test_nan_before_infinity_before_finite():
    u = torch.tensor([3e38, -torch.inf, 1.0, torch.nan])
    assert [topk_indices(u, k).tolist() for k in (1, 2, 3)] == [[3], [1, 3], [0, 1, 3]]


def test_a_single_broken_entry_is_selected_wherever_it_is():
    for where in (0, 63, 64, 99_990, 100_001):  # the last two blocks are cut short
        for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
            u = torch.randn(100_002)
            u[where] = bad
            assert topk_indices(u, 1).tolist() == [where]


def test_ties_across_blocks_and_the_end():
    # 7 entries of one magnitude in blocks 0, 1, 1, 40, and in the end that belongs to no block; 2 larger ones.
    numel = 64 * 50 + 10
    u = torch.zeros(numel)
    u[torch.tensor([3, 64, 127, 64 * 40 + 5, numel - 9, numel - 2, numel - 1])] = -1.0
    u[torch.tensor([64 * 41, numel - 5])] = 2.0
    assert select.block_size(numel, 6) == 64
    assert topk_indices(u, 6).tolist() == [3, 64, 127, 64 * 40 + 5, 64 * 41, numel - 5]


def test_at_the_edges_of_the_histogram():
    """The k-th largest is the last of its bin, or has the largest number that a bin holds."""
    bits = torch.full((100_000,), 0x3F80_FFFF, dtype=torch.int32)
    bits[5::10] = 0x3F81_0000
    bits[7::20] = 0x3F80_0000
    u = bits.view(torch.float32)
    for k in (9_999, 10_000, 10_001, 94_999, 95_000, 95_001):
        assert torch.equal(topk_indices(u, k), oracle(u, k))


def test_more_than_there_are_means_all():
    assert topk_indices(torch.randn(5), 9).tolist() == [0, 1, 2, 3, 4]
    assert topk_indices(torch.randn(5), 0).tolist() == []
    empty = topk_indices(torch.empty(0), 3)
    assert empty.tolist() == []
    assert empty.dtype == torch.int64


def test_strided_views_and_tensors_that_require_gradients():
    u = torch.randn(2000)
    assert torch.equal(topk_indices(u[::2], 10), oracle(u[::2].contiguous(), 10))
    assert torch.equal(topk_indices(u.clone().requires_grad_(), 10), oracle(u, 10))


def test_refuses_other_shapes_and_types():
    with pytest.raises(ValueError, match=r"must be 1-D, got shape \(2, 3\)"):
        topk_indices(torch.randn(2, 3), 1)
    with pytest.raises(TypeError, match=r"must be torch.float32, got torch.float64"):
        topk_indices(torch.randn(3, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match=r"k must not be negative"):
        topk_indices(torch.randn(3), -1)
