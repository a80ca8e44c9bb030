"""The number of launches of a segment on a GPU must not increase unnoticed. Each takes microseconds."""

import pytest
import torch

pytest.importorskip("pandas")

from benchmarks import launches
from benchmarks.harness import results
from tests.support.fake_cuda import CUDA, on_fake_cuda
from tests.support.tiers import one_in

OF_SIGNS = "onebit", "terngrad", "signsgd"
UPDATES = [("topk", "update"), ("topk", "update, fused"), ("efsignsgd", "update")]


@one_in(3)
@pytest.mark.parametrize(
    ("name", "exchanged", "ranks"),
    [
        *((name, "gradient", 2) for name in ("topk", "gaussiank", "chunktopk", "int4", *OF_SIGNS)),
        ("int4", "gradient", 8),
        *((*update, 2) for update in UPDATES),
    ],
)
def test_no_launch_is_added(name, exchanged, ranks):
    """Fewer launches are fine. Then write the table again: python -m benchmarks.launches."""
    table = results.load(results.RESULTS / "launches.csv").query("state == 'now' and gradients == 'float32'")
    held = table.query("method == @name and ranks == @ranks and exchanged == @exchanged").launches.item()
    assert launches.launches(name, ranks, torch.float32, exchanged)["launches"] <= held


def test_what_counts():
    with on_fake_cuda(), launches.Operations() as operations:
        x = torch.empty(4, 3, device=CUDA)
        x.view(-1).detach()  # nothing to do
        torch.zeros(4)  # on the host
        assert operations.count == 0
        y = x + 1
        torch._foreach_add_([x, y], [y, y])
        assert operations.count == 2
        torch._foreach_add_([x, y], [y.bfloat16(), y.bfloat16()])  # two casts, and one addition for each
        assert operations.count == 6
