"""What momentum would still change, made little at a time."""

import pytest
import torch

from lightning_sparse import moments
from lightning_sparse.layout import Layout
from tests.support.fake_cuda import CUDA, on_fake_cuda


@pytest.mark.parametrize(
    ("most", "joined"), [(250, [200, 200, 100]), (100, [100] * 5), (70, [100] * 5), (1 << 23, [500])]
)
def test_on_cuda_only_so_much_is_joined_at_a_time(most, joined, monkeypatch):
    (segment,) = Layout.of(dict.fromkeys("abcde", (10, 10)), "model").segments
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}
    kind = moments.MOMENTS[torch.optim.AdamW]
    sizes = []
    original = moments._joined

    def join(tensors):
        sizes.append(sum(x.numel() for x in tensors))
        return original(tensors)

    monkeypatch.setattr(moments, "_joined", join)
    monkeypatch.setattr(moments, "AT_A_TIME", most)
    with on_fake_cuda():
        state = {key: torch.empty(10, 10, device=CUDA) for key in ("exp_avg", "exp_avg_sq")} | {"step": 3}
        found = moments.SegmentMoments(segment, kind, [group] * 5, [state] * 5, CUDA).to_come()
    assert found.shape == (500,)
    assert sizes[::2] == joined, "once for each moment"
