"""What do the callbacks cost, on steps that log and on the others?

All contestants take turns in one training run of a plain MLP: each has a block of five steps, the last of which logs.
So whatever else the machine does hits all of them alike, and each block is compared with that of no callback in the
same round. Beforehand a run with all callbacks must end with the same weights, to the last bit, as one without.

    python -m benchmarks.callbacks

Written: `results/callbacks.csv`, two rows per contestant. "ms" is rank 0's time from the start of a batch to its end,
"extra_ms" the difference to no callback, both as medians with 20th and 80th percentiles.
"""

import itertools
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from benchmarks.harness import results
from benchmarks.harness.timing import spread
from examples.train import quiet
from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import CommunicationMonitor, ContractionRatio, GradientDistribution

BLOCK = 5
RANKS = 2


def contestants() -> dict[str, list[pl.Callback]]:
    """Return new callbacks by name, all of which exist once per run."""
    return {
        "none": [],
        "GradientDistribution": [GradientDistribution()],
        "GradientDistribution(per_layer=True)": [GradientDistribution(per_layer=True)],
        "ContractionRatio": [ContractionRatio()],
        "ContractionRatio(per_layer=True)": [ContractionRatio(per_layer=True)],
        "CommunicationMonitor": [CommunicationMonitor()],
        "all three": [GradientDistribution(), ContractionRatio(), CommunicationMonitor()],
    }


class MLP(pl.LightningModule):
    """Layers of 1,000 neurons."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1000, 1000), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return a loss."""
        return (self.layers(batch) - batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Turns(pl.Callback):
    """Gives each contestant a block of steps in turn, and takes the time of every step."""

    def __init__(self) -> None:
        self.contestants = contestants()
        self.names = list(self.contestants)
        self.steps: list[tuple[int, str, str, float]] = []

    def turn(self, batch_idx: int) -> str:
        """Return whose turn it is."""
        return self.names[batch_idx // BLOCK % len(self.names)]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call all contestants."""
        for callback in itertools.chain(*self.contestants.values()):
            callback.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        """Start the clock and call the contestant whose turn it is."""
        self.started = time.perf_counter()
        for callback in self.contestants[self.turn(batch[-1])]:
            callback.on_train_batch_start(trainer, pl_module, *batch)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        """Call the contestant and stop the clock."""
        index = batch[-1]
        name, kind = self.turn(index), "does not log" if (index + 1) % BLOCK else "logs"
        for callback in self.contestants[name]:
            callback.on_train_batch_end(trainer, pl_module, *batch)
        ms = 1e3 * (time.perf_counter() - self.started)
        self.steps.append((index // BLOCK // len(self.names), kind, name, ms))


def fit(layers: int, steps: int, folder: Path, callbacks: list[pl.Callback]) -> tuple[pl.Trainer, Tensor]:
    """Train and return the trainer and the weights."""
    pl.seed_everything(0, verbose=False)
    data = torch.randn(steps * RANKS * 8, 1000)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=SparseDDPStrategy("topk"),
        max_epochs=1,
        callbacks=callbacks,
        logger=TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=BLOCK,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = MLP(layers)
    trainer.fit(model, torch.utils.data.DataLoader(data, 8))  # type: ignore[arg-type]
    return trainer, torch.cat([param.detach().view(-1) for param in model.parameters()])


def check(layers: int, folder: Path) -> None:
    """Raise unless the callbacks leave training as it is, and log what they should."""
    _, alone = fit(layers, 2 * BLOCK, folder / "alone", [])
    trainer, watched = fit(layers, 2 * BLOCK, folder / "watched", contestants()["all three"])
    if not torch.equal(alone, watched):
        raise SystemExit("Training with the callbacks ends with other weights than without: no times for that.")
    if trainer.is_global_zero:
        found = EventAccumulator(str(folder / "watched"), size_guidance={"scalars": 0, "histograms": 0}).Reload()
        logged = [event.step for event in found.Scalars("contraction/measured")]
        numel = found.Histograms("distribution/u = g + e")[0].histogram_value.num
        if logged != [BLOCK - 1, 2 * BLOCK - 1] or numel != len(alone):
            raise SystemExit(f"The callbacks logged {numel:,} elements at steps {logged}: no times for that.")


def report(turns: Turns, numel: int, out: Path) -> None:
    """Print and write a row for each contestant and kind of step."""
    table = pd.DataFrame(turns.steps, columns=["block", "step", "callback", "ms"]).query("block > 0")  # after a warm-up
    blocks = table.groupby(["step", "callback", "block"])["ms"].median()
    rows = []
    for step, name in itertools.product(("logs", "does not log"), turns.names):
        ms = table.query("step == @step and callback == @name")["ms"]
        extra = blocks[step, name] - blocks[step, "none"]
        times = {column: f"{value:.2f}" for column, value in (spread(ms) | spread(extra, "extra_ms")).items()}
        rows.append({"callback": name, "step": step, **times, "blocks": len(extra)})
    print(pd.DataFrame(rows).to_string(index=False))
    surroundings = {"params": numel, "ranks": RANKS, "threads_per_rank": torch.get_num_threads()}
    surroundings |= results.origin("pytorch-lightning", "tensorboard")
    results.save(out, [row | surroundings for row in rows])


def main() -> None:
    """Run from the command line."""
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--layers", type=int, default=5, help="of a million parameters each, default 5")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each contestant, default 20")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    warnings.simplefilter("ignore")  # Lightning's advice on a toy run
    with tempfile.TemporaryDirectory() as folder:
        check(arguments.layers, Path(folder))
        turns = Turns()
        steps = BLOCK * len(turns.names) * (arguments.rounds + 1)
        trainer, weights = fit(arguments.layers, steps, Path(folder) / "turns", [turns])
        if trainer.is_global_zero:
            report(turns, len(weights), arguments.out / "callbacks.csv")


if __name__ == "__main__":
    main()
