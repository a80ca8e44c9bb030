"""Measures the part of a Gaussian vector that remains without its k largest entries, and without k random entries.

Shi et al. 2019, arXiv 1911.08772: with any k-contraction, at most (1 − k/d)‖u‖² of u remains. RandK reaches this bound
on average. But for bell-shaped u, less than (1 − k/d)²‖u‖² remains with TopK (their Theorem 1). Here u consists of
normal numbers, as in the paper. `gaussiank_distributions` does the same for u of real trainings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from scipy import special
from torch import Tensor

from benchmarks.harness import plots
from benchmarks.harness.table import Row
from lightning_sparse.compressors import Sparsifier, TopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.randk import RandK
from reproductions.frame import Config, Finding, held

SHARES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Values of k/d."""
COMPRESSORS: dict[str, Callable[[float], Sparsifier]] = {"topk": TopK, "randk": RandK}


def contraction(u: Tensor, compressor: Sparsifier) -> tuple[int, float]:
    """Return k and ‖u − C(u)‖² / ‖u‖² for a nonzero 1-D tensor."""
    chosen = compressor.select(u)
    rest = u.index_fill(0, chosen, 0.0)
    return len(chosen), float(rest.double().square().sum() / u.double().square().sum())


def random_contractions(u: Tensor, density: float, draws: int, seed: int) -> list[float]:
    """Return ‖u − RandK(u)‖² / ‖u‖² for each draw; u is a nonzero 1-D tensor."""
    compressor, squares = RandK(density), u.double().square()
    contexts = [Context.of(u.numel(), step=number, seed=seed) for number in range(draws)]
    chosen = (compressor.choose(u, compressor.count(u.numel()), ctx) for ctx in contexts)
    return [1 - float(squares[indices].sum() / squares.sum()) for indices in chosen]


def of_normal(density: float) -> float:
    """Return the contraction of TopK for many normal numbers with mean 0."""
    z = float(special.ndtri(1 - density / 2))
    return 1 - density - 2 * z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def cases(config: Config) -> list[Row]:
    """Return one run for each compressor and k."""
    counts = dict.fromkeys(max(1, round(share * config["numel"])) for share in SHARES)
    return [{"method": name, "k": k} for name in COMPRESSORS for k in counts]


def run(case: Row, config: Config) -> Row:
    """Return the mean and the extremes of the contraction over the vectors."""
    density = case["k"] / config["numel"]
    found = []
    for vector in range(config["vectors"]):
        generator = torch.Generator().manual_seed(config["seed"] + vector)
        # RandK's choice depends on its context's seed, which is equal for all vectors. The vectors are independent.
        k, left = contraction(torch.randn(config["numel"], generator=generator), COMPRESSORS[case["method"]](density))
        assert k == case["k"]
        found.append(left)
    return {
        "contraction": sum(found) / len(found),
        "lowest": min(found),
        "highest": max(found),
        "bound": 1 - density,
        "bound_squared": (1 - density) ** 2,
        "of_normal": of_normal(density),
    }


def verdict(table: pd.DataFrame) -> str:
    """Say whether TopK stays below the squared bound, and RandK at the bound."""
    top, random = (table[table["method"] == name] for name in COMPRESSORS)
    below = (top["highest"] < top["bound_squared"]).sum()
    off = (random["contraction"] / random["bound"] - 1).abs()[random["bound"] >= 0.5].max()
    share = top["contraction"] / top["bound_squared"]
    small = top[top["k"] == top["k"].min()].iloc[0]
    yes = below == len(top) and off < 0.02
    return (
        f"{held(yes)}TopK leaves less than (1 − k/d)² of every vector at {below} of {len(top)} values of k. It leaves "
        f"{share.min():.2g} to {share.max():.4g} of this bound (k = {small['k']}: {small['contraction']:.4f} against "
        f"{small['bound_squared']:.4f}). RandK leaves 1 − k/d within {100 * off:.1f} %, up to k = d/2."
    )


def draw(table: pd.DataFrame) -> Any:
    """Draw the remaining share against k: the whole range, and small k."""
    figure, (panels,) = plots.panels(1, 2, 4.0)
    top, random = (table[table["method"] == name] for name in COMPRESSORS)
    for panel, sign in zip(panels, (1, -1), strict=True):
        start = (1 - sign) // 2  # c, or 1 − c
        for rows, column, label, style, color in (
            (random, "bound", "1 − k/d, bound for any vector", "-", "#000000"),
            (top, "bound_squared", "(1 − k/d)²", "--", "#CC79A7"),
            (random, "contraction", "RandK, measured", "x", plots.color("randk")),
            (top, "of_normal", "TopK, computed", ":", plots.MUTED),
            (top, "contraction", "TopK, measured", "o", plots.color("topk")),
        ):
            panel.plot(rows["k"], start + sign * rows[column], style, color=color, label=label)
        panel.set(xscale="log", xlabel="k (log scale)")
    panels[0].set(ylabel="‖u − C(u)‖² / ‖u‖²", title="share of ‖u‖² that is left", ylim=(0, 1.04))
    panels[1].set(yscale="log", ylabel="1 − ‖u − C(u)‖² / ‖u‖² (log scale)", title="share of ‖u‖² that is sent")
    panels[0].legend(loc="lower left")
    below = (top["highest"] < top["bound_squared"]).sum()
    off = 100 * (random["contraction"] / random["bound"] - 1).abs()[random["bound"] >= 0.5].max()
    finding = (
        f"TopK leaves less of a Gaussian vector than (1 − k/d)² at {below} of {len(top)} values of k; RandK leaves "
        f"1 − k/d, within {off:.1f} % up to k = d/2"
    )
    task = (
        f"Shi et al. 2019, Theorem 1: the k largest of d = {table['numel'].iloc[0]:,} normal numbers, or k random "
        "ones; means of the vectors."
    )
    plots.headline(figure, finding, task)
    return figure


FINDING = Finding(
    "gaussiank-contraction",
    {"numel": 100_000, "vectors": 10, "seed": 0},
    ("method", "k"),
    cases,
    run,
    draw,
    verdict,
    digits=6,
)
