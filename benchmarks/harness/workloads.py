"""Models and data of the network benchmarks: a large model to time, small models to train, and paced models.

A paced model only has the parameter shapes of a real model, such as those of the gTopK paper (arXiv 1901.04359).
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.data.digits import digits
from examples.models import ResNet20, convnet
from examples.models.gpt import GPT

TRAININGS = {"real": "convolutional network, 2.1 M", "real_resnet20": "ResNet-20, 0.27 M"}
"""Workloads that train on the digits, and their descriptions."""
TARGET_LOSS = 0.2  # test loss at which training on the digits ends
BATCH = 16  # examples per rank and step
COMPUTE_SECONDS = {
    "resnet20": 0.146,
    "vgg16": 0.140,
    "alexnet": 0.257,
    "resnet50": 4.88,
    # Not published. With this value, dense training on 4 workers has the paper's efficiency, 3.2 %, over its link.
    "lstm_ptb": 0.118,
    # Not in the paper. This is an assumption: about 8 × 1024 tokens on one data-centre GPU.
    "gpt2": 0.25,
    # The timing model of `benchmarks.network`: duration of a step without communication, with four ranks on two cores.
    "mlp_paced": 0.146,
}
"""Seconds of forward and backward of paced models for one step, from the authors' scripts unless noted otherwise."""


def mlp() -> nn.Sequential:
    """Return the timing model: 2048 inputs, six hidden layers of 2048, 200 classes; 25.6 million parameters."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 200))


def resnet(stem: int, stages: Iterable[tuple[int, int]], classes: int, bottleneck: bool = False) -> Iterator[nn.Module]:
    """Yield the layers of a ResNet: the first convolution has size `stem`, stages are given by width and blocks."""

    def convolution(before: int, width: int, size: int) -> list[nn.Module]:
        return [nn.Conv2d(before, width, size, bias=False), nn.BatchNorm2d(width)]

    stages = list(stages)
    before = stages[0][0]
    yield from convolution(3, before, stem)
    for width, blocks in stages:
        for _ in range(blocks):
            after = 4 * width if bottleneck else width
            sizes = [(before, width, 1), (width, width, 3), (width, after, 1)]
            for size in sizes if bottleneck else [(before, width, 3), (width, width, 3)]:
                yield from convolution(*size)
            if before != after:
                yield from convolution(before, after, 1)
            before = after
    yield nn.Linear(before, classes)


def vgg16() -> Iterator[nn.Module]:
    """Yield the layers of VGG-16 for CIFAR-10: convolutions with biases and normalisation, and one linear layer."""
    for before, width in itertools.pairwise([3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6]):
        yield from [nn.Conv2d(before, width, 3), nn.BatchNorm2d(width)]
    yield nn.Linear(512, 10)


def alexnet() -> Iterator[nn.Module]:
    """Yield the layers of AlexNet for ImageNet."""
    for size in ((3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)):
        yield nn.Conv2d(*size)
    yield from [nn.Linear(9216, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)]


MODELS: dict[str, Callable[[], Iterable[nn.Module]]] = {
    "mlp_paced": mlp,
    "resnet20": lambda: resnet(3, [(16, 3), (32, 3), (64, 3)], 10),
    "vgg16": vgg16,
    "alexnet": alexnet,
    "resnet50": lambda: resnet(7, [(64, 3), (128, 4), (256, 6), (512, 3)], 1000, bottleneck=True),
    "lstm_ptb": lambda: [nn.Embedding(10_000, 1500), nn.LSTM(1500, 1500, 2), nn.Linear(1500, 10_000)],
    "gpt2": lambda: [GPT(context=1024, width=768, layers=12, heads=12, vocabulary=50_257)],
}


def shapes(name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a paced model's parameters, in registration order."""
    with torch.device("meta"):
        return [tuple(param.shape) for param in nn.ModuleList(MODELS[name]()).parameters()]


def build(workload: str, compute: float, rank: int) -> nn.Module:
    """Return the model of a workload: "mlp", "mlp_adamw", one of `TRAININGS`, or a paced model."""
    torch.manual_seed(0)
    if workload in MODELS:
        return Paced(shapes(workload), compute, real_gradients(rank))
    return {"real": convnet, "real_resnet20": lambda: ResNet20(in_channels=1)}.get(workload, mlp)()


class Paced(nn.Module):
    """Produces gradients of given shapes after a given time. It imitates a model's communication with idle processors.

    Forward sleeps for a third of the time, and backward for the rest, an equal share for each matrix. The values are
    concatenated gradients of a small convolutional network on the digits. Every other step uses gradients of another
    batch. So large values have the same indices on all ranks and in all steps, as in a real model.
    """

    def __init__(self, shapes: list[tuple[int, ...]], compute: float, values: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.forward_seconds = compute / 3
        matrices = sum(len(shape) > 1 for shape in shapes)
        self.seconds = [2 / 3 * compute / matrices if len(shape) > 1 else 0.0 for shape in shapes]
        # Repeat the values, so that they suffice for the largest parameter from any start.
        longest, period = max(param.numel() for param in self.params), values[0].numel()
        sources = [batch.repeat(2 + longest // period) for batch in values]
        starts = torch.randint(period, (len(shapes),), generator=torch.Generator().manual_seed(0)).tolist()

        def gradient(step: int, number: int, shape: torch.Size) -> Tensor:  # copies of the model share `sources`
            return sources[step % 2][starts[number] :][: shape.numel()].view(shape)

        self.gradient = gradient

    def forward(self, step: Tensor) -> Tensor:
        """Return a loss of 0. `step`, 0 to 7, selects the gradients."""
        time.sleep(self.forward_seconds)
        x = torch.zeros((), requires_grad=True)
        for number, (param, seconds) in enumerate(zip(self.params, self.seconds, strict=True)):
            x = _Pace.apply(x, param, self.gradient(int(step), number, param.shape), seconds)  # type: ignore[no-untyped-call]
        return x


class _Pace(torch.autograd.Function):
    """Returns a prepared gradient for a parameter after a given time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


def real_gradients(rank: int) -> list[Tensor]:
    """Return two gradients of the convolutional network on this rank's digits, after steps equal on all ranks."""
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
