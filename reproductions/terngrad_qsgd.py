"""Measures how many bits a value needs with QSGD, TernGrad, and 1-bit SGD with and without error feedback.

QSGD is by Alistarh et al. 2017, arXiv 1610.02132, and TernGrad by Wen et al. 2017, arXiv 1705.07878. 1-bit SGD, by
Seide et al. 2014, Interspeech, "only works" with error feedback. Here a network of two hidden layers learns
scikit-learn's digits. Each method uses the best of three learning rates. Bits are bits per value of a rank's payload,
including scales.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.aggregators import AllReduceMean, Mean
from lightning_sparse.compressors import Identity
from lightning_sparse.contrib.onebit import OneBit
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.shared_scale import SharedScale
from lightning_sparse.contrib.terngrad import TernGrad
from lightning_sparse.layout import Layout
from lightning_sparse.memory import NoMemory, Residual
from lightning_sparse.methods import Method
from reproductions.digits import best_rates, loss_and_accuracy, network, train
from reproductions.frame import Config, Finding, held

METHODS = {
    "SGD": Method(Identity(), NoMemory(), AllReduceMean()),
    **{f"QSGD, s = {levels}": Method(QSGD(levels), NoMemory(), Mean()) for levels in (1, 3, 15, 127)},
    "TernGrad": Method(TernGrad(), NoMemory(), SharedScale()),
    "1-bit": Method(OneBit(), NoMemory(), Mean()),
    "1-bit, feedback": Method(OneBit(), Residual(), Mean()),
}
COLORS = {"SGD": "#000000", "QSGD": "#0072B2", "TernGrad": "#E69F00", "1-bit": "#CC79A7"}
RATES = (0.1, 0.3, 1.0)


def cases(config: Config) -> list[Row]:
    """Return a run for each method, learning rate and repetition."""
    return [
        {"method": name, "lr": lr, "repeat": repeat}
        for name in METHODS
        for lr in RATES
        for repeat in range(config["repeats"])
    ]


def bits(chosen: Method) -> float:
    """Return the bits per value of a payload."""
    shapes = {name: tuple(param.shape) for name, param in network(32, 0).named_parameters()}
    segments = Layout.of(shapes, "layer", 25).segments
    payload = sum(chosen.compressor.nbytes(segment, None) for segment in segments)
    return 8 * payload / sum(segment.numel for segment in segments)


def run(case: Row, config: Config) -> Row:
    """Train."""
    chosen = METHODS[case["method"]]
    found = train(
        chosen,
        ranks=config["ranks"],
        lr=case["lr"],
        steps=config["steps"],
        seed=config["seed"] + case["repeat"],
    )
    return {"loss": found.loss, "accuracy_percent": found.accuracy, "bits": bits(chosen)}


def verdict(table: pd.DataFrame) -> str:
    """Give the loss of accuracy of each method against SGD."""
    best, sent = best_rates(table, ["method"]), table.groupby("method")["bits"].first()
    accuracy = best["accuracy_percent"]
    gaps = {name: accuracy["SGD"] - accuracy[name] for name in METHODS if name != "SGD"}
    each = {name: f"{name} ({sent[name]:.1f} bits) {-gap:+.1f}" for name, gap in gaps.items()}
    halves = [each[name] for name in each if name.startswith("QSGD")]
    coarse, fine = (", ".join(half) for half in (halves[:2], halves[2:]))
    others = ", ".join(each[name] for name in each if not name.startswith("QSGD"))
    worse = best["loss"]["1-bit"] / best["loss"]["1-bit, feedback"]
    yes = max(gaps["QSGD, s = 15"], gaps["TernGrad"], gaps["1-bit, feedback"]) < 2 and worse > 1
    return (
        f"{held(yes)}the test accuracy of SGD is {accuracy['SGD']:.1f} %. The differences in points are {coarse}. "
        f"With more levels they are {fine}. For the other methods they are {others}. "
        f"Without error feedback, the training loss of 1-bit SGD is {worse:.1f}× that with it."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw loss and accuracy, by bits."""
    best, sent = best_rates(table, ["method"]), table.groupby("method")["bits"].first()
    order = sorted(METHODS, key=lambda name: -sent[name])
    names = [f"{name}: {sent[name]:.1f} bits" for name in order]
    figure, _ = loss_and_accuracy(names, best.loc[order], [COLORS[name.partition(",")[0]] for name in order], 4.2)
    gap = {name: best["accuracy_percent"][name] - best["accuracy_percent"]["SGD"] for name in order}
    few = ["QSGD, s = 15", "TernGrad", "1-bit, feedback", "1-bit"]
    said = [f"{plots.signed(gap[name], 1)} ({name}, {sent[name]:.0f} bits)" for name in few]
    steps = table["steps"].iloc[0]
    task = (
        f"A network of two hidden layers on handwritten digits, {steps} steps, each method at the best of three "
        "learning rates. Bits per value of a worker's payload, scales included."
    )
    plots.headline(figure, f"Points of test accuracy against SGD in 32 bits: {'; '.join(said)}", task)
    return figure


FINDING = Finding(
    "terngrad-qsgd",
    {"steps": 400, "ranks": 2, "repeats": 1, "seed": 0},
    ("method", "lr", "repeat"),
    cases,
    run,
    draw,
    verdict,
)
