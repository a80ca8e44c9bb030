"""Computes scaling efficiency with 32 workers at 1 Gbit/s, and with 16 workers at 10 Gbit/s.

A step takes t + work + exchange seconds, without overlap, as in the papers. Scaling efficiency is t divided by this
sum.

- t: published time of forward and backward.
- work: time of a rank to add a gradient of the model's length to its residual, and to select, encode, decode and write
  back entries. It is measured: all ranks run as threads that take turns on one core, if the system allows this. The
  result is the median of their processor seconds in the last step.
- exchange: computed time. A message takes the link's latency plus its bytes divided by the bandwidth. The bytes are
  counted in the measured step. The number of messages comes from the aggregator.

Dense gradients use a ring all-reduce without any work, which favours them.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd
import torch

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.methods import method
from lightning_sparse.reducer import Reducer
from reproductions.frame import Config, Finding, held


class Model(NamedTuple):
    """A model of the gTopK paper.

    Attributes:
        elements: number of elements of its gradient.
        seconds: time of forward and backward on the authors' GPU.
        published: efficiency of dense, TopK and gTopK with 32 workers at 1 Gbit/s, in per cent.
    """

    elements: int
    seconds: float
    published: tuple[float, float, float]


class Network(NamedTuple):
    """Number of workers, and latency (seconds) and bandwidth (bytes per second) of each worker's link."""

    workers: int
    latency: float
    bandwidth: float


MODELS = {
    "ResNet-20": Model(272_474, 0.146, (31.3, 75.6, 85.7)),
    "VGG-16": Model(14_728_266, 0.140, (0.96, 4.78, 9.35)),
    "ResNet-50": Model(25_557_032, 4.88, (20.3, 57.8, 74.0)),
}
"""With 32 ranks on one machine, ResNet-50 needs more than 24 GB and VGG-16 13 GB. `--largest` selects the models."""
NETWORKS = {
    "1 Gbit/s": Network(32, 0.436e-3, 1 / 9e-9),  # as measured in the gTopK paper
    "10 Gbit/s": Network(16, 5e-5, 1.25e9),  # rate of the GaussianK paper; the latency is an assumption
}
PUBLISHED = ("dense", "topk", "gtopk")
METHODS = ("dense", "topk", "gaussiank", "gtopk")
STEPS = 3
"""Number of steps. The first step initialises thresholds and allocates memory."""


def cases(config: Config) -> list[Row]:
    """Return a run for each network, model and method."""
    models = [name for name, model in MODELS.items() if model.elements <= config["largest"]]
    if not models:
        raise ValueError(f"--largest {config['largest']}: the smallest model has {MODELS['ResNet-20'].elements}.")
    return [{"link": link, "model": model, "method": name} for link in NETWORKS for model in models for name in METHODS]


def run(case: Row, config: Config) -> Row:
    """Let all ranks reduce gradients of a model's length, and compute the time of a step."""
    model, network = MODELS[case["model"]], NETWORKS[case["link"]]
    if case["method"] == "dense":
        nbytes = round(2 * 4 * model.elements * (network.workers - 1) / network.workers)
        work, messages = 0.0, 2 * (network.workers - 1)
    else:
        work, nbytes = reduced(case["method"], model.elements, network.workers, config["density"])
        messages = method(case["method"]).aggregator.messages(network.workers)
    exchange = messages * network.latency + nbytes / network.bandwidth
    return {
        "workers": network.workers,
        "compute_s": model.seconds,
        "work_s": work,
        "messages": messages,
        "sent_bytes": nbytes,
        "exchange_s": exchange,
        "efficiency_percent": 100 * model.seconds / (model.seconds + work + exchange),
    }


def reduced(name: str, numel: int, workers: int, density: float) -> tuple[float, int]:
    """Return the median of the ranks' processor seconds, and the largest number of bytes, in the last step."""

    def rank(comm: Comm) -> tuple[float, int, float]:
        reducer = Reducer(method(name, density=density), comm, granularity="model")
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            grads = {"w": torch.randn(numel, generator=random)}
            started, sent = time.thread_time(), comm.sent_bytes
            reducer.reduce_(grads)
            spent, sent = time.thread_time() - started, comm.sent_bytes - sent
        return spent, sent, grads["w"].double().square().sum().item()

    with one_processor():
        ranks = simulate(workers, rank)
    if any(norm != ranks[0][2] or norm == 0 for _, _, norm in ranks):
        raise RuntimeError(f"{name}: ranks of {workers} differ in the result, or it is zero.")
    return statistics.median(spent for spent, _, _ in ranks), max(sent for _, sent, _ in ranks)


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    """Keep this thread and its child threads on one core, because on several cores Python threads slow each other."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def speedups(table: pd.DataFrame, link: str, ours: str, other: str) -> tuple[float, float]:
    """Return the smallest and the largest speed-up over all models, of one method over another on a link."""
    steps = table[table["link"] == link].set_index(["method", "model"])["efficiency_percent"]
    times = steps[ours] / steps[other]
    return times.min(), times.max()


def verdict(table: pd.DataFrame) -> str:
    """Give the speed-up of gTopK over dense and TopK, and of GaussianK over dense."""
    dense = speedups(table, "1 Gbit/s", "gtopk", "dense")
    top = speedups(table, "1 Gbit/s", "gtopk", "topk")
    fast = speedups(table, "10 Gbit/s", "gaussiank", "dense")
    said = ["{:.2f} to {:.2f}".format(*times) for times in (dense, top, fast)]
    return (
        f"{held(min(*dense, *top) > 1)}with 32 workers at 1 Gbit/s, gTopK is {said[0]}× faster than dense gradients "
        f"over a ring (published: 2.7 to 12×). It is {said[1]}× faster than TopK (published: 1.1 to 1.7×). "
        f"{held(min(fast) > 1)}with 16 workers at 10 Gbit/s, GaussianK on a CPU is {said[2]}× faster than dense "
        f"gradients (published, on GPUs: 1.19 to 2.33×)."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw measured and published efficiency, with one panel per network and model."""
    models = [name for name in MODELS if name in set(table["model"])]
    figure, panels = plots.panels(len(models), len(NETWORKS), 0.9 + 1.7 * len(models), sharex=True)
    for line, model in zip(panels, models, strict=True):
        for panel, (link, network) in zip(line, NETWORKS.items(), strict=True):
            mine = table[(table["link"] == link) & (table["model"] == model)].set_index("method")["efficiency_percent"]
            names, values = list(METHODS), [mine[name] for name in METHODS]
            texts = [f"{value:.0f}" for value in values]
            if link == "1 Gbit/s":
                for name, value in zip(PUBLISHED, MODELS[model].published, strict=True):
                    place = names.index(name)
                    panel.plot(value, place, "D", ms=7, mfc="white", mec="black", mew=1.3, clip_on=False, zorder=3)
                    texts[place] += f"   (published: {value:.0f})"
            plots.bars(panel, names, values, [plots.color(name) for name in names], texts)
            panel.set(xlim=(0, 150), title=f"{model}, {network.workers} workers, {link}")
            panel.set_xticks(range(0, 101, 20))
    for panel in panels[-1]:
        panel.set_xlabel("scaling efficiency, %")
    dense, top = (speedups(table, "1 Gbit/s", "gtopk", other) for other in ("dense", "topk"))
    finding = (
        f"At 1 Gbit/s gtopk takes steps {dense[0]:.1f} to {dense[1]:.1f}× as fast as dense gradients (published: "
        f"2.7 to 12×) and {top[0]:.2f} to {top[1]:.2f}× as fast as topk (1.1 to 1.7×)"
    )
    task = (
        "Share of a step that is computation: published compute times, the work of all ranks measured on a "
        "processor, the exchange computed. White diamonds: Shi et al. 2019, on GPUs."
    )
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding(
    "scaling-efficiency",
    {"density": 0.001, "largest": 16_000_000},
    ("link", "model", "method"),
    cases,
    run,
    draw,
    verdict,
)
