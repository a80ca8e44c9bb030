"""Measures the accuracy of aggregators and of election coding under three attacks by some of the ranks.

Bernstein et al. 2019, arXiv 1810.05291, prove and show that the majority vote of signs converges if fewer than half of
the workers are wrong. Sohn et al. 2020, arXiv 1910.06093, show that election coding preserves the exact vote.

A network of one hidden layer learns scikit-learn's digits, with nine threads as ranks. Each step uses nine parts of the
data, which are equal for all methods. The last ⌊9α⌋ ranks attack (see `Attacked`). The learning rate is 1, and 0.01
for votes. If a gradient is not finite, training ends with the weights before it, and `steps` is the number of completed
steps.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from examples.data.digits import digits
from lightning_sparse.aggregators import AllReduceMean
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.compressors import Compressor, Identity
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.order_statistics import CoordinateMedian, TrimmedMean
from lightning_sparse.contrib.robust import (
    Attacked,
    PartSampler,
    bernoulli_allocation,
    deterministic_allocation,
    local_vote,
)
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.exchange import NonFiniteGradient
from lightning_sparse.memory import NoMemory
from lightning_sparse.methods import Method
from lightning_sparse.reducer import Reducer
from reproductions.frame import Config, Finding, held

RANKS, PART_SIZE = 9, 16
ATTACKS = {"negate": "negated", "flip": "signs flipped at random", "scale": "scaled at random"}
ALPHAS = (0.0, 0.15, 0.25, 0.35, 0.45)  # 0 to 4 of 9 ranks


class Contestant(NamedTuple):
    """A method of training: compressor, aggregator, and allocation of the data's parts to ranks.

    Attributes:
        allocation: bool matrix of parts; None means one part for each rank, without a local vote.
    """

    compressor: Compressor
    aggregator: Any
    allocation: Tensor | None
    lr: float
    line: tuple[str, str]


RATE, VOTE_RATE = 1.0, 0.01
VOTE = Sign(), MajorityVote()
CONTESTANTS = {
    "mean": Contestant(Identity(), AllReduceMean(), None, RATE, ("#000000", "-")),
    "trimmed mean, 0.25": Contestant(Identity(), TrimmedMean(), None, RATE, ("#CC79A7", "--")),
    "median": Contestant(Identity(), CoordinateMedian(), None, RATE, ("#D55E00", "-")),
    "majority vote": Contestant(*VOTE, None, VOTE_RATE, ("#56B4E9", "--")),
    "election, p = 0.5": Contestant(*VOTE, bernoulli_allocation(RANKS, 0.5), VOTE_RATE, ("#009E73", ":")),
    "election, b = 2": Contestant(*VOTE, deterministic_allocation(RANKS, 2), VOTE_RATE, ("#0072B2", "-")),
}


def train(contestant: Contestant, attack: str, alpha: float, epochs: int, seed: int) -> tuple[float, int]:
    """Return the accuracy on the test digits in per cent, and the number of steps."""
    train_set, test_set = digits()
    data = TensorDataset(train_set.images.flatten(1), train_set.labels)
    allocation = torch.eye(RANKS, dtype=torch.bool) if contestant.allocation is None else contestant.allocation
    aggregator = Attacked(contestant.aggregator, attack, alpha) if attack else contestant.aggregator  # type: ignore[arg-type]
    nets = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(RANKS):  # not in the threads, because they share the global generator
            torch.manual_seed(seed)
            nets.append(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

    def rank(comm: Comm) -> tuple[float, int]:
        net, sampler = nets[comm.rank], PartSampler(data, allocation, PART_SIZE, rank=comm.rank, seed=seed)
        reducer = Reducer(Method(contestant.compressor, NoMemory(), aggregator), comm, seed=seed)
        optimizer = torch.optim.SGD(net.parameters(), contestant.lr)
        with contextlib.suppress(NonFiniteGradient):  # raised on all ranks
            for epoch in range(epochs):
                sampler.set_epoch(epoch)
                for x, y in DataLoader(data, sampler.batch_size, sampler=sampler):
                    optimizer.zero_grad()
                    parts = zip(x.split(PART_SIZE), y.split(PART_SIZE), strict=True)
                    losses = (cross_entropy(net(images), labels) for images, labels in parts)
                    (next(losses) if contestant.allocation is None else local_vote(losses, net.parameters())).backward()
                    reducer.reduce_({name: param.grad for name, param in net.named_parameters()})  # type: ignore[misc]
                    optimizer.step()
        with torch.no_grad():
            right = net(test_set.images.flatten(1)).argmax(1) == test_set.labels
        return 100 * right.float().mean().item(), reducer.step

    found = simulate(RANKS, rank)
    if len(set(found)) > 1:
        raise RuntimeError(f"{aggregator}: ranks differ in their results, {found}, so nothing is written.")
    return found[0]


def cases(config: Config) -> list[Row]:
    """Return a run for each method without attack, and under each attack by each number of ranks."""
    attacks = [("", 0.0), *((attack, alpha) for attack in ATTACKS for alpha in ALPHAS[1:])]
    return [{"contestant": name, "attack": attack, "alpha": alpha} for attack, alpha in attacks for name in CONTESTANTS]


def run(case: Row, config: Config) -> Row:
    """Train."""
    chosen = CONTESTANTS[case["contestant"]]
    accuracy, steps = train(chosen, case["attack"], case["alpha"], config["epochs"], config["seed"])
    return {"attackers": int(RANKS * case["alpha"]), "accuracy_percent": accuracy, "steps": steps, "lr": chosen.lr}


def verdict(table: pd.DataFrame) -> str:
    """Give the accuracy of the vote, the coded vote and the mean under the worst attack at each α."""
    found = table.set_index(["contestant", "attack", "alpha"])["accuracy_percent"]

    def worst(name: str, alpha: float) -> float:
        return float(min(found[name, attack, alpha] for attack in ATTACKS))

    vote, clean = [worst("majority vote", alpha) for alpha in ALPHAS[1:]], found["majority vote", "", 0.0]
    drops = ", ".join(f"{share:.0f} % at α = {alpha:g}" for alpha, share in zip(ALPHAS[1:], vote, strict=True))
    coded = [found["election, b = 2", attack, alpha] for attack in ATTACKS for alpha in (0.15, 0.25)]
    exact = len({found["election, b = 2", "", 0.0], *coded}) == 1
    yes = vote[1] > clean - 3 and vote[1] > worst("mean", 0.25) + 10 and exact
    return (
        f"{held(yes)}without attackers the vote reaches {clean:.0f} %. Under the worst of three attacks it reaches "
        f"{drops}. The mean reaches {worst('mean', 0.15):.0f} % at α = 0.15. Election coding with b = 2 "
        f"{'changes nothing' if exact else 'is not exact'} with one or two attackers."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw accuracy against the number of attackers, with one panel per attack."""
    table = table.sort_values("attackers")
    figure, (panels,) = plots.panels(1, len(ATTACKS), 4.1, sharey=True)
    for panel, (attack, title) in zip(panels, ATTACKS.items(), strict=True):
        for name, contestant in CONTESTANTS.items():
            runs = table[(table["contestant"] == name) & table["attack"].isin(["", attack])]
            color, style = contestant.line
            panel.plot(runs.attackers, runs.accuracy_percent, style, color=color, marker="o", markersize=4, label=name)
        panel.set(title=title, xlabel="attackers among nine ranks", xticks=range(len(ALPHAS)))
    panels[0].set(ylabel="test accuracy, %", ylim=(0, 100))
    panels[0].legend(loc="lower left")
    found = table.set_index(["contestant", "attack", "attackers"])["accuracy_percent"]
    worst = {
        name: [min(found[name, attack, count] for attack in ATTACKS) for count in (1, 3, 4)]
        for name in ("mean", "majority vote")
    }
    finding = (
        f"One attacker can bring a mean down to {worst['mean'][0]:.0f} % accuracy; a majority vote keeps "
        f"{worst['majority vote'][1]:.0f} % with three of nine and {worst['majority vote'][2]:.0f} % with four"
    )
    task = (
        "Handwritten digits, nine ranks, one hidden layer; 1 to 4 ranks send the negative of their gradient, flip "
        "signs at random, or scale it at random. Election: coded votes with redundant data. One seed."
    )
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding("signsgd", {"epochs": 6, "seed": 0}, ("contestant", "attack", "alpha"), cases, run, draw, verdict)
