"""Logistic regression with Mem-SGD: error against iterations and bits, compared with SGD and QSGD, and parallel runs.

Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599. As in the authors' code, η_t = 2/(λ(a + t)) with λ = 1/n, and
weights are averaged with factors (a + t)². There a is d, 10 d, or one of these divided by k, depending on data and
method. Here a is d for all methods. In runs of 10,000 steps it was the best of 0.1 d, d and 10 d for SGD, top-k and
random k. "no shift" means a = 1.

The data are smaller versions of "epsilon" and "rcv1", or a file in svmlight format (`--data`). Bits of a step:

- SGD: 32 d; on sparse data 32 + ⌈log₂ d⌉ for each nonzero of the example (all workers know x, so the L2 term is free);
- top-k: k(32 + ⌈log₂ d⌉); random k: 32 k, because the indices follow from a seed;
- QSGD: the length of its Elias code with one norm for the whole gradient, as the mean of 20 steps.

`error` is f(x̄) − min f for the average, `error_last` the same for the last weights. In parallel runs, processes share
one vector without locks, and their total number of steps equals that of one process alone. `seconds_training` excludes
the start of the processes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from benchmarks.harness import plots
from benchmarks.harness.table import Row, cores
from lightning_sparse.compressors.base import Entries, Payload, add_
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import unpack_codes
from lightning_sparse.contrib.memsgd import MemSGD, QuadraticAverage, train_parallel
from lightning_sparse.contrib.qsgd import QSGD
from reproductions.frame import Config, Finding, held
from reproductions.logistic import Logistic, data_from, dense_data, sparse_data

GAMMA, POINTS, COUNTED = 2.0, 16, 20
METHODS = {
    "dense": [("top", 1), ("top", 10), ("random", 10), ("random", 100)],
    "sparse": [("top", 1), ("top", 10), ("top", 100), ("random", 100)],
}
FORGETFUL = {"dense": [("top", 1), ("random", 10)], "sparse": [("top", 10), ("random", 100)]}
LEVELS = (4, 16, 127)
COLORS = {"SGD": "#000000", "top": "#0072B2", "random": "#8C564B", "QSGD": "#CC79A7", "no memory": "#E69F00"}


def elias_bits(code: QSGD, payload: Payload, numel: int) -> int:
    """Return the number of bits of the Elias code (Code_s of Alistarh et al. 2017) of a payload of `numel` elements.

    A bucket has 32 bits for the norm. Each ξ > 0 takes 1 bit for the sign. It also takes two of Elias' omega codes: of
    ξ, and of the distance from the previous ξ > 0. The expected number of ξ > 0 is at most s(s + √n) in a bucket of n.
    """
    norms, packed = payload
    levels = unpack_codes(packed, code.bits, numel).short() - code.levels
    places = levels.nonzero().squeeze(1)
    buckets = places // code.bucket
    distances = places.diff(prepend=places.new_full((1,), -1))
    # The first of a bucket counts from the bucket's start.
    new = buckets.diff(prepend=buckets.new_full((1,), -1)) != 0
    distances = torch.where(new, places % code.bucket + 1, distances)
    coded = omega_bits(distances) + 1 + omega_bits(levels[places].abs().long())
    return 32 * norms.numel() + int(coded.sum())


def omega_bits(numbers: Tensor) -> Tensor:
    """Return the length in bits of Elias' omega code (Elias 1975) of numbers from 1 on, int64.

    A number N > 1 is written in binary, preceded by the code of its number of digits minus one. A 0 ends the code.
    """
    total, left = torch.ones_like(numbers), numbers.clone()
    while bool((left > 1).any()):
        digits = torch.frexp(left.double()).exponent.long()
        total += torch.where(left > 1, digits, 0)
        left = torch.where(left > 1, digits - 1, left)
    return total


@lru_cache(maxsize=2)
def problem(name: str, file: str, dense: int, sparse: int, seed: int) -> Logistic:
    """Return the data of a run: in d dimensions, 2 d dense examples or 0.4 d sparse examples."""
    if name == "file":
        return data_from(Path(file))
    return dense_data(2 * dense, dense, seed) if name == "dense" else sparse_data(4 * sparse // 10, sparse, seed)


def problem_of(case: Row, config: Config) -> Logistic:
    """Return the data of a run."""
    return problem(case["problem"], config["data"], config["dense"], config["sparse"], config["seed"])


def cases(config: Config) -> list[Row]:
    """Return the runs on both data sets, or on the data of a file.

    Raises:
        ValueError: the file cannot be read, or there are too few steps.
    """
    if config["steps"] < max(processes()):
        raise ValueError(f"--steps {config['steps']}: give at least one step for each of {max(processes())} processes.")
    names = ["file"] if config["data"] else list(METHODS)
    runs: list[Row] = []
    for name in names:
        kind, most = name, int(config.get(name, 0))
        if name == "file":
            data = problem_of({"problem": name}, config)
            kind, most = "sparse" if data.sparse else "dense", data.numel
        methods = [(method, min(k, most)) for method, k in METHODS[kind]]
        same: Row = {"problem": name, "memory": "yes", "shift": "yes", "processes": 0}
        runs.append({**same, "method": "sgd", "k": most})
        runs += [{**same, "method": method, "k": k} for method, k in dict.fromkeys(methods)]
        runs += [{**same, "method": method, "k": min(k, most), "memory": "no"} for method, k in FORGETFUL[kind]]
        runs.append({**same, "method": "top", "k": methods[0][1], "shift": "no"})
        runs += [{**same, "method": "qsgd", "k": levels} for levels in LEVELS]
        for method, k in dict.fromkeys((methods[1], methods[-1])):
            runs += [{**same, "method": method, "k": k, "processes": count} for count in processes()]
    return runs


def processes() -> list[int]:
    """Return the numbers of processes of the parallel runs: 1, 2, 4 … up to the number of cores, and at least 2."""
    return [2**power for power in range(max(1, cores().bit_length() - 1) + 1)]


def run(case: Row, config: Config) -> list[Row]:
    """Train, and return a row for each point of the curve. The points are evenly spaced on a logarithmic scale."""
    data = problem_of(case, config)
    shift = data.numel if case["shift"] == "yes" else 1.0
    return parallel(case, config, data, shift) if case["processes"] else sequential(case, config, data, shift)


class Rate:
    """η_t = γ / (λ(a + t)), as an object that can be pickled."""

    def __init__(self, l2: float, shift: float) -> None:
        self.l2, self.shift = l2, shift

    def __call__(self, t: int) -> float:
        return GAMMA / (self.l2 * (self.shift + t))


def sequential(case: Row, config: Config, data: Logistic, shift: float) -> list[Row]:
    """Train in this process."""
    steps, rate, average = config["steps"], Rate(data.l2, shift), QuadraticAverage(shift)
    points = sorted({max(1, round(steps ** (point / POINTS))) for point in range(POINTS + 1)})
    x, mean = torch.zeros(data.numel), torch.zeros(data.numel)
    generator = torch.Generator().manual_seed(config["seed"])
    method, k = case["method"], case["k"]
    memory = case["memory"] == "yes"
    options = {"l2": data.l2, "error_feedback": memory, "seed": config["seed"]}
    worker = MemSGD(x, k, method, **options) if method in ("top", "random") else None
    code = QSGD(min(k, 127), bucket=data.numel)
    bits, lengths, rows = 0.0, [], []
    place = math.ceil(math.log2(data.numel))
    for t in range(steps):
        mean = average(mean, x, t)
        gradient = data(x, generator)
        if worker is not None:
            worker.step_(gradient, rate(t))
            bits += k * (32 + (place if method == "top" else 0))
        elif method == "sgd":
            x.mul_(1 - data.l2 * rate(t))
            add_(x, gradient, -rate(t))
            bits += len(gradient.values) * (32 + place) if isinstance(gradient, Entries) else 32 * data.numel
        else:
            ctx = Context.of(data.numel, step=t, seed=config["seed"])
            payload, update = code.compress(add_(x * data.l2, gradient), ctx)
            assert isinstance(update, Tensor)
            if t % max(1, steps // COUNTED) == 0:
                lengths.append(elias_bits(code, payload, data.numel))
            bits = (t + 1) * sum(lengths) / len(lengths)
            x.add_(update, alpha=-rate(t))
        if t + 1 in points:
            errors = [data.loss(weights.double().numpy()) - data.minimum for weights in (mean, x)]
            rows.append({"step": t + 1, "bits": bits, "error": errors[0], "error_last": errors[1]})
    return rows


def parallel(case: Row, config: Config, data: Logistic, shift: float) -> list[Row]:
    """Train in several processes on one vector."""
    x, steps = torch.zeros(data.numel), config["steps"] // case["processes"]
    job = {"choice": case["method"], "processes": case["processes"], "l2": data.l2, "seed": config["seed"]}
    found = train_parallel(x, data, Rate(data.l2, shift), steps, case["k"], **job, start_method="fork")
    error = data.loss(x.double().numpy()) - data.minimum
    return [{"step": steps * case["processes"], "error_last": error, "seconds_training": found.seconds}]


def label(row: Any) -> str:
    """Return the name of a run's curve."""
    method, k = row["method"], row["k"]
    name = {"sgd": "SGD", "qsgd": f"QSGD, s = {k}"}.get(method, f"{method}-{k}")
    return name + (", no memory" if row["memory"] == "no" else "") + (", no shift" if row["shift"] == "no" else "")


def curves(table: pd.DataFrame, data: str) -> dict[str, pd.DataFrame]:
    """Return the sequential runs on a data set, by name."""
    mine = table[(table["problem"] == data) & (table["processes"] == 0)]
    keys = ["method", "k", "memory", "shift"]
    return {label(rows.iloc[0]): rows.sort_values("step") for _, rows in mine.groupby(keys, sort=False)}


def bits_to(curve: pd.DataFrame, target: float) -> float:
    """Return the bits after which the average's error stays at or below the target; infinite if it never does."""
    above = curve[curve["error"] > target]
    below = curve if above.empty else curve[curve["step"] > above["step"].max()]
    return float(below["bits"].min()) if len(below) else math.inf


def speed_up(table: pd.DataFrame, data: str) -> dict[str, float]:
    """Return the speed-up of the largest number of processes over one process, by method."""
    mine = table[(table["problem"] == data) & (table["processes"] > 0)]
    found = {}
    for (method, k), rows in mine.groupby(["method", "k"], sort=False):
        seconds = rows.set_index("processes")["seconds_training"]
        found[f"{method}-{k}"] = seconds[1] / seconds[seconds.index.max()]
    return found


def savings(table: pd.DataFrame, data: str, to: str = "SGD") -> dict[str, float]:
    """Return, by method, SGD's bits divided by the method's bits until both are within 10 % of an error.

    The result is 0 if the method does not reach the error.

    Args:
        table: table of all runs.
        data: the problem.
        to: "SGD" for SGD's final error; "itself" for the larger of the method's and SGD's final error.
    """
    found = curves(table, data)
    saved = {}
    for name, curve in found.items():
        reached = found["SGD"] if to == "SGD" else max(found["SGD"], curve, key=lambda rows: rows["error"].iloc[-1])
        target = 1.1 * reached["error"].iloc[-1]
        saved[name] = bits_to(found["SGD"], target) / bits_to(curve, target)
    return saved


def verdict(table: pd.DataFrame) -> str:
    """Say how many bits the best top-k saves, and describe the effects of memory and of processes."""
    parts, yes = [], True
    for data in table["problem"].unique():
        saved, found = savings(table, data), curves(table, data)
        tops = {name: times for name, times in saved.items() if name.startswith("top") and "," not in name}
        best = max(tops, key=lambda name: tops[name])
        coded = max(saved[name] for name in saved if name.startswith("QSGD"))
        without = next(name for name in found if "no memory" in name)
        gaps = [found[name]["error"].iloc[-1] / found["SGD"]["error"].iloc[-1] for name in (best, without)]
        times = ", ".join(f"{name} {value:.1f}" for name, value in speed_up(table, data).items())
        yes = yes and tops[best] > max(1, coded) and gaps[1] > 1.5
        own = savings(table, data, to="itself").get("top-1", 0)
        parts.append(
            f"On {data} data, SGD needs {tops[best]:,.0f}× the bits of {best} for the same error, within 10 %, and "
            f"{coded:.1f}× those of QSGD. For the final error of top-1 it needs {own:,.0f}× the bits of top-1. "
            f"The final error of {best} is {gaps[0]:.2f}× that of SGD; that of '{without}' is {gaps[1]:.1f}×. The "
            f"speed-up with {table['processes'].max()} processes on {table['cores'].iloc[0]} cores is {times}."
        )
    return held(yes) + " ".join(parts)


def draw(table: pd.DataFrame) -> Any:
    """Draw the error of SGD and the best variant of each kind against the bits sent, with one panel per data set."""
    names = list(table["problem"].unique())
    figure, (panels,) = plots.panels(1, len(names), 4.3)
    said = []
    for panel, data in zip(panels, names, strict=True):
        found, saved = curves(table, data), savings(table, data)
        plain = [name for name in found if "memory" not in name and "shift" not in name]
        kinds = {kind: [name for name in plain if name.startswith(kind)] for kind in ("SGD", "top", "random", "QSGD")}
        picked = {kind: max(each, key=lambda name: saved[name]) for kind, each in kinds.items() if each}
        picked |= {"no memory": next(name for name in found if "no memory" in name)}
        labels = []
        for kind, name in picked.items():
            curve, color = found[name], COLORS[kind]
            panel.plot(
                curve["bits"] / 8e3, curve["error"], "--" if kind == "no memory" else "-", color=color, label=name
            )
            labels.append((curve["bits"].iloc[-1] / 8e3, curve["error"].iloc[-1], name, color))
        panel.set(xscale="log", yscale="log", xlabel="kB sent (log scale)", title=f"{data} data")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
        plots.ends(panel, labels, reach=5)
        said.append(f"{saved[picked['top']]:,.1f}× fewer on {data} data ({picked['top']})")
    panels[0].set_ylabel("f(x̄) − min f (log scale)")
    task = (
        f"Stich et al. 2018: logistic regression, {table['steps'].iloc[0]:,} steps, error of the averaged weights; "
        "the best k, or the best number of levels, of each kind. The table has the others."
    )
    plots.headline(
        figure, f"Bits that Mem-SGD needs for SGD's last error plus 10 %, against SGD: {', '.join(said)}", task
    )
    return figure


FINDING = Finding(
    "memsgd",
    {"data": "", "steps": 5000, "dense": 1000, "sparse": 10_000, "seed": 0},
    ("problem", "method", "k", "memory", "shift", "processes"),
    cases,
    run,
    draw,
    verdict,
)
