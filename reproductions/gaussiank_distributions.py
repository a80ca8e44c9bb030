"""Measures the distribution of u = gradient + residual in real trainings, and its share without the largest entries.

Shi et al. 2019, arXiv 1911.08772, observe that u is bell-shaped in every layer of an MLP, ResNet-20, VGG-16 and an
LSTM. It is wider than the gradient of dense training. Without the k largest of its d entries, far less than 1 − k/d of
‖u‖² remains, even less than (1 − k/d)². Without k random entries, 1 − k/d remains on average.

Here each network is trained with top-k at density 0.001, and with dense gradients, by threads as ranks. The optimizer
is SGD with Nesterov momentum 0.9 and one cycle of the learning rate. Both trainings have the same initial weights and
examples. u is rank 0's, before any exchange; in dense training it is the gradient. `bells` defines "bell-shaped".
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from examples.data.digits import digits
from examples.models import LSTM, VGG16, ResNet20
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.methods import Method, method
from lightning_sparse.observer import Observer
from lightning_sparse.reducer import Reducer
from reproductions.bells import BINS, LEAST, MIDDLES, REACH, judge, summarize
from reproductions.digits import network
from reproductions.frame import Config, Finding, held
from reproductions.gaussiank_contraction import contraction, of_normal, random_contractions

BATCH = 8
"""Number of examples of a rank per step."""
DENSITY = 0.001
DENSITIES = (0.001, 0.01, 0.1)
WHOLE = "whole model"
COLUMNS = 7
RANDK = plots.line("randk")["color"]
COLORS = ("0.8", "0.6", "C1", "C2", "C0", "k")  # light for early steps, black for the last
TICKS = (0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)

Examples = tuple[Tensor, Tensor]
"""Inputs and targets; the first dimension is the number of examples."""


@dataclass(frozen=True)
class Workload:
    """A training: functions that create the network from a seed and the examples, and the highest learning rate."""

    network: Callable[[int], nn.Module]
    examples: Callable[[], Examples]
    lr: float


def images(size: int) -> Examples:
    """Return the digits, fp32 (1500, 1, size, size), and their labels."""
    train_set, _ = digits()
    return interpolate(train_set.images, size=size), train_set.labels


def text(length: int = 64) -> Examples:
    """Return byte sequences of the standard library's source and their following bytes, both int64 (n, length)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    count = (len(data) - 1) // length
    return data[: count * length].view(count, length), data[1 : count * length + 1].view(count, length)


WORKLOADS = {
    "MLP": Workload(lambda seed: network(256, seed), lambda: images(8), 0.1),
    "ResNet-20": Workload(lambda _: ResNet20(in_channels=1), lambda: images(8), 0.1),
    "VGG-16": Workload(lambda _: VGG16(in_channels=1, width=16), lambda: images(32), 0.1),
    "LSTM": Workload(lambda _: LSTM(), text, 2.0),
}


class Look(Observer):
    """Copies u of the last step, and checks that it is the gradient plus the residual."""

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        self.segment, self.u = ctx.segment, torch.cat(grads) + ctx.state.get("residual", 0.0)

    def compensated(self, u: Tensor, ctx: Context) -> None:
        if not torch.equal(u, self.u):
            raise RuntimeError(f"Step {ctx.step}: u is not the gradient plus the residual.")


@dataclass
class Recorded:
    """Observations of rank 0: u by step, the layers' positions in u, and the loss of every step."""

    layers: dict[str, tuple[int, int]] = field(default_factory=dict)
    u: dict[int, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def shown(steps: int) -> list[int]:
    """Return the steps, counted from 1, whose u is observed."""
    return sorted({step for step in (1, 3, 10, 30, 100) if step < steps} | {steps})


def train(workload: Workload, chosen: Method, config: Config) -> Recorded:
    """Train, and return rank 0's observations.

    Raises:
        RuntimeError: u is not the gradient plus the residual, or the residual is not u without its largest entries.
    """
    inputs, targets = workload.examples()
    recorded, looks = Recorded(), shown(config["steps"])
    nets = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(config["ranks"]):
            torch.manual_seed(config["seed"])
            nets.append(workload.network(config["seed"]))

    def rank(comm: Comm) -> None:
        net, look = nets[comm.rank], Look()
        params = dict(net.named_parameters())
        optimizer = torch.optim.SGD(net.parameters(), workload.lr, momentum=0.9, nesterov=True)
        steps = config["steps"]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, workload.lr, max(2, steps), cycle_momentum=False)
        # With one segment, TopK selects the k largest entries of the whole model.
        reducer = Reducer(chosen, comm, seed=config["seed"], granularity="model")
        generator = torch.Generator().manual_seed(1000 * config["seed"] + comm.rank)
        for step in range(1, steps + 1):
            picked = torch.randint(len(inputs), (BATCH,), generator=generator)
            loss = cross_entropy(net(inputs[picked]).flatten(0, -2), targets[picked].flatten())
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
            reducer.observers = [look] if not comm.rank and step in looks else []
            reducer.reduce_(grads)
            for name, param in params.items():
                param.grad = grads[name]
            optimizer.step()
            schedule.step()
            if not comm.rank:
                recorded.losses.append(loss.item())
            if reducer.observers:
                keep(look, reducer.states[0], step, recorded)

    simulate(config["ranks"], rank)
    return recorded


def keep(look: Look, state: Mapping[str, Tensor], step: int, recorded: Recorded) -> None:
    """Compare u with the new residual, and record it."""
    segment, u = look.segment, look.u
    if "residual" in state and not torch.equal(state["residual"], u.index_fill(0, TopK(DENSITY).select(u), 0.0)):
        raise RuntimeError(f"Step {step}: the residual is not u without its largest entries.")
    places = zip(segment.bounds, segment.bounds[1:], strict=False)
    recorded.layers, recorded.u[step] = dict(zip(segment.names, places, strict=True)), u


def parts(recorded: Recorded, step: int) -> Iterator[tuple[str, Tensor]]:
    """Yield u of the whole model and of each layer, in the model's order."""
    u = recorded.u[step]
    yield WHOLE, u
    for name, (start, stop) in reversed(recorded.layers.items()):
        yield name, u[start:stop]


def rows(sparse: Recorded, dense: Recorded, config: Config) -> Iterator[Row]:
    """Yield, for each step and layer, statistics of u and its remaining share without the largest or random entries.

    Raises:
        RuntimeError: more than 1 − k/d remains without the largest entries.
    """
    for step in sparse.u:
        for (name, u), (_, gradient) in zip(parts(sparse, step), parts(dense, step), strict=True):
            summary, std = summarize(u), summarize(gradient)["std"]
            row = {"step": step, "layer": name, "numel": u.numel(), **summary}
            row |= {"times_dense_std": summary["std"] / std if std else math.nan}
            if u.numel() >= LEAST and summary["std"] > 0:
                row |= judge(u, summary)
            for density in DENSITIES if u.any() else ():
                k, left = contraction(u, TopK(density))
                bound = 1 - k / u.numel()
                if not left <= bound + 1e-9:
                    raise RuntimeError(f"Step {step}, {name}: top {k} of {u.numel()} leave {left}, more than {bound}.")
                row |= {f"left_{density:g}": left, f"below_square_{density:g}": left < bound**2}
                randoms = random_contractions(u, density, config["draws"], config["seed"])
                row[f"randk_left_{density:g}"] = float(np.mean(randoms))
            yield row


def cases(config: Config) -> list[Row]:
    """Return a run for each network."""
    return [{"network": name} for name in WORKLOADS]


def run(case: Row, config: Config) -> list[Row]:
    """Train with top-k and with dense gradients, and return a row per step and layer."""
    workload = WORKLOADS[case["network"]]
    sparse, dense = (train(workload, chosen, config) for chosen in (method("topk", density=DENSITY), method("dense")))
    if not torch.equal(sparse.u[1], dense.u[1]):
        raise RuntimeError(f"{case['network']}: the trainings did not start from the same weights and examples.")
    losses = {
        f"{name}_loss": float(np.mean(found.losses[-20:])) for name, found in (("topk", sparse), ("dense", dense))
    }
    return [row | losses for row in rows(sparse, dense, config)]


def verdict(table: pd.DataFrame) -> str:
    """Say for how many layers and steps each observation held."""
    layers, later = table[table["layer"] != WHOLE], table[(table["layer"] != WHOLE) & (table["step"] > 1)]
    judged = layers[layers["bell_shaped"] != ""]
    said = []
    for name in table["network"].unique():
        mine, end = judged[judged["network"] == name], table[table["network"] == name]
        last = end[(end["layer"] == WHOLE) & (end["step"] == end["step"].max())].iloc[0]
        left = ", ".join(f"{last[f'left_{density:g}']:.3g}" for density in DENSITIES)
        losses = f"loss {last['topk_loss']:.2f}, dense {last['dense_loss']:.2f}"
        said.append(f"{name} {tally(true(mine['bell_shaped']))} (at the end the whole model leaves {left}; {losses})")
    below = [true(table[f"below_square_{density:g}"]) for density in DENSITIES]
    wider = later["times_dense_std"].dropna() > 1
    bells = true(judged["bell_shaped"])
    large = table[table["numel"] >= LEAST]
    top, random = ([large[f"{name}_{density:g}"].mean() for density in DENSITIES] for name in ("left", "randk_left"))
    on_bound = all(abs(left / (1 - density) - 1) < 0.02 for left, density in zip(random, DENSITIES, strict=True))
    yes = bool(bells.mean() >= 0.9 and all(part.all() for part in below) and wider.all() and on_bound)
    return (
        f"{held(yes)}u is bell-shaped in {tally(bells)} layers × steps: {', '.join(said)}. It is wider than dense's "
        f"gradient after the first step in {tally(wider)}. Top k leaves less than (1 − k/d)² in "
        f"{', '.join(tally(part) for part in below)} at k/d = {', '.join(f'{density:g}' for density in DENSITIES)}. "
        f"Of {LEAST:,} entries or more TopK leaves {', '.join(f'{left:.3f}' for left in top)} on average, and RandK "
        f"{', '.join(f'{left:.3f}' for left in random)}."
    )


def true(column: pd.Series) -> pd.Series:
    """Return which of the non-empty cells contain True."""
    return column[column != ""].astype(str) == "True"


def tally(held: pd.Series) -> str:
    """Return "n of m": the number of true cases and of all cases."""
    return f"{int(held.sum())} of {len(held)}"


def draw(table: pd.DataFrame) -> Any:
    """Draw, for each network, the layers' histograms, and below them contraction and width against steps."""
    networks = list(table.groupby("network", sort=False))
    counts = [found[found["histogram"] != ""]["layer"].nunique() for _, found in networks]
    lines = [math.ceil((count + 1) / COLUMNS) for count in counts]  # with a panel for the legend
    heights = [part for count in lines for part in (1.8 * count + 0.5, 3.2)]
    figure = plt.figure(figsize=(15, sum(heights)))
    areas: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    for (name, found), above, below, count in zip(networks, areas[::2], areas[1::2], lines, strict=True):
        above.suptitle(f"{name}: how u = gradient + residual is distributed, layer by layer", fontweight="bold")
        below.suptitle(f"{name}: what the k largest entries leave behind, and how wide u is", fontweight="bold")
        draw_shapes(above.subplots(count, COLUMNS, sharex=True, sharey=True).ravel(), found[found["histogram"] != ""])
        draw_contraction(below.subplots(1, len(DENSITIES) + 1), found)
    return figure


def draw_shapes(panels: Sequence[Any], found: pd.DataFrame) -> None:
    """Draw each layer's histograms in one panel, and the legend in the last panel."""
    normal = np.exp(-(MIDDLES**2) / 2) / math.sqrt(2 * math.pi) * 2 * REACH / BINS
    layers = list(found.groupby("layer", sort=False))
    for panel, (name, mine) in zip(panels, layers, strict=False):
        bells = true(mine["bell_shaped"])
        colors = COLORS[-len(mine) :]
        for color, step, heights in zip(colors, mine["step"], mine["histogram"], strict=True):
            share = np.array(heights.split(), dtype=float)
            panel.step(
                MIDDLES, np.where(share > 0, share, np.nan), where="mid", color=color, lw=1, label=f"step {step}"
            )
        panel.plot(MIDDLES, normal, "C3--", lw=1, label="normal distribution")
        panel.set(yscale="log", ylim=(1e-5, 1), xlim=(-REACH, REACH))
        says = f"bell at {tally(bells)} steps; {mine['times_dense_std'].iloc[-1]:.0f} × as wide"
        color = "k" if bells.all() else "C3"
        panel.set_title(f"{name} ({mine['numel'].iloc[0]:,})\n{says}", fontsize=7, color=color)
        panel.tick_params(labelsize=7)
    for panel in panels[len(layers) :]:
        panel.axis("off")
    title = "y: share of the entries per ¼ std\nx: std from the mean\n× as wide: as dense's gradient,\nat the last step"
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", fontsize=7, title=title, title_fontsize=7)


def draw_contraction(panels: Sequence[Any], found: pd.DataFrame) -> None:
    """Draw the remaining share at each density against steps, with both bounds, and the width of u."""
    whole, layers = found[found["layer"] == WHOLE], found[(found["layer"] != WHOLE) & (found["numel"] >= LEAST)]
    for panel, density in zip(panels, DENSITIES, strict=False):
        by_step = layers.groupby("step")[f"left_{density:g}"]
        lowest, highest = by_step.min(), by_step.max()
        panel.axhline(1 - density, color="k", label="1 − k/d, for any u")
        panel.axhline((1 - density) ** 2, color="C3", ls="--", label="(1 − k/d)², for a bell-shaped u")
        panel.axhline(of_normal(density), color="0.5", ls=":", label="of a normal u")
        label = f"layers of {LEAST:,} entries or more"
        panel.fill_between(lowest.index, lowest, highest, color="C0", alpha=0.2, label=label)
        panel.plot(whole["step"], whole[f"left_{density:g}"], "C0.-", label=WHOLE)
        label = f"{WHOLE}, RandK, mean of {whole['draws'].iloc[0]} draws"
        panel.plot(whole["step"], randoms := whole[f"randk_left_{density:g}"], "x", color=RANDK, label=label)
        # The logit scale stretches both ends, so that 0.998 and 0.999 are distinguishable.
        title = f"k/d = {density:g}"
        panel.set(xscale="log", yscale="logit", xlabel="step", title=title, ylabel="‖u − C(u)‖² / ‖u‖²")
        panel.set_yticks(TICKS, map(str, TICKS), fontsize=7)
        panel.set_yticks([], minor=True)
        least, most = min(lowest.min(), whole[f"left_{density:g}"].min()), max(1 - density, randoms.max())
        panel.set_ylim(0.9 * least, 1 - 0.8 * (1 - most))
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].figure.legend(handles, labels, fontsize=7, loc="outside lower center", ncols=len(labels))
    for name in dict.fromkeys(reversed(found["layer"].tolist())):
        curve = found[found["layer"] == name]
        style = {"color": "C0", "lw": 2, "label": WHOLE} if name == WHOLE else {"color": "0.8", "lw": 0.5}
        panels[-1].plot(curve["step"], curve["times_dense_std"], **style)
    panels[-1].axhline(1, color="k")
    panels[-1].set(xscale="log", yscale="log", xlabel="step", title="std of u by that of dense's gradient")
    panels[-1].legend(fontsize=7, title="grey: every layer", title_fontsize=7)


FINDING = Finding(
    "gaussiank-distributions",
    {"steps": 300, "ranks": 2, "seed": 0, "draws": 100},
    ("network",),
    cases,
    run,
    draw,
    verdict,
)
