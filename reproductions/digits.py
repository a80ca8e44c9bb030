"""Small trainings on scikit-learn's handwritten digits, with threads as ranks, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.harness import plots
from examples.data.digits import digits
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.exchange import NonFiniteGradient
from lightning_sparse.methods import Method
from lightning_sparse.reducer import Reducer


class Trained(NamedTuple):
    """Result of `train`.

    Attributes:
        accuracy: accuracy on the test digits, in per cent.
        loss: loss on all training digits; infinite if a gradient was not finite, which ends training.
        bytes: bytes that a rank sent per step, as the mean over ranks and steps.
    """

    accuracy: float
    loss: float
    bytes: float


def network(hidden: int, seed: int) -> nn.Sequential:
    """Return a network of two hidden layers for the digits. The state of the global generator does not change."""
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
    hidden: int = 32,
    whole: bool = False,
) -> Trained:
    """Train a network on the digits with SGD at a constant learning rate. Each rank draws its own examples.

    Args:
        method: method that exchanges gradients.
        ranks: number of ranks.
        lr: learning rate.
        steps: number of steps.
        seed: seed of the initial weights, the examples and the method.
        batch: number of examples per rank and step.
        hidden: width of the hidden layers.
        whole: whether the method compresses all gradients as one vector; otherwise it compresses each weight and each
            bias separately.

    Raises:
        RuntimeError: the ranks end with different weights.
    """
    train_set, test_set = digits()
    nets = [network(hidden, seed) for _ in range(ranks)]

    def rank(comm: Comm) -> tuple[Tensor, bool]:
        net = nets[comm.rank]
        params, names = list(net.parameters()), [name for name, _ in net.named_parameters()]
        reducer = Reducer(method, comm, seed=seed, granularity="layer")
        generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
        for _ in range(steps):
            picked = torch.randint(len(train_set.labels), (batch,), generator=generator)
            loss = cross_entropy(net(train_set.images[picked]), train_set.labels[picked])
            found = torch.autograd.grad(loss, params)
            grads = {"all": nn.utils.parameters_to_vector(found)} if whole else dict(zip(names, found, strict=True))
            try:
                reducer.reduce_(grads)
            except NonFiniteGradient:  # raised on all ranks
                return nn.utils.parameters_to_vector(params), False
            with torch.no_grad():
                nn.utils.vector_to_parameters(
                    nn.utils.parameters_to_vector(params) - lr * nn.utils.parameters_to_vector(grads.values()), params
                )
        return nn.utils.parameters_to_vector(params), True

    sent: list[int] = []

    def counted(comm: Comm) -> tuple[Tensor, bool]:
        result = rank(comm)
        sent.append(comm.sent_bytes)
        return result

    found = simulate(ranks, counted)
    if not all(torch.equal(weights.nan_to_num(), found[0][0].nan_to_num()) for weights, _ in found):
        raise RuntimeError(f"{method}: ranks differ in their weights, so nothing is written.")
    with torch.no_grad():
        right = nets[0](test_set.images).argmax(1) == test_set.labels
        loss = cross_entropy(nets[0](train_set.images), train_set.labels).item()
    return Trained(
        100 * right.float().mean().item(), loss if found[0][1] else float("inf"), sum(sent) / ranks / max(1, steps)
    )


def best_rates(table: pd.DataFrame, key: Sequence[str]) -> pd.DataFrame:
    """Return, for each `key`, the mean accuracy and loss over the seeds, at the rate with the lowest mean loss."""
    means = table.groupby([*key, "lr"], sort=False)[["accuracy_percent", "loss"]].mean().reset_index()
    return means.loc[means.groupby(list(key), sort=False)["loss"].idxmin()].set_index(list(key))


def loss_and_accuracy(
    names: Sequence[str], found: pd.DataFrame, colors: Sequence[str], height: float
) -> tuple[Any, tuple[Any, Any]]:
    """Return a figure of two panels with bars of the columns "accuracy_percent" and "loss" of a table."""
    figure, ((accuracy, loss),) = plots.panels(1, 2, height, sharey=True)
    plots.bars(
        accuracy, names, list(found["accuracy_percent"]), colors, [f"{x:.1f}" for x in found["accuracy_percent"]]
    )
    plots.bars(loss, names, list(found["loss"]), colors, [f"{x:.3f}" for x in found["loss"]])
    accuracy.set(xlabel="test accuracy, %", xlim=(0, 119), xticks=range(0, 101, 20))
    loss.set_xlabel("training loss")
    return figure, (accuracy, loss)
