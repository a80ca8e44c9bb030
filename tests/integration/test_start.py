"""Training starts from rank 0's weights, and sends only weights that differ."""

import inspect
from functools import partial
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse import AutoDDPStrategy
from tests.integration.failing import caught, of_both
from tests.integration.trainers import Loader, Net, lightning_ranks, strategy, trainer
from tests.support.tiers import one_in


class Different(Net):
    """Its weights, buffers and frozen parameters depend on `seed`. It may have a buffer that other ranks lack."""

    def __init__(self, seed: int, width: int = 3, *, ignored: bool = False) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(width, 2))
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.1, 1.0, generator=generator)
        self.embedding.requires_grad_(False)
        if ignored:
            self._ddp_params_and_buffers_to_ignore = ["own"]

    def on_train_batch_start(self, *_: Any) -> int:
        return -1  # no batch


PARAMETERS = {name for name, _ in Different(0).named_parameters()}


class AtStart(pl.Callback):
    """Looks when training starts."""

    def __init__(self) -> None:
        self.bytes: list[int] = []  # that were broadcast

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.sent = sum(self.bytes)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.found = {name: tensor.detach().clone() for name, tensor in tensors.items()}


def started(
    rank: int, seed: int, exchange: str, make: Any = Different, **options: Any
) -> tuple[dict[str, Tensor], int]:
    look, by_us, by_ddp = AtStart(), dist.broadcast, dist._broadcast_coalesced

    def broadcast(x: Tensor, **options: Any) -> Any:
        look.bytes.append(x.nbytes)
        return by_us(x, **options)

    def broadcast_coalesced(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        look.bytes.extend(x.nbytes for x in tensors)
        return by_ddp(group, tensors, *args)

    if exchange == "stock":
        trains = AutoDDPStrategy(process_group_backend="gloo", **options)
    else:
        trains = strategy("topk", 0.1, exchange=exchange, **options)
    fit = trainer(trains, 2, callbacks=[look])
    with (
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(dist, "_broadcast_coalesced", broadcast_coalesced),
    ):
        fit.fit(make(seed), Loader(rank, 2))
    return look.found, look.sent


@one_in(2)
@pytest.mark.parametrize("exchange", ["gradient", "update", "stock"])
@pytest.mark.parametrize(
    ("options", "equal"),
    [({}, True), ({"broadcast_buffers": False}, False), ({"forward_sync_buffers": False}, True)],
    ids=["default", "broadcast_buffers=False", "forward_sync_buffers=False"],
)
def test_all_start_from_rank_0s(options, equal, exchange):
    """As in DistributedDataParallel, this includes frozen parameters, and buffers unless an option excludes them.

    `auto_ddp` begins with stock all-reduce.
    """

    if (
        "forward_sync_buffers" in options
        and "forward_sync_buffers" not in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    ):
        pytest.skip("torch has this option from 2.13 on")

    def run(rank: int) -> list[Any]:
        return [started(rank, seed, exchange, **options) for seed in (rank, 7)]

    (first, equals), (second, others) = lightning_ranks(2, run)
    assert first[0].keys() == second[0].keys()
    for name, tensor in first[0].items():
        same = equal or name in PARAMETERS or "num_batches_tracked" in name
        assert torch.equal(tensor, second[0][name]) == same, name
        assert torch.equal(tensor, dict(Different(0).state_dict())[name]), "rank 0's own are as they were"
    assert (equals[1], others[1]) == (0, 0), "nothing is sent where all are equal"
    count = "num_batches_tracked"  # equal on all ranks
    sent = sum(x.nbytes for name, x in first[0].items() if name in PARAMETERS or (equal and count not in name))
    assert (first[1], second[1]) == (sent, sent)


@pytest.mark.parametrize("exchange", ["gradient", "update", "stock"])
def test_what_ddp_is_to_ignore_stays(exchange):
    def run(rank: int) -> Any:
        return started(rank, rank, exchange, partial(Different, ignored=True))[0]

    first, second = lightning_ranks(2, run)
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["own"]


def test_nothing_is_sent_where_it_is_not_wanted():
    def run(rank: int) -> Any:
        return started(rank, rank, "gradient", init_sync=False)

    (first, sent), (second, _) = lightning_ranks(2, run)
    assert sent == 0
    assert not torch.equal(first["layers.0.weight"], second["layers.0.weight"])


@of_both
def test_buffers_of_other_shapes_are_named(exchange):
    def run(rank: int) -> Any:
        return caught(lambda: started(rank, 0, exchange, partial(Different, width=3 + rank)))

    for kind, text, seconds in lightning_ranks(2, run):
        assert kind == "RankFailure"
        assert "own[3, 2] float32" in text
        assert "own[4, 2] float32" in text
        assert seconds < 20
