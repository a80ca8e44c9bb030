"""Trainings of sharded models with a Trainer: two replicas, each sharded over two ranks."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed.checkpoint.state_dict  # which every rank would import
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_sparse import SparseHSDPStrategy
from tests.integration.trainers import trainer
from tests.support.shards import EXACT, loss_of, net, shard

STEPS = 6


class Batches(torch.utils.data.Dataset):
    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Module(pl.LightningModule):
    """Trains on a part of each step's batch, which depends on the rank and on the number of the micro-batch."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, micro: int = 1, lr: float = 0.01) -> None:
        super().__init__()
        self.optimizer, self.micro, self.lr = optimizer, micro, lr
        self.net: Any = None
        self.seen: list[int] = []
        self.calls = 0
        self.hooks: dict[int, Any] = {}

    def configure_model(self) -> None:
        if self.net is None:
            self.net = net()
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(int(batch))
        step, piece = self.trainer.global_step, index % self.micro
        parts = self.trainer.world_size * self.micro
        loss = loss_of(self.net, step, self.trainer.global_rank * self.micro + piece, parts)
        if step in self.hooks:
            loss = self.hooks[step](loss)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", loss_of(self.net, 100, 0, 1), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


def hsdp(method: Any = EXACT, **options: Any) -> SparseHSDPStrategy:
    return SparseHSDPStrategy(method, **{"replicas": 2, "process_group_backend": "gloo", **options})


def loader() -> Any:
    return torch.utils.data.DataLoader(Batches())


def fitted(strategy: Any, module: Any = None, path: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return a module that was trained by a strategy, and its trainer."""
    run = trainer(strategy, 4, **{"max_steps": STEPS, "limit_val_batches": 0, **options})
    module = module or Module()
    run.fit(module, loader(), loader(), ckpt_path=path)
    return module, run
