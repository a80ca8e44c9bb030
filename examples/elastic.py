"""Train the digits so that a worker, or a whole node, may die: torchrun starts again, and the run goes on.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py

A killed worker ends the others within seconds, torchrun starts all of them again, and they go on from `last.ckpt` in
`--folder`: same step, same data, same residuals. Run the line again after a Ctrl-C, or with another number of workers,
and it goes on, too. (The variable gives each attempt a store of its own. Without it new workers may find the addresses
of dead ones there and fail once more, which costs a restart: pytorch issue 135712.)

With one or two nodes, on each of them:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 \
        --rdzv-conf last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3 examples/elastic.py

If the second node goes, the first goes on alone after about 10 s, and takes it in again when it comes back. (Without
the first one there is nowhere to meet: let `--rdzv-endpoint` be on a machine that lasts.) The folder must be one that
all nodes see.

A step trains on the same digits however many workers share them, so the learning rate need not change. What error
feedback keeps survives as well: of the residuals the mean over the workers stays what it was.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

# The script's own folder is on the path when it runs as a script, the folder above is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.data import Digits
from examples.models import OneCycleClassifier, ResNet20
from examples.train import make_strategy, quiet, say


class Shares:
    """Endless batches: in each step the next `batch_size` samples in shuffled order, of which this worker gets a part.

    The order is a function of the step alone. So there is nothing to save about it, and a run that resumes goes on with
    the digits that come next, whatever the number of workers.
    """

    def __init__(self, samples: int, batch_size: int, trainer: pl.Trainer) -> None:
        self.samples, self.batch_size, self.trainer = samples, batch_size, trainer

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch = self.samples // self.batch_size
        for step in itertools.count(self.trainer.global_step):
            epoch, place = divmod(step, per_epoch)
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(epoch))
            batch = order[place * self.batch_size : (place + 1) * self.batch_size]
            yield batch[self.trainer.global_rank :: self.trainer.world_size].tolist()


class ElasticDigits(Digits):
    """The digits, where `batch_size` is that of all workers together."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return this worker's share, from the present step on."""
        assert self.trainer is not None
        return DataLoader(self.train_set, batch_sampler=Shares(len(self.train_set), self.batch_size, self.trainer))  # type: ignore[arg-type]


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that can be read: what was being written when a process was killed may be torn."""
    numbered = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), reverse=True)
    for path in (folder / "last.ckpt", *numbered):
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
            continue
        return path
    return None


def train(
    folder: Path,
    strategy: str | DDPStrategy = "topk_ddp",
    *,
    density: float | None = None,
    steps: int = 400,
    every: int = 20,
    batch_size: int = 32,
    seed: int = 0,
    callbacks: Sequence[pl.Callback] = (),
) -> float:
    """Train, or go on training, and return the accuracy on the held-out digits.

    Args:
        folder: where the checkpoints are, on all nodes.
        strategy: name of a strategy, or one.
        density: fraction of gradient entries to send.
        steps: of the whole run.
        every: how many steps lie between checkpoints.
        batch_size: images per step, all workers together.
        seed: of the initial weights.
        callbacks: further ones.
    """
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        # What torchrun has agreed on this time.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=make_strategy(strategy, density) if isinstance(strategy, str) else strategy,
        max_steps=steps,
        # While the new one is written there is the numbered one before, and while that goes there is last.ckpt.
        callbacks=[
            ModelCheckpoint(
                folder, "{step}", monitor="step", mode="max", save_last=True, every_n_train_steps=every, verbose=False
            ),
            *callbacks,
        ],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    checkpoint = newest(folder)
    say(
        f"Attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, {trainer.world_size} workers: "
        + (f"going on from {checkpoint.name}" if checkpoint else "starting afresh")
    )
    model, data = OneCycleClassifier(ResNet20(in_channels=1)), ElasticDigits(batch_size)
    trainer.fit(model, data, ckpt_path=checkpoint)
    trainer.limit_val_batches = 1.0
    return trainer.validate(model, data, verbose=False)[0]["val/accuracy"]


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--strategy", default="topk_ddp", help="name of a strategy, default topk_ddp")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of gradient entries to send")
    parser.add_argument("--steps", type=int, default=400, help="of the whole run, default 400")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints, default 20")
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"), help="default runs/elastic")
    args = parser.parse_args()
    quiet()
    density = None if args.strategy == "ddp" else args.density
    accuracy = train(args.folder, args.strategy, density=density, steps=args.steps, every=args.every)
    say(f"{args.strategy}: accuracy {accuracy:.2%} after {args.steps} steps; checkpoints in {args.folder}")


if __name__ == "__main__":
    main()
