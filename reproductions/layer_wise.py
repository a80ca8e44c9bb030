"""Compares compression layer by layer with compression of the whole model as one vector.

Dutta et al. 2020, "On the Discrepancy between the Theoretical Analysis and Practical Implementations of Compressed
Communication for Distributed Deep Learning", AAAI. With six methods, layer-wise compression is often better. Here a
network of two hidden layers learns scikit-learn's digits. "layer" compresses each weight and each bias separately.
"model" compresses all of them as one vector, with k entries, one threshold, norm or scale in total.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.aggregators import Mean
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.memory import NoMemory
from lightning_sparse.methods import Method, method
from reproductions.digits import best_rates, network, train
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
        f"{held(yes)}layer-wise compression has no higher training loss for {len(better)} of {len(NAMES)} methods "
        f"({', '.join(better)}). Its test accuracy differs from that of the whole model by these points: {said}."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw loss and accuracy of both kinds of compression."""
    best = best_rates(table, ["method", "compressed"])
    figure, panels = plots.panels(1, 2, 4.6, sharey=True)
    for panel, column in zip(panels.flat, ("accuracy_percent", "loss"), strict=True):
        for offset, kind, color in ((-0.2, "layer", "#117733"), (0.2, "model", "#BBBBBB")):
            widths = [best[column][name, kind] for name in NAMES]
            places = [place + offset for place in range(len(NAMES))]
            panel.barh(
                places, widths, 0.38, color=color, label={"layer": "layer by layer", "model": "whole model"}[kind]
            )
            for place, width in zip(places, widths, strict=True):
                text = f"{width:.1f}" if column == "accuracy_percent" else f"{width:.3f}"
                panel.annotate(text, (width, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
        panel.grid(visible=False, axis="y")
        panel.margins(x=0.18)
    panels[0, 0].set(ylim=(len(NAMES) - 0.5, -0.5), xlabel="test accuracy, %", xlim=(0, 119), xticks=range(0, 101, 20))
    panels[0, 0].set_yticks(range(len(NAMES)), NAMES)
    panels[0, 0].tick_params(axis="y", length=0)
    panels[0, 1].set_xlabel("training loss")
    panels[0, 1].legend(loc="lower right")
    better = [name for name in NAMES if best["loss"][name, "layer"] <= best["loss"][name, "model"]]
    others = [name for name in NAMES if name not in better]
    finding = f"Layer by layer the training loss is as low or lower for {', '.join(better) or 'no method'}"
    finding += f", and higher for {', '.join(others)}" if others else ""
    steps, seeds = table["steps"].iloc[0], table["repeat"].nunique()
    task = (
        f"Dutta et al. 2020: a network of two hidden layers on handwritten digits, {steps} steps of SGD, each "
        f"method at the best of three learning rates, {'one seed' if seeds == 1 else f'{seeds} seeds'}."
    )
    plots.headline(figure, finding, task)
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
