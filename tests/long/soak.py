"""Tests that training stays correct over a long time in which many failures happen.

    python -m tests.long.soak                      # 2,000 steps, some minutes
    python -m tests.long.soak --exchange update    # AdamW, and updates instead of gradients
    python -m tests.long.soak --exchange delayed   # updates whose exchange overlaps with the next step

Two or three workers train a small network with Lightning over gloo. They run one fit after the other, each from the
last checkpoint. Each fit has another mix of precision, gradient scaler, accumulation, granularity, and overflows on
random ranks. In between, a random worker is killed, in a step or while it writes a checkpoint. The other workers must
end by themselves, and training continues with the other number of workers.

After every step, all workers check in fp64 that the mean gradient so far, from autograd, equals the applied plus the
kept part. They report the difference (given − applied − kept) relative to the bound of rounding errors. At the end, the
last workers run fits without kills, to detect slow growth of memory, open descriptors, and threads.

With updates, the given part is the change of each rank's optimizer, plus the unspent momentum of the sent entries.
The weights must equal the initial weights minus the applied part. If exchanges overlap with the next step, this is
checked after every third step and before each checkpoint, when exchanges have ended.

Output: `results/soak.csv`, `soak_updates.csv` or `soak_delayed.csv`, one row per fit and rank. "error" is the largest
absolute difference so far, and "error_bound" its limit from rounding to fp32. Memory, descriptors and threads are
counted after the fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn

from benchmarks.harness import results
from benchmarks.harness.results import RESULTS
from examples.train import quiet
from lightning_sparse import METHODS, SparseDDPStrategy
from lightning_sparse import method as make_method
from lightning_sparse.compressors.base import Entries, Update, drop_padding
from lightning_sparse.context import Context
from lightning_sparse.observer import Observer

TIMEOUT = 60.0  # of the groups, in seconds
ENDED = 30.0  # within which the others of a killed worker have to end
WARM_FITS = 4  # after which memory has to be flat
FLAT_MB = 8.0
FILES = {"gradient": "soak.csv", "update": "soak_updates.csv", "delayed": "soak_delayed.csv"}
QUIET_SHARE = 0.6  # of the steps, after which no worker is killed
COLUMNS = (
    *("life", "workers", "fit", "rank", "first_step", "last_step", "precision", "accumulate", "granularity"),
    *("skipped", "outcome", "seconds_to_end", "error", "error_bound", "memory_mb", "descriptors", "threads"),
)


class Plan:
    """The random choices for one fit. They depend only on the key (seed, life and number), so all ranks agree."""

    def __init__(self, key: str, size: int, peaceful: bool) -> None:
        self.key = key
        chance = random.Random(key)
        self.length = chance.randint(20, 50)
        self.precision = chance.choice(["32-true", "bf16-mixed", "16-mixed"])
        self.accumulate = chance.choice([1, 1, 2, 3])
        self.granularity = chance.choice(["layer", "bucket", "model"])
        self.every = chance.randint(4, 12)
        self.overflows = {chance.randrange(self.length): chance.randrange(size) for _ in range(self.length // 15)}
        self.victim = chance.randrange(size)
        self.place = chance.choice(["step", "checkpoint"])
        # A checkpoint has to be due in the steps that are left.
        self.fatal = None if peaceful or chance.random() < 0.6 else chance.randrange(self.length - self.every)


class Net(pl.LightningModule):
    """A small network with common kinds of layers. On one rank a loss may be infinite."""

    def __init__(self, plan: Plan, first: int, adaptive: bool) -> None:
        super().__init__()
        self.adaptive = adaptive
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10))
        self.plan, self.first = plan, first

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]).float(), batch[1])
        overflows = self.plan.overflows.get(self.trainer.global_step - self.first) == self.global_rank
        return loss * torch.inf if overflows else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adaptive:
            return torch.optim.AdamW(self.parameters(), 0.001)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Batches:
    """Endless noise with ten classes in it."""

    def __init__(self, key: str) -> None:
        self.generator = torch.Generator().manual_seed(random.Random(key).getrandbits(62))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            labels = torch.randint(10, (8,), generator=self.generator)
            yield torch.randn(8, 32, generator=self.generator) + nn.functional.one_hot(labels, 32), labels


class Ledger(pl.Callback):
    """Sums autograd's and the applied gradients, and compares their difference with the residual in each step."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.error = self.bound = 0.0
        self.skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "error": self.error, "bound": self.bound}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.error, self.bound = dict(state["sums"]), state["error"], state["bound"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.mine: dict[str, Tensor] = {}
        for name, param in module.named_parameters():
            param.register_hook(lambda grad, name=name: self.add(name, grad, trainer))

    def add(self, name: str, grad: Tensor, trainer: pl.Trainer) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.mine[name] = self.mine.get(name, 0) + grad.double() / (scaler.get_scale() if scaler else 1.0)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        mine, self.mine = self.mine, {}
        params = dict(module.named_parameters())
        if any(param.grad is None or not param.grad.isfinite().all() for param in params.values()):
            self.skipped += 1
        else:
            self.count(trainer, mine, {name: param.grad for name, param in params.items()})

    def count(self, trainer: pl.Trainer, given: dict[str, Tensor], applied: dict[str, Tensor], steps: int = 1) -> None:
        for kind, values in (("given", given), ("applied", applied)):
            flat = torch.cat([values[name].double().flatten() for name in names_of(trainer)])
            if kind == "given":
                largest = float(flat.abs().max())
                flat = trainer.strategy.reduce(flat, reduce_op="mean")
            self.sums[kind] = self.sums.get(kind, torch.zeros(())) + flat
        self.check(trainer, largest, steps)

    def check(self, trainer: pl.Trainer, largest: float = 0.0, steps: int = 1) -> None:
        if not self.sums:
            return
        names = names_of(trainer)
        elements = trainer.strategy.reducer.state_dict()["elements"]
        kept = sum(torch.cat([per_param[name].flatten() for name in names]).double() for per_param in elements.values())
        kept = kept + torch.zeros(self.sums["given"].shape)
        # The largest magnitude on any rank. It is rounded once for every rank, and when values are added, scaled,
        # divided, written and kept.
        most = largest + float(kept.abs().max())
        worst = trainer.strategy.reduce(torch.tensor([most], dtype=torch.float64), reduce_op="max").item()
        self.bound += steps * (trainer.world_size + 6) * worst * 2**-24
        difference = self.sums["given"] - self.sums["applied"] - trainer.strategy.reduce(kept, reduce_op="mean")
        self.error = max(self.error, float(difference.abs().max()))
        if not self.error <= self.bound:
            raise AssertionError(
                f"Gradients get lost: {self.error} at step {trainer.global_step}, {self.bound} allowed"
            )


def names_of(trainer: pl.Trainer) -> list[str]:
    return [name for name, _ in trainer.lightning_module.named_parameters()]


class UpdateLedger(Observer, Ledger):
    """Sums the optimizers' changes, the momentum payouts, and the applied updates.

    It checks after steps that are multiples of a number in `every`.
    """

    def __init__(self, *every: int) -> None:
        super().__init__()
        self.every = every

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.given: dict[str, Tensor] = {}
        self.applied: dict[str, Tensor] = {}
        self.payouts: dict[int, Tensor] = {}
        self.looked_at = trainer.global_step
        self.sums.setdefault("start", weights_of(module))
        trainer.strategy.reducer.observers.append(self)

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        add_up(self.given, ctx.segment.names, grads)

    def compensated(self, u: Tensor, ctx: Context) -> None:
        if ctx.payout is not None:
            self.payouts[ctx.segment.index] = u.double() - ctx.state["residual"].double()

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        if ctx.payout is not None:
            assert isinstance(applied, Entries)
            payout, sent = self.payouts.pop(ctx.segment.index), drop_padding(applied, len(u)).indices
            paid = torch.zeros_like(payout).index_copy_(0, sent, payout[sent])
            for name, part in zip(ctx.segment.names, ctx.segment.views(paid), strict=True):
                self.given[name] = self.given[name] + part

    def written(self, grads: list[Tensor], ctx: Context) -> None:
        add_up(self.applied, ctx.segment.names, grads)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.skipped += any(param.grad is None or not param.grad.isfinite().all() for param in module.parameters())

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if any(trainer.global_step % each == 0 for each in self.every):
            self.on_train_end(trainer, module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        steps = trainer.global_step - self.looked_at
        if steps and self.given:
            trainer.strategy._training.exchange_pending()
            self.count(trainer, self.given, self.applied, steps)
            self.given, self.applied, self.looked_at = {}, {}, trainer.global_step
            # Each step rounds weights once.
            weights = weights_of(module)
            self.sums["rounded"] = self.sums.get("rounded", torch.zeros(())) + steps * weights.abs() * 2**-23
            off = self.sums["start"] - self.sums["applied"] - weights
            if (off.abs() > self.sums["rounded"]).any():
                raise AssertionError(f"Weights are not the start minus what was applied: {off.abs().max()} off")


def add_up(sums: dict[str, Tensor], names: Sequence[str], values: Sequence[Tensor]) -> None:
    """Add values to sums by name, in double precision."""
    for name, value in zip(names, values, strict=True):
        sums[name] = sums.get(name, 0) + value.double()


def weights_of(module: pl.LightningModule) -> Tensor:
    return torch.cat([param.detach().double().flatten() for param in module.parameters()])


class Killer(pl.Callback):
    """Kills this process at the planned place."""

    def __init__(self, plan: Plan, first: int, note: Path) -> None:
        self.plan, self.first, self.note = plan, first, note

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        self.kill(trainer, "step")

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: Any) -> None:
        self.kill(trainer, "checkpoint")

    def kill(self, trainer: pl.Trainer, place: str) -> None:
        due = self.plan.fatal is not None and trainer.global_step - self.first >= self.plan.fatal
        if due and place == self.plan.place and trainer.global_rank == self.plan.victim:
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path, plan: Plan, method: str, exchange: Any, rank: int, size: int) -> dict[str, Any]:
    """Train from the last checkpoint on, as planned, and return a row about this rank."""
    last, first = folder / "last.ckpt", steps_done(folder)
    delayed, note = exchange == "delayed", folder / f"killed {plan.key}"
    ledger = Ledger() if exchange == "gradient" else UpdateLedger(*((3, plan.every) if delayed else (1,)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=25)
    run = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=SparseDDPStrategy(
            method,
            density=None if make_method(method).density is None else 0.05,
            granularity=plan.granularity,
            bucket_cap_mb=0.01,
            exchange="update" if delayed else exchange,
            overlap="next_step" if delayed else "backward",
            on_nonfinite="skip",
            process_group_backend="gloo",
            timeout=timedelta(seconds=TIMEOUT),
        ),
        **(
            {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
            if plan.precision == "16-mixed"
            else {"precision": plan.precision}
        ),
        accumulate_grad_batches=plan.accumulate,
        max_steps=first + plan.length,
        callbacks=[
            ledger,
            Killer(plan, first, note),
            pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=plan.every),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    row = {
        "rank": rank,
        "workers": size,
        "first_step": first,
        **{name: getattr(plan, name) for name in ("precision", "accumulate", "granularity")},
        "outcome": "done",
    }
    try:
        run.fit(
            Net(plan, first, exchange != "gradient"),
            Batches(f"{plan.key} {rank}"),
            ckpt_path=last if last.exists() else None,
        )
        ledger.check(run)
        # The fit's end need not be a checkpoint's step.
        run.save_checkpoint(last)
    except Exception as error:
        if not note.exists() or isinstance(error, AssertionError):
            raise
        known = re.search("No answer from [^:]+", str(error))
        row |= {"outcome": known[0] if known else str(error)[:60]}
        row |= {"seconds_to_end": round(time.time() - note.stat().st_mtime, 2)}
    return row | {
        "last_step": run.global_step,
        "skipped": ledger.skipped,
        "error": f"{ledger.error:.3g}",
        "error_bound": f"{ledger.bound:.3g}",
    }


def steps_done(folder: Path) -> int:
    """Return the step of the last checkpoint."""
    last = folder / "last.ckpt"
    return int(torch.load(last, weights_only=True)["global_step"]) if last.exists() else 0


def run_worker(rank: int, size: int, life: int, port: int, folder: Path, args: argparse.Namespace) -> None:
    """Be one worker, until one of them is killed, or all is done."""
    quiet()
    logging.disable(logging.WARNING)  # Lightning's advice on a toy run
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="soak", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(life), store), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    count = 0
    while True:
        done = steps_done(folder)
        dist.barrier()  # no rank writes before all ranks have read
        if done >= args.steps:
            break
        plan = Plan(f"{args.seed} {life} {count}", size, done >= args.steps * QUIET_SHARE)
        row = {"life": life, "fit": count, **fit(folder, plan, args.method, args.exchange, rank, size)}
        gc.collect()
        row |= {
            "memory_mb": round(
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20, 1
            ),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        (folder / f"fit{count}-{rank}.json").write_text(json.dumps(row))
        if row["outcome"] != "done":
            os._exit(0)
        count += 1
    dist.destroy_process_group()


def main() -> None:
    """Let one life follow the other, and write the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps, default 2000")
    parser.add_argument("--method", default="topk", choices=METHODS, help="default topk")
    parser.add_argument("--exchange", default="gradient", choices=list(FILES), help="default gradient")
    parser.add_argument("--seed", type=int, default=0, help="of all that happens, default 0")
    parser.add_argument("--result", type=Path, help="CSV to write")
    args = parser.parse_args()
    args.result = args.result or RESULTS / FILES[args.exchange]
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        # The store outlives the workers, as torchrun's does.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rows: list[dict[str, Any]] = []
        life, size = 0, 2
        while steps_done(folder) < args.steps:
            rows += one_life(folder, size, life, store.port, args)
            print(
                f"{time.monotonic() - started:5.0f} s: {steps_done(folder)} steps, life {life}, {size} workers: "
                f"{rows[-1]['outcome']}",
                flush=True,
            )
            life, size = life + 1, 5 - size
    results.save(args.result, [{column: row.get(column, "") for column in COLUMNS} for row in rows])
    failures = summarize(rows, time.monotonic() - started)
    sys.exit(1 if failures else 0)


def one_life(folder: Path, size: int, life: int, port: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start workers, wait until they have ended, and return the rows that they wrote."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=run_worker, args=(rank, size, life, port, folder, args)) for rank in range(size)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(1800)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    codes = [worker.exitcode for worker in workers]
    killed = codes.count(-signal.SIGKILL)
    if killed > 1 or any(code not in (0, -signal.SIGKILL) for code in codes):
        raise SystemExit(f"Life {life}: workers ended with {codes}; see the error above.")
    files = sorted(folder.glob("fit*.json"), key=lambda path: [int(n) for n in path.stem[3:].split("-")])
    rows = [json.loads(path.read_text()) for path in files]
    for path in files:
        path.unlink()
    return rows


def summarize(rows: list[dict[str, Any]], seconds: float) -> list[str]:
    """Print a summary and return a list of problems."""
    lives = {row["life"] for row in rows}
    last = [row for row in rows if row["life"] == max(lives)]
    waits = [row["seconds_to_end"] for row in rows if row["outcome"] != "done"]
    share = max(float(row["error"]) / max(float(row["error_bound"]), 1e-30) for row in rows)
    fits = sorted({row["fit"] for row in last})
    growth = descriptors = threads = 0
    for rank in {row["rank"] for row in last}:
        mine = [row for row in last if row["rank"] == rank][WARM_FITS - 1 :]
        growth = max(growth, mine[-1]["memory_mb"] - mine[0]["memory_mb"])
        descriptors = max(descriptors, mine[-1]["descriptors"] - mine[0]["descriptors"])
        threads = max(threads, mine[-1]["threads"] - mine[0]["threads"])
    print(
        f"{len({(row['life'], row['fit']) for row in rows})} fits in {len(lives)} lives and {seconds:.0f} s, "
        f"{sum(row['skipped'] for row in rows if row['rank'] == 0)} steps left out, {len(waits)} workers lost one of "
        f"theirs and ended after at most {max(waits, default=0):.1f} s.\n"
        f"Lost at most {max(float(row['error']) for row in rows):.2g}, {share:.2%} of what rounding explains.\n"
        f"From fit {WARM_FITS} to fit {len(fits)} of the last life: {growth:+.1f} MB, {descriptors:+d} descriptors, "
        f"{threads:+d} threads."
    )
    failures = [
        text
        for text, wrong in (
            ("somebody waited too long", max(waits, default=0) > ENDED),
            ("gradients got lost", share > 1),
            ("memory grows", growth > FLAT_MB),
            ("descriptors stay open", descriptors > 0),
            ("threads stay", threads > 0),
            ("too few fits to tell", len(fits) < 2 * WARM_FITS),
        )
        if wrong
    ]
    for text in failures:
        print(f"FAILED: {text}")
    return failures


if __name__ == "__main__":
    main()
