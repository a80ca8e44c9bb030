"""One rank of the language model benchmark: `benchmarks.language` starts two.

Nothing is reported unless all ranks have the same weights at the end, bit by bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import language
from benchmarks.harness.baselines import CONTESTANTS, Options
from benchmarks.harness.ranks import check_weights, gather, join, leave, write
from benchmarks.harness.timing import Meter, elapsed_ms, quantiles
from benchmarks.language import BATCH_SIZE, DENSITY, FIXED, LENGTH, VAL_SEQUENCES, WORKERS, Run
from examples.data.text import StandardLibrary
from examples.models.gpt import GPT
from lightning_sparse import NonFiniteGradient

Row = dict[str, Any]


def factor(step: int, steps: int) -> float:
    """Return the factor on the learning rate: linear warm-up over a tenth, then half a cosine to zero."""
    warmup = max(1, steps // 10)
    return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2


class Trainee:
    """A model in training on this rank.

    Args:
        run: how to train it.
        text: the data, set up.
    """

    def __init__(self, run: Run, text: StandardLibrary) -> None:
        self.run, self.text, self.steps = run, text, language.STEPS[run.part]
        torch.manual_seed(run.seed)
        self.model = GPT(context=LENGTH)
        self.wrapped = CONTESTANTS[run.method].wrap(self.model, Options(DENSITY))
        self.optimizer = optimizer(run, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factor(step, self.steps))
        self.order = torch.randperm(len(text.train_set), generator=torch.Generator().manual_seed(run.seed))
        self.done = 0
        self.sent_before = self.wrapped.counted_bytes

    def step(self) -> None:
        """Train on the next batch."""
        first = (self.done * WORKERS + dist.get_rank()) * BATCH_SIZE
        tokens, following = sequences(self.text.train_set, self.order[first : first + BATCH_SIZE])
        self.optimizer.zero_grad()
        functional.cross_entropy(self.wrapped.module(tokens).flatten(0, 1), following.flatten()).backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def sent_bytes(self) -> int:
        """Return the bytes that this rank has put on the wire so far."""
        return self.wrapped.sent_bytes(self.done) - self.sent_before

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


def optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a run."""
    if run.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, FIXED["beta2"]), weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=run.lr, momentum=FIXED["momentum"])


def sequences(data: Any, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen sequences and the bytes that follow theirs, int64 (batch, length) both."""
    tokens, following = zip(*(data[index] for index in chosen.tolist()), strict=True)
    return torch.stack(tokens), torch.stack(following)


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
        if trainee.done % language.EVERY[run.part] == 0:
            loss = trainee.loss()
            points.append({"step": trainee.done, "val_loss": loss, "sent_bytes": max(gather(trainee.sent_bytes()))})
            if not math.isfinite(loss):
                return [*points[:-1], {**points[-1], "val_loss": math.inf}]
    check_weights(trainee.model)
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
    for _ in range(language.ROUNDS):
        for number, trainee in enumerate(trainees):
            trainee.step()  # brings the model back into the caches
            dist.barrier()
            with Meter() as meter:
                times[number] += [elapsed_ms(trainee.step) for _ in range(language.TIMED_STEPS)]
                dist.barrier()
            transmitted[number] += meter.transmitted
            foreign[number] += meter.foreign_load(gather(meter.own)) / language.ROUNDS
    rows = []
    for number, trainee in enumerate(trainees):
        check_weights(trainee.model)
        # A step is over when its slowest rank is.
        ms = [max(both) for both in zip(*gather(times[number]), strict=True)]
        median, p20, p80 = (round(value, 1) for value in quantiles(ms))
        sent = max(gather(trainee.sent_bytes() - sent_before[number])) // (trainee.done - 3)
        row = {"optimizer": trainee.run.optimizer, "method": trainee.run.method, "steps": len(ms)}
        row |= {"median_ms": median, "p20_ms": p20, "p80_ms": p80, "sent_bytes_per_step": sent}
        row |= {"transmitted_bytes_per_step": max(gather(transmitted[number])) // len(ms)}
        rows.append(row | {"foreign_load": round(max(gather(foreign[number])), 3)})
    return rows


def main() -> None:
    """Do the job given as JSON in the first argument: "curve" of one run, or "step_times" of several."""
    job = join(sys.argv[1])
    text = StandardLibrary(LENGTH, BATCH_SIZE)
    text.setup()
    runs = [Run(*run) for run in job["runs"]]
    write(job["out"], rows=curve(runs[0], text) if job["what"] == "curve" else step_times(runs, text))
    leave()


if __name__ == "__main__":
    main()
