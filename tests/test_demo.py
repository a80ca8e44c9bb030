"""The demo's result sentence and its chart."""

import pytest

from examples.demo import LIMIT, View, verdict


def curve(*points):
    return [{"seconds": seconds, "step": 5 * number, "loss": loss} for number, (seconds, loss) in enumerate(points)]


SLOW, FAST = curve((0, 5.6), (30, 3.1), (60, 2.59)), curve((0, 5.6), (6, 3.1), (12, 2.55))
NEVER = curve((0, 5.6), (LIMIT, 2.9))


@pytest.mark.parametrize(
    ("ours", "stock", "expected"),
    [
        (FAST, SLOW, "topk_ddp reached test loss 2.8 in 12.0 s, stock ddp in 60.0 s: 5.0 times faster over a"),
        (SLOW, FAST, "topk_ddp reached test loss 2.8 in 60.0 s, stock ddp in 12.0 s: 5.0 times slower over a"),
        (FAST, NEVER, "topk_ddp reached test loss 2.8 in 12.0 s, stock ddp was at 2.90 after 60 s, over a"),
        (NEVER, FAST, "Stock ddp reached test loss 2.8 in 12.0 s over a"),
        (NEVER, NEVER, "Neither strategy reached test loss 2.8 within 60 s over a"),
    ],
)
def test_the_first_sentence_says_which_strategy_was_faster(ours, stock, expected):
    said = verdict({"topk_ddp": ours, "ddp": stock}, emulated=False)
    assert said.startswith(expected + " 100 Mbit/s link")
    assert "an emulated 100 Mbit/s" in verdict({"topk_ddp": ours, "ddp": stock}, emulated=True)


def test_without_a_terminal_every_test_is_a_line(capsys):
    view = View()
    for point in FAST:
        view.add("topk_ddp", point)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(FAST)
    assert lines[-1].split() == ["topk_ddp", "12.0", "s", "step", "10", "test", "loss", "2.550"]


def test_the_chart_has_every_point_within_its_frame():
    view = View()
    view.curves = {"topk_ddp": FAST, "ddp": curve((2, 50.0), (30, 3.1), (60, 0.001))}
    *rows, axis, seconds, last = view.chart(60)
    assert sum(row.count("T") for row in rows) + sum(row.count("D") for row in rows) == 6
    assert axis.endswith("-" * 60)
    assert seconds.endswith("60 s")
    assert "T = topk_ddp, 2.550   D = ddp, 0.001" in last
