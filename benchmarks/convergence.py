"""Tests whether compressed training reaches the accuracy of dense training in the same number of epochs.

The task is ResNet-20 (0.27 M parameters) on scikit-learn's digits, with two processes over gloo. The optimizer is SGD
(Nesterov if there is momentum) with weight decay 5e-4 and one cycle of the learning rate. Each worker uses 8 images per
step. For each seed, all methods have equal initial weights and the same order of the data. So the gap to dense is a
paired difference. Reported are its mean over the seeds, and the upper end of the one-sided 95 % interval by Student's
t. The interval covers the variation between seeds, but not between sets of 360 digits. "Less than one point below
dense" holds if the upper end is below 1.

    python -m benchmarks.convergence                   # the comparison
    python -m benchmarks.convergence --part epochs     # dense training by number of epochs
    python -m benchmarks.convergence --part tuning     # grid of learning rates and momenta
    python -m benchmarks.convergence --part momentum   # gradients against updates, with momentum 0.9

Each command does the trainings that `convergence_PART.csv` lacks. `convergence.csv` contains the comparison by case.
Dense training determines the numbers of epochs. After 4 epochs each of five seeds ends at 98 % or more, and after 2
epochs their mean does. The residual delays parts of the gradient, which then arrive together, and momentum prolongs
their effect. So each method has, at each density, its best learning rate and momentum from one grid. The search used 3
epochs on another fold with other seeds, too few to distinguish neighbours in the grid.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from scipy.stats import t as student_t

from benchmarks.harness import results
from benchmarks.harness.results import Row
from examples.train import quiet, train
from lightning_sparse import SparseDDPStrategy


class Run(NamedTuple):
    """One training. `warmup` lists the densities of density warm-up, a quarter of an epoch each."""

    method: str
    density: float = 1.0
    max_lr: float = 0.4
    momentum: float = 0.0
    warmup: str = ""
    exchange: str = "gradient"
    epochs: int = 4
    seed: int = 0
    fold: int = 0


KEY = ["method", "density", "warmup", "epochs"]
WORKERS, BATCH_SIZE = 2, 8
STEPS_PER_EPOCH = 1437 // WORKERS // BATCH_SIZE
DENSE = Run("ddp")
TUNED = [
    DENSE,
    Run("topk", 0.01, 0.4, 0.0),
    Run("randk", 0.01, 0.1, 0.5),
    Run("topk", 0.001, 0.1, 0.5),
    Run("randk", 0.001, 0.4, 0.0),
]
WARMUP = "0.25/0.0625/0.015625/0.004"  # Lin et al. 2018, arXiv 1712.01887, without the last density
COMPARED = [
    *TUNED,
    # These use TopK's rates, because GaussianK approximates TopK, and density warm-up lasts only one epoch.
    Run("gaussiank", 0.01, 0.4, 0.0),
    Run("gaussiank", 0.001, 0.1, 0.5),
    Run("topk", 0.001, 0.1, 0.5, WARMUP),
    Run("gaussiank", 0.001, 0.1, 0.5, WARMUP),
]
WITH_MOMENTUM = [
    Run(method, density, momentum=0.9, exchange=exchange)
    # Gradients; and updates with unchanged momentum, with the momentum of sent entries cleared, and with payout.
    for exchange, methods in (("gradient", ("topk", "gaussiank")), ("update", ("memsgd", "dgc", "topk", "gaussiank")))
    for method in methods
    for density in ((0.001,) if method == "gaussiank" else (0.01, 0.001))
]
TUNING_SEEDS = {DENSE: range(100, 105)}  # more than two seeds, because all gaps are relative to dense
GRID = [*itertools.product((0.1, 0.2, 0.4), (0.0, 0.5)), (0.05, 0.9), (0.1, 0.9)]
PARTS = {
    "runs": [run._replace(epochs=epochs, seed=seed) for epochs in (4, 2) for run in COMPARED for seed in range(5)],
    "epochs": [DENSE._replace(epochs=epochs, seed=seed) for epochs in range(1, 5) for seed in TUNING_SEEDS[DENSE]],
    "tuning": [
        Run(*run[:2], *rate, epochs=3, seed=seed, fold=1)
        for run in TUNED
        for rate in GRID
        for seed in TUNING_SEEDS.get(run, range(100, 102))
    ],
    "momentum": [
        run._replace(max_lr=rate, seed=seed)
        for seed, run, rate in itertools.product(range(3), (DENSE._replace(momentum=0.9), *WITH_MOMENTUM), (0.05, 0.1))
    ],
}


def train_once(run: Run) -> list[Row]:
    """Train once in two forked processes; return one row with the accuracy."""
    strategy: str | SparseDDPStrategy = "ddp_fork"
    if run.method != DENSE.method:
        warmup = [float(density) for density in run.warmup.split("/") if density]
        steps = STEPS_PER_EPOCH // 4 if warmup else None
        options: Row = {
            "density_warmup": warmup,
            "density_warmup_steps": steps,
            "start_method": "fork",
            "exchange": run.exchange,
        }
        strategy = SparseDDPStrategy(run.method, density=run.density, **options)
    training = {name: getattr(run, name) for name in ("max_lr", "momentum", "epochs", "seed", "fold")}
    result = train(strategy, devices=WORKERS, batch_size=BATCH_SIZE, **training)
    return [
        {
            "batch_size_per_worker": BATCH_SIZE,
            "workers": WORKERS,
            "val_accuracy_percent": round(100 * result["val/accuracy"], 3),
            "val_loss": round(result["val/loss"], 4),
            "bytes_per_step_last_epoch": round(result["step/bytes"]),
            "pytorch_lightning": results.installed("pytorch-lightning"),
        }
    ]


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per case: mean accuracy over the seeds, and the gap to dense with its upper bound."""
    dense = runs[runs["method"] == DENSE.method].set_index(["epochs", "seed"])["val_accuracy_percent"].rename("dense")
    runs = runs.join(dense, on=["epochs", "seed"])
    runs["gap"] = runs["dense"] - runs["val_accuracy_percent"]
    cases = runs.groupby(KEY, sort=False)
    table = cases.first().reset_index().drop(columns=["seed", "val_accuracy_percent", "val_loss", "dense", "gap"])
    mean, stdev, seeds = (column.to_numpy() for column in (cases["gap"].mean(), cases["gap"].std(), cases.size()))
    upper = mean + student_t.ppf(0.95, seeds - 1) * stdev / seeds**0.5
    steps = table["epochs"] * STEPS_PER_EPOCH
    return table.assign(
        optimizer="SGD, Nesterov if momentum > 0, weight decay 5e-4, one-cycle",
        steps=steps,
        # Mean number of times that an entry of the gradient is sent in the whole training. If it is below 1, a method
        # that selects at random ends with most of its residual unsent.
        sends_per_entry=(steps * table["density"]).round(2),
        seeds=seeds,
        mean_accuracy_percent=cases["val_accuracy_percent"].mean().to_numpy().round(3),
        gap_points=mean.round(3),
        gap_stdev_points=stdev.round(3),
        gap_upper_95_points=upper.round(3),
        below_one_point=upper < 1,
    )


def load(path: Path) -> pd.DataFrame:
    """Return the table of trainings. An empty cell means a training without density warm-up."""
    return pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--part", choices=PARTS, default="runs", help="see above. Default: runs")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    path = args.out / f"convergence_{args.part}.csv"
    results.save_each(path, results.missing(load(path), PARTS[args.part]), train_once)
    table = load(path)
    if args.part == "runs":
        summary = summarize(table)
        results.save(args.out / "convergence.csv", summary.to_dict("records"))
        print(summary[[*KEY, *summary.columns[-5:]]].to_string(index=False))
    else:
        case = ["method", "exchange", "density", "epochs", "max_lr", "momentum"]
        means = table.groupby(case, sort=False)[["val_accuracy_percent", "val_loss"]].agg(["mean", "min", "max"])
        print(means.sort_values(means.columns[0]).to_string())
