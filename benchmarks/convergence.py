"""Does compressed training reach the accuracy of dense training in as many epochs?

ResNet-20 (0.27 M parameters) on scikit-learn's digits, two processes over gloo, SGD (Nesterov where there is
momentum), weight decay 5e-4, one cycle of the learning rate, 8 images per worker and step. For each seed the initial
weights and the order of the data are the same under all methods, so the gap to dense is a paired difference: its mean
over the seeds, and the upper end of the one-sided 95 % interval by Student's t. "Less than one point below dense" holds
where that upper end is below 1.

    python -m benchmarks.convergence --epochs-needed   # how DENSE_EPOCHS was found
    python -m benchmarks.convergence --tune            # how RATES were found
    python -m benchmarks.convergence                   # the comparison
    python -m benchmarks.convergence --momentum        # gradients against updates, with momentum 0.9

Epochs. One budget is what dense needs for every one of five seeds to end at 98 % or more (4 epochs); the other is what
it needs for their mean (2 epochs): `convergence_epochs.csv`, on the same held-out digits, with other seeds.

Rates. What a method keeps back arrives late and at once, and momentum prolongs it. So each method at each density gets
the best rate and momentum of one grid, the same for all and for dense, found in 3 epochs on fold 1 with seeds of its
own: `convergence_tuning.csv`. Two seeds (dense: five) do not tell neighbours of the grid apart; they do tell that RandK
needs little or no momentum. The best rate of dense, of TopK at 0.01 and of RandK at 0.001 is the grid's highest.

Momentum. Whether updates are better than gradients under SGD with momentum is looked at with momentum 0.9, which all
cases get at two rates, the grid's, in `DENSE_EPOCHS` epochs: `convergence_momentum.csv`.

The bounds cover the scatter between seeds, not that between sets of 360 digits, of which one is 0.28 points.
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


class Case(NamedTuple):
    """A method, how much it sends, the densities that it starts with, a quarter of an epoch each, and what it sends."""

    method: str
    density: float | None = None
    warmup: tuple[float, ...] = ()
    exchange: str = "gradient"

    def __str__(self) -> str:
        parts = [self.method, *([f"{self.density:g}"] if self.density else []), *(["warm-up"] if self.warmup else [])]
        return " ".join([*parts, *(["updates"] if self.exchange == "update" else [])])


class Rate(NamedTuple):
    """Top of the learning rate's cycle, and momentum."""

    max_lr: float
    momentum: float


KEY = ["method", "density", "warmup", "epochs"]
WORKERS = 2
BATCH_SIZE = 8
STEPS_PER_EPOCH = 1437 // WORKERS // BATCH_SIZE

TUNING_FOLD = 1
TUNING_SEEDS = range(100, 102)
DENSE_TUNING_SEEDS = range(100, 105)  # more, because all gaps are measured from dense
GRID = [
    *(Rate(max_lr, 0.0) for max_lr in (0.1, 0.2, 0.4)),
    *(Rate(max_lr, 0.5) for max_lr in (0.1, 0.2, 0.4)),
    *(Rate(max_lr, 0.9) for max_lr in (0.05, 0.1)),
]

DENSE = Case("ddp")
WARMUP = (0.25, 0.0625, 0.015625, 0.004)  # Lin et al. 2018, arXiv 1712.01887, without the last density
TUNED = {
    DENSE: Rate(0.4, 0.0),
    Case("topk", 0.01): Rate(0.4, 0.0),
    Case("randk", 0.01): Rate(0.1, 0.5),
    Case("topk", 0.001): Rate(0.1, 0.5),
    Case("randk", 0.001): Rate(0.4, 0.0),
}
# GaussianK is an approximation of TopK, and a warm-up lasts one epoch: they take TopK's rates as they are.
RATES = {
    **TUNED,
    Case("gaussiank", 0.01): TUNED[Case("topk", 0.01)],
    Case("gaussiank", 0.001): TUNED[Case("topk", 0.001)],
    Case("topk", 0.001, WARMUP): TUNED[Case("topk", 0.001)],
    Case("gaussiank", 0.001, WARMUP): TUNED[Case("topk", 0.001)],
}

MOMENTUM = [
    DENSE,
    *(
        Case(method, density, exchange=exchange)
        for density in (0.01, 0.001)
        for method, exchange in (("topk", "gradient"), ("memsgd", "update"), ("dgc", "update"), ("topk", "update"))
    ),
    *(Case("gaussiank", 0.001, exchange=exchange) for exchange in ("gradient", "update")),
]
"""Gradients; updates with momentum left alone, set to zero where entries are sent, and paid out."""
MOMENTUM_SEEDS = range(3)

TUNING_EPOCHS = 3
DENSE_EPOCHS = 4
"""Epochs after which every dense training of `find_epochs` had reached 98 %."""
EPOCHS_ON_AVERAGE = 2
"""Epochs after which their mean had."""
SEEDS = range(5)


def run(case: Case, rate: Rate, epochs: int, seed: int, fold: int) -> Row:
    """Train once, in two forked processes, and return one row: the options and the accuracy."""
    strategy: str | SparseDDPStrategy = "ddp_fork"
    if case != DENSE:
        quarter = STEPS_PER_EPOCH // 4 if case.warmup else None
        options: Row = {"warmup": case.warmup, "warmup_steps": quarter, "start_method": "fork"}
        options["exchange"] = case.exchange
        strategy = SparseDDPStrategy(case.method, case.density, **options)
    training = {**rate._asdict(), "seed": seed, "fold": fold}
    result = train(strategy, devices=WORKERS, epochs=epochs, batch_size=BATCH_SIZE, **training)
    print(f"{case!s:<28} {epochs} epochs, {training}: {result['val/accuracy']:.2%}", flush=True)
    return {
        "method": case.method,
        "density": case.density or 1.0,
        "exchange": case.exchange,
        "warmup": "/".join(f"{density:g}" for density in case.warmup),
        "epochs": epochs,
        "batch_size_per_worker": BATCH_SIZE,
        "workers": WORKERS,
        **training,
        "val_accuracy_percent": round(100 * result["val/accuracy"], 3),
        "val_loss": round(result["val/loss"], 4),
        "bytes_per_step_last_epoch": round(result["step/bytes"]),
        **results.origin("pytorch-lightning"),
    }


def find_epochs(out: Path) -> None:
    """Train dense for 1 to `DENSE_EPOCHS` epochs: after how many does every seed, and their mean, end at 98 %?"""
    rows: list[Row] = []
    for epochs in range(1, DENSE_EPOCHS + 1):
        rows += [run(DENSE, TUNED[DENSE], epochs, seed, fold=0) for seed in DENSE_TUNING_SEEDS]
    results.save(out / "convergence_epochs.csv", rows)
    print(pd.DataFrame(rows).groupby("epochs")["val_accuracy_percent"].agg(["min", "mean"]))


def tune(out: Path) -> None:
    """Try the grid for each case, and print the rate with the best mean accuracy; lower loss decides between equals."""
    rows: list[Row] = []
    for case in TUNED:
        seeds = DENSE_TUNING_SEEDS if case == DENSE else TUNING_SEEDS
        found = [run(case, rate, TUNING_EPOCHS, seed, TUNING_FOLD) for rate in GRID for seed in seeds]
        rows += found
        results.save(out / "convergence_tuning.csv", rows)
        means = pd.DataFrame(found).groupby(["max_lr", "momentum"])[["val_accuracy_percent", "val_loss"]].mean()
        best = means.sort_values(["val_accuracy_percent", "val_loss"], ascending=[False, True]).iloc[0]
        print(f"{case}: {Rate(*best.name)}, {best['val_accuracy_percent']:.2f} %")


def compare(out: Path) -> None:
    """Train every case with every seed, and write and print the gaps to dense."""
    rows = [
        run(case, rate, epochs, seed, fold=0)
        for epochs in (DENSE_EPOCHS, EPOCHS_ON_AVERAGE)
        for case, rate in RATES.items()
        for seed in SEEDS
    ]
    results.save(out / "convergence_runs.csv", rows)
    summary = summarize(pd.DataFrame(rows))
    results.save(out / "convergence.csv", summary.to_dict("records"))
    print(summary[[*KEY, *summary.columns[-5:]]].to_string(index=False))


def compare_with_momentum(out: Path) -> None:
    """Train every case of `MOMENTUM` at two rates, but for what is there, and print each at the better one."""
    path, key = out / "convergence_momentum.csv", ["method", "exchange", "density", "max_lr", "seed"]
    table = results.load(path)
    found = set() if table.empty else set(table[key].itertuples(index=False, name=None))
    for seed, case, rate in itertools.product(MOMENTUM_SEEDS, MOMENTUM, GRID):
        if rate.momentum == 0.9 and (case.method, case.exchange, case.density or 1.0, rate.max_lr, seed) not in found:
            results.save(path, [run(case, rate, DENSE_EPOCHS, seed, fold=0)], key)
    means = results.load(path).groupby(key[:-1], sort=False)[["val_accuracy_percent", "val_loss"]].mean()
    print(means.sort_values("val_loss").groupby(level=[0, 1, 2], sort=False).head(1).to_string())


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per case: mean accuracy over the seeds, and the gap to dense with its upper bound."""
    runs = runs.fillna({"warmup": ""})
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


def main() -> None:
    """Read the command line and run."""
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--epochs-needed", action="store_true", help="find the number of epochs that dense needs")
    parser.add_argument("--tune", action="store_true", help="try the grid of rates and momenta for every method")
    parser.add_argument("--momentum", action="store_true", help="compare gradients and updates with momentum 0.9")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    comparison = compare_with_momentum if args.momentum else compare
    part = find_epochs if args.epochs_needed else tune if args.tune else comparison
    part(args.out)


if __name__ == "__main__":
    main()
