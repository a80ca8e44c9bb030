"""Measures the time to select k of d entries: exactly with torch, with the published GaussianK, and with this package.

Shi et al. 2019, arXiv 1911.08772: on a GPU torch's top-k is slow. Selection with an estimated threshold is far faster
for all d from 20 to 400 million. The threshold comes from mean and standard deviation, and is refined a few times. Here
a CPU selects from normal numbers. "published" is the paper's algorithm. `gaussiank` starts with the same threshold and
uses block maxima to select k entries up to a third. `topk` is exact and uses the same maxima. `benchmarks.selection`
compares more methods, also on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from reproductions.frame import Config, Finding, held

SHARES = (0.005, 0.02, 0.05, 0.2, 0.5, 1.0)
"""Values of d, as shares of the largest."""
METHODS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "torch.topk": lambda u, density: u.abs().topk(max(1, round(density * len(u)))).indices,
    "published": lambda u, density: PublishedGaussianK(density).select(u),
    "gaussiank": lambda u, density: GaussianK(density).select(u),
    "topk": lambda u, density: TopK(density).select(u),
}
LABELS = {"published": "GaussianK as published", "topk": "topk here, exact", "gaussiank": "gaussiank here"}
COLORS = {"torch.topk": "#000000", "published": "#CC79A7"}


@lru_cache(maxsize=1)
def numbers(numel: int, seed: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def cases(config: Config) -> list[Row]:
    """Return a run for each d and method.

    Raises:
        ValueError: too few elements.
    """
    if config["largest"] < 10_000:
        raise ValueError(f"--largest {config['largest']}: give at least 10,000 elements, or times are too short.")
    return [{"numel": round(share * config["largest"]), "method": name} for share in SHARES for name in METHODS]


def run(case: Row, config: Config) -> Row:
    """Check the selected entries, and return the median time of a selection."""
    u, density, select = numbers(case["numel"], config["seed"]), config["density"], METHODS[case["method"]]
    k, chosen = max(1, round(density * len(u))), select(u, density)
    if case["method"] in ("torch.topk", "topk"):
        least = float(u.abs().kthvalue(len(u) - k + 1).values)
        assert len(chosen) == k, f"{case} selects {len(chosen)} of {k} entries"
        assert float(u[chosen].abs().min()) >= least, f"{case} does not select the largest entries"
    seconds = []
    for _ in range(config["turns"]):
        started = time.process_time()
        select(u, density)
        seconds.append(time.process_time() - started)
    return {"k": k, "chosen": len(chosen), "ms": 1e3 * median(seconds)}


def verdict(table: pd.DataFrame) -> str:
    """Say whether the published algorithm is faster than torch's top-k at each d, and how fast this package is."""
    ms = table.pivot(index="numel", columns="method", values="ms")
    large = ms.loc[ms.index >= ms.index.max() / 20]
    times = large["torch.topk"] / large["published"]
    last, at = ms.iloc[-1], table["numel"].max()
    counts = table[table["method"] == "published"]
    shares = counts["chosen"] / counts["k"]
    return (
        f"{held(bool((times > 1).all()))}the published algorithm is {times.min():.1f} to {times.max():.1f}× faster "
        f"than torch.topk, and selects {shares.min():.2g} k to {shares.max():.2g} k entries. Of "
        f"{at / 1e6:,.0f} million elements torch.topk selects in {last['torch.topk']:.0f} ms, and the published "
        f"algorithm in {last['published']:.0f} ms. In this package gaussiank takes {last['gaussiank']:.0f} ms, and the "
        f"exact topk {last['topk']:.0f} ms."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw the time against d."""
    figure, ((panel,),) = plots.panels(1, 1, 4.2)
    labels = []
    for name in METHODS:
        mine = table[table["method"] == name].sort_values("numel")
        color = COLORS.get(name) or plots.color(name)
        panel.plot(mine["numel"] / 1e6, mine["ms"], "o-", color=color, label=name)
        labels.append((mine["numel"].iloc[-1] / 1e6, mine["ms"].iloc[-1], LABELS.get(name, name), color))
    panel.set(xscale="log", yscale="log", xlabel="million entries d (log scale)", ylabel="processor ms (log scale)")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:,g}")
    plots.ends(panel, labels)
    last = table.pivot(index="numel", columns="method", values="ms").iloc[-1]
    times = {name: last["torch.topk"] / last[name] for name in METHODS}
    finding = (
        f"From {table['numel'].max() / 1e6:,g} million entries GaussianK as published selects "
        f"{times['published']:.1f}× as fast as torch.topk, and the exact topk of this package "
        f"{times['topk']:.0f}× as fast"
    )
    task = f"Shi et al. 2019: choose k = {table['density'].iloc[0]:g} d of d normal numbers; one processor, medians."
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding(
    "gaussiank-selection",
    {"largest": 20_000_000, "density": 0.001, "turns": 5, "seed": 0},
    ("numel", "method"),
    cases,
    run,
    draw,
    verdict,
)
