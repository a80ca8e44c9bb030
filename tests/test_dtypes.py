"""No tensor depends on the default dtype."""

import pytest
import torch

from lightning_sparse import METHODS, Method, Reducer, simulate
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from tests.support.tiers import in_diagonals, one_in
from tests.support.training import make
from tests.support.update_training import exchanged_twice

METHODS_AND_PARTS = {
    **{name: make(name) for name in METHODS},
    "paper": Method(PublishedGaussianK(0.05)),
    "topk in 8 bits": Method(TopK(0.05, value_format="int8")),
    "topk in 4 bits": Method(TopK(0.05, value_format="int4")),
    "bfloat16": Method(TopK(0.05, value_format="bfloat16")),
    "two levels": Method(GaussianK(0.05), aggregator=TwoLevel(ranks_per_node=2)),
}


@one_in(2)
@pytest.mark.parametrize(
    ("name", "dtype"), in_diagonals(METHODS_AND_PARTS, [torch.float64, torch.bfloat16, torch.float16], 6), ids=str
)
def test_results_do_not_depend_on_the_default_dtype(name, dtype):
    def rank(comm, **options):
        reducer = Reducer(METHODS_AND_PARTS[name], comm, **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            grads = {
                "w": torch.randn(60, 70, generator=generator, dtype=torch.float32),
                "v": torch.randn(50, generator=generator, dtype=torch.float32).to(torch.bfloat16),
            }
            reducer.reduce_(grads)
        return torch.cat([grad.float().view(-1) for grad in grads.values()]), str(reducer.state_dict())

    for options in ({}, {"clip_norm": 1.0}):
        expected = simulate(2, lambda comm, options=options: rank(comm, **options))
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            found = simulate(2, lambda comm, options=options: rank(comm, **options))
        finally:
            torch.set_default_dtype(before)
        for (out, _), (same, _) in zip(found, expected, strict=True):
            assert torch.equal(out, same)


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "radam", "adamax", "nesterov"])
def test_exchanged_updates_do_not_depend_on_the_default_dtype(optimizer):
    expected = exchanged_twice(optimizer, torch.float32, "cpu")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = exchanged_twice(optimizer, torch.float32, "cpu")
    finally:
        torch.set_default_dtype(before)
    if optimizer != "nadam":
        assert all(map(torch.equal, found, expected))
    else:  # torch keeps its product of betas in the default dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
