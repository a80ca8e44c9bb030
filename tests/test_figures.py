"""Figures of the documentation can be read, and show today's CSV files. Tables take the rows that they are about."""

import functools
import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import pandas as pd

from benchmarks.harness import plots
from tests.support.tiers import full, later

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@functools.cache
def render():
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures():
    return render().FIGURES


@full
def test_every_figure_can_be_read():
    for figure in figures():
        drawn = figure.draw(RESULTS)
        assert plots.problems(drawn) == [], figure.name
        assert drawn.get_figwidth() <= plots.WIDTH, figure.name
        plots.plt.close(drawn)


def test_every_png_of_a_page_is_drawn_by_render_and_every_figure_is_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {Path(link).name for page in pages for link in re.findall(r"!\[[^\]]*\]\((\S+\.png)\)", page.read_text())}
    assert shown == {f"{figure.name}.png" for figure in figures()} == {path.name for path in RESULTS.glob("*.png")}


def drawn(*texts, size=9, curves=1):
    figure, ((panel,),) = plots.panels(1, 1, 3)
    for number in range(curves):
        panel.plot([0, 1], [0, number], label=f"curve {number}")
    for text, x in texts:
        panel.text(x, 0.02, text, fontsize=size)
    found = plots.problems(figure)
    plots.plt.close(figure)
    return found


def test_a_figure_that_cannot_be_read_says_why():
    assert drawn(("one", 0.1), ("other", 0.6), curves=2) == []
    assert drawn(("one", 0.1), ("other", 0.11), curves=2) == ["'one' and 'other' cover each other"]
    assert drawn(("one", 0.1), size=7) == ["'one' has 7.0 points on the page, fewer than 8"]
    assert drawn(("far to the right", 1.5)) == ["'far to the right' leaves the figure"]
    assert drawn(curves=8) == ["a panel has 8 labelled lines, more than 7"]


@later
def test_names_at_the_ends_of_lines_are_moved_apart_and_stay_beside_the_panel():
    figure, ((panel,),) = plots.panels(1, 1, 3)
    panel.set(xlim=(0, 1), ylim=(0, 1))
    plots.ends(panel, [(1, 1 - number / 100, f"line {number}", "black") for number in range(7)])
    plots.headline(figure, "All seven names can be read", "Seven lines that end at the top.")
    assert plots.problems(figure) == []
    heights = [plots.Text.get_window_extent(text).y1 for text in panel.texts]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] <= panel.bbox.y1 + 1
    plots.plt.close(figure)


def test_a_figure_is_current_until_its_data_change(tmp_path, capsys):
    def draw(folder):
        figure, ((panel,),) = plots.panels(1, 1, 2)
        panel.plot([0, 1])
        return figure

    figure = plots.Figure("one", draw, ("data", "more"))
    figure.write(tmp_path)
    assert not list(tmp_path.iterdir())  # there is nothing to draw
    (tmp_path / "data.csv").write_text("x\n1\n")
    assert not figure.is_current(tmp_path)
    figure.write(tmp_path, strict=True)
    assert figure.is_current(tmp_path)
    (tmp_path / "data.csv").write_text("x\n2\n")
    assert not figure.is_current(tmp_path)


def test_a_difference_has_its_sign():
    assert [plots.signed(value) for value in (0.126, -0.126, -0.001, 0.0)] == ["+0.13", "−0.13", "0.00", "0.00"]


@pytest.mark.parametrize("name", ["gpu-line", "gpu-gpt", "gpu-graphs"])
def test_rows_in_another_precision_do_not_change_the_tables_of_bf16_mixed(name, monkeypatch):
    made, read = render().TABLES[name], render().read
    before = made()
    monkeypatch.setattr(
        render(), "read", lambda file: pd.concat([read(file), read(file).assign(precision="bf16-true", ms=1.0)])
    )
    assert made() == before


def test_each_method_at_a_gpus_pace_reaches_the_loss():
    for name, each in render().paced().items():
        assert all(seconds > 0 for seconds in each.total.values()), name
