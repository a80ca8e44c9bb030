"""Scikit-learn's handwritten digits, and small trainings on them by ranks that are threads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparse.comm import Comm, simulate
from lightning_sparse.exchange import NonFiniteGradient
from lightning_sparse.layout import Granularity
from lightning_sparse.methods import Method
from lightning_sparse.reducer import Reducer


class Split(NamedTuple):
    """Images, fp32 (n, 1, 8, 8) from 0 to 1, and labels, int64 (n)."""

    images: Tensor
    labels: Tensor


def digits(seed: int | None = 0) -> tuple[Split, Split]:
    """Return scikit-learn's handwritten digits, 1,500 to train and 297 to test, shuffled unless the seed is None."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    if seed is not None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        images, labels = images[order], labels[order]
    return Split(images[:1500], labels[:1500]), Split(images[1500:], labels[1500:])


class Trained(NamedTuple):
    """What `train` returns.

    Attributes:
        accuracy: on the test digits, in per cent.
        loss: on all training digits; infinite if a gradient was not finite, after which nothing is trained.
        bytes: that a rank sent in a step, the mean over ranks and steps.
    """

    accuracy: float
    loss: float
    bytes: float


def network(hidden: int, seed: int) -> nn.Sequential:
    """Return a network of two hidden layers for the digits; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )


def train(
    method: Method,
    *,
    ranks: int,
    lr: float,
    steps: int,
    seed: int = 0,
    batch: int = 16,
    hidden: int = 64,
    granularity: Granularity = "model",
) -> Trained:
    """Train a network on the digits with SGD at a constant rate; each rank draws its own examples.

    Raises:
        RuntimeError: the ranks end with different weights.
    """
    train_set, test_set = digits()
    nets = [network(hidden, seed) for _ in range(ranks)]

    def rank(comm: Comm) -> tuple[Tensor, bool]:
        net = nets[comm.rank]
        params = dict(net.named_parameters())
        reducer = Reducer(method, comm, seed=seed, granularity=granularity)
        generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
        for _ in range(steps):
            picked = torch.randint(len(train_set.labels), (batch,), generator=generator)
            loss = cross_entropy(net(train_set.images[picked]), train_set.labels[picked])
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
            try:
                reducer.reduce_(grads)
            except NonFiniteGradient:  # on all ranks
                return nn.utils.parameters_to_vector(net.parameters()), False
            with torch.no_grad():
                for name, param in params.items():
                    param.sub_(grads[name], alpha=lr)
        return nn.utils.parameters_to_vector(net.parameters()), True

    sent: list[int] = []

    def counted(comm: Comm) -> tuple[Tensor, bool]:
        result = rank(comm)
        sent.append(comm.sent_bytes)
        return result

    found = simulate(ranks, counted)
    if not all(torch.equal(weights.nan_to_num(), found[0][0].nan_to_num()) for weights, _ in found):
        raise RuntimeError(f"{method}: ranks differ in their weights: nothing is written.")
    with torch.no_grad():
        right = nets[0](test_set.images).argmax(1) == test_set.labels
        loss = cross_entropy(nets[0](train_set.images), train_set.labels).item()
    return Trained(
        100 * right.float().mean().item(), loss if found[0][1] else float("inf"), sum(sent) / ranks / max(1, steps)
    )
