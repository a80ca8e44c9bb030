"""What does training reach while some of the ranks attack? Aggregators and election coding under three attacks.

Scikit-learn's digits, a network of one hidden layer, nine ranks that are threads of this process. In each step there
are nine parts of the data, the same for all contestants. The last ⌊9α⌋ ranks attack, see `Attacked`. Learning rates are
the best of four in 200 steps without attackers: of 0.1 to 1 for the mean, and of 0.001 to 0.01 for the vote.

    python -m benchmarks.robust            # train what robust.csv lacks, a few seconds each
    python -m benchmarks.robust --figure   # only draw what was measured

Written: `results/robust.csv`, a row for each training, and `results/robust.png`. A training that ends with a gradient
that is not finite counts with the weights before; `steps` says when that was.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import plots, results
from benchmarks.harness.results import Row
from examples.data.digits import digits
from lightning_sparse import Comm, Method, NonFiniteGradient, Reducer, simulate
from lightning_sparse.aggregators import AllReduceMean, CoordinateMedian, TrimmedMean
from lightning_sparse.aggregators.majority_vote import MajorityVote
from lightning_sparse.compressors import Compressor, Identity
from lightning_sparse.compressors.sign import Sign
from lightning_sparse.memory import NoMemory
from lightning_sparse.robust import Attacked, PartSampler, bernoulli_allocation, deterministic_allocation, local_vote

RANKS, PART_SIZE, EPOCHS, SEED = 9, 16, 6, 0
ATTACKS = {"negate": "negated", "flip": "signs flipped at random", "scale": "scaled at random"}
ALPHAS = (0.0, 0.15, 0.25, 0.35, 0.45)  # 0 to 4 of 9 ranks
KEY = ["contestant", "attack", "alpha"]


class Contestant(NamedTuple):
    """A way to train: what ranks send, what is made of it, and which parts of the data each has.

    Attributes:
        allocation: None is one part for each rank, without a local vote.
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
    "trimmed mean, 0.25": Contestant(Identity(), TrimmedMean(), None, RATE, ("#E69F00", "--")),
    "median": Contestant(Identity(), CoordinateMedian(), None, RATE, ("#D55E00", "-")),
    "majority vote": Contestant(*VOTE, None, VOTE_RATE, ("#56B4E9", "--")),
    "election, p = 0.5": Contestant(*VOTE, bernoulli_allocation(RANKS, 0.5), VOTE_RATE, ("#009E73", ":")),
    "election, b = 2": Contestant(*VOTE, deterministic_allocation(RANKS, 2), VOTE_RATE, ("#0072B2", "-")),
}


def train(contestant: Contestant, attack: str, alpha: float) -> tuple[float, int]:
    """Return the accuracy on the test digits in per cent, and the number of steps."""
    train_set, test_set = digits()
    data = TensorDataset(train_set.images.flatten(1), train_set.labels)
    allocation = torch.eye(RANKS, dtype=torch.bool) if contestant.allocation is None else contestant.allocation
    aggregator = Attacked(contestant.aggregator, attack, alpha) if attack else contestant.aggregator  # type: ignore[arg-type]
    nets = []
    for _ in range(RANKS):  # here, as ranks share the global generator
        torch.manual_seed(SEED)
        nets.append(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

    def rank(comm: Comm) -> tuple[float, int]:
        net, sampler = nets[comm.rank], PartSampler(data, allocation, PART_SIZE, rank=comm.rank, seed=SEED)
        reducer = Reducer(Method(contestant.compressor, NoMemory(), aggregator), comm, seed=SEED)
        optimizer = torch.optim.SGD(net.parameters(), contestant.lr)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, sampler.batch_size, sampler=sampler):
                optimizer.zero_grad()
                parts = zip(x.split(PART_SIZE), y.split(PART_SIZE), strict=True)
                losses = (cross_entropy(net(images), labels) for images, labels in parts)
                (next(losses) if contestant.allocation is None else local_vote(losses, net.parameters())).backward()
                try:
                    reducer.reduce_({name: param.grad for name, param in net.named_parameters()})  # type: ignore[misc]
                except NonFiniteGradient:  # on all ranks
                    break
                optimizer.step()
        with torch.no_grad():
            right = net(test_set.images.flatten(1)).argmax(1) == test_set.labels
        return 100 * right.float().mean().item(), reducer.step

    found = simulate(RANKS, rank)
    if len(set(found)) > 1:
        raise SystemExit(f"{aggregator}: ranks differ in what they have reached, {found}: nothing is written.")
    return found[0]


def run(path: Path, name: str, attack: str, alpha: float) -> None:
    """Train, unless the CSV file has it, and add a row."""
    case: Row = dict(zip(KEY, (name, attack, alpha), strict=True))
    known = results.load(path)
    if len(known) and (known[KEY] == list(case.values())).all(axis=1).any():
        return
    started = time.perf_counter()
    accuracy, steps = train(CONTESTANTS[name], attack, alpha)
    row = case | {"attackers": int(RANKS * alpha), "accuracy_percent": accuracy, "steps": steps}
    row |= {"lr": CONTESTANTS[name].lr, "seconds": time.perf_counter() - started}
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    results.save(path, [row | results.origin("scikit-learn")], KEY, digits=4)


def draw(folder: Path) -> None:
    """Draw `robust.csv`, beside it."""
    table = results.load(folder / "robust.csv").sort_values("attackers")
    figure, (panels,) = plots.panels(1, len(ATTACKS), (13, 4.2), sharey=True)
    for panel, (attack, title) in zip(panels, ATTACKS.items(), strict=True):
        for name, contestant in CONTESTANTS.items():
            runs = table[(table["contestant"] == name) & table["attack"].isin(["", attack])]
            color, style = contestant.line
            panel.plot(runs.attackers, runs.accuracy_percent, style, color=color, marker="o", markersize=4, label=name)
        ticks = [f"{count}\nα = {alpha:g}" for count, alpha in enumerate(ALPHAS)]
        panel.set(title=title, xlabel="ranks of nine that attack", xticks=range(len(ALPHAS)), xticklabels=ticks)
    panels[0].set(ylabel="test accuracy, %", ylim=(0, 100))
    panels[0].legend()
    plots.write(figure, folder / "robust.png")


def main() -> None:
    """Train and draw."""
    parser = results.command_line(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are threads
    path = args.out / "robust.csv"
    cases = [("", 0.0), *((attack, alpha) for attack in ATTACKS for alpha in ALPHAS[1:])]
    for attack, alpha in () if args.figure else cases:
        for name in CONTESTANTS:
            run(path, name, attack, alpha)
    draw(args.out)


if __name__ == "__main__":
    main()
