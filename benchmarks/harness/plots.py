"""One style for all figures: a method has the same colour in every figure."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.harness.table import replacing

mpl.use("Agg")
from matplotlib import pyplot as plt

plt.rcParams |= {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "savefig.dpi": 150,
}
LINES = {  # colours of Okabe & Ito, with grey instead of yellow; dashes distinguish lines that overlap
    "ddp": ("#000000", "-"),
    "dense": ("#000000", "-"),
    "fp16": ("#7F7F7F", "-"),
    "bf16": ("#7F7F7F", "--"),
    "powersgd": ("#CC79A7", "-"),
    "topk": ("#0072B2", "--"),
    "gaussiank": ("#D55E00", ":"),
    "topk by default": ("#C00000", "-"),
    "gaussiank by default": ("#C00000", "--"),
    "topk updates": ("#0072B2", "-"),
    "gaussiank updates": ("#D55E00", "-"),
    "int4": ("#F0E442", "-"),
    "diloco": ("#7F7F7F", "-."),
    "sparseloco": ("#56B4E9", "-"),
    "gtopk": ("#009E73", "-"),
    "oktopk": ("#E69F00", "--"),
    "scalecom": ("#56B4E9", "-."),
    "randk": ("#8C564B", ":"),
    "ddp_accumulated": ("#7F7F7F", "-."),
    "local_sgd": ("#000000", ":"),
    "topk_two_level": ("#7B3294", "-"),
    "topk, 8 a node": ("#7B3294", "-"),
}


def line(name: str) -> dict[str, Any]:
    """Return a method's colour and dashes."""
    color, style = LINES.get(name, ("#B0B0B0", "-"))
    return {"color": color, "linestyle": style}


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its panels as a 2-D array; `options` are passed to `subplots`."""
    return plt.subplots(rows, columns, figsize=size, squeeze=False, **options)


def write(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure to a PNG file atomically; `options` are passed to `savefig`."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", **options)
    plt.close(figure)
    print(path)
