"""Times the steps of `auto_ddp` beside its candidates as fixed strategies, over links of several rates.

    sudo python -m benchmarks.auto

Two workers train a multilayer perceptron with AdamW. A round trains with each strategy in turn, in an order that
changes, in the same processes. Times are medians of steps after the first hundred, in which `auto_ddp` decides. A run
is reported only if both workers end with the same weights and all losses are finite.
"""

import functools
import itertools
import math
import statistics
import time
from typing import Any, NamedTuple

import pandas as pd
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import results
from benchmarks.harness.launch import WrongResult, check_weights, gather, run_ranks, write
from benchmarks.harness.lightning import as_if_by_torchrun, bare_trainer
from benchmarks.harness.results import Row
from lightning_sparse import AutoDDPStrategy, SparseDDPStrategy

STRATEGIES: dict[str, Any] = {
    "ddp": pl.strategies.DDPStrategy,
    "topk": functools.partial(SparseDDPStrategy, "topk"),
    "topk, next step": functools.partial(SparseDDPStrategy, "topk", overlap="next_step"),
    "int8": functools.partial(SparseDDPStrategy, "int8"),
    "int4": functools.partial(SparseDDPStrategy, "int4"),
    "auto": AutoDDPStrategy,
}
WIDTHS = {0.3: 256, 5: 1024, 25: 2304}
"""Widths of four square layers with about so many million parameters."""
RATES = ("50mbit", "1gbit", "1gbit 50ms", "loopback")
DECIDED, TIMED = 100, 30
"""Untimed and timed steps. In the former `auto_ddp` decides, and the density warm-up of updates ends. Other strategies
are timed after three steps. Each is timed for at most `MOST` seconds."""
MOST, LEAST = 10.0, 3
ROUNDS = 3
BATCH = 16


class Case(NamedTuple):
    """A link, and a model by its millions of parameters."""

    rate: str
    million: float


class Perceptron(pl.LightningModule):
    """Four square layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.ReLU()) for _ in range(4))))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = functional.mse_loss(self.layers(batch[0]), batch[1])
        if not math.isfinite(loss):
            raise WrongResult("the loss is not finite")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Times(pl.Callback):
    """Records the seconds from batch to batch, and the candidate of `auto_ddp`."""

    def __init__(self, leave_out: int) -> None:
        self.leave_out, self.ends, self.choice = leave_out, list[float](), ""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        if isinstance(trainer.strategy, AutoDDPStrategy):
            self.choice = trainer.strategy.choice
        timed = len(self.ends) - 1 - self.leave_out
        if timed >= LEAST:
            late = self.ends[-1] - self.ends[self.leave_out] > MOST
            trainer.should_stop = timed >= TIMED or max(gather(late)) if timed % LEAST == 0 else False


def work(job: Row) -> None:
    """Train with all strategies on this rank, in several rounds."""
    rank = as_if_by_torchrun()
    for number in range(ROUNDS):
        for name in [*STRATEGIES] if number % 2 else [*reversed(STRATEGIES)]:
            write(job["out"], strategy=name, **train(name, WIDTHS[job["million"]], rank))


def train(name: str, width: int, rank: int) -> Row:
    """Train with a strategy; return the median milliseconds of a step and the choice of `auto_ddp`."""
    random = torch.Generator().manual_seed(rank)
    batches = [torch.randn(2, BATCH, width, generator=random).unbind() for _ in range(8)]
    has_warmup = name == "auto" or name.startswith("topk")
    times, model = Times(DECIDED if has_warmup else 3), Perceptron(width)
    options = {} if name == "ddp" else {"process_group_backend": "gloo"}
    data = [*itertools.islice(itertools.cycle(batches), 1000)]
    trainer = bare_trainer(STRATEGIES[name](**options), [times])
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    check_weights(model)
    seconds = [b - a for a, b in itertools.pairwise(times.ends[times.leave_out :])]
    slowest = [max(each) for each in zip(*gather(seconds), strict=True)]
    return {"ms": 1e3 * statistics.median(slowest), "choice": times.choice}


def measure(case: Case) -> list[Row]:
    """Measure all strategies over a link; return rows of the CSV file."""
    records, _ = run_ranks("benchmarks.auto", case._asdict(), 2, case.rate)
    found = {name: [each for each in records if each["strategy"] == name] for name in STRATEGIES}
    middle = {name: statistics.median(each["ms"] for each in runs) for name, runs in found.items()}
    best = min(ms for name, ms in middle.items() if name != "auto")
    rows = []
    for name, runs in found.items():
        ms = [each["ms"] for each in runs]
        row = {
            "strategy": name,
            "ms": middle[name],
            "ms_min": min(ms),
            "ms_max": max(ms),
            "to_best": middle[name] / best,
        }
        row |= {"choice": " or ".join(dict.fromkeys(each["choice"] for each in runs if each["choice"]))}
        rows.append({**row, "workers": 2, "rounds": ROUNDS})
    print(pd.DataFrame(rows).to_string())
    return rows


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--million", type=float, nargs="+", default=[*WIDTHS])
    args = parser.parse_args()
    path = args.out / "auto.csv"
    cases = [Case(rate, million) for rate in args.rates for million in args.million]
    results.save_each(path, results.missing(results.load(path), cases), measure, digits=4)
