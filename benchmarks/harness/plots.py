"""One style for all figures: a method has the same colour in every figure, and lines have direct labels.

A page shows a figure about 840 pixels wide. Figures are therefore `WIDTH` inches wide, so that font sizes are those on
the page. Before a file is written, `problems` lists everything that makes the figure hard to read. Figures of the
documentation must have no problems. The PNG file contains a fingerprint of the CSV files. With it,
`python docs/render.py --check` checks that the figure shows the current data.
"""

import hashlib
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from PIL import Image

from benchmarks.harness.table import replacing

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

WIDTH = 8.7  # inches: 840 pixels of a page at 96 pixels an inch
LEAST, MOST = 8.0, 7  # points of the smallest text, and labelled lines of a panel
END = "end"  # marks texts of `ends`
KEY = "Data"
"""The PNG's text field with the fingerprint of the CSV files."""
plt.rcParams |= {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 9,
    "savefig.dpi": 160,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}
MUTED = "#595959"
"""Colour of secondary text."""
COLORS = {  # Okabe & Ito, and Tol's muted colours, which colour-blind readers distinguish too
    "ddp": "#000000",
    "dense": "#000000",
    "none": "#B0B0B0",
    "bf16": "#7F7F7F",
    "powersgd": "#CC79A7",
    "naive_topk": "#661100",
    "topk": "#0072B2",
    "gaussiank": "#D55E00",
    "gtopk": "#009E73",
    "oktopk": "#E69F00",
    "scalecom": "#56B4E9",
    "randk": "#8C564B",
    "int4": "#999933",
    "int8": "#999933",
    "topk by default": "#882255",
    "topk updates": "#332288",
    "local_sgd": "#44AA99",
    "sparseloco": "#117733",
    "ddp_accumulated": "#B0B0B0",
    "topk, 8 a node": "#7B3294",
}
NAMES = {
    "none": "no communication",
    "bf16": "bf16 hook",
    "powersgd": "PowerSGD",
    "naive_topk": "naive top-k hook",
    "topk by default": "TopUp by default",
    "topk updates": "TopUp, density 0.01",
    "local_sgd": "local SGD",
    "sparseloco": "SparseLoCo",
    "ddp_accumulated": "accumulated gradients",
}
"""Labels of methods in figures, if they differ from the name in the CSV file."""


def color(name: str) -> str:
    """Return the colour of a method."""
    return COLORS[name]


def shown(name: str) -> str:
    """Return the label of a method in figures."""
    return NAMES.get(name, name)


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure of `height` inches and its panels, always as a 2-D array; `options` are those of `subplots`."""
    return plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)


def headline(figure: Any, finding: str, task: str) -> None:
    """Write the finding in bold and the task above all panels, and make room for the texts of `ends`.

    Call it last, because it fixes the positions of points.
    """
    inches = figure.get_figheight()
    lines = textwrap.wrap(re.sub(r"(?<=\d) (?=[×%GM])|(?<=\)) (?=[+−\d])", "\u00a0", finding), 90)
    below = textwrap.wrap(task, 124)
    top = 0.19 * len(lines) + 0.17 * len(below) + 0.1
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - top / inches))
    figure.text(0.008, 1 - 0.05 / inches, "\n".join(lines), weight="bold", fontsize=10.5, va="top", linespacing=1.25)
    under = 1 - (0.07 + 0.19 * len(lines)) / inches
    figure.text(0.008, under, "\n".join(below), fontsize=9, color=MUTED, va="top", linespacing=1.25)
    for _ in range(2):  # the second time with the layout from the first
        figure.draw_without_rendering()
        for panel in figure.axes:
            if labels := [text for text in panel.texts if text.get_gid() == END]:
                spread(panel, labels)


def ends(panel: Any, labels: Sequence[tuple[float, float, str, str]], reach: float = 9) -> None:
    """Write names to the right of points, (x, y, name, colour). `headline` separates them later."""
    for x, y, name, ink in labels:
        arrow = {"arrowstyle": "-", "color": ink, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
        options = {"va": "center", "color": ink, "fontsize": 9, "annotation_clip": False, "gid": END}
        options["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
        panel.annotate(name, (x, y), (reach, 0), textcoords="offset points", arrowprops=arrow, **options)


def spread(panel: Any, labels: Sequence[Any], gap: float = 11.5) -> None:
    """Move the texts of `ends` vertically, so that they do not overlap. All stay beside their panel."""
    scale = 72 / panel.figure.dpi
    heights = [float(panel.transData.transform(text.xy)[1]) * scale for text in labels]
    bottom, top = panel.bbox.y0 * scale + gap / 2, panel.bbox.y1 * scale - gap / 2
    order = sorted(range(len(labels)), key=lambda number: heights[number])
    placed = [min(max(heights[number], bottom), top) for number in order]
    for _ in range(500):
        for low, high in itertools.pairwise(range(len(placed))):
            if (lack := gap - (placed[high] - placed[low])) > 0.01:
                placed[low] -= lack / 2
                placed[high] += lack / 2
        placed = [min(max(at, bottom), top) for at in placed]
    for number, at in zip(order, placed, strict=True):
        moved = at - heights[number]
        labels[number].set_position((labels[number].get_position()[0], moved))
        labels[number].arrow_patch.set_visible(abs(moved) > 3)


def signed(value: float, digits: int = 2) -> str:
    """Write a difference with its sign."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(digit in text for digit in "123456789") else text[1:]


def bars(
    panel: Any,
    names: Sequence[str],
    values: Sequence[float],
    colors: Sequence[str],
    texts: Sequence[str],
    errors: Any = None,
) -> None:
    """Draw horizontal bars from zero, the first on top, each with its value as text."""
    places = range(len(names))
    panel.barh(places, values, color=colors, height=0.72)
    edges = list(values)
    if errors is not None:
        panel.errorbar(values, places, xerr=errors, fmt="none", ecolor=MUTED, capsize=2, linewidth=1)
        edges = [value + high for value, high in zip(values, errors[1], strict=True)]
    for place, edge, text in zip(places, edges, texts, strict=True):
        panel.annotate(text, (edge, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    panel.set_yticks(places, names)
    panel.grid(visible=False, axis="y")
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, 1.2 * max(edges))
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def problems(figure: Any) -> list[str]:
    """Return a figure's problems for readers: texts that are too small, outside or overlapping, and too many lines."""
    figure.draw_without_rendering()
    wrong = []
    scale = min(1.0, WIDTH / figure.get_figwidth())
    boxes = []
    for text in texts(figure):
        words = text.get_text().replace("\n", " / ")
        if text.get_fontsize() * scale < LEAST:
            wrong.append(f"{words!r} has {text.get_fontsize() * scale:.1f} points on the page, fewer than {LEAST:g}")
        box = Text.get_window_extent(text)  # that of an annotation has its arrow in it
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            wrong.append(f"{words!r} leaves the figure")
        boxes.append((words, box))
    for (one, box), (other, its) in itertools.combinations(boxes, 2):
        wide = min(box.x1, its.x1) - max(box.x0, its.x0)
        high = min(box.y1, its.y1) - max(box.y0, its.y0)
        if wide > 1 and high > 1.5:
            wrong.append(f"{one!r} and {other!r} cover each other")
    for panel in figure.axes:
        colors = [each.get_color() for each in panel.lines if not str(each.get_label()).startswith("_")]
        if len(colors) > MOST:
            wrong.append(f"a panel has {len(colors)} labelled lines, more than {MOST}")
    return wrong


def texts(figure: Any) -> Iterator[Text]:
    """Yield the visible texts of a figure."""
    hidden = set()
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            room = 1e-6 * (high - low)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not (panel.axison and tick.get_visible() and low - room <= tick.get_loc() <= high + room):
                    hidden |= {id(tick.label1), id(tick.label2)}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in hidden:
            yield text


class Figure(NamedTuple):
    """A figure, and the CSV files in the same folder that it shows.

    Attributes:
        name: name of the PNG file, without extension.
        draw: draws the figure, given the folder.
        sources: names of the CSV files, without extension.
    """

    name: str
    draw: Callable[[Path], Any]
    sources: tuple[str, ...]

    def write(self, folder: Path, strict: bool = False) -> None:
        """Draw the figure and write the PNG file, if any of the CSV files exists.

        Raises:
            ValueError: with `strict`, if the figure cannot be read.
        """
        if not any(path.exists() for path in self.files(folder)):
            return
        figure = self.draw(folder)
        if strict and (wrong := problems(figure)):
            raise ValueError(f"{self.name}.png cannot be read: {'; '.join(wrong)}")
        write(figure, folder / f"{self.name}.png", metadata={KEY: self.fingerprint(folder)})

    def is_current(self, folder: Path) -> bool:
        """Return whether the PNG file was drawn from the present CSV files."""
        path = folder / f"{self.name}.png"
        if not path.exists():
            return False
        with Image.open(path) as image:
            return bool(image.info.get(KEY) == self.fingerprint(folder))

    def files(self, folder: Path) -> list[Path]:
        """Return the paths of the CSV files."""
        return [folder / f"{source}.csv" for source in self.sources]

    def fingerprint(self, folder: Path) -> str:
        """Return a fingerprint of the CSV files."""
        digest = hashlib.sha256()
        for path in self.files(folder):
            digest.update(path.read_bytes() if path.exists() else b"")
        return digest.hexdigest()


def write(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure to a PNG file atomically; `options` are passed to `savefig`."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", **options)
    plt.close(figure)
    print(path)
