"""Draws a map of the fastest method by link bandwidth and model size.

    python -m benchmarks.map           # compute map.csv, and draw map.png
    python -m benchmarks.map --figure  # draw map.png from map.csv

Nothing is measured. The coloured areas are computed by the cost model (`lightning_sparse.cost`). Its constants for this
package's computations are fitted to measured steps by `benchmarks.scaling`. Dense gradients only cost time on the link,
as if the network card summed them; this favours dense training. Compute time is proportional to the model's size.
Circles are steps that `benchmarks.network` measured over links of the given rate, with their own compute times.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from scipy.ndimage import zoom

from benchmarks.harness import plots, results
from benchmarks.harness.results import RESULTS, Row
from benchmarks.harness.shaped_links import PAYLOAD_SHARE, bits_per_second
from benchmarks.scaling import NAMES, fit, read
from lightning_sparse import method
from lightning_sparse.cost import DENSE, Costs, Link, Workload, step

WORKERS = 4
SECONDS_PER_PARAM = 0.146 / 25_587_912
"""Time of forward and backward per parameter, for the MLP that `benchmarks.network` trains."""
TIE = 1.1  # a smaller gain is within the model's error, and `python -m lightning_sparse advise` recommends dense
OURS = ["topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
DDP = "dense, 32 bit"
DENSE_BYTES = {DDP: 4, "dense, 16 bit": 2}
CONTESTANTS = {"ddp": DDP, "bf16": "dense, 16 bit", "powersgd": "PowerSGD"}
"""Names by name in `benchmarks.network`; this package's methods have the same name in both."""
POINTS, FINE = 33, 500  # number of computed and of drawn points per side of a map
TIMES = [2, 5, 10, 20, 50, 100, 200]
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
    "cpu": ("Workers on CPU, two to a core, as measured", 2),
    "accelerator": ("Our own work 16 times faster, as if on an accelerator", 2 / 16),
}
"""Title of each map, and the factor on the time of this package's computations, relative to one core per worker."""
COLOURS = {DDP: "#8c8c8c", "dense, 16 bit": "#bdbdbd"}  # grey for dense; other colours as in the other figures
COLOURS |= {CONTESTANTS.get(name, name): plots.LINES[name][0] for name in ("powersgd", *OURS)}
INK = "#7d7d7d"
"""Colour of all text outside the maps. It is readable on white and on black, because the background is transparent."""
EDGE = "#1c1c1c"


def fields(panel: str) -> Iterator[Row]:
    """Compute one map: seconds of a step by method, at points that are close enough to interpolate."""
    fitted = zip(NAMES, fit(read(RESULTS / "network_paced.csv")) * PANELS[panel][1], strict=True)
    costs = Costs(**{name: value for name, value in fitted if name in ("element", "entry", "segment")}, shared=False)
    cases = {name: (DENSE, Costs(), size) for name, size in DENSE_BYTES.items()}
    cases |= {name: (method(name), costs, 4) for name in OURS}
    for params, rate in product(np.geomspace(1e5, 1e9, POINTS), np.geomspace(1e7, 1e11, POINTS)):
        compute = params * SECONDS_PER_PARAM
        work, link = Workload.even(round(params), compute / 3, 2 / 3 * compute), Link(rate / 8 * PAYLOAD_SHARE)
        steps = {name: step(how, work, WORKERS, link, own, dense_bytes=n) for name, (how, own, n) in cases.items()}
        yield row(panel, "model", "", params, rate, {name: found.seconds for name, found in steps.items()})


def circles(panel: str) -> Iterator[Row]:
    """Yield the measured steps that belong to a map."""
    runs = pd.concat(results.load(RESULTS / name) for name in ("network.csv", "network_paced.csv"))
    runs = runs.query("kind == 'step' and workers == @WORKERS and ranks_per_host == 1 and rate != 'loopback'")
    # Dilated measurements reduce the share of processor time, as an accelerator would.
    runs = runs[runs.workload.isin(MODELS) & ((runs.dilate > 1) == (panel == "accelerator"))]
    for (workload, rate), found in runs.groupby(["workload", "rate"]):
        seconds = (found.set_index("contestant").median_ms / 1e3).rename(CONTESTANTS)
        yield row(panel, "measured", MODELS[workload], found.params.iloc[0], bits_per_second(rate), seconds.to_dict())


def row(panel: str, source: str, model: str, params: float, rate: float, seconds: dict[str, float]) -> Row:
    """Return a row of map.csv."""
    case = {"panel": panel, "source": source, "model": model, "params": round(params), "bits_per_second": round(rate)}
    return case | {name: seconds.get(name) for name in COLOURS}


LABELS = {
    "MLP": (1.25, 9, 10, "left"),
    "ResNet-50": (0.8, 0, -11, "center"),
    "VGG-16": (1, -7, 10, "right"),
    "AlexNet": (0.9, -7, 10, "right"),
    "LSTM": (1.15, 0, -11, "center"),
    "GPT-2": (1, 7, 10, "left"),
}
"""At 1 Gbit/s: factor by which a circle is moved, and the position of its name in points. Without them, circles and
names would overlap."""


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Draw the two maps next to each other."""
    inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with plots.plt.rc_context({**inked, "hatch.linewidth": 0.6, "axes.grid": False}):
        figure, (axes,) = plots.panels(1, 2, (12, 5.9), sharey=True)
        seen: set[str] = set()
        for axis, (key, (title, _)) in zip(axes, PANELS.items(), strict=True):
            mine = rows[rows.panel == key]
            seen |= draw_field(axis, mine[mine.source == "model"])
            seen |= draw_circles(axis, mine[mine.source == "measured"])
            axis.set(xscale="log", yscale="log", title=title, xlabel="parameters")
            axis.set_xticks([1e5, 1e6, 1e7, 1e8, 1e9], labels=["0.1 M", "1 M", "10 M", "100 M", "1 G"])
            rates = ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
            axis.set_yticks([1e7, 1e8, 1e9, 1e10, 1e11], labels=rates)
            axis.minorticks_off()
        axes[0].set_ylabel("bandwidth of a worker's link")
        patch, line = mpl.patches.Patch, mpl.lines.Line2D
        figure.legend(
            handles=[
                *(patch(facecolor=COLOURS[name], label=name) for name in COLOURS if name in seen),
                patch(facecolor=COLOURS["dense, 16 bit"], hatch="///", edgecolor=EDGE, label="dense wins"),
                patch(facecolor="#dceefb", edgecolor=INK, label="pale: ours ahead by less than a tenth"),
                line([], [], color=INK, lw=1, label="times as fast as stock ddp"),
                line([], [], ls="", marker="o", ms=9, color="white", mec=INK, mew=1.8, label="measured"),
            ],
            loc="outside lower center",
            ncols=5,
            frameon=False,
        )
        plots.write(figure, path, transparent=True)


def draw_field(axis: Any, field: pd.DataFrame) -> set[str]:
    """Colour a map by the fastest method, with contours of this package's speed-up; return the fastest ones.

    Hatching marks the areas in which dense training is fastest.
    """
    seconds = {}  # on a fine grid, interpolated in the logarithm
    for name in [*DENSE_BYTES, *OURS]:
        grid = field.pivot_table(index="bits_per_second", columns="params", values=name)
        seconds[name] = np.exp(zoom(np.log(grid), FINE / POINTS, order=1))
    params, rates = (np.geomspace(values[0], values[-1], FINE) for values in (grid.columns, grid.index))
    dense = np.minimum(seconds[DDP], seconds["dense, 16 bit"])
    ours = np.minimum.reduce([seconds[name] for name in OURS])
    fastest = np.argmin([seconds.get(name, np.full_like(ours, np.inf)) for name in COLOURS], axis=0)
    colours = ListedColormap(list(COLOURS.values()))
    axis.pcolormesh(params, rates, fastest, cmap=colours, vmin=-0.5, vmax=len(COLOURS) - 0.5, rasterized=True)
    axis.contourf(params, rates, dense / ours, levels=[0, 1], colors="none", hatches=["///"])
    axis.contourf(params, rates, dense / ours, levels=[1, TIE], colors="white", alpha=0.55)
    axis.contour(params, rates, dense / ours, levels=[1], colors=EDGE, linewidths=1.2)
    times = np.where(dense < ours, np.nan, seconds[DDP] / ours)
    axis.contour(params, rates, times, levels=TIMES, colors=EDGE, linewidths=0.7)
    place = 10 * len(params) // 11
    for level in TIMES:
        if np.nanmin(times[:, place]) < level < np.nanmax(times[:, place]):
            rate = rates[np.nanargmin(np.abs(np.log(times[:, place] / level)))]
            axis.text(params[place], rate * 1.04, f"{level}×", color=EDGE, fontsize=9, va="bottom")
    return {list(COLOURS)[number] for number in np.unique(fastest)}


def draw_circles(axis: Any, runs: pd.DataFrame) -> set[str]:
    """Draw measured steps in the colour of the fastest method, with its speed-up over ddp; return the fastest."""
    fastest = runs[list(COLOURS)].astype(float).idxmin(axis=1)
    for (_, run), best in zip(runs.iterrows(), fastest, strict=True):
        where = LABELS if run.bits_per_second == 1e9 else {}
        aside, right, up, side = where.get(run.model, (1, 0, 10, "center"))
        at = (run.params * aside, run.bits_per_second)
        axis.plot(*at, "o", ms=12, color=COLOURS[best], mec=EDGE, mew=1.8)
        style = {"ha": side, "va": "bottom" if up > 0 else "top", "fontsize": 9, "color": EDGE}
        box = {"facecolor": "white", "alpha": 0.6, "lw": 0, "pad": 1}
        text = f"{run.model} {run[DDP] / run[best]:.3g}×"
        axis.annotate(text, at, (right, up), textcoords="offset points", bbox=box, **style)
    return set(fastest)


if __name__ == "__main__":
    args = results.command_line(__doc__).parse_args()
    if not args.figure:
        rows = [row for panel in PANELS for part in (circles, fields) for row in part(panel)]
        results.save(args.out / "map.csv", rows, digits=4)
    draw(results.load(args.out / "map.csv"), args.out / "map.png")
