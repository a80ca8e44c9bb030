"""Maps the speed-up over stock ddp: a colour for each link bandwidth and model size.

    python -m benchmarks.map           # compute map.csv, and draw map.png
    python -m benchmarks.map --figure  # draw map.png from map.csv

Nothing is measured. The coloured areas are computed by the cost model (`lightning_sparse.cost`). Its constants for this
package's computations are fitted to measured steps by `benchmarks.scaling`. Dense gradients only cost time on the link,
as if the network card summed them; this favours dense training. Compute time is proportional to the model's size.
Circles are steps that `benchmarks.network` measured over links of the given rate, with their own compute times.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm
from scipy.ndimage import zoom

from benchmarks.harness import plots, results
from benchmarks.harness.results import RESULTS, Row
from benchmarks.harness.shaped_links import PAYLOAD_SHARE, bits_per_second
from benchmarks.scaling import NAMES, fit, read
from lightning_sparse.cost import DENSE, Costs, Link, Workload, step
from lightning_sparse.methods import resolve_updates

WORKERS = 4
SECONDS_PER_PARAM = 0.146 / 25_587_912
"""Time of forward and backward per parameter, for the MLP that `benchmarks.network` trains."""
TIE = 1.1  # a smaller gain is within the model's error, and `python -m lightning_sparse advise` recommends dense
OURS = "topk"
DDP = "dense, 32 bit"
DENSE_BYTES = {DDP: 4, "dense, 16 bit": 2}
CONTESTANTS = {"ddp": DDP, "bf16": "dense, 16 bit", "powersgd": "PowerSGD"}
"""Names of the dense exchanges and PowerSGD, by their name in `benchmarks.network`."""
POINTS, FINE = 33, 500  # to each side of a map, computed and drawn
TIMES = [1, 2, 5, 10, 20, 50, 100, 200]
MODELS = {
    "mlp": "MLP",
    "mlp_paced": "MLP",
    "resnet20": "ResNet-20",
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
    "alexnet": "AlexNet",
    "lstm_ptb": "LSTM",
    "gpt2": "GPT-2",
}
PANELS = {
    "cpu": ("CPU: two workers share a core, as measured", 2),
    "accelerator": ("Assumed accelerator: our own work 16× faster", 2 / 16),
}
"""Title of each map, and the time of our work relative to that on one core per worker."""
COLUMNS = [DDP, "dense, 16 bit", "PowerSGD", OURS]
SHADES = mpl.colormaps["viridis_r"].resampled(8)
LABELS = {
    "MLP": (0, 10, "center"),
    "VGG-16": (-8, -9, "right"),
    "AlexNet": (-7, 9, "right"),
    "GPT-2": (5, -9, "center"),
}
"""Position of a measured model's name, in points from its circle.

The two ResNets and the LSTM are not drawn. Their compute time per parameter is more than 3× that of the map, or less
than a third of it.
"""
EDGE = "#1c1c1c"


def fields(panel: str) -> Iterator[Row]:
    """Compute one map: seconds of a step by method, at points that are close enough to interpolate."""
    fitted = zip(NAMES, fit(read(RESULTS / "network_paced.csv")) * PANELS[panel][1], strict=True)
    costs = Costs(**{name: value for name, value in fitted if name in ("element", "entry", "segment")}, shared=False)
    cases = {name: (DENSE, Costs(), size) for name, size in DENSE_BYTES.items()}
    by_default, _ = resolve_updates(OURS, None, ranks=WORKERS)
    cases[OURS] = replace(by_default, update_rule=None), costs, 4
    for params, rate in product(np.geomspace(1e5, 1e9, POINTS), np.geomspace(1e7, 1e11, POINTS)):
        compute = params * SECONDS_PER_PARAM
        work, link = Workload.even(round(params), compute / 3, 2 / 3 * compute), Link(rate / 8 * PAYLOAD_SHARE)
        steps = {name: step(how, work, WORKERS, link, own, dense_bytes=n) for name, (how, own, n) in cases.items()}
        yield row(panel, "model", "", params, rate, {name: found.seconds for name, found in steps.items()})


def circles(panel: str) -> Iterator[Row]:
    """Yield the measured steps that belong to a map."""
    runs = pd.concat(results.load(RESULTS / name) for name in ("network.csv", "network_paced.csv"))
    runs = runs.query("workers == @WORKERS and ranks_per_host == 1 and rate != 'loopback'")
    # Dilated measurements reduce the share of processor time, as an accelerator would.
    runs = runs[runs.workload.isin(MODELS) & ((runs.dilate > 1) == (panel == "accelerator"))]
    for (workload, rate), found in runs.groupby(["workload", "rate"]):
        seconds = (found.set_index("contestant").median_ms / 1e3).rename(CONTESTANTS)
        yield row(panel, "measured", MODELS[workload], found.params.iloc[0], bits_per_second(rate), seconds.to_dict())


def row(panel: str, source: str, model: str, params: float, rate: float, seconds: dict[str, float]) -> Row:
    """Return a row of map.csv."""
    case = {"panel": panel, "source": source, "model": model, "params": round(params), "bits_per_second": round(rate)}
    return case | {name: seconds.get(name) for name in COLUMNS}


def draw(folder: Path) -> Any:
    """Draw the two maps side by side, coloured by the speed-up of TopK over stock ddp."""
    rows = results.load(folder / "map.csv")
    with plots.plt.rc_context({"hatch.linewidth": 0.5, "axes.grid": False}):
        figure, (axes,) = plots.panels(1, 2, 4.9, sharey=True)
        crossings = []
        for axis, (key, (title, _)) in zip(axes, PANELS.items(), strict=True):
            mine = rows[rows.panel == key]
            field = draw_field(axis, mine[mine.source == "model"])
            crossings.append(crossing(mine[mine.source == "model"]))
            draw_circles(axis, mine[mine.source == "measured"])
            axis.set(xscale="log", yscale="log", title=title, xlabel="parameters (log scale)")
            axis.set_xticks([1e5, 1e6, 1e7, 1e8, 1e9], labels=["0.1 M", "1 M", "10 M", "100 M", "1 G"])
            rates = ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
            axis.set_yticks([1e7, 1e8, 1e9, 1e10, 1e11], labels=rates)
            axis.minorticks_off()
        axes[0].set_ylabel("bandwidth of a worker's link (log scale)")
        bar = figure.colorbar(field, ax=axes, location="bottom", aspect=60, shrink=0.8, ticks=TIMES, pad=0.02)
        bar.ax.set_xticklabels([f"{times}×" for times in TIMES])
        bar.minorticks_off()
        bar.set_label("speed-up of topk over stock ddp; circles are measured and have the same colours")
    finding = (
        f"For a model of 25 M parameters topk beats every dense exchange by 10 % or more "
        f"on links below {crossings[0]:.1f} Gbit/s (assumed accelerator: {crossings[1]:.0f} Gbit/s)"
    )
    task = (
        "Time of a step by the cost model: four workers, density 0.003 and 2-bit values, the default with AdamW; "
        "circles: density 0.001 and fp32 values. Compute time in proportion to the parameters. "
        "Pale: less than 10 % faster than fp32 and bf16 all-reduce, so not certain."
    )
    plots.headline(figure, finding, task)
    return figure


def crossing(field: pd.DataFrame) -> float:
    """Return the bandwidth in Gbit/s below which TopK has a speed-up of `TIE` over dense, at 25 M."""
    sizes = field.params.unique()
    mine = field[field.params == sizes[np.abs(np.log(sizes / 25_587_912)).argmin()]].sort_values("bits_per_second")
    ahead = mine[list(DENSE_BYTES)].min(axis=1) / mine[OURS]
    rates = np.log(mine.bits_per_second)
    return float(np.exp(np.interp(-np.log(TIE), -np.log(ahead), rates))) / 1e9  # the lead falls with the bandwidth


def draw_field(axis: Any, field: pd.DataFrame) -> Any:
    """Colour a map by the speed-up over ddp, hatch the area in which dense exchanges win, and return the colours."""
    seconds = {}  # on a fine grid, interpolated between logarithms
    for name in [*DENSE_BYTES, OURS]:
        grid = field.pivot_table(index="bits_per_second", columns="params", values=name)
        seconds[name] = np.exp(zoom(np.log(grid), FINE / POINTS, order=1))
    params, rates = (np.geomspace(values[0], values[-1], FINE) for values in (grid.columns, grid.index))
    dense = np.minimum(seconds[DDP], seconds["dense, 16 bit"])
    ours = seconds[OURS]
    times = np.where(dense < ours, np.nan, seconds[DDP] / ours)
    shade = {"levels": TIMES, "cmap": SHADES, "norm": BoundaryNorm(TIMES, SHADES.N), "extend": "max"}
    colours = axis.contourf(params, rates, np.clip(times, 1, None), **shade)
    axis.contourf(params, rates, dense / ours, levels=[0, 1], colors="#d9d9d9", hatches=["///"])
    axis.contourf(params, rates, dense / ours, levels=[1, TIE], colors="white", alpha=0.5)
    axis.contour(params, rates, dense / ours, levels=[1], colors=EDGE, linewidths=1.2)
    box = {"facecolor": "white", "lw": 0, "pad": 2}
    axis.text(0.98, 0.96, "dense is faster", transform=axis.transAxes, ha="right", va="top", bbox=box)
    return colours


def draw_circles(axis: Any, runs: pd.DataFrame) -> None:
    """Draw the measured steps whose compute time fits the map's, in the colour of the speed-up, with its number."""
    runs = runs[runs.model.isin(LABELS)]
    for _, run in runs.iterrows():
        times = run[DDP] / run[OURS]
        at = (run.params, run.bits_per_second)
        right, up, side = LABELS[run.model]
        axis.scatter(
            *at, s=130, c=[times], cmap=SHADES, norm=BoundaryNorm(TIMES, SHADES.N, extend="max"), ec="white", lw=3
        )
        axis.scatter(*at, s=130, facecolor="none", ec=EDGE, lw=1.3)
        style = {"ha": side, "va": "bottom" if up > 0 else "top", "fontsize": 9, "color": EDGE}
        box = {"facecolor": "white", "alpha": 0.85, "lw": 0, "pad": 1}
        text = f"{run.model}: {times:.3g}×"
        axis.annotate(text, at, (right, up), textcoords="offset points", bbox=box, **style)


FIGURES = [plots.Figure("map", draw, ("map",))]

if __name__ == "__main__":
    args = results.command_line(__doc__).parse_args()
    if not args.figure:
        rows = [row for panel in PANELS for part in (circles, fields) for row in part(panel)]
        results.save(args.out / "map.csv", rows, digits=4)
    for figure in FIGURES:
        figure.write(args.out)
