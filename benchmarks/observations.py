"""Do the two observations behind GaussianK hold in a real training?

Shi et al. 2019 (arXiv 1911.08772) observe that u, the gradient plus what was not sent before, is bell-shaped in every
layer and wider than the gradient of dense training; and that the k largest of its d entries leave far less of ‖u‖²
behind than the bound 1 − k/d, even less than (1 − k/d)². Here two networks are trained, each with top-k at density
0.001 and dense, by two workers over gloo, with SGD, Nesterov momentum 0.9 and one cycle of the learning rate; both
trainings have the same initial weights and the same order of the data.

    python -m benchmarks.observations

What is looked at is worker 0's own u, before any exchange; in dense training that is its own gradient. Nothing is
written unless, at every step looked at, u is the gradient plus the residual, the residual afterwards is u without its
largest entries as chosen anew here, and 1 − k/d bounds what was left of every layer.

Bell-shaped. Their theorem needs one peak, at zero, and a fall on both sides: then the sorted magnitudes form a convex
curve. A histogram of u with bins of a quarter of a standard deviation shows that, here called "one peak", if

- at most 3 % of the entries would have to change their bin for it to rise to one peak and fall after it (chance moves
  up to 2 % of 1,000 normal numbers, so layers with fewer entries, most biases and all normalisation, are not judged),
- that peak lies within half a standard deviation of zero, and u leans to neither side much, |skewness| < 1.

A spike in a wide desert passes too, and is no bell. So "bell-shaped" asks in addition for a Kolmogorov-Smirnov distance
of at most 0.1 to the normal distribution of the same mean and standard deviation (Laplace's has 0.06, a Student's with
three degrees of freedom 0.09), and for an excess kurtosis above −1, which a uniform distribution does not have.

What came out, with torch 2.13 on CPU: u of ResNet-20 is bell-shaped from the start. That of the LSTM is a spike in a
wide desert at first and becomes a bell as the residual adds up many gradients; not that of the byte embedding, most of
whose rows belong to bytes that hardly occur. u is wider than dense's gradient in every layer and step but the first,
where it is that gradient. Top-k leaves less than (1 − k/d)² everywhere, and at density 0.001 far less only at first:
what sticks out is sent, so u loses its tails, and top-k ends up leaving more than it would of normal numbers.

Written: `results/observations.csv`, where "distribution" is a row per layer and shown step, "contraction" one per
density, layer and step (layers only of the shown steps; the verdict counts all); and `results/observations.png`.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from scipy import special
from sklearn.isotonic import isotonic_regression
from torch import Tensor

from benchmarks.language_rank import origin
from examples.data import Digits, StandardLibrary
from examples.models import LSTM, LanguageModel, OneCycleClassifier, ResNet20
from examples.train import quiet
from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks.gradient_distribution import Distribution, Summary
from lightning_sparse.callbacks.shared import sum_of_squares
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
from lightning_sparse.observer import Observer

RESULTS = Path(__file__).parent / "results"
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

Row = dict[str, Any]


class OneCycleLanguageModel(LanguageModel):
    """A language model trained as the classifier of the digits is, at a higher rate."""

    max_lr, momentum, weight_decay = 2.0, 0.9, 0.0
    configure_optimizers = OneCycleClassifier.configure_optimizers


def digits() -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return ResNet-20 and handwritten digits."""
    return OneCycleClassifier(ResNet20(in_channels=1)), Digits(16)


def text() -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """Return an LSTM and the bytes of the standard library."""
    return OneCycleLanguageModel(LSTM()), StandardLibrary(length=128, batch_size=8)


WORKLOADS = {"digits, ResNet-20": digits, "source text, LSTM": text}


# One training, and what rank 0 keeps of it.


class Look(Observer):
    """Copies u of one step, and makes sure that it is the gradient plus the residual."""

    def gradients(self, segment: Segment, grads: list[Tensor], ctx: Context) -> None:
        self.segment, self.gradient = segment, torch.cat(grads)
        self.u = self.gradient + ctx.state.get("residual", 0.0)

    def compensated(self, segment: Segment, u: Tensor, ctx: Context) -> None:
        if not torch.equal(u, self.u):
            raise RuntimeError(f"Step {ctx.step}: u is not the gradient plus the residual.")


class Recorder(pl.Callback):
    """Keeps rank 0's u of some steps and writes it to a file.

    Args:
        steps: which, counted from 1.
        path: of the file, with "layers", name to (start, stop), "u", step to tensor, "gradient" likewise for the steps
            in `SHOWN`, and "loss", of every step.
    """

    def __init__(self, steps: Sequence[int], path: Path) -> None:
        self.steps, self.path = set(steps), path
        self.look: Look | None = None
        self.layers: dict[str, tuple[int, int]] = {}
        self.u: dict[int, Tensor] = {}
        self.gradient: dict[int, Tensor] = {}
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Begin to look, before the step's gradients come."""
        if trainer.is_global_zero and trainer.global_step + 1 in self.steps:
            self.look = Look()
            trainer.strategy.reducer.observers.append(self.look)

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Mapping[str, Tensor], *batch: Any) -> None:
        """Compare with what the reducer has kept, and keep u."""
        self.losses.append(float(outputs["loss"]))
        if self.look is None:
            return
        reducer, segment, u = trainer.strategy.reducer, self.look.segment, self.look.u
        reducer.observers.remove(self.look)
        if "residual" in reducer.states[0]:
            rest = u.index_fill(0, TopK(DENSITY).select(u), 0.0)
            if not torch.equal(reducer.states[0]["residual"], rest):
                raise RuntimeError(f"Step {trainer.global_step}: the residual is not u without its largest entries.")
        names = [name.removeprefix("module.").removeprefix("network.") for name in segment.names]
        self.layers = dict(zip(names, zip(segment.bounds, segment.bounds[1:], strict=False), strict=True))
        self.u[trainer.global_step] = u
        if trainer.global_step in SHOWN:
            self.gradient[trainer.global_step] = self.look.gradient
        self.look = None

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Write the file."""
        if trainer.is_global_zero:
            recorded = {"layers": self.layers, "u": self.u, "gradient": self.gradient, "loss": self.losses}
            torch.save(recorded, self.path)


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


# What the recorded numbers say.


def judge(x: Tensor, summary: Summary) -> Row:
    """Return a histogram of a 1-D tensor that is not constant, and whether it fulfils the criteria above.

    "histogram" is the part of all entries in each bin, from −REACH to REACH standard deviations about the mean, "moved"
    the part that would have to change its bin for one peak, and "peak" where that is then, in standard deviations.
    """
    mean, std = summary.mean, summary.std
    share = torch.histc((x.double() - mean) / std, BINS, -REACH, REACH).numpy() / x.numel()
    best = min((unimodal(share, peak) for peak in range(1, BINS)), key=lambda fit: float(np.abs(fit - share).sum()))
    moved, peak = float(np.abs(best - share).sum()) / 2, float(MIDDLES[best.argmax()]) + mean / std
    one_peak = moved <= 0.03 and abs(peak) <= 0.5 and abs(summary.skewness) < 1
    bell = one_peak and summary.ks_distance <= 0.1 and summary.excess_kurtosis > -1
    return {"moved": moved, "peak": peak, "one_peak": one_peak, "bell_shaped": bell, "histogram": share}


def unimodal(share: NDArray[np.float64], peak: int) -> NDArray[np.float64]:
    """Return the nearest shares, in squares, that rise before bin `peak`, not the first, and fall from there on.

    >>> unimodal(np.array([1.0, 3.0, 1.0, 3.0, 0.0]), 2).tolist()
    [1.0, 3.0, 2.0, 2.0, 0.0]
    """
    parts = [isotonic_regression(part, increasing=up) for part, up in ((share[:peak], True), (share[peak:], False))]
    return np.concatenate(parts)


def contraction(u: Tensor, density: float) -> tuple[int, float]:
    """Return k, and ‖u − Top_k(u)‖² / ‖u‖² of a 1-D tensor that is not all zero."""
    chosen = TopK(density).select(u)
    rest = u.index_fill(0, chosen, 0.0)
    return len(chosen), float(sum_of_squares([rest]) / sum_of_squares([u]))


def parts(recorded: Mapping[str, Any], what: str, step: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole model's "u" or "gradient" and each layer's, in the order of the model."""
    flat = recorded[what][step]
    yield WHOLE, flat
    for name, (start, stop) in reversed(recorded["layers"].items()):
        yield name, flat[start:stop]


def distribution_rows(sparse: Mapping[str, Any], dense: Mapping[str, Any]) -> Iterator[Row]:
    """Yield how u is distributed, a row per step and layer."""
    for step in SHOWN:
        trio = (parts(sparse, "u", step), parts(sparse, "gradient", step), parts(dense, "gradient", step))
        for (name, u), (_, own), (_, other) in zip(*trio, strict=True):
            summary = summarize(u)
            row = {"kind": "distribution", "step": step, "layer": name, "numel": u.numel()}
            row |= {key: getattr(summary, key) for key in ("mean", "std", "skewness", "excess_kurtosis", "ks_distance")}
            for key, gradient in (("dense", other), ("own", own)):
                std = summarize(gradient).std
                row |= {f"{key}_gradient_std": std, f"times_{key}_std": summary.std / std if std else math.nan}
            if u.numel() >= LEAST and summary.std > 0:
                row |= judge(u, summary)
            yield row


def summarize(x: Tensor) -> Summary:
    """Return the statistics of a 1-D tensor."""
    distribution = Distribution()
    distribution.add([x])
    summary = distribution.summary()
    if summary is None:
        raise RuntimeError("Numbers that are not finite were recorded.")
    return summary


def contraction_rows(sparse: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what the k largest entries leave behind, a row per step, layer and density.

    Raises:
        RuntimeError: it is more than theory allows.
    """
    for step in sparse["u"]:
        for name, u in parts(sparse, "u", step):
            for density in DENSITIES:
                if not u.any():
                    continue
                k, left = contraction(u, density)
                bound = 1 - k / u.numel()
                if not left <= bound + 1e-9:
                    raise RuntimeError(f"Step {step}, {name}: top {k} of {u.numel()} leave {left}, more than {bound}.")
                row = {"kind": "contraction", "step": step, "layer": name, "numel": u.numel(), "density": density}
                yield row | {"k": k, "contraction": left, "bound": bound, "bound_squared": bound**2}


def of_normal(density: float) -> float:
    """Return the contraction of the top k of many normal numbers with mean 0.

    >>> round(of_normal(0.001), 4), of_normal(1.0)
    (0.9873, 0.0)
    """
    z = float(special.ndtri(1 - density / 2))
    return 1 - density - 2 * z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what held in one workload, and where it did not, in lines of text."""
    shapes = [row for row in rows if row["kind"] == "distribution"]
    layers = [row for row in shapes if row["layer"] != WHOLE]
    judged = [row for row in layers if "bell_shaped" in row]
    yield f"u has one peak, at zero: {tally(judged, 'one_peak')}"
    yield f"u is bell-shaped: {tally(judged, 'bell_shaped')}"
    for step in SHOWN:
        now = [row for row in judged if row["step"] == step]
        distances, kurtoses = ([row[key] for row in now] for key in ("ks_distance", "excess_kurtosis"))
        whole = next(row for row in shapes if row["layer"] == WHOLE and row["step"] == step)
        yield (
            f"  step {step}: bell-shaped {sum(row['bell_shaped'] for row in now)} of {len(now)} layers; distance to "
            f"normal {min(distances):.2f} to {max(distances):.2f}, excess kurtosis {min(kurtoses):.1f} to "
            f"{max(kurtoses):.1f}; whole model {whole['times_dense_std']:.3g} times as wide as dense's gradient, "
            f"{whole['times_own_std']:.3g} times as its own"
        )
    later = [{**row, "wider": row["times_dense_std"] > 1} for row in layers if row["step"] > 1]
    yield f"u is wider than dense's gradient, after step 1: {tally(later, 'wider')}"
    for density in DENSITIES:
        left = [row for row in rows if row["kind"] == "contraction" and row["density"] == density]
        whole = [row for row in left if row["layer"] == WHOLE]
        ratios = [row["contraction"] for row in whole]
        takes = [(1 - row["contraction"]) / (1 - row["bound"]) for row in whole]
        yield (
            f"top k at density {density:g} leave {min(ratios):.4f} to {max(ratios):.4f} of the whole model's ‖u‖², at "
            f"the last step {ratios[-1]:.4f}, of normal numbers {of_normal(density):.4f}; 1 - k/d is "
            f"{whole[0]['bound']:.4f}, its square {whole[0]['bound_squared']:.4f}; the k largest hold "
            f"{min(takes):.1f} to {max(takes):.1f} times k/d"
        )
        for name in ("bound", "bound_squared"):
            seen = [{**row, "below": row["contraction"] < row[name]} for row in left]
            inner = [row for row in seen if row["layer"] != WHOLE]
            yield (
                f"  below {'1 - k/d' if name == 'bound' else 'its square'}: {tally(inner, 'below')}; whole model in "
                f"{sum(row['below'] for row in seen) - sum(row['below'] for row in inner)} of {len(whole)} steps"
            )


def tally(rows: Sequence[Row], key: str) -> str:
    """Say for how many layers and steps something is true, and for which layers it is not.

    >>> tally([{"layer": "a", "held": True}, {"layer": "b", "held": False}, {"layer": "b", "held": False}], "held")
    '1 of 3 layers x steps (not: b 2)'
    """
    failed = Counter(row["layer"] for row in rows if not row[key])
    names = ", ".join(f"{name} {count}" for name, count in failed.most_common())
    return f"{len(rows) - failed.total()} of {len(rows)} layers x steps" + (f" (not: {names})" if failed else "")


# What is written.


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file, without layers' contractions at steps that are not shown."""
    rows = [row for row in rows if row["layer"] == WHOLE or row["step"] in SHOWN]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            row = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
            if "histogram" in row:
                row["histogram"] = " ".join(f"{share:.4g}" for share in row["histogram"])
            writer.writerow(row)


def draw(workloads: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw for each workload the layers' histograms, and below them contraction and width over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    counts = [len({row["layer"] for row in rows if "bell_shaped" in row}) for rows in workloads.values()]
    lines = [math.ceil((count + 1) / COLUMNS) for count in counts]  # with a place for the legend
    heights = [part for count in lines for part in (1.8 * count + 0.5, 3.2)]
    figure = plt.figure(figsize=(15, sum(heights)), layout="constrained")
    areas = figure.subfigures(len(heights), 1, height_ratios=heights)
    for (name, rows), above, below, count in zip(workloads.items(), areas[::2], areas[1::2], lines, strict=True):
        above.suptitle(f"{name}: how u = gradient + residual is distributed, layer by layer", fontweight="bold")
        below.suptitle(f"{name}: what the k largest entries leave behind, and how wide u is", fontweight="bold")
        draw_shapes(above.subplots(count, COLUMNS, sharex=True, sharey=True).ravel(), rows)
        draw_contraction(below.subplots(1, len(DENSITIES) + 1), rows)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_shapes(panels: Sequence[Any], rows: Sequence[Row]) -> None:
    """Draw each layer's histograms in one panel, and a legend in the last one."""
    layers: dict[str, list[Row]] = {}
    for row in rows:
        if "bell_shaped" in row:
            layers.setdefault(row["layer"], []).append(row)
    normal = np.exp(-(MIDDLES**2) / 2) / math.sqrt(2 * math.pi) * 2 * REACH / BINS
    for panel, (name, found) in zip(panels, layers.items(), strict=False):
        for color, row in zip(COLORS, found, strict=True):
            share = np.where(row["histogram"] > 0, row["histogram"], np.nan)
            panel.step(MIDDLES, share, where="mid", color=color, lw=1, label=f"step {row['step']}")
        panel.plot(MIDDLES, normal, "C3--", lw=1, label="normal distribution")
        panel.set(yscale="log", ylim=(1e-5, 1), xlim=(-REACH, REACH))
        misses = ", ".join(str(row["step"]) for row in found if not row["bell_shaped"])
        text = f"no bell at step {misses}" if misses else "bell-shaped"
        if not any(row["bell_shaped"] for row in found):
            text = "no bell at any step"
        text = f"{name} ({found[0]['numel']:,})\n{text}; {found[-1]['times_dense_std']:.0f} × as wide"
        panel.set_title(text, fontsize=7, color="C3" if misses else "k")
        panel.tick_params(labelsize=7)
    for panel in panels[len(layers) :]:
        panel.axis("off")
    title = "y: share of the entries per ¼ std\nx: std from the mean\n× as wide: as dense's gradient,\nat the last step"
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", fontsize=7, title=title, title_fontsize=7)


def draw_contraction(panels: Sequence[Any], rows: Sequence[Row]) -> None:
    """Draw the contraction at each density over the steps, with both bounds, and how wide u is."""
    for panel, density in zip(panels, DENSITIES, strict=False):
        found = [row for row in rows if row["kind"] == "contraction" and row["density"] == density]
        whole = [row for row in found if row["layer"] == WHOLE]
        steps = [row["step"] for row in whole]
        large = [row for row in found if row["numel"] >= LEAST]
        layers = [[row["contraction"] for row in large if row["step"] == step] for step in steps]
        lowest, highest = list(map(min, layers)), list(map(max, layers))
        panel.axhline(whole[0]["bound"], color="k", label="1 − k/d, for any u")
        panel.axhline(whole[0]["bound_squared"], color="C3", ls="--", label="(1 − k/d)², for a bell-shaped u")
        panel.axhline(of_normal(density), color="0.5", ls=":", label="of a normal u")
        panel.fill_between(steps, lowest, highest, color="C0", alpha=0.2, label=f"layers of {LEAST:,} entries or more")
        panel.plot(steps, [row["contraction"] for row in whole], "C0.-", label="whole model")
        # Stretches both ends, so that 0.998 and 0.999 are told apart.
        panel.set(yscale="logit", xlabel="step", title=f"k/d = {density:g}", ylabel="‖u − top k‖² / ‖u‖²")
        panel.set_yticks(TICKS, map(str, TICKS), fontsize=7)
        panel.set_yticks([], minor=True)
        panel.set_ylim(0.9 * min(lowest), 1 - 0.8 * density)
    panels[0].legend(fontsize=7)
    shapes = [row for row in rows if row["kind"] == "distribution"]
    for name in dict.fromkeys(row["layer"] for row in reversed(shapes)):
        curve = [row["times_dense_std"] for row in shapes if row["layer"] == name]
        style = {"color": "C0", "lw": 2, "label": WHOLE} if name == WHOLE else {"color": "0.8", "lw": 0.5}
        panels[-1].plot(SHOWN, curve, **style)
    own = [row["times_own_std"] for row in shapes if row["layer"] == WHOLE]
    panels[-1].plot(SHOWN, own, "C1--", label="by its own gradient's")
    panels[-1].axhline(1, color="k")
    panels[-1].set(xscale="log", yscale="log", xlabel="step", title="std of u by that of dense's gradient")
    panels[-1].legend(fontsize=7, title="grey: every layer", title_fontsize=7)


def main() -> None:
    """Train, check, write and say what held."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    quiet()
    torch.set_num_threads(1)
    looks = sorted({*SHOWN, *range(EVERY, STEPS + 1, EVERY)})
    columns = {"method": "topk", "training_density": DENSITY, "workers": WORKERS, "seed": SEED}
    columns |= {**origin(), "pytorch_lightning": pl.__version__}
    workloads: dict[str, list[Row]] = {}
    written: list[Row] = []
    for name in WORKLOADS:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            sparse = train(name, "topk", looks, Path(folder) / "topk")
            dense = train(name, "dense", SHOWN, Path(folder) / "dense")
        if not torch.equal(sparse["gradient"][1], dense["gradient"][1]):
            raise RuntimeError(f"{name}: the two trainings did not start from the same weights and data.")
        rows = workloads[name] = [*distribution_rows(sparse, dense), *contraction_rows(sparse)]
        losses = {
            "topk_loss": statistics.mean(sparse["loss"][-20:]),
            "dense_loss": statistics.mean(dense["loss"][-20:]),
        }
        written += [{"workload": name, **row, **losses, **columns} for row in rows]
        seconds = time.perf_counter() - started
        print(
            f"\n{name}, {seconds:.0f} s, losses at the end {losses['topk_loss']:.3g}, dense {losses['dense_loss']:.3g}"
        )
        print(*verdict(rows), sep="\n")
    RESULTS.mkdir(exist_ok=True)
    write(RESULTS / "observations.csv", written)
    draw(workloads, RESULTS / "observations.png")


if __name__ == "__main__":
    main()
