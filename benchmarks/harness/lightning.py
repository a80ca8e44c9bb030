"""Lightning's Trainer for the ranks that `run_ranks` starts, each on a separate host."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist

from examples.train import quiet


def as_if_by_torchrun() -> int:
    """Make Lightning treat this process as started by torchrun, and log less; return its rank."""
    quiet()
    warnings.simplefilter("ignore")  # Lightning's advice on a toy run
    rank = dist.get_rank()
    ours = {"LOCAL_RANK": "0", "GROUP_RANK": str(rank), "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ |= ours
    return rank


def bare_trainer(
    strategy: pl.strategies.DDPStrategy, callbacks: Sequence[pl.Callback] = (), **options: Any
) -> pl.Trainer:
    """Return a Trainer for one epoch on the CPU that saves and shows nothing."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
        **options,
    )
