"""One rank of the language model benchmark: `benchmarks.language` starts two.

Nothing is reported unless all ranks have the same weights at the end, bit by bit.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse
from benchmarks.language import (
    BATCH_SIZE,
    DENSITY,
    EVERY,
    LENGTH,
    RANK,
    ROUNDS,
    STEPS,
    TIMED_STEPS,
    VAL_SEQUENCES,
    WARMUP,
    WORKERS,
    Row,
    Run,
)
from benchmarks.network import cpu
from benchmarks.rank import bf16_hook, interface_bytes, machine_seconds
from examples.data.text import StandardLibrary
from examples.models.gpt import GPT
from lightning_sparse import NonFiniteGradient, Reducer, attach


def factor(step: int, steps: int) -> float:
    """Return what the learning rate is multiplied by: linear warm-up over a tenth, then half a cosine to zero."""
    warmup = max(1, steps // 10)
    return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2


class Trainee:
    """A model in training on this rank.

    Args:
        run: how to train it.
        text: the data, set up.
    """

    def __init__(self, run: Run, text: StandardLibrary) -> None:
        self.run, self.text, self.steps = run, text, STEPS[run.part]
        torch.manual_seed(run.seed)
        self.model = GPT(context=LENGTH)
        # PowerSGD over one bucket: with several its hook never ends over gloo, see `benchmarks.rank`.
        cap = 100_000 if run.method == "powersgd" else None
        self.ddp = DistributedDataParallel(self.model, init_sync=False, bucket_cap_mb=cap)
        self.reduced = DENSE[run.method](self.ddp) if run.method in DENSE else None
        self.reducer = None if self.reduced else compress(run, self.ddp)
        self.optimizer = optimizer(run, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factor(step, self.steps))
        self.order = torch.randperm(len(text.train_set), generator=torch.Generator().manual_seed(run.seed))
        self.done = 0
        self.sent_before = self.reducer.comm.sent_bytes if self.reducer else 0

    def step(self) -> None:
        """Train on the next batch."""
        first = (self.done * WORKERS + dist.get_rank()) * BATCH_SIZE
        tokens, following = sequences(self.text.train_set, self.order[first : first + BATCH_SIZE])
        self.optimizer.zero_grad()
        functional.cross_entropy(self.ddp(tokens).flatten(0, 1), following.flatten()).backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def sent_bytes(self) -> int:
        """Return what this worker has put on the wire so far."""
        if self.reducer:
            return self.reducer.comm.sent_bytes - self.sent_before
        assert self.reduced
        return 2 * (WORKERS - 1) * self.reduced(self.done) // WORKERS

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss over the held-out sequences, nats per byte, the same on all ranks."""
        held_out = self.text.val_set
        chosen = torch.linspace(0, len(held_out) - 1, VAL_SEQUENCES).long()[dist.get_rank() :: WORKERS]
        total = torch.zeros((), dtype=torch.float64)
        for part in chosen.split(32):
            tokens, following = sequences(held_out, part)
            total += functional.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten(), reduction="sum")
        dist.all_reduce(total)
        return total.item() / (VAL_SEQUENCES * LENGTH)

    def check(self) -> None:
        """Raise unless all ranks have the same weights, bit by bit."""
        checksum = 0
        for parameter in self.model.parameters():
            checksum = zlib.crc32(parameter.detach().numpy().data, checksum)
        checksums = gather(checksum)
        if len(set(checksums)) > 1:
            raise RuntimeError(f"{self.run}: the ranks' weights differ after {self.done} steps: {checksums}")


# Stock DDP and its hooks: each makes a model ready, and returns how many bytes went into all-reduces in so many steps.


def numel(ddp: DistributedDataParallel) -> int:
    """Return the number of elements of the gradient."""
    return sum(parameter.numel() for parameter in ddp.parameters())


def stock(ddp: DistributedDataParallel) -> Callable[[int], int]:
    """Leave DDP as it is."""
    return lambda steps: 4 * numel(ddp) * steps


def bf16(ddp: DistributedDataParallel) -> Callable[[int], int]:
    """Halve every entry."""
    ddp.register_comm_hook(None, bf16_hook)
    return lambda steps: 2 * numel(ddp) * steps


def powersgd(ddp: DistributedDataParallel) -> Callable[[int], int]:
    """Factor every matrix, after two dense steps that torch's hook asks for; it counts what it sends after them."""
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    return lambda steps: 4 * (numel(ddp) * min(steps, 2) + state.compression_stats()[2])


DENSE = {"ddp": stock, "bf16": bf16, "powersgd": powersgd}


def compress(run: Run, ddp: DistributedDataParallel) -> Reducer:
    """Put the method of a run between a model and its optimizer."""
    return attach(
        ddp,
        run.method,
        density=DENSITY,
        clip_norm=run.clip_norm or None,
        warmup=WARMUP if run.warmup_steps else (),
        warmup_steps=run.warmup_steps or None,
    )


def optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a run."""
    if run.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, run.beta2), weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)


def sequences(data: Any, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen sequences and the bytes that follow theirs, int64 (batch, length) both."""
    tokens, following = zip(*(data[index] for index in chosen.tolist()), strict=True)
    return torch.stack(tokens), torch.stack(following)


def gather(value: Any) -> list[Any]:
    """Return every rank's `value`."""
    values: list[Any] = [None] * WORKERS
    dist.all_gather_object(values, value)
    return values


def curve(run: Run, text: StandardLibrary) -> list[Row]:
    """Train, and return the validation loss and the bytes sent so far after every `EVERY` steps.

    A training that leaves the finite numbers ends there, with an infinite loss.
    """
    trainee = Trainee(run, text)
    points = [{"step": 0, "val_loss": trainee.loss(), "sent_bytes": 0}]
    while trainee.done < trainee.steps:
        try:
            trainee.step()
        except NonFiniteGradient:
            return [*points, {"step": trainee.done, "val_loss": math.inf, "sent_bytes": trainee.sent_bytes()}]
        if trainee.done % EVERY[run.part] == 0:
            loss = trainee.loss()
            points.append({"step": trainee.done, "val_loss": loss, "sent_bytes": max(gather(trainee.sent_bytes()))})
            if not math.isfinite(loss):
                return [*points[:-1], {**points[-1], "val_loss": math.inf}]
    trainee.check()
    return points


def step_times(runs: Sequence[Run], text: StandardLibrary) -> list[Row]:
    """Time some steps of each run in turn, several rounds, and return a row per run."""
    trainees = [Trainee(run, text) for run in runs]
    for trainee in trainees:  # DDP forms its buckets anew in the second step
        for _ in range(3):
            trainee.step()
    sent_before = [trainee.sent_bytes() for trainee in trainees]
    transmitted = [0] * len(runs)
    times: list[list[float]] = [[] for _ in runs]
    foreign = [0.0] * len(runs)
    for _ in range(ROUNDS):
        for number, trainee in enumerate(trainees):
            trainee.step()  # brings the model back into the caches
            dist.barrier()
            began, busy, own = time.perf_counter(), machine_seconds(), time.process_time()
            transmitted[number] -= interface_bytes()
            for _ in range(TIMED_STEPS):
                started = time.perf_counter()
                trainee.step()
                times[number].append(1e3 * (time.perf_counter() - started))
            dist.barrier()
            transmitted[number] += interface_bytes()
            others = machine_seconds() - busy - sum(gather(time.process_time() - own))
            foreign[number] += max(0.0, others) / (time.perf_counter() - began) / (os.cpu_count() or 1) / ROUNDS
    rows = []
    for number, trainee in enumerate(trainees):
        trainee.check()
        # A step is over when its slowest rank is.
        ms = [max(both) for both in zip(*gather(times[number]), strict=True)]
        p20, _, _, p80 = statistics.quantiles(ms, n=5, method="inclusive")
        rows.append(
            {
                "optimizer": trainee.run.optimizer,
                "method": trainee.run.method,
                "steps": len(ms),
                "median_ms": round(statistics.median(ms), 1),
                "p20_ms": round(p20, 1),
                "p80_ms": round(p80, 1),
                "sent_bytes_per_step": max(gather(trainee.sent_bytes() - sent_before[number])) // (trainee.done - 3),
                "transmitted_bytes_per_step": max(gather(transmitted[number])) // len(ms),
                "foreign_load": round(max(gather(foreign[number])), 3),
            }
        )
    return rows


def origin() -> Row:
    """Return the columns that say where figures come from."""
    return {
        "lightning_sparse": lightning_sparse.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Do what the first argument, JSON, asks of all ranks: "curve" of the one run, or "step_times" of all."""
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    text = StandardLibrary(LENGTH, BATCH_SIZE)
    text.setup()
    runs = [Run(*run) for run in job["runs"]]
    rows = curve(runs[0], text) if job["what"] == "curve" else step_times(runs, text)
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps({"rows": rows, "origin": origin()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
