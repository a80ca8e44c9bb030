"""Compares compression layer by layer with compression of the whole model as one vector.

Dutta et al. 2020, "On the Discrepancy between the Theoretical Analysis and Practical Implementations of Compressed
Communication for Distributed Deep Learning", AAAI: with six methods, layer-wise compression is often better. Here a
network of two hidden layers learns scikit-learn's digits. "layer" compresses each weight and each bias separately.
"model" compresses all of them as one vector, with k entries, one threshold, norm or scale in total.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.harness.table import Row
from lightning_sparse.aggregators import Mean
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.memory import NoMemory
from lightning_sparse.methods import Method, method
from reproductions.digits import best_rates, loss_and_accuracy, network, train
from reproductions.frame import Config, Finding, held

NAMES = ("topk", "randk", "gaussiank", "qsgd", "terngrad", "efsignsgd")
RATES = (0.1, 0.3, 1.0)


def make(name: str, density: float) -> Method:
    """Return a method by name. QSGD uses one norm for its whole input."""
    if name == "qsgd":
        weights = sum(param.numel() for param in network(32, 0).parameters())
        return Method(QSGD(15, bucket=weights), NoMemory(), Mean())
    return method(name, density=density if name in ("topk", "randk", "gaussiank") else None)


def cases(config: Config) -> list[Row]:
    """Return a run for each method, kind of compression, learning rate and repetition."""
    return [
        {"method": name, "compressed": kind, "lr": lr, "repeat": repeat}
        for name in NAMES
        for kind in ("layer", "model")
        for lr in RATES
        for repeat in range(config["repeats"])
    ]


def run(case: Row, config: Config) -> Row:
    """Train."""
    found = train(
        make(case["method"], config["density"]),
        ranks=config["ranks"],
        lr=case["lr"],
        steps=config["steps"],
        seed=config["seed"] + case["repeat"],
        whole=case["compressed"] == "model",
    )
    return {"loss": found.loss, "accuracy_percent": found.accuracy, "bytes_per_step": found.bytes}


def verdict(table: pd.DataFrame) -> str:
    """Say which kind of compression is better, by method."""
    best = best_rates(table, ["method", "compressed"])
    loss, accuracy = best["loss"], best["accuracy_percent"]
    better = [name for name in NAMES if loss[name, "layer"] <= loss[name, "model"]]
    gaps = {name: accuracy[name, "layer"] - accuracy[name, "model"] for name in NAMES}
    said = ", ".join(f"{name} {gap:+.1f}" for name, gap in gaps.items())
    yes = len(better) >= len(NAMES) / 2 and min(gaps.values()) > -2
    return (
        f"{held(yes)}layer by layer the training loss is no higher for {len(better)} of {len(NAMES)} methods "
        f"({', '.join(better)}); test accuracy differs by, in points: {said}."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw loss and accuracy of both kinds of compression."""
    best = best_rates(table, ["method", "compressed"])
    figure, panels = loss_and_accuracy()
    for column, panel in panels.items():
        for offset, kind, color in ((-0.2, "layer", "#0072B2"), (0.2, "model", "#D55E00")):
            heights = [best[column][name, kind] for name in NAMES]
            panel.bar([place + offset for place in range(len(NAMES))], heights, 0.4, color=color, label=kind)
        panel.set_xticks(range(len(NAMES)), NAMES)
    panels["accuracy_percent"].set(ylim=(0, 100))
    panels["loss"].legend()
    return figure


FINDING = Finding(
    "layer-wise",
    {"steps": 400, "density": 0.01, "ranks": 2, "repeats": 1, "seed": 0},
    ("method", "compressed", "lr", "repeat"),
    cases,
    run,
    draw,
    verdict,
)
