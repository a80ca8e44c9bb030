"""The benchmark of trainings on a GPU: which times it keeps."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("pandas")

from benchmarks import gpu_training
from benchmarks.harness import results
from benchmarks.harness.launch import RanksFailed

RECORDS = [{"method": name, "ms": [2.0, 2.0], "sent_bytes": 8, "tx_bytes": 9} for name in ("ddp", "int4") * 2]


@pytest.mark.parametrize("fails", [False, True])
def test_times_are_kept_only_if_ranks_end_with_equal_weights(fails, monkeypatch, tmp_path, capsys):
    def launch(*_):
        yield from RECORDS
        if fails:
            raise RanksFailed("weights differ")

    made = contextlib.nullcontext(SimpleNamespace(calibration=[]))
    monkeypatch.setattr(gpu_training, "hosts", lambda *_: made)
    monkeypatch.setattr(gpu_training, "launch", launch)
    path = tmp_path / "gpu_links.csv"
    gpu_training.links(gpu_training.GPT2, ["loopback"], path)
    if fails:
        assert "loopback: weights differ" in capsys.readouterr().out
        assert not path.exists()
    else:
        assert results.load(path)[["method", "median_ms", "sent_bytes"]].values.tolist() == [
            ["ddp", 2.0, 8],
            ["int4", 2.0, 8],
        ]
