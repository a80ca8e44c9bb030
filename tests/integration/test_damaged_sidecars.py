"""Sidecar files that are moved, missing, damaged or foreign: one clear error on all ranks, or a warning."""

import re
import shutil
import sys
import time

import pytest
import torch
import torch.distributed as dist

from lightning_sparse import checkpoint as sidecars
from tests.integration.checkpoints import (
    STEP_4,
    STEP_8,
    AtStart,
    error_of,
    fit,
    result,
    with_warnings,
)
from tests.integration.trainers import Loader, Net, lightning_ranks, same, strategy, trainer
from tests.support.tiers import full, tiers


def sidecar(directory, step, rank):
    return next((directory / f"{step}.residuals").glob(f"*.rank{rank}-of-2.pt"))


def edit(directory, change):
    checkpoint = torch.load(directory / STEP_4, weights_only=False)
    change(checkpoint[sidecars.KEY])
    torch.save(checkpoint, directory / STEP_4)


def truncate(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def mix(directory, *ranks):
    """Replace sidecar files of step 4 by those of step 8."""
    for rank in ranks:
        shutil.copy(sidecar(directory, STEP_8, rank), sidecar(directory, STEP_4, rank))


def strange(path):
    torch.save({"version": 1, "tag": path.name.split(".")[0], "state": sys.exit, "checksum": 0}, path)


pytestmark = pytest.mark.xdist_group("saved")  # so that one process makes the checkpoints
BOTH = r"[0-9a-f]{16}\.rank0-of-2\.pt, [0-9a-f]{16}\.rank1-of-2\.pt not found in '.*': the residuals in them are lost"

DAMAGES = {
    "none": (lambda d: None, "", None),
    "moved with its folder": (lambda d: None, "", None),
    "moved alone": (lambda d: shutil.rmtree(d / f"{STEP_4}.residuals"), BOTH, None),
    "one file missing": (
        lambda d: sidecar(d, STEP_4, 1).unlink(),
        "^[0-9a-f]{16}.rank1-of-2.pt not found in '.*'",
        None,
    ),
    "folder of another checkpoint": (
        lambda d: (
            shutil.rmtree(d / f"{STEP_4}.residuals"),
            (d / f"{STEP_8}.residuals").rename(d / f"{STEP_4}.residuals"),
        ),
        BOTH,
        None,
    ),
    "file empty": (
        lambda d: truncate(sidecar(d, STEP_4, 1), 0),
        None,
        "rank 1: .* is damaged, or not a sidecar file: EOFError",
    ),
    "file truncated": (lambda d: truncate(sidecar(d, STEP_4, 1), 0.6), None, "rank 1: .* is damaged"),
    "last byte missing": (lambda d: truncate(sidecar(d, STEP_4, 0), 0.9999), None, "rank 0: .* is damaged"),
    "bit flipped": (lambda d: flip(sidecar(d, STEP_4, 1)), None, "rank 1: .* is damaged: its checksum differs"),
    "file of another rank": (
        lambda d: shutil.copy(sidecar(d, STEP_4, 0), sidecar(d, STEP_4, 1)),
        None,
        "rank 1: .* belongs to another checkpoint, rank or version than its name says",
    ),
    "one file of another step": (lambda d: mix(d, 1), None, "rank 1: .* belongs to another checkpoint"),
    "all files of another step": (lambda d: mix(d, 0, 1), None, "rank 0: .* belongs to another checkpoint"),
    "other version": (
        lambda d: edit(d, lambda info: info.update(version=99)),
        None,
        "its sidecar files are of version 99, this is 1",
    ),
    "sizes that make no sense": (
        lambda d: edit(d, lambda info: info.update(size=10**15)),
        None,
        "about sidecar files is invalid",
    ),
    "a million files asked for": (
        lambda d: edit(d, lambda info: info.update(size=2**20)),
        r"^[0-9a-f]{16}\.rank0-of-1048576\.pt, .{,400} and others not found in '.*'",
        None,
    ),
    "malicious": (
        lambda d: strange(sidecar(d, STEP_4, 1)),
        None,
        "rank 1: .* is damaged, or not a sidecar file: UnpicklingError",
    ),
}


@pytest.mark.reliability(
    "sidecar files moved, missing, torn, flipped, foreign, of another step, another version, or malicious",
    checked="bit-identical if complete; otherwise the documented warning, or the same error on all ranks",
    methods=["topk"],
)
@pytest.mark.parametrize("damage", tiers(DAMAGES, ["bit flipped"]))
def test_damaged_sidecar_files(damage, saved, tmp_path):
    directory, straight = saved
    shutil.copytree(directory, tmp_path / "moved")
    do, warning, error = DAMAGES[damage]
    do(tmp_path / "moved")

    def rank(rank):
        started = time.monotonic()
        options = {"ckpt_path": tmp_path / "moved" / STEP_4}
        raised, records = with_warnings(error_of, fit, "topk", rank, callbacks=[at_start := AtStart()], **options)
        if error:
            assert time.monotonic() - started < 20  # the group's timeout is 30 s
            # Without the folder, the run continues, as the message says, unless the checkpoint's entry is invalid.
            dist.barrier()
            shutil.rmtree(tmp_path / "moved" / f"{STEP_4}.residuals", ignore_errors=True)
            dist.barrier()
            again = error_of(fit, "topk", rank, **options)
            return raised, again
        assert raised is None
        # Without any sidecar file the count of steps is the checkpoint's.
        assert at_start.state["step"] == 4
        return records, result(*fit("topk", rank, ckpt_path=tmp_path / "moved" / STEP_4))

    results = lightning_ranks(2, rank)
    if error:
        assert results[0][0] == results[1][0]
        assert re.search(error, results[0][0])
        assert "cannot be loaded" in results[0][0]
        assert all((again is None) != (damage in ("other version", "sizes that make no sense")) for _, again in results)
        return
    assert results[1][0] == []
    assert [bool(re.search(warning, text)) for text in results[0][0]] == [True] * bool(warning)
    assert [same(a[1], b) for a, b in zip(results, straight, strict=True)] == [not warning] * 2


@pytest.mark.parametrize("foreign", [None, "0123"])
def test_ranks_with_different_checkpoints_of_one_name(foreign, saved, tmp_path):
    """As on nodes with separate disks, of which one has an older file, such as one of stock ddp."""

    def run(rank):
        shutil.copytree(saved[0], own := tmp_path / str(rank))
        if rank:
            edit(own, dict.clear if foreign is None else lambda entry: entry.update(tag=foreign))
        started = time.monotonic()
        raised = error_of(fit, "topk", rank, ckpt_path=own / STEP_4)
        assert time.monotonic() - started < 20
        return raised

    for rank, text in enumerate(lightning_ranks(2, run)):
        assert text.startswith(f"Ranks have different checkpoints '{tmp_path / str(rank) / STEP_4}'.")


class Other(Net):
    """Keeps its own weights, so that only the residuals are those of another model."""

    def __init__(self, width=24, frozen=False):
        super().__init__()
        self.layers[3] = torch.nn.Linear(24, width)
        self.layers[3].requires_grad_(not frozen)

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = self.state_dict()
        checkpoint["optimizer_states"] = []


@full
@pytest.mark.reliability(
    "residuals of another model", checked="error on all ranks, nothing is loaded", methods=["topk"]
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 5}, r"rank 0: Reducer state of 'layers.3.(weight|bias)' has shape \S+( 24\))?, not \S+( 24\))?\."),
        (
            {"frozen": True},
            "rank 0: Reducer state and model differ in their parameters: layers.3.bias, layers.3.weight",
        ),
    ],
)
def test_another_model(options, message, saved):
    def rank(rank):
        run = trainer(strategy("topk", 0.05), 2)
        error = error_of(run.fit, Other(**options), Loader(rank, 2), ckpt_path=saved[0] / STEP_4)
        residuals = run.strategy.reducer.state_dict()["elements"]["residual"].values()
        return error, any(value.any() for value in residuals)

    results = lightning_ranks(2, rank)
    assert results[0] == results[1]
    assert re.search(message, results[0][0])
    assert results[0][1] is False
