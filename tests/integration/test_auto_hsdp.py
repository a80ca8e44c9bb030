"""`auto_hsdp` on two replicas of two shards: switches lose nothing, replicas stay equal, and the choice is resumed."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse import AutoHSDPStrategy, attach_updates
from lightning_sparse.hooks.update_exchange import exchange_of
from lightning_sparse.shards import average_gradients, keep_gradients, local
from lightning_sparse.strategies.auto import KEY
from tests.integration.planned import follow
from tests.integration.sharded import Module, fitted, hsdp
from tests.integration.trainers import Messages, lightning_ranks
from tests.processes import run_ranks
from tests.support.shards import EXACT, among, mesh_of, net, own, shard, steps, whole
from tests.support.tiers import full

STEPS = 24
ALL = ["dense", "topk", "topk, next step", "dense"]
"""Each switch: to updates, to another exchange of updates, and to gradients."""


def auto(plan: Sequence[str], **options: Any) -> AutoHSDPStrategy:
    follow(plan)
    return AutoHSDPStrategy(**{"replicas": 2, "process_group_backend": "gloo", **options})


class Watch(pl.Callback):
    """Records the choice, this rank's shards and the bytes after each step."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shards: list[Tensor] = []
        self.sent: list[int] = []

    def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
        self.shards.append(own(module.parameters()))
        if isinstance(run.strategy, AutoHSDPStrategy):
            self.names.append(run.strategy.choice)
            self.sent.append(run.strategy.reducer.comm.sent_bytes)


def watched(strategy: Any, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Watch, Any]:
    """Return what a fit did, and its trainer."""
    watch = Watch()
    callbacks = [watch, *options.pop("callbacks", [])]
    _, run = fitted(strategy, Module(kind), max_steps=STEPS, max_epochs=-1, callbacks=callbacks, **options)
    return watch, run


def dense_only(rank: int) -> Any:
    said: list[str] = []
    strategy = auto(["dense"])
    strategy.inform = said.append  # type: ignore[method-assign]
    ours, _ = watched(strategy)
    theirs, _ = watched(hsdp("dense"))
    return all(map(torch.equal, ours.shards, theirs.shards)), ours.sent[-1] - ours.sent[-2], said


def test_dense_averages_are_those_of_dense_hsdp():
    shards = sum(local(param).numel() for param in net().parameters())
    for rank, (equal, sent, said) in enumerate(lightning_ranks(4, dense_only)):
        assert equal
        assert abs(sent - 4 * shards / 2) <= 4 * 9  # halves of layers with odd numbers of rows
        if rank == 0:
            [text] = said
            assert "4 ranks. Replicas average gradients in backward. 2 replicas of 2 ranks each" in text
            assert "Chosen by auto_hsdp, by the link: the link carries" in text


def switched(rank: int, plan: list[str]) -> Any:
    watch, _ = watched(auto(plan))
    return watch.names, watch.shards, watch.sent


@pytest.mark.parametrize(
    "plan", [ALL, pytest.param(["topk", "dense", "topk, next step", "topk"], marks=full)], ids=lambda plan: plan[0]
)
def test_replicas_are_equal_after_switches(plan):
    results = lightning_ranks(4, switched, plan)
    names, _, sent = results[0]
    assert names == [name for name in plan for _ in range(6)]
    assert all(each[0] == names for each in results)
    assert sent == sorted(sent)
    for shard_of in (0, 1):
        first, second = (results[rank][1] for rank in (shard_of, shard_of + 2))
        for name, one, other in zip(names, first, second, strict=True):
            assert one.isfinite().all()
            assert torch.equal(one, other) or "next" in name


class Linear(Module):
    """Its loss is linear in the weights, so gradients do not depend on them. They differ among ranks."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(4 * index + self.trainer.global_rank))
        # FSDP2 gathers the weights of a layer in its forward pass only.
        for i in (0, 2, 4):
            x = self.net[i](x).detach() if False else self.net[i](x)
        return x.mean()


def settled(rank: int, some: bool) -> Any:
    """Exchange updates, settle, and return by what weights, moments and residuals have changed."""
    mesh = mesh_of()
    group, model = mesh["replicate"].get_group(), shard(net(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reducer = attach_updates(model, optimizer, "topk", density=0.1, density_warmup=(), group=group)
    for _ in steps(model, optimizer, rank, 4, 5):
        pass
    if some and rank >= 2:  # the second replica lacks the state of a parameter
        optimizer.state.pop(next(iter(model.parameters())))

    def state(key: str) -> Tensor:
        return own(x[key] for x in optimizer.state.values())

    residuals = [reducer.state_dict()["elements"]["residual"][name] for name, _ in model.named_parameters()]
    residual, before, moments = own(residuals), own(model.parameters()), None if some else state("exp_avg")
    first = among(group, state("exp_avg"))[0] if some and rank < 2 else None
    if some and rank >= 2:
        first = among(group, torch.zeros(own(model.parameters()).numel(), dtype=torch.float64))[0]
    exchange_of(optimizer).settle()
    mean = sum(among(group, residual)) / 2
    found = [
        bool(residual.any()) or not residual.numel(),
        torch.allclose(own(model.parameters()), before - mean, rtol=0, atol=1e-7),
        len({x.numpy().tobytes() for x in among(group, own(model.parameters()))}) == 1,
        torch.equal(state("exp_avg"), first) if some else torch.allclose(state("exp_avg"), sum(among(group, moments)) / 2),
        not any(x.any() for x in reducer.state_dict()["elements"]["residual"].values()),
    ]
    optimizer.step()  # DTensors with a plain state would be an error
    return found


@pytest.mark.parametrize("some", [False, True])
def test_settling_applies_the_means_of_a_group_of_replicas(some):
    assert run_ranks(4, settled, some) == [[True] * 5] * 4


def exact_switches(rank: int) -> Any:
    """SGD's updates are exchanged exactly. So training does not depend on switches, but for rounding."""
    from lightning_sparse.strategies import auto_hsdp

    options = hsdp(EXACT)._options
    late = hsdp(EXACT, overlap="next_step")._options
    auto_hsdp.AutoHSDP._candidates = lambda *_: {"topk": options, "topk, next step": late}  # type: ignore[method-assign]
    sgd = torch.optim.SGD
    ours, _ = watched(auto(["dense", "topk", "dense", "topk"]), sgd)
    theirs, _ = watched(hsdp("dense"), sgd)
    return [(one - other).abs().max().item() for one, other in zip(ours.shards, theirs.shards, strict=True) if len(one)]


def test_no_gradient_is_lost_in_switches():
    for errors in lightning_ranks(4, exact_switches):
        assert max(errors) < 1e-6, errors


def resumed(rank: int, folder: Any, name: str) -> Any:
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=12)
    plan = ["dense", name] if name == "topk" else ["topk", name]
    whole_run, _ = watched(auto(plan), callbacks=[saves])
    (folder_of_last,) = (path for path in saves.dirpath and [f"{folder}/last.ckpt"])
    # The last save is that of step 24; save the middle of the run under another name.
    return whole_run, folder_of_last


class Save(pl.Callback):
    def __init__(self, path: str, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
        if run.global_step == self.after:
            run.save_checkpoint(self.path)


def resumed_halfway(rank: int, folder: str, plan: list[str]) -> Any:
    path = f"{folder}/half.ckpt"
    whole_run, _ = watched(auto(plan), callbacks=[Save(path, 15)])
    said: list[str] = []
    strategy = auto(["dense", "topk"])  # a settled choice follows no plan
    strategy.inform = said.append  # type: ignore[method-assign]
    rest, run = watched(strategy, path=path)
    saved = torch.load(f"{path}/meta.pt", weights_only=False)[KEY]
    left = strategy._auto.resumed, strategy._auto.has_residuals  # for the next fit
    equal = all(map(torch.equal, whole_run.shards[15:], rest.shards))
    return saved, [*dict.fromkeys(rest.names)], len(rest.names), equal, left, said


@pytest.mark.parametrize("plan", [["dense", "topk"], pytest.param(["topk", "dense"], marks=full)])
def test_a_resumed_run_keeps_the_choice_bit_for_bit(plan, tmp_path):
    for rank, (saved, names, count, equal, left, said) in enumerate(
        lightning_ranks(4, resumed_halfway, str(tmp_path), plan)
    ):
        assert (saved, names, count, equal, left) == (plan[-1], [plan[-1]], STEPS - 15, True, ("", False))
        assert rank or any("by the checkpoint" in text for text in said), said
