"""Replicas of a sharded model exchange updates: against stock FSDP2, and against replicas that are not sharded."""

import gc
import json
import logging
import os
import re
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_sparse import METHODS, Method, Reducer, attach_updates, exchange_pending, method, shards
from lightning_sparse.compressors import TopK
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.hooks.session import Session
from lightning_sparse.shards import average_gradients, local, local_gradient
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.signal_share import SAMPLES
from tests.integration.failing import SOON, end_like_a_script, note
from tests.processes import run_ranks
from tests.support.representatives import DISTINCT, small
from tests.support.shards import EXACT, among, attempt, difference, loss_of, mesh_of, net, own, shard, steps, whole
from tests.support.tiers import exhaustive, full, later, tiers

Optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
}


def trained(kind: str, optimizer_name: str, clip: float | None = None, micro: int = 1) -> Any:
    """Train on 4 ranks, and return all weights.

    Args:
        kind: "alone": each rank trains with all examples. "native": FSDP2 over a mesh of both dimensions. "updates":
            two sharded replicas exchange updates. "flat": two replicas that are not sharded do so, each of them twice.
    """
    rank, mesh, model = dist.get_rank(), mesh_of(), net()
    if kind in ("native", "updates"):
        shard(model, mesh if kind == "native" else mesh["shard"])
    optimizer = Optimizers[optimizer_name](model.parameters())
    if kind in ("updates", "flat"):
        attach_updates(model, optimizer, EXACT, group=mesh["replicate"].get_group())
    part, parts = {"alone": (0, 1), "flat": (rank // 2, 2)}.get(kind, (rank, 4))
    for _ in steps(model, optimizer, part, parts, micro=micro):
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return whole(model)


def averages() -> bool:
    """Return whether gloo averages in a reduce-scatter. With torch 2.8 it adds, so FSDP2's gradients are sums."""
    mean = torch.zeros(1)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its older name
    reduce_scatter(mean, torch.ones(dist.get_world_size()), op=dist.ReduceOp.AVG)
    return bool(mean == 1)


def differences(rank: int, optimizer: str) -> dict[str, float]:
    got = {kind: trained(kind, optimizer) for kind in ("alone", "native", "updates", "flat")}
    clipped = {kind: trained(kind, optimizer, clip=0.05) for kind in ("updates", "flat")}
    means = {
        "alone, native": difference(got["alone"], got["native"]),
        "updates, flat": difference(got["updates"], got["flat"]),
    }
    return {
        **(means if averages() else {}),
        "native, updates": difference(got["native"], got["updates"]),
        "clipped": difference(clipped["updates"], clipped["flat"]),
        "effect of clipping": difference(clipped["updates"], got["updates"]),
        "micro-batches": difference(trained("updates", optimizer, micro=2), got["updates"]),
    }


@full
@pytest.mark.parametrize("optimizer", tiers(Optimizers, ["adamw"]))
def test_dense_updates_of_shards_are_those_of_whole_models(optimizer):
    """Only the order of sums differs. A weight below 1 gets 6e-8 of rounding error per operation.

    Six steps of about ten operations make 4e-6. Adam divides by the gradient's size, which doubles the error.
    """
    for found in run_ranks(4, differences, optimizer):
        # The mean of two AdamW steps is not the AdamW step of the mean gradient. SGD is linear.
        nonlinear = found.pop("native, updates") if optimizer == "adamw" else 1.0
        assert nonlinear > 1e-4
        assert found.pop("effect of clipping") > 1e-3
        assert max(found.values()) < 8e-6, found


def conserved(rank: int, names: list[str], granularity: Any) -> list[Any]:
    """Train with SGD, whose updates are the rate times the gradients, and compare sums within the group."""
    results = []
    mesh = mesh_of()
    group = mesh["replicate"].get_group()
    for name in names:
        spec = METHODS[name]
        made = method(name, **({"density": 0.25} if "density" in spec.options else {}), **small(name))
        made = replace(made, update_rule=UpdateRule())
        model = shard(net(), mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        reducer = attach_updates(model, optimizer, made, group=group, granularity=granularity, bucket_cap_mb=5e-5)
        start = own(model.parameters())
        given, equal = torch.zeros_like(start), True
        for _ in steps(model, optimizer, rank, 4, count=8):
            equal &= all(torch.equal(other, own(model.parameters())) for other in among(group, own(model.parameters())))
            given += 0.1 * own(param.grad for param in model.parameters())
        present = own(model.parameters())
        equal &= all(torch.equal(other, present) for other in among(group, present))
        kept = reducer.state_dict()["elements"]
        error = None
        if spec.traits.conserves and {*kept} == {"residual"}:
            rest = own(kept["residual"][name] for name, _ in model.named_parameters())
            lost = sum(among(group, given - (start - present) - rest))
            error = lost.abs().max().item()
        assert reducer.layout is not None
        segments = len(reducer.layout.segments)
        results.append((name, equal, bool((present != start).any()), bool(present.isfinite().all()), error, segments))
    return results


def check_conserved(names: list[str], granularity: str) -> None:
    for rows in run_ranks(4, conserved, names, granularity):
        for name, equal, changed, finite, error, segments in rows:
            assert (name, equal, changed, finite) == (name, True, True, True)
            assert {"layer": segments == 6, "model": segments == 1, "bucket": 1 < segments < 6}[granularity], segments
            # Eight steps with some roundings of weights and sums below 8, each of up to 5e-7.
            assert error is None or error < 2e-5, name
        assert any(error is not None for *_, error, _ in rows)


@pytest.mark.parametrize("granularity", tiers(["bucket", "layer", "model"], ["bucket"]))
def test_no_update_of_a_shard_is_lost_and_replicas_stay_equal(granularity):
    check_conserved(["topk"], granularity)


WITH_A_MEAN = [name for name in DISTINCT if METHODS[name].aggregator.averages]


@full
@pytest.mark.parametrize("first", range(3))
def test_every_method_with_a_mean_exchanges_shards(first):
    check_conserved(["topk", *WITH_A_MEAN[first::3]], "bucket")


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "local steps": {"local_steps": 2},
    "next step": {"overlap": "next_step"},
    "density warm-up": {"density_warmup": (1.0,), "density_warmup_steps": 100},
    "two optimizers": {},
    "frozen layer": {},
    "tied weights": {},
    "gradient scaler": {},
    "closure": {},
    "compile": {},
    "activation checkpointing": {},
}


def with_option(option: str, *, sharded: bool) -> tuple[dict[str, Tensor], Reducer]:
    rank, mesh = dist.get_rank(), mesh_of()
    model = Tied() if option == "tied weights" else net()
    if option == "frozen layer":
        model[0].requires_grad_(False)
    if sharded and option == "tied weights":
        fully_shard(model, mesh=mesh["shard"])
    elif sharded:
        shard(model, mesh["shard"])
    for layer in model.children() if option in ("compile", "activation checkpointing") else ():
        if option == "compile":
            layer.compile(backend="aot_eager")
        else:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    trained = [param for param in model.parameters() if param.requires_grad]
    parts = [trained[:2], trained[2:]] if option == "two optimizers" else [trained]
    optimizers = [torch.optim.AdamW(part, 0.01) for part in parts]
    chosen = EXACT if option != "density warm-up" else replace(EXACT, compressor=TopK(density=0.25))
    group = mesh["replicate"].get_group()
    reducer = attach_updates(model, optimizers, chosen, group=group, **OPTIONS[option])
    part, of = (rank, 4) if sharded else (rank // 2, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=option == "gradient scaler", init_scale=8.0, growth_interval=100)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()

        def loss(step: int = step) -> Tensor:
            result = loss_of(model, step, part, of)
            scaler.scale(result).backward()
            return result

        if option == "closure":
            optimizers[0].step(loss)
            continue
        loss()
        if option == "gradient scaler" and step == 2 and rank // 2 == 1:  # the second replica leaves this step out
            local(trained[0].grad)[:1] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    for optimizer in optimizers:
        exchange_pending(optimizer)
    return whole(model), reducer


def differences_with_options(rank: int, options: list[str]) -> dict[str, Any]:
    found = {}
    for option in options:
        (shards, of_shards), (flat, of_flat) = (with_option(option, sharded=sharded) for sharded in (True, False))
        plain = with_option("none", sharded=True)[0]
        changed = shards.keys() != plain.keys() or difference(shards, plain) > 1e-4
        found[option] = difference(shards, flat), changed, of_shards.step == of_flat.step
    return found


@full
@pytest.mark.parametrize(
    "options", [[*OPTIONS][1:2], pytest.param([*OPTIONS][2:], marks=full)], ids=["quick", "others"]
)
def test_options_have_the_same_effect_on_shards_as_on_whole_models(options):
    for found in run_ranks(4, differences_with_options, list(options)):
        for option, (error, changed, same_step) in found.items():
            assert error < 8e-6, option  # as above
            assert same_step, option
            same = "density warm-up", "two optimizers", "closure", "compile", "activation checkpointing"
            assert changed is (option not in same), option


def in_low_precision(rank: int) -> list[Any]:
    mesh = mesh_of()
    group = mesh["replicate"].get_group()
    results = []
    for kind in ("bf16 weights", "bf16 computation", "offloaded"):
        options: dict[str, Any] = {}
        if kind == "bf16 computation":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if kind == "offloaded":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        model = net().bfloat16() if kind == "bf16 weights" else net()
        shard(model, mesh["shard"], **options)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        attach_updates(model, optimizer, "topk", density=0.25, group=group, granularity="model")
        start, equal = own(model.parameters()), True
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x.to(next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
            present = own(model.parameters())
            equal &= all(torch.equal(other, present) for other in among(group, present))
        dtypes = {param.dtype for param in model.parameters()}
        results.append((kind, equal, bool((present != start).any()), bool(present.isfinite().all()), dtypes))
    return results


@full
def test_weights_and_computation_in_bf16_and_offloaded_shards():
    for results in run_ranks(4, in_low_precision):
        for kind, equal, changed, finite, dtypes in results:
            assert (kind, equal, changed, finite) == (kind, True, True, True)
            assert dtypes == {torch.bfloat16 if kind == "bf16 weights" else torch.float32}


class Parallel(nn.Module):
    """A model for tensor parallelism: layers of 6 and 8 rows, and a norm that is copied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(8, 6), nn.Linear(6, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.linspace(-1, 1, 8).square()  # a plain sum of a norm's result would not depend on x
        return (self.norm(self.second(self.first(x).tanh())) * weights).sum(1, keepdim=True)


def in_tensor_parallel(rank: int, with_fsdp: bool) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    group, across = mesh["replicate"].get_group(), mesh["tp"].get_group()
    results = []
    for chosen in (EXACT, Method(TopK(density=0.25))):
        got, equal = [], True
        for sharded in (True, False):
            model = Parallel()
            if sharded:
                parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
                if with_fsdp:
                    fully_shard(model, mesh=mesh["shard"])
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            attach_updates(model, optimizer, chosen, group=group, granularity="model")
            for _ in steps(model, optimizer, rank // 2, 2):
                norm, shards = own(model.norm.parameters()), own(model.parameters())
                equal &= all(torch.equal(other, norm) for other in among(across, norm))
                equal &= all(torch.equal(other, shards) for other in among(group, shards))
            got.append(whole(model))
        results.append((equal, difference(*got)))
    return results


@full
@pytest.mark.parametrize("with_fsdp", tiers([True, False], [False]))
def test_tensor_parallel_ranks_keep_equal_copies(with_fsdp):
    for (equal, error), (equal_if_sparse, _) in run_ranks(4, in_tensor_parallel, with_fsdp):
        assert error < 8e-6  # as above
        assert (equal, equal_if_sparse) == (True, True)


def bytes_of_steps(rank: int) -> tuple[int, int, int, int]:
    model, mesh = net(), mesh_of()
    shard(model, mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    group = mesh["replicate"].get_group()
    reducer = attach_updates(model, optimizer, "dense", group=group, granularity="model")
    before = reducer.comm.sent_bytes
    for _ in steps(model, optimizer, rank, 4, count=2):
        pass
    assert reducer.layout is not None
    return before, reducer.comm.sent_bytes, reducer.layout.numel, reducer.comm.size


def test_a_rank_sends_its_shards_to_its_group_only():
    results = run_ranks(4, bytes_of_steps)
    # Rows of 8 + 1, 6 + 1 and 5 + 1 numbers; an all-reduce among P ranks sends 2(P − 1)/P times its input. In
    # both steps a rank also sends a sample of gradients in bf16.
    assert [numel for _, _, numel, _ in results] == [3 * 9 + 3 * 7 + 6, 3 * 9 + 2 * 7] * 2
    for before, sent, numel, size in results:
        headers = sent - 2 * 4 * numel - 2 * 2 * SAMPLES
        assert (before, size) == (0, 2)
        assert 0 <= headers < 2 * 100


def gradient_of_a_copy(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.tensor([rank, 2.0]), mesh, [Partial()], run_check=False)
    found = local_gradient(param)
    assert found is not None
    return found.tolist()


def test_the_gradient_of_a_copy_is_the_sum_of_its_parts():
    """Under sequence parallelism, each rank has a summand of the gradient of a norm that all ranks hold."""
    assert run_ranks(2, gradient_of_a_copy) == [[1.0, 4.0]] * 2


def while_state_is_saved_and_loaded(rank: int, local_steps: int) -> list[Any]:
    model, mesh = net(), mesh_of()
    shard(model, mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    group = mesh["replicate"].get_group()
    reducer = attach_updates(model, optimizer, "topk", density=0.25, group=group, local_steps=local_steps)
    found: list[Any] = []
    for _ in range(2):
        sent, step = reducer.comm.sent_bytes, reducer.step
        state = get_optimizer_state_dict(model, optimizer)  # torch takes a step if there is no state
        set_optimizer_state_dict(model, optimizer, state)
        found += [reducer.comm.sent_bytes == sent, reducer.step == step]
        for _ in steps(model, optimizer, rank, 4, count=local_steps):
            pass
        found.append(reducer.step == step + 1)
    present = own(model.parameters())
    return [*found, all(torch.equal(other, present) for other in among(group, present))]


@full
@pytest.mark.parametrize("local_steps", tiers([1, 8], [8]))
def test_torch_takes_steps_to_save_and_load_states_and_they_are_no_exchanges(local_steps):
    for found in run_ranks(4, while_state_is_saved_and_loaded, local_steps):
        assert found == [True] * 7


def after_validation(rank: int) -> list[bool]:
    """A forward pass without backward leaves whole weights in the root module."""
    mesh = mesh_of()
    model = fully_shard(net(), mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with torch.no_grad():
        model(torch.zeros(1, 8))
    attach_updates(model, optimizer, EXACT, group=mesh["replicate"].get_group(), overlap="next_step")
    for _ in steps(model, optimizer, rank, 4, count=2):
        pass
    with torch.no_grad():
        before = model(torch.ones(1, 8))
        exchange_pending(optimizer)
        after = model(torch.ones(1, 8))
    replica = net()
    replica.load_state_dict(whole(model))
    return [bool((before != after).any()), bool(torch.allclose(after, replica(torch.ones(1, 8)), atol=1e-6))]


@full
def test_a_forward_pass_after_an_exchange_uses_its_weights():
    assert run_ranks(4, after_validation) == [[True, True]] * 4


def unfrozen(rank: int, way: str) -> tuple[str, str]:
    """Unfreeze a layer that is not sharded; return the errors of a step before and of one after it."""
    mesh, model = mesh_of(), net()
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=mesh["shard"])
    first = model[0].requires_grad_(False)
    own_params = model.parameters() if way == "in the optimizer" else [*model[2].parameters(), *model[4].parameters()]
    optimizer = torch.optim.AdamW(own_params, 0.01)
    if way == "averages":
        average_gradients(model, mesh["replicate"].get_group())
    else:
        attach_updates(model, optimizer, EXACT, group=mesh["replicate"].get_group())

    def step() -> None:
        loss_of(model, 0, rank, 4).backward()
        optimizer.step()

    before = attempt(step)
    first.requires_grad_(True)
    if way != "in the optimizer":
        optimizer.add_param_group({"params": [*first.parameters()]})
    return before, attempt(step)


@full
@pytest.mark.parametrize("way", tiers(["in the optimizer", "added", "averages"], ["added", "averages"]))
def test_a_layer_that_is_not_sharded_cannot_be_unfrozen(way):
    text = "'0.weight' is in no module of" if way == "averages" else "'0.weight' is not sharded, but other parameters"
    for found in run_ranks(4, unfrozen, way):
        assert not isinstance(found, BaseException), found
        assert found[0] == ""
        assert text in found[1]


def bad_input(rank: int, names: list[str]) -> dict[str, str]:
    mesh = mesh_of()
    group, of_shards = mesh["replicate"].get_group(), mesh["shard"].get_group()
    diagonals = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    if rank in (1, 2):
        diagonals.reverse()
    diagonal, of_others = diagonals

    def attach(model: nn.Module, of: Any = group, chosen: str = "topk", **options: Any) -> Any:
        return attach_updates(model, torch.optim.AdamW(model.parameters()), chosen, group=of, **options)

    def sharded() -> Any:
        return shard(net(), mesh["shard"])

    def with_plain_parameter() -> Any:
        model = net()
        return attach(fully_shard(model, mesh=mesh["shard"], ignored_params={model[4].bias}))

    def made_before() -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        return attach_updates(shard(model, mesh["shard"]), optimizer, "topk", group=group)

    def fsdp1() -> Any:
        return FullyShardedDataParallel(net(), process_group=of_shards, device_id=torch.device("cpu"))

    def other_model() -> Any:
        return attach(shard(net() if rank < 2 else nn.Sequential(nn.Linear(8, 7)), mesh["shard"]))

    attempts = {
        "no group": lambda: attach(sharded(), None),
        "group of shards": lambda: attach(sharded(), of_shards),
        "a mesh": lambda: attach(sharded(), mesh["replicate"]),
        "group of others": lambda: attach(sharded(), of_others),
        "a 2-D mesh": lambda: attach(shard(net(), mesh)),
        "a plain parameter": with_plain_parameter,
        "an early optimizer": made_before,
        "majority vote": lambda: attach(sharded(), chosen="signsgd"),
        "another seed": lambda: attach(sharded(), seed=int(rank == 3)),
        "good": lambda: attach(sharded()),
        "a plain model": lambda: attach(net()),
        "FSDP1": lambda: attach(fsdp1()),
        "other parts": lambda: attach(shard(nn.Sequential(nn.Linear(8, 6)), mesh["shard"]), diagonal),
        "replicas of other models": other_model,
        "no group on one rank": lambda: attach(net(), None if rank == 3 else group),
        "other groups": lambda: attach(net(), diagonal if rank in (1, 2) else group),
        "an error on one rank": lambda: attach(sharded(), density=7 if rank == 3 else None),
    }
    found = {}
    for name in names:
        found[name] = attempt(attempts[name])
        dist.barrier()  # a rank that is late in a failed attempt would answer the call of the next one
    return found


ERRORS = {
    "no group": r"ValueError: group=None contains rank \d, which shares '0.weight' with rank \d in .* Pass "
    r"group=mesh\['replicate'\].get_group\(\)",
    "group of shards": r"ValueError: group=ranks \[\d, \d\] contains rank \d, which shares '0.weight' with rank \d",
    "a mesh": r"TypeError: attach_updates\(group=DeviceMesh.*: give a ProcessGroup that contains this rank",
    "group of others": r"TypeError: attach_updates\(group=.*: give a ProcessGroup that contains this rank",
    "a 2-D mesh": r"ValueError: group=ranks .* shard over the mesh of one replica",
    "a plain parameter": r"ValueError: '4.bias' is not sharded, but other parameters are",
    "an early optimizer": r"ValueError: .*are in no optimizer.* Create the optimizer after fully_shard",
    "majority vote": r"ValueError: .* makes no mean",
    "another seed": r"RankFailure: Ranks differ in seed: rank 0 has 0, rank 3 has 1",
    "good": r"$",
    "a plain model": r"$",
    "FSDP1": r"TypeError: .* is sharded by FullyShardedDataParallel.* fully_shard",
    "other parts": r"RankFailure: Ranks differ in shards: rank . has 0.weight .* part \((0|1),\) of \(2,\), rank . has "
    r"0.weight .* part \((?!\1)(0|1),\) of \(2,\)",
    # Both groups differ, each in another parameter, and the first objection reaches all ranks.
    "replicas of other models": r"RankFailure: Ranks differ in model: rank (0 has 0.weight\[3, 8\] float32, rank 2 has "
    r"0.weight\[4, 8\]|1 has 2.weight\[2, 6\] float32, rank 3 has no more)",
    "no group on one rank": r"RankFailure: Ranks differ in size of the group: rank 0 has 2, rank 3 has 4",
    "other groups": r"RankFailure: Ranks differ in group: rank . has ranks \d, \d, rank . has ranks \d, \d",
    "an error on one rank": r"(RankFailure: Rank 3 cannot attach: )?ValueError: .*density",
}


@pytest.mark.reliability(
    "sharded by FSDP2, without Lightning: wrong groups, meshes or optimizers; one rank has other settings",
    checked="one error on all ranks, before training",
    methods=["topk"],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[full] * (name != "no group")) for name in ERRORS])
def test_bad_input_is_one_clear_error_on_all_ranks(name):
    for found in run_ranks(4, bad_input, [name]):
        assert not isinstance(found, BaseException), found
        assert re.match(ERRORS[name], found[name], re.DOTALL), found


@exhaustive
def test_all_ranks_attach_after_any_number_of_errors():
    for found in run_ranks(4, bad_input, [*ERRORS]):
        assert not isinstance(found, BaseException), found
        for name, text in found.items():
            assert re.match(ERRORS[name], text, re.DOTALL), f"{name}: {text}"


def on_another_device(rank: int) -> list[str]:
    dist.init_process_group("cuda:gloo")  # as "nccl" does, it has no backend for the CPU
    found = []
    for device in ("cpu", "meta"):
        model = nn.Linear(2, 2, device=device)
        found.append(
            attempt(lambda model=model: attach_updates(model, torch.optim.SGD(model.parameters(), 0.1), "topk"))
        )
    return found


def test_a_device_that_the_group_does_not_know():
    for of_cpu, of_meta in run_ranks(2, on_another_device, backend=None):
        assert re.match(
            "ValueError: .* no backend for .* on 'cpu'.*init_process_group\\('cpu:gloo,cuda:nccl'\\)", of_cpu
        )
        assert re.match("ValueError: .* no backend for .* on 'meta'.* Give values to parameters", of_meta)


def with_muon(rank: int) -> tuple[float, float]:
    mesh, got = mesh_of(), []
    for sharded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 8, bias=False))
        start = whole(model)
        if sharded:
            shard(model, mesh["shard"])
        optimizer = torch.optim.Muon(model.parameters(), 0.02)
        attach_updates(model, optimizer, EXACT, group=mesh["replicate"].get_group())
        for _ in steps(model, optimizer, *((rank, 4) if sharded else (rank // 2, 2))):
            pass
        got.append(whole(model))
    return difference(*got), difference(got[0], start)


@full
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="since torch 2.9")
def test_muon_orthogonalizes_whole_matrices():
    """It computes in bf16, whose rounding errors of 1/256 grow in five iterations. A shard alone has another result."""
    for error, change in run_ranks(4, with_muon):
        assert error < 0.1 * change


def with_one_replica(rank: int) -> list[str]:
    mesh, messages = mesh_of(1, 2), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_sparse").addHandler(handler)
    for chosen in ("topk", "dense"):
        model = shard(net(), mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        attach_updates(model, optimizer, chosen, group=mesh["replicate"].get_group())
    return [text for text in messages if "one replica" in text]


def test_one_replica_is_warned_of_on_the_first_rank():
    first, second = run_ranks(2, with_one_replica)
    assert second == []
    assert len(first) == 1
    assert first[0].endswith("With one replica, train without attach_updates.")


def open_things() -> tuple[int, list[str]]:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return len(dist.distributed_c10d._world.pg_map), [name for name in others if name == "lightning_sparse"]


def one_after_the_other(rank: int) -> list[Any]:
    """Attach a model twice, with other optimizers, and then drop it."""
    mesh = mesh_of()
    group = mesh["replicate"].get_group()
    found: list[Any] = [open_things()]
    model = shard(net(), mesh["shard"])
    for make in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = make(model.parameters(), 0.01)
        attach_updates(model, optimizer, "topk", density=0.25, group=group)
        for _ in steps(model, optimizer, rank, 4, count=2):
            pass
        present = own(model.parameters())
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
        found.append((open_things(), all(torch.equal(other, present) for other in among(group, present)), hooks))
    del model, optimizer
    gc.collect()
    return [*found, open_things()]


@full
def test_a_model_is_attached_anew_and_leaves_nothing_open():
    for before, first, second, after in run_ranks(4, one_after_the_other):
        groups, _ = before
        assert before == after == (groups, [])
        assert first == second
        assert first[:2] == ((groups + 1, ["lightning_sparse"]), True)


def after_averages(rank: int) -> list[dict[str, Tensor]]:
    found = []
    for averages in (False, True):
        mesh = mesh_of()
        model, group = shard(net(), mesh["shard"]), mesh["replicate"].get_group()
        if averages:
            average_gradients(model, group)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        attach_updates(model, optimizer, "topk", density=0.25, group=group)
        for _ in steps(model, optimizer, rank, 4, count=2):
            pass
        found.append(whole(model))
    return found


@full
def test_an_attached_model_averages_gradients_between_replicas_no_more():
    for plain, after in run_ranks(4, after_averages):
        assert difference(plain, after) == 0


def skips_backward(rank: int) -> list[Tensor]:
    """Step once without backward in the second replica; return outputs after each step."""
    mesh = mesh_of()
    model = fully_shard(net(), mesh=mesh["shard"])  # the root module has all parameters
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    attach_updates(model, optimizer, "topk", density=0.25, group=mesh["replicate"].get_group())
    outputs = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, 4)
        if rank < 2 or step != 1:
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            outputs.append(model(torch.ones(1, 8)))
    return outputs


@later
def test_a_replica_that_steps_without_backward_has_the_agreed_weights_in_its_next_forward_pass():
    """Without backward, the root module keeps whole weights from before the exchange."""
    outputs = run_ranks(4, skips_backward)
    for found in outputs:
        assert all(map(torch.equal, found, outputs[0]))
    assert len({float(x) for x in outputs[0]}) == 3


def aborts(rank: int) -> tuple[list[list[int]], list[list[int]], bool]:
    """Attach with NCCL imitated, and free the device while a forward pass has gathered the weights.

    An abort waits until the device has ended the collectives of all groups, so all aborts have to begin.

    Returns:
        The ranks of the aborted groups, the ranks of the expected groups, and whether an abort waited alone.
    """
    mesh, aborted, begun = mesh_of(), [], threading.Barrier(2, timeout=5)
    model = shard(net(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    groups = [mesh[name].get_group() for name in ("replicate", "shard")]
    exchange = UpdateExchanger(model, [optimizer], method("topk", density=0.25), group=groups[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "over_nccl", property(lambda self: True))

        def abort(group: dist.ProcessGroup) -> None:
            aborted.append(dist.get_process_group_ranks(group))
            begun.wait()

        patched.setattr(dist.ProcessGroup, "abort", abort)
        model(torch.ones(1, 8))
        exchange.session.free_device()
        exchange.session.free_device()
    return sorted(aborted), sorted(dist.get_process_group_ranks(group) for group in groups), begun.broken


@full
def test_a_failure_aborts_also_the_groups_of_fsdp2_and_all_at_once():
    for aborted, expected, alone in run_ranks(4, aborts):
        assert aborted == expected
        assert not alone


class Sharded:
    """Stands in for a module of FSDP2."""

    def set_all_reduce_hook(self, hook: Any) -> None:
        self.hook = hook


def test_the_present_stream_may_use_a_gradient_that_fsdp2_frees(monkeypatch):
    """FSDP2 calls its hook in another stream than that of the gradient's memory."""
    used: list[Any] = []
    gradient: Any = SimpleNamespace(is_cuda=True, device="cuda", nbytes=8, record_stream=used.append, div_=used.append)
    module = Sharded()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the present one of {device}")
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: used.append("all-reduce"))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(shards, "_of_fsdp", lambda kind, model: [module])
    monkeypatch.setattr(shards, "check_averages", lambda *_: None)
    monkeypatch.setattr(shards, "_not_averaged", lambda model: {})
    shards.average_gradients(nn.Linear(1, 1), "group")
    module.hook(gradient)
    assert used == ["the present one of cuda", "all-reduce", 2]
    shards.keep_gradients(nn.Linear(1, 1))
    module.hook(gradient)
    assert used[3:] == ["the present one of cuda"]


def failing(rank: int, event: str, folder: Path) -> None:
    """Train until rank 3 fails, note the error and the time, and end like a script."""
    mesh = mesh_of()
    model = shard(net(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if event == "nan, then a pause" and rank in (0, 2):
        optimizer.register_step_post_hook(lambda *_: time.sleep(1.5))
    limit = timedelta(seconds=4) if event == "hangs" else None
    attach_updates(model, optimizer, "topk", density=0.25, group=mesh["replicate"].get_group(), timeout=limit)
    started = time.monotonic()
    try:
        for step in steps(model, optimizer, rank, 4, count=1000):
            if step < 2:
                started = time.monotonic()
            elif rank == 3 and event.startswith("nan"):
                local(model[0].weight.grad)[0, 0] = torch.nan
            elif rank == 3 and event == "error":
                raise ValueError("an error of the loop")
            elif rank == 3 and event == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif rank == 3 and event == "hangs":
                time.sleep(12)
    except Exception as error:
        note(folder, rank, error, started)
    end_like_a_script(folder, rank, pause=6 if event == "nan, then a pause" else 0)


CAUSES = {
    "nan": "The update of '0.weight' is not finite on rank 3 at step 2",
    "nan, then a pause": "The update of '0.weight' is not finite on rank 3 at step 2",
    "error": r"(No answer from ranks? (\d, )*3|[Rr]ank 3 has ended)",
    "killed": "No answer from rank 3",
    "hangs": "Still running, but not taking part: rank 3",
}


CASES = {
    "nan": "NaN in one replica",
    "nan, then a pause": "NaN in one replica, and no process ends",
    "error": "one rank: an error of the loop",
    "killed": "one rank is killed in a step",
    "hangs": "one rank hangs",
}
CHECKED = {"hangs": "cause on the ranks of the other replica; its own replica waits for it in a collective of FSDP2"}


def case(event: str) -> Any:
    checked = CHECKED.get(event, "cause on the ranks of both replicas")
    mark = pytest.mark.reliability(
        f"sharded by FSDP2, without Lightning: {CASES[event]}", checked=checked, methods=["topk"]
    )
    return pytest.param(event, marks=[mark, *([] if event == "nan" else [full])])


@full
@pytest.mark.parametrize("event", [case(event) for event in CAUSES])
def test_a_failure_in_one_group_ends_all_ranks_with_the_cause(event, tmp_path):
    run_ranks(4, failing, event, tmp_path)
    found = {int(path.name): json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found.keys() == ({0, 1, 2} if event == "killed" else {0, 1, 2, 3})
    for rank, (text, seconds) in found.items():
        if event == "hangs" and rank >= 2:
            continue  # rank 2 waits for it in a collective of FSDP2, which ends with rank 3's process
        assert re.search("an error of the loop" if (rank, event) == (3, "error") else CAUSES[event], text), text
        assert seconds < SOON
