"""`auto_ddp` beside stock `ddp`: switches lose nothing, ranks stay equal, and the choice is resumed."""

import copy
import gc
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.auto import InBfloat16
from lightning_sparse import AutoDDPStrategy, RankFailure, SparseDDPStrategy, attach_updates
from lightning_sparse.advise import main as advise
from lightning_sparse.callbacks import CommunicationMonitor, ContractionRatio, GradientDistribution
from lightning_sparse.hooks.stock import count_ddp
from lightning_sparse.hooks.update_exchange import exchange_of
from lightning_sparse.options import ReducerOptions
from lightning_sparse.shards import parameters_of
from lightning_sparse.strategies import choice as choice_module
from lightning_sparse.strategies.choice import KEY, Choice, Clock, Loaded
from lightning_sparse.strategies.fit_checks import trains_with_updates
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.tuner import Tuner
from tests.integration.planned import Brief, Logged, Watch, follow
from tests.integration.trainers import Batches, Loader, Messages, Net, lightning_ranks, trainer
from tests.processes import run_ranks
from tests.support.tiers import full, in_full, later, tiers
from tests.support.vectors import flat

STEPS = 24


def auto(plan: Sequence[str], **options: Any) -> AutoDDPStrategy:
    follow(plan)
    return AutoDDPStrategy(**{"process_group_backend": "gloo", "overlap": "next_step", **options})


class Linear(Net):
    """Its loss is linear in the weights, so gradients do not depend on them."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs = nn.functional.one_hot(batch[0], 16).float().sum(0)
        parts = (param.sum() * 0.01 for param in self.parameters())
        return sum(parts) + (self.embedding.weight.T * inputs).mean() * float(1 + self.trainer.global_rank)


def fit(net: Any, strategy: Any, rank: int, **options: Any) -> Watch:
    watch = Watch(lambda module: module.weights)
    options = {"max_steps": STEPS, "max_epochs": -1, **options}
    ours, path = [watch, *options.pop("callbacks", [])], options.pop("ckpt_path", None)
    trainer(strategy, 2, callbacks=ours, **options).fit(net, Loader(rank, 2), ckpt_path=path)
    return watch


def stock_only(rank: int) -> list[Any]:
    found = []
    for name, stock, kind in (
        ("ddp", "ddp", torch.optim.AdamW),
        ("ddp", "ddp", torch.optim.SGD),
        ("ddp, bf16", InBfloat16(), torch.optim.AdamW),
    ):
        strategy = auto([name])
        ours, theirs = fit(Net(kind, lr=0.01), strategy, rank), fit(Net(kind, lr=0.01), stock, rank)
        found.append(all(map(torch.equal, ours.weights, theirs.weights)))
        found.append(ours.sent[-1] - ours.sent[-2])
        found.append(not any(strategy.reducer.states))  # no memory is kept
    return found


@full
def test_dense_all_reduce_is_that_of_ddp_and_of_its_hook():
    numel = Net().weights.numel()
    assert lightning_ranks(2, stock_only) == [[True, 4 * numel, True, True, 4 * numel, True, True, 2 * numel, True]] * 2


def pickled(_: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(3, 3))
    count_ddp(ddp, ReducerOptions(), None, from_rank_0={}, in_bfloat16=True).close()
    return [*pickle.loads(pickle.dumps(ddp)).state_dict()]


def test_a_model_whose_gradients_are_summed_in_bfloat16_can_be_pickled():
    assert run_ranks(1, pickled) == [["module.weight", "module.bias"]]


def switched(rank: int, optimizer: str, plan: list[str]) -> Any:
    options = {"lr": 0.01} if optimizer == "SGD" else {"lr": 0.01, "weight_decay": 0.0}
    kind = getattr(torch.optim, optimizer)
    watch = fit(Linear(kind, **options), auto(plan), rank)
    stock = fit(Linear(kind, **options), "ddp", rank)
    return watch.names, watch.weights, stock.weights, watch.sent


@pytest.mark.parametrize(
    "plan", tiers([["int4", "int8", "ddp"], ["ddp", "int4", "int8", "ddp"]], [["int4", "int8", "ddp"]])
)
def test_no_gradient_is_lost_in_switches(plan):
    """The gradients do not depend on the weights, so SGD's last weights are those of ddp, but for rounding.

    Weights of at most 4 and 24 additions round by 24 · 4 · 2⁻²⁴ at most.
    """
    (names, first, stock, sent), (_, second, _, _) = lightning_ranks(2, switched, "SGD", plan)
    assert [*dict.fromkeys(names)] == [*dict.fromkeys(plan)]
    assert all(map(torch.equal, first, second))
    rounding = 24 * 4 * 2**-24
    torch.testing.assert_close(first[-1], stock[-1], rtol=0, atol=rounding)
    last = 6 * plan.index("int4") + 5
    assert not torch.allclose(first[last], stock[last], rtol=0, atol=rounding)  # residuals wait
    assert sent == sorted(sent)


@pytest.mark.parametrize(
    "plan",
    tiers(
        [
            ["topk", "topk, next step", "ddp", "topk"],
            ["ddp, bf16", "topk, next step", "int4", "topk"],
            ["int8", "topk", "ddp"],
        ],
        [["topk", "topk, next step", "ddp", "topk"]],
    ),
)
def test_ranks_are_equal_after_switches_between_updates_and_gradients(plan):
    (names, first, _, _), (_, second, _, _) = lightning_ranks(2, switched, "AdamW", plan)
    assert names == [name for name in plan for _ in range(6)][: len(names)] + [plan[-1]] * (STEPS - 6 * len(plan))
    for name, one, other in zip(names, first, second, strict=True):
        assert torch.equal(one, other) or "next" in name
    assert all(map(torch.isfinite, map(torch.sum, first)))


def settled(rank: int) -> list[bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    attach_updates(net, optimizer, "topk", density=0.02, density_warmup=())
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(4, 20)).pow(2).sum().backward()
        optimizer.step()
    before = [param.detach().clone() for param in net.parameters()]
    if rank:  # one rank has no gradient of a parameter, and no rank one of another
        net[0].weight.grad = None
    net[0].bias.grad = None
    states = [
        (optimizer.state[param]["exp_avg"].clone(), torch.zeros_like(param) if param.grad is None else param.grad + 0)
        for param in net.parameters()
    ]
    exchange_of(optimizer).settle()
    everything: list[Any] = [None] * 2
    torch.distributed.all_gather_object(everything, states)
    found = [net[0].bias.grad is None]
    for param, weights, own, other in zip(net.parameters(), before, *everything, strict=True):
        found.append(bool((own[0] != other[0]).any()))
        found.append(torch.equal(param.detach(), weights))
        found.append(torch.equal(optimizer.state[param]["exp_avg"], (own[0] + other[0]) / 2))
        found.append(param.grad is None or torch.equal(param.grad, (own[1] + other[1]) / 2))
    return found


def test_settling_takes_the_means_of_moments_and_waiting_gradients_and_leaves_the_weights():
    assert run_ranks(2, settled) == [[True] * 17] * 2


class Keeps(torch.optim.AdamW):
    """Keeps a part of its state elsewhere, as optimizers around another one do."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]
        super().load_state_dict({key: x for key, x in state_dict.items() if key != "kept"})


class Pair(NamedTuple):
    first: Tensor
    second: float


def differing(rank: int, kind: str) -> tuple[list[Any], list[Any]]:
    """Return the state of an optimizer and a scaler that differ among ranks, before and after."""
    net = nn.Linear(20, 30)
    if kind == "bf16":
        net.bfloat16()
    optimizer, scaler = Keeps(net.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**-rank)
    attach_updates(net, optimizer, "topk", density=0.1, density_warmup=())
    torch.manual_seed(rank)
    for _ in range(3):
        inputs = torch.randn(4, 20, dtype=net.weight.dtype)
        scaler.scale(net(inputs).float().pow(2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.kept = [torch.tensor(float(rank))]
    optimizer.param_groups[0]["d"] = 0.1 + rank  # as Prodigy's
    optimizer.param_groups[0]["as a tensor"] = torch.tensor(float(rank))
    for state in optimizer.state.values():
        state["step"] += rank  # a gradient scaler has left out a step
        state["number"] = rank
        if kind == "codes":
            state["codes"] = torch.tensor([rank])
        if kind == "bf16":
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].float(), state["exp_avg_sq"].float()
    optimizer.param_groups[0]["schedule"] = lambda: rank  # pickle refuses it
    if kind == "others":
        optimizer.state["of all parameters"] = {"pair": Pair(torch.ones(2) * rank, rank), "step": rank}

    def state() -> list[Any]:
        states, group = [optimizer.state[param] for param in net.parameters()], optimizer.param_groups[0]
        assert group["schedule"]() == rank
        if kind == "bf16":
            assert {state["exp_avg"].dtype for state in states} == {torch.float32}
        others = [each[key] for each in states for key in each if key not in ("exp_avg", "exp_avg_sq")]
        moments = [each[key].clone() for each in states for key in ("exp_avg", "exp_avg_sq")]
        numbers = (*others, *optimizer.kept, group["d"], group["as a tensor"], scaler.get_scale())
        if kind == "others":
            pair = optimizer.state["of all parameters"]["pair"]
            numbers = (*numbers, pair.second)
            assert torch.equal(pair.first, torch.ones(2) * pair.second)
        return [*map(float, numbers), *moments]

    before = state()
    exchange_of(optimizer).settle()
    return before, state()


@full
@pytest.mark.parametrize("kind", ["numbers", "codes", "bf16", "others"])
def test_numbers_and_scalers_are_rank_0s_after_settling(kind):
    """The mean of quantized moments would be wrong. So all ranks take the moments of rank 0, with their scales."""
    (first, now), (other, its) = run_ranks(2, differing, kind)
    for before, others, after, its_own in zip(first, other, now, its, strict=True):
        if isinstance(before, float):
            assert after == its_own == before != others
        else:
            assert torch.equal(after, its_own)
            assert torch.equal(after, before if kind == "codes" else (before + others) / 2)


def resumed(rank: int, folder: Any, name: str) -> Any:
    choice_module.measure_link = lambda *_: (1e9, 1e-4)
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=STEPS)
    kind = torch.optim.AdamW
    fit(Net(kind, lr=0.01), auto(["ddp", name]), rank, callbacks=[saves])
    whole = fit(Net(kind, lr=0.01), auto(["ddp", name]), rank, max_steps=2 * STEPS)
    said: list[str] = []
    strategy = auto(["ddp", name])
    strategy.inform = said.append  # type: ignore[method-assign]
    path = f"{folder}/last.ckpt"
    rest = fit(Net(kind, lr=0.01), strategy, rank, max_steps=2 * STEPS, ckpt_path=path)
    saved = torch.load(path, weights_only=True)[KEY]
    left = strategy._auto.loaded  # for the next fit
    return saved, [*dict.fromkeys(rest.names)], torch.equal(whole.weights[-1], rest.weights[-1]), left, said


@full
@pytest.mark.parametrize("name", ["topk", "ddp"])
def test_a_resumed_run_keeps_the_choice_bit_for_bit(name, tmp_path):
    for rank, (saved, names, equal, left, said) in enumerate(lightning_ranks(2, resumed, tmp_path, name)):
        assert (saved, names, equal, left) == (name, [name], True, ("", False, None))
        assert rank or "by the checkpoint" in said[0]


def divided(rank: int, latencies: Sequence[float], plan: Sequence[str]) -> tuple[list[int], Tensor]:
    """Return the number of segments in each step. The link changes after step 9, and ranks measure it again."""
    choice_module.measure_link = lambda *_: (1e6, latencies[0])
    strategy, segments = auto(plan, bucket_cap_mb=5e-4), []

    def look(run: Any, *_: Any) -> None:
        segments.append(len(strategy.reducer.layout.segments))
        if run.global_step == 9:
            choice_module.measure_link = lambda *_: (1e6, latencies[1])
            strategy._auto.measure_again(strategy)

    watch = fit(
        Net(torch.optim.AdamW, lr=0.01),
        strategy,
        rank,
        callbacks=[pl.callbacks.LambdaCallback(on_train_batch_end=look)],
    )
    return segments, watch.weights[-1]


@full
@pytest.mark.parametrize("plan", [["topk"], ["topk, next step", "topk"]])
def test_over_a_long_round_trip_updates_are_exchanged_in_one_segment(plan):
    (few, weights), (same, theirs) = lightning_ranks(2, divided, (0.05, 1e-4), plan)
    assert few == same
    assert few[:9] == [1] * 9
    assert {*few[9:]} == {few[-1]} != {1}
    assert torch.equal(weights, theirs)


def seconds(stock: float) -> dict[str, float]:
    """Return the time of each candidate on a link, if a dense step takes `stock` seconds."""
    return {"ddp": stock, "topk": 0.01, "int4": stock / 8}


@pytest.mark.parametrize(
    ("found", "stock", "chosen", "settled"),
    [
        ((2, seconds(1.0), True), 1.0, "int4", True),
        ((2, seconds(1.0), False), 1.0, "topk", False),  # it was only being tried
        ((2, seconds(1.0), True), 2.1, "topk", False),
        ((2, seconds(2.1), True), 1.0, "topk", False),
        ((2, seconds(0.001), True), 0.04, "int4", True),  # both links are fast
        ((2, seconds(0.001), True), 0.06, "int4", False),  # with the fewest bytes
        ((4, seconds(1.0), True), 1.0, "topk", False),
        ((2, {"ddp": 1.0, "int4": 1 / 8}, True), 1.0, "int4", False),  # topk is new
        ((2, {**seconds(1.0), "topk": 0.4}, True), 1.0, "topk", False),  # of nodes with more ranks, for example
        ((2, {**seconds(1.0), "int8": 1 / 4}, True), 1.0, "int4", True),  # int8 is no candidate now
        (None, 1.0, "topk", False),
    ],
)
def test_a_choice_holds_for_as_many_ranks_and_a_similar_link(found, stock, chosen, settled):
    choice = Choice(StrategyOptions("topk", None, {}, ReducerOptions()), "auto_ddp", "ddp")
    choice.options |= {"topk": choice._base, "int4": choice._base}
    choice._ranks, choice.loaded = 2, Loaded("int4", False, found)
    choice.tuner = Tuner(seconds(stock), "ddp")
    choice.choose_first()
    assert (choice.tuner.current, choice.tuner.is_settled) == (chosen, settled)
    assert choice.basis == (2, seconds(stock), settled)


@pytest.mark.parametrize(
    ("loaded", "first", "why"),
    [
        (Loaded("", True), "topk", "the checkpoint"),  # of topk_ddp
        (Loaded("", False), "ddp", "the link"),
        (Loaded("int4", True, (2, seconds(1e-3), True)), "int4", "the checkpoint"),
        (Loaded("int4", True, (2, seconds(1.0), True)), "int4", "the checkpoint"),  # of another link
        (Loaded("int4", True, (2, seconds(1e-3), False)), "int4", "the checkpoint"),
        (Loaded("int4", False, (2, seconds(1e-3), False)), "ddp", "the link"),
        (Loaded("topk, next step", True, (4, seconds(1e-3), True)), "topk", "the checkpoint"),
        (Loaded("int8", True, (2, seconds(1e-3), True)), "ddp", "the link"),  # no candidate here
    ],
)
def test_over_a_fast_link_residuals_are_kept_if_a_candidate_takes_them(loaded, first, why):
    choice = Choice(StrategyOptions("topk", None, {}, ReducerOptions()), "auto_ddp", "ddp")
    choice.options |= {"topk": choice._base, "int4": choice._base}
    choice._ranks, choice.loaded = 2, loaded
    choice.tuner = Tuner({"ddp": 1e-3, "topk": 1e-4, "int4": 1e-4}, "ddp")
    choice.choose_first()
    assert choice.tuner.current == first
    assert f"by {why}" in choice.reason


def congested(rank: int) -> tuple[int, list[str]]:
    measured = []

    def measure(*_: Any) -> tuple[float, float]:
        measured.append(rank)
        return (1e9 if len(measured) == 1 else 1e4), 1e-6

    choice_module.measure_link = measure
    net, strategy = Net(torch.optim.AdamW, lr=0.01), auto([])
    watch = fit(net, strategy, rank, max_steps=54)
    return len(measured), watch.names


@later
def test_before_the_first_decision_ranks_look_whether_others_use_the_link_now():
    """Stock all-reduce trains on a fast link. Its steps do not show whether they compute or wait for the link."""
    for measured, names in lightning_ranks(2, congested):
        assert measured == 2
        assert names[0] == "ddp"
        assert names[-1] != "ddp"


def without_room(rank: int) -> tuple[str, list[float]]:
    choice_module._free_bytes = lambda device, trains: 1e12 if rank else 15 * net.weights.numel()
    choice_module.measure_link = lambda *_: (1e3, 1e-6)
    net, strategy = Net(torch.optim.AdamW, lr=0.01), auto([])
    return fit(net, strategy, rank, max_steps=1).names[0], [*strategy._auto.tuner.links.values()]


def test_a_method_that_lacks_memory_on_a_rank_is_not_the_first():
    """Gradients and two moments take 12 of 15 bytes per parameter. So there is no room for residuals."""
    for name, links in lightning_ranks(2, without_room):
        assert name == "ddp, bf16"
        assert links[0] > links[1] > min(links)


def without_choice(rank: int, folder: Any) -> Any:
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)
    fit(Net(torch.optim.LBFGS), auto([]), rank, max_steps=2, callbacks=[saves])
    return torch.load(f"{folder}/last.ckpt", weights_only=True).get(KEY)


@later
def test_a_training_without_a_choice_saves_none(tmp_path):
    assert lightning_ranks(2, without_choice, tmp_path) == [None, None]


def resumed_early(rank: int, folder: Any) -> tuple[str, bool, bool]:
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)
    net, strategy = partial(Net, torch.optim.AdamW, lr=0.01), AutoDDPStrategy(process_group_backend="gloo")
    fit(net(), strategy, rank, max_steps=2, callbacks=[saves])
    path, settled = f"{folder}/last.ckpt", []
    look = pl.callbacks.LambdaCallback(
        on_train_start=lambda run, _: settled.append(run.strategy._auto.tuner.is_settled)
    )
    again = AutoDDPStrategy(process_group_backend="gloo")
    fit(net(), again, rank, max_steps=4, ckpt_path=path, callbacks=[look])
    return torch.load(path, weights_only=True)[KEY], settled[0], len(again._auto.options) > 1


@later
def test_a_run_that_was_saved_before_the_choice_chooses_anew(tmp_path):
    (name, *found), other = lightning_ranks(2, resumed_early, tmp_path)
    assert found == [False, True]
    assert other == (name, *found)


def resumed_by_others(rank: int, folder: Any) -> Any:
    def net() -> Net:
        return Net(torch.optim.AdamW, lr=0.01)

    def saved(name: str, strategy: Any) -> str:
        fit(net(), strategy, rank, callbacks=[pl.callbacks.ModelCheckpoint(folder / name, save_last=True)])
        return f"{folder}/{name}/last.ckpt"

    def topk() -> SparseDDPStrategy:
        return SparseDDPStrategy("topk", process_group_backend="gloo")

    def goes_on(path: str, strategy: Any) -> Watch:
        strategy.inform = said.append
        return fit(net(), strategy, rank, max_steps=2 * STEPS, ckpt_path=path)

    said: list[str] = []
    by_topk = saved("topk", topk())
    by_us = saved("auto", auto(["ddp", "topk"]))
    by_stock = saved("ddp", pl.strategies.DDPStrategy())
    whole = fit(net(), auto(["ddp", "topk"]), rank, max_steps=2 * STEPS)
    others = goes_on(by_topk, auto([])), goes_on(by_us, topk()), goes_on(by_stock, auto([]))
    stock = goes_on(by_us, pl.strategies.DDPStrategy())
    of_topk = fit(net(), topk(), rank, max_steps=2 * STEPS)
    found = [
        torch.equal(others[0].weights[-1], of_topk.weights[-1]),
        torch.equal(others[1].weights[-1], whole.weights[-1]),
        torch.equal(others[2].weights[-1], fit(net(), "ddp", rank, max_steps=2 * STEPS).weights[-1]),
    ]
    return found, [{*each.names} for each in others], stock.weights[-1], said


@full
def test_checkpoints_of_other_strategies_and_ours_in_theirs(tmp_path):
    (found, names, weights, said), (other, _, theirs, _) = lightning_ranks(2, resumed_by_others, tmp_path, timeout=60)
    assert found == other == [True] * 3
    assert names == [{"topk"}, set(), {"ddp"}]
    assert torch.equal(weights, theirs)
    assert not any("holds no residuals" in text for text in said)


def lost(rank: int, folder: Any) -> list[str]:
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    fit(Net(lr=0.01), SparseDDPStrategy("topk", process_group_backend="gloo"), rank, callbacks=[saves])
    messages = Messages()
    fit(Net(lr=0.01), auto([]), rank, max_steps=30, ckpt_path=f"{folder}/last.ckpt", gradient_clip_val=1.0)
    return messages.texts


@full
def test_residuals_without_a_candidate_that_takes_them_are_warned_of(tmp_path):
    (warning,), others = lightning_ranks(2, lost, tmp_path)
    assert others == []
    assert "are lost, because ddp trains here" in warning


def refused(rank: int) -> list[str]:
    found = []
    for options in ({"density": 0.1}, {"method": "gaussiank"}, {"clip_norm": 1.0}, {"on_nonfinite": "skip"}):
        with pytest.raises(ValueError, match="chooses the exchange itself") as error:
            AutoDDPStrategy(**options)
        found.append(str(error.value).split(":")[0])
    return found


def test_options_of_a_method_are_an_error():
    assert refused(0)[0] == "AutoDDPStrategy(density=0.1)"
    with pytest.raises(ValueError, match=r"overlap='backward'\): give 'next_step', which also tries .* or 'none'"):
        AutoDDPStrategy(overlap="backward")
    assert AutoDDPStrategy(overlap="none")._options.overlap == "none"
    assert AutoDDPStrategy()._options.overlap == "backward"


class Unused(Net):
    """Steps no optimizer."""

    def configure_optimizers(self) -> None:
        return None


class SparseEmbedding(Net):
    """Its embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, sparse=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.embedding.parameters(), 0.01)


class Complex(Net):
    """It trains a complex parameter and a single number in float64, which only dense averages support."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(8), torch.arange(8.0)))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        turned = (self.embedding(batch[0]) * self.turn).real * self.scale.float()
        return nn.functional.cross_entropy(self.layers(turned), batch[1])


class Clipping(Net):
    """Clips by its own rule."""

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.1)


class Changing(Net):
    """Removes NaN from gradients, after an exchange of gradients."""

    def on_after_backward(self) -> None:
        for param in self.parameters():
            param.grad.nan_to_num_()


class SOAP(torch.optim.Optimizer):
    """Stands for an optimizer whose updates trained worse than dense averages of gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad * self.param_groups[0]["lr"])
        return loss


MODELS = {
    "SOAP": partial(Net, SOAP, lr=0.01),
    "no optimizer": Unused,
    "SparseAdam": SparseEmbedding,
    "complex numbers": Complex,
    "clipping": Clipping,
    "changed gradients": Changing,
}


def only_candidates(rank: int, kind: str, size: int, overlap: Any) -> list[str]:
    strategy = auto([], overlap=overlap)
    net = MODELS[kind]() if kind in MODELS else Net(getattr(torch.optim, kind), lr=0.01)
    trainer(strategy, size, max_steps=2).fit(net, Loader(rank, size))
    return [*strategy._auto.options]


@pytest.mark.parametrize(
    ("kind", "size", "overlap", "names"),
    [
        ("AdamW", 1, None, ["ddp"]),
        ("LBFGS", 2, None, ["ddp"]),
        ("no optimizer", 2, None, ["ddp"]),
        ("complex numbers", 2, None, ["ddp"]),
        ("SparseAdam", 2, None, ["ddp"]),
        ("AdamW", 2, None, ["ddp", "ddp, bf16", "topk", "int8", "int4"]),
        ("AdamW", 2, "next_step", ["ddp", "ddp, bf16", "topk", "topk, next step", "int8", "int4"]),
        ("SGD", 2, None, ["ddp", "int8", "int4"]),
        ("Rprop", 2, None, ["ddp", "int8", "int4"]),
        ("SOAP", 2, None, ["ddp", "int8", "int4"]),
        ("Adagrad", 2, None, ["ddp", "ddp, bf16", "topk", "int8", "int4"]),
        ("clipping", 2, None, ["ddp"]),
        ("changed gradients", 2, None, ["ddp"]),
        *tiers([("SGD", 3, None, ["ddp"]), ("AdamW", 5, None, ["ddp", "ddp, bf16", "topk", "int4"])], []),
    ],
)
def test_only_methods_that_trained_as_well_as_dense_are_candidates(kind, size, overlap, names):
    assert lightning_ranks(size, only_candidates, kind, size, overlap) == [names] * size


def on_nodes(rank: int, nodes: list[int], plan: list[str]) -> tuple[list[str], list[str], list[Tensor], Tensor]:
    """Train as torchrun or SLURM would start this rank on one of two nodes."""
    os.environ.update(GROUP_RANK=str(nodes[rank]), LOCAL_RANK=str(nodes[:rank].count(nodes[rank])))
    net, strategy, watch = Net(torch.optim.AdamW, lr=0.01), auto(plan), Watch(lambda module: module.weights)
    steps = 6 * len(plan) or 2
    run = trainer(strategy, 2, num_nodes=2, callbacks=[watch], max_steps=steps, max_epochs=-1)
    run.fit(net, Loader(rank, 4))
    (moments,) = ([state["exp_avg"] for state in each.state.values()] for each in run.optimizers)
    return [*strategy._auto.options], watch.names, watch.weights, torch.cat([*map(torch.flatten, moments)])


@pytest.mark.parametrize(("nodes", "names"), [([0, 0, 1, 1], ["topk, hierarchical"]), ([0, 1, 0, 1], [])])
def test_nodes_of_several_ranks_are_a_candidate_if_their_ranks_follow_each_other(nodes, names):
    """SLURM's --distribution=cyclic separates the ranks of a node."""
    for found, *_ in lightning_ranks(4, on_nodes, nodes, []):
        assert found == ["ddp", "ddp, bf16", "topk", "topk, next step", *names, "int4"]


@full
def test_ranks_are_equal_after_switches_to_averages_within_nodes_and_back():
    plan = ["topk, hierarchical", "ddp", "topk", "topk, hierarchical"]
    ranks = lightning_ranks(4, on_nodes, [0, 0, 1, 1], plan)
    (_, names, first, _), *others = ranks
    assert [*dict.fromkeys(names)] == plan[:3]
    for _, _, weights, _ in others:
        assert all(map(torch.equal, first, weights))
    assert all(map(torch.isfinite, map(torch.sum, first)))
    moments = [rank[-1] for rank in ranks]  # TopK without nodes has left each rank its own
    assert [torch.equal(*pair) for pair in itertools.pairwise(moments)] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "trains"),
    [
        *[("AdamW8bit", True), ("FusedLAMB", True), ("RMSprop8bit", True), ("Prodigy", True)],
        *[("AdEMAMix8bit", False), ("AdaMuon", False), ("AdamWScheduleFree", False), ("Novel", False)],
    ],
)
def test_optimizers_of_other_packages_are_known_by_their_names(name, trains):
    methods = {"eval": lambda self: None} if "Schedule" in name else {}
    kind = type(name, (torch.optim.Optimizer,), methods)
    assert trains_with_updates(kind([torch.ones(2)], {"lr": 0.1, "betas": (0.9, 0.99)})) is trains


def differs(rank: int) -> tuple[str, str]:
    kind = torch.optim.SGD if rank else torch.optim.AdamW
    try:
        fit(Net(kind, lr=0.01), AutoDDPStrategy(process_group_backend="gloo"), rank)
    except RankFailure as failure:
        return type(failure).__name__, str(failure)
    return "", ""


def test_ranks_with_other_candidates():
    for kind, text in lightning_ranks(2, differs):
        assert kind == "RankFailure"
        assert "Ranks differ in candidates of auto_ddp: rank 0 has ddp, bf16, rank 1 has int8" in text


class Changes(pl.Callback):
    """Calls a function of the module before step 9, and records the store's key for SIGTERM."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change, self.keys = change, set[str]()

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.keys.add(trainer.strategy.reducer.comm.peers.terminating)
        if trainer.global_step == 9:
            self.change(module)


def unfreeze(module: Net) -> None:
    module.embedding.requires_grad_(True)


def unfreeze_on_rank_1(module: Net) -> None:
    if module.global_rank == 1:
        unfreeze(module)


def freeze(module: Net) -> None:
    module.embedding.requires_grad_(False)


def add(module: Net) -> None:
    """Add a layer, which begins with other weights on each rank."""
    torch.manual_seed(module.global_rank)
    module.layers.append(nn.Linear(module.layers[-1].out_features, 4))
    module.optimizers().add_param_group({"params": module.layers[-1].parameters()})


def rename(module: Net) -> None:
    """Rename parameters, as ModelPruning does."""
    module.layers[0] = nn.Sequential(module.layers[0])


class Frozen(Net):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.embedding.requires_grad_(False)


def in_little_memory(rank: int, spared: int) -> tuple[list[str], list[str]]:
    """Rank 1 has room for so many bytes per parameter."""

    def free(device: torch.device, trains: bool = True) -> float:
        return spared * net.weights.numel() - strategy._auto._bytes(strategy)[strategy.choice] if rank else 1e12

    choice_module._free_bytes = free
    choice_module.measure_link = lambda *_: (1e9, 1e-6)
    net, strategy, said = Net(torch.optim.AdamW, lr=0.01), auto([]), []
    strategy.inform = said.append  # type: ignore[method-assign]
    fit(net, strategy, rank, max_steps=120)
    return [*strategy._auto.tuner.times], said


@full
@pytest.mark.parametrize(
    ("spared", "without"),
    [
        (17, []),
        (15, ["topk, next step"]),
        (7, ["topk", "topk, next step"]),
        (3, ["topk", "topk, next step", "int8", "int4"]),
    ],
)
def test_candidates_without_room_on_a_rank_are_not_tried(spared, without):
    (mine, said), (others, _) = lightning_ranks(2, in_little_memory, spared)
    assert mine == others
    assert not {*without} & {*mine}
    assert "ddp" in mine
    assert (f"; too little memory for {', '.join(without)}" in "".join(said)) == bool(without)


class Raw(Linear):
    """Steps without Lightning's wrapper of the optimizer, which counts steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class OnlySecond(Raw):
    """Has two optimizers, and steps the second one."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), 0.01) for part in (self.embedding, self.layers)]

    def optimizers(self, *_: Any, **__: Any) -> Any:
        return super().optimizers()[1]


def raw(rank: int, net: Any) -> tuple[list[str], Tensor, int]:
    strategy = auto(["ddp", "topk", "ddp"])
    look = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: copy.deepcopy(strategy))
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "callbacks": [look]}
    watch = fit(net(torch.optim.AdamW, lr=0.01), strategy, rank, **options)
    return watch.names, watch.weights[-1], watch.sent[5]


class Overflowing(Raw):
    """Rank 1's own gradient scaler skips a step while updates are exchanged."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        overflows = self.trainer.strategy.choice == "topk" and self.global_rank == 1 and index == 0
        factor = torch.inf if overflows else 1.0
        self.manual_backward(self.scaler.scale(Linear.training_step(self, batch, index) * factor))
        self.scaler.step(optimizer)
        self.scaler.update()


@full
def test_a_rank_that_skips_a_step_decides_with_the_others():
    (names, weights, _), (same, theirs, _) = lightning_ranks(2, raw, Overflowing)
    assert names == same
    assert [*dict.fromkeys(names)] == ["ddp", "topk"]
    assert names[-1] == "ddp"
    assert torch.equal(weights, theirs)


class Skipping(Linear):
    """Rank 1 skips a step of its optimizer after the backward pass, and its rate differs from rank 0's later."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 2:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, index, optimizer, optimizer_closure)
        if self.global_rank == 1:
            optimizer.param_groups[0]["lr"] = 0.005


def skipping(rank: int) -> tuple[list[str], Tensor]:
    strategy = auto(["ddp", "topk", "topk, next step", "topk"], timeout=timedelta(seconds=20))
    watch = fit(Skipping(torch.optim.AdamW, lr=0.01), strategy, rank, max_steps=-1, max_epochs=3)
    return watch.names, watch.weights[-1]


@full
def test_ranks_that_differ_in_steps_and_rates_still_decide_alike():
    (names, weights), (same, theirs) = lightning_ranks(2, skipping)
    assert names == same
    assert [*dict.fromkeys(names)] == ["ddp", "topk", "topk, next step"]
    assert torch.equal(weights, theirs)


class Twice(torch.optim.Adagrad):
    """Evaluates its closure twice in a step, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


class TwiceSGD(torch.optim.SGD):
    """The same, but its updates are not exchanged."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


def evaluating(rank: int, kind: Any, rate: float) -> tuple[list[str], list[str]]:
    choice_module.measure_link = lambda *_: (rate, 1e-6)
    follow([])
    strategy, said = AutoDDPStrategy(process_group_backend="gloo"), []
    strategy.inform = said.append  # type: ignore[method-assign]
    fit(Net(kind, lr=0.01), strategy, rank, max_steps=100)
    return [*strategy._auto.tuner.times], said


@full
@pytest.mark.parametrize(("kind", "rate"), [(Twice, 1e9), (TwiceSGD, 1e4)])
def test_methods_that_compress_gradients_are_not_tried_if_a_step_has_several(kind, rate):
    (tried, said), (others, _) = lightning_ranks(2, evaluating, kind, rate)
    assert tried == others
    assert not {"int8", "int4"} & {*tried}
    assert "no int8 or int4, because a step evaluates its closure several times" in "".join(said), said


class Eager(Brief):
    """Tries all candidates that can train."""

    first = "topk"

    def __init__(self, links: Mapping[str, float], current: str, *, settled: bool = False) -> None:
        super().__init__(links, self.first)

    def bound(self, name: str) -> float:
        return 0.0


class Spare(Linear):
    """One layer is used in no step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spare = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return Net.training_step(self, batch, index)


class InParts(Spare):
    """The gradient of one layer comes in two parts."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = torch.ones(1, 3, requires_grad=True)
        for _ in range(2):
            x = checkpoint(self.spare, x, use_reentrant=True)
        return super().training_step(batch, index) + 1e-3 * x.sum()


class Toggling(Spare):
    """A layer is used in every other step, and frozen in the others."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.spare.requires_grad_(index % 2 > 0)
        spare = self.spare(torch.ones(1, 3)).sum() if index % 2 else 0.0
        return super().training_step(batch, index) + 1e-3 * spare


def eager(rank: int, net: Any, kind: Any, options: dict[str, Any], first: str = "topk") -> Any:
    choice_module.Tuner, Eager.first = Eager, first  # type: ignore[misc]
    choice_module.measure_link = lambda *_: (1e6, 1e-6)
    strategy, said = AutoDDPStrategy(process_group_backend="gloo", **options), []
    strategy.inform = said.append  # type: ignore[method-assign]
    watch = fit(net(kind, lr=0.01), strategy, rank, max_steps=150)
    return [*strategy._auto.tuner.times], "".join(said), watch.weights[-1]


ALL = {"topk", "ddp", "ddp, bf16", "int4", "int8"}
NO_GRADIENT = "no {}, because a step computes no gradient of some parameter"
IN_PARTS = "no {}, because gradients come in several parts"
EAGER = [
    (Linear, {}, ALL, ""),
    (Spare, {}, {"topk"}, NO_GRADIENT),
    (Toggling, {}, {"topk"}, NO_GRADIENT),
    (Spare, {"find_unused_parameters": True}, ALL, ""),
    (InParts, {}, {"topk"}, IN_PARTS),
    (InParts, {"static_graph": True}, ALL, ""),
]


@later
@pytest.mark.parametrize(("net", "options", "names", "text"), tiers(EAGER, EAGER[1:2]))
def test_what_ddp_refuses_is_not_tried_while_updates_train(net, options, names, text):
    (tried, said, weights), (others, _, theirs) = lightning_ranks(2, eager, net, torch.optim.AdamW, options)
    assert {*tried} == {*others} == names
    assert text.format("ddp or ddp, bf16 or int8 or int4") in said
    assert torch.equal(weights, theirs)


class Master(torch.optim.AdamW):
    """Keeps a copy of the weights in its state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in parameters_of([self]):
            self.state[param]["master"] = param.detach().clone()
        return loss


@full
def test_updates_are_not_tried_if_an_optimizer_keeps_a_copy_of_the_weights():
    (tried, said, _), (others, *_) = lightning_ranks(2, eager, Linear, Master, {}, "ddp")
    assert {*tried} == {*others} == ALL - {"topk"}
    assert "no topk, because an optimizer keeps its own copy of the weights" in said


@full
@pytest.mark.parametrize("net", [Raw, OnlySecond])
def test_steps_of_any_optimizer_are_counted(net):
    (names, weights, sent), (same, theirs, _) = lightning_ranks(2, raw, net)
    assert names == same == ["ddp"] * 6 + ["topk"] * 6 + ["ddp"] * 12
    assert torch.equal(weights, theirs)
    assert sent == (6 * 4 * Net().weights.numel() if net is Raw else 0)


class Sharing(Linear):
    """Two parameters share memory, which an exchange of updates refuses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layers.append(torch.nn.Linear(*self.layers[-1].weight.shape[::-1]))
        self.layers[-1].weight.data = self.layers[-2].weight.data


class SharingLater(Sharing):
    """One of these parameters is frozen for five steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layers[-1].requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.layers[-1].requires_grad_(self.global_step >= 5)


class Copying(torch.optim.AdamW):
    master_weights = True  # as of Apex's FusedAdam


def candidates(rank: int) -> list[list[str]]:
    found = []
    for net in (Sharing(torch.optim.AdamW, lr=0.01), Linear(Copying, lr=0.01), Linear(torch.optim.AdamW, lr=0.01)):
        strategy = AutoDDPStrategy()
        fit(net, strategy, rank, max_steps=1)
        found.append([name for name in strategy._auto.options if name == "topk"])
    return found


@later
def test_models_whose_updates_cannot_be_exchanged_train_as_with_ddp():
    assert lightning_ranks(2, candidates) == [[[], [], ["topk"]]] * 2


def shares_later(rank: int) -> tuple[list[str], list[str]]:
    strategy = auto(["int8", "ddp"])
    watch = fit(SharingLater(torch.optim.AdamW, lr=0.01), strategy, rank)
    return watch.names, [*strategy._auto.options]


@later
def test_updates_are_no_candidates_from_the_step_in_which_they_cannot_be_exchanged():
    for names, options in lightning_ranks(2, shares_later):
        assert [*dict.fromkeys(names)] == ["int8", "ddp"]
        assert options == ["ddp", "ddp, bf16", "int8", "int4"]


def test_without_a_note_of_the_end_a_step_lasts_until_the_next_one():
    clock = Clock()
    clock.begin_batch()
    time.sleep(0.02)
    assert clock.take() >= 0.02
    clock.begin_batch()
    clock.note_end()
    time.sleep(0.02)
    assert clock.take() < 0.02


class Scaled(Linear):
    """Has its own GradScaler."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization, self.scaler = False, torch.amp.GradScaler("cpu", init_scale=2.0**9)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(super().training_step(batch, index)))
        self.scaler.step(optimizer)
        self.scaler.update()


def changed(rank: int, kind: str, plan: list[str], net: Any, change: Any, **options: Any) -> Any:
    def trained(strategy: Any, change: Any = change) -> Any:
        callback = Changes(change) if isinstance(strategy, AutoDDPStrategy) else None
        made = net(getattr(torch.optim, kind), lr=0.01)
        watch = fit(made, strategy, rank, callbacks=[callback] if callback else [])
        return made, watch, callback and callback.keys

    (made, watch, keys), (stock, _, _) = trained(auto(plan, **options)), trained("ddp")
    return watch.names, made.weights, stock.weights, made.embedding.weight.detach().clone(), len(keys)


PLANS = [["ddp", "ddp"], ["int4", "ddp"], ["ddp", "topk"], ["topk", "ddp, bf16"]]


@full
@pytest.mark.parametrize("plan", tiers(PLANS, PLANS[1:2]))
def test_layers_that_a_callback_unfreezes_are_trained_alike(plan):
    """Stock ddp would average only the layers that were trained when it wrapped the model."""
    (names, first, _, embedding, _), (_, second, *_) = lightning_ranks(2, changed, "AdamW", plan, Frozen, unfreeze)
    assert {*names} == {*plan}
    assert torch.equal(first, second)
    assert not torch.equal(embedding, Frozen().embedding.weight)


@full
@pytest.mark.parametrize("plan", tiers([["ddp", "ddp"], ["int4", "ddp"], ["topk", "ddp"]], [["ddp", "ddp"]]))
def test_layers_that_a_callback_adds_are_trained_alike(plan):
    """Stock ddp would not average their gradients."""
    (names, first, *_), (_, second, *_) = lightning_ranks(2, changed, "AdamW", plan, Net, add)
    assert {*names} == {*plan}
    assert first.numel() > Net().weights.numel()
    assert torch.equal(first, second)


@full
def test_layers_that_a_callback_freezes_stay_as_they_are():
    train = partial(changed, find_unused_parameters=True)
    results = lightning_ranks(2, train, "SGD", ["int4", "ddp"], Net, freeze)
    (names, first, *_), (_, second, *_) = results
    assert {*names} == {"int4", "ddp"}
    assert torch.equal(first, second)


class Alternating(pl.LightningModule):
    """A GAN that freezes its discriminator while the generator is trained, and unfreezes it in the next batch."""

    def __init__(self, kind: type[torch.optim.Optimizer], lr: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self._kind, self._lr = False, kind, lr
        self.generator, self.discriminator = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))

    @property
    def weights(self) -> Tensor:
        return flat(self)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._kind(part.parameters(), lr=self._lr) for part in (self.generator, self.discriminator)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        ours = self.optimizers()
        fake = self.generator(torch.randn(4, 8))
        for optimizer, trains, x in zip(reversed(ours), (True, False), (fake.detach(), fake), strict=True):
            self.discriminator.requires_grad_(trains)
            optimizer.zero_grad()
            judged = self.discriminator(x)
            if trains:
                judged = judged - self.discriminator(nn.functional.one_hot(batch[0], 16).float()).mean()
            self.manual_backward(judged.mean() if trains else -judged.mean())
            optimizer.step()


def alternating(rank: int, kind: str, plan: list[str], **options: Any) -> Any:
    net = Alternating(getattr(torch.optim, kind), lr=0.01)
    try:
        watch = fit(net, auto(plan, **options), rank)
    except RuntimeError as error:
        return str(error)
    return watch.names, net.weights, Alternating(torch.optim.SGD, 0.0).discriminator[1].weight, net


@full
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("SGD", ["int4", "ddp"]), ("SGD", ["ddp", "int4"]), ("Adam", ["topk", "ddp, bf16"])],
)
def test_layers_that_each_batch_freezes_are_trained_alike_after_a_switch(kind, plan):
    train = partial(alternating, find_unused_parameters=True)
    (names, first, before, net), (_, second, *_) = lightning_ranks(2, train, kind, plan)
    assert {*names} == {*plan}
    assert torch.equal(first, second)
    assert not torch.equal(net.discriminator[1].weight, before)
    assert not any(param.requires_grad for param in net.discriminator.parameters())  # as the batch has left it


class Busy(pl.LightningModule):
    """The gradients of its loss are the batch, whatever the weights. A step also does something else with gradients."""

    kind: Any = torch.optim.SGD

    def __init__(self, also: str) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.zeros(100, 64)) for _ in range(2))
        self.also, self.is_odd, self.total = also, False, torch.zeros(100, 64)

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if self.also == "freezes" and index == 6:
            self.v.requires_grad_(False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = ((self.w + self.v) * batch).sum()
        self.total += batch
        if self.also == "extra backward":  # as in adversarial training
            with self.trainer.strategy.block_backward_sync():
                loss.backward(retain_graph=True)
            self.zero_grad()
        elif self.also == "autograd.grad":  # as for a norm
            self.is_odd |= not torch.equal(torch.autograd.grad(loss, self.w, retain_graph=True)[0], batch)
        elif self.also == "leaves out v" and index == 6:  # the first step after the switch
            loss = (self.w * batch).sum()
        if index == 10:
            overlaps = getattr(self.trainer.strategy.exchanger, "_overlap", None) is not None
            self.waits = len(self.trainer.strategy._residuals), overlaps
        return loss

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), 1.0)


def busy(rank: int, also: str, plan: list[str]) -> Any:
    net, generator = Busy(also), torch.Generator().manual_seed(rank)
    batches = [torch.randn(100, 64, generator=generator) for _ in range(20)]
    strategy = auto(plan, find_unused_parameters=also == "freezes")
    trainer(strategy, 2).fit(net, Batches(batches))
    net.zero_grad()
    net.v.requires_grad_(True).sum().backward()
    assert net.v.grad is not None
    return strategy.choice, net.w.detach(), net.total, net.is_odd, net.v.grad


@pytest.mark.parametrize("also", ["extra backward", *in_full("", "autograd.grad")])
def test_residuals_of_gradients_reach_the_next_step_whatever_else_it_computes(also):
    """Weights of at most 16 and 20 additions round by 20 · 16 · 2⁻²⁴ at most, so do the means of residuals."""
    (choice, w, total, is_odd, _), (_, other, more, _, _) = lightning_ranks(2, busy, also, ["int4", "int8", "ddp"])
    assert choice == "ddp"
    assert not is_odd
    assert torch.equal(w, other)
    torch.testing.assert_close(w, -(total + more) / 2, rtol=0, atol=2 * 20 * 16 * 2**-24)


def left_out(rank: int, plan: list[str]) -> list[Any]:
    net, found = Busy("leaves out v"), []
    net.kind = torch.optim.AdamW
    for options in ({"overlap": None}, {"overlap": "none"}):
        trainer(auto(plan, find_unused_parameters=True, **options), 2).fit(net, Batches([torch.randn(100, 64)] * 12))
        found.append(net.waits)
    return found


@full
def test_a_parameter_without_a_gradient_in_that_step_gets_its_residual_in_the_next_one():
    """Within backward, updates would be exchanged before the residual is added. So only later steps overlap."""
    assert lightning_ranks(2, left_out, ["int4", "topk"]) == [[(0, True), (0, False)]] * 2


@full
def test_a_step_that_a_fused_optimizer_skips_leaves_residuals_waiting():
    strategy, param = AutoDDPStrategy(), nn.Parameter(torch.zeros(3))
    optimizer, param.grad = torch.optim.SGD([param], 1.0, fused=True), torch.ones(3)
    strategy._residuals = {param: torch.tensor([1.0, 2.0, 3.0])}
    for found_inf, expected in ((1.0, [1.0, 1.0, 1.0]), (0.0, [3.0, 5.0, 7.0])):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(found_inf)  # of a scaler
        strategy._add_residuals(optimizer)
        assert param.grad.tolist() == expected
    assert not strategy._residuals


@full
def test_no_residual_of_gradients_outlives_the_fit():
    for *_, grad in lightning_ranks(2, busy, "freezes", ["int4", "ddp"]):
        assert torch.equal(grad, torch.ones(100, 64))


@later
def test_layers_that_each_batch_freezes_need_an_option():
    """DDP would not average their gradients after the switch, and without the option none may be missing."""
    for text in lightning_ranks(2, alternating, "Adam", ["topk", "ddp"], timeout=5):
        assert "'discriminator.0.weight' was frozen when auto_ddp wrapped the model and takes gradients now" in text
        assert "'auto_ddp_find_unused_parameters_true'" in text


def unfrozen_alone(rank: int, name: str, kind: Any, **options: Any) -> str:
    strategy = auto([name, name], timeout=timedelta(seconds=5), **options)
    net, callback = Frozen(kind, lr=0.01), Changes(unfreeze_on_rank_1)
    try:
        fit(net, strategy, rank, callbacks=[callback])
    except RuntimeError as error:
        return str(error)
    return ""


@later
def test_a_layer_that_one_rank_alone_unfreezes_is_named():
    _, text = lightning_ranks(2, unfrozen_alone, "ddp", torch.optim.AdamW, timeout=5)
    assert "'embedding.weight' was unfrozen on rank 1, and then: " in text


@full
def test_a_layer_that_one_rank_alone_unfreezes_is_named_before_residuals_are_averaged():
    text, other = lightning_ranks(
        2, partial(unfrozen_alone, broadcast_buffers=False), "int4", torch.optim.SGD, timeout=5
    )
    assert "Rank 1 pauses after" in text
    assert "'embedding.weight' was unfrozen on rank 1, and then: " in other


@full
@pytest.mark.parametrize(
    ("kind", "plan"),
    tiers([("AdamW", ["topk", "topk, next step", "ddp"]), ("SGD", ["int4", "ddp"])], [("SGD", ["int4", "ddp"])]),
)
def test_parameters_that_a_callback_renames_keep_their_residuals(kind, plan):
    plan = [plan[0], *plan]  # a switch comes after the change
    net = Linear if kind == "SGD" else Net
    (names, first, stock, *_, keys), (_, second, *_) = lightning_ranks(2, changed, kind, plan, net, rename)
    assert {*names} == {*plan}
    assert torch.equal(first, second)
    if kind == "SGD":  # see test_no_gradient_is_lost_in_switches
        torch.testing.assert_close(first, stock, rtol=0, atol=24 * 4 * 2**-24)
    assert keys == 1, "ranks find a request to end that came before a switch"


@later
def test_a_residual_takes_the_loss_scale_of_the_module():
    """As in test_no_gradient_is_lost_in_switches."""
    results = lightning_ranks(2, changed, "SGD", ["int4", "ddp"], Scaled, lambda _: None)
    (_, first, stock, *_), (_, second, *_) = results
    assert torch.equal(first, second)
    torch.testing.assert_close(first, stock, rtol=0, atol=24 * 4 * 2**-24)


def sparse(rank: int) -> Any:
    watches = [fit(SparseEmbedding(), strategy, rank) for strategy in (auto(["topk", "ddp"]), auto([]), "ddp")]
    return [watch.weights[-1] for watch in watches]


@full
def test_an_embedding_with_sparse_gradients_is_trained_with_and_without_compression():
    (switched, measured, stock), others = lightning_ranks(2, sparse)
    assert torch.equal(switched, others[0])
    assert torch.equal(measured, others[1])
    assert stock.shape == measured.shape


def complex_numbers(rank: int) -> Any:
    ours, theirs = Complex(), Complex()
    watch = fit(ours, auto([]), rank)
    fit(theirs, "ddp", rank)
    equal = [torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True)]
    nbytes = sum(param.nbytes for param in ours.parameters())
    return all(equal), not torch.equal(ours.turn, Complex().turn), watch.sent[-1] - watch.sent[-2] == nbytes


@later
def test_complex_and_double_parameters_train_as_with_ddp():
    assert lightning_ranks(2, complex_numbers) == [(True, True, True)] * 2


def finds_a_rate(rank: int, folder: Path) -> Any:
    os.chdir(folder)  # the finder saves there
    net = Net(torch.optim.AdamW, lr=0.01)
    net.lr = 0.01
    finder = pl.callbacks.LearningRateFinder(num_training_steps=20, update_attr=True)
    watch = fit(net, auto(["topk, next step", "ddp", "topk"]), rank, callbacks=[finder])
    return [*dict.fromkeys(watch.names)], len(finder.optimal_lr.results["lr"]), watch.weights[-1]


@full
def test_a_learning_rate_finder_trains_with_the_first_candidate(tmp_path):
    (names, rates, first), (_, _, second) = lightning_ranks(2, finds_a_rate, tmp_path)
    assert names == ["topk, next step", "ddp", "topk"]
    assert rates >= 19
    assert torch.equal(first, second)


def evaluated(rank: int, folder: Path) -> Any:
    saves = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    net, strategy = Net(torch.optim.AdamW, lr=0.01), auto(["ddp", "topk"])
    run = trainer(strategy, 2, max_steps=STEPS, max_epochs=-1, callbacks=[saves])
    run.fit(net, Loader(rank, 2))
    settled = [strategy._auto.tuner.is_settled]
    net.test_step = net.training_step
    run.test(net, Loader(rank, 2), ckpt_path=f"{folder}/last.ckpt")
    settled.append(bool(strategy._auto.loaded.choice))
    path = f"{folder}/after.ckpt"
    fit(net, auto(["topk", "ddp"]), rank)
    has_lock = Changes(lambda _: None)
    has_lock.lock = threading.Lock()
    later = trainer(auto(["topk", "ddp"]), 2, max_steps=STEPS, max_epochs=-1, callbacks=[has_lock])
    later.fit(net, Loader(rank, 2))
    copy.deepcopy(later.strategy)  # has no callbacks
    later.save_checkpoint(path)
    return settled, Path(f"{path}.residuals").exists()


@full
def test_an_evaluated_checkpoint_is_forgotten_and_stock_training_saves_no_residuals(tmp_path):
    assert lightning_ranks(2, evaluated, tmp_path) == [([True, False], False)] * 2


class Failing(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 9 and trainer.global_rank == 1:
            raise ArithmeticError("the abacus is missing a bead")


def fails(rank: int, name: str) -> str:
    try:
        fit(Net(torch.optim.AdamW, lr=0.01), auto(["ddp", name]), rank, callbacks=[Failing()])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if rank == 1:  # leaves, as its process would end; then rank 0's all-reduce breaks off
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # DDP holds the group
    return text


@pytest.mark.parametrize("name", tiers(["ddp", "topk"], ["ddp"]))
def test_a_rank_that_fails_is_named_on_the_others(name):
    first, second = lightning_ranks(2, fails, name)
    assert second == "ArithmeticError: the abacus is missing a bead"
    assert "the abacus is missing a bead" in first


class Counted(pl.Callback):
    """After each step, asserts that the monitor has counted all bytes."""

    def __init__(self, monitor: CommunicationMonitor) -> None:
        self.monitor = monitor

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        assert self.monitor.state_dict()["sent_total"] == trainer.strategy.reducer.comm.sent_bytes


def monitored(rank: int) -> Any:
    logger, monitor = Logged(), CommunicationMonitor()
    fit(
        Net(torch.optim.AdamW, lr=0.01),
        auto(["ddp", "topk", "ddp"]),
        rank,
        callbacks=[monitor, Counted(monitor), ContractionRatio(), GradientDistribution()],
        logger=[logger],
        log_every_n_steps=1,
    )
    counted = [seen for seen in logger.seen if "communication/bytes_total" in seen]
    ratios = sum(any(name.startswith("contraction") for name in seen) for seen in logger.seen)
    return counted, ratios, [seen for seen in logger.seen if "auto_ddp/link_mbit" in seen]


@later
def test_the_monitor_counts_over_switches_and_the_choice_is_logged():
    (counted, ratios, choices), _ = lightning_ranks(2, monitored)
    totals = [seen["communication/bytes_total"] for seen in counted]
    densities = [seen["communication/density"] for seen in counted if "communication/density" in seen]
    assert densities[0] == densities[-1] == 1  # of DDP's averages
    assert 0 < min(densities) < 1
    assert all(value >= 0 for seen in counted for name, value in seen.items() if name.startswith("seconds/"))
    assert all(seen.get("seconds/hidden_share", 0) <= 1 for seen in counted)
    assert 5 <= ratios <= 6  # of TopK's steps; at a switch the callback may observe the exchange that ends
    assert totals == sorted(totals)
    steps = {round(seen["communication/bytes_per_step"]) for seen in counted}
    assert len(steps) < 6, steps  # of DDP, and the densities of the warm-up; not of a switch
    assert len(totals) > 4
    assert {"auto_ddp/ddp_ms", "auto_ddp/topk_ms", "auto_ddp/link_mbit"} <= {*choices[-1]}


def logged_by_tensorboard(rank: int, folder: Path) -> None:
    strategy = auto(["topk", "ddp", "topk"])
    logger = pl.loggers.TensorBoardLogger(folder) if rank == 0 else False
    fit(Net(torch.optim.AdamW, lr=0.01), strategy, rank, logger=logger, log_every_n_steps=1)


def test_advise_shows_the_choice_of_a_run(tmp_path, capsys):
    lightning_ranks(2, logged_by_tensorboard, tmp_path)
    advise(["--from-log", str(tmp_path)])
    title, _, header, *rows = capsys.readouterr().out.splitlines()
    assert "step 12: the link carries" in title
    assert header.split() == ["ms/step"]
    found = {row[:18].strip(): row[18:].split() for row in rows}
    assert {*found} == {"ddp", "ddp, bf16", "topk", "topk, next step", "int8", "int4"}
    assert [name for name, row in found.items() if row[:2] != ["at", "least"]] == [
        name for name in found if name in ("topk", "ddp")
    ]
    assert [name for name, row in found.items() if row[-1] == "trains"] == ["topk"]
    times = [float(row[2] if row[0] == "at" else row[0]) for row in found.values()]
    assert times == sorted(times)
    assert all(time > 0 for time in times)


def test_advise_of_a_folder_without_a_choice(tmp_path, capsys):
    with pytest.raises(SystemExit):
        advise(["--from-log", str(tmp_path)])
    assert (
        "has no event file of TensorBoard. Give the folder of a run with strategy='auto_ddp'" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        advise(["--from-log", str(tmp_path / "mistyped")])
    assert "mistyped' does not exist. Give a run's folder" in capsys.readouterr().err


def measured(rank: int) -> Any:
    said: list[str] = []
    strategy = auto([])
    strategy.inform = said.append  # type: ignore[method-assign]
    net = Net(torch.optim.AdamW, lr=0.01)
    watch = fit(net, strategy, rank, max_steps=120)
    # After the fit, because weights differ within it if an exchange overlaps the next step.
    return watch.names, float(net.weights.sum()), said, [*strategy._auto.tuner.times]


def says_where_it_logs(rank: int, folder: str) -> list[str]:
    said: list[str] = []
    strategy = auto([])
    strategy.inform = said.append  # type: ignore[method-assign]
    logger = pl.loggers.TensorBoardLogger(folder, name="", version="")
    fit(Net(torch.optim.SGD), strategy, rank, max_steps=1, logger=logger)
    return said


@later
def test_the_first_line_of_stock_all_reduce_names_the_folder_of_tensorboard(tmp_path):
    (line, *_), nothing = lightning_ranks(2, says_where_it_logs, str(tmp_path))
    assert f" TensorBoard: tensorboard --logdir {tmp_path}" in line
    assert not nothing


@later
def test_over_loopback_all_ranks_decide_alike_after_the_density_warm_up():
    (names, weights, said, times), other = lightning_ranks(2, measured)
    assert (names, weights, times) == (other[0], other[1], other[3])
    assert names[:45] == [names[0]] * 45  # of a busy machine loopback may be slow
    assert len(said) == 2, said
    assert "Chosen by auto_ddp, by the link: the link carries" in said[0]
    assert f" {names[-1]} " in said[1] or "by measured steps" in said[1]


@full
def test_the_name_is_registered_for_both_of_lightnings_names():
    import lightning.pytorch

    for module in (pl, lightning.pytorch):
        strategy = module.Trainer(strategy="auto_ddp", accelerator="cpu", devices=2, logger=False).strategy
        assert type(strategy).__name__ == "AutoDDPStrategy"
        assert strategy._namespace == module.__name__
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
