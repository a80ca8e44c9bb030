"""Does compressed training reach the accuracy of dense training in as many epochs?

ResNet-20 (0.27 M parameters) on scikit-learn's digits, two processes over gloo, SGD (Nesterov where there is
momentum), weight decay 5e-4, one cycle of the learning rate, 8 images per worker and step. For each seed the initial
weights and the order of the data are the same under all methods, so the gap to dense is a paired difference: its mean
over the seeds, and the upper end of the one-sided 95 % interval by Student's t, which covers the scatter between seeds,
not that between sets of 360 digits. "Less than one point below dense" holds where that upper end is below 1.

    python -m benchmarks.convergence                   # the comparison
    python -m benchmarks.convergence --part epochs     # how its numbers of epochs were found
    python -m benchmarks.convergence --part tuning     # how its rates and momenta were found
    python -m benchmarks.convergence --part momentum   # gradients against updates, with momentum 0.9

Each trains what `convergence_PART.csv` lacks; `convergence.csv` has the comparison by case. Epochs: what dense needs
for each of five seeds to end at 98 % or more, 4, and for their mean, 2. Rates: what a method keeps back arrives late
and at once, and momentum prolongs it, so each method at each density gets the best rate and momentum of one grid, found
in 3 epochs on another fold with other seeds, too few to tell neighbours of the grid apart.
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
    """One training; `warmup` are the densities that it starts with, a quarter of an epoch each."""

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
    # GaussianK is an approximation of TopK, and a warm-up lasts one epoch: they take TopK's rates as they are.
    Run("gaussiank", 0.01, 0.4, 0.0),
    Run("gaussiank", 0.001, 0.1, 0.5),
    Run("topk", 0.001, 0.1, 0.5, WARMUP),
    Run("gaussiank", 0.001, 0.1, 0.5, WARMUP),
]
WITH_MOMENTUM = [
    Run(method, density, momentum=0.9, exchange=exchange)
    # Gradients; updates with momentum left alone, set to zero where entries are sent, and paid out.
    for exchange, methods in (("gradient", ("topk", "gaussiank")), ("update", ("memsgd", "dgc", "topk", "gaussiank")))
    for method in methods
    for density in ((0.001,) if method == "gaussiank" else (0.01, 0.001))
]
TUNING_SEEDS = {DENSE: range(100, 105)}  # more than two, because all gaps are measured from dense
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
    """Train once, in two forked processes, and return one row: the accuracy."""
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
        # How often an entry of the gradient is sent in the whole training, on average. Below 1, most of the residual
        # of a method that chooses without looking has not been sent when the training ends.
        sends_per_entry=(steps * table["density"]).round(2),
        seeds=seeds,
        mean_accuracy_percent=cases["val_accuracy_percent"].mean().to_numpy().round(3),
        gap_points=mean.round(3),
        gap_stdev_points=stdev.round(3),
        gap_upper_95_points=upper.round(3),
        below_one_point=upper < 1,
    )


def load(path: Path) -> pd.DataFrame:
    """Return what has been trained; an empty cell is a training without a warm-up."""
    return pd.read_csv(path, keep_default_na=False) if path.exists() else pd.DataFrame()


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--part", choices=PARTS, default="runs", help="see above, default: runs")
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
