"""Traces a gradient, an update and a checkpoint on their way through the package, in a real `Trainer.fit`.

`benchmarks.shape` starts this module as `python -m benchmarks.harness.trips CHECKOUT FOLDER`. Lightning starts the
second process. Rank 0 writes the counts to the file `trips.json` of the folder.
"""

import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.tracer import Call, Tracer, counts, typical

PACKAGE = "lightning_sparse"
FIRST, TIMES, WIDTH = 5, 5, 64
"""Index of the first batch to trace, number of batches (and of saves) to trace, and width of the model's two layers."""

PAUSE = 0.1
"""Seconds within which an exchange that overlaps the next step completes."""

RESTORE = "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"
"""The methods by which a Trainer restores a checkpoint through its strategy."""


class Net(pl.LightningModule):
    """Two layers, all in one segment."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.001)  # type: ignore[call-arg]


class Watch(pl.Callback):
    """Traces batches from the sixth on and, if there is a folder, saves of checkpoints after the last batch."""

    def __init__(self, tracer: Tracer, overlaps_next: bool, folder: Path | None = None) -> None:
        self.tracer, self.overlaps_next, self.folder = tracer, overlaps_next, folder
        self.batches: list[list[Call]] = []
        self.saves: list[list[Call]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if index >= FIRST:
            time.sleep(PAUSE)  # until the previous batch's exchange is complete
            self.tracer.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index < FIRST:
            return
        if self.overlaps_next:
            time.sleep(PAUSE)
        self.batches.append(self.tracer.end())
        if self.folder is not None and len(self.batches) == TIMES:
            for i in range(TIMES):
                self.tracer.begin()
                trainer.save_checkpoint(self.folder / f"{i}.ckpt")
                self.saves.append(self.tracer.end())


def fit(strategy: Any, optimizer: type[torch.optim.Optimizer], *callbacks: pl.Callback, path: Path | None) -> None:
    """Train with two processes, from a checkpoint if there is a path."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=FIRST + TIMES + (path is not None),
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(4 * (FIRST + TIMES), WIDTH)
    trainer.fit(Net(optimizer), DataLoader(data, batch_size=2), ckpt_path=path)  # type: ignore[arg-type]


def traced(tracer: Tracer, do: Callable[..., Any], windows: list[Call]) -> Callable[..., Any]:
    """Wrap `do` so that each call of it adds the traced calls to `windows`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tracer.begin()
        try:
            return do(*args, **kwargs)
        finally:
            windows.extend(tracer.end())

    return wrapped


def trips(tracer: Tracer, folder: Path) -> dict[str, dict[str, int]]:
    """Return the columns of each trip."""
    from lightning_sparse import SparseDDPStrategy

    after: dict[str, Any] = {"overlap": "none"}
    following: dict[str, Any] = {"overlap": "next_step"}
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    found = {}
    for name, optimizer, options in (
        ("gradient, SGD", sgd, {}),
        ("update, AdamW, within backward", adamw, {}),
        ("update, AdamW, after backward", adamw, after),
        ("update, AdamW, with the next step", adamw, following),
    ):
        saves = optimizer is adamw and not options
        watch = Watch(tracer, options is following, folder if saves else None)
        fit(SparseDDPStrategy("topk", **options), optimizer, watch, path=None)
        found[name] = counts(typical(watch.batches))
        if saves:
            saving = counts(typical(watch.saves))
    calls: list[Call] = []
    strategy = SparseDDPStrategy("topk")
    for name in RESTORE:
        setattr(strategy, name, traced(tracer, getattr(strategy, name), calls))
    fit(strategy, adamw, path=folder / "0.ckpt")
    return {**found, "saving a residual": saving, "loading a residual": counts(Counter(calls))}


if __name__ == "__main__":
    checkout, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    sys.path.insert(0, str(checkout))
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's advice on a toy run
    torch.set_num_threads(1)
    tracer = Tracer(checkout / PACKAGE)
    tracer.install()
    found = trips(tracer, folder)
    package = Path(str(sys.modules[PACKAGE].__file__)).parent
    if package != checkout / PACKAGE:
        raise SystemExit(f"The package of {package} was imported, not that of {checkout}.")
    if torch.distributed.get_rank() == 0:
        (folder / "trips.json").write_text(json.dumps(found))
