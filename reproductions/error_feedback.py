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


def verdict(table: pd.DataFrame) -> str:
    """Describe the effect of error feedback."""
    last = table[table["problem"] != "digits"].groupby(["problem", "method"], sort=False)["loss"].last()
    best = best_rates(table[table["problem"] == "digits"], ["method"])
    gain = {name: best.loss[name] / best.loss[f"{name}, feedback"] for name in ("scaled sign", "top")}
    solved = all(last[problem, "scaled sign, feedback"] < least + 0.1 for problem, least in PROBLEMS.items())
    stuck = all(last[problem, "sign"] > least + 0.1 for problem, least in PROBLEMS.items())
    accuracy = best["accuracy_percent"].map("{:.0f}".format)
    yes = solved and stuck and min(gain.values()) > 1
    with_feedback = [last[problem, "scaled sign, feedback"] for problem in PROBLEMS]
    return (
        f"{held(yes)}the counter-examples end at f = {last['1', 'sign']:.2f} and "
        f"{last['2', 'sign']:.2f} with the sign, at {with_feedback[0]:.2f} and {with_feedback[1]:.2f} with the scaled "
        f"sign and feedback (least: −0.25 and 0). On the digits the training loss without feedback is "
        f"{gain['scaled sign']:.1f} times that with it for the scaled sign, and {gain['top']:.1f} times for top-k; "
        f"test accuracy {accuracy['scaled sign']} → {accuracy['scaled sign, feedback']} % and {accuracy['top']} → "
        f"{accuracy['top, feedback']} %, SGD {accuracy['SGD']} %."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw f for the counter-examples against steps, and the network's loss by method."""
    figure, (panels,) = plots.panels(1, 3, (14, 4.2))
    for panel, problem in zip(panels, PROBLEMS, strict=False):
        for number, name in enumerate(METHODS):
            mine = table[(table["problem"] == problem) & (table["method"] == name)]
            style = "--" if "feedback" in name else "-"
            panel.plot(mine["step"], mine["loss"], style, color=f"C{number}", lw=1.5, label=name)
        panel.axhline(PROBLEMS[problem], color="0.6", ls=":")
        panel.set(xlabel="step", ylabel="f(x)", title=f"counter-example {problem}")
    panels[0].legend()
    best = best_rates(table[table["problem"] == "digits"], ["method"]).loc[list(METHODS)]
    panels[2].barh(list(METHODS), best["loss"], color=[f"C{number}" for number in range(len(METHODS))])
    panels[2].invert_yaxis()
    panels[2].set(xlabel="training loss", title="digits")
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
