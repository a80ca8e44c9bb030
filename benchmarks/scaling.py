"""Scaling efficiency at 1 Gbit/s: measured for P = 4 and 8, extrapolated by the cost model, next to published values.

    python -m benchmarks.scaling

Nothing is measured. The script reads the paced models' results of `benchmarks.network` from `network_paced.csv`. It
fits the cost model (`lightning_sparse.cost`) to some of these runs, and checks it against the others. It prints the
model's error and writes the table. Efficiency is the time of a step without communication divided by the time of a step
with communication.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.harness import plots, results
from benchmarks.harness.shaped_links import PAYLOAD_SHARE, bits_per_second
from benchmarks.harness.workloads import COMPUTE_SECONDS, shapes
from benchmarks.network import BUSY
from lightning_sparse import method
from lightning_sparse.cost import DENSE, Costs, Link, Workload, step
from lightning_sparse.layout import Layout

MODELS = [name for name in COMPUTE_SECONDS if name != "mlp_paced"]
FITTED_TO = [("vgg16", 4), ("alexnet", 4), ("resnet20", 4)]
WORKERS = (8, 16, 32)
# Efficiency in per cent of dense, TopK and gTopK (Shi et al. 2019, arXiv 1901.04359; P = 4 from their plotting script).
PUBLISHED = {
    ("vgg16", 4): (7.9, 8.4, 9.95),
    ("resnet20", 4): (89.3, 98.7, 99.5),
    ("alexnet", 4): (8.1, 8.2, 9.5),
    ("resnet50", 4): (73.8, 71.4, 75.3),
    ("lstm_ptb", 4): (3.2, 5.1, 4.5),
    ("vgg16", 32): (0.96, 4.78, 9.35),
    ("resnet20", 32): (31.3, 75.6, 85.7),
    ("alexnet", 32): (0.71, 5.32, 9.09),
    ("resnet50", 32): (20.3, 57.8, 74.0),
    ("lstm_ptb", 32): (0.54, 1.38, 2.76),
}
TITLES = {
    "resnet20": "ResNet-20",
    "vgg16": "VGG-16",
    "alexnet": "AlexNet",
    "resnet50": "ResNet-50",
    "lstm_ptb": "LSTM",
    "gpt2": "GPT-2",
}
METHODS = ["ddp", "topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
NAMES = ["latency", "element", "entry", "dense_byte", "segment"]
SCALES = np.array([1e-4, 1e-9, 1e-8, 1e-9, 1e-3])
CASE = ["workload", "workers", "contestant"]


def workload(name: str) -> Workload:
    """Return the workload of a paced model, with the segments of this package's strategies."""
    all_shapes = shapes(name)
    layout = Layout.of({str(number): shape for number, shape in enumerate(all_shapes)}, "bucket", 25)
    done = list(itertools.accumulate(len(all_shapes[int(number)]) > 1 for number in layout.names))
    last = itertools.accumulate(len(segment.names) for segment in layout.segments)
    return Workload(
        tuple(segment.numel for segment in layout.segments),
        tuple(done[stop - 1] / done[-1] for stop in last),
        COMPUTE_SECONDS[name] / 3,
        2 / 3 * COMPUTE_SECONDS[name],
    )


def modelled(runs: pd.DataFrame, values: Any) -> list[float]:
    """Return the cost model's seconds per step for each run, with constants in the order of `NAMES`."""
    latency, *constants = values
    seconds = []
    for run in runs.itertuples():
        link = Link(run.bandwidth, latency / run.dilate)
        costs = {name: value * run.share for name, value in zip(NAMES[1:], constants, strict=True)}
        chosen = DENSE if run.contestant == "ddp" else method(run.contestant)
        exposed = step(chosen, workload(run.workload), run.workers, link, Costs(**costs, shared=False)).exposed
        seconds.append(run.none + exposed)
    return seconds


def read(path: Path) -> pd.DataFrame:
    """Return the valid measured runs of `METHODS`, with their time and the time without communication."""
    table = results.load(path)
    table = table[(table["contestant"] == "none") | (table["busy"] <= BUSY)].assign(seconds=table["median_ms"] / 1e3)
    place = ["workload", "workers", "rate"]
    alone = table[table["contestant"] == "none"].set_index(place)["seconds"].rename("none")
    table = table[table["contestant"].isin(METHODS)].join(alone, on=place)
    table["bandwidth"] = table["rate"].map(bits_per_second) / 8 * PAYLOAD_SHARE
    # Ranks share the cores, and in dilated runs their work counts less.
    table["share"] = (table["workers"] / table["cores"]).clip(lower=1) / table["dilate"]
    table["fitted"] = [case in FITTED_TO for case in zip(table["workload"], table["workers"], strict=True)]
    return table[[*CASE, "seconds", "none", "bandwidth", "dilate", "share", "fitted"]]


def fit(runs: pd.DataFrame) -> Any:
    """Return the constants that minimise the model's relative errors for the runs in `FITTED_TO`."""
    fitted = runs[runs["fitted"]]
    if fitted.empty:
        raise SystemExit(f"There are no measured runs of {FITTED_TO}: run benchmarks.network first.")
    off = lambda scaled: modelled(fitted, scaled * SCALES) / fitted["seconds"] - 1  # noqa: E731
    return least_squares(off, np.ones(len(NAMES)), bounds=(0, np.inf), x_scale="jac", diff_step=1e-3).x * SCALES


def compute(folder: Path) -> None:
    """Fit the model, check it, print its error, and write the table."""
    runs = read(folder / "network_paced.csv").query("workload in @MODELS")
    values = fit(runs)
    print("Fitted: " + ", ".join(f"{name} {value:.3g} s" for name, value in zip(NAMES, values, strict=True)))
    runs = runs.assign(source="measured", modelled=modelled(runs, values))
    runs["off"] = runs["modelled"] / runs["seconds"] - 1
    print(runs[[*CASE, "seconds", "modelled", "off", "fitted"]].to_string(index=False))
    print(runs["off"].abs().groupby(runs["fitted"]).agg(["median", "max"]))

    # Copy all properties of the runs with four workers, except the number of workers.
    alike = runs.query("workers == 4").groupby("workload")[["none", "bandwidth", "dilate", "share"]].first()
    more = pd.DataFrame(itertools.product(MODELS, WORKERS, METHODS), columns=CASE).join(alike, on="workload")
    more = more[~more.set_index(CASE).index.isin(runs.set_index(CASE).index)].assign(source="extrapolated")
    more["modelled"] = more["seconds"] = modelled(more, values)
    table = pd.concat([runs, more]).rename(columns={"workload": "model", "contestant": "method"})
    table["efficiency"] = (table["none"] / table["seconds"]).round(4)
    table["by_cost_model"] = (table["none"] / table["modelled"]).round(4)
    published = pd.DataFrame(PUBLISHED, ["ddp", "topk", "gtopk"]).unstack().div(100).round(4).rename("published")
    table = table.join(published.astype(object), on=["model", "workers", "method"]).fillna({"published": ""})
    columns = ["model", "workers", "method", "source", "efficiency", "by_cost_model", "published"]
    results.save(folder / "scaling.csv", table[columns].to_dict("records"))


def draw(folder: Path) -> Any:
    """Draw efficiency against the number of workers, a panel for each model."""
    table = results.load(folder / "scaling.csv")
    figure, panels = plots.panels(2, 3, 5.6, sharey=True)
    lines = [name for name in METHODS if name != "gaussiank"]
    for panel, name in zip(panels.flat, MODELS, strict=True):
        size = sum(math.prod(shape) for shape in shapes(name))
        panel.set(xscale="log", ylim=(0, 104), xlim=(3.6, 32))
        panel.set_title(
            f"{TITLES[name]}: {size / 1e6:,.{0 if size > 1e6 else 2}f} M, {1e3 * COMPUTE_SECONDS[name]:,g} ms"
        )
        panel.set_xticks([4, 8, 16, 32], labels=["4", "8", "16", "32"])
        panel.minorticks_off()
    for panel, name in zip(panels.flat, MODELS, strict=True):
        labels = []
        for contestant in lines:
            mine = table[(table["model"] == name) & (table["method"] == contestant)].sort_values("workers")
            color = plots.color(contestant)
            measured = mine[mine["source"] == "measured"]
            panel.plot(mine["workers"], 100 * mine["efficiency"], "--", color=color, lw=1)
            panel.plot(measured["workers"], 100 * measured["efficiency"], "-o", color=color, ms=5)
            labels.append((32, 100 * mine["efficiency"].iloc[-1], contestant, color))
        plots.ends(panel, labels)
    plots.plt.setp(panels[1], xlabel="workers (log scale)")
    plots.plt.setp(panels[:, 0], ylabel="scaling efficiency, %")
    four = table[table["workers"] == 4].set_index(["model", "method"])["efficiency"].unstack() * 100
    slow = four[four["ddp"] < 50]
    ours = slow[lines[1:]]
    finding = (
        f"Four workers at 1 Gbit/s reach {slow['ddp'].min():.0f} to {slow['ddp'].max():.0f} % of perfect scaling with "
        f"ddp and {ours.min().min():.0f} to {ours.max().max():.0f} % with sparse gradients, on "
        f"{', '.join(TITLES[name] for name in slow.index)}"
    )
    task = (
        "Scaling efficiency: time of a step without communication over that with it. Gradients of six models' shapes, "
        "density 0.001; titles: parameters and compute time. Dots and solid lines: measured; dashed lines: cost model."
    )
    plots.headline(figure, finding, task)
    return figure


FIGURES = [plots.Figure("scaling", draw, ("scaling",))]

if __name__ == "__main__":
    args = results.command_line(__doc__).parse_args()
    if not args.figure:
        compute(args.out)
    for figure in FIGURES:
        figure.write(args.out)
