"""Segments stepped within backward: what an exchange after backward makes, bit for bit."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.harness.within_backward import StepsWithinBackward
from lightning_sparse import Reducer, method, simulate
from lightning_sparse.updates import Updates
from tests.support.update_training import ADAMW


class Net(nn.Module):
    """Layers registered in another order than they are used, one of them used twice, and one not at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for index in (1, 0, 2, 1, 4, 5):
            x = torch.tanh(self.layers[index](x))
        return x


def train(comm, start, within):
    net, random = copy.deepcopy(start), torch.Generator().manual_seed(comm.rank)
    decayed = [param for param in net.parameters() if param.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in net.parameters() if p.dim() == 1]}]
    optimizer = ADAMW(groups, 0.01)
    reducer = Reducer(method("topk", density=0.01), comm, bucket_cap_mb=0.008, exchanged="update")
    steps = StepsWithinBackward(reducer, net, optimizer) if within else None
    updates = None if within else Updates(reducer, net, [optimizer])
    assert len(reducer.layout.segments) == 3
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)  # as a schedule does
        optimizer.zero_grad()
        net(torch.randn(8, 32, generator=random)).square().mean().backward()
        steps_of_last = optimizer.state[net.layers[5].weight].get("step", 0)
        assert steps_of_last == step + within  # within backward: stepped before it has ended
        if within:
            steps.finish()
        else:
            updates.begin(optimizer)
            optimizer.step()
            updates.exchange(optimizer)
    assert reducer.step == 6
    state = optimizer.state_dict()["state"]
    moments = {f"{number} {key}": x for number, kept in state.items() for key, x in kept.items()}
    return {**net.state_dict(), **reducer.state_dict()["elements"]["residual"], **moments}, comm.sent_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_weights_residuals_and_moments_are_the_same_to_the_last_bit(size, monkeypatch):
    monkeypatch.setattr("lightning_sparse.routing.Routing._pays", lambda *_: True)  # few elements would go dense
    start = Net()
    after = simulate(size, lambda comm: train(comm, start, within=False))
    within = simulate(size, lambda comm: train(comm, start, within=True))
    for (found, sent), (expected, as_many) in zip(within, after, strict=True):
        assert sent == as_many > 0
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
