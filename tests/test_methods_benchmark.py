"""The measurements of `benchmarks/methods.py`, and that it does not time wrong results."""

import csv
import sys

import pytest
import torch

from benchmarks import methods
from benchmarks.harness import results
from lightning_sparse import METHODS, method
from lightning_sparse.contrib.qsgd import QSGD


def test_every_method_has_been_measured():
    """Otherwise: python -m benchmarks.methods --methods <name>, and python docs/render.py."""
    assert set(METHODS) == set(results.load(results.RESULTS / "methods.csv")["method"])


def test_bytes_by_hand():
    """8 workers exchange 2 matrices of a million elements each."""
    dense = round(2 * 4 * 2e6 * 7 / 8)
    assert methods.volume(method("dense"), 2) == {"bytes": dense, "dense_bytes": dense}
    # An all-reduce of 4 columns of 1000 for each of two factors.
    assert methods.volume(method("powersgd"), 2)["bytes"] == 2 * 4 * (2 * 2000 * 4) * 7 / 8
    assert methods.volume(method("local_sgd"), 2)["bytes"] == dense / 8
    # A bit of each sign to its region, of each vote to all, and one for each of 2000 rows: whether it votes.
    assert methods.volume(method("signsgd"), 2)["bytes"] == 2 * 2e6 / 8 * 7 / 8 + 2000 / 8 * 7


def test_writes_a_row_for_each_method_beside_those_there_are(tmp_path, monkeypatch):
    for names in (["topk", "gtopk"], ["powersgd", "topk"]):
        run = ["methods", "--methods", *names, "--matrices", "1", "--repetitions", "1", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", run)
        methods.main()
    with (tmp_path / "methods.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"topk", "gtopk", "powersgd"}
    for row in rows.values():
        assert all(float(row[f"{part}_ms"]) > 0 for part in ("copy", "compress", "step"))
        assert (row["elements"], row["workers"]) == ("1000000", "8")
    assert int(rows["powersgd"]["bytes"]) < int(rows["powersgd"]["dense_bytes"]) / 100


def test_refuses_what_is_wrong(monkeypatch):
    monkeypatch.setattr(QSGD, "decode", lambda self, payload, ctx: torch.zeros(ctx.segment.numel))
    compress = QSGD.compress
    monkeypatch.setattr(QSGD, "compress", lambda self, u, ctx: (compress(self, u, ctx)[0], u))
    with pytest.raises(SystemExit, match=r"QSGD.*: other ranks decode a different update"):
        methods.works(method("qsgd"), 1)
