"""Elastic training on the digits: if a worker or a whole node fails, torchrun restarts it and training continues.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py

If a worker is killed, the others end within seconds, and torchrun restarts all of them. They continue from `last.ckpt`
in `--folder` with the same step, data and residuals. You can also run the command again after a Ctrl-C, or with another
number of workers. A complete run is not repeated: choose another folder for a new run. (The variable gives each attempt
a separate store. Without it, new workers may read the addresses of dead workers from the store and fail again, which
costs a restart: pytorch issue 135712.)

With one or two nodes, run on each of them:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 \
        --rdzv-conf last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3 examples/elastic.py

If the second node fails, the first continues alone after about 10 s, and accepts the second again when it returns. (If
the first node fails, the nodes cannot find each other, so choose a reliable machine for `--rdzv-endpoint`.) All nodes
must have access to the folder.

A step trains on the same digits for any number of workers, so the learning rate need not change. Error feedback is
preserved too: the mean of the residuals over the workers does not change.
"""

from __future__ import annotations

import argparse
import contextlib
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

# Python adds the script's folder to the path, but not its parent folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.data import Digits
from examples.models import OneCycleClassifier, ResNet20
from examples.train import make_strategy, quiet, say
from lightning_sparse import METHODS


class Shares:
    """Endless batches: each step uses the next `batch_size` samples in shuffled order, and this worker gets its share.

    The order depends only on the step. So no state needs to be saved, and a resumed run continues with the next digits
    for any number of workers.
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
    """The digits, with `batch_size` as the total of all workers."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return this worker's share of the batches, from the current step."""
        assert self.trainer is not None
        return DataLoader(self.train_set, batch_sampler=Shares(len(self.train_set), self.batch_size, self.trainer))  # type: ignore[arg-type]


def newest(folder: Path) -> Path | None:
    """Return the newest readable checkpoint. If a process was killed during a write, that file may be incomplete."""
    steps = {}
    for path in (folder / "last.ckpt", *folder.glob("step=*.ckpt")):
        with contextlib.suppress(OSError, EOFError, RuntimeError, pickle.UnpicklingError):
            # The numbered file is written first, so a process that is killed in between leaves an older last.ckpt.
            steps[path] = torch.load(path, map_location="cpu", weights_only=True)["global_step"]
    return max(steps, key=steps.__getitem__, default=None)


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
    """Train, or resume training, and return the accuracy on the held-out digits.

    Args:
        folder: folder of the checkpoints, accessible to all nodes.
        strategy: a strategy or its name.
        density: fraction of gradient entries to send.
        steps: number of steps of the whole run.
        every: number of steps between checkpoints.
        batch_size: total number of images per step.
        seed: seed of the initial weights.
        callbacks: further callbacks.

    Raises:
        SystemExit: the run in the folder is complete; torchrun counts this as a success.
    """
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        # The numbers that torchrun determined for this attempt.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=make_strategy(strategy, density) if isinstance(strategy, str) else strategy,
        max_steps=steps,
        # While a checkpoint is written, the previous numbered file exists. While that is deleted, last.ckpt exists.
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
    if checkpoint and (done := torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"]) >= steps:
        say(f"The run in {folder} has taken {done} of {steps} steps: for a new run, choose another folder.")
        raise SystemExit
    say(
        f"Attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}, {trainer.world_size} workers: "
        + (f"resuming from {checkpoint.name}" if checkpoint else "starting from scratch")
    )
    model, data = OneCycleClassifier(ResNet20(in_channels=1)), ElasticDigits(batch_size)
    trainer.fit(model, data, ckpt_path=checkpoint)
    trainer.limit_val_batches = 1.0
    return trainer.validate(model, data, verbose=False)[0]["val/accuracy"]


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--strategy", default="topk_ddp", help="name of a strategy. Default: topk_ddp")
    parser.add_argument("--density", type=float, help="fraction of entries to send. Default: 0.01, if possible")
    parser.add_argument("--steps", type=int, default=400, help="number of steps of the whole run. Default: 400")
    parser.add_argument("--every", type=int, default=20, help="number of steps between checkpoints. Default: 20")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints. Default: runs/elastic/STRATEGY")
    args = parser.parse_args()
    if min(args.steps, args.every) < 1:
        parser.error(f"--steps {args.steps} --every {args.every}: at least one.")
    method = METHODS.get(args.strategy.removeprefix("ddp_").partition("_ddp")[0])
    has_density = method is not None and "density" in method.options
    folder = args.folder or Path("runs/elastic") / args.strategy
    try:
        strategy = make_strategy(args.strategy, 0.01 if args.density is None and has_density else args.density)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    quiet()
    accuracy = train(folder, strategy, steps=args.steps, every=args.every)
    say(f"{args.strategy}: accuracy {accuracy:.2%} after {args.steps} steps; checkpoints in {folder}")


if __name__ == "__main__":
    main()
