"""Training loops for comparisons: with equal seeds, trainings use equal weights and equal batches in the same order.

A rank is a process, or a thread of this process (`train_threads`). To time steps, several methods take turns on the
same ranks: `save_times` starts the ranks, and a benchmark's `work` calls `take_turns` on each of them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import default_collate

from benchmarks.harness import results
from benchmarks.harness.baselines import Wrapped
from benchmarks.harness.launch import check_weights, gather, run_ranks, timed, write
from benchmarks.harness.results import Row
from benchmarks.harness.timing import FOREIGN_LOAD, step_columns
from examples.data.text import StandardLibrary, Text
from lightning_sparse import Comm, Method, NonFiniteGradient, Reducer, simulate
from lightning_sparse.updates.exchange import DeltaExchange

ROUNDS, TIMED_STEPS = 5, 8
"""Number of turns of each method, and of timed steps per turn. Updates are exchanged every 1 or `TIMED_STEPS`."""


class Data(NamedTuple):
    """Batches by example numbers, the number of examples, and the held-out examples as inputs and targets."""

    batch: Callable[[list[int]], tuple[Tensor, Tensor]]
    size: int
    held_out: tuple[Tensor, Tensor]


def text(length: int, held_out: int, source: Text | None = None) -> Data:
    """Return byte sequences of Python's standard library or another text, and evenly spaced held-out sequences."""
    source = source or StandardLibrary(length)
    source.setup()
    train, val = source.train_set, source.val_set
    chosen = default_collate([val[number] for number in torch.linspace(0, len(val) - 1, held_out).long().tolist()])
    return Data(lambda numbers: default_collate([train[number] for number in numbers]), len(train), chosen)


def factor(step: int, steps: int) -> float:
    """Return the factor on the learning rate: linear warm-up over a tenth of the steps, then half a cosine to zero."""
    warmup = max(1, steps // 10)
    return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2


class Trainee:
    """A model in training on one rank. `wrapped` is the model prepared for communication with the ranks of `comm`.

    On CUDA the precision is bf16-mixed, and `step` waits for the device.

    The options are the `seed` of the data's order, the `batch_size` of a rank, and the `steps` of the whole schedule.
    """

    def __init__(
        self, model: nn.Module, wrapped: Wrapped, optimizer: Optimizer, data: Data, comm: Comm, **options: int
    ) -> None:
        self.model, self.wrapped, self.optimizer, self.data, self.comm = model, wrapped, optimizer, data, comm
        self.batch_size, self.steps, self.done = options["batch_size"], options["steps"], 0
        self.device = next(model.parameters()).device
        self.order = torch.randperm(data.size, generator=torch.Generator().manual_seed(options["seed"]))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, self.steps))
        self.ranks = comm.size  # number of ranks that share a batch
        self.evaluated = slice(comm.rank, None, comm.size)  # this rank's held-out examples
        self.not_counted = wrapped.counted_bytes

    def skip_density_warmup(self) -> None:
        """Let the next step have the method's density."""
        if (reducer := self.wrapped.reducer) is not None and reducer.options.density_warmup_steps is not None:
            reducer.step = len(reducer.options.density_warmup or ()) * reducer.options.density_warmup_steps

    def step(self) -> None:
        """Train on the next batch."""
        first = (self.done * self.ranks + self.comm.rank) * self.batch_size
        numbers = self.order[torch.arange(first, first + self.batch_size) % len(self.order)].tolist()
        x, y = (part.to(self.device) for part in self.data.batch(numbers))
        self.optimizer.zero_grad()
        with self._precision():
            loss = cross_entropy(self.wrapped.module(x).flatten(0, -2), y.flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return self.wrapped.sent_bytes(self.done) - self.not_counted

    @property
    def settled_bytes(self) -> int:
        """The same after waiting for a pending exchange, whose bytes a thread counts."""
        self.wrapped.wait()
        return self.sent_bytes

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return mean loss and accuracy over the held-out examples, equal on all ranks."""
        self.wrapped.settle()
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        x, y = (part[self.evaluated] for part in self.data.held_out)
        for start in range(0, len(x), 32):
            given, target = (part[start : start + 32].to(self.device) for part in (x, y))
            with self._precision():
                out = self.model(given).flatten(0, -2)
            sums[0] += cross_entropy(out.float(), target.flatten(), reduction="sum").item()
            sums[1] += (out.argmax(1) == target.flatten()).sum().item()
        self.model.train()
        sent_before = self.wrapped.counted_bytes
        loss, right = (self.comm.all_reduce(sums) / self.data.held_out[1].numel()).tolist()
        self.not_counted += self.wrapped.counted_bytes - sent_before
        return loss, right

    def curve(self, steps: int, every: int) -> Iterator[Row]:
        """Train; yield loss, accuracy and bytes sent so far, at the start and after every `every` steps.

        If the loss exceeds ten times its initial value, or a gradient is not finite, training ends and the loss is
        infinite.
        """
        limit = math.inf
        while True:
            if self.done % every == 0:
                loss, right = self.evaluate()
                limit = 10 * loss if self.done == 0 else limit
                loss = loss if loss <= limit else math.inf
                yield {"step": self.done, "val_loss": loss, "accuracy": 100 * right, "sent_bytes": self.sent_bytes}
            if self.done == steps or loss == math.inf:
                return
            try:
                self.step()
            except NonFiniteGradient:  # raised on all ranks
                yield {"step": self.done, "val_loss": math.inf, "accuracy": 0.0, "sent_bytes": self.sent_bytes}
                return


def attach_thread(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    method: Method,
    comm: Comm,
    *,
    updates: Any = None,
    kind: type[Reducer] = Reducer,
    **options: Any,
) -> Wrapped:
    """Exchange gradients or updates in the optimizers' steps: `attach` and `attach_updates` for ranks as threads."""
    reducer = kind(method, comm, exchanged="update" if method.update_rule else "gradient", **options)
    if method.update_rule is None:
        optimizers[0].register_step_pre_hook(
            lambda *_: reducer.reduce_({name: x.grad for name, x in model.named_parameters()})  # type: ignore[misc]
        )
        return Wrapped(model, reducer=reducer)
    exchanged = (updates or DeltaExchange)(reducer, model, optimizers)
    for optimizer in optimizers:
        _exchange_steps(exchanged, optimizer, method.local_steps, reducer.workers < comm.size)
    if method.delayed:
        return Wrapped(model, reducer=reducer, settle=exchanged.complete, wait=exchanged.wait)
    return Wrapped(model, reducer=reducer)


def _exchange_steps(exchanged: DeltaExchange, optimizer: Optimizer, local_steps: int, nodes: bool) -> None:
    started, ended = itertools.count(), itertools.count(1)

    def before(*_: Any) -> None:
        taken = next(started) % local_steps
        if nodes:
            exchanged.average_gradients(optimizer)
        if taken == 0:
            exchanged.begin(optimizer)
        if local_steps > 1 and taken == local_steps - 1:
            exchanged.begin_last_step(optimizer)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: None if next(ended) % local_steps else exchanged.exchange(optimizer))


def train_threads(
    build: Callable[[], nn.Module], make: Callable[..., Trainee], ranks: int, seed: int, steps: int, every: int
) -> list[Row]:
    """Return the curve of a training with ranks as threads. Each rank creates a trainee from its model and comm.

    Raises:
        SystemExit: the ranks end with different weights.
    """
    models = []
    for _ in range(ranks):
        torch.manual_seed(seed)
        models.append(build())
    points = simulate(ranks, lambda comm: list(make(models[comm.rank], comm).curve(steps, every)))[0]
    weights = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    if math.isfinite(points[-1]["val_loss"]) and not all(torch.equal(weights[0], other) for other in weights[1:]):
        raise SystemExit(f"Weights of the {ranks} ranks differ after {points[-1]['step']} steps.")
    return points


def take_turns(contestants: Sequence[tuple[Row, int, Trainee]], out: str) -> None:
    """Time steps of each method in turn, in several rounds.

    Args:
        contestants: for each method, columns of the table, steps between exchanges, and trainee.
        out: file of the job's results.
    """
    for _, _, trainee in contestants:  # DDP rebuilds its buckets in the second step
        for _ in range(3):
            trainee.step()
    for number, (columns, every, trainee) in list(enumerate(contestants)) * ROUNDS:
        trainee.step()  # loads the model into the caches
        sent_before = trainee.settled_bytes
        found = timed(trainee.step, TIMED_STEPS)
        sent = max(gather(trainee.settled_bytes - sent_before)) / TIMED_STEPS
        write(out, number=number, columns=columns, every=every, sent_bytes=sent, **found)
    for _, _, trainee in contestants:  # the last of the 3 + ROUNDS · (1 + TIMED_STEPS) steps ends with an exchange
        trainee.wrapped.settle()
        check_weights(trainee.model)


def save_times(path: Path, module: str, case: Row, workers: int, **job: Any) -> None:
    """Time the steps of the methods that a module's `work` passes to `take_turns`, and write one row for each."""
    records, calibration = run_ranks(module, job, workers, case["rate"], job.get("ranks_per_host", 1))
    off = round(max(abs(probe["ratio_to_expected"] - 1) for probe in calibration), 3)
    rows: list[Row] = []
    for _, turns in pd.DataFrame(records).groupby("number"):
        every, means = turns["every"].iloc[0], turns[["sent_bytes", "tx_bytes", "foreign_load"]].mean()
        ms, share = np.sort(np.stack(turns["ms"])), min(every, TIMED_STEPS) / every
        if share < 1:  # each turn has one exchange, in its longest step; a training has only this share of exchanges
            rest = np.median(ms[:, :-1], axis=1)
            ms = rest + (ms[:, -1] - rest) * share / TIMED_STEPS
        row = case | turns["columns"].iloc[0] | step_columns(ms.ravel())
        row["sent_bytes_per_step"] = round(means["sent_bytes"] * share)
        row["transmitted_bytes_per_step"] = round(means["tx_bytes"] * share)
        row |= {"foreign_load": round(means["foreign_load"], 3), "largest_calibration_error": off}
        rows.append(row | {"threads_per_rank": 1} | results.origin())
    print(pd.DataFrame(rows).loc[:, :"foreign_load"].to_string(index=False), flush=True)
    if max(row["foreign_load"] for row in rows) > FOREIGN_LOAD:
        print(f"Other programs used more than {FOREIGN_LOAD:.0%} of the processors; repeat the measurement.")
    results.save(path, rows, list(case))
