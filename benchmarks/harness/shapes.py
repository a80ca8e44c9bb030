"""Parameter shapes of the models in the gTopK paper (arXiv 1901.04359) and of others; and how long a step takes.

Only shapes: `workloads.Paced` yields gradients of these shapes and sleeps for the time of the computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

Shape = tuple[int, ...]

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


def shapes(name: str) -> list[Shape]:
    """Return the shapes of a model's parameters, in registration order."""
    return list(_MODELS[name]())


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def _resnet20() -> Iterator[Shape]:
    yield from [(16, 3, 3, 3), *_norm(16)]
    before = 16
    for width in (16, 32, 64):
        for block in range(3):
            yield from [(width, before, 3, 3), *_norm(width), (width, width, 3, 3), *_norm(width)]
            if block == 0 and before != width:
                yield from [(width, before, 1, 1), *_norm(width)]
            before = width
    yield from [(10, 64), (10,)]


def _resnet50() -> Iterator[Shape]:
    yield from [(64, 3, 7, 7), *_norm(64)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from [(width, before, 1, 1), *_norm(width), (width, width, 3, 3), *_norm(width)]
            yield from [(4 * width, width, 1, 1), *_norm(4 * width)]
            if block == 0:
                yield from [(4 * width, before, 1, 1), *_norm(4 * width)]
            before = 4 * width
    yield from [(1000, 2048), (1000,)]


def _vgg16() -> Iterator[Shape]:
    """For CIFAR-10: one linear layer behind the convolutions."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    for before, width in itertools.pairwise(widths):
        yield from [(width, before, 3, 3), (width,), *_norm(width)]
    yield from [(10, 512), (10,)]


def _alexnet() -> Iterator[Shape]:
    shape: Shape
    for shape in [(64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)]:
        yield from [shape, shape[:1]]
    for shape in [(4096, 9216), (4096, 4096), (1000, 4096)]:
        yield from [shape, shape[:1]]


def _lstm_ptb() -> Iterator[Shape]:
    """Two layers of 1500 units, a vocabulary of 10,000."""
    yield (10_000, 1500)
    for _ in range(2):
        yield from [(6000, 1500), (6000, 1500), (6000,), (6000,)]
    yield from [(10_000, 1500), (10_000,)]


def _gpt2() -> Iterator[Shape]:
    """The small one, with tied embeddings."""
    yield from [(50_257, 768), (1024, 768)]
    for _ in range(12):
        yield from [*_norm(768), (2304, 768), (2304,), (768, 768), (768,)]
        yield from [*_norm(768), (3072, 768), (3072,), (768, 3072), (768,)]
    yield from _norm(768)


def _mlp() -> Iterator[Shape]:
    for _ in range(6):
        yield from [(2048, 2048), (2048,)]
    yield from [(200, 2048), (200,)]


_MODELS = {
    "mlp_paced": _mlp,
    "resnet20": _resnet20,
    "vgg16": _vgg16,
    "alexnet": _alexnet,
    "resnet50": _resnet50,
    "lstm_ptb": _lstm_ptb,
    "gpt2": _gpt2,
}
