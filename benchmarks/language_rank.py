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
from benchmarks.harness.ranks import check_weights, gather, join, leave, timed, write
from benchmarks.language import BATCH_SIZE, DENSITY, FIXED, LENGTH, VAL_SEQUENCES, WORKERS, Run
from examples.data.text import StandardLibrary
from examples.models.gpt import GPT

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
    """Train, and return the validation loss and the bytes sent so far after every `EVERY` steps."""
    trainee = Trainee(run, text)
    points = [{"step": 0, "val_loss": trainee.loss(), "sent_bytes": 0}]
    while trainee.done < trainee.steps:
        trainee.step()
        if trainee.done % language.EVERY[run.part] == 0:
            sent = max(gather(trainee.sent_bytes()))
            points.append({"step": trainee.done, "val_loss": trainee.loss(), "sent_bytes": sent})
    check_weights(trainee.model)
    return points


def step_times(runs: Sequence[Run], text: StandardLibrary) -> list[list[Row]]:
    """Time some steps of each run in turn, several rounds, and return what each round found, by run."""
    trainees = [Trainee(run, text) for run in runs]
    for trainee in trainees:  # DDP forms its buckets anew in the second step
        for _ in range(3):
            trainee.step()
    found: list[list[Row]] = [[] for _ in runs]
    for _ in range(language.ROUNDS):
        for rounds, trainee in zip(found, trainees, strict=True):
            trainee.step()  # brings the model back into the caches
            sent_before = trainee.sent_bytes()
            row = timed(trainee.step, language.TIMED_STEPS)
            sent = max(gather(trainee.sent_bytes() - sent_before)) / language.TIMED_STEPS
            rounds.append(row | {"sent_bytes": sent})
    for trainee in trainees:
        check_weights(trainee.model)
    return found


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
