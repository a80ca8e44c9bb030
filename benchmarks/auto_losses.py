"""Trains with `auto_ddp` over a link whose rate changes, and with `ddp`: the losses of a whole training.

    sudo python -m benchmarks.auto_losses

The GPT, the data and the schedule come from `benchmarks.language`, with AdamW and two workers, in Lightning's Trainer.
All trainings with a seed use equal weights and equal batches in the same order. Forward and backward are real, so
several processes share the processors, and `auto_ddp` may choose otherwise in another run. `ddp` trains on loopback,
because its losses do not depend on the link. A run is reported only if all workers end with the same weights.
"""

from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from benchmarks.auto import change_link
from benchmarks.harness import results
from benchmarks.harness.launch import check_weights, gather, run_ranks, write
from benchmarks.harness.lightning import as_if_by_torchrun, bare_trainer
from benchmarks.harness.results import Row
from benchmarks.harness.training import Data, factor, text
from benchmarks.language import BATCH_SIZE, LENGTH, VAL_SEQUENCES
from examples.models.gpt import GPT
from lightning_sparse import AutoDDPStrategy

STRATEGIES = {"ddp": pl.strategies.DDPStrategy, "auto": AutoDDPStrategy}
STEPS, EVERY, RATE = 1000, 50, 0.002  # below the best rate of `ddp`
FIRST_LINK = "1gbit"
LATER_LINKS = {150: "20mbit", 500: "1gbit"}
"""Rates of the link by the step before which they begin."""


class Run(NamedTuple):
    """One training: a key of `STRATEGIES` and a seed."""

    strategy: str
    seed: int


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of this rank, in the order of a seed."""

    def __init__(self, data: Data, seed: int) -> None:
        self.data = data
        self.order = torch.randperm(data.size, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        first = (step * dist.get_world_size() + dist.get_rank()) * BATCH_SIZE
        return self.data.batch(self.order[torch.arange(first, first + BATCH_SIZE) % len(self.order)].tolist())


class Model(pl.LightningModule):
    """The GPT. It changes the link, and writes the held-out loss of all ranks."""

    def __init__(self, run: Run, out: str) -> None:
        super().__init__()
        torch.manual_seed(run.seed)
        self.gpt, self.changes, self.out = GPT(LENGTH), run.strategy == "auto", out
        self.link, self.losses = FIRST_LINK if self.changes else "loopback", list[Tensor]()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if self.changes and index in LATER_LINKS:
            self.link = LATER_LINKS[index]
            change_link(self.link)
        return self._loss(batch)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(self.gpt(x).flatten(0, -2), y.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.losses.append(self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        own = torch.stack(self.losses).mean().item()
        self.losses.clear()
        mean = sum(gather(own)) / dist.get_world_size()
        strategy = self.trainer.strategy
        choice = strategy.choice if isinstance(strategy, AutoDDPStrategy) else "ddp"
        write(self.out, step=self.global_step, val_loss=mean, choice=choice, link=self.link)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def work(job: Row) -> None:
    """Train on this rank."""
    rank, run, data = as_if_by_torchrun(), Run(*job["run"]), text(LENGTH, VAL_SEQUENCES)
    model = Model(run, job["out"])
    options = {"process_group_backend": "gloo"} if run.strategy == "auto" else {}
    trainer = bare_trainer(STRATEGIES[run.strategy](**options), val_check_interval=EVERY, num_sanity_val_steps=0)
    held_out = [part[rank :: dist.get_world_size()].split(32) for part in data.held_out]
    held_out_batches: Any = [*zip(*held_out, strict=True)]
    trainer.fit(
        model,
        DataLoader(Batches(data, run.seed), batch_size=None),
        DataLoader(held_out_batches, batch_size=None),
    )
    check_weights(model)


def train(run: Run) -> list[Row]:
    """Train once; return rows of the CSV file."""
    points, _ = run_ranks(
        "benchmarks.auto_losses", {"run": run}, 2, FIRST_LINK if run.strategy == "auto" else "loopback"
    )
    common = {"workers": 2, "lr": RATE, "steps": STEPS, "batch_size_per_worker": BATCH_SIZE}
    return [{**point, **common} for point in points]


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    path = args.out / "auto_losses.csv"
    runs = [Run(strategy, seed) for seed in args.seeds for strategy in STRATEGIES]
    results.save_each(path, results.missing(results.load(path), runs), train, digits=7)
