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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
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
from reproductions.gaussiank_contraction import contraction, random_contractions

BATCH = 8
"""Number of examples of a rank per step."""
DENSITY = 0.001
DENSITIES = (0.001, 0.01, 0.1)
WHOLE = "whole model"
COLORS = ("#E69F00", "#009E73", "#332288")
"""Of the first step, one in the middle, and the last one."""

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
        said.append(
            f"The {name} has {tally(true(mine['bell_shaped']))}; at the end top-k leaves {left} of its u, and its "
            f"loss is {last['topk_loss']:.2f} (dense: {last['dense_loss']:.2f})."
        )
    below = [true(table[f"below_square_{density:g}"]) for density in DENSITIES]
    wider = later["times_dense_std"].dropna() > 1
    bells = true(judged["bell_shaped"])
    large = table[table["numel"] >= LEAST]
    top, random = ([large[f"{name}_{density:g}"].mean() for density in DENSITIES] for name in ("left", "randk_left"))
    on_bound = all(abs(left / (1 - density) - 1) < 0.02 for left, density in zip(random, DENSITIES, strict=True))
    yes = bool(bells.mean() >= 0.9 and all(part.all() for part in below) and wider.all() and on_bound)
    return (
        f"{held(yes)}u is bell-shaped in {tally(bells)} layers × steps. {' '.join(said)} After the first step, u is "
        f"wider than the gradient of dense training in {tally(wider)} cases. At k/d = "
        f"{', '.join(f'{density:g}' for density in DENSITIES)} top-k leaves less than (1 − k/d)² in "
        f"{', '.join(tally(part) for part in below)} cases. Of layers with at least {LEAST:,} entries, TopK leaves "
        f"{', '.join(f'{left:.3f}' for left in top)} on average, and RandK "
        f"{', '.join(f'{left:.3f}' for left in random)}."
    )


def true(column: pd.Series) -> pd.Series:
    """Return which of the non-empty cells contain True."""
    return column[column != ""].astype(str) == "True"


def tally(held: pd.Series) -> str:
    """Return "n of m": the number of true cases and of all cases."""
    return f"{int(held.sum())} of {len(held)}"


def draw(table: pd.DataFrame) -> Any:
    """Draw, for each network, the distribution of u, the share of bell-shaped layers and the rest after top-k."""
    networks = list(table.groupby("network", sort=False))
    figure, panels = plots.panels(3, len(networks), 6.6, sharey="row")
    shapes, bells, left = panels
    for (name, found), shape, bell, rest in zip(networks, shapes, bells, left, strict=True):
        shape.set_title(name)
        draw_shape(shape, found[found["layer"] == WHOLE])
        draw_bells(bell, found[(found["layer"] != WHOLE) & (found["bell_shaped"] != "")])
        draw_left(rest, found)
    shapes[0].set_ylabel("share of entries in\n¼ σ (log scale)")
    bells[0].set_ylabel("layers with\na bell shape, %")
    left[0].set_ylabel(f"‖u − C(u)‖² / ‖u‖²\nat k/d = {DENSITIES[1]:g}")
    for row in panels:
        row[0].yaxis.label.set_multialignment("center")
    handles, labels = shapes[0].get_legend_handles_labels()
    more, names = left[0].get_legend_handles_labels()
    figure.legend(handles + more, labels + names, loc="outside lower center", ncols=4, frameon=False)
    layers = table[table["layer"] != WHOLE]
    judged, wider = layers[layers["bell_shaped"] != ""], layers[layers["step"] > 1]["times_dense_std"].dropna() > 1
    shares = {name: true(mine["bell_shaped"]).mean() for name, mine in judged.groupby("network", sort=False)}
    below = [true(table[f"below_square_{density:g}"]) for density in DENSITIES]
    bell = ", ".join(f"{100 * share:.0f} % ({name})" for name, share in shares.items())
    finding = (
        f"u is bell-shaped in {bell} of layers and steps; top-k leaves less than (1 − k/d)² of it in "
        f"{sum(map(sum, below)):,} of {sum(map(len, below)):,} cases"
    )
    task = (
        "Shi et al. 2019: u = gradient + residual, training with top-k at density 0.001. Top row: all layers together. "
        f"After the first step u is wider than the gradient of dense training in {tally(wider)} cases."
    )
    plots.headline(figure, finding, task)
    return figure


def draw_shape(panel: Any, whole: pd.DataFrame) -> None:
    """Draw histograms of the whole model at the first step, one in the middle, and the last one."""
    normal = np.exp(-(MIDDLES**2) / 2) / math.sqrt(2 * math.pi) * 2 * REACH / BINS
    whole = whole[whole["histogram"] != ""]
    for place, color in zip(dict.fromkeys((0, len(whole) // 2, len(whole) - 1)), COLORS, strict=False):
        share = np.array(whole["histogram"].iloc[place].split(), dtype=float)
        step = whole["step"].iloc[place]
        panel.step(MIDDLES, np.where(share > 0, share, np.nan), where="mid", color=color, label=f"u, step {step}")
    panel.plot(MIDDLES, normal, "--", color="#CC79A7", label="normal distribution")
    panel.set(yscale="log", ylim=(1e-5, 1), xlim=(-REACH, REACH), xlabel="σ from the mean")


def draw_bells(panel: Any, judged: pd.DataFrame) -> None:
    """Draw the share of layers that are bell-shaped at each step."""
    shares = {step: 100 * true(mine["bell_shaped"]).mean() for step, mine in judged.groupby("step")}
    panel.bar([str(step) for step in shares], list(shares.values()), color=plots.color("topk"), width=0.7)
    panel.grid(visible=False, axis="x")
    panel.set(ylim=(0, 104), xlabel="step")


def draw_left(panel: Any, found: pd.DataFrame) -> None:
    """Draw the remaining share at one density against steps, for the model and its layers, with both bounds."""
    density = DENSITIES[1]
    whole, layers = found[found["layer"] == WHOLE], found[(found["layer"] != WHOLE) & (found["numel"] >= LEAST)]
    by_step = layers.groupby("step")[f"left_{density:g}"]
    panel.axhline(1 - density, color="k", lw=1, label="1 − k/d, bound for any u")
    panel.axhline((1 - density) ** 2, color="#CC79A7", ls=":", label="(1 − k/d)²")
    blue = plots.color("topk")
    panel.fill_between(by_step.min().index, by_step.min(), by_step.max(), color=blue, alpha=0.2, label="top-k: layers")
    panel.plot(whole["step"], whole[f"left_{density:g}"], ".-", color=blue, label=f"top-k: {WHOLE}")
    panel.set(xscale="log", xlabel="step (log scale)", ylim=(0, 1.04))


FINDING = Finding(
    "gaussiank-distributions",
    {"steps": 300, "ranks": 2, "seed": 0, "draws": 100},
    ("network",),
    cases,
    run,
    draw,
    verdict,
)
