"""Checkpoints have their sidecar files and no others, with every CheckpointIO and at every time of writing."""

import copy
import dataclasses
import io
import os
import shutil
import signal
import threading
import zlib
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from pytorch_lightning.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lightning_sparse.strategies import saves
from tests.integration.checkpoints import MOMENTUM, At, AtStart, Scored, error_of, fit, misplaced, result, saving
from tests.integration.trainers import Loader, Net, lightning_ranks, same, strategy, trainer
from tests.support.tiers import full, later, tiers


class Folders(CheckpointIO):
    """Writes a folder with two files."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        part = Path(f"{path}.new")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        torch.save({"state_dict": checkpoint["state_dict"]}, part / "weights.pt")
        torch.save({key: value for key, value in checkpoint.items() if key != "state_dict"}, part / "rest.pt")
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(Path(path) / "weights.pt") | torch.load(Path(path) / "rest.pt")

    def remove_checkpoint(self, path):
        shutil.rmtree(path)


class Zlib(CheckpointIO):
    """Compresses, so that no tag can be read from the file."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.new").write_bytes(zlib.compress(buffer.getvalue(), 1))
        os.replace(f"{path}.new", path)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(io.BytesIO(zlib.decompress(Path(path).read_bytes())))

    def remove_checkpoint(self, path):
        Path(path).unlink()


class Behind(TorchCheckpointIO):
    """Writes a checkpoint when the next one is saved: asynchronous without being an AsyncCheckpointIO."""

    thread = None

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.teardown()
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        self.thread = threading.Thread(target=self.write, args=(buffer, path))

    def write(self, buffer, path):
        buffer.seek(0)
        super().save_checkpoint(torch.load(buffer), path)

    def teardown(self):
        if self.thread is not None:
            self.thread.start()
            self.thread.join()
            self.thread = None


IOS = {
    "plain": TorchCheckpointIO,
    "folders": Folders,
    "zlib": Zlib,
    "one save behind": Behind,
    "async": AsyncCheckpointIO,
    "async, folders": lambda: AsyncCheckpointIO(Folders()),
    "async, zlib": lambda: AsyncCheckpointIO(Zlib()),
}
READERS = {"folders": Folders(), "async, folders": Folders(), "zlib": Zlib(), "async, zlib": Zlib()}


def tags(directory: Path) -> dict[str, int]:
    """Return how many saves have sidecar files, for each checkpoint."""
    return {
        folder.name.removesuffix(".ckpt.residuals"): len({file.name.split(".")[0] for file in folder.iterdir()})
        for folder in directory.glob("*.residuals")
    }


ONE_NAME = {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True}
TOP_2 = {"every_n_train_steps": 1, "save_top_k": 2, "monitor": "score", "mode": "max"}


@full
@pytest.mark.reliability(
    "20 saves by a CheckpointIO that writes files, folders, compresses, or writes later (AsyncCheckpointIO or unseen)",
    checked="no leftover files; bit-identical resume",
    methods=["topk"],
)
@pytest.mark.parametrize(
    ("options", "expected"), [(ONE_NAME, ["last"]), pytest.param(TOP_2, ["step=19", "step=20"], marks=full)]
)
@pytest.mark.parametrize("kind", tiers(IOS, ["plain"]))
def test_twenty_saves_leave_no_sidecar_file_over_and_lose_none(kind, options, expected, tmp_path):
    def rank(rank):
        seen = []
        look = [At(step, lambda _: rank or seen.append(tags(tmp_path))) for step in range(1, 21)]
        net = Scored(**MOMENTUM)
        callbacks = [saving(tmp_path, **options), *look]
        _, run = fit("topk", rank, net=net, batches=10, callbacks=callbacks, plugins=[IOS[kind]()])
        before = run.strategy.reducer.state_dict()
        dist.barrier()
        wrong = misplaced(tmp_path, others=False, io=READERS.get(kind))
        there = sorted(path.stem for path in tmp_path.glob("*.ckpt"))
        dist.barrier()
        later = {"max_epochs": 3, "ckpt_path": tmp_path / f"{expected[-1]}.ckpt", "plugins": [IOS[kind]()]}
        fit("topk", rank, net=Scored(**MOMENTUM), batches=10, callbacks=[start := AtStart()], **later)
        return wrong, there, same(start.state, before), seen

    results = lightning_ranks(2, rank, patience=300)
    assert [found[:3] for found in results] == [([], expected, True)] * 2
    if "async" not in kind:
        # The sidecar files of one save per checkpoint; of two if only the next save shows that one has been written.
        most = 1 if kind == "plain" else 2
        assert max(sum(counts.values()) for counts in results[0][3]) <= len(expected) * most


class Dying(CheckpointIO):
    """Kills its process before or after its fifth save."""

    def __init__(self, inner, when):
        self.inner, self.when, self.saves = inner, when, 0

    def save_checkpoint(self, *args, **options):
        self.saves += 1
        for when in ("before", "after"):
            if (self.saves, self.when) == (5, when):
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "before":
                self.inner.save_checkpoint(*args, **options)

    def load_checkpoint(self, *args, **options):
        return self.inner.load_checkpoint(*args, **options)

    def remove_checkpoint(self, path):
        self.inner.remove_checkpoint(path)


@pytest.mark.reliability(
    "kill -9 just before or just after a CheckpointIO has written, at once or later",
    checked="every checkpoint has its sidecar files; the next run removes leftovers",
    methods=["topk"],
)
@pytest.mark.parametrize("when", tiers(["before", "after"], ["before"]))
@pytest.mark.parametrize("kind", tiers(["plain", "folders", "one save behind", "async, zlib"], ["plain"]))
def test_a_checkpoint_keeps_its_sidecar_files_when_the_writer_is_killed(kind, when, tmp_path):
    base = IOS[kind]().checkpoint_io if "async" in kind else IOS[kind]()
    wrap = AsyncCheckpointIO if "async" in kind else lambda io: io

    def killed(rank):
        return error_of(fit, "topk", rank, callbacks=[saving(tmp_path, **ONE_NAME)], plugins=[wrap(Dying(base, when))])

    assert lightning_ranks(2, killed, patience=300)[0] is None
    assert misplaced(tmp_path, io=base) == []

    def again(rank):
        plugins = [wrap(base)]
        fit("topk", rank, callbacks=[saving(tmp_path, **ONE_NAME)], ckpt_path=tmp_path / "last.ckpt", plugins=plugins)
        dist.barrier()
        return misplaced(tmp_path, others=False, io=base)

    assert lightning_ranks(2, again, patience=300) == [[], []]


class Quoting(Net):
    """Writes the tags of earlier saves into every checkpoint."""

    def __init__(self, directory):
        super().__init__(**MOMENTUM)
        self.directory = directory

    def on_save_checkpoint(self, checkpoint):
        checkpoint["notes"] = [path.name for path in self.directory.glob("*.residuals/*")]


@full
def test_a_checkpoint_that_quotes_the_tags_of_other_saves_keeps_its_own_sidecar_files(tmp_path):
    def rank(rank):
        fit("topk", rank, net=Quoting(tmp_path), batches=10, callbacks=[saving(tmp_path, **ONE_NAME)])
        dist.barrier()
        return misplaced(tmp_path, others=False)

    assert lightning_ranks(2, rank) == [[], []]


class Unsynced(Net):
    """Logs a loss that differs between ranks, for want of sync_dist."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("val_loss", loss.detach() + self.global_rank, on_step=False, on_epoch=True)
        return loss


@full
@pytest.mark.reliability(
    "a checkpoint's name holds a metric that differs between ranks",
    checked="the same checkpoints as ddp, each with all its sidecar files and no others; bit-identical resume",
    methods=["topk"],
)
@pytest.mark.parametrize("options", [{"save_top_k": -1}, {"save_top_k": 2, "monitor": "val_loss", "save_last": "link"}])
def test_a_name_that_differs_between_ranks_is_rank_0s(options, tmp_path):
    def rank(rank):
        found = {}
        for name in ("ddp", "topk"):
            directory = tmp_path / name
            callback = saving(directory, every_n_train_steps=None, every_n_epochs=1, **options)
            callback.filename = "{epoch}-{val_loss:.4f}"
            straight = fit(name, rank, net=Unsynced(**MOMENTUM), batches=1, max_epochs=20, callbacks=[callback])
            found[name] = len(list(directory.glob("*.ckpt")))
            dist.barrier()
        some = next(directory.glob("epoch=9-*.ckpt"), directory / "last.ckpt")
        resumed = fit("topk", rank, net=Unsynced(**MOMENTUM), batches=1, max_epochs=20, ckpt_path=some)
        return (
            misplaced(directory, others=False),
            found["ddp"] == found["topk"],
            same(result(*resumed), result(*straight)),
        )

    assert lightning_ranks(2, rank, patience=300) == [([], True, True)] * 2


@later
def test_each_ranks_own_name_in_save_checkpoint_is_rank_0s(tmp_path):
    def rank(rank):
        os.makedirs(tmp_path / f"cwd{rank}", exist_ok=True)
        os.chdir(tmp_path / f"cwd{rank}")
        save = [At(step, lambda trainer: trainer.save_checkpoint(f"rank{rank}.ckpt")) for step in range(3, 9)]
        straight = result(*fit("topk", rank))
        fit("topk", rank, max_steps=8, callbacks=save)
        dist.barrier()
        resumed = result(*fit("topk", rank, ckpt_path=tmp_path / "cwd0" / "rank0.ckpt"))
        return misplaced(tmp_path / "cwd0", others=False), os.listdir(tmp_path / "cwd1"), same(resumed, straight)

    assert lightning_ranks(2, rank, patience=300) == [([], [], True)] * 2


@later
def test_names_on_a_remote_file_system_are_literal():
    def rank(rank):
        path = "memory://run [1]/*?{a}.ckpt"
        save = [At(step, lambda trainer: trainer.save_checkpoint(path)) for step in range(3, 9)]
        straight = result(*fit("topk", rank, 1))
        fit("topk", rank, 1, max_steps=8, callbacks=save)
        return same(result(*fit("topk", rank, 1, ckpt_path=path)), straight)

    assert lightning_ranks(1, rank) == [True]


@full
def test_a_checkpoint_of_weights_alone_needs_no_file_system_and_takes_the_sidecar_files_of_the_one_before(tmp_path):
    class Database(CheckpointIO):
        """Stores checkpoints outside of fsspec's file systems."""

        def __init__(self):
            self.rows = {}

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.rows[path] = checkpoint

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            return self.rows[path]

        def remove_checkpoint(self, path):
            del self.rows[path]

    def rank(rank):
        _, run = fit("topk", rank, max_steps=2)
        run.save_checkpoint(tmp_path / "a.ckpt")
        dist.barrier()
        before = tags(tmp_path)
        dist.barrier()
        run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        _, run = fit("topk", rank, max_steps=2, plugins=[rows := Database()])
        run.save_checkpoint("mydatabase://1", weights_only=True)
        kept = list(rows.rows)
        run.strategy.remove_checkpoint("mydatabase://1")
        run.save_checkpoint("mydatabase://2", weights_only=True)  # now the first is known to be in place, and removed
        return before, tags(tmp_path), kept, list(rows.rows), error_of(run.save_checkpoint, "mydatabase://3")

    (*found, error), (*_, other) = lightning_ranks(2, rank)
    assert found == [{"a": 1}, {}, ["mydatabase://1"], ["mydatabase://2"]]
    assert error == other
    assert "could not be written (rank 0: ValueError: Protocol not known: mydatabase" in error


class FailsOnce(TorchCheckpointIO):
    """Finds no space for its third checkpoint."""

    saves = 0

    def save_checkpoint(self, *args, **options):
        self.saves += 1
        if self.saves == 3:
            raise OSError("No space left on device")
        super().save_checkpoint(*args, **options)


@full
def test_no_sidecar_file_is_lost_when_an_asynchronous_save_fails(tmp_path):
    def failing(rank):
        callbacks = [saving(tmp_path, **ONE_NAME)]
        return error_of(fit, "topk", rank, callbacks=callbacks, plugins=[AsyncCheckpointIO(FailsOnce())])

    errors = lightning_ranks(2, failing, patience=300)
    assert "No space left on device" in errors[0]  # AsyncCheckpointIO raises it once more when rank 0 tears it down
    assert "could not be written (rank 0: OSError: No space left on device)" in errors[1]
    assert misplaced(tmp_path) == []

    def again(rank):
        fit("topk", rank, callbacks=[saving(tmp_path, **ONE_NAME)], ckpt_path=tmp_path / "last.ckpt")
        dist.barrier()
        return misplaced(tmp_path, others=False)

    assert lightning_ranks(2, again, patience=300) == [[], []]


class Late(TorchCheckpointIO):
    """Writes a checkpoint after the next step, from the tensors that it was given."""

    def __init__(self):
        self.kept = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.kept.append(checkpoint)


@later
def test_a_writer_that_comes_later_gets_weights_and_moments_that_no_step_changes(tmp_path):
    """During an exchange of updates, the memory of the weights holds updates."""

    def rank(rank):
        late, now = Late(), []
        look = pl.callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_: now.append(
                copy.deepcopy([module.state_dict(), module.optimizers().state_dict()["state"]])
            )
        )
        saves = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
        net = Net(torch.optim.AdamW, lr=0.01)
        ours = strategy("topk", 0.1, exchange="update")
        trainer(ours, 2, callbacks=[look, saves], plugins=[late], max_epochs=1).fit(net, Loader(rank, 2))
        return [
            same([kept["state_dict"], kept["optimizer_states"][0]["state"]], now[2 * number + 1])
            for number, kept in enumerate(late.kept)
        ]

    found, _ = lightning_ranks(2, rank)
    assert found == [True] * 4


@dataclasses.dataclass(frozen=True)
class Extra:
    """A state of a module's own."""

    x: torch.Tensor


def test_copies_for_a_later_writer_stay_tied_and_keep_versions_and_states_of_other_types():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.BatchNorm1d(4)
            self.first.bias = self.first.weight

        def get_extra_state(self):
            return Extra(torch.ones(2))

        def set_extra_state(self, state):
            pass

    state = Tied().state_dict()
    copied = saves.snapshot(state, Late())
    assert copied._metadata == state._metadata
    assert copied["first.weight"].data_ptr() == copied["first.bias"].data_ptr() != state["first.weight"].data_ptr()
    assert copied["first.running_var"].data_ptr() != copied["first.weight"].data_ptr()
    assert torch.equal(copied["_extra_state"].x, torch.ones(2))
    assert saves.snapshot(state, TorchCheckpointIO()) is state


def test_with_fabric_a_later_writer_gets_them_too(tmp_path):
    def rank(rank):
        late, now = Late(), []
        fabric = Fabric(strategy="topk_ddp", accelerator="cpu", devices=2, plugins=[late])
        fabric.launch()
        net = torch.nn.Linear(4, 4)
        net, adamw = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        for _ in range(3):
            fabric.backward(net(torch.randn(2, 4)).sum())
            adamw.step()
            fabric.save(tmp_path / "a.ckpt", {"net": net, "adamw": adamw})
            now.append(copy.deepcopy([net.state_dict(), adamw.state_dict()["state"]]))
        return [
            same([kept["net"], kept["adamw"]["state"]], then) for kept, then in zip(late.kept, now, strict=rank == 0)
        ]

    assert lightning_ranks(2, rank)[0] == [True] * 3
