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
    said = ", ".join(
        f"{density:g}: " + ", ".join(f"{name} {accuracy[name, density] - dense:+.1f}" for name in NAMES)
        for density in DENSITIES
    )
    yes = all(accuracy[name, density] > dense - 2 for name in NAMES for density in DENSITIES)
    return f"{held(yes)}points of test accuracy against dense's {dense:.1f} %, at density {said}."


def draw(table: pd.DataFrame) -> Any:
    """Draw accuracy and loss against the bytes per step."""
    best, key = best_rates(table, ["method", "density"]), ["method", "density"]
    sent = table.groupby(key)["bytes_per_step"].mean()
    figure, panels = loss_and_accuracy()
    for name in ("dense", *NAMES):
        densities = [1.0] if name == "dense" else list(DENSITIES)
        for column, panel in panels.items():
            heights = [best[column][name, density] for density in densities]
            style = plots.line(name) | {"marker": "o", "label": name}
            panel.plot([sent[name, density] for density in densities], heights, **style)
            panel.set(xscale="log", xlabel="bytes a rank sends in a step")
    panels["loss"].legend()
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
