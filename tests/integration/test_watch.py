"""The integration tests' sums are computed on the gradients' device, also on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.integration.trainers import Watch, lost
from tests.support.cuda_like import CUDA, CudaLike


@pytest.mark.parametrize("device", [torch.device("cpu"), CUDA], ids=str)
def test_sums_are_made_where_gradients_are(device):
    with CudaLike():
        module = nn.ParameterDict({"w": torch.zeros(2, 3, device=device)})
        trainer = SimpleNamespace(strategy=SimpleNamespace(precision_plugin=None))
        watch = Watch()
        watch.on_train_start(trainer, module)
        (param,) = module.parameters()
        (hook,) = param._backward_hooks.values()
        for size in (1.0, -3.0):
            hook(torch.full((2, 3), size, device=device))
        param.grad = torch.full((2, 3), -2.0, device=device)
        watch.on_before_optimizer_step(trainer, module, torch.optim.SGD(module.parameters(), 0.1))
        found = watch.on_host()
    assert [found[kind]["w"].tolist() for kind in ("given", "mass", "applied")] == [[-2.0] * 6, [4.0] * 6, [-2.0] * 6]
    assert all(type(x) is torch.Tensor for sums in found.values() for x in sums.values())
    assert lost([found], [{"elements": {"residual": {"w": torch.zeros(2, 3)}}}]) == 0
