"""Measures the time of a Trainer's step between distant sites.

There are two workers on separate hosts, with 100 Mbit/s and a round trip of 50 ms between them. The model is a linear
layer of 65,792 parameters under AdamW, so that waiting dominates. In each round, each method runs one fit in turn.
The result of a fit is the mean time of 120 steps, and the final result is the median of all rounds. With the controls
"with broadcast", Lightning broadcasts in each batch whether rank 0 received SIGTERM, as it does with its own
strategies. Nothing is reported unless all workers end with the same weights.

    sudo python -m benchmarks.sites
"""

import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness import results
from benchmarks.harness.launch import check_weights, run_ranks, write
from benchmarks.harness.lightning import as_if_by_torchrun, bare_trainer
from benchmarks.harness.timing import spread
from benchmarks.language import FAR
from lightning_sparse import SparseDDPStrategy

WORKERS, ROUNDS = 2, 5
WIDTH, BATCH_SIZE = 256, 8
UNTIMED, TIMED = 10, 120  # numbers of steps; 120 is a multiple of 8 and of 30, the steps between exchanges
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "topk": ("topk", {}),
    "topk, every 8": ("topk", {"local_steps": 8}),
    "sparseloco": ("sparseloco", {}),
}
CONTESTANTS = ["ddp", *METHODS, *(f"{name}, with broadcast" for name in METHODS)]


class Layer(pl.LightningModule):
    """A linear layer that is trained to output 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Clock(pl.Callback):
    """Records the time at the start of each batch. If `broadcasts`, Lightning handles SIGTERM as in its strategies."""

    def __init__(self, broadcasts: bool) -> None:
        self.broadcasts, self.starts = broadcasts, list[float]()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if self.broadcasts:
            vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        self.starts.append(time.perf_counter())


def work(job: dict[str, Any]) -> None:
    """Run the methods in turn. `run_ranks` calls this on each rank."""
    rank = as_if_by_torchrun()
    batches = torch.randn(UNTIMED + TIMED + 1, BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(rank))
    for number in range(ROUNDS):
        for contestant in CONTESTANTS:
            name, _, broadcast = contestant.partition(", with")
            clock, model = Clock(bool(broadcast)), Layer()
            if name == "ddp":
                strategy: DDPStrategy = DDPStrategy(process_group_backend="gloo")
            else:
                method, options = METHODS[name]
                strategy = SparseDDPStrategy(method, process_group_backend="gloo", **options)
            trainer = bare_trainer(strategy, [clock])
            trainer.fit(model, DataLoader(batches, batch_size=None))
            check_weights(model)
            seconds = clock.starts[UNTIMED + TIMED] - clock.starts[UNTIMED]
            write(job["out"], contestant=contestant, round=number, ms=1e3 * seconds / TIMED)


if __name__ == "__main__":
    args = results.command_line(__doc__, figure=False).parse_args()
    records, links = run_ranks("benchmarks.sites", {}, WORKERS, FAR)
    rows = []
    for contestant in CONTESTANTS:
        times = spread([record["ms"] for record in records if record["contestant"] == contestant])
        rows.append({"contestant": contestant, **times})
        print(f"{contestant}: {times['ms']:.1f} ms a step, {times['ms_p20']:.1f} to {times['ms_p80']:.1f}")
    error = max(abs(row["ratio_to_expected"] - 1) for row in links)
    case = {"rate": FAR, "workers": WORKERS, "rounds": ROUNDS, "steps": TIMED, "largest_calibration_error": error}
    where = results.origin("pytorch-lightning")
    results.save(args.out / "sites.csv", [row | case | where for row in rows], ["contestant", "rate"], digits=3)
