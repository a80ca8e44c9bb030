"""Lightning's Trainer in the ranks that `run_ranks` starts, each on a host of its own."""

import os
import warnings
from collections.abc import Sequence

import pytorch_lightning as pl
import torch.distributed as dist

from examples.train import quiet


def as_if_by_torchrun() -> int:
    """Let Lightning take this process for one that torchrun has started, and say little; return its rank."""
    quiet()
    warnings.simplefilter("ignore")  # Lightning's advice on a toy run
    rank = dist.get_rank()
    ours = {"LOCAL_RANK": "0", "GROUP_RANK": str(rank), "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ |= ours
    return rank


def bare_trainer(strategy: pl.strategies.DDPStrategy, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    """Return a Trainer of one epoch on the CPU that does nothing but train."""
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
    )
