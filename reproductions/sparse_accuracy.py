"""Compares the accuracy of TopK, GaussianK and gTopK with dense training.

Shi et al. 2019, arXiv 1901.04359 (gTopK), and arXiv 1911.08772 (GaussianK): at density 0.001 both are nearly as
accurate as dense training. The result of gTopK has k entries, and that of TopK up to kP. Here a network of two hidden
layers learns scikit-learn's digits. Its gradient is compressed as one vector, and each method uses the best of three
learning rates. The papers' models need GPUs. `python -m benchmarks.convergence` trains ResNet-20 with more seeds.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.methods import method
from reproductions.digits import best_rates, loss_and_accuracy, train
from reproductions.frame import Config, Finding, held

NAMES = ("topk", "gaussiank", "gtopk")
DENSITIES = (0.1, 0.01, 0.001)
RATES = (0.05, 0.15, 0.5)


def cases(config: Config) -> list[Row]:
    """Return a run for each method, density, learning rate and repetition."""
    kinds = [("dense", 1.0), *((name, density) for density in DENSITIES for name in NAMES)]
    return [
        {"method": name, "density": density, "lr": lr, "repeat": repeat}
        for name, density in kinds
        for lr in RATES
        for repeat in range(config["repeats"])
    ]


def run(case: Row, config: Config) -> Row:
    """Train."""
    found = train(
        method(case["method"], density=None if case["method"] == "dense" else case["density"]),
        ranks=config["ranks"],
        lr=case["lr"],
        steps=config["steps"],
        seed=config["seed"] + case["repeat"],
        hidden=config["hidden"],
        whole=True,
    )
    return {"loss": found.loss, "accuracy_percent": found.accuracy, "bytes_per_step": found.bytes}


def verdict(table: pd.DataFrame) -> str:
    """Say what each method loses against dense, and how gTopK does beside TopK."""
    accuracy = best_rates(table, ["method", "density"])["accuracy_percent"]
    dense = accuracy["dense", 1.0]
    said = " ".join(
        f"At density {density:g}, the difference in points is "
        + ", ".join(f"{name} {accuracy[name, density] - dense:+.1f}" for name in NAMES)
        + "."
        for density in DENSITIES
    )
    yes = all(accuracy[name, density] > dense - 2 for name in NAMES for density in DENSITIES)
    return f"{held(yes)}the test accuracy of dense training is {dense:.1f} %. {said}"


def draw(table: pd.DataFrame) -> Any:
    """Draw accuracy and loss by method and density."""
    best, key = best_rates(table, ["method", "density"]), ["method", "density"]
    sent = table.groupby(key)["bytes_per_step"].mean()
    order = [("dense", 1.0), *((name, density) for density in DENSITIES for name in NAMES)]
    names = [
        f"{name}{'' if name == 'dense' else f', density {density:g}'}: {sent[name, density] / 1e3:,.3g} kB"
        for name, density in order
    ]
    figure, _ = loss_and_accuracy(names, best.loc[order], [plots.color(name) for name, _ in order], 4.8)
    accuracy = best["accuracy_percent"]
    gaps = [accuracy[which] - accuracy["dense", 1.0] for which in order[1:]]
    finding = (
        f"Test accuracy of sparse gradients differs from that of dense ones by {plots.signed(min(gaps), 1)} to "
        f"{plots.signed(max(gaps), 1)} points"
    )
    ranks, steps = table["ranks"].iloc[0], table["steps"].iloc[0]
    task = (
        f"A network of two hidden layers on handwritten digits, {ranks} workers, {steps} steps of SGD, each method at "
        "the best of three learning rates; kB: what a worker sends in a step."
    )
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding(
    "sparse-accuracy",
    {"steps": 300, "ranks": 4, "hidden": 256, "repeats": 1, "seed": 0},
    ("method", "density", "lr", "repeat"),
    cases,
    run,
    draw,
    verdict,
)
