"""Counts the bytes that a worker sends in a step, with 2 to 64 workers.

Ranks are threads, and `Comm` counts the bytes that each rank sends, including headers. Nothing is timed. Before a
result is written, two checks are made. The averages must be equal on all ranks, and averages and residuals must add up
to the gradients.

Columns besides the bytes of the busiest and of the average rank:

- `announced_bytes`: mean bytes by the method's own formula, with this package's encodings, without headers
  (`Routing.nbytes`);
- `published_words`: the papers' formula, in words of 4 bytes. The papers assume the encoding `index_format` "int32"
  with fp32 values.

The step is the first one, which sends the most bytes: OkTopK agrees on its regions in one of 64 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.ticker import NullLocator
from torch import Tensor

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.compressors import TopK
from lightning_sparse.methods import METHODS, Method, method
from lightning_sparse.reducer import Reducer
from reproductions.frame import Config, Finding, held

RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PER_NODE = 8
FORMATS = ("int32", "compact")


class Published(NamedTuple):
    """Number of 4-byte words that a rank sends according to a paper, as text and as a function of d, k and P."""

    formula: str
    words: Callable[[float, float, float], float]


PUBLISHED = {
    "dense": Published("2d(P − 1)/P", lambda d, k, p: 2 * d * (p - 1) / p),
    "topk": Published("2k(P − 1)", lambda d, k, p: 2 * k * (p - 1)),
    "gaussiank": Published("2k(P − 1)", lambda d, k, p: 2 * k * (p - 1)),
    "randk": Published("2k(P − 1)/P", lambda d, k, p: 2 * k * (p - 1) / p),
    "gtopk": Published("4k log₂P", lambda d, k, p: 4 * k * math.log2(p)),
    "oktopk": Published("6k(P − 1)/P", lambda d, k, p: 6 * k * (p - 1) / p),
    "scalecom": Published("k + 2k(P − 1)/P", lambda d, k, p: k + 2 * k * (p - 1) / p),
    "topk, 8 a node": Published("2(k/8)(P/8 − 1)", lambda d, k, p: 2 * k / 8 * (p / 8 - 1)),
}


def make(name: str, density: float, index_format: str) -> Method:
    """Return a method of `PUBLISHED`."""
    if name not in METHODS:
        compressor = TopK(density, index_format)  # type: ignore[arg-type]
        return Method(compressor, aggregator=TwoLevel(ranks_per_node=PER_NODE))
    options = {"index_format": index_format} if has_indices(name) else {}
    return method(name, density=None if name == "dense" else density, **options)


def has_indices(name: str) -> bool:
    """Return whether the index format has an effect. ScaleCom always sends int32."""
    return name not in ("dense", "randk", "scalecom")


def measure(name: str, ranks: int, numel: int, density: float, index_format: str) -> Row:
    """Run one step on all ranks, check averages and residuals, and return a row."""

    def gradient(rank: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank))

    def step(comm: Comm) -> tuple[Tensor, Tensor | None, int, float]:
        reducer = Reducer(make(name, density, index_format), comm, granularity="model")
        grads = {"w": gradient(comm.rank)}
        reducer.reduce_(grads)
        kept = reducer.states[0].get("residual")
        return grads["w"], kept, comm.sent_bytes, reducer.routing.nbytes(None)

    answers = simulate(ranks, step)
    agreed = answers[0][0]
    lost, largest = -ranks * agreed.double(), 0.0
    for rank, (result, kept, _, _) in enumerate(answers):
        if not torch.equal(result, agreed):
            raise RuntimeError(f"{name}: ranks 0 and {rank} of {ranks} differ in the result.")
        given = gradient(rank)
        lost += given if kept is None else given - kept
        largest = max(largest, given.abs().max().item())
    # Values up to `largest` are divided, added P times and subtracted. Each rounding error is at most 2⁻²⁴ · `largest`.
    if lost.abs().max() > (ranks + 2) * ranks * largest * 2**-24:
        raise RuntimeError(f"{name}: {lost.abs().max():g} of an entry is lost with {ranks} ranks.")
    sent = [result[2] for result in answers]
    k = round(density * numel)
    return {
        "k": k,
        "busiest_bytes": max(sent),
        "mean_bytes": f"{sum(sent) / ranks:.1f}",
        "announced_bytes": f"{answers[0][3]:.1f}",
        "published_words": f"{PUBLISHED[name].words(numel, k, ranks):.1f}",
    }


def cases(config: Config) -> list[Row]:
    """Return a run for each number of ranks, method and encoding.

    Raises:
        ValueError: there are too few ranks, or the density leaves no element.
    """
    most, elements, density = config["most"], config["elements"], config["density"]
    if most < min(RANKS) or round(density * elements) < 1:
        given = f"--most {most} --elements {elements} --density {density}"
        raise ValueError(f"{given}: at least two ranks must send at least one entry.")
    return [
        {"method": name, "index_format": form if has_indices(name) else "", "ranks": ranks}
        for ranks in RANKS
        if ranks <= most
        for name in PUBLISHED
        for form in (FORMATS if has_indices(name) else FORMATS[:1])
        if name in METHODS or ranks % PER_NODE == 0
    ]


def run(case: Row, config: Config) -> Row:
    """Run one step for a case."""
    form = case["index_format"] or FORMATS[0]
    return measure(case["method"], case["ranks"], config["elements"], config["density"], form)


def verdict(table: pd.DataFrame) -> str:
    """Give the growth of gTopK's and TopK's bytes with the number of ranks, and when gTopK sends less than TopK."""
    int32 = table[table["index_format"].isin(["", "int32"])].set_index(["method", "ranks"])["busiest_bytes"]
    top, tree, dense = int32["topk"], int32["gtopk"], int32["dense"]
    ranks = table["ranks"].unique()
    first, last = ranks.min(), ranks.max()
    cheaper = [str(count) for count in ranks if tree[count] < top[count]]
    # Compare powers of two, for which the swaps need no additional rounds.
    yes = bool(cheaper) and tree[last] / tree[first] < 2 * math.log2(last) < top[last] / top[first]
    return (
        f"{held(yes)}from {first} to {last} ranks, the bytes of TopK grow {top[last] / top[first]:.0f}×, and those of "
        f"gTopK {tree[last] / tree[first]:.1f}×. With {', '.join(cheaper) or 'none of these numbers of'} ranks, gTopK "
        f"sends less than TopK. With {last} ranks, TopK sends {top[last] / tree[last]:.1f}× the bytes of gTopK, and "
        f"dense training {dense[last] / tree[last]:,.0f}×."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw bytes against the number of ranks, in the papers' encoding and in this package's."""
    table = table.query("published_words > 0")  # a single node sends nothing
    numel, k = table["elements"].iloc[0], table["k"].iloc[0]
    figure, (panels,) = plots.panels(1, 2, 4.6, sharey=True)
    for panel, form in zip(panels, FORMATS, strict=True):
        labels = []
        for name in [name for name in PUBLISHED if name != "gaussiank"]:
            mine = table[(table["method"] == name) & table["index_format"].isin(["", form])]
            if mine.empty:
                continue
            color, ranks, sent = plots.color(name), mine["ranks"], mine["busiest_bytes"] / 1e3
            line = 4 * mine["published_words"] if form == "int32" else mine["announced_bytes"]
            panel.plot(ranks, line / 1e3, color=color, linewidth=1.2, label=name)
            panel.plot(ranks, sent, "o", color=color, markersize=4)
            labels.append((ranks.iloc[-1], sent.iloc[-1], name, color))
        shown = [count for count in (2, 4, 8, 16, 32, 64) if count <= table["ranks"].max()]
        panel.set(xscale="log", yscale="log", xlabel="workers P (log scale)")
        panel.set_xticks(shown, map(str, shown))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter("{x:,g}")
        plots.ends(panel, labels, reach=7)
    panels[0].set_title("int32 indices; lines: the papers' formulas")
    panels[1].set_title("default: packed indices; lines: cost model")
    panels[0].set_ylabel("kB that the busiest worker sends (log scale)")
    int32 = table[table["index_format"].isin(["", "int32"])].set_index(["method", "ranks"])["busiest_bytes"]
    last = table["ranks"].max()
    finding = (
        f"With {last} workers gtopk sends {int32['topk', last] / int32['gtopk', last]:.1f}× less than topk, and "
        f"scalecom {int32['topk', last] / int32['scalecom', last]:.0f}× less"
    )
    task = (
        f"One step: {numel:,} elements, k = {k:,}. Dots: counted, headers included. gaussiank sends up to 4/3 of topk."
    )
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding(
    "volume",
    {"elements": 1_000_000, "density": 0.001, "most": 64},
    ("method", "index_format", "ranks"),
    cases,
    run,
    draw,
    verdict,
)
