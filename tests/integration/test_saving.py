"""A checkpoint has its sidecar files however it is saved, and whatever fails in the meantime."""

import errno
import os
import shutil
import signal
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_sparse import SparseDDPStrategy
from lightning_sparse import checkpoint as sidecars
from tests.integration.checkpoints import (
    MOMENTUM,
    STEP_4,
    At,
    AtStart,
    Scored,
    error_of,
    fit,
    misplaced,
    result,
    saving,
    sidecar_names,
    with_warnings,
)
from tests.integration.trainers import Loader, Net, Unhooked, lightning_ranks, same, trainer
from tests.processes import run_script
from tests.support.tiers import full, later, tiers

BEST = {"monitor": "score", "mode": "max"}

WAYS = {
    "every step, top 1": (lambda d: [saving(d, every_n_train_steps=1, save_top_k=1)], ["step=7"]),
    "top 2": (lambda d: [saving(d, every_n_train_steps=1, save_top_k=2, **BEST)], ["step=6", "step=7"]),
    "last": (lambda d: [saving(d, every_n_train_steps=1, save_top_k=0, save_last=True)], ["last"]),
    "last and top 2": (
        lambda d: [saving(d, every_n_train_steps=1, save_top_k=2, save_last=True, **BEST)],
        ["last", "step=6", "step=7"],
    ),
    "link": (
        lambda d: [saving(d, every_n_train_steps=1, save_top_k=1, save_last="link")],
        ["last", "step=7"],
    ),
    "by hand": (lambda d: [At(step, lambda t: t.save_checkpoint(d / "hand.ckpt")) for step in (5, 7)], ["hand"]),
}


@pytest.mark.reliability(
    "ModelCheckpoint (top 1, top 2, last.ckpt as file and as link), by hand; AsyncCheckpointIO",
    checked="sidecar files of the checkpoints on disk and of no others; bit-identical resume from each",
    methods=["topk"],
)
@pytest.mark.parametrize("io", tiers([None, AsyncCheckpointIO], [AsyncCheckpointIO]))
@pytest.mark.parametrize("way", tiers(WAYS, ["last"]))
def test_every_way_to_save(way, io, tmp_path):
    callbacks, expected = WAYS[way]

    def rank(rank):
        straight = result(*fit("topk", rank, net=Scored(**MOMENTUM)))
        plugins = [io()] if io else []
        fit("topk", rank, net=Scored(**MOMENTUM), max_steps=7, callbacks=callbacks(tmp_path), plugins=plugins)
        dist.barrier()
        wrong = misplaced(tmp_path, others=False)
        # Under stock ddp AsyncCheckpointIO leaves a checkpoint behind that was removed before it was written.
        assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == expected
        resumed = [
            result(*fit("topk", rank, net=Scored(**MOMENTUM), ckpt_path=tmp_path / f"{checkpoint}.ckpt"))
            for checkpoint in expected
            if (way, checkpoint) != ("top 2", "step=6")  # saves time
        ]
        return wrong, [same(weights, straight) for weights in resumed]

    results = lightning_ranks(2, rank)
    assert results == [([], [True] * len(results[0][1]))] * 2


class Slow(TorchCheckpointIO):
    """Writes a checkpoint three steps later, and looks for misplaced sidecar files before and after."""

    def __init__(self, directory):
        self.directory, self.wrong, self.saves, self.steps = directory, [], 0, 0

    def step(self, trainer):
        self.steps = trainer.global_step

    def save_checkpoint(self, *args, **options):
        while self.steps < min(self.saves + 4, 12):
            time.sleep(0.002)
        self.wrong += misplaced(self.directory)
        super().save_checkpoint(*args, **options)
        self.wrong += misplaced(self.directory)
        self.saves += 1


@full
@pytest.mark.reliability(
    "AsyncCheckpointIO over slow storage, several saves pending",
    checked="checkpoints on disk always have their sidecar files; no others remain at the end",
    methods=["topk"],
)
@pytest.mark.parametrize("options", [{"save_top_k": 0, "save_last": True}, {"save_top_k": 1}])
def test_slow_asynchronous_saves(options, tmp_path):
    def rank(rank):
        io = Slow(tmp_path)
        callbacks = [saving(tmp_path, every_n_train_steps=1, **options), *(At(n, io.step) for n in range(1, 13))]
        straight = result(*fit("topk", rank, callbacks=callbacks, plugins=[AsyncCheckpointIO(io)]))
        dist.barrier()
        last = max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        _, run = fit("topk", rank, ckpt_path=last)
        assert rank or io.saves == 12
        return io.wrong, misplaced(tmp_path, others=False), same(run.strategy.reducer.state_dict(), straight[2])

    assert lightning_ranks(2, rank) == [([], [], True)] * 2


@later
def test_a_save_after_fit_and_one_of_weights_alone(tmp_path):
    def rank(rank):
        _, run = fit("topk", rank, callbacks=[saving(tmp_path, save_top_k=1, save_weights_only=True)])
        run.save_checkpoint(tmp_path / "hand.ckpt", weights_only=True)
        run.save_checkpoint(tmp_path / "after.ckpt")
        before = run.strategy.reducer.state_dict()
        dist.barrier()
        _, run = fit("topk", rank, max_epochs=3, callbacks=[at_start := AtStart()], ckpt_path=tmp_path / "after.ckpt")
        assert run.global_step == 18
        return same(at_start.state, before)

    assert lightning_ranks(2, rank) == [True, True]
    assert {path.name: sidecar_names(path) is not None for path in tmp_path.glob("*.ckpt")} == {
        "step=12.ckpt": False,
        "hand.ckpt": False,
        "after.ckpt": True,
    }
    assert [path.name for path in tmp_path.glob("*.residuals")] == ["after.ckpt.residuals"]


@later
@pytest.mark.reliability(
    "saving and equal-size resume",
    checked="each rank opens its own sidecar file and no other: no residual passes through rank 0",
    methods=["topk"],
)
def test_no_rank_opens_the_files_of_another(tmp_path):
    def rank(rank):
        opened = []
        sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
        fit("topk", rank, callbacks=[saving(tmp_path)])
        fit("topk", rank, ckpt_path=tmp_path / STEP_4)
        return [path.split(".rank")[1][0] for path in opened if ".residuals/" in path]

    for number, found in enumerate(lightning_ranks(2, rank)):
        assert found == [str(number)] * (6 + 1)  # saves, and one read


def full_disk(part, rank):
    """Make writes fail for want of space: of "sidecar" files, or of the "main" checkpoint."""
    write = LocalFileOpener.write

    def full(self, data):
        if (".residuals/" in self.path) == (part == "sidecar"):
            write(self, bytes(data)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    LocalFileOpener.write = full


def killed(part, rank):
    """Kill a rank between writing a file and giving it its name."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if part == "sidecar":
        LocalFileSystem.mv = die
    else:
        LocalFileOpener.commit = die


@full
@pytest.mark.reliability(
    "disk full, or kill -9, while sidecar files or a checkpoint are written, on one rank",
    checked="the error on all ranks; last.ckpt and its sidecar files as they were: bit-identical resume",
    methods=["topk"],
)
@pytest.mark.parametrize(
    ("part", "victim"),
    [("sidecar", 1), pytest.param("sidecar", 0, marks=full), pytest.param("main", 0, marks=full)],
)
@pytest.mark.parametrize("trouble", tiers([full_disk, killed], [full_disk]))
def test_trouble_while_saving(trouble, part, victim, saved, tmp_path):
    def rank(rank):
        last = [saving(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)]
        if rank == victim:
            last.insert(0, At(5, lambda _: trouble(part, rank)))
        return error_of(fit, "topk", rank, callbacks=last)

    texts = lightning_ranks(2, rank)
    if trouble is full_disk:
        assert texts[0] == texts[1]
        assert f"could not be written (rank {victim}: OSError: [Errno 28] No space left on device)" in texts[0]
        assert misplaced(tmp_path, others=False) == []
    else:
        assert texts[victim] is None
        assert texts[1 - victim]
        assert misplaced(tmp_path) == []
    resumed = lightning_ranks(2, lambda rank: result(*fit("topk", rank, ckpt_path=tmp_path / "last.ckpt")))
    assert same(resumed, saved[1])


class Projecting(torch.optim.AdamW):
    """Keeps an object in its state, as GaLore does, and one among its options."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.defaults["chooses"] = self.param_groups[0]["chooses"] = slice(2)

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            state["projector"] = slice(1)
        return loss


@later
def test_a_state_that_cannot_be_copied_or_read(tmp_path):
    plain = sidecars.plain

    def full_memory(*_):
        raise MemoryError("no room for a copy")

    def run(rank):
        saves = [saving(tmp_path)]
        if rank == 1:
            saves.insert(0, At(6, lambda _: setattr(sidecars, "plain", full_memory)))
        net = Net(Projecting, lr=0.01)
        options = {"net": net, "ours": {"exchange": "update"}}
        fails, records = with_warnings(error_of, fit, "topk", rank, callbacks=saves, **options)
        entry = torch.load(tmp_path / STEP_4, weights_only=False)[sidecars.KEY]
        sidecars.plain = plain
        torch.serialization.add_safe_globals([slice])  # for Lightning's file
        looks = pl.callbacks.LambdaCallback(on_train_start=lambda run, _: found.append(run.optimizers[0]))
        found, options["net"] = [], Net(Projecting, lr=0.01)
        fit("topk", rank, callbacks=[looks], ckpt_path=tmp_path / STEP_4, **options)
        assert all(each["projector"] == slice(1) and "exp_avg" in each for each in found[0].state.values())
        assert len(found[0].state) == 7
        assert found[0].param_groups[0]["chooses"] == slice(2)
        return fails, records, sidecars.read(tmp_path / STEP_4, entry, rank, 2)[0]

    for rank, (fails, records, state) in enumerate(lightning_ranks(2, run)):
        assert len(records) == (0 if rank else 2)
        assert "could not be written (rank 1: MemoryError: no room for a copy)" in fails
        for key, text in zip(("projector", "chooses"), records, strict=False):
            assert f"The state of optimizer 0 has '{key}' (slice), which a safe load cannot read" in text
        moments = state["optimizers"]["0"]["state"]
        assert all({*kept} == {"step", "exp_avg", "exp_avg_sq"} for kept in moments.values())


@full
@pytest.mark.parametrize(("part", "victim"), [("sidecar", 1), ("main", 0)])
def test_a_first_checkpoint_that_cannot_be_written_leaves_nothing(part, victim, tmp_path):
    def rank(rank):
        last = [saving(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)]
        if rank == victim:
            last.insert(0, At(2, lambda _: full_disk(part, rank)))
        return error_of(fit, "topk", rank, callbacks=last)

    texts = lightning_ranks(2, rank)
    assert texts[0] == texts[1]
    assert f"could not be written (rank {victim}: OSError: [Errno 28] No space left on device)" in texts[0]
    assert list(tmp_path.iterdir()) == []


@full
def test_sidecar_files_stay_if_the_checkpoint_is_written_in_spite_of_an_error(tmp_path):
    class RaisesAfterWriting(TorchCheckpointIO):
        def save_checkpoint(self, *args, **options):
            super().save_checkpoint(*args, **options)
            raise OSError("the save before this one failed")

    def rank(rank):
        last = [saving(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)]
        return error_of(fit, "topk", rank, callbacks=last, plugins=[RaisesAfterWriting()])

    assert all("the save before this one failed" in text for text in lightning_ranks(2, rank))
    assert misplaced(tmp_path, others=False) == []
    assert (tmp_path / "last.ckpt").exists()


class Failing(Net):
    """Raises in a training step of one rank."""

    def __init__(self, step, rank):
        super().__init__(**MOMENTUM)
        self.fails = step, rank

    def training_step(self, batch, index):
        if self.fails == (self.global_step, self.global_rank):
            raise ArithmeticError("of the user")
        return super().training_step(batch, index)


@pytest.mark.reliability(
    "checkpoint on an exception of one rank",
    checked="written at once, without residuals, with a warning",
    methods=["topk"],
)
def test_a_checkpoint_on_an_exception_in_one_rank(tmp_path):
    def rank(rank):
        started = time.monotonic()
        callbacks = [pl.callbacks.OnExceptionCheckpoint(tmp_path)]
        error, records = with_warnings(error_of, fit, "topk", rank, net=Failing(3, 1), callbacks=callbacks)
        assert time.monotonic() - started < 20
        _, later = with_warnings(fit, "topk", rank, ckpt_path=tmp_path / "on_exception.ckpt")
        return error, records, later

    (error, records, later), theirs = lightning_ranks(2, rank)
    assert "Rank 1 failed at step 3: ArithmeticError: of the user" in error
    assert theirs == ("of the user", [], [])
    assert "gets no residuals: training failed in the middle of a step" in records[-1]
    assert later == []
    assert sidecar_names(tmp_path / "on_exception.ckpt") is None


WAITING = {
    "unused": {"exchange": "gradient", "find_unused_parameters": True},
    "next_step": {"exchange": "update", "overlap": "next_step"},
    "local_steps": {"exchange": "update", "local_steps": 2},
}
"""Exchanges in which the other rank waits for the failing one in a collective of the default group. It is that of DDP
about unused parameters, or that of the weights before a validation."""


@pytest.mark.parametrize("how", tiers([*WAITING], ["unused", "next_step"]))
def test_a_checkpoint_on_an_exception_does_not_join_a_collective_that_waits(how, tmp_path):
    class Validated(Failing):
        def validation_step(self, batch, index):
            pass

    def fails(trainer):
        if trainer.global_rank == 1:
            raise ArithmeticError("of the user")

    def rank(rank):
        started = time.monotonic()
        error = error_of(
            trainer(
                SparseDDPStrategy("topk", density=0.05, timeout=timedelta(seconds=15), **WAITING[how]),
                2,
                callbacks=[*([] if how == "unused" else [At(4, fails)]), pl.callbacks.OnExceptionCheckpoint(tmp_path)],
                val_check_interval=4,
                num_sanity_val_steps=0,
            ).fit,
            Validated(3 if how == "unused" else -1, 1),
            *(Loader(rank, 2, 8) for _ in range(2)),
        )
        return error, time.monotonic() - started

    (error, seconds), (own, same_seconds) = lightning_ranks(2, rank)
    assert own == "of the user"
    assert "ArithmeticError: of the user" in error
    assert max(seconds, same_seconds) < 12
    assert (tmp_path / "on_exception.ckpt").exists()


@full
def test_a_checkpoint_on_an_exception_between_steps(saved, tmp_path):
    def interrupt(_):
        raise ArithmeticError("of the user")

    def rank(rank):
        callbacks = [At(4, interrupt), pl.callbacks.OnExceptionCheckpoint(tmp_path)]
        error, records = with_warnings(error_of, fit, "topk", rank, callbacks=callbacks)
        fit("topk", rank, callbacks=[start := AtStart()], ckpt_path=tmp_path / "on_exception.ckpt")
        fit("topk", rank, callbacks=[expected := AtStart()], ckpt_path=saved[0] / STEP_4)
        return error, records, same(start.state, expected.state)

    assert lightning_ranks(2, rank) == [("of the user", [], True)] * 2


@full
@pytest.mark.parametrize(
    ("exchange", "optimizer", "expected"),
    [("gradient", torch.optim.SGD, 2), ("update", torch.optim.SGD, 0), ("gradient", Unhooked, 0)],
)
def test_a_checkpoint_between_backward_and_step_is_warned_of(exchange, optimizer, expected, tmp_path):
    class Saving(pl.Callback):
        def save(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / "now.ckpt")

        on_before_optimizer_step = on_train_batch_end = save  # in the step, and after it

    def rank(rank):
        options = {"ours": {"exchange": exchange}, "callbacks": [Saving()], "max_epochs": 1, "batches": 2}
        _, records = with_warnings(fit, "topk", rank, net=Net(optimizer), **options)
        return [text for text in records if "is saved between a backward pass and the optimizer's step" in text]

    first, second = lightning_ranks(2, rank)
    assert (len(first), second) == (expected, [])


@later
def test_weights_that_a_test_has_loaded_are_saved_without_the_residuals_of_the_fit(tmp_path):
    def rank(rank):
        run = trainer(SparseDDPStrategy("topk", density=0.05), 2, limit_test_batches=1)
        net = Net(torch.optim.AdamW)
        net.test_step = net.training_step
        run.fit(net, Loader(rank, 2, 2))
        for name in ("best.ckpt", "later.ckpt"):
            run.save_checkpoint(tmp_path / name)
            run.test(net, Loader(rank, 2, 2), ckpt_path=tmp_path / "best.ckpt", verbose=False)
        infos = [torch.load(tmp_path / name)[sidecars.KEY] for name in ("best.ckpt", "later.ckpt")]
        names = zip(("best.ckpt", "later.ckpt"), infos, strict=True)
        states = [sidecars.read(tmp_path / name, info, rank, 2)[0]["elements"] for name, info in names]
        return run.strategy.reducer.step, [sum(x.abs().sum() for x in each["residual"].values()) for each in states]

    for steps, (best, last) in lightning_ranks(2, rank):
        assert steps == 2
        assert best > 0
        assert last == 0


class FailingOutsideSteps(Net):
    """Raises an error on rank 1 while the other ranks wait for it in a collective of Lightning, or in none."""

    def __init__(self, where, rank):
        super().__init__(**MOMENTUM)
        self.where, self.rank = where, rank

    def fail(self, where):
        if (self.where, self.rank) == (where, 1):
            raise ArithmeticError("of the user")

    def configure_optimizers(self):
        self.fail("optimizers")
        return super().configure_optimizers()

    def validation_step(self, batch, index):
        self.fail("validation")
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def on_train_epoch_end(self):
        self.fail("epoch end")

    def on_train_end(self):
        self.fail("end")


@pytest.mark.reliability(
    "an exception of one rank outside a step, and a checkpoint on it",
    checked="its own error on that rank, an error on the other, within 20 s",
    methods=["topk"],
)
@pytest.mark.parametrize("exchange", tiers(["gradient", "update"], ["update"]))
@pytest.mark.parametrize("where", tiers(["optimizers", "validation", "epoch end", "end"], ["optimizers", "end"]))
def test_a_checkpoint_on_an_exception_of_one_rank_alone(where, exchange, tmp_path):
    def rank(rank):
        started = time.monotonic()
        run = trainer(
            SparseDDPStrategy("topk", density=0.05, exchange=exchange, process_group_backend="gloo"),
            2,
            callbacks=[pl.callbacks.OnExceptionCheckpoint(tmp_path), saving(tmp_path / "saved")],
            max_epochs=2,
        )
        loaders = [Loader(rank, 2, 6) for _ in range(2)]
        error = error_of(run.fit, FailingOutsideSteps(where, rank), *loaders)
        if rank == 1:
            (tmp_path / "error").write_text(error)
            os._exit(1)  # as a script ends that the error has left
        return error, time.monotonic() - started

    (error, seconds), _ = lightning_ranks(2, rank)
    assert (tmp_path / "error").read_text() == "of the user"
    assert error is None if where == "end" else error.count("of the user") == 1, error
    assert seconds < 20


@full
def test_lightnings_checkpoint_on_an_exception_of_one_rank_asks_no_other_rank(tmp_path):
    """ModelCheckpoint asks all ranks whether last.ckpt exists."""

    def rank(rank):
        options = {"save_on_exception": True, "save_last": True}
        run = trainer(
            SparseDDPStrategy("topk", density=0.05),
            2,
            callbacks=[pl.callbacks.ModelCheckpoint(tmp_path / "saved", **options)],
            max_epochs=2,
        )
        error = error_of(run.fit, FailingOutsideSteps("epoch end", rank), *[Loader(rank, 2, 6) for _ in range(2)])
        if rank == 1:
            (tmp_path / "error").write_text(error)
            os._exit(1)
        return error

    error, _ = lightning_ranks(2, rank)
    assert (tmp_path / "error").read_text() == "of the user"
    assert error.count("of the user") == 1, error


AFTER_FORK = """
    import sys

    import torch

    from tests.integration.trainers import Loader, Net, trainer

    run = trainer("topk_ddp_fork", 2)
    run.fit(Net(torch.optim.AdamW, lr=0.01), Loader(0, 1, 4))
    run.save_checkpoint(sys.argv[1])
"""

AFTER_FORK_TO_LOAD = """
    import sys

    import torch

    from tests.integration.checkpoints import saving
    from tests.integration.trainers import Loader, Net, trainer

    folder, strategy = sys.argv[1:]
    run = trainer(strategy, 2, callbacks=[saving(folder, every_n_train_steps=4)])
    net = Net(torch.optim.AdamW, lr=0.01)
    run.fit(net, Loader(0, 1, 4))
    run.strategy.optimizers = [net.configure_optimizers()]
    path = f"{folder}/step=4.ckpt"
    checkpoint = run.strategy.load_checkpoint(path)
    run.strategy.load_model_state_dict(checkpoint)
    run.strategy.load_optimizer_state_dict(checkpoint)
    steps = [float(state["step"]) for state in run.strategy.optimizers[0].state.values()]
    same = all(torch.equal(net.state_dict()[name], x) for name, x in checkpoint["state_dict"].items())
    print("steps", set(steps), same)
    run = trainer(strategy, 2, max_epochs=2)
    run.fit(net, Loader(0, 1, 4), ckpt_path=path)
    print(run.state.status.value)
"""


@later
def test_a_process_that_has_forked_the_ranks_saves_without_residuals(tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "a.ckpt"
    script.write_text(textwrap.dedent(AFTER_FORK))
    ended = run_script(script, str(path), timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "gets no residuals: they belong to the processes that trained" in ended.stderr
    assert path.exists()


@later
@pytest.mark.parametrize("strategy", tiers(["topk_ddp_fork", "topk_ddp_spawn", "ddp_fork"], ["topk_ddp_fork"]))
def test_a_process_that_has_forked_the_ranks_restores_without_residuals(strategy, tmp_path):
    script = tmp_path / "script.py"
    guarded = textwrap.indent(textwrap.dedent(AFTER_FORK_TO_LOAD), "    ")
    script.write_text(f"if __name__ == '__main__':\n{guarded}")
    ended = run_script(script, str(tmp_path / "saved"), strategy, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert "steps {4.0} True\n" in ended.stdout  # gloo of torch 2.8 prints in between
    assert ended.stdout.endswith("finished\n")
    assert ("they belong to processes that train, and this one does not" in ended.stderr) == ("topk" in strategy)


def test_a_process_that_did_not_train_warns_that_it_has_no_residuals(tmp_path):
    # The process that starts the ranks by spawn or fork does not train.
    parent = SparseDDPStrategy("topk")
    _, records = with_warnings(parent.save_checkpoint, {"optimizer_states": []}, tmp_path / "a.ckpt")
    assert "gets no residuals: they belong to the processes that trained" in records[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@full
@pytest.mark.reliability(
    "nodes without a shared disk",
    checked="each keeps the sidecar files of existing checkpoints, and no others; bit-identical resume",
    methods=["topk"],
)
@pytest.mark.parametrize("way", tiers(WAYS, ["last"]))
def test_nodes_without_a_shared_disk_keep_the_sidecar_files_of_the_checkpoints_that_there_are(way, tmp_path):
    """The same path is another folder for each rank."""
    callbacks, expected = WAYS[way]

    def rank(rank):
        straight = result(*fit("topk", rank, net=Scored(**MOMENTUM)))
        disk = tmp_path / f"disk{rank}"
        disk.mkdir()
        os.chdir(disk)
        path, real = Path("/proc/self/cwd"), os.path.realpath
        os.path.realpath = lambda x, **options: x if str(x).startswith(str(path)) else real(x, **options)
        fit("topk", rank, net=Scored(**MOMENTUM), max_steps=7, callbacks=callbacks(path))
        found = sorted(file.name for file in disk.glob("*.residuals/*"))
        checkpoints = tmp_path / "disk0"
        needed = {name for each in checkpoints.glob("*.ckpt") for name in sidecar_names(each)}
        if rank:
            for each in checkpoints.glob("*.ckpt"):
                shutil.copy(each, disk)
        dist.barrier()
        again = result(*fit("topk", rank, net=Scored(**MOMENTUM), ckpt_path=path / f"{expected[-1]}.ckpt"))
        return found, sorted(name for name in needed if f"rank{rank}" in name), same(again, straight)

    for found, needed, resumed in lightning_ranks(2, rank):
        assert found == needed
        assert resumed


@later
def test_a_rank_that_ends_training_alone_does_not_wait_in_a_collective(tmp_path):
    """The other ranks wait for it in a step. At the end it would tell them which sidecar files are gone."""

    def rank(rank):
        net = Net()
        net.layers[1] = torch.nn.Identity()  # without buffers, which DDP would broadcast first
        stops = At(4, lambda trainer: setattr(trainer, "should_stop", rank == 1))
        started = time.monotonic()
        error = error_of(fit, "topk", rank, net=net, callbacks=[saving(tmp_path), stops])
        return error, time.monotonic() - started

    (error, seconds), (other, _) = lightning_ranks(2, rank, timeout=60)
    assert "Rank 1 pauses after 4 steps, for a validation, a checkpoint, another density or" in str(error)
    assert other is None
    assert seconds < 30
