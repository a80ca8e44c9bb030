"""Do the two observations behind GaussianK hold in a real training?

Shi et al. 2019 (arXiv 1911.08772) observe that u, the gradient plus what was not sent before, is bell-shaped in every
layer and wider than the gradient of dense training; and that the k largest of its d entries leave far less of ‖u‖²
behind than the bound 1 − k/d, even less than (1 − k/d)². Here two networks are trained, each with top-k at density
0.001 and dense, by two workers over gloo, with SGD, Nesterov momentum 0.9 and one cycle of the learning rate; both
trainings have the same initial weights and the same order of the data.

    python -m benchmarks.observations
    python -m benchmarks.observations --figure    # draws the CSV file, trains nothing

All figures are of rank 0's own u, before any exchange; in dense training that is its gradient. Nothing is written
unless, at every step observed, u is the gradient plus the residual, the residual afterwards is u without its largest
entries as chosen anew here, and 1 − k/d bounds the contraction of every layer.

Bell-shaped. Their theorem needs one peak, at zero, and a fall on both sides: then the sorted magnitudes form a convex
curve. A layer of at least 1,000 entries has "one peak" if

- at most 3 % of the entries would have to change their bin, of a quarter of a standard deviation, for the histogram to
  rise to one peak and fall after it (chance moves up to 2 % of 1,000 normal numbers),
- that peak lies within half a standard deviation of zero, and u leans to neither side much, |skewness| < 1.

A spike in a wide desert passes too. So "bell-shaped" asks in addition for a Kolmogorov-Smirnov distance of at most 0.1
to the normal distribution of the same mean and standard deviation (Laplace's has 0.06), and for an excess kurtosis
above −1, which a uniform distribution does not have.

Written: `results/observations.csv`, where "distribution" is a row per layer and shown step, "contraction" one per
density, layer and step (layers only of the shown steps; the verdict counts all); and `results/observations.png`.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from scipy import special, stats
from sklearn.isotonic import isotonic_regression
from torch import Tensor

from benchmarks.harness import plots, results
from benchmarks.harness.results import Row
from examples.data import Digits, StandardLibrary
from examples.models import LSTM, LanguageModel, OneCycleClassifier, ResNet20
from examples.train import quiet
from lightning_sparse import SparseDDPStrategy
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.observer import Observer
from lightning_sparse.reproduce.gaussiank_contraction import contraction, of_normal

WORKERS, SEED = 2, 0
STEPS, EVERY = 300, 10
SHOWN = (1, 10, 50, 150, 300)
"""Steps whose distributions are looked at."""
DENSITY = 0.001
DENSITIES = (0.001, 0.01, 0.1)
WHOLE = "whole model"
REACH, BINS = 10.0, 80
MIDDLES = (np.arange(BINS) + 0.5) * 2 * REACH / BINS - REACH
LEAST = 1000
"""Entries that a layer needs for its shape to be judged."""
COLUMNS = 7
COLORS = ("0.75", "C1", "C2", "C0", "k")  # early steps light, the last one black
TICKS = (0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


class OneCycleLanguageModel(LanguageModel):
    """A language model with the optimizer of the digits' classifier, at a higher rate."""

    max_lr, momentum, weight_decay = 2.0, 0.9, 0.0
    configure_optimizers = OneCycleClassifier.configure_optimizers


WORKLOADS: dict[str, Callable[[], tuple[pl.LightningModule, pl.LightningDataModule]]] = {
    "digits, ResNet-20": lambda: (OneCycleClassifier(ResNet20(in_channels=1)), Digits(16)),
    "source text, LSTM": lambda: (OneCycleLanguageModel(LSTM()), StandardLibrary(length=128, batch_size=8)),
}


class Look(Observer):
    """Copies u of the last step, and makes sure that it is the gradient plus the residual."""

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        self.segment, self.u = ctx.segment, torch.cat(grads) + ctx.state.get("residual", 0.0)

    def compensated(self, u: Tensor, ctx: Context) -> None:
        if not torch.equal(u, self.u):
            raise RuntimeError(f"Step {ctx.step}: u is not the gradient plus the residual.")


class Recorder(pl.Callback):
    """Records rank 0's u at some steps, counted from 1, and writes a file: layers' places, u, losses."""

    def __init__(self, steps: Sequence[int], path: Path) -> None:
        self.steps, self.path, self.look = set(steps), path, Look()
        self.recorded: dict[str, Any] = {"layers": {}, "u": {}, "loss": []}

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Attach the observer."""
        trainer.strategy.reducer.observers.append(self.look)

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Mapping[str, Tensor], *batch: Any) -> None:
        """Compare u with the new residual, and record u."""
        self.recorded["loss"].append(float(outputs["loss"]))
        if trainer.global_step not in self.steps:
            return
        state, segment, u = trainer.strategy.reducer.states[0], self.look.segment, self.look.u
        if "residual" in state and not torch.equal(state["residual"], u.index_fill(0, TopK(DENSITY).select(u), 0.0)):
            raise RuntimeError(f"Step {trainer.global_step}: the residual is not u without its largest entries.")
        names = [name.removeprefix("module.").removeprefix("network.") for name in segment.names]
        places = zip(segment.bounds, segment.bounds[1:], strict=False)
        self.recorded["layers"] = dict(zip(names, places, strict=True))
        self.recorded["u"][trainer.global_step] = u

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Write the file."""
        if trainer.is_global_zero:
            torch.save(self.recorded, self.path)


def train(workload: str, method: str, looks: Sequence[int], path: Path) -> dict[str, Any]:
    """Train in forked processes and return what rank 0 recorded."""
    pl.seed_everything(SEED, workers=True, verbose=False)
    model, data = WORKLOADS[workload]()
    density = None if method == "dense" else DENSITY
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        # The whole model as one segment: its k largest entries, wherever they are.
        strategy=SparseDDPStrategy(method, density, granularity="model", start_method="fork"),
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=Recorder(looks, path),
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    recorded: dict[str, Any] = torch.load(path)
    if list(recorded["u"]) != list(looks):
        raise RuntimeError(f"{workload}, {method}: steps {list(recorded['u'])} were recorded, not {list(looks)}.")
    return recorded


def summarize(x: Tensor) -> dict[str, float]:
    """Return the statistics of a 1-D tensor, in fp64; all but "mean" and "std" are NaN if all elements are equal.

    "ks_distance" is the Kolmogorov-Smirnov distance to the normal distribution of this mean and standard deviation.
    """
    values = x.double().numpy()
    mean, std = float(values.mean()), float(values.std())
    if not math.isfinite(std):
        raise RuntimeError("Numbers that are not finite were recorded.")
    shape = dict.fromkeys(("skewness", "excess_kurtosis", "ks_distance"), math.nan)
    if std > 0:
        distance = stats.ks_1samp((values - mean) / std, special.ndtr, method="asymp").statistic
        shape = {"skewness": float(stats.skew(values)), "excess_kurtosis": float(stats.kurtosis(values))}
        shape["ks_distance"] = float(distance)
    return {"mean": mean, "std": std, **shape}


def judge(x: Tensor, summary: Mapping[str, float]) -> Row:
    """Return a histogram of a 1-D tensor that is not constant, as text, and whether it fulfils the criteria above.

    "histogram" is the part of all entries in each bin, from −REACH to REACH standard deviations about the mean, "moved"
    the part that would have to change its bin for one peak, and "peak" where that is then, in standard deviations.
    """
    mean, std = summary["mean"], summary["std"]
    share = torch.histc((x.double() - mean) / std, BINS, -REACH, REACH).numpy() / x.numel()
    best = min((unimodal(share, peak) for peak in range(1, BINS)), key=lambda fit: float(np.abs(fit - share).sum()))
    moved, peak = float(np.abs(best - share).sum()) / 2, float(MIDDLES[best.argmax()]) + mean / std
    one_peak = moved <= 0.03 and abs(peak) <= 0.5 and abs(summary["skewness"]) < 1
    bell = one_peak and summary["ks_distance"] <= 0.1 and summary["excess_kurtosis"] > -1
    histogram = " ".join(f"{part:.4g}" for part in share)
    return {"moved": moved, "peak": peak, "one_peak": one_peak, "bell_shaped": bell, "histogram": histogram}


def unimodal(share: NDArray[np.float64], peak: int) -> NDArray[np.float64]:
    """Return the nearest shares, in squares, that rise before bin `peak`, not the first, and fall from there on."""
    parts = [isotonic_regression(part, increasing=up) for part, up in ((share[:peak], True), (share[peak:], False))]
    return np.concatenate(parts)


def parts(recorded: Mapping[str, Any], step: int) -> Iterator[tuple[str, Tensor]]:
    """Yield u of the whole model and of each layer, in the order of the model."""
    u = recorded["u"][step]
    yield WHOLE, u
    for name, (start, stop) in reversed(recorded["layers"].items()):
        yield name, u[start:stop]


def distribution_rows(sparse: Mapping[str, Any], dense: Mapping[str, Any]) -> Iterator[Row]:
    """Yield how u is distributed, a row per step and layer; u of dense training is its gradient."""
    for step in SHOWN:
        for (name, u), (_, gradient) in zip(parts(sparse, step), parts(dense, step), strict=True):
            summary, std = summarize(u), summarize(gradient)["std"]
            row = {"kind": "distribution", "step": step, "layer": name, "numel": u.numel(), **summary}
            row |= {"dense_gradient_std": std, "times_dense_std": summary["std"] / std if std else math.nan}
            if u.numel() >= LEAST and summary["std"] > 0:
                row |= judge(u, summary)
            yield row


def contraction_rows(sparse: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what the k largest entries leave behind, a row per step, layer and density, if it is within the bound."""
    for step in sparse["u"]:
        for name, u in parts(sparse, step):
            for density in DENSITIES:
                if not u.any():
                    continue
                k, left = contraction(u, TopK(density))
                bound = 1 - k / u.numel()
                if not left <= bound + 1e-9:
                    raise RuntimeError(f"Step {step}, {name}: top {k} of {u.numel()} leave {left}, more than {bound}.")
                row = {"kind": "contraction", "step": step, "layer": name, "numel": u.numel(), "density": density}
                yield row | {"k": k, "contraction": left, "bound": bound, "bound_squared": bound**2}


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which observations held in one workload, and for which layers they did not, as text."""
    table = pd.DataFrame(rows)
    shapes, left = (table[table["kind"] == kind] for kind in ("distribution", "contraction"))
    layers = shapes[shapes["layer"] != WHOLE]
    judged, later = layers[layers["bell_shaped"].notna()], layers[layers["step"] > 1]
    yield f"u has one peak, at zero: {tally(judged['layer'], judged['one_peak'])}"
    yield f"u is bell-shaped: {tally(judged['layer'], judged['bell_shaped'])}"
    yield f"u is wider than dense's gradient, after step 1: {tally(later['layer'], later['times_dense_std'] > 1)}"
    by_step = judged.groupby("step")[["bell_shaped", "ks_distance", "excess_kurtosis"]].agg(["min", "max", "sum"])
    whole = shapes[shapes["layer"] == WHOLE].set_index("step")["times_dense_std"]
    yield f"Layers:\n{by_step.to_string()}\nWhole model:\n{whole.to_string()}"
    for density, mine in left.groupby("density"):
        yield f"Top k at density {density:g}, of normal numbers {of_normal(density):.4f}; whole model:"
        yield mine[mine["layer"] == WHOLE][["contraction", "bound", "bound_squared"]].describe().to_string()
        for column, name in (("bound", "1 - k/d"), ("bound_squared", "its square")):
            yield f"  below {name}: {tally(mine['layer'], mine['contraction'] < mine[column])}"


def tally(layers: pd.Series, held: pd.Series) -> str:
    """Say for how many layers and steps something is true, and for which layers it is not."""
    held = held.astype(bool)
    names = ", ".join(f"{name} {count}" for name, count in layers[~held].value_counts().items())
    return f"{held.sum()} of {len(held)} layers x steps" + (f" (not: {names})" if names else "")


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw for each workload the layers' histograms, and below them contraction and width over the steps."""
    workloads = list(table.groupby("workload", sort=False))
    counts = [rows[rows["histogram"] != ""]["layer"].nunique() for _, rows in workloads]
    lines = [math.ceil((count + 1) / COLUMNS) for count in counts]  # with a place for the legend
    heights = [part for count in lines for part in (1.8 * count + 0.5, 3.2)]
    figure = plots.plt.figure(figsize=(15, sum(heights)))
    areas = figure.subfigures(len(heights), 1, height_ratios=heights)
    for (name, rows), above, below, count in zip(workloads, areas[::2], areas[1::2], lines, strict=True):
        above.suptitle(f"{name}: how u = gradient + residual is distributed, layer by layer", fontweight="bold")
        below.suptitle(f"{name}: what the k largest entries leave behind, and how wide u is", fontweight="bold")
        draw_shapes(above.subplots(count, COLUMNS, sharex=True, sharey=True).ravel(), rows[rows["histogram"] != ""])
        draw_contraction(below.subplots(1, len(DENSITIES) + 1), rows)
    plots.write(figure, path)


def draw_shapes(panels: Sequence[Any], rows: pd.DataFrame) -> None:
    """Draw each layer's histograms in one panel, and a legend in the last one."""
    normal = np.exp(-(MIDDLES**2) / 2) / math.sqrt(2 * math.pi) * 2 * REACH / BINS
    layers = list(rows.groupby("layer", sort=False))
    for panel, (name, found) in zip(panels, layers, strict=False):
        bells = found["bell_shaped"].astype(str) == "True"
        for color, step, text in zip(COLORS, found["step"], found["histogram"], strict=True):
            share = np.array(text.split(), dtype=float)
            panel.step(
                MIDDLES, np.where(share > 0, share, np.nan), where="mid", color=color, lw=1, label=f"step {step}"
            )
        panel.plot(MIDDLES, normal, "C3--", lw=1, label="normal distribution")
        panel.set(yscale="log", ylim=(1e-5, 1), xlim=(-REACH, REACH))
        misses = ", ".join(map(str, found["step"][~bells]))
        text = ("no bell at any step" if not bells.any() else f"no bell at step {misses}") if misses else "bell-shaped"
        title = f"{name} ({found['numel'].iloc[0]:,})\n{text}; {found['times_dense_std'].iloc[-1]:.0f} × as wide"
        panel.set_title(title, fontsize=7, color="C3" if misses else "k")
        panel.tick_params(labelsize=7)
    for panel in panels[len(layers) :]:
        panel.axis("off")
    title = "y: share of the entries per ¼ std\nx: std from the mean\n× as wide: as dense's gradient,\nat the last step"
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", fontsize=7, title=title, title_fontsize=7)


def draw_contraction(panels: Sequence[Any], rows: pd.DataFrame) -> None:
    """Draw the contraction at each density over the steps, with both bounds, and how wide u is."""
    contraction, shapes = (rows[rows["kind"] == kind] for kind in ("contraction", "distribution"))
    for panel, density in zip(panels, DENSITIES, strict=False):
        found = contraction[contraction["density"] == density]
        whole = found[found["layer"] == WHOLE]
        # The file has the layers at the shown steps only.
        layers = found[found["step"].isin(SHOWN) & (found["numel"] >= LEAST)].groupby("step")["contraction"]
        lowest, highest = layers.min(), layers.max()
        panel.axhline(whole["bound"].iloc[0], color="k", label="1 − k/d, for any u")
        panel.axhline(whole["bound_squared"].iloc[0], color="C3", ls="--", label="(1 − k/d)², for a bell-shaped u")
        panel.axhline(of_normal(density), color="0.5", ls=":", label="of a normal u")
        label = f"layers of {LEAST:,} entries or more"
        panel.fill_between(lowest.index, lowest, highest, color="C0", alpha=0.2, label=label)
        panel.plot(whole["step"], whole["contraction"], "C0.-", label="whole model")
        # Stretches both ends, so that 0.998 and 0.999 are told apart.
        panel.set(yscale="logit", xlabel="step", title=f"k/d = {density:g}", ylabel="‖u − top k‖² / ‖u‖²")
        panel.set_yticks(TICKS, map(str, TICKS), fontsize=7)
        panel.set_yticks([], minor=True)
        panel.set_ylim(0.9 * lowest.min(), 1 - 0.8 * density)
    panels[0].legend(fontsize=7)
    for name in dict.fromkeys(reversed(shapes["layer"].tolist())):
        curve = shapes[shapes["layer"] == name]
        style = {"color": "C0", "lw": 2, "label": WHOLE} if name == WHOLE else {"color": "0.8", "lw": 0.5}
        panels[-1].plot(curve["step"], curve["times_dense_std"], **style)
    panels[-1].axhline(1, color="k")
    panels[-1].set(xscale="log", yscale="log", xlabel="step", title="std of u by that of dense's gradient")
    panels[-1].legend(fontsize=7, title="grey: every layer", title_fontsize=7)


def observe(workload: str) -> list[Row]:
    """Train one workload with top-k and dense, print the verdict and return all rows."""
    looks = sorted({*SHOWN, *range(EVERY, STEPS + 1, EVERY)})
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sparse = train(workload, "topk", looks, Path(folder) / "topk")
        dense = train(workload, "dense", SHOWN, Path(folder) / "dense")
    if not torch.equal(sparse["u"][1], dense["u"][1]):
        raise RuntimeError(f"{workload}: the two trainings did not start from the same weights and data.")
    rows = [*distribution_rows(sparse, dense), *contraction_rows(sparse)]
    losses = {f"{name}_loss": float(np.mean(run["loss"][-20:])) for name, run in (("topk", sparse), ("dense", dense))}
    seconds = time.perf_counter() - started
    print(f"\n{workload}, {seconds:.0f} s, at the end {losses}", *verdict(rows), sep="\n", flush=True)
    columns = {"method": "topk", "training_density": DENSITY, "workers": WORKERS, "seed": SEED, "threads_per_rank": 1}
    columns |= results.origin("pytorch-lightning")
    return [{"workload": workload, **row, **losses, **columns} for row in rows]


def main() -> None:
    """Train, check, write and say what held; or only draw."""
    args = results.command_line(__doc__).parse_args()
    path = args.out / "observations.csv"
    if not args.figure:
        quiet()
        torch.set_num_threads(1)
        rows = [row for name in WORKLOADS for row in observe(name)]
        results.save(path, [row for row in rows if row["layer"] == WHOLE or row["step"] in SHOWN], digits=6)
    draw(results.load(path), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
