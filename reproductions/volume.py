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
CAPTION = """Filled: the busiest worker; open: the average one, where it sends less. Points lie above their lines by \
their headers: about 16 bytes to each other worker.
gaussiank has room for 4k/3 entries. The line of gtopk is a tree and a broadcast; pairwise swaps need half of it, and \
two rounds more where P is no power of 2.
scalecom: the leader of the step is the busiest. 8 a node: what leaves the node, by each of its workers."""


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
    """Return a run for each number of ranks, method and encoding."""
    return [
        {"method": name, "index_format": form if has_indices(name) else "", "ranks": ranks}
        for ranks in RANKS
        if ranks <= config["most"]
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
    cheaper = [count for count in ranks if tree[count] < top[count]]
    # Compare powers of two, for which the swaps need no additional rounds.
    yes = bool(cheaper) and tree[last] / tree[first] < 2 * math.log2(last) < top[last] / top[first]
    return (
        f"{held(yes)}from {first} to {last} ranks what TopK sends grows {top[last] / top[first]:.0f} times, and what "
        f"gTopK sends {tree[last] / tree[first]:.1f} times; gTopK sends less than TopK with "
        f"{', '.join(map(str, cheaper))} ranks, {top[last] / tree[last]:.1f} times less with {last}, where dense "
        f"gradients are {dense[last] / tree[last]:,.0f} times as large."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw bytes against the number of ranks, in the papers' encoding and in this package's."""
    table = table.query("published_words > 0")  # a single node sends nothing
    numel, k = table["elements"].iloc[0], table["k"].iloc[0]
    figure, (panels,) = plots.panels(1, 2, (13, 6))
    for panel, form in zip(panels, FORMATS, strict=True):
        unit = 4 * k if form == "int32" else 1000
        for name, published in PUBLISHED.items():
            mine = table[(table["method"] == name) & table["index_format"].isin(["", form])]
            if mine.empty:
                continue
            color, ranks = plots.line(name)["color"], mine["ranks"]
            label = f"{name}: {published.formula}" if form == "int32" else name
            line = 4 * mine["published_words"] if form == "int32" else mine["announced_bytes"]
            hidden = form == "int32" and name == "gaussiank"  # the line of topk
            panel.plot(ranks, line / unit, color=color, linewidth=0 if hidden else 1.2, alpha=0.8)
            for column, fill in (("mean_bytes", "none"), ("busiest_bytes", color)):
                panel.plot(ranks, mine[column] / unit, "o", color=color, markerfacecolor=fill, markersize=5)
            # If lines end close together, shift one label up and the other down.
            shift = {"gaussiank": 4, "topk": -4, "scalecom": 3, "randk": 2}.get(name, 0 if name in METHODS else -8)
            end = (ranks.iloc[-1], mine["busiest_bytes"].iloc[-1] / unit)
            panel.annotate(label, end, (8, shift), textcoords="offset points", va="center", color=color, fontsize=8)
        panel.set(xscale="log", yscale="log", xlabel="workers P", xticks=RANKS, xticklabels=map(str, RANKS))
        panel.set_xlim(1.8, 64 * 5.5 if form == "int32" else 64 * 3)
        panel.minorticks_off()
    title = "int32 indices, fp32 values\nlines: the papers' formulas"
    panels[0].set(ylabel="words of 4 bytes, divided by k", title=title)
    title = "as sent by default: compact indices, fp32 values\nlines: what the methods announce, without headers"
    panels[1].set(ylabel="kB", title=title)
    figure.suptitle(f"Sent by a worker in a step: {numel:,} elements, k = {k:,}")
    figure.supxlabel(CAPTION, fontsize=8)
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
