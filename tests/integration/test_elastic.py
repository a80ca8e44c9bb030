"""A rank is killed, hangs or fails: the others soon end with the cause, and the last checkpoint can be resumed."""

import contextlib
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from examples.elastic import newest, train
from examples.train import quiet
from lightning_sparse.reducer import Reducer
from tests.integration.trainers import Loader, Net, lightning_ranks, strategy, trainer
from tests.processes import free_port
from tests.support.tiers import exhaustive, full

TIMEOUT = 3.0  # timeout of the groups in seconds, for cases in which a rank stays
ENDLESS = ("hangs", "freezes")
SOON = 10.0  # the machine may be busy
PATIENCE = 200.0  # time limit in seconds; on an idle machine the test takes about ten
FATAL, END = 6, 10  # steps: when it happens, and of the whole run
STEPS = 40  # of the digits
SIGNALS = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT, "freezes": signal.SIGSTOP}


class Saboteur(pl.Callback):
    """Lets a rank come to grief in a way and at a place of its choice."""

    def __init__(self, case: str, victim: int, folder: Path) -> None:
        self.case, self.victim, self.folder = case, victim, folder

    def strike(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank == self.victim:
            (self.folder / "struck").write_text(str(os.getpid()))
            if self.case == "hangs":
                time.sleep(1000)
            if self.case == "disk is full":
                # With a limit for the length of files, writes fail half-way, as on a full disk.
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
                return
            if "raises" in self.case:
                raise ArithmeticError("the abacus is missing a bead")
            os.kill(os.getpid(), SIGNALS.get(self.case, signal.SIGKILL))

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if self.case == "killed at the start":
            self.strike(trainer)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.case == "thread raises":
            reducer: Reducer = trainer.strategy.reducer  # type: ignore[attr-defined]
            begin = reducer.begin

            def struck(*args: Any) -> Any:
                if reducer.step == FATAL:
                    self.strike(trainer)
                return begin(*args)

            reducer.begin = struck  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == FATAL and self.case in ("model raises", "hangs", *SIGNALS):
            self.strike(trainer)

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == FATAL and self.case == "killed in a step":
            self.strike(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Any) -> None:
        if trainer.global_step < FATAL:
            return
        if self.case == "disk is full":
            self.strike(trainer)
        if self.case == "killed in a checkpoint, sidecar file":
            fs = fsspec.filesystem("file")
            # After the file is written, and before it is renamed.
            type(fs).mv = lambda *_, **__: self.strike(trainer)
        if self.case == "killed in a checkpoint, after the sidecar files":
            trainer.strategy.checkpoint_io.save_checkpoint = lambda *_, **__: self.strike(trainer)


class Failing(Loader):
    """The loader of a rank whose disk breaks."""

    strike: Any = None

    def __iter__(self):  # type: ignore[no-untyped-def]
        for batch in super().__iter__():
            if self.position == FATAL + 1:
                self.strike()
            yield batch


def fit(rank: int, name: str, exchange: str, folder: Path, size: int = 2, sabotage: Saboteur | None = None) -> Tensor:
    timeout = TIMEOUT if sabotage is not None and sabotage.case in ENDLESS else 30
    options = {"timeout": timedelta(seconds=timeout), "process_group_backend": "gloo"}
    if name != "ddp":
        options["exchange"] = exchange
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)
    callbacks = [saves] if sabotage is None else [saves, sabotage]
    run = trainer(strategy(name, 0.1, **options), size, callbacks=callbacks, max_steps=END)
    net = Net(torch.optim.AdamW, lr=0.01) if exchange == "update" else Net()
    loader = Loader(rank, size, END)
    if sabotage is not None and sabotage.case == "loader raises":
        loader = Failing(rank, size, END)
        loader.strike = lambda: sabotage.strike(run)
    last = folder / "last.ckpt"
    run.fit(net, loader, ckpt_path=last if last.exists() else None)
    assert run.global_step == END
    return net.weights


def sabotaged(
    size: int, name: str, exchange: str, folder: Path, case: str, victim: int
) -> list[tuple[str, str, float] | None]:
    """Train in processes that end when they fail, and return with which error and how many seconds after the strike.

    As with torchrun, none of them hosts the store, which outlives them.
    """
    context = multiprocessing.get_context("fork")
    timeout = timedelta(seconds=TIMEOUT if case in ENDLESS else 30)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def child(rank: int) -> None:
        for key, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", store.port)):
            os.environ[key] = os.environ["LOCAL_" + key] = str(value)
        os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="tests")
        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        warnings.simplefilter("ignore")
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=size, timeout=timeout)
        try:
            fit(rank, name, exchange, folder, size, Saboteur(case, victim, folder))
            outcome = "no error", ""
        except BaseException as error:
            outcome = type(error).__name__, str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        seconds = time.time() - (folder / "struck").stat().st_mtime
        (folder / f"outcome{rank}").write_text(json.dumps([*outcome, seconds]))
        os._exit(1)

    ranks = [context.Process(target=child, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        if rank != victim:
            process.join(PATIENCE)
    for process in ranks:
        process.kill()
        process.join()
    outcomes = [folder / f"outcome{rank}" for rank in range(size)]
    return [json.loads(outcome.read_text()) if outcome.exists() else None for outcome in outcomes]


@cache
def straight(name: str, exchange: str, folder: Path, size: int) -> Tensor:
    return lightning_ranks(size, fit, name, exchange, folder, size)[0]


NO_ANSWER = "No answer from rank {victim}: killed, ended, or frozen"
BEAD = "Rank 1 failed at step 6: ArithmeticError: the abacus is missing a bead"
STOCK = r"[Cc]onnection|closure|Timed out"
CAUSES = {
    # Event and rank to the message of the other ranks, or to a pattern of torch's error.
    ("killed at the start", 1): STOCK,
    ("killed in a step", 1): NO_ANSWER,
    ("killed in a step", 0): NO_ANSWER,
    ("killed in a checkpoint, sidecar file", 1): NO_ANSWER,
    ("killed in a checkpoint, sidecar file", 0): NO_ANSWER,
    ("killed in a checkpoint, after the sidecar files", 0): NO_ANSWER,
    ("disk is full", 1): r"could not be written \(rank {victim}: OSError",
    ("disk is full", 0): r"could not be written \(rank {victim}: OSError",
    ("SIGTERM", 1): r"Rank 1 was told to end \(SIGTERM\)",
    ("Ctrl-C", 1): "Rank 1 failed at step 6: KeyboardInterrupt",
    ("freezes", 1): NO_ANSWER,
    ("freezes", 0): NO_ANSWER,
    ("hangs", 1): "Still running, but not taking part: rank 1",
    ("model raises", 1): BEAD,
    ("loader raises", 1): BEAD,
    ("thread raises", 1): BEAD,
}
OURS_ALONE = (  # with stock ddp rank 0 alone writes, and there is no thread
    ("killed in a checkpoint, sidecar file", 0),
    ("killed in a checkpoint, sidecar file", 1),
    ("disk is full", 1),
    ("thread raises", 1),
)
ROWS = [
    *(("topk", "gradient", 2, *row) for row in CAUSES),
    *(("topk", "update", 2, *row) for row in CAUSES),
    *(("ddp", "gradient", 2, *row) for row in CAUSES if row not in OURS_ALONE),
    ("gaussiank", "gradient", 2, "killed in a step", 1),
    ("gaussiank", "gradient", 2, "killed in a checkpoint, sidecar file", 1),
    ("gaussiank", "gradient", 3, "killed in a step", 1),
    ("topk", "gradient", 3, "hangs", 1),
    ("topk", "gradient", 3, "model raises", 1),
    ("topk", "update", 3, "hangs", 1),
    ("topk", "update", 3, "model raises", 1),
]
QUICK = [("topk", "gradient", 2, "killed in a step", 1), ("topk", "update", 2, "model raises", 1)]
CHECKED = "cause and checkpoint"


@pytest.mark.parametrize(
    ("name", "exchange", "size", "case", "victim"),
    [
        pytest.param(
            *row,
            marks=[
                pytest.mark.reliability(f"one rank: {row[3]}", checked=CHECKED),
                *([] if row in QUICK else [full]),
            ],
        )
        for row in ROWS
    ],
)
def test_the_others_end_and_the_last_checkpoint_is_good(name, exchange, size, case, victim, tmp_path, tmp_path_factory):
    results = sabotaged(size, name, exchange, tmp_path, case, victim)
    for rank, outcome in enumerate(results):
        if rank != victim:
            assert outcome is not None, f"rank {rank} hangs"
            kind, text, seconds = outcome
            print(
                f"{name}, {exchange}, {case}, rank {victim} of {size}: {seconds:.2f} s, "
                f"rank {rank} has {kind}: {text:.200}"
            )
            in_order = case == "SIGTERM" and name != "ddp"  # all ranks end after the same batch
            assert kind in (
                ("SIGTERMException",) if in_order else ("RuntimeError", "RankFailure", "DistBackendError", "OSError")
            )
            assert re.search(STOCK if name == "ddp" else CAUSES[case, victim].format(victim=victim), text), text
            assert seconds < (TIMEOUT if case in ENDLESS else 0) + SOON
    if case == "killed at the start":
        assert newest(tmp_path) is None
    else:
        # Checkpoints are written after two, four and six steps, and the event is in step 6. After SIGTERM, ranks end
        # after step 7 or 8.
        saved = torch.load(newest(tmp_path), weights_only=True)["global_step"]
        assert saved in ([4] if "checkpoint" in case or "disk" in case else [6, 8] if case == "SIGTERM" else [6])
    went_on = lightning_ranks(size, fit, name, exchange, tmp_path, size)[0]
    whole = straight(name, exchange, tmp_path_factory.getbasetemp() / f"{name}-{exchange}-{size}", size)
    assert torch.equal(went_on, whole)


SCRIPT = """
    import json, os, signal, sys
    from pathlib import Path

    import pytorch_lightning as pl
    import torch

    from examples.elastic import train
    from examples.train import quiet
    from lightning_sparse import checkpoint as sidecars

    folder, steps, disasters = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


    def kept(state):
        return torch.cat([value.flatten() for value in state["elements"]["residual"].values()]).double()


    class Disasters(pl.Callback):
        def strike(self, what, trainer):
            # Each happens once, on the rank and in the step that it names.
            name = f"{what}-{trainer.global_rank}-{trainer.global_step}"
            if name in disasters and not (folder / name).exists():
                (folder / name).touch()
                return True

        def say(self, trainer, **more):
            line = {"rank": trainer.global_rank, "size": trainer.world_size, "step": trainer.global_step}
            with open(folder / "log", "a") as log:
                log.write(json.dumps({**line, "pid": os.getpid(), **more}) + "\\n")

        def on_train_start(self, trainer, module):
            start = {"start": str(trainer.ckpt_path and Path(trainer.ckpt_path).name)}
            if trainer.ckpt_path:
                # What error feedback keeps: before, in the sidecar files, and now, the mean over all workers.
                info = torch.load(trainer.ckpt_path, weights_only=True)[sidecars.KEY]
                old = info["size"]
                before = sum(kept(sidecars.read(trainer.ckpt_path, info, rank, old)[0]) for rank in range(old)) / old
                now = trainer.strategy.reduce(kept(trainer.strategy.reducer.state_dict()), reduce_op="mean")
                start |= {"kept": float(now.norm()), "lost": float((now - before).norm())}
            self.say(trainer, **start)

        def on_train_batch_start(self, trainer, module, batch, index):
            self.say(trainer)
            if self.strike("kill", trainer):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_save_checkpoint(self, trainer, module, checkpoint):
            if (folder / f"step={trainer.global_step}.ckpt").exists() and self.strike("tear", trainer):
                # As one that is killed while it writes the second of the two.
                path = folder / "last.ckpt"
                path.write_bytes(path.read_bytes()[:-1000])
                os.kill(os.getpid(), signal.SIGKILL)


    quiet()
    train(folder, density=0.01, steps=steps, every=5, batch_size=8, callbacks=[Disasters()])
"""


class Torchrun:
    """One agent of torchrun with our script."""

    def __init__(self, folder: Path, *arguments: str, steps: int, disasters: tuple[str, ...] = ()) -> None:
        folder.mkdir(exist_ok=True)
        script = folder / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        command = [sys.executable, "-m", "torch.distributed.run", *arguments, script, folder, str(steps), *disasters]
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}"
        self.folder = folder
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see examples/elastic.py
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> list[dict[str, Any]]:
        path = self.folder / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, what: Any) -> list[dict[str, Any]]:
        """Wait until there are such entries in the log and return them."""
        deadline = time.monotonic() + PATIENCE
        while not (found := [entry for entry in self.log if what(entry)]):
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
        return found

    def end(self) -> None:
        """Leave no process behind, whatever has happened."""
        for pid in {self.process.pid, *(entry["pid"] for entry in self.log)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def whole(rank: int, folder: Path, steps: int) -> dict[str, Tensor]:
    quiet()
    train(folder, density=0.01, steps=steps, every=5, batch_size=8)
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]


@exhaustive
@pytest.mark.reliability(
    "torchrun with --max-restarts: a worker is killed in a step, one while it writes a checkpoint, Ctrl-C",
    checked="restarts from the last good checkpoint; final weights equal those of a run without failures",
    methods=["topk"],
)
def test_torchrun_starts_again(tmp_path):
    folder = tmp_path / "run"
    run = Torchrun(
        folder,
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "3"),
        steps=STEPS,
        disasters=("kill-1-7", "tear-0-10"),
    )
    try:
        run.wait_for(lambda entry: entry["step"] == 17)
        run.process.send_signal(signal.SIGINT)
        interrupted = time.monotonic()
        assert run.process.wait(PATIENCE) != 0
        print(f"Ctrl-C: torchrun has ended after {time.monotonic() - interrupted:.1f} s")
        assert not any(Path(f"/proc/{entry['pid']}").exists() for entry in run.log)
    finally:
        run.end()
    starts = [(entry["start"], entry["step"]) for entry in run.log if "start" in entry and entry["rank"] == 0]
    # The second time last.ckpt was torn.
    assert starts == [("None", 0), ("last.ckpt", 5), ("step=10.ckpt", 10)]
    assert all(entry["lost"] == 0 < entry["kept"] for entry in run.log if "lost" in entry)
    done = torch.load(newest(folder), weights_only=True)["global_step"]
    assert 15 <= done < STEPS
    went_on, straight = (lightning_ranks(2, whole, place, STEPS)[0] for place in (folder, tmp_path / "straight"))
    assert all(torch.equal(went_on[name], straight[name]) for name in straight)


@exhaustive
@pytest.mark.reliability(
    "torchrun with --nnodes 1:2: the second node fails",
    checked="continues from the last checkpoint with fewer workers; the mean residual is preserved",
    methods=["topk"],
)
def test_torchrun_goes_on_with_fewer_nodes(tmp_path):
    arguments = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test", "--local-addr", "127.0.0.1"),
        *("--rdzv-conf", "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=2"),
    )
    agents = [
        Torchrun(tmp_path, *arguments[:-1], f"{arguments[-1]},is_host={host}", steps=STEPS) for host in (True, False)
    ]
    try:
        agents[0].wait_for(lambda entry: entry["size"] == 2 and entry["step"] == 7)
        # Ranks of agents are not known, but each worker is a child of its agent.
        workers = {entry["pid"] for entry in agents[0].log}
        parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in workers}
        agents[1].process.kill()
        for pid, parent in parents.items():
            if parent == agents[1].process.pid:
                os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        (start,) = agents[0].wait_for(lambda entry: entry["size"] == 1 and "lost" in entry)
        print(f"a node goes: training goes on after {time.monotonic() - killed:.1f} s")
        assert agents[0].process.wait(PATIENCE) == 0, agents[0].output.read_text()
    finally:
        for agent in agents:
            agent.end()
    assert start["start"] == "last.ckpt"
    assert start["step"] >= 5
    # Rounding of the sum of two, in fp32.
    assert start["lost"] <= 2**-22 * start["kept"]
    assert start["kept"] > 0
    assert torch.load(newest(tmp_path), weights_only=True)["global_step"] == STEPS
