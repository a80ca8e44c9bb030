"""Helpers for tests that save and resume: fits, their results, and misplaced sidecar files."""

import logging
from pathlib import Path

import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_sparse import SparseDDPStrategy
from lightning_sparse import checkpoint as sidecars
from tests.integration.trainers import Loader, Net, strategy, trainer

STEP_4, STEP_8 = "step=4.ckpt", "step=8.ckpt"
MOMENTUM = {"optimizer": torch.optim.SGD, "momentum": 0.9}
OPTIMIZERS = {
    "momentum": MOMENTUM,
    "nesterov": {**MOMENTUM, "nesterov": True, "weight_decay": 0.01},
    "adam": {"optimizer": torch.optim.Adam, "lr": 0.01},
    "adamw, schedule": {"optimizer": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1},
}


class Scheduled(Net):
    """Has a learning rate that changes in every step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def network(optimizer: str = "momentum") -> Net:
    return (Scheduled if "schedule" in optimizer else Net)(**OPTIMIZERS[optimizer])


def fit(name, rank, size=2, *, net=None, ckpt_path=None, batches=6, density=0.05, ours=None, **options):
    """Fit two epochs of six batches; return the net and the trainer."""
    net = network() if net is None else net
    run = trainer(strategy(name, density, **(ours or {})), size, **{"max_epochs": 2, **options})
    run.fit(net, Loader(rank, size, batches), ckpt_path=ckpt_path)
    return net, run


def result(net, run):
    """Return weights, optimizer state, reducer state and, on rank 0, whose a checkpoint holds, the buffers."""
    ours = isinstance(run.strategy, SparseDDPStrategy)
    state = run.strategy.reducer.state_dict() if ours else None
    return net.weights, run.optimizers[0].state_dict(), state, net.state_dict() if run.is_global_zero else None


def saving(directory, **options):
    """Save every second step, and keep all; `options` change that."""
    return ModelCheckpoint(directory, "{step}", **{"every_n_train_steps": 2, "save_top_k": -1, **options})


def with_warnings(fn, *args, **options):
    """Return the result of a call, and the warnings that this package logged meanwhile."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lightning_sparse").addHandler(handler)
    try:
        return fn(*args, **options), records
    finally:
        logging.getLogger("lightning_sparse").removeHandler(handler)


def error_of(fn, *args, **options):
    """Return the text of the exception that a call raises; None if it raises none."""
    try:
        fn(*args, **options)
    except Exception as error:
        return str(error)
    return None


def sidecar_names(checkpoint, io=None):
    """Return the names of the sidecar files that a checkpoint requires, or None if it requires none."""
    info = (io or TorchCheckpointIO()).load_checkpoint(checkpoint).get(sidecars.KEY)
    return info and {f"{info['tag']}.rank{rank}-of-{info['size']}.pt" for rank in range(info["size"])}


def misplaced(directory: Path, others=True, io=None) -> list[str]:
    """Return the checkpoints that lack sidecar files, and unless `others`, the sidecar files that belong to none."""
    wrong = []
    for checkpoint in directory.glob("*.ckpt"):
        present = {file.name for file in Path(f"{checkpoint.resolve()}.residuals").glob("*")}
        try:
            names = sidecar_names(checkpoint, io)
        except FileNotFoundError:  # a thread lists files during training, and the file was removed since
            continue
        wrong += [f"{checkpoint}: {names}"] if names is None or names - present else []
        wrong += [] if others or names == present else [f"{checkpoint}: {present}"]
    folders = [] if others else directory.glob("*.residuals")
    return wrong + [str(folder) for folder in folders if not Path(str(folder).removesuffix(".residuals")).exists()]


class At(Callback):
    """Does something after a step."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.step:
            self.do(trainer)


class AtStart(Callback):
    """Keeps the reducer state with which training starts."""

    def on_train_start(self, trainer, module):
        self.state = trainer.strategy.reducer.state_dict() if isinstance(trainer.strategy, SparseDDPStrategy) else None


class Scored(Net):
    """Logs something to be the best in: the later the better."""

    def training_step(self, batch, index):
        self.log("score", float(self.global_step))
        return super().training_step(batch, index)
