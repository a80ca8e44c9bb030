"""Measures the cost of the callbacks, on logging steps and on other steps.

All combinations of callbacks take turns in one training run of an MLP. Each has a block of five steps, the last of
which logs. So other load on the machine affects all of them equally. Each block is compared with the block without
callbacks of the same round. Before the measurement, a run with all callbacks must end with the same weights as a run
without callbacks, bit by bit.

    python -m benchmarks.callbacks

Output: `results/callbacks.csv`, two rows per combination. "ms" is rank 0's time from the start to the end of a batch.
"extra_ms" is the difference to a step without callbacks. Both are medians with 20th and 80th percentiles.
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from benchmarks.harness import results
from benchmarks.harness.results import Row
from benchmarks.harness.timing import spread
from examples.train import quiet
from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import CommunicationMonitor, ContractionRatio, GradientDistribution

BLOCK, RANKS, LAYERS = 5, 2, 5


def contestants() -> dict[str, list[pl.Callback]]:
    """Return new callbacks by name. Each exists once per run."""
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
    """An MLP with layers of 1,000 neurons, a million parameters each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1000, 1000), nn.ReLU()) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Turns(pl.Callback):
    """Gives each combination of callbacks a block of steps in turn, and times every step."""

    def __init__(self) -> None:
        self.contestants = contestants()
        self.steps: list[Row] = []

    def on_train_start(self, *args: Any) -> None:
        for callback in itertools.chain(*self.contestants.values()):
            callback.on_train_start(*args)

    def on_train_batch_start(self, *args: Any) -> None:
        self.started = time.perf_counter()
        turn, self.step = divmod(args[-1], BLOCK)
        self.block, number = divmod(turn, len(self.contestants))
        self.name = list(self.contestants)[number]
        for callback in self.contestants[self.name]:
            callback.on_train_batch_start(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        for callback in self.contestants[self.name]:
            callback.on_train_batch_end(*args)
        ms, kind = 1e3 * (time.perf_counter() - self.started), "logs" if self.step == BLOCK - 1 else "does not log"
        self.steps.append({"block": self.block, "step": kind, "callback": self.name, "ms": ms})


def fit(steps: int, folder: Path, callbacks: list[pl.Callback]) -> tuple[pl.Trainer, Tensor]:
    """Train; return the trainer and the weights."""
    pl.seed_everything(0, verbose=False)
    model, data = MLP(), torch.randn(steps * RANKS * 8, 1000)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=SparseDDPStrategy("topk"),
        max_epochs=1,
        callbacks=callbacks,
        logger=pl.loggers.TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=BLOCK,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, 8))  # type: ignore[arg-type]
    return trainer, nn.utils.parameters_to_vector(model.parameters()).detach()


def check(folder: Path) -> None:
    """Exit unless the callbacks do not change training, and log the expected values."""
    _, alone = fit(2 * BLOCK, folder / "alone", [])
    trainer, watched = fit(2 * BLOCK, folder / "watched", contestants()["all three"])
    if not torch.equal(alone, watched):
        raise SystemExit("Training with the callbacks ends with different weights, so nothing is measured.")
    if trainer.is_global_zero:
        found = EventAccumulator(str(folder / "watched"), size_guidance={"scalars": 0, "histograms": 0}).Reload()
        logged = [event.step for event in found.Scalars("contraction/measured")]
        numel = found.Histograms("distribution/u = g + e")[0].histogram_value.num
        if logged != [BLOCK - 1, 2 * BLOCK - 1] or numel != len(alone):
            raise SystemExit(f"The callbacks logged {numel:,} elements at steps {logged}, so nothing is measured.")


def summarize(steps: list[Row]) -> list[Row]:
    """Return a row for each combination and kind of step, without the first block, which is a warm-up."""
    table = pd.DataFrame(steps).query("block > 0")
    blocks = table.groupby(["step", "callback", "block"])["ms"].median()
    rows = []
    for (step, name), ms in table.groupby(["step", "callback"], sort=False)["ms"]:
        extra = blocks[step, name] - blocks[step, "none"]
        rows.append({"callback": name, "step": step, **spread(ms), **spread(extra, "extra_ms"), "blocks": len(extra)})
    return rows


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--rounds", type=int, default=20, help="number of blocks of each combination. Default: 20")
    args = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    warnings.simplefilter("ignore")  # Lightning's advice on a toy run
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder))
        turns = Turns()
        steps = BLOCK * len(turns.contestants) * (args.rounds + 1)
        trainer, weights = fit(steps, Path(folder) / "turns", [turns])
    if trainer.is_global_zero:
        rows = summarize(turns.steps)
        print(pd.DataFrame(rows).to_string(index=False))
        where = {"params": len(weights), "ranks": RANKS, "threads_per_rank": 1}
        where |= results.origin("pytorch-lightning", "tensorboard")
        results.save(args.out / "callbacks.csv", [row | where for row in rows], digits=4)
