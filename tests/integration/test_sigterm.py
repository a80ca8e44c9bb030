"""SIGTERM during a fit: all ranks end after the same batch with a complete checkpoint, and resume from it."""

import multiprocessing
import os
import re
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import SLURMEnvironment

from lightning_sparse import _compat
from tests.integration.trainers import Loader, Messages, Net, Told, lightning_ranks, strategy, trainer
from tests.processes import run_script
from tests.support.tiers import full, later

BATCHES = 40
OTHERS = "Rank 1 was told to end (SIGTERM). So all ranks end after the same batch."


class Validated(Net):
    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.training_step(batch, index)


def fit(rank, size, name, folder, told=None, net=Net, resume=False, **options):
    """Return how the fit ended: the error, its exit status, steps, weights, and numbers of batches of validation."""
    keep = pl.callbacks.OnExceptionCheckpoint(folder)
    callbacks = [keep] if told is None else [keep, Told(*told)]
    run = trainer(strategy(name, 0.1, process_group_backend="gloo", **options), size, callbacks=callbacks, max_epochs=2)
    model = net(torch.optim.AdamW, lr=0.01)
    error, status = "", None
    loaders = [Loader(rank, size, BATCHES) for _ in range(1 if net is Net else 2)]
    try:
        run.fit(model, *loaders, ckpt_path=keep.ckpt_path if resume else None)
    except SystemExit as caught:
        error, status = type(caught).__name__, caught.code
    validated = run.fit_loop.epoch_loop.val_loop.batch_progress.current.completed if net is not Net else 0
    return error, status, run.global_step, model.weights, validated, signal.getsignal(signal.SIGTERM)


PLACES = [
    ("on_train_batch_start", 6),
    ("on_after_backward", 5),
    ("on_before_optimizer_step", 6),
    ("on_train_batch_end", 5),
    ("on_before_zero_grad", 6),
]
"""A hook and a batch number for each rank. All are asked to end at different places, before the first can end."""


def all_told(rank, size, name, folder, options):
    ended = fit(rank, size, name, folder, PLACES[rank], **options)
    went_on = fit(rank, size, name, folder, resume=True, **options)
    # Use another folder, because Lightning resumes automatically from existing checkpoints.
    return ended, went_on, fit(rank, size, name, folder / "whole", **options)


@full
@pytest.mark.reliability(
    "SIGTERM for all ranks, each at a different place",
    checked="all end after the same batch; its checkpoint resumes bit for bit",
)
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("topk", 2, {"exchange": "update"}),
        pytest.param("topk", 3, {"exchange": "gradient"}, marks=full),
        pytest.param("topk", 5, {"exchange": "update", "broadcast_buffers": False}, marks=full),
        pytest.param("gaussiank", 2, {"exchange": "gradient"}, marks=full),
        pytest.param("dense", 2, {}, marks=full),
        pytest.param("int4", 3, {}, marks=full),
    ],
)
def test_told_at_different_places_all_end_and_go_on_bit_for_bit(name, size, options, tmp_path):
    ended, went_on, whole = zip(*lightning_ranks(size, all_told, size, name, tmp_path, options), strict=True)
    assert {error for error, *_ in ended} == {"SIGTERMException"}
    assert {status for _, status, *_ in ended} == {None}
    assert len({steps for *_, steps, _, _, _ in ended}) == 1
    assert 5 <= ended[0][2] < 2 * BATCHES
    assert {error for error, *_ in (*went_on, *whole)} == {""}
    for rank in range(size):
        assert torch.equal(went_on[rank][3], whole[rank][3])


def told_in_local_steps(rank, size, folder):
    ended = fit(rank, size, "topk", folder, PLACES[rank], exchange="update", local_steps=4)
    return ended, fit(rank, size, "topk", folder, resume=True, exchange="update", local_steps=4)


@full
def test_between_two_exchanges_a_checkpoint_has_the_updates_of_all_ranks(tmp_path):
    ended, went_on = zip(*lightning_ranks(2, told_in_local_steps, 2, tmp_path), strict=True)
    assert {error for error, *_ in ended} == {"SIGTERMException"}
    assert ended[0][2] == ended[1][2]
    assert ended[0][2] % 4
    assert torch.equal(ended[0][3], ended[1][3])
    assert went_on[0][2] == 2 * BATCHES
    assert torch.equal(went_on[0][3], went_on[1][3])


def one_told(rank, size, folder):
    messages = Messages()
    ended = fit(rank, size, "topk", folder, ("on_train_batch_start", 7) if rank == 1 else None)
    return ended, sorted(path.name for path in Path(folder, "on_exception.ckpt.residuals").iterdir()), messages.texts


def test_all_say_who_was_told_and_those_that_were_not_end_with_an_error(tmp_path):
    ranks, files, messages = zip(*lightning_ranks(3, one_told, 3, tmp_path), strict=True)
    assert [rank[:2] for rank in ranks] == [
        ("SIGTERMException", OTHERS),
        ("SIGTERMException", None),
        ("SIGTERMException", OTHERS),
    ]
    assert len({rank[2] for rank in ranks}) == 1
    assert [len(names) for names in files] == [3] * 3
    assert [OTHERS in texts for texts in messages] == [False, True, False]  # the others raise it


class GroupTold(Told):
    """Lets another process send SIGTERM to this one and its DataLoader's worker, as torchrun does."""

    def strike(self, *_: object) -> None:
        self.count -= 1
        if self.count == 0:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGUSR1)  # as SLURM does
            subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=True, start_new_session=True)


def group_told(rank, size, folder):
    os.setpgid(0, 0)
    os.environ["PL_SEED_WORKERS"] = "1"
    keep = pl.callbacks.OnExceptionCheckpoint(folder)
    told = GroupTold("on_train_batch_start", 5)
    run = trainer(strategy("topk", 0.1, process_group_backend="gloo"), size, callbacks=[keep, told])
    data = torch.utils.data.TensorDataset(torch.arange(16).repeat(64), torch.arange(4).repeat(256))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    model = Net(torch.optim.AdamW, lr=0.01)
    with pytest.raises(SystemExit):
        run.fit(model, loader)
    steps, init = run.global_step, run.train_dataloader.worker_init_fn
    again = trainer(strategy("topk", 0.1, process_group_backend="gloo"), size, limit_train_batches=2)
    again.fit(model, run.train_dataloader)
    return steps, init.func.__name__, again.train_dataloader.worker_init_fn.func.__name__


@full
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_workers_of_a_data_loader_get_the_signal_too_and_load_the_last_batch(tmp_path):
    ranks = lightning_ranks(2, group_told, 2, tmp_path)
    assert len(set(ranks)) == 1
    assert 5 <= ranks[0][0] < 128
    assert ranks[0][1:] == ("pl_worker_init_function",) * 2  # as before the fit
    assert (tmp_path / "on_exception.ckpt").exists()


def requeued(rank, size, folder, told):
    slurm = {"NTASKS": size, "NTASKS_PER_NODE": size, "PROCID": rank, "LOCALID": rank, "NODEID": 0, "JOB_ID": 17}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in slurm.items()})
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    callbacks = [Told(*PLACES[rank], signal.SIGUSR1)] if rank in told else []
    ends = []
    for each in (callbacks, []):
        run = trainer(
            strategy("topk", 0.1, process_group_backend="gloo", exchange="update"),
            size,
            callbacks=each,
            default_root_dir=folder,
            plugins=[SLURMEnvironment()],
        )
        model = Net(torch.optim.AdamW, lr=0.01)
        try:
            run.fit(model, Loader(rank, size, BATCHES))
            ends.append("complete")
        except SystemExit as error:
            ends.append(error.code)
        ends.append(run.global_step)
    return ends, model.weights


@full
@pytest.mark.parametrize("told", [(1,), pytest.param((0, 1), marks=full)])
def test_slurms_signal_saves_a_checkpoint_of_one_batch_and_requeues_the_job_once(told, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    (first, weights), (second, theirs) = lightning_ranks(2, requeued, 2, tmp_path, told)
    assert first == second
    assert first[0] is None
    assert 5 <= first[1] < BATCHES
    assert first[2:] == ["complete", BATCHES]
    assert torch.equal(weights, theirs)
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert len(list(tmp_path.glob("hpc_ckpt-1.ckpt.residuals/*"))) == 2
    # Without the checkpoint, a later job starts anew.
    (tmp_path / "hpc_ckpt_1.ckpt").unlink()
    later = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    assert later._checkpoint_connector._hpc_resume_path is None


class Peers(pl.Callback):
    """Keeps the connection, to read afterwards which failure the ranks have reported."""

    def on_train_start(self, run: pl.Trainer, *_: object) -> None:
        self.peers = run.strategy.exchanger.comm.peers


def told_at_the_same_place(rank, size):
    peers = Peers()
    callbacks = [peers, Told("on_train_batch_end", 5)]
    run = trainer(strategy("topk", 0.1, process_group_backend="gloo"), size, callbacks=callbacks)
    with pytest.raises(SystemExit):
        run.fit(Net(torch.optim.AdamW, lr=0.01), Loader(rank, size, BATCHES))
    return peers.peers.reported()


@later
def test_it_is_no_failure_that_would_interrupt_the_last_batch_of_others():
    assert lightning_ranks(2, told_at_the_same_place, 2) == ["", ""]


def told_in_validation(rank, size, folder):
    return fit(rank, size, "topk", folder, ("on_validation_batch_end", 10 + 3 * rank), net=Validated)


@full
def test_told_in_validation_they_end_there(tmp_path):
    ranks = lightning_ranks(2, told_in_validation, 2, tmp_path)
    assert {rank[0] for rank in ranks} == {"SIGTERMException"}
    assert {rank[2] for rank in ranks} == {BATCHES}
    (validated,) = {rank[4] for rank in ranks}
    assert 10 < validated < BATCHES


def told_in_a_batch(rank, size, folder, hook, count, told):
    return fit(rank, size, "topk", folder, (hook, count) if rank in told else None, net=Validated, exchange="update")


@pytest.mark.parametrize("told", [(0,), pytest.param((1,), marks=full), pytest.param((0, 1), marks=full)])
@pytest.mark.parametrize(
    ("hook", "count", "steps"),
    [
        ("on_train_batch_start", 2 * BATCHES, 2 * BATCHES),  # the last of all
        pytest.param("on_validation_batch_end", 2 * BATCHES, 2 * BATCHES, marks=full),  # the last of validation
        ("on_validation_batch_start", 1, 0),  # of two before training
        pytest.param("on_train_start", 1, 1, marks=full),
    ],
)
def test_told_before_the_first_batch_or_in_the_last_they_end_together(hook, count, steps, told, tmp_path):
    ranks = lightning_ranks(2, told_in_a_batch, 2, tmp_path, hook, count, told)
    assert {rank[0] for rank in ranks} == {"SIGTERMException"}
    assert [rank[1] is None for rank in ranks] == [rank in told for rank in range(2)]
    assert len({rank[2] for rank in ranks}) == 1
    assert abs(ranks[0][2] - steps) <= 1
    assert torch.equal(ranks[0][3], ranks[1][3])
    assert (tmp_path / "on_exception.ckpt").exists()
    assert len(list(tmp_path.glob("on_exception.ckpt.residuals/*"))) == 2


class Twice(pl.Callback):
    """Trains a few batches before training, as LearningRateFinder does, and looks at the threads that are left."""

    def on_train_start(self, run: pl.Trainer, *_: object) -> None:
        run.strategy.on_train_start()

    @staticmethod
    def threads() -> int:
        return sum(thread.name == "lightning_sparse" for thread in threading.enumerate())


def begun_twice(rank, size):
    before = Twice.threads()
    run = trainer(strategy("topk", 0.1, process_group_backend="gloo"), size, callbacks=[Twice()])
    run.fit(Net(torch.optim.AdamW, lr=0.01), Loader(rank, size, 10))
    return Twice.threads() - before


@later
def test_no_thread_is_left():
    assert lightning_ranks(2, begun_twice, 2) == [0, 0]


class Slow(pl.plugins.io.TorchCheckpointIO):
    """Receives SIGTERM while it writes pending files after training."""

    def teardown(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def told_in_teardown(rank, size):
    before = signal.getsignal(signal.SIGTERM)
    plugins = [Slow()] if rank == 1 else []
    run = trainer(strategy("topk", 0.1, process_group_backend="gloo"), size, plugins=plugins)
    run.fit(Net(torch.optim.AdamW, lr=0.01), Loader(rank, size, 10))
    return run.global_step, signal.getsignal(signal.SIGTERM) == before


@later
def test_told_while_training_is_torn_down_it_still_is():
    assert lightning_ranks(2, told_in_teardown, 2) == [(10, True)] * 2


class Collectives(pl.Callback):
    """Counts the default process group's in each batch."""

    def __init__(self) -> None:
        self.before: list[int] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.before.append(_compat.collectives_so_far())


def quietly(rank, size):
    before = signal.getsignal(signal.SIGTERM)
    count = Collectives()
    run = trainer(strategy("topk", 0.1, process_group_backend="gloo", broadcast_buffers=False), size, callbacks=[count])
    run.fit(Net(torch.optim.AdamW, lr=0.01), Loader(rank, size, 10))
    restored = signal.getsignal(signal.SIGTERM) == before
    return count.before, restored, sorted(vars(run.fit_loop.epoch_loop))


@later
def test_nothing_is_sent_in_a_batch_to_learn_of_it():
    for before, restored, names in lightning_ranks(2, quietly, 2):
        assert len(before) == 10
        assert before[2] == before[-1]  # DDP rebuilds its buckets before that
        assert restored
        assert "_broadcast_sigterm_tensor" not in names


def idle(ready: Any) -> None:
    ready.set()
    for _ in range(1000):
        time.sleep(0.1)  # Python runs no handler in a sleep if the signal comes just before it


class Forks(pl.Callback):
    def on_train_batch_end(self, run: pl.Trainer, *_: object) -> None:
        if run.global_step == 3:
            fork = multiprocessing.get_context("fork")
            child = fork.Process(target=idle, args=(ready := fork.Event(),))
            child.start()
            assert ready.wait(60)  # Python forgets a signal that comes during the fork
            child.terminate()
            child.join(60)
            self.status = child.exitcode


def forking(rank, size):
    forks = Forks()
    run = trainer(strategy("topk", 0.1, process_group_backend="gloo"), size, callbacks=[forks])
    run.fit(Net(torch.optim.AdamW, lr=0.01), Loader(rank, size, 10))
    return forks.status, run.global_step


@full
def test_a_forked_child_is_no_rank():
    assert lightning_ranks(2, forking, 2) == [(-signal.SIGTERM, 10)] * 2


LAUNCHED = """
    import sys

    from tests.integration.trainers import Loader, Net, Told, trainer

    if __name__ == "__main__":
        run = trainer(sys.argv[1], 2, callbacks=[Told("on_train_batch_end", 5)])
        run.fit(Net(), Loader(0, 1, 40))
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=full)])
def test_a_process_that_has_launched_the_ranks_ends_too(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    ended = run_script(script, f"topk_ddp_{start}", timeout=200)
    assert ended.returncode == 1
    assert re.search(r"Rank \d was told to end \(SIGTERM\)\. So all ranks end after the same batch\.", ended.stderr)
