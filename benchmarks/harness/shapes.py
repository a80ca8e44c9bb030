"""Parameter shapes of the models in the gTopK paper (arXiv 1901.04359) and of others; and how long a step takes.

Only shapes, so models are made on the meta device: `workloads.Paced` yields gradients of these shapes, and sleeps for
the time of the computation.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from examples.models.gpt import GPT

COMPUTE_SECONDS = {
    "resnet20": 0.146,
    "vgg16": 0.140,
    "alexnet": 0.257,
    "resnet50": 4.88,
    # Not published. What makes dense training on 4 workers as efficient as the paper has it, 3.2 %, over its link.
    "lstm_ptb": 0.118,
    # Not in the paper; an assumption, about 8 × 1024 tokens on one data-centre GPU.
    "gpt2": 0.25,
    # The timing model of `benchmarks.network`: what a step without communication takes there, four ranks on two cores.
    "mlp_paced": 0.146,
}
"""Seconds of forward and backward for one step, published in the authors' scripts unless said otherwise."""


def shapes(name: str) -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters, in registration order."""
    with torch.device("meta"):
        return [tuple(param.shape) for param in nn.ModuleList(MODELS[name]()).parameters()]


def mlp() -> nn.Sequential:
    """Return the timing model: 2048 inputs, six hidden layers of 2048, 200 classes; 25.6 million parameters."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 200))


def convolution(before: int, width: int, size: int) -> list[nn.Module]:
    """Return a convolution without bias and its normalisation."""
    return [nn.Conv2d(before, width, size, bias=False), nn.BatchNorm2d(width)]


def resnet20() -> Iterator[nn.Module]:
    """For CIFAR-10, with projections where the width changes."""
    yield from convolution(3, 16, 3)
    before = 16
    for width in (16, 32, 64):
        for block in range(3):
            yield from [*convolution(before, width, 3), *convolution(width, width, 3)]
            if block == 0 and before != width:
                yield from convolution(before, width, 1)
            before = width
    yield nn.Linear(64, 10)


def resnet50() -> Iterator[nn.Module]:
    """For ImageNet."""
    yield from convolution(3, 64, 7)
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(before, width, 1)
            yield from convolution(width, width, 3)
            yield from convolution(width, 4 * width, 1)
            if block == 0:
                yield from convolution(before, 4 * width, 1)
            before = 4 * width
    yield nn.Linear(2048, 1000)


def vgg16() -> Iterator[nn.Module]:
    """For CIFAR-10: one linear layer behind the convolutions, which have biases beside their normalisation."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    for before, width in itertools.pairwise(widths):
        yield from [nn.Conv2d(before, width, 3), nn.BatchNorm2d(width)]
    yield nn.Linear(512, 10)


def alexnet() -> Iterator[nn.Module]:
    """For ImageNet."""
    for before, width, size in ((3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)):
        yield nn.Conv2d(before, width, size)
    yield from [nn.Linear(9216, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)]


MODELS: dict[str, Callable[[], Iterable[nn.Module]]] = {
    "mlp_paced": mlp,
    "resnet20": resnet20,
    "vgg16": vgg16,
    "alexnet": alexnet,
    "resnet50": resnet50,
    "lstm_ptb": lambda: [nn.Embedding(10_000, 1500), nn.LSTM(1500, 1500, 2), nn.Linear(1500, 10_000)],
    "gpt2": lambda: [GPT(context=1024, width=768, layers=12, heads=12, vocabulary=50_257)],
}
