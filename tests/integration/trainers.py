"""Lightning in forked ranks: as many fits in a row as a test needs, in one process group."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import lightning_sparse  # makes the strategy names known  # noqa: F401
from tests.processes import run_ranks


class Net(pl.LightningModule):
    """Two layers, a normalisation and an embedding; whatever a test wants to be different comes in as an option."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
        self.optimizer, self.options = optimizer, {"lr": 0.05, **options}
        self.gradients: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(self.embedding(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.options)

    @property
    def weights(self) -> Tensor:
        return torch.cat([param.detach().float().flatten() for param in self.parameters()])


class Loader:
    """The same batches in the same order in every fit, other ones for every rank; knows where it was."""

    def __init__(self, rank: int, size: int, batches: int = 8) -> None:
        generator = torch.Generator().manual_seed(2)
        count = 8 * batches * size
        inputs = torch.randint(16, (count,), generator=generator)
        targets = torch.randint(4, (count,), generator=generator)
        mine = slice(rank, None, size)
        self.batches = list(zip(inputs[mine].split(8), targets[mine].split(8), strict=True))
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def trainer(strategy: Any, size: int, **options: Any) -> pl.Trainer:
    """Return a quiet trainer for the ranks of `lightning_ranks`."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = any(isinstance(c, pl.Callback) for c in options.get("callbacks", ()))
    return pl.Trainer(strategy=strategy, devices=size, **{"max_epochs": 1, **quiet, **options})


def lightning_ranks(size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` in an environment that Lightning takes for torchrun's. Exceptions are raised here."""

    def rank_fn(rank: int) -> Any:
        warnings.simplefilter("ignore")  # Lightning's advice on a toy run
        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(size), TORCHELASTIC_RUN_ID="tests")
        return fn(rank, *args)

    results = run_ranks(size, rank_fn, **options)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def same(a: Any, b: Any) -> bool:
    """Whether two nested results are equal to the last bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
