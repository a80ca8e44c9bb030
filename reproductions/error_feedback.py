"""Sign and top-k with and without error feedback, for two counter-examples and a small network.

Karimireddy, Rebjock, Stich and Jaggi 2019, arXiv 1901.09847. In their counter-examples, signSGD does not find the
minimum:

1. f(x) = x/4 on [−1, 1], whose stochastic gradient is 4 with probability 1/4 and −1 otherwise: most signs are wrong.
2. f(x) = ε|x₁ + x₂| + |x₁ − x₂| from (1, 1), ε = 1/2: the sign of the gradient is ±(1, −1), so x₁ + x₂ never changes.

For the counter-examples, the learning rate decreases linearly to 0. With a constant rate, steps for the second, which
has a kink, would not become shorter. The network has two hidden layers and learns scikit-learn's digits. Each method
uses the best of three rates. The method "sign" is sign(g), and "scaled sign" is (‖u‖₁/d)·sign(u). The method "top"
selects the k largest entries: one entry in the counter-examples, and 1 % of the entries in the network.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.aggregators import AllReduceMean, Mean
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.compressors import Identity, TopK
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.scaled_sign import ScaledSign
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.memory import NoMemory, Residual
from lightning_sparse.methods import Method
from lightning_sparse.reducer import Reducer
from reproductions.digits import best_rates, train
from reproductions.frame import Config, Finding, held

TOP = TopK(density=0.01)
METHODS = {
    "SGD": Method(Identity(), NoMemory(), AllReduceMean()),
    "sign": Method(Sign(), NoMemory(), MajorityVote()),
    "scaled sign": Method(ScaledSign(), NoMemory(), Mean()),
    "scaled sign, feedback": Method(ScaledSign(), Residual(), Mean()),
    "top": Method(TOP, NoMemory(), Mean()),
    "top, feedback": Method(TOP, Residual(), Mean()),
}
COLORS = {
    "SGD": "#000000",
    "sign": "#E69F00",
    "scaled sign": "#D55E00",
    "scaled sign, feedback": "#009E73",
    "top": "#56B4E9",
    "top, feedback": "#0072B2",
}
CURVES = ["SGD", "scaled sign", "sign", "scaled sign, feedback"]
LABELS = {"SGD": "SGD", "sign": "sign", "scaled sign": "scaled sign", "scaled sign, feedback": "with feedback"}
PROBLEMS = {"1": -0.25, "2": 0.0}
"""Smallest f, by counter-example."""
RATES, SIGN_RATES = (0.1, 0.3, 1.0), (0.001, 0.003, 0.01)
POINTS = 50
EPSILON = 0.5


def cases(config: Config) -> list[Row]:
    """Return the runs."""
    runs: list[Row] = [
        {"problem": problem, "method": name, "lr": 0.05, "repeat": 0} for problem in PROBLEMS for name in METHODS
    ]
    for name in METHODS:
        rates = SIGN_RATES if name == "sign" else RATES
        runs += [
            {"problem": "digits", "method": name, "lr": lr, "repeat": repeat}
            for lr in rates
            for repeat in range(config["repeats"])
        ]
    return runs


def run(case: Row, config: Config) -> Row | list[Row]:
    """Train."""
    chosen, seed = METHODS[case["method"]], config["seed"] + case["repeat"]
    if case["problem"] == "digits":
        found = train(chosen, ranks=config["ranks"], lr=case["lr"], steps=config["steps"], seed=seed)
        return {"step": config["steps"], "loss": found.loss, "accuracy_percent": found.accuracy}
    return counter_example(case["problem"], chosen, case["lr"], config["examples"], seed)


def value(problem: str, x: Tensor) -> float:
    """Return f(x) of a counter-example."""
    return float(x[0] / 4) if problem == "1" else float(EPSILON * (x[0] + x[1]).abs() + (x[0] - x[1]).abs())


def gradient(problem: str, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a stochastic gradient of the first counter-example, or a subgradient of the second."""
    if problem == "1":
        return torch.tensor([4.0 if float(torch.rand((), generator=generator)) < 0.25 else -1.0])
    plus, minus = (float(torch.sign(part)) or 1.0 for part in (x[0] + x[1], x[0] - x[1]))
    return torch.tensor([EPSILON * plus + minus, EPSILON * plus - minus])


def counter_example(problem: str, chosen: Method, lr: float, steps: int, seed: int) -> list[Row]:
    """Minimise f, and return its value at some steps."""

    def rank(comm: Comm) -> list[Row]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.zeros(1) if problem == "1" else torch.ones(2)
        reducer, rows = Reducer(chosen, comm, seed=seed), [{"step": 0, "loss": value(problem, x)}]
        for step in range(1, steps + 1):
            grads = {"x": gradient(problem, x, generator)}
            reducer.reduce_(grads)
            x -= lr * (1 - (step - 1) / steps) * grads["x"]
            if problem == "1":
                x.clamp_(-1, 1)
            if step % max(1, steps // POINTS) == 0:
                rows.append({"step": step, "loss": value(problem, x)})
        return rows

    return simulate(1, rank)[0]


def solved(table: pd.DataFrame) -> bool:
    """Return whether the scaled sign with feedback ends near the minimum of both counter-examples."""
    last = table[table["problem"] != "digits"].groupby(["problem", "method"], sort=False)["loss"].last()
    return all(last[problem, "scaled sign, feedback"] < least + 0.1 for problem, least in PROBLEMS.items())


def verdict(table: pd.DataFrame) -> str:
    """Describe the effect of error feedback."""
    last = table[table["problem"] != "digits"].groupby(["problem", "method"], sort=False)["loss"].last()
    best = best_rates(table[table["problem"] == "digits"], ["method"])
    gain = {name: best.loss[name] / best.loss[f"{name}, feedback"] for name in ("scaled sign", "top")}
    stuck = all(last[problem, "sign"] > least + 0.1 for problem, least in PROBLEMS.items())
    accuracy = best["accuracy_percent"].map("{:.0f}".format)
    yes = solved(table) and stuck and min(gain.values()) > 1
    with_feedback = [last[problem, "scaled sign, feedback"] for problem in PROBLEMS]
    return (
        f"{held(yes)}with the sign, the counter-examples end at f = {last['1', 'sign']:.2f} and "
        f"{last['2', 'sign']:.2f}. With the scaled sign and feedback they end at {with_feedback[0]:.2f} and "
        f"{with_feedback[1]:.2f}; the minima are −0.25 and 0. On the digits, the training loss without feedback is "
        f"{gain['scaled sign']:.1f}× that with feedback for the scaled sign, and {gain['top']:.1f}× for top-k. With "
        f"feedback, test accuracy changes from {accuracy['scaled sign']} to {accuracy['scaled sign, feedback']} % for "
        f"the scaled sign, and from {accuracy['top']} to {accuracy['top, feedback']} % for top-k. SGD reaches "
        f"{accuracy['SGD']} %."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw f of the counter-examples against steps, and the network's loss by method."""
    figure, (panels,) = plots.panels(1, 3, 3.7, width_ratios=(1, 1, 1.15))
    for panel, (problem, least) in zip(panels, PROBLEMS.items(), strict=False):
        labels = []
        for name in CURVES:
            mine = table[(table["problem"] == problem) & (table["method"] == name)]
            style = "--" if name == "sign" else "-"  # in the second problem it lies on the scaled sign
            panel.plot(mine["step"], mine["loss"], style, color=COLORS[name], lw=1.8, label=name)
            labels.append((mine["step"].iloc[-1], mine["loss"].iloc[-1], LABELS[name], COLORS[name]))
        panel.axhline(least, color="0.6", ls=":")
        panel.annotate("minimum", (0, least), (2, -3), textcoords="offset points", va="top", color=plots.MUTED)
        low, high = panel.get_ylim()
        panel.set(
            xlabel="step", ylabel="f(x)", title=f"counter-example {problem}", ylim=(low - 0.12 * (high - low), high)
        )
        plots.ends(panel, labels)
    best = best_rates(table[table["problem"] == "digits"], ["method"]).loc[list(METHODS)]
    texts = [f"{loss:.2f}" for loss in best["loss"]]
    names = [name.replace(", ", ",\n") for name in METHODS]
    plots.bars(panels[2], names, list(best["loss"]), [COLORS[name] for name in METHODS], texts)
    panels[2].set(xlabel="training loss", title="digits, small network")
    gain = {name: best.loss[name] / best.loss[f"{name}, feedback"] for name in ("scaled sign", "top")}
    finding = (
        "With error feedback the scaled sign finds both minima, and the loss on the digits falls "
        f"{gain['scaled sign']:.1f}× (scaled sign) and {gain['top']:.1f}× (top-k)"
    )
    if not solved(table):
        finding = finding.replace("finds both minima", "does not find both minima")
    task = (
        "Karimireddy et al. 2019: two counter-examples on which signs fail, and a network on handwritten digits, each "
        "method at its best learning rate. Top-k (k = 1) is not drawn on the left."
    )
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding(
    "error-feedback",
    {"steps": 100, "examples": 200, "ranks": 2, "repeats": 1, "seed": 0},
    ("problem", "method", "lr", "repeat"),
    cases,
    run,
    draw,
    verdict,
)
