"""Train a ResNet-20 on handwritten digits, with several processes on this machine.

    python examples/train.py --strategy gaussiank_ddp --density 0.01 --devices 2

Dense and compressed training differ only in `--strategy`.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.utilities import rank_zero_only

# Python adds the script's folder to the path, but not its parent folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_sparse
from examples.data import Digits
from examples.models import OneCycleClassifier, ResNet20


class StepCost(pl.Callback):
    """Logs the cost of a step after every epoch, as the mean over the workers.

    The time "step/seconds" is the median from the start to the end of a batch: forward, backward, exchange, optimizer.
    The volume "step/bytes" is the number of bytes that a worker sends. Stock DDP does not count bytes. Its volume is
    that of a ring all-reduce with P workers, 2(P - 1)/P times the gradient.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting."""
        self.seconds: list[float] = []
        self.sent_before = sent_bytes(trainer)

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self.started)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the epoch's median time and mean volume."""
        sent = (sent_bytes(trainer) - self.sent_before) / len(self.seconds)
        if not hasattr(trainer.strategy, "reducer"):
            gradient = sum(p.numel() * p.element_size() for p in pl_module.parameters() if p.requires_grad)
            sent = 2 * (trainer.world_size - 1) / trainer.world_size * gradient
        pl_module.log("step/seconds", statistics.median(self.seconds), sync_dist=True)
        pl_module.log("step/bytes", sent, sync_dist=True)


def sent_bytes(trainer: pl.Trainer) -> int:
    """Return the bytes that this worker has sent so far; 0 with a strategy that does not count them."""
    reducer = getattr(trainer.strategy, "reducer", None)
    return 0 if reducer is None else int(reducer.comm.sent_bytes)


def make_strategy(name: str, density: float | None = None) -> str | DDPStrategy:
    """Return an argument for `Trainer(strategy=...)`.

    Without a density, the name is enough. With a density, the result is a strategy object for the name.

    Raises:
        ValueError: the name is not known, or its strategy takes no density.
        TypeError: the method has no density.
    """
    if name not in StrategyRegistry:
        raise ValueError(f"strategy={name!r} is not known; choose from {', '.join(sorted(StrategyRegistry))}.")
    if density is None:
        return name
    entry = StrategyRegistry[name]
    if not hasattr(entry["strategy"], "reducer"):
        raise ValueError(f"strategy={name!r} is dense; only strategies of lightning_sparse have a density.")
    strategy: DDPStrategy = entry["strategy"](**entry["init_params"], density=density)
    return strategy


def train(
    strategy: str | DDPStrategy,
    *,
    devices: int = 2,
    epochs: int = 6,
    batch_size: int = 16,
    max_lr: float = 0.1,
    momentum: float = 0.9,
    seed: int = 0,
    fold: int = 0,
    log_dir: str | None = None,
    progress: bool = False,
    **trainer_options: Any,
) -> dict[str, float]:
    """Train once, and return the last logged values, including "val/accuracy" and those of `StepCost`.

    Args:
        strategy: name or object, as for the Trainer.
        devices: number of worker processes.
        epochs: number of passes over the training digits.
        batch_size: number of images per worker and step.
        max_lr: highest learning rate of the cycle.
        momentum: momentum of SGD.
        seed: seed of the initial weights and of the order of the data.
        fold: number of the fold for validation.
        log_dir: folder for a CSV file of metrics; None logs nothing.
        progress: whether to show a progress bar and a summary of the model.
        **trainer_options: further options of the Trainer.
    """
    pl.seed_everything(seed, workers=True, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        logger=CSVLogger(log_dir, name="") if log_dir else False,
        callbacks=StepCost(),
        enable_checkpointing=False,
        enable_progress_bar=progress,
        enable_model_summary=progress,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        **trainer_options,
    )
    network = ResNet20(in_channels=1)
    trainer.fit(OneCycleClassifier(network, max_lr=max_lr, momentum=momentum), Digits(batch_size, fold))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def quiet() -> None:
    """Suppress Lightning's notices that are irrelevant for this training. Other warnings and all errors remain."""
    # If `lightning` is installed too, the namespace that was imported last writes the notices.
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric", "lightning_sparse"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The digits are already in memory, so worker processes would only copy them.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # This warning concerns only Lightning and torch.
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")


@rank_zero_only
def say(text: str) -> None:
    """Print on the first worker only."""
    print(text, flush=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--strategy",
        default="gaussiank_ddp",
        help="name of a strategy: ddp, auto_ddp, or <method>_ddp with one of " + ", ".join(lightning_sparse.METHODS),
    )
    parser.add_argument("--density", type=float, help="fraction of gradient entries to send. Default: 0.001")
    parser.add_argument("--devices", type=int, default=2, help="number of worker processes. Default: 2")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the data. Default: 6")
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step. Default: 16")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate of the cycle. Default: 0.1")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD. Default: 0.9")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order. Default: 0")
    parser.add_argument("--log-dir", default="runs/train", help="folder for the metrics. Default: runs/train")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: at least one.")
    try:
        strategy = make_strategy(args.strategy, args.density)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    quiet()
    result = train(
        strategy,
        devices=args.devices,
        epochs=args.epochs,
        batch_size=args.batch_size,
        max_lr=args.lr,
        momentum=args.momentum,
        seed=args.seed,
        log_dir=args.log_dir,
        progress=True,
    )
    say(
        f"{args.strategy}: accuracy {result['val/accuracy']:.2%}, {result['step/bytes']:,.0f} bytes and "
        f"{1e3 * result['step/seconds']:.1f} ms per step and worker; metrics in {args.log_dir}"
    )


if __name__ == "__main__":
    main()
