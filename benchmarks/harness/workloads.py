"""Models and data of the benchmarks over links: a large one to time, small ones to train, and paced ones."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.shapes import mlp, shapes
from examples.data.digits import digits
from examples.models import ResNet20, convnet

TRAININGS = {"real": "convolutional network, 2.1 M", "real_resnet20": "ResNet-20, 0.27 M"}
"""Workloads that train on the digits."""
TARGET_LOSS = 0.2
"""Test loss at which such a training ends."""
BATCH = 16
"""Examples per rank and step."""


def build(workload: str, compute: float, rank: int) -> nn.Module:
    """Return the model of a workload: "mlp", "mlp_adamw", one of `TRAININGS`, or a paced one of `shapes`."""
    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "mlp_adamw": mlp, "real": convnet}
    made["real_resnet20"] = lambda: ResNet20(in_channels=1)
    return made[workload]() if workload in made else Paced(shapes(workload), compute, real_gradients(rank))


class Paced(nn.Module):
    """Gradients of given shapes, after a given time: a model as communication sees it, with idle processors.

    Forward sleeps for a third of the time, and backward for the rest, the same share for each matrix. The values are
    gradients of a small convolutional network on the digits, put end to end; in every other step those of another
    batch. So large ones are in the same places on all ranks and in all steps, as in a real model.
    """

    def __init__(self, shapes: list[tuple[int, ...]], compute: float, values: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.forward_seconds = compute / 3
        matrices = sum(len(shape) > 1 for shape in shapes)
        self.seconds = [2 / 3 * compute / matrices if len(shape) > 1 else 0.0 for shape in shapes]
        # Long enough for the largest parameter, from wherever it starts. A function, so that copies share it.
        longest = max(param.numel() for param in self.params)
        period = values[0].numel()
        sources = [batch.repeat(2 + longest // period) for batch in values]
        starts = torch.randint(period, (len(shapes),), generator=torch.Generator().manual_seed(0)).tolist()
        self.gradient: Callable[[int, int, torch.Size], Tensor] = lambda step, number, shape: sources[step % 2][
            starts[number] :
        ][: math.prod(shape)].view(shape)

    def forward(self, step: Tensor) -> Tensor:
        """Return a loss, 0. `step` chooses the gradients, 0 to 7."""
        time.sleep(self.forward_seconds)
        x = torch.zeros((), requires_grad=True)
        for number, (param, seconds) in enumerate(zip(self.params, self.seconds, strict=True)):
            x = _Pace.apply(x, param, self.gradient(int(step), number, param.shape), seconds)  # type: ignore[no-untyped-call]
        return x


class _Pace(torch.autograd.Function):
    """Passes a prepared gradient to a parameter, after some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


def real_gradients(rank: int) -> list[Tensor]:
    """Return two of the convolutional network's gradients on this rank's digits, after some steps that all share."""
    images, labels = (torch.cat(parts) for parts in zip(*digits(seed=None), strict=True))
    torch.manual_seed(0)
    model = convnet()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def gradients(seed: int) -> tuple[Tensor, ...]:
        picked = torch.randint(len(labels), (32,), generator=torch.Generator().manual_seed(seed))
        return torch.autograd.grad(functional.cross_entropy(model(images[picked]), labels[picked]), params)

    for seed in range(20):
        for param, grad in zip(params, gradients(seed), strict=True):
            param.grad = grad
        optimizer.step()
    return [torch.cat([grad.view(-1) for grad in gradients(seed + rank)]) for seed in (1000, 2000)]
