"""After any failure, every rank soon ends with an error that names the cause. No rank hangs."""

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse
from lightning_sparse import NonFiniteGradient, RankFailure, Reducer, attach, attach_updates, simulate
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.hooks import session
from lightning_sparse.kernels import launch
from lightning_sparse.observer import Observer
from lightning_sparse.strategies import rendezvous
from tests.integration.failing import SOON, caught, of_both, step, training
from tests.integration.trainers import Loader, Net, lightning_ranks, strategy, trainer
from tests.processes import free_port, run_ranks
from tests.support.kernels import interpreted, needs_triton
from tests.support.tiers import full, later, one_in


def attach_with(rank: int, exchange: str, settings: list[dict[str, Any]]) -> tuple[str, str, float]:
    begin, _ = training(exchange)
    return caught(lambda: begin(**settings[rank]))


@one_in(2)
@of_both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([{"method": "topk"}, {"method": "gaussiank"}], "Ranks differ in method: rank 0 has Method(compressor=TopK("),
        ([{"density": 0.1}, {"density": 0.2}], ", which differ in density=0.1 and density=0.2. Give all ranks"),
        ([{"seed": 1}, {"seed": 2}], "Ranks differ in seed: rank 0 has 1, rank 1 has 2"),
        ([{}, {"granularity": "model"}], "Ranks differ in granularity: rank 0 has 'bucket', rank 1 has 'model'"),
        ([{}, {"density_warmup": [0.1], "density_warmup_steps": 5}], "Ranks differ in density_warmup"),
    ],
)
def test_ranks_with_different_settings(settings, message, exchange):
    results = run_ranks(2, attach_with, exchange, settings)
    assert message in results[0][1]
    for kind, text, seconds in results:
        assert kind == "RankFailure"
        assert "Give all ranks the same settings" in text
        assert seconds < SOON


def test_ranks_with_different_numbers_of_steps_before_an_exchange():
    for kind, text, seconds in run_ranks(2, attach_with, "update", [{"local_steps": 2}, {"local_steps": 3}]):
        assert kind == "RankFailure"
        assert "Ranks differ in method" in text
        assert "local_steps=2" in text
        assert "local_steps=3" in text
        assert seconds < SOON


def attach_in_another_version(rank: int) -> tuple[str, str, float]:
    begin, _ = training("gradient")
    lightning_sparse.__version__ = f"0.{rank}"
    return caught(lambda: begin(density=0.1 * (rank + 1)))


def test_ranks_with_different_versions():
    """It is the first difference, because another version may have other settings."""
    for _, text, _ in run_ranks(2, attach_in_another_version):
        assert "Ranks differ in __version__ of lightning_sparse: rank 0 has 0.0 (" in text


def attach_with_other_sources(rank: int) -> tuple[str, str, float]:
    begin, _ = training("gradient")
    session._source_hash = lambda: f"{rank:08x}"
    return caught(begin)


def test_files_that_are_no_sources_leave_the_hash_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "__init__.py").write_bytes(b"x = 1\n")
    (tmp_path / "kernels/loop.py").write_bytes(b"y = 1\n")
    monkeypatch.setattr(lightning_sparse, "__file__", str(tmp_path / "__init__.py"))
    hash_of = session._source_hash.__wrapped__
    before = hash_of()
    (tmp_path / ".#open.py").symlink_to("nothing")  # an editor's
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/copy.py").write_text("x = 2")
    (tmp_path / "kernels/loop.c").write_bytes(b"int x;")  # a wheel has none
    (tmp_path / "__init__.py").write_bytes(b"x = 1\r\n")
    assert hash_of() == before
    (tmp_path / "kernels/loop.py").write_bytes(b"y = 2\n")
    assert hash_of() != before


def test_ranks_with_clones_of_different_commits():
    for _, text, _ in run_ranks(2, attach_with_other_sources):
        assert "(source files 00000000), rank 1 has 0.1.0 (source files 00000001)." in text


def test_one_of_three_ranks_with_different_settings():
    results = run_ranks(3, attach_with, "gradient", [{}, {"density": 0.1}, {}])
    for kind, text, seconds in results:
        assert kind == "RankFailure"
        assert "Ranks differ in method: rank" in text
        assert seconds < SOON


def attach_after_another_attempt(rank: int) -> tuple[str, str, float]:
    """Attach with entries of killed processes in the store, which outlives them, as torchrun's does."""
    store, group = ProcessGroupComm().store, dist.group.WORLD.group_name
    prefix = f"lightning_sparse/{group}/0/handshake/0"
    if rank == 0:
        store.set(f"{prefix}/call", "0123 4567")
        store.set(f"{prefix}/0123/settings", "{}")
        store.set(f"{prefix}/0123/1", "89ab")
        store.set(f"{prefix}/0123/verdict", json.dumps({"nonces": ["89ab"], "error": "stale"}))
        store.set(f"{prefix}/refused", json.dumps([1, "89ab", "stale"]))
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # rank 1 sees only old entries in the meantime
    ddp = DistributedDataParallel(nn.Linear(50, 50))

    def run() -> None:
        attach(ddp)
        step(ddp)
        if rank == 1:
            time.sleep(1.2)  # so that rank 0 looks for reasons
        step(ddp)

    return caught(run)


def test_what_an_earlier_attempt_left_in_the_store_is_not_believed():
    assert [kind for kind, *_ in run_ranks(2, attach_after_another_attempt)] == ["no error"] * 2


def different_models(rank: int) -> tuple[str, str, float]:
    net = nn.ParameterDict({("weight" if rank == 0 else "kernel"): nn.Parameter(torch.ones(3))})
    return caught(lambda: attach(DistributedDataParallel(net)))


def test_ranks_with_different_models():
    # DDP itself compares shapes, not names.
    for kind, text, _ in run_ranks(2, different_models):
        assert kind == "RankFailure"
        assert "Ranks differ in model: rank" in text
        assert "kernel[3]" in text


def one_on_stock_ddp(rank: int) -> tuple[str, str, float]:
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    if rank == 0:
        return caught(lambda: attach(ddp))
    return caught(lambda: step(ddp))


@full
def test_one_rank_on_stock_ddp():
    first, _ = run_ranks(2, one_on_stock_ddp, timeout=4)
    assert first[0] == "RankFailure"
    # Both ranks wait for four seconds. If rank 1 is a little faster, its connections are closed then.
    waits = "waits for rank 1 to attach" in first[1] and "another strategy, such as stock 'ddp'" in first[1]
    assert waits or "Rank 1 has ended before it attached" in first[1], first[1]
    assert first[2] < SOON


def breaks_in_exchange(rank: int, size: int, exchange: str) -> tuple[str, str, float]:
    begin, step = training(exchange, nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)), bucket_cap_mb=0.005)
    reducer = begin("topk", density=0.1)
    step()
    step()
    if rank == size - 1:

        def broken(*args: Any) -> None:
            raise ArithmeticError("the abacus is missing a bead")

        reducer.begin = broken
    return caught(step)


@one_in(2)
@of_both
@pytest.mark.parametrize("size", [2, 4])
def test_an_exception_in_the_exchange_of_one_rank(size, exchange):
    *others, broken = run_ranks(size, breaks_in_exchange, size, exchange)
    assert broken[:2] == ("ArithmeticError", "the abacus is missing a bead")
    for kind, text, seconds in others:
        assert kind == "RankFailure"
        assert text == f"Rank {size - 1} failed at step 2: ArithmeticError: the abacus is missing a bead"
        assert seconds < SOON


def different_step_counts(rank: int, exchange: str) -> tuple[str, str, float]:
    begin, step = training(exchange)
    begin("topk")

    def run() -> None:
        for _ in range(3 + rank):
            step()

    outcome = caught(run)
    if rank == 0:
        atexit._run_exitfuncs()  # as at the end of its script
    return outcome


@of_both
def test_ranks_with_different_step_counts(exchange):
    first, second = run_ranks(2, different_step_counts, exchange)
    assert first[0] == "no error"
    assert second[:2] == (
        "RankFailure",
        "Rank 0 has ended training after 3 steps, while other ranks go on. Look for an error in its output, or "
        "give all ranks the same number of batches and of steps.",
    )
    assert second[2] < SOON


def uneven_epochs(rank: int) -> str:
    how = strategy("topk", 0.01, density_warmup=[0.5, 0.1], broadcast_buffers=False)
    with pytest.raises(RankFailure) as error:
        trainer(how, 2, max_epochs=3).fit(Net(), Loader(rank, 2, 3 + rank))
    return str(error.value)


def test_a_density_that_changes_at_an_epoch_waits_for_ranks_with_more_batches():
    """Messages of two lengths would end a process within gloo."""
    for text in lightning_ranks(2, uneven_epochs):
        assert text.startswith("Rank 0 pauses after 3 steps, for a validation, a checkpoint, another density")


def refuses_alone(rank: int) -> tuple[str, str, float]:
    net = nn.Linear(2, 2)
    ddp = DistributedDataParallel(net, skip_all_reduce_unused_params=rank == 1)
    return caught(lambda: attach(ddp))


def test_a_rank_that_cannot_attach_tells_the_others():
    first, second = run_ranks(2, refuses_alone)
    assert second[0] == "ValueError"
    assert first[0] == "RankFailure"
    assert first[1].startswith("Rank 1 cannot attach: ValueError: DistributedDataParallel(skip_all_reduce_unused")


def attaches_lbfgs(rank: int) -> tuple[str, str, float]:
    net = nn.Linear(2, 2)
    optimizer = [torch.optim.AdamW, torch.optim.LBFGS][rank](net.parameters())
    return caught(lambda: attach_updates(net, optimizer))


def test_a_rank_that_cannot_attach_updates_tells_the_others():
    first, second = run_ranks(2, attaches_lbfgs)
    assert second[0] == "ValueError"
    assert first[0] == "RankFailure"
    assert first[1].startswith("Rank 1 cannot attach: ValueError: LBFGS keeps differences of gradients")
    assert first[2] < SOON


def joins(rank: int) -> tuple[str, str, float]:
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    attach(ddp)

    def run() -> None:
        with ddp.join():
            for _ in range(2 + 3 * rank):
                step(ddp)

    return caught(run)


def test_uneven_inputs_by_join_are_refused():
    results = run_ranks(2, joins)
    assert any("outside of backward, as it does within ddp.join()" in text for _, text, _ in results)
    assert all(seconds < SOON for _, _, seconds in results)


def odd_error(rank: int) -> tuple[str, str, float]:
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    reducer = attach(ddp, "topk")
    if rank == 1:

        def broken(*args: Any) -> None:
            raise OSError("cannot read 'caf\udce9'")

        reducer.begin = broken
    kind, text, seconds = caught(lambda: step(ddp))
    return kind, text.encode(errors="backslashreplace").decode(), seconds


def test_an_error_text_that_cannot_be_encoded():
    first, second = run_ranks(2, odd_error)
    assert second[0] == "OSError"
    assert (first[0], "caf\\udce9" in first[1]) == ("RankFailure", True)


def not_finite(rank: int, exchange: str) -> tuple[str, str, float]:
    begin, step = training(exchange)
    begin("topk")
    step()
    return caught(lambda: step(float("nan") if rank == 1 else 1.0))


@of_both
def test_a_non_finite_gradient_names_parameter_rank_and_step(exchange):
    for kind, text, seconds in run_ranks(2, not_finite, exchange):
        assert kind == NonFiniteGradient.__name__
        assert text.startswith(f"The {exchange} of ")
        assert "is not finite on rank 1 at step 1" in text
        assert "module" not in text
        assert "weight" in text or "bias" in text
        assert seconds < SOON


def not_finite_unseen(rank: int) -> tuple[bool, tuple[str, str, float], list[str]]:
    """With kernels that do not let the host wait, here interpreted ones, the fault is detected a step later."""
    os.environ[launch.KERNELS] = "triton"
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    attach(ddp, "topk")
    step(ddp)
    step(ddp, float("nan") if rank == 1 else 1.0)
    unharmed = all(bool((param.grad == 0).all()) for param in ddp.parameters())
    late = caught(lambda: step(ddp))
    # No step follows the last one.
    errors: list[str] = []
    session.log.error = errors.append
    last = DistributedDataParallel(nn.Linear(50, 50))
    attach(last, "topk")
    step(last, float("nan") if rank == 1 else 1.0)
    del last
    gc.collect()
    return unharmed, late, errors


@later
@needs_triton
@interpreted
def test_what_the_host_has_not_waited_for_is_raised_a_step_later():
    for unharmed, (kind, text, seconds), errors in run_ranks(2, not_finite_unseen):
        assert unharmed
        assert kind == NonFiniteGradient.__name__
        assert "is not finite on rank 1 at step 1" in text
        assert seconds < SOON
        assert len(errors) == 1
        assert "is not finite on rank 1 at step 0" in errors[0]


class Fails(Observer):
    def compensated(self, *_: Any) -> None:
        raise ValueError("no way")


def fails_without_ddp(rank: int) -> tuple[str, str, float]:
    reducer = Reducer("topk", ProcessGroupComm())
    if rank == 1:
        reducer.observers.append(Fails())
    return caught(lambda: reducer.reduce_({"w": torch.ones(5000)}))


def test_a_reducer_without_ddp_tells_the_others_too():
    for rank, (kind, text, seconds) in enumerate(run_ranks(3, fails_without_ddp)):
        assert kind == ("ValueError" if rank == 1 else "RankFailure")
        assert "no way" in text
        assert rank == 1 or "Rank 1 failed at step 0: ValueError" in text
        assert seconds < SOON


def dies(rank: int, exchange: str) -> tuple[str, str, float]:
    begin, step = training(exchange)
    begin("topk")
    step()
    step()  # before its second step DDP talks to the others itself
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(step)


@one_in(2)
@of_both
def test_a_rank_that_is_killed(exchange):
    first, second = run_ranks(2, dies, exchange)
    assert second is None
    assert first[0] == "RankFailure"
    assert "lost its peers" in first[1]
    assert "No answer from rank 1" in first[1]
    assert first[2] < SOON


def refused(rank: int) -> list[tuple[str, str, float]]:
    class Odd(nn.Module):
        def __init__(self, param: torch.Tensor) -> None:
            super().__init__()
            self.odd = nn.Parameter(param)

    def stock(module: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module, **options)

    good, stepped = stock(nn.Linear(2, 2)), stock(nn.Linear(2, 2))
    _apply_optimizer_in_backward(torch.optim.SGD, stepped.parameters(), {"lr": 0.1})
    return [
        caught(lambda: attach(nn.Linear(2, 2))),
        caught(lambda: attach(stock(Odd(torch.ones(2, dtype=torch.float64))))),
        # Without the first synchronisation, because there gloo of torch 2.8 rejects complex numbers.
        caught(lambda: attach(stock(Odd(torch.ones(2, dtype=torch.complex64)), init_sync=False))),
        caught(lambda: attach(stock(nn.Embedding(4, 4, sparse=True)))),
        caught(lambda: attach(stock(nn.Linear(2, 2), skip_all_reduce_unused_params=True))),
        caught(lambda: attach(stepped)),
        caught(lambda: attach(good, "topk", density_warmup=[0.1])),
        caught(lambda: attach(good, "topkk")),
        caught(lambda: attach(good, "diloco")),
        caught(lambda: attach(good, 3)),
        caught(lambda: attach(good, granularity="row")),
    ]


def test_what_is_refused_says_why():
    (results,) = run_ranks(1, refused)
    for (kind, text, _), (error, message) in zip(
        results,
        [
            ("TypeError", "attach got a Linear: wrap the model in DistributedDataParallel first"),
            ("TypeError", "'odd' is torch.float64; gradients of torch.float32, torch.float16 and torch.bfloat16 can"),
            (
                "TypeError",
                "Make it real, of shape [..., 2], and have forward take torch.view_as_complex of it, or train with",
            ),
            ("TypeError", "is an embedding with sparse=True: sparse gradients cannot be compressed. Set sparse=False"),
            ("ValueError", "skip_all_reduce_unused_params=...) bypasses the exchange of gradients"),
            ("ValueError", "_apply_optimizer_in_backward steps a parameter of this DistributedDataParallel"),
            ("ValueError", "density_warmup=(0.1,) without epochs: say how many steps"),
            ("ValueError", "Method 'topkk' is not known; choose from dense, topk"),
            ("ValueError", "is made to exchange updates. Use attach_updates(model, optimizer, ...), or another method"),
            ("TypeError", "method=3: give a method's name, or a Method"),
            ("ValueError", "granularity='row' is not known; choose from layer, bucket, model"),
        ],
        strict=True,
    ):
        assert (kind, message in text) == (error, True), text


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.ones(2, dtype=torch.int64), "'w' is torch.int64"),
        (torch.ones(2, dtype=torch.float64), "'w' is torch.float64"),
        (torch.ones(2).to_sparse(), r"gradient of 'w' is sparse \(torch.sparse_coo\)"),
    ],
)
def test_reduce_refuses(grad, message):
    with pytest.raises(TypeError, match=message):
        simulate(1, lambda comm: Reducer("topk", comm).reduce_({"w": grad}))


def test_reduce_wants_the_same_gradients_every_time():
    def rank(comm):
        reducer = Reducer("topk", comm)
        reducer.reduce_({"w": torch.ones(2)})
        with pytest.raises(ValueError, match=r"missing \['w'\], new \['v'\]"):
            reducer.reduce_({"v": torch.ones(2)})
        with pytest.raises(ValueError, match=r"'w' has shape \(3,\), before \(2,\)"):
            reducer.reduce_({"w": torch.ones(3)})

    simulate(1, rank)


def test_too_long_a_segment():
    def rank(comm):
        Reducer("topk", comm, granularity="model").setup({"w": torch.empty(2**16, 2**16, device="meta")})

    with pytest.raises(ValueError, match=r"4,294,967,296 elements.*granularity='bucket' or 'layer'"):
        simulate(1, rank)


def test_ranks_that_drift_apart_are_found():
    def rank(comm):
        reducer = Reducer("topk", comm, seed=comm.rank)
        reducer.reduce_({"w": torch.ones(9000)})

    with pytest.raises(
        RankFailure, match=r"rank [01] differs from other ranks in method, density, seed, step or model"
    ):
        simulate(2, rank)


def host_fails(rank: int, exchange: str, late: bool) -> str:
    """Rank 0 hosts the store, and its script ends by an error. Rank 1 waits for it elsewhere, or comes later."""
    session.HOST_SECONDS = 3.0  # for a busy machine
    inherited = set(session._sessions)  # of tests in the process that has forked this one
    begin, step = training(exchange)
    begin("topk")
    step()
    step()
    if rank == 0:
        sys.last_value = ValueError("the disk is full")
        atexit._run_exitfuncs()
        os._exit(1)
    if late:
        with contextlib.suppress(dist.DistError):
            while True:  # until the store is gone
                dist.distributed_c10d._get_default_store().check(["any"])
                time.sleep(0.1)
        return caught(step)[1]
    with pytest.raises(RuntimeError) as broken:
        dist.all_reduce(torch.ones(1))
    (mine,) = set(session._sessions) - inherited
    mine.fail(broken.value)
    return str(broken.value)


@pytest.mark.parametrize(("exchange", "late"), [("gradient", False), ("update", True)])
def test_an_error_of_the_rank_that_hosts_the_store_reaches_ranks_that_are_busy_elsewhere(exchange, late):
    _, text = run_ranks(2, host_fails, exchange, late)
    assert text.startswith("Rank 0 failed at step 2: ValueError: the disk is full")


def looks_after_its_report(rank: int) -> list[bool]:
    """Fail after an exchange; then the look-out of this rank, and that of the other one, look once more."""
    begin, step = training("update")
    begin("topk", local_steps=2)
    step()
    step()
    (mine,) = [each for each in session._sessions if each.comm.group is not None and not each.is_closed][-1:]
    if rank == 0:
        mine.fail(ValueError("of the user"))
    dist.barrier()
    mine.look()
    return [mine.error is not None]


def test_a_rank_does_not_take_its_own_report_for_that_of_another():
    """Its step is complete, so a checkpoint on the exception may have its residuals."""
    assert run_ranks(2, looks_after_its_report) == [[False], [True]]


class Breaks(Net):
    """Fails on rank 0 in its second step."""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if index == 1 and self.global_rank == 0:
            raise ValueError("no more data")
        return super().training_step(batch, index)


class Uploads(pl.Callback):
    """Is busy on an exception of rank 0 until rank 1 has ended, at most for some seconds."""

    had_ended = False

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + 10
        while trainer.global_rank == 0 and not self.had_ended and time.monotonic() < deadline:
            self.had_ended = store.check(["rank 1 has ended"])
            time.sleep(0.05)


def fails_and_uploads(rank: int) -> tuple[str, bool, bool]:
    uploads = Uploads()
    fit = trainer(strategy("topk", 0.1), 2, callbacks=[uploads])
    before = [*fit.callbacks]
    _, text, _ = caught(partial(fit.fit, Breaks(), Loader(rank, 2, batches=2)))
    dist.distributed_c10d._get_default_store().set(f"rank {rank} has ended", "")
    return text, uploads.had_ended, fit.callbacks == before


def test_an_error_is_reported_before_the_callbacks_of_a_trainer_get_it():
    (_, had_ended, as_before), (text, _, as_before_there) = lightning_ranks(2, fails_and_uploads)
    assert text == "Rank 0 failed at step 1: ValueError: no more data"
    assert had_ended
    assert as_before
    assert as_before_there


class EndsBadly(pl.Callback):
    """Fails on rank 0, when the strategy has left the fit on all ranks."""

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            raise OSError("cannot send the summary")


def fits_again(rank: int) -> tuple[list[tuple[str, str]], bool]:
    """Fit twice, as in a sweep that continues after an error; return the errors, and whether the ranks meet."""
    rendezvous.MEET_SECONDS = 20.0
    outcomes = []
    for callbacks in ([EndsBadly()], []):
        fit = trainer(strategy("topk", 0.1), 2, max_steps=1, callbacks=callbacks)
        outcomes.append(caught(partial(fit.fit, Net(), Loader(rank, 2, batches=1)))[:2])
    return outcomes, fit.strategy._rendezvous.all_ranks_present()


def test_an_error_of_one_rank_after_its_fit_leaves_the_next_fit_alone():
    good = ("no error", "")
    first, second = lightning_ranks(2, fits_again, timeout=8, patience=60)
    assert first == ([("OSError", "cannot send the summary"), good], True)
    assert second == ([good, good], True)


class LacksATemplate(Net):
    """Fails on rank 1 before the strategy sets up its environment."""

    fails = False

    def configure_callbacks(self) -> list[Any]:
        if self.fails:
            raise OSError("no such template")
        return []


def fails_in_its_second_run(rank: int) -> list[tuple[str, str]]:
    found = []
    for run in range(2):
        net = LacksATemplate()
        net.fails = (run, rank) == (1, 1)
        kind, text, _ = caught(partial(trainer(strategy("topk", 0.1), 2).fit, net, Loader(rank, 2, batches=2)))
        found.append((kind, text))
    return found


@full
def test_an_error_of_one_rank_at_the_start_of_a_later_run_reaches_the_others():
    good = ("no error", "")
    first, second = lightning_ranks(2, fails_in_its_second_run, timeout=8, patience=60)
    assert first[0] == good
    assert first[1][1].startswith("Rank 1 failed: OSError: no such template")
    assert second == [good, ("OSError", "no such template")]


SCRIPT = """
    import sys, time, torch.distributed as dist
    from tests.integration.failing import training

    dist.init_process_group("gloo")
    begin, step = training(sys.argv[1])
    begin("topk")
    while True:
        step()
        print("step", flush=True)
        if dist.get_rank() == 1:
            time.sleep(0.5)  # so that rank 0 is waiting in the exchange when the signal comes
"""


@full
@of_both
def test_ctrl_c(exchange: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), exchange],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            for _ in range(3):
                assert rank.stdout.readline() == "step\n"
        ranks[0].send_signal(signal.SIGINT)  # the other must notice by itself
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]  # the group's timeout is half an hour
    finally:
        for rank in ranks:
            rank.kill()
    assert "KeyboardInterrupt" in errors[0]
    assert "RankFailure" in errors[1]
