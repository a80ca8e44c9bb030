"""`auto_hsdp` on two replicas of two shards: switches lose nothing, replicas stay equal, and the choice is resumed."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_sparse import AutoHSDPStrategy, Method, attach_updates
from lightning_sparse.compressors import TopK
from lightning_sparse.hooks.update_exchange import exchange_of
from lightning_sparse.memory import Residual
from lightning_sparse.shards import average_gradients, keep_gradients
from lightning_sparse.strategies import choice as choice_module
from lightning_sparse.strategies.choice import KEY
from lightning_sparse.update_rule import UpdateRule
from tests.integration.checkpoints import At
from tests.integration.failing import EVENTS, SOON
from tests.integration.planned import Logged, Watch, follow
from tests.integration.sharded import Module, fitted, hsdp
from tests.integration.trainers import Messages, lightning_ranks
from tests.processes import run_ranks
from tests.support.shards import among, attempt, loss_of, mesh_of, net, own, shard, steps
from tests.support.tiers import full

STEPS = 24
SPARSE = Method(TopK(density=0.2), Residual(), update_rule=UpdateRule(rescale=False, momentum="keep"))
"""Sends a part of the updates. All entries of an update are either applied as they are, or kept."""


def auto(plan: Sequence[str], **options: Any) -> AutoHSDPStrategy:
    follow(plan)
    return AutoHSDPStrategy(**{"replicas": 2, "process_group_backend": "gloo", "overlap": "next_step", **options})


def save(path: str) -> At:
    return At(15, lambda run: run.save_checkpoint(path))


def watched(strategy: Any, module: Any = None, callbacks: Sequence[Any] = (), **options: Any) -> Watch:
    watch = Watch(lambda module: own(module.parameters()))
    options = {"max_steps": STEPS, "max_epochs": -1, **options}
    fitted(strategy, module, callbacks=[watch, *callbacks], **options)
    return watch


class RootSharded(Module):
    """Its root holds all parameters, which are whole after an evaluation."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net = fully_shard(net(), mesh=self.device_mesh["data_parallel"])


def evaluated_before_a_decision(rank: int) -> tuple[list[str], bool]:
    strategy = auto(["dense", "topk"])
    options = {"val_check_interval": 1, "limit_val_batches": 1, "max_steps": 8}
    return watched(strategy, RootSharded(), **options).names, "topk" in strategy._auto.options


@full
def test_ranks_decide_right_after_an_evaluation():
    """Before the first decision they measure the link again, for the parameters that each of them trains."""
    assert lightning_ranks(4, evaluated_before_a_decision) == [(["dense"] * 6 + ["topk"] * 2, True)] * 4


def dense_only(rank: int) -> Any:
    said: list[str] = []
    strategy = auto(["dense"])
    strategy.inform = said.append  # type: ignore[method-assign]
    micro = {"accumulate_grad_batches": 2}
    ours, theirs = watched(strategy, Module(micro=2), **micro), watched(hsdp("dense"), Module(micro=2), **micro)
    return (
        all(map(torch.equal, ours.weights, theirs.weights)),
        len(ours.weights[0]),
        [after - before for before, after in pairwise(ours.sent)],
        said,
    )


@full
def test_dense_averages_are_those_of_dense_hsdp():
    ranks = lightning_ranks(4, dense_only)
    for rank, (equal, _, sent, said) in enumerate(ranks):
        assert equal
        # In a ring of two, for each micro-batch. FSDP2 pads the shards of the second rank.
        assert {*sent} == {4 * ranks[0][1]}
        if rank == 0:
            assert "4 ranks. Replicas average gradients in backward. 2 replicas of 2 ranks each" in said[0]
            assert "Chosen by auto_hsdp, by the link: the link carries" in said[0]


def switched(rank: int, plan: list[str]) -> Any:
    watch = watched(auto(plan))
    return watch.names, watch.sent, watch.weights[5::6]


@full
@pytest.mark.parametrize(
    "plan",
    [
        ["dense", "topk", "topk, next step", "dense"],
        pytest.param(["topk", "dense", "topk, next step", "topk"], marks=full),
    ],
    ids=lambda plan: plan[0],
)
def test_replicas_are_equal_after_switches(plan):
    results = lightning_ranks(4, switched, plan)
    for rank, (names, sent, shards) in enumerate(results):
        assert names == [name for name in plan for _ in range(6)]
        assert sent == sorted(sent)
        for name, one, other in zip(plan, shards, results[(rank + 2) % 4][2], strict=True):
            assert one.isfinite().all()
            assert torch.equal(one, other) or "next" in name


class Linear(Module):
    """Its loss is linear in the weights, so gradients do not depend on them. They differ among ranks."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.ModuleList(nn.Linear(8, size) for size in (6, 5, 1))
            for layer in self.net:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(4 * self.trainer.global_step + self.trainer.global_rank)
        x = torch.randn(8, generator=generator)
        return sum((layer(x) * torch.arange(1.0, layer.out_features + 1)).sum() for layer in self.net)


def conserved(rank: int, plan: list[str]) -> Any:
    update, delayed = hsdp(SPARSE)._options, hsdp(SPARSE, overlap="next_step")._options
    AutoHSDPStrategy._candidates = lambda *_: {"topk": update, "topk, next step": delayed}
    strategy, module = auto(plan), Linear(torch.optim.SGD)
    ours, theirs = watched(strategy, module), watched(hsdp("dense"), Linear(torch.optim.SGD))
    state = strategy.reducer.state_dict()["elements"]["residual"]
    residual = own(state[name] for name, _ in module.named_parameters())
    group = strategy.device_mesh["replicate"].get_group()
    left = sum(among(group, residual)) / 2
    return ours.names, ours.weights[-1] - theirs.weights[-1], left


@full
def test_no_update_is_lost_if_updates_are_exchanged_after_a_switch():
    """The gradients do not depend on the weights, so residuals are the difference from dense_hsdp, but for rounding.

    Weights of at most 8 and 24 additions round by 24 · 8 · 2⁻²⁴ at most.
    """
    plan = ["topk", "topk, next step", "topk", "topk"]
    for names, difference, left in lightning_ranks(4, conserved, plan):
        assert [*dict.fromkeys(names)] == [*dict.fromkeys(plan)]
        torch.testing.assert_close(difference, left, rtol=0, atol=24 * 8 * 2**-24)
        assert left.abs().max() > 1e-3


def averaged(rank: int) -> list[bool]:
    """Return whether replicas have equal gradients: before `average_gradients`, with it, and without it again."""
    mesh, calls = mesh_of(), []
    group, model, other = mesh["replicate"].get_group(), shard(net(), mesh["shard"]), shard(net(), mesh["shard"])
    other[0].set_all_reduce_hook(calls.append)  # a user's

    def equal() -> bool:
        model.zero_grad()
        loss_of(model, 0, rank, 4).backward()
        return torch.equal(*among(group, own(param.grad for param in model.parameters())))

    found = [equal()]
    average_gradients(model, group)
    found.append(equal())
    for each in (model, other, net()):
        keep_gradients(each)
    loss_of(other, 0, rank, 4).backward()
    return [*found, equal(), bool(calls)]


@full
def test_replicas_keep_their_gradients_after_they_have_averaged_them():
    assert run_ranks(4, averaged) == [[False, True, False, True]] * 4


def settled(rank: int, some: bool) -> list[bool]:
    """Exchange updates, and settle. If `some`, the second replica lacks the state of a parameter."""
    mesh = mesh_of()
    group, model = mesh["replicate"].get_group(), shard(net(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach_updates(model, optimizer, "topk", density=0.1, density_warmup=(), group=group)
    for _ in steps(model, optimizer, rank, 4, 5):
        pass
    moments = among(group, own(state["exp_avg"] for state in optimizer.state.values()))
    before = own(model.parameters())
    if some and rank >= 2:
        optimizer.state.pop(next(model.parameters()))
    gradients = among(group, own(param.grad for param in model.parameters()))  # as if they waited for a step
    exchange_of(optimizer).settle()
    after = own(optimizer.state[param]["exp_avg"] for param in model.parameters())
    waiting = own(param.grad for param in model.parameters())
    weights = among(group, own(model.parameters()))
    for _ in steps(model, optimizer, rank, 4, 1):  # an error, if the optimizer had plain states of sharded parameters
        pass
    return [
        torch.equal(weights[0], before),
        torch.equal(*weights),
        torch.equal(waiting.float(), sum(x.float() for x in gradients) / 2) and not torch.equal(*gradients),
        torch.allclose(after, moments[0] if some else sum(moments) / 2, rtol=1e-6, atol=1e-9),
        not torch.allclose(*moments, rtol=1e-2),
    ]


@full
@pytest.mark.parametrize("some", [False, True])
def test_settling_takes_the_means_of_replicas_moments_and_gradients(some):
    assert run_ranks(4, settled, some) == [[True] * 5] * 4


def resumed(rank: int, folder: str, plan: list[str]) -> Any:
    choice_module.measure_link = lambda *_: (1e9, 1e-4)
    path, said = f"{folder}/half.ckpt", []
    unbroken = watched(auto(plan), callbacks=[save(path)])
    strategy = auto(plan)
    strategy.inform = said.append  # type: ignore[method-assign]
    rest = watched(strategy, path=path)
    saved = torch.load(f"{path}/meta.pt", weights_only=True)[KEY]
    left = strategy._auto.loaded  # for the next fit
    return saved, rest.names, all(map(torch.equal, unbroken.weights[15:], rest.weights)), left, said


@full
@pytest.mark.parametrize("plan", [["dense", "topk"], ["topk", "dense"], ["topk", "topk"], ["dense", "dense"]])
def test_a_resumed_run_keeps_the_choice_bit_for_bit(plan, tmp_path):
    for rank, (saved, names, equal, left, said) in enumerate(lightning_ranks(4, resumed, str(tmp_path), plan)):
        assert (saved, names, equal, left) == (plan[1], [plan[1]] * (STEPS - 15), True, ("", False, None))
        assert rank or any("by the checkpoint" in text for text in said), said


def resumed_by_others(rank: int, folder: str) -> Any:
    def goes_on(name: str, strategy: Any) -> Watch:
        return watched(strategy, path=f"{folder}/{name}")

    def fixed(name: str) -> Watch:
        return watched(hsdp(name), callbacks=[save(f"{folder}/{name}")])

    topk, dense = fixed("topk"), fixed("dense")
    ours = watched(auto(["dense", "topk"]), callbacks=[save(f"{folder}/auto")])
    found = [
        (goes_on("topk", auto([])), topk),
        (goes_on("dense", auto([])), dense),
        (goes_on("auto", hsdp("topk")), ours),
    ]
    messages = Messages()
    watched(auto([], replicas=1), path=f"{folder}/topk")
    stock = goes_on("auto", ModelParallelStrategy(4, 1, process_group_backend="gloo"))
    names = [{*each.names} for each, _ in found]
    return (
        [all(map(torch.equal, a.weights, b.weights[15:])) for a, b in found],
        names,
        messages.texts,
        len(stock.weights),
    )


@full
def test_checkpoints_of_other_strategies_and_ours_in_theirs(tmp_path):
    for rank, (equal, names, warnings, count) in enumerate(
        lightning_ranks(4, resumed_by_others, str(tmp_path), timeout=90)
    ):
        assert equal == [True] * 3
        assert names == [{"topk"}, {"dense"}, set()]
        assert count == STEPS - 15
        assert rank or "are lost, because dense trains here" in warnings[0]


@pytest.mark.parametrize(
    "options",
    [{"method": "gaussiank"}, {"density": 0.1}, {"bucket_cap_mb": 5}, {"clip_norm": 1.0}, {"value_format": "int8"}],
)
def test_options_of_a_method_are_an_error(options):
    with pytest.raises(ValueError, match=r"AutoHSDPStrategy\(.* chooses the exchange itself.*topk_hsdp"):
        AutoHSDPStrategy(**options)


def test_other_options_are_those_of_topk_hsdp():
    with pytest.raises(ValueError, match=r"AutoHSDPStrategy\(replicas=0\): give 'auto' or a positive integer"):
        AutoHSDPStrategy(replicas=0)
    with pytest.raises(ValueError, match="an option of DistributedDataParallel"):
        AutoHSDPStrategy(find_unused_parameters=True)


def only_candidates(rank: int, kind: str, replicas: int) -> Any:
    said: list[str] = []
    optimizer, _, without = kind.partition(" without ")
    strategy = auto([], replicas=replicas, overlap=None if without else "next_step")
    strategy.inform = said.append  # type: ignore[method-assign]
    error = attempt(lambda: fitted(strategy, Module(getattr(torch.optim, optimizer)), max_steps=2))
    return [*strategy._auto.options], said, error


@full
@pytest.mark.parametrize(
    ("kind", "replicas", "names"),
    [
        ("AdamW", 1, ["dense"]),
        ("SGD", 2, ["dense"]),
        ("LBFGS", 2, ["dense"]),
        ("AdamW", 2, ["dense", "topk", "topk, next step"]),
        ("AdamW", 4, ["dense", "topk", "topk, next step"]),
        ("AdamW without overlap", 4, ["dense", "topk"]),
    ],
)
def test_only_methods_that_trained_as_well_as_dense_are_candidates(kind, replicas, names):
    for rank, (found, said, error) in enumerate(lightning_ranks(4, only_candidates, kind, replicas)):
        assert found == names, error
        assert not error or kind == "LBFGS"
        if rank == 0 and len(names) == 1:
            [text] = said
            assert "Chosen by auto_hsdp, by the model, its hooks, the optimizer or the number of ranks." in text


class Temperature(Module):
    """Has a parameter that no module of fully_shard holds."""

    def configure_model(self) -> None:
        super().configure_model()
        self.temperature = nn.Parameter(torch.tensor(1.0))


def unsharded(rank: int) -> Any:
    module = Temperature()
    error = attempt(lambda: fitted(auto(["topk", "dense"], replicas=4), module))
    return error, len(module.seen)


@full
def test_a_parameter_outside_of_fully_shard_is_an_error_before_the_first_step():
    for error, seen in lightning_ranks(4, unsharded):
        assert "'temperature' is in no module of fully_shard" in error
        assert seen == 0


def beside_another(rank: int, name: str, event: str) -> tuple[str, float]:
    """Train while rank 3 has an event in its tenth step; return the error, and the seconds until it."""
    module, started = Module(), time.monotonic()
    if rank == 3:
        module.hooks = {9: EVENTS[event]}
    try:
        error = attempt(lambda: watched(auto(["dense", name], timeout=timedelta(seconds=9)), module))
    except SystemExit as ended:  # Lightning's, after SIGTERM
        error = str(ended)
    seconds = time.monotonic() - started
    if rank == 3:
        time.sleep(20)  # its process stays, so no connection ends
    return error, seconds


@full
@pytest.mark.parametrize(
    ("name", "event", "cause"),
    [
        ("dense", "killed", "No answer from rank 3"),
        ("dense", "fails", "Rank 3 failed at step 9: ValueError: an error of the loop"),
        ("dense", "told", "Rank 3 was told to end"),
    ],
)
def test_a_rank_that_fails_is_named_on_the_others(name, event, cause):
    for error, seconds in lightning_ranks(4, beside_another, name, event)[:3]:
        assert cause in error, error
        assert seconds < SOON


def measured(rank: int, link: tuple[float, float] | None = None) -> Any:
    said: list[str] = []
    if link is not None:
        choice_module.measure_link = lambda *_: link
    logger, strategy = Logged(), auto([])
    strategy.inform = said.append  # type: ignore[method-assign]
    watch = watched(strategy, max_steps=110, logger=[logger])
    scalars = [name for seen in logger.seen for name in seen if name.startswith("auto_hsdp/")]
    return watch.names, [*strategy._auto.tuner.times], said, scalars, strategy._auto.tuner.links


@full
def test_over_loopback_all_ranks_decide_alike_after_the_density_warm_up():
    first, *others = lightning_ranks(4, measured)
    names, times, said, scalars, links = first
    for other in others:
        assert (names, times, links) == (other[0], other[1], other[4])
    assert names[:45] == [names[0]] * 45  # of a busy machine loopback may be slow
    assert "Chosen by auto_hsdp, by the link: the link carries" in said[0]
    assert f" {names[-1]}" in said[-1]
    assert {"auto_hsdp/link_mbit", "auto_hsdp/dense_ms", "auto_hsdp/chosen_ms"} <= {*scalars}


@full
def test_on_a_slow_link_averages_of_gradients_are_never_tried():
    first, *others = lightning_ranks(4, measured, (1e1, 1e-4))  # a dense step would take 13 s
    names, times, said, scalars, _ = first
    assert all(other[:2] == (names, times) for other in others)
    assert names[:45] == ["topk"] * 45
    assert {*names} == {*times} <= {"topk", "topk, next step"}
    assert "Chosen by auto_hsdp, by the link: the link carries 8e-05 Mbit/s" in said[0]
    assert "auto_hsdp/dense_at_least_ms" in scalars


def test_a_trainer_of_each_of_lightnings_names_takes_it():
    import lightning.pytorch

    for module in (pl, lightning.pytorch):
        for strategy in ("auto_hsdp", AutoHSDPStrategy(replicas=2, seed=3)):
            found = module.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False).strategy
            assert type(found).__name__ == "AutoHSDPStrategy"
            assert found._namespace == module.__name__
            assert isinstance(found, module.strategies.ModelParallelStrategy)
            assert strategy == "auto_hsdp" or found._arguments["replicas"] == 2
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
