"""Fabric(strategy="topk_hsdp"): replicas of a model that FSDP2 shards. Four ranks: two replicas of two shards."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_sparse import METHODS, FabricSparseHSDPStrategy, attach_updates, exchange_pending, shards
from lightning_sparse import checkpoint as sidecars
from lightning_sparse.shards import local
from lightning_sparse.strategies.lightning_pytorch import FabricSparseHSDPStrategy as ForLightning
from lightning_sparse.strategies.pytorch_lightning import FabricSparseHSDPStrategy as ForPytorchLightning
from tests.integration.failing import SOON, caught, end_like_a_script, note
from tests.integration.sharded import STEPS, Module, fitted
from tests.integration.sharded import hsdp as trainers
from tests.integration.trainers import Messages, lightning_ranks
from tests.processes import run_program
from tests.support.shards import EXACT, difference, loss_of, mesh_of, net, own, shard, steps, whole
from tests.support.tiers import full, in_full, tiers

ROOT = Path(__file__).parents[2]
SPARSE = {"method": "topk", "density": 0.2}


def parallelize(model: Any, mesh: Any) -> Any:
    return shard(model, mesh["data_parallel"])


def compiled(model: Any, mesh: Any) -> Any:
    return torch.compile(parallelize(model, mesh), backend="eager")


def hsdp(method: Any = EXACT, **options: Any) -> FabricSparseHSDPStrategy:
    own = {"parallelize_fn": parallelize, "replicas": 2, "process_group_backend": "gloo"}
    return FabricSparseHSDPStrategy(method, **{**own, **options})


def launched(strategy: Any, **options: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, **options)
    fabric.launch()
    return fabric


def set_up(strategy: Any, kind: Any = torch.optim.AdamW, lr: float = 0.01, **options: Any) -> tuple[Any, Any, Any]:
    """Return Fabric, the model and its optimizer, as Fabric's documentation has it."""
    fabric = launched(strategy, **options)
    model = fabric.setup_module(net())
    return fabric, model, fabric.setup_optimizers(kind(model.parameters(), lr=lr))


def train(
    fabric: Any,
    model: Any,
    *optimizers: Any,
    count: int = STEPS,
    first: int = 0,
    micro: int = 1,
    clip: float | None = None,
    skip: bool = False,
    on: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
) -> None:
    """A training loop. `skip`: without FSDP2's averages in all micro-batches but the last."""
    for step in range(first, first + count):
        for piece in range(micro):
            with fabric.no_backward_sync(model, enabled=skip and piece < micro - 1):
                part, parts = fabric.global_rank * micro + piece, fabric.world_size * micro
                fabric.backward(on(step, loss_of(model, step, part, parts)) / micro)
        for optimizer in optimizers:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(model: Any) -> dict[str, Tensor]:
    return whole(model.module)


# Weights:


@pytest.mark.parametrize(
    ("strategy", "precision", "loop"),
    tiers(
        [
            (SPARSE, "32-true", {"clip": 0.05, "micro": 2}),
            ({"method": "topk"}, "32-true", {}),
            ({**SPARSE, "clip_norm": 0.05}, "32-true", {}),
            ({**SPARSE, "local_steps": 3}, "32-true", {}),
            ({**SPARSE, "overlap": "next_step"}, "32-true", {}),
            ({**SPARSE, "granularity": "layer", "seed": 3}, "32-true", {}),
            (SPARSE, "bf16-mixed", {}),
            ({"method": "diloco", "local_steps": 2}, "32-true", {}),
        ],
        [(SPARSE, "32-true", {"clip": 0.05, "micro": 2})],
    ),
    ids=str,
)
def test_weights_are_bit_equal_to_the_trainers(strategy, precision, loop):
    micro, clip = loop.get("micro", 1), loop.get("clip")

    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp(**strategy), precision=precision)
        with torch.no_grad():  # only of this rank: the exchange has begun from replica 0's weights
            start = weights(model)
        train(fabric, model, optimizer, **loop)
        exchange_pending(optimizer)
        options = {"accumulate_grad_batches": micro, "gradient_clip_val": clip, "precision": precision}
        module, _ = fitted(trainers(**strategy), Module(micro=micro), **options)
        (reducer,) = fabric.strategy.reducers
        return weights(model), whole(module.net), start, reducer.comm.size

    results = lightning_ranks(4, run)
    for ours, expected, start, replicas in results:
        assert equal(ours, expected)
        assert equal(ours, results[0][0])
        assert not equal(ours, start)
        assert replicas == 2


@full
@pytest.mark.parametrize("method", ["dense", "topk"])
def test_a_save_before_the_first_step_changes_no_replica(method, tmp_path):
    """Torch makes the missing state of an optimizer that it saves, with one step counted."""

    def run(rank: int) -> Any:
        found = []
        for call in ("save", "load", ""):
            fabric, model, optimizer = set_up(hsdp(method, density=1.0 if method == "topk" else None))
            if call:
                getattr(fabric, call)(tmp_path / method, {"model": model, "optimizer": optimizer})
            train(fabric, model, optimizer, count=2)
            found.append((weights(model), [float(x["step"]) for x in optimizer.state.values()]))
        return found

    results = lightning_ranks(4, run)
    for *found, (plain, steps_of_plain) in results:
        for (weights_, counts), first in zip(found, results[0], strict=False):
            assert equal(weights_, first[0])
            assert counts == first[1]
        assert equal(plain, results[0][2][0])
        assert steps_of_plain == [2.0] * len(steps_of_plain)


@full
def test_the_mean_of_sgds_updates_is_the_update_of_the_mean_and_dense_replicas_are_fsdp2s_own():
    def run(rank: int) -> Any:
        found = {}
        for name, strategy in (("exact", hsdp()), ("dense", hsdp("dense"))):
            fabric, model, optimizer = set_up(strategy, torch.optim.SGD, 0.05)
            train(fabric, model, optimizer, micro=2, skip=name == "dense")
            found[name] = weights(model)
        mesh = mesh_of()
        stock = shard(net(), mesh)  # FSDP2 averages over both dimensions of the mesh
        optimizer = torch.optim.SGD(stock.parameters(), lr=0.05)
        for _ in steps(stock, optimizer, rank, 4, count=STEPS, micro=2, skip=True):
            pass
        found["stock"] = whole(stock)
        return found, whole(net()), fabric.strategy.reducers

    for found, start, reducers in lightning_ranks(4, run):
        assert reducers == []
        assert equal(found["dense"], found["stock"])
        # A step rounds weights below 1 by 2^-25 at most, in x - lr * g and in x - mean. A later step enlarges their
        # sum at most by 1 + lr * L, for a curvature L below 10. In six steps that is 1.5^6 < 12 times.
        assert difference(found["exact"], found["stock"]) < STEPS * 2 * 2**-25 * 12
        assert difference(found["exact"], start) > 0.01


@full
def test_no_backward_sync_skips_averages_within_a_replica_and_nothing_moves_between_replicas_before_the_step():
    """Beside FSDP2's own switch. Lightning's leaves the averages off after a block with `enabled=False`."""

    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp("topk", density=0.2))
        (reducer,) = fabric.strategy.reducers
        sent, averaged = [0], []
        for step in range(STEPS):
            with fabric.no_backward_sync(model):
                fabric.backward(loss_of(model, step, rank * 2, 8) / 2)
            averaged += [param.grad is not None for param in model.parameters()]
            with fabric.no_backward_sync(model, enabled=False):
                pass
            fabric.backward(loss_of(model, step, rank * 2 + 1, 8) / 2)
            assert reducer.comm.sent_bytes == sent[-1]
            optimizer.step()
            optimizer.zero_grad()
            sent.append(reducer.comm.sent_bytes)
        mesh = mesh_of()
        expected = shard(net(), mesh["shard"])
        optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
        attach_updates(expected, optimizer, "topk", density=0.2, group=mesh["replicate"].get_group())
        for _ in steps(expected, optimizer, rank, 4, count=STEPS, micro=2, skip=True):
            pass
        return weights(model), whole(expected), sent, averaged

    for ours, expected, sent, averaged in lightning_ranks(4, run):
        assert equal(ours, expected)
        assert averaged
        assert not any(averaged)
        assert sorted({*sent}) == sent, "each step has sent something"


@full
def test_clipping_returns_the_norm_of_the_replica_and_on_nonfinite_skips_its_step():
    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp("topk", density=0.2, on_nonfinite="skip"))
        loss_of(model, 0, rank, 4).backward()  # as stock: Lightning requires fabric.backward for some strategies only
        expected = torch.cat([param.grad.full_tensor().double().flatten() for param in model.parameters()]).norm()
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3).full_tensor()
        clipped = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).full_tensor()
        optimizer.zero_grad()
        train(fabric, model, optimizer, on=lambda step, loss: loss * float("nan" if rank == 3 and step == 2 else 1))
        return float(norm), float(expected), float(clipped), weights(model)

    results = lightning_ranks(4, run)
    for norm, expected, clipped, found in results:
        assert norm == pytest.approx(expected, rel=95 * 2**-24)  # a sum of 95 squares in fp32
        # Of two replicas. Torch divides by norm + 1e-6.
        assert clipped == pytest.approx(1e-3 * math.sqrt(2), rel=1e-5)
        assert all(x.isfinite().all() for x in found.values())
        assert equal(found, results[0][3])
    assert abs(results[0][0] - results[2][0]) > 1e-3, "replicas have other batches"


@full
def test_bf16_weights():
    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp("topk", density=0.2), precision="bf16-true")
        start = weights(model)
        train(fabric, model, optimizer, clip=0.05)
        return weights(model), start

    ranks = lightning_ranks(4, run)
    for found, start in ranks:
        assert {x.dtype for x in found.values()} == {torch.bfloat16}
        assert equal(found, ranks[0][0])
        assert not equal(found, start)


@full
def test_tensor_parallel_replicas_train_as_one_process():
    def run(rank: int) -> Any:
        def parallel(model: Any, mesh: Any) -> Any:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tensor_parallel"], plan)
            return shard(model, mesh["data_parallel"])

        fabric = launched(hsdp(parallelize_fn=parallel, tensor_parallel_size=2))
        model = fabric.setup_module(nn.Sequential(*net()[:3]))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05))
        alone = nn.Sequential(*net()[:3])
        expected = torch.optim.SGD(alone.parameters(), lr=0.05)
        for step in range(STEPS):
            fabric.backward(loss_of(model, step, rank // 2, 2))  # tensor-parallel ranks share a part of the data
            sum(loss_of(alone, step, part, 2) / 2 for part in range(2)).backward()
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        start = nn.Sequential(*net()[:3])
        return weights(model), whole(alone), whole(start), tuple(fabric.strategy.device_mesh.shape)

    for ours, expected, start, shape in lightning_ranks(4, run):
        assert shape == (2, 1, 2)
        # As for SGD above. A gradient below 1 is also a sum of at most 24 terms in another order, off by 2^-24 each.
        assert difference(ours, expected) < STEPS * (2 * 2**-25 + 0.05 * 24 * 2**-24) * 12
        assert difference(ours, start) > 0.01


# Models and optimizers, together and apart:


@full
def test_a_model_that_the_user_has_sharded_is_set_up_by_the_string_together_and_apart():
    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp("topk", density=0.2))
        train(fabric, model, optimizer)
        found = [weights(model)]
        for together in (True, False):
            fabric = launched(hsdp("topk", density=0.2, parallelize_fn=None))
            model = shard(net(), fabric.strategy.device_mesh["data_parallel"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            loss_of(model, 0, 0, 1)  # leaves whole parameters in the root module
            if together:
                model, optimizer = fabric.setup(model, optimizer)
            else:
                model, optimizer = fabric.setup(model), fabric.setup_optimizers(optimizer)
            train(fabric, model, optimizer)
            found.append(weights(model))
        messages = Messages()
        fabric = launched("topk_hsdp")  # one node, one replica
        model = shard(net(), fabric.strategy.device_mesh["data_parallel"])
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        train(fabric, model, optimizer)
        inference = fabric.setup_module(
            shard(net().requires_grad_(False), fabric.strategy.device_mesh["data_parallel"])
        )
        return (
            found,
            messages.texts,
            fabric.strategy.device_mesh.shape,
            len(fabric.strategy.reducers),
            inference(torch.ones(1, 8)),
        )

    for rank, ((first, *others), texts, shape, reducers, output) in enumerate(lightning_ranks(4, run)):
        assert all(equal(first, other) for other in others)
        assert tuple(shape) == (1, 4, 1)
        assert reducers == 1
        assert output.shape == (1, 1)
        assert len(texts) == (rank == 0), texts
        assert all("on one replica sends nothing to anybody" in text for text in texts)
        assert all("strategy='dense_hsdp'" in text for text in texts)


@full
def test_several_optimizers_wait_for_each_other_and_several_models_train_apart():
    def run(rank: int) -> Any:
        fabric = launched(hsdp("topk", density=0.2))
        model = fabric.setup_module(net())
        first, last = ([*model.parameters()][part] for part in (slice(0, 2), slice(2, None)))
        first, last = torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(last, lr=0.05)
        first = fabric.setup_optimizers(first)
        assert fabric.strategy.reducers == []
        early = caught(first.step)  # it has no gradients yet
        last = fabric.setup_optimizers(last)
        train(fabric, model, first, last)
        other = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(other.parameters(), lr=0.01))
        train(fabric, other, optimizer)
        apart, alone, only = set_up(hsdp("topk", density=0.2))
        train(apart, alone, only)
        plain = shard(net(), (mesh := mesh_of())["shard"])
        parts = [*plain.parameters()]
        optimizers = [torch.optim.AdamW(parts[:2], lr=0.01), torch.optim.SGD(parts[2:], lr=0.05)]
        attach_updates(plain, optimizers, "topk", density=0.2, group=mesh["replicate"].get_group())
        for _ in steps(plain, optimizers[1], rank, 4):  # which steps the second one afterwards
            optimizers[0].step()
            optimizers[0].zero_grad()
        return weights(model), whole(plain), weights(other), weights(alone), len(fabric.strategy.reducers), early

    for two, plain, other, alone, reducers, (kind, text, _) in lightning_ranks(4, run):
        assert equal(two, plain)
        assert kind == "ValueError"
        assert "'2.weight', '2.bias', '4.weight' and others require gradients but are in no optimizer" in text
        assert equal(other, alone)
        assert reducers == 2


def root_only(model: Any, mesh: Any) -> Any:
    return fully_shard(model, mesh=mesh["data_parallel"])


@full
def test_an_optimizer_made_after_a_forward_pass_without_backward_is_an_error_that_names_the_remedy():
    """The pass leaves whole parameters in the root module, and the optimizer would step these."""

    def run(rank: int) -> Any:
        def with_a_head(model: Any, mesh: Any) -> Any:
            fully_shard(model[0], mesh=mesh["data_parallel"])
            return root_only(model, mesh)

        fabric = launched(hsdp("topk", parallelize_fn=with_a_head))
        model = fabric.setup_module(nn.Sequential(net(), nn.Linear(1, 1)))
        model(torch.ones(1, 8))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
        fabric.backward(loss_of(model, 0, rank, 4))
        return caught(optimizer.step)

    for kind, text, seconds in lightning_ranks(4, run):
        assert kind == "ValueError"
        assert "'1.weight', '1.bias' require gradients but are in no optimizer" in text
        assert "After a forward pass without backward, call reshard() of the sharded modules before" in text
        assert seconds < SOON


@full
@pytest.mark.parametrize("method", [SPARSE, *in_full({"method": "dense"})], ids=str)
def test_a_model_whose_root_has_all_parameters_is_set_up_saved_and_loaded_after_an_evaluation(method, tmp_path):
    """An evaluation leaves whole parameters in the root module."""

    def run(rank: int) -> Any:
        fabric = launched(hsdp(**method, parallelize_fn=None))

        def made(lr: float = 0.01) -> tuple[Any, Any]:
            model = root_only(net(), fabric.strategy.device_mesh)
            return model, torch.optim.AdamW(model.parameters(), lr=lr)

        @torch.no_grad()
        def evaluate(model: Any) -> Tensor:
            return model(torch.ones(1, 8))

        model, optimizer = made()
        evaluate(model)
        model, optimizer = fabric.setup(model, optimizer)
        train(fabric, model, optimizer, count=2)
        outputs = [evaluate(model)]
        fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        model, optimizer = made(lr=0.5)
        model = fabric.setup_module(model)
        evaluate(model)
        fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        outputs.append(evaluate(model))
        fabric.save(tmp_path / "b.ckpt", {"model": model})  # before its optimizer is set up
        loaded = weights(model)
        if rank == 0:
            torch.save(loaded, tmp_path / "raw.pt")
        fabric.barrier()
        model = fabric.setup_module(made()[0])
        evaluate(model)
        fabric.load_raw(tmp_path / "raw.pt", model)
        shards.reshard(model)
        outputs.append(evaluate(model))
        return outputs, optimizer.param_groups[0]["lr"]

    ranks = lightning_ranks(4, run)
    for outputs, lr in ranks:
        assert all(torch.equal(output, ranks[0][0][0]) for output in outputs)
        assert lr == 0.01
    assert (tmp_path / "b.ckpt").is_dir()


@full
@pytest.mark.parametrize("options", [{"local_steps": 3}, {"overlap": "next_step"}], ids=str)
def test_weights_are_equal_after_exchange_pending(options):
    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp("topk", density=0.2, **options))
        train(fabric, model, optimizer, count=4)
        before = own(model.parameters())
        exchange_pending(optimizer)
        return before, weights(model)

    (first, weights_), _, (second, _), (_, others) = lightning_ranks(4, run)
    assert not torch.equal(first, second), "the same shard in both replicas"
    assert equal(weights_, others)


# Checkpoints:


def resumable(
    rank: int, path: Any, resumes: bool = False, stops: bool = False, compiles: bool = False, **options: Any
) -> dict[str, Any]:
    """Train six steps, with a checkpoint after three; or the last three, from a checkpoint."""
    lines: list[str] = []
    fabric, model, optimizer = set_up(
        hsdp(**{**SPARSE, "parallelize_fn": compiled if compiles else parallelize, **options})
    )
    fabric.strategy.inform = lines.append
    (exchange,) = fabric.strategy._exchangers
    state, rest = {"model": model, "optimizer": optimizer, "step": 0}, {}
    if resumes:
        rest = fabric.load(path, state)
    else:
        train(fabric, model, optimizer, count=3)
        state |= {"step": 3}
        fabric.save(path, {**state, "more": "kept"})
    moments = [x["exp_avg"].to_local().clone() for x in optimizer.optimizer.state.values()]
    residual = exchange.reducer.state_dict()["elements"]["residual"]
    if not stops:
        train(fabric, model, optimizer, first=state["step"], count=3)
        exchange_pending(optimizer)
    return {
        "weights": weights(model),
        "moments": torch.cat([x.flatten() for x in moments]),
        "lines": lines,
        "residual": torch.cat([x.double().flatten() for x in residual.values()]),
        "rest": rest,
        "step": state["step"],
        "steps": exchange.reducer.step,
    }


@full
@pytest.mark.parametrize(
    ("options", "replicas"),
    tiers(
        [
            ({}, ()),
            ({}, (1, 4)),
            ({"overlap": "next_step"}, ()),
            ({"local_steps": 2}, ()),
            ({"compiles": True}, ()),
        ],
        [({}, ())],
    ),
    ids=str,
)
def test_resumes_bit_for_bit_and_goes_on_with_another_number_of_replicas(options, replicas, tmp_path):
    def run(rank: int) -> Any:
        whole_run = resumable(rank, tmp_path / "a.ckpt", **options)
        resumed = resumable(rank, tmp_path / "a.ckpt", resumes=True, **options)
        others = [resumable(rank, tmp_path / "a.ckpt", resumes=True, replicas=n, **options) for n in replicas]
        return whole_run, resumed, others

    ranks = lightning_ranks(4, run)
    for whole_run, resumed, others in ranks:
        for name in ("weights", "moments", "residual", "steps"):
            a, b = whole_run[name], resumed[name]
            assert equal(a, b) if isinstance(a, dict) else torch.equal(a, b) if isinstance(a, Tensor) else a == b, name
        assert resumed["step"] == 3
        assert resumed["rest"] == {"more": "kept"}
        assert resumed["lines"] == []
        assert all(equal(x["weights"], other["weights"]) for x, other in zip(others, ranks[0][2], strict=True))
    assert not torch.equal(ranks[0][0]["moments"], ranks[2][0]["moments"]), "of the same shard in both replicas"
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "a.ckpt.residuals"}
    # The mean of all residuals stays, summed over all elements. With one replica, ranks hold quarters of the model.
    sums = [sum(float(rank[0]["residual"].sum()) for rank in ranks) / 2]
    sums += [sum(float(rank[2][i]["residual"].sum()) for rank in ranks) / n for i, n in enumerate(replicas)]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-5)
    assert sums[0] != 0


@full
def test_dense_replicas_resume_bit_for_bit(tmp_path):
    def run(rank: int) -> Any:
        found = []
        for resumes in (False, True):
            fabric, model, optimizer = set_up(hsdp("dense"))
            state = {"model": model, "optimizer": optimizer}
            if resumes:
                fabric.load(tmp_path / "a.ckpt", state)
            else:
                train(fabric, model, optimizer, count=3)
                fabric.save(tmp_path / "a.ckpt", state)
            train(fabric, model, optimizer, count=3, first=3)
            found.append(weights(model))
        return found

    for whole_run, resumed in lightning_ranks(4, run):
        assert equal(whole_run, resumed)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@full
def test_dense_replicas_warn_of_residuals_that_they_do_not_load(tmp_path):
    def run(rank: int) -> Any:
        resumable(rank, tmp_path / "a.ckpt")
        messages, lines = Messages(), []
        fabric, model, optimizer = set_up(hsdp("dense"))
        fabric.strategy.inform = lines.append
        fabric.load(tmp_path / "a.ckpt", {"model": model})
        weights_alone = [*messages.texts]
        fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        return weights_alone, messages.texts, lines

    for rank, (weights_alone, texts, lines) in enumerate(lightning_ranks(4, run)):
        assert weights_alone == lines == []
        assert len(texts) == (rank == 0)
        assert all("are lost, because replicas average gradients here" in text for text in texts)


@full
@pytest.mark.parametrize("state", [("model",), ("model", "optimizer")])
def test_a_folder_that_one_rank_cannot_make_is_an_error_on_all(state, tmp_path):
    """Lightning makes it, too, and other ranks would wait in torch's distributed checkpoint."""

    def run(rank: int) -> Any:
        def full_disk(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        fabric, model, optimizer = set_up(hsdp(**SPARSE, timeout=timedelta(seconds=20)))
        train(fabric, model, optimizer, count=1)
        parts = {name: {"model": model, "optimizer": optimizer}[name] for name in state}
        with pytest.MonkeyPatch.context() as patch:
            if rank == 3:
                patch.setattr(Path, "mkdir", full_disk)
            error = caught(lambda: fabric.save(tmp_path / "a.ckpt", parts))
        fabric.barrier()
        if rank == 0:
            (tmp_path / "a.ckpt").rmdir()
            (tmp_path / "a.ckpt").write_text("a checkpoint in one file")
        fabric.barrier()
        fabric.save(tmp_path / "a.ckpt", parts)
        fabric.load(tmp_path / "a.ckpt", parts)
        return error

    for kind, text, seconds in lightning_ranks(4, run):
        assert (kind, text) == ("OSError", "Rank 3: [Errno 28] No space left on device")
        assert seconds < SOON


@full
def test_checkpoints_of_stock_and_for_stock(tmp_path):
    def run(rank: int) -> Any:
        ours = resumable(rank, tmp_path / "ours.ckpt", stops=True)
        stock = ModelParallelStrategy(
            lambda m, mesh: shard(m, mesh["data_parallel"]), 4, 1, process_group_backend="gloo"
        )
        fabric, model, optimizer = set_up(stock)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        rest = fabric.load(tmp_path / "ours.ckpt", state)
        loaded, moments = weights(model), [x["exp_avg"].full_tensor() for x in optimizer.optimizer.state.values()]
        fabric.save(tmp_path / "stock.ckpt", state)
        back = resumable(rank, tmp_path / "stock.ckpt", resumes=True, stops=True)
        return ours, loaded, torch.cat([x.flatten() for x in moments]), rest, back

    ranks = lightning_ranks(4, run)
    own_moments = [rank[0]["moments"] for rank in ranks[:2]]
    for rank, (ours, loaded, moments, rest, back) in enumerate(ranks):
        assert equal(ours["weights"], loaded)
        assert equal(ours["weights"], back["weights"])
        # Of replica 0. Sums, because a rank's shards are parts of each parameter.
        assert float(moments.double().sum()) == pytest.approx(sum(float(x.double().sum()) for x in own_moments))
        assert [*rest] == ["more", sidecars.KEY]
        assert not back["residual"].any()
        assert len(back["lines"]) == (rank == 0)
        assert all("holds no residuals of shards: they start at 0" in line for line in back["lines"])


@full
def test_other_saves_and_loads(tmp_path):
    """One file, weights alone, one of two optimizers, an object alone, and a save that fails."""

    def run(rank: int) -> Any:
        lines: list[str] = []
        fabric, model, optimizer = set_up(hsdp(**SPARSE, save_distributed_checkpoint=False))
        fabric.strategy.inform = lines.append
        train(fabric, model, optimizer, count=2)
        state = {"model": model, "optimizer": optimizer}
        fabric.save(tmp_path / "one.ckpt", state)
        raw = torch.load(tmp_path / "one.ckpt", weights_only=True)["model"]
        saved = weights(model)
        train(fabric, model, optimizer, count=1, first=2)
        fabric.load(tmp_path / "one.ckpt", state)
        again = weights(model)
        if rank == 0:
            torch.save(raw, tmp_path / "raw.pt")
        fabric.barrier()
        train(fabric, model, optimizer, count=1, first=2)
        fabric.load_raw(tmp_path / "raw.pt", model)
        loaded = weights(model)
        train(fabric, model, optimizer, count=1, first=2)

        fabric, model, optimizer = set_up(hsdp(**SPARSE))
        fabric.strategy.inform = lines.append
        train(fabric, model, optimizer, count=2)
        state = {"model": model, "optimizer": optimizer}
        fabric.save(tmp_path / "weights.ckpt", state)
        fabric.save(tmp_path / "weights.ckpt", {"model": model})  # in its place
        fabric.save(tmp_path / "whole.ckpt", state)
        errors = [caught(lambda: fabric.load(tmp_path / "none.ckpt", state))]
        errors += [caught(lambda: fabric.load(tmp_path / "whole.ckpt"))]
        errors += [caught(lambda: fabric.save(tmp_path / "whole.ckpt", state, filter={"model": lambda *_: True}))]
        if rank == 0:
            (tmp_path / "file.ckpt").write_text("an earlier file")
        fabric.barrier()
        errors += [caught(lambda: fabric.save(tmp_path / "file.ckpt", {"step": 3}))]
        mixed = {"metric": torch.nn.Linear(1, 1), **state}  # a module without shards comes first
        fabric.save(tmp_path / "mixed.ckpt", mixed)
        fabric.barrier()
        if rank == 0:
            (file,) = (tmp_path / "whole.ckpt.residuals").glob("*rank3*")
            file.write_bytes(file.read_bytes()[:-100])
        fabric.barrier()
        errors += [caught(lambda: fabric.load(tmp_path / "whole.ckpt", state))]
        fabric.load(tmp_path / "weights.ckpt", {"model": model})
        return saved, raw, again, loaded, weights(model), lines, errors

    ranks = lightning_ranks(4, run)
    refused = ["NotImplementedError", "ValueError"]
    for rank, (saved, raw, again, loaded, now, lines, errors) in enumerate(ranks):
        assert equal(saved, raw)
        assert equal(saved, again)
        assert equal(saved, loaded)
        assert equal(now, ranks[0][4])
        assert [kind for kind, *_ in errors] == ["ValueError", "ValueError", *refused, "ValueError"]
        parts = ["none", "a model", "filtered", "Could not find a distributed model", "is damaged"]
        for (_, text, seconds), part in zip(errors, parts, strict=True):
            assert part in text
            assert seconds < SOON
        texts = ["one.ckpt' holds the weights and the first replica's optimizer, and no residuals", "they start at 0"]
        assert len(lines) == (len(texts) if rank == 0 else 0), lines
        assert all(text in line for text, line in zip(texts, lines, strict=False))
    assert not (tmp_path / "weights.ckpt.residuals").exists()
    assert len([*(tmp_path / "whole.ckpt.residuals").iterdir()]) == 4, "the save that failed has left no files"
    assert (tmp_path / "file.ckpt").read_text() == "an earlier file"


@full
def test_a_load_before_the_optimizer_is_set_up(tmp_path):
    """Torch makes an optimizer's state by a step when it loads one."""

    def run(rank: int) -> Any:
        fabric, model, optimizer = set_up(hsdp(**SPARSE))
        train(fabric, model, optimizer, count=2)
        fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        saved = weights(model)
        fabric, messages = launched(hsdp(**SPARSE)), Messages()
        model = fabric.setup_module(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        loaded, optimizer = weights(model), fabric.setup_optimizers(optimizer)
        train(fabric, model, optimizer, count=2, first=2)
        return saved, loaded, optimizer.param_groups[0]["lr"], weights(model), messages.texts

    ranks = lightning_ranks(4, run)
    for rank, (saved, loaded, lr, now, texts) in enumerate(ranks):
        assert equal(saved, loaded)
        assert lr == 0.01
        assert equal(now, ranks[0][3])
        assert not equal(now, saved)
        assert len(texts) == (rank == 0)
        assert "a.ckpt' are not loaded, because its AdamW is not set up" in "".join(ranks[0][4])


@full
def test_a_part_of_the_optimizers_is_saved_and_loaded_without_residuals(tmp_path):
    def run(rank: int) -> Any:
        lines: list[str] = []
        fabric = launched(hsdp(**SPARSE))
        model = fabric.setup_module(net())
        parts = [*model.parameters()]
        optimizers = (torch.optim.AdamW(part, lr=0.01) for part in (parts[:2], parts[2:]))
        first, last = fabric.setup_optimizers(*optimizers)
        fabric.strategy.inform = lines.append
        train(fabric, model, first, last)
        fabric.save(tmp_path / "part.ckpt", {"model": model, "first": first})
        fabric.save(tmp_path / "whole.ckpt", {"model": model, "first": first, "last": last})
        fabric.load(tmp_path / "part.ckpt", {"model": model, "first": first})
        fabric.load(tmp_path / "whole.ckpt", {"model": model, "first": first})
        return lines, torch.cat([x["exp_avg"].to_local().flatten() for x in first.optimizer.state.values()])

    (lines, moments), _, (_, others), _ = lightning_ranks(4, run)
    assert torch.equal(moments, others), "of replica 0"
    assert len(lines) == 2
    assert "part.ckpt' holds the weights and the first replica's optimizer, and no residuals" in lines[0]
    assert "whole.ckpt' are not loaded: the state lacks an optimizer" in lines[1]
    assert not (tmp_path / "part.ckpt.residuals").exists()


# Failures:


@full
def test_settings_that_differ_on_one_rank_are_an_error_on_all():
    def run(rank: int) -> Any:
        odd = rank == 3

        def broken(model: Any, mesh: Any) -> Any:
            if odd:
                raise KeyError("no such layer")
            return parallelize(model, mesh)

        def refused(model: Any, mesh: Any) -> Any:
            return fully_shard(model, mesh=mesh["data_parallel"], ignored_params={model[0].weight} if odd else None)

        return [
            caught(lambda: launched(hsdp(replicas=1 if odd else 2))),
            caught(lambda: launched(hsdp(replicas=3 if odd else 2))),
            caught(lambda: set_up(hsdp("topk", density=0.1 if odd else 0.2))),
            caught(lambda: set_up(hsdp("topk"), torch.optim.SGD if odd else torch.optim.AdamW)),
            caught(lambda: set_up(hsdp("dense" if odd else "topk"))),
            caught(lambda: set_up(hsdp("topk", parallelize_fn=broken))),
            caught(lambda: set_up(hsdp("topk", parallelize_fn=refused))),
            caught(lambda: set_up(hsdp("topk"))),
        ]

    for rank, found in enumerate(lightning_ranks(4, run)):
        texts = ["in mesh", "does not divide the 4 ranks", "density", "in exchange", "in exchange", "no such layer"]
        for (kind, text, seconds), part in zip(found, [*texts, "'0.weight' is not sharded", ""], strict=False):
            assert part in text, (rank, part, text)
            assert seconds < SOON
            assert kind == ("no error" if not part else kind)
        assert [kind for kind, *_ in found][-1] == "no error"
        assert "no error" not in [kind for kind, *_ in found][:-1]


def failing(rank: int, event: str, folder: Path) -> None:
    """Train until rank 3 fails, note the error and the time, and end like a script."""
    fabric, model, optimizer = set_up(hsdp("topk", density=0.2))
    last = model.module[4] if event == "backward" else model.module[0]
    started = time.monotonic()

    def die(*_: Any) -> None:
        os._exit(1)

    def poison(*_: Any) -> None:
        local(model.module[0].weight.grad).fill_(float("nan"))

    def fail(step: int, loss: Tensor) -> Tensor:
        nonlocal started
        if step < 2:
            started = time.monotonic()
        elif step == 2 and rank == 3:
            if event == "nan":
                return loss * float("nan")
            if event == "error":
                raise KeyError("a bad batch")
            if event == "nan in a shard":
                optimizer.optimizer.register_step_pre_hook(poison)
            elif event == "forward":
                last.register_forward_pre_hook(die)
            elif event == "backward":
                last.register_full_backward_pre_hook(die)
            else:
                optimizer.optimizer.register_step_pre_hook(die)
        return loss

    try:
        train(fabric, model, optimizer, count=1000, on=fail)
    except Exception as error:
        sys.last_value = error
        note(folder, rank, error, started)
    end_like_a_script(folder, rank)


CAUSES = {
    "nan": "not finite on rank [23] at step 2",
    "nan in a shard": "The update of '0.weight' is not finite on rank 3 at step 2",
    "error": "(No answer from rank 3|[Rr]ank 3 (has ended|failed))",
    "forward": "No answer from rank 3",
    "backward": "No answer from rank 3",
    "step": "No answer from rank 3",
}


@full
@pytest.mark.parametrize("event", CAUSES)
def test_a_failure_on_one_rank_ends_all_ranks_with_the_cause(event, tmp_path):
    lightning_ranks(4, failing, event, tmp_path)
    found = {int(path.name): json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found.keys() >= {0, 1, 2}
    for rank, (text, seconds) in found.items():
        assert re.search(CAUSES[event] if rank != 3 or "nan" in event else "a bad batch", text), (rank, text)
        assert seconds < SOON


# Wrong inputs:


class FullyShardedDataParallel(nn.Sequential):
    """Stands for FSDP1's, which needs a GPU."""


@full
def test_models_and_optimizers_that_it_refuses():
    def run(rank: int) -> Any:
        def with_options(model: Any = None, kind: Any = torch.optim.AdamW, **options: Any) -> Callable[[], Any]:
            def begin() -> None:
                fabric = launched(hsdp("topk", **options))
                ready = fabric.setup_module(model or net())
                fabric.setup_optimizers(kind(ready.parameters(), lr=0.1))

            return begin

        def together() -> None:
            model = net()
            launched(hsdp("topk")).setup(model, torch.optim.AdamW(model.parameters()))

        def made_before() -> None:
            model = net()
            fabric, optimizer = launched(hsdp("topk")), torch.optim.AdamW(model.parameters())
            fabric.setup_module(model)
            fabric.setup_optimizers(optimizer)

        def both_dimensions(model: Any, mesh: Any) -> Any:
            return shard(model, mesh["replicate", "data_parallel"])

        def partly(model: Any, mesh: Any) -> Any:
            return fully_shard(model, mesh=mesh["data_parallel"], ignored_params={model[0].bias})

        def nothing(model: Any, mesh: Any) -> Any:
            return model

        def last(model: Any, mesh: Any) -> Any:
            fully_shard(model[-1], mesh=mesh["data_parallel"])
            return model

        def no_model(model: Any, mesh: Any) -> Any:
            return None

        return {
            "with a DistributedDataParallel": caught(with_options(nn.parallel.DistributedDataParallel(net()))),
            "with a FullyShardedDataParallel": caught(with_options(FullyShardedDataParallel(net()))),
            "set up the model first, model = fabric.setup_module(model)": caught(together),
            "Create the optimizer after fully_shard": caught(made_before),
            "shares '0.weight' with rank": caught(with_options(parallelize_fn=both_dimensions)),
            "whose '0.bias' is not sharded over the mesh dimension": caught(with_options(parallelize_fn=partly)),
            "whose '0.weight' is not sharded over the mesh": caught(with_options(parallelize_fn=nothing)),
            "is not sharded, so Lightning could not save it": caught(with_options(replicas=4, parallelize_fn=nothing)),
            "parallelize_fn=parallelize); or before you set up": caught(with_options(parallelize_fn=None)),
            "must return a `nn.Module` instance": caught(with_options(parallelize_fn=no_model)),
            "LBFGS": caught(with_options(kind=torch.optim.LBFGS)),
            "'0.weight' is in no module of fully_shard": caught(
                lambda: launched(hsdp("dense", replicas=4, parallelize_fn=last)).setup_module(net())
            ),
            "": caught(with_options()),
        }

    for found in lightning_ranks(4, run):
        for part, (kind, text, seconds) in found.items():
            assert part in text, (part, text)
            assert kind in (("ValueError", "TypeError", "RankFailure") if part else ("no error",))
            assert seconds < SOON


@full
def test_a_precision_that_it_refuses():
    def run(rank: int) -> Any:
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
        return caught(lambda: launched(hsdp("topk"), plugins=plugin))

    for kind, text, _ in lightning_ranks(4, run):
        assert kind == "ValueError"
        assert "FabricSparseHSDPStrategy with precision='16-" in text
        assert "choose 32-true or bf16-mixed or bf16-true" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": 0}, r"FabricSparseHSDPStrategy\(replicas=0\): give 'auto' or a positive integer"),
        ({"overlap": "backward"}, "exchanged after backward. Leave overlap out"),
        ({"hierarchical": True}, "averages gradients within a replica already"),
        ({"start_method": "spawn"}, "FSDP2 does not support ranks that are forked or spawned"),
        ({"method": "signsgd"}, "makes no mean"),
        ({"densty": 0.1}, "has no option 'densty'"),
        ({"density_warmup": [0.5]}, "density_warmup_steps"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        FabricSparseHSDPStrategy(**options)


# Lightning's two names, data and launches:


@pytest.mark.parametrize("package", [lightning_fabric, lightning.fabric])
def test_names_and_both_namespaces(package):
    registry = package.strategies.STRATEGY_REGISTRY
    for name, spec in METHODS.items():
        assert (f"{name}_hsdp" in registry) == spec.aggregator.averages
    for made in ("topk_hsdp", ForLightning("topk", replicas=2), ForPytorchLightning("topk", replicas=2)):
        strategy = package.Fabric(strategy=made, accelerator="cpu", devices=2).strategy
        assert isinstance(strategy, package.strategies.ModelParallelStrategy)
        assert type(strategy).__mro__[-3].__module__.startswith(f"{package.__name__}.")
        assert strategy._arguments["replicas"] == ("auto" if made == "topk_hsdp" else 2)
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='topk_hsdp_spawn'`"):
        package.Fabric(strategy="topk_hsdp_spawn", accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        package.Fabric(strategy="topk_hsdp", accelerator="cpu", devices=2, precision="16-mixed")


@full
def test_ranks_read_other_parts_of_the_data_but_tensor_parallel_ranks_share_one():
    def run(rank: int) -> Any:
        seen = []
        for options in ({"replicas": 2}, {"replicas": 1, "tensor_parallel_size": 2}):
            fabric = launched(hsdp("topk", **options))
            loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(16), batch_size=4))
            seen.append([int(x) for batch in loader for x in batch])
        return seen

    parts, shared = zip(*lightning_ranks(4, run), strict=True)
    assert sorted(x for part in parts for x in part) == [*range(16)]
    assert shared[0] == shared[1]
    assert shared[2] == shared[3]
    assert sorted(shared[0] + shared[2]) == [*range(16)]


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone")
FAILS = "loss = {}['a bad batch'] if fabric.global_rank == 3 and step == 2 else "
SUMS = (
    "open(f'{fabric.global_rank}', 'w').write(str([float(x.full_tensor().double().sum()) for x in model.parameters()]))"
)


@full
@pytest.mark.parametrize(("package", "launcher"), [("lightning_fabric", ()), ("lightning.fabric", TORCHRUN)])
def test_the_pages_example_in_programs_that_train_and_that_fail(package, launcher, tmp_path):
    _, _, page = (ROOT / "docs" / "sharded.md").read_text().partition("## With Fabric")
    text = page.partition("```python\n")[2].partition("```")[0].replace("range(100)", "range(4)")
    text = text.replace("from lightning.fabric", f"from {package}").replace("loss = ", FAILS if launcher else "loss = ")
    (tmp_path / "train.py").write_text(text + SUMS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_program(["env", f"--chdir={tmp_path}", sys.executable, *launcher, "train.py"], env, 180)
    if launcher:
        assert done.returncode != 0
        assert "KeyError: 'a bad batch'" in done.stderr
        assert "Rank 3 failed" in done.stderr, done.stderr[-3000:]
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert len({(tmp_path / str(rank)).read_text() for rank in range(4)}) == 1
    assert (tmp_path / "last.ckpt.residuals").is_dir()
    assert "2 replicas of 2 ranks each" in done.stderr + done.stdout
