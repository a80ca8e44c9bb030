"""Fabric: the numbers of the Trainer, models and optimizers together or apart, checkpoints, launches and failures."""

import copy
import gc
import json
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_sparse import METHODS, FabricSparseDDPStrategy, SparseDDPStrategy, exchange_pending, method
from lightning_sparse import checkpoint as sidecars
from lightning_sparse.strategies.lightning_pytorch import FabricSparseDDPStrategy as ForLightning
from lightning_sparse.strategies.pytorch_lightning import FabricSparseDDPStrategy as ForPytorchLightning
from tests.integration.failing import SOON, caught
from tests.integration.trainers import Loader, Messages, Net, lightning_ranks, trainer
from tests.processes import run_program
from tests.support.tiers import full, in_full, later, one_in, tiers
from tests.support.vectors import flat

ROOT = Path(__file__).parents[2]
ADAMW, SGD = (torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
OF = {"update": ADAMW, "gradient": SGD}
"""The optimizer for each exchange."""
of_both = pytest.mark.parametrize("exchange", ["gradient", "update"])
SPARSE = {"method": "topk", "density": 0.05, "granularity": "model"}
"""One segment for the whole model, because small segments would fall back to dense."""


def launched(strategy: Any, size: int = 2, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def sparse(**options: Any) -> FabricSparseDDPStrategy:
    return FabricSparseDDPStrategy(**{**SPARSE, **options})


def net(exchange: str) -> Net:
    optimizer, options = OF[exchange]
    return Net(optimizer, **options)


def steps(
    fabric: Any,
    model: Any,
    optimizer: Any,
    batches: Any,
    *,
    clip: dict[str, float] | None = None,
    accumulate: int = 1,
) -> None:
    """A training loop, as in Fabric's documentation."""
    for index, batch in enumerate(batches, 1):
        steps_now = index % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not steps_now):
            fabric.backward(model.training_step(batch, index) / accumulate)
        if steps_now:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()


def by_fabric(rank: int, exchange: str, options: dict[str, Any], size: int = 2, **loop: Any) -> dict[str, Any]:
    messages = Messages()
    fabric = launched(sparse(**options), size)
    module = net(exchange)
    with torch.no_grad():
        module.embedding.weight += rank  # is broadcast from rank 0
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    steps(fabric, model, optimizer, Loader(rank, size), **loop)
    (reducer,) = fabric.strategy.reducers
    if reducer.exchanged == "update":
        exchange_pending(optimizer)
    return {
        "weights": module.weights,
        "buffers": torch.cat([buffer.float().reshape(-1) for buffer in module.buffers()]),
        "residual": reducer.state_dict()["elements"].get("residual"),
        "exchanged": reducer.exchanged,
        "steps": reducer.step,
        "messages": [*messages.texts],
    }


def by_trainer(rank: int, exchange: str, options: dict[str, Any], size: int = 2, **loop: Any) -> dict[str, Any]:
    clip = dict(loop.get("clip") or {})
    arguments = {"accumulate_grad_batches": loop.get("accumulate", 1)}
    if clip:
        algorithm = "norm" if "max_norm" in clip else "value"
        arguments |= {"gradient_clip_val": next(iter(clip.values())), "gradient_clip_algorithm": algorithm}
    module = net(exchange)
    run = trainer(SparseDDPStrategy(**{**SPARSE, **options}), size, **arguments)
    run.fit(module, Loader(rank, size))
    reducer = run.strategy.reducer
    buffers = torch.cat([buffer.float().reshape(-1) for buffer in module.buffers()])
    return {"weights": module.weights, "buffers": buffers, "residual": reducer.state_dict()["elements"].get("residual")}


@pytest.mark.parametrize(
    ("exchange", "options", "loop"),
    tiers(
        [
            ("update", {}, {}),
            ("gradient", {}, {}),
            ("update", {"density": None}, {}),
            ("update", {}, {"clip": {"max_norm": 0.05}}),
            ("update", {}, {"clip": {"clip_val": 0.005}}),
            ("update", {"clip_norm": 0.05}, {}),
            ("gradient", {"clip_norm": 0.05}, {}),
            ("gradient", {}, {"clip": {"max_norm": 0.05}}),
            ("gradient", {}, {"clip": {"clip_val": 0.005}}),
            ("update", {}, {"accumulate": 2}),
            ("gradient", {}, {"accumulate": 2}),
            ("update", {"local_steps": 3}, {}),
            ("update", {"overlap": "next_step"}, {}),
            ("update", {"hierarchical": True}, {}),
            ("gradient", {"hierarchical": True}, {}),
            ("gradient", {"method": "powersgd", "density": None}, {}),
            ("update", {"method": "diloco", "density": None, "local_steps": 2}, {}),
        ],
        [("update", {}, {"accumulate": 2}), ("gradient", {"clip_norm": 0.05}, {})],
    ),
    ids=str,
)
def test_weights_are_bit_equal_to_the_trainers(exchange, options, loop):
    def run(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return by_fabric(rank, exchange, options, **loop), by_trainer(rank, exchange, options, **loop)

    ranks = lightning_ranks(2, run)
    for ours, trainers in ranks:
        assert ours["exchanged"] == exchange
        for name, value in trainers.items():
            found = ours[name]
            if isinstance(value, dict):
                assert all(torch.equal(found[key], value[key]) for key in value), name
            else:
                assert (found is None and value is None) or torch.equal(found, value), name
    (first, _), (second, _) = ranks
    assert torch.equal(first["weights"], second["weights"])
    assert not torch.equal(first["weights"], net(exchange).weights)
    warned = [text for text in first["messages"] if "set clip_norm" in text]
    assert len(warned) == (exchange == "gradient" and "clip" in loop)
    assert all("in place of gradient_clip_val, fabric.clip_gradients" in text for text in warned)


@of_both
def test_exchanges_once_for_several_micro_batches(exchange):
    def run(rank: int) -> tuple[int, int]:
        found = by_fabric(rank, exchange, {}, accumulate=4)
        return found["steps"]

    assert lightning_ranks(2, run) == [2, 2]


@full
@of_both
def test_a_density_of_one_is_stock_ddp(exchange):
    """SGD is linear in the gradient, so the mean of updates is the update of the mean, up to rounding."""

    def run(rank: int) -> list[Tensor]:
        weights = []
        for strategy in ("ddp", sparse(density=1.0, exchange=exchange)):
            module = Net(torch.optim.SGD, lr=0.05)
            fabric = launched(strategy)
            model, optimizer = fabric.setup(module, module.configure_optimizers())
            steps(fabric, model, optimizer, Loader(rank, 2))
            weights.append(module.weights)
        return weights

    for stock, ours in lightning_ranks(2, run):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)  # eight steps, each rounded to 2^-24


# Models and optimizers, together and apart:


def set_up_apart(fabric: Any, module: Any) -> tuple[Any, Any]:
    model = fabric.setup_module(module)
    return model, fabric.setup_optimizers(module.configure_optimizers())


@later
@one_in(2)
@of_both
def test_set_up_apart_is_the_same_as_together(exchange):
    def run(rank: int) -> list[Tensor]:
        weights = []
        for set_up in (lambda fabric, module: fabric.setup(module, module.configure_optimizers()), set_up_apart):
            module = net(exchange)
            fabric = launched(sparse(exchange=exchange))
            model, optimizer = set_up(fabric, module)
            steps(fabric, model, optimizer, Loader(rank, 2))
            weights.append(module.weights)
        return weights

    (first, apart), (other, _) = lightning_ranks(2, run)
    assert torch.equal(first, apart)
    assert torch.equal(first, other)


def test_set_up_apart_needs_the_exchange():
    def run(rank: int) -> Any:
        fabric = launched("topk_ddp")
        frozen = fabric.setup_module(net("update").requires_grad_(False))
        assert not isinstance(frozen._forward_module, nn.parallel.DistributedDataParallel)
        return caught(lambda: fabric.setup_module(net("update")))

    for kind, text, seconds in lightning_ranks(2, run):
        assert kind == "RuntimeError"
        assert "model, optimizer = fabric.setup(model, optimizer)" in text
        assert "FabricSparseDDPStrategy(..., exchange='update') or exchange='gradient'" in text
        assert seconds < SOON


class Two(nn.Module):
    """Two layers for two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())

    @property
    def weights(self) -> Tensor:
        return flat(self)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), 0.01) for part in (self.first, self.second)]


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(8, 16, generator=generator)).pow(2).mean()


@later
def test_several_optimizers_of_a_model():
    def run(rank: int) -> list[Tensor]:
        weights = []
        for alone, together in ((0, True), (1, False), (2, False), (1, True)):
            fabric, module = launched(sparse(exchange="update")), Two()
            for _ in range(alone):
                model = fabric.setup_module(module)
            if together:
                model, *optimizers = fabric.setup(module, *module.optimizers())
            else:
                assert fabric.strategy.reducers == []
                optimizers = fabric.setup_optimizers(*module.optimizers())
            (reducer,) = fabric.strategy.reducers
            for step in range(4):
                fabric.backward(loss_of(model, rank, step))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert reducer.exchanged == "update"
            weights.append(module.weights)
        return weights

    (first, *apart), (other, *_) = lightning_ranks(2, run)
    assert all(torch.equal(first, weights) for weights in apart)
    assert torch.equal(first, other)


def test_an_optimizer_that_is_missing_or_foreign():
    def run(rank: int) -> dict[str, tuple[str, str, float]]:
        fabric, module = launched(sparse(exchange="update")), Two()
        one, two = module.optimizers()
        found = {"together": caught(lambda: fabric.setup(module, one))}
        model = fabric.setup_module(module)
        one = fabric.setup_optimizers(one)
        fabric.backward(loss_of(model, rank, 0))
        found["step"] = caught(one.step)
        found["foreign"] = caught(lambda: fabric.setup_optimizers(Two().optimizers()[0]))
        for name, exchange in (("foreign update", "update"), ("foreign gradient", "gradient")):
            other = launched(sparse(exchange=exchange))
            found[name] = caught(lambda other=other: other.setup(Two(), torch.optim.SGD(Two().parameters(), 0.1)))
        late = torch.optim.lr_scheduler.StepLR(two, 1)
        found["scheduler"] = caught(lambda: launched(sparse()).setup(module, two, late))
        fabric.setup_optimizers(two)
        found["third"] = caught(lambda: fabric.setup_optimizers(torch.optim.SGD(module.parameters(), 0.1)))
        return found

    for found in lightning_ranks(2, run):
        expected = {
            "together": ("ValueError", "fabric.setup(model, first, second)"),
            "step": ("ValueError", "'second.weight', 'second.bias' require gradients but are in no optimizer"),
            "foreign": ("ValueError", "that steps no parameter of a model that was set up"),
            "foreign update": ("ValueError", "fabric.setup got a SGD that steps no parameter of the Two"),
            "foreign gradient": ("ValueError", "fabric.setup got a SGD that steps no parameter of the Two"),
            "scheduler": (
                "TypeError",
                "got a StepLR in the place of an optimizer. After the model, give only optimizers. If it is a sch",
            ),
            "third": ("ValueError", "are exchanged for other optimizers already"),
        }
        for name, (kind, text) in expected.items():
            assert found[name][0] == kind, found[name]
            assert text in found[name][1], name
            assert found[name][2] < SOON


class Parts(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.generator, self.discriminator = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))


def play(fabric: Any, rank: int, numbers: range, generator: Any, discriminator: Any, first: Any, second: Any) -> None:
    for step in numbers:
        noise = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        fabric.backward((discriminator(generator(noise).detach()) - discriminator(noise)).mean())
        second.step()
        second.zero_grad()
        with fabric.no_backward_sync(discriminator):
            fabric.backward(-discriminator(generator(noise)).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()


@one_in(2)
@of_both
def test_several_models_and_a_checkpoint_of_all(exchange, tmp_path):
    kind, options = OF[exchange]

    def set_up(rank: int) -> tuple[Any, ...]:
        fabric, parts = launched(sparse()), Parts()
        generator, first = fabric.setup(parts.generator, kind(parts.generator.parameters(), **options))
        discriminator, second = fabric.setup(parts.discriminator, kind(parts.discriminator.parameters(), **options))
        return fabric, generator, discriminator, first, second

    def run(rank: int) -> tuple[Tensor, Tensor]:
        results = []
        for resumed in (False, True):
            fabric, *objects = set_up(rank)
            assert [reducer.exchanged for reducer in fabric.strategy.reducers] == [exchange] * 2
            state = dict(zip(("g", "d", "first", "second"), objects, strict=True))
            if resumed:
                fabric.load(tmp_path / "gan.ckpt", state)
            else:
                play(fabric, rank, range(3), *objects)
                fabric.save(tmp_path / "gan.ckpt", state)
            play(fabric, rank, range(3, 6), *objects)
            results.append(torch.cat([p.detach().flatten() for model in objects[:2] for p in model.parameters()]))
        return tuple(results)

    (first, resumed), (other, _) = lightning_ranks(2, run)
    assert torch.equal(first, resumed)
    assert torch.equal(first, other)
    assert len([*(tmp_path / "gan.ckpt.residuals").iterdir()]) == 4


def rolled_back(rank: int, folder: Path, how: str) -> list[Any]:
    """One optimizer steps two models; a checkpoint is loaded later."""
    fabric, parts = launched(sparse(exchange="gradient")), Parts()
    models = [parts.generator, nn.Linear(16, 16)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], 0.05)
    if how == "apart":
        first, second = map(fabric.setup_module, models)
        ours = fabric.setup_optimizers(optimizer)
    else:
        first, ours = fabric.setup(models[0], optimizer)
        second = fabric.setup(models[1], optimizer)[0] if how == "both" else fabric.setup_module(models[1])

    def train(numbers: range) -> list[Tensor]:
        for step in numbers:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            ours.zero_grad()
            fabric.backward((second(first(x)) - x.roll(1, 1)).square().mean())
            ours.step()
        states = [reducer.state_dict()["elements"]["residual"] for reducer in fabric.strategy.reducers]
        return [*map(flat, models), *(torch.cat([x.flatten() for x in state.values()]) for state in states)]

    state = {"first": first, "second": second, "optimizer": ours}
    before = train(range(3))
    fabric.save(folder / "a.ckpt", state)
    later = train(range(3, 6))
    fabric.load(folder / "a.ckpt", state)
    pairs = [*zip(train(range(0)), before, strict=True), *zip(train(range(3, 6)), later, strict=True)]
    return [torch.equal(ours, theirs) and bool(ours.any()) for ours, theirs in pairs]


@pytest.mark.parametrize("how", tiers(["apart", "both", "first"], ["both"]))
def test_a_checkpoint_has_the_residuals_of_all_models_of_an_optimizer(how, tmp_path):
    assert lightning_ranks(2, rolled_back, tmp_path, how) == [[True] * 8] * 2


def in_folds(rank: int, folder: Path, exchange: str) -> list[str]:
    kind, options = OF[exchange]
    fabric, kept, errors = launched(sparse(exchange=exchange)), [], []
    for fold in range(3):
        module = Parts().generator
        model, optimizer = fabric.setup(module, kind(module.parameters(), **options))
        kept += [model] if rank == 0 else []
        del module
        for step in range(2):
            fabric.backward(model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer}
        fabric.save(folder / f"{fold}.ckpt", state)
        errors.append(caught(lambda state=state, fold=fold: fabric.load(folder / f"{fold}.ckpt", state))[1])
    return errors


@pytest.mark.parametrize("exchange", tiers(["update", "gradient"], ["update"]))
def test_models_of_earlier_folds_may_be_alive_on_one_rank_only(exchange, tmp_path):
    assert lightning_ranks(2, in_folds, tmp_path, exchange) == [["", "", ""]] * 2


@full
def test_a_model_is_set_up_again():
    """The new call replaces the earlier one, as with attach_updates."""

    def run(rank: int) -> Any:
        fabric, module = launched(sparse()), Two()
        model, first = fabric.setup(module, torch.optim.AdamW(module.parameters(), 0.01))
        fabric.backward(loss_of(model, rank, 0))
        first.step()
        model, second = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
        fabric.backward(loss_of(model, rank, 1))
        second.step()
        model, third = fabric.setup(module, torch.optim.AdamW(module.parameters(), 0.01))
        fabric.backward(loss_of(model, rank, 2))
        third.step()
        return module.weights, caught(first.step), fabric.strategy.reducers[-1].exchanged

    (weights, error, exchanged), (other, *_) = lightning_ranks(2, run)
    assert torch.equal(weights, other)
    assert exchanged == "update"
    assert error[0] == "RuntimeError"
    assert "the model or a part of it was attached anew" in error[1]


@full
@of_both
def test_a_compiled_model(exchange):
    def run(rank: int) -> list[Tensor]:
        weights = []
        for compiled in (False, True):
            fabric, module = launched(sparse()), Two()
            kind, options = OF[exchange]
            given = torch.compile(module, backend="eager") if compiled else module
            model, optimizer = fabric.setup(given, kind(module.parameters(), **options))
            for step in range(3):
                fabric.backward(loss_of(model, rank, step))
                optimizer.step()
                optimizer.zero_grad()
            (reducer, *_) = fabric.strategy.reducers[-1:]
            assert (reducer.exchanged, reducer.step) == (exchange, 3)
            weights.append(module.weights)
        return weights

    (first, compiled), (other, _) = lightning_ranks(2, run)
    assert torch.equal(first, compiled)
    assert torch.equal(first, other)


# Checkpoints:


def resumable(rank: int, size: int, exchange: str, folder: Path, resume: str = "", **options: Any) -> dict[str, Any]:
    """Train six steps, with a checkpoint after three; or the last three, from a checkpoint."""
    messages, lines = Messages(), []
    fabric = launched(sparse(**options), size)
    fabric.strategy.inform = lines.append
    module = net(exchange)
    if resume:
        torch.nn.init.zeros_(module.embedding.weight)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    state, rest = {"model": model, "optimizer": optimizer, "step": 0}, {}
    if resume:
        rest = fabric.load(folder / resume, state)
    begun = fabric.strategy.reducers[0].state_dict()["elements"]["residual"]
    batches = Loader(rank, size).batches[:6]
    for step in range(state["step"], 6):
        if step == 3 and not resume:
            fabric.save(folder / "half.ckpt", {**state, "step": 3, "more": "kept"})
            saved = fabric.strategy.reducers[0].state_dict()["elements"]["residual"]
        steps(fabric, model, optimizer, batches[step : step + 1])
    if exchange == "update":
        exchange_pending(optimizer)
    return {
        "weights": module.weights,
        "residual": begun if resume else saved,
        "step": fabric.strategy.reducers[0].step,
        "messages": messages.texts,
        "lines": lines,
        "rest": rest,
    }


@pytest.mark.parametrize(
    ("exchange", "options"),
    tiers(
        [
            ("gradient", {}),
            ("update", {}),
            ("update", {"density": None}),
            ("update", {"local_steps": 2}),
            ("update", {"overlap": "next_step"}),
        ],
        [("gradient", {}), ("update", {"overlap": "next_step"})],
    ),
    ids=str,
)
def test_resumes_bit_for_bit(exchange, options, tmp_path):
    def run(rank: int) -> Any:
        return [resumable(rank, 2, exchange, tmp_path, resume, **options) for resume in ("", "half.ckpt")]

    for whole, resumed in lightning_ranks(2, run):
        assert torch.equal(whole["weights"], resumed["weights"])
        assert resumed["step"] == whole["step"]
        assert resumed["rest"] == {"more": "kept"}
        assert resumed["messages"] == []
    info = torch.load(tmp_path / "half.ckpt", weights_only=True)[sidecars.KEY]["optimizer"]
    names = {file.name for file in (tmp_path / "half.ckpt.residuals").iterdir()}
    assert names == {sidecars.name(info["tag"], rank, 2) for rank in range(2)}


@one_in(2)
@of_both
def test_another_number_of_ranks_keeps_the_mean_of_residuals(exchange, tmp_path):
    before = lightning_ranks(3, resumable, 3, exchange, tmp_path)
    after = lightning_ranks(2, resumable, 2, exchange, tmp_path, "half.ckpt")
    for name in before[0]["residual"]:
        means = [sum(rank["residual"][name].double() for rank in ranks) / len(ranks) for ranks in (before, after)]
        torch.testing.assert_close(*means, rtol=1e-6, atol=1e-7)  # rounded to fp32 once
    assert torch.equal(after[0]["weights"], after[1]["weights"])


@one_in(2)
@of_both
def test_checkpoints_of_stock_ddp_and_for_it(exchange, tmp_path):
    def run(rank: int) -> Any:
        module = net(exchange)
        fabric = launched("ddp")
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        state = {"model": model, "optimizer": optimizer, "step": 3}
        steps(fabric, model, optimizer, Loader(rank, 2).batches[:3])
        fabric.save(tmp_path / "stock.ckpt", state)
        from_stock = resumable(rank, 2, exchange, tmp_path, "stock.ckpt")
        resumable(rank, 2, exchange, tmp_path)
        rest = fabric.load(tmp_path / "half.ckpt", state)
        return from_stock, [*rest]

    ranks = lightning_ranks(2, run)
    for from_stock, rest in ranks:
        assert all(not residual.any() for residual in from_stock["residual"].values())
        assert rest == ["more", sidecars.KEY]
    said = [
        any("holds no residuals: they start at 0" in line for line in from_stock["lines"]) for from_stock, _ in ranks
    ]
    assert said == [True, False]
    assert torch.equal(ranks[0][0]["weights"], ranks[1][0]["weights"])


@later
def test_messages_about_checkpoints(tmp_path):
    """Rank 0 says it if there are no residuals; every rank raises an error for a file that is damaged or missing."""

    def run(rank: int) -> Any:
        lines: list[str] = []
        fabric = launched(sparse())
        fabric.strategy.inform = lines.append
        module = net("update")
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        steps(fabric, model, optimizer, Loader(rank, 2).batches[:2])
        lines.clear()
        fabric.save(tmp_path / "weights.ckpt", {"model": model})
        fabric.save(tmp_path / "both.ckpt", {"model": model, "optimizer": optimizer})
        state = {"model": model, "optimizer": optimizer}
        found = [caught(lambda: fabric.load(tmp_path / f"none{rank or ''}.ckpt", state))]
        found += [caught(lambda: fabric.load(tmp_path / "weights.ckpt", state))]
        fabric.load(tmp_path / "weights.ckpt", {"model": model})
        if rank == 0:
            (file,) = (tmp_path / "both.ckpt.residuals").glob("*rank1*")
            file.write_bytes(file.read_bytes()[:-100])
        fabric.barrier()
        found += [caught(lambda: fabric.load(tmp_path / "both.ckpt", state))]
        full_checkpoint = fabric.load(tmp_path / "both.ckpt")
        return lines, found, [*full_checkpoint]

    (lines, found, items), (silent, others, _) = lightning_ranks(2, run)
    assert len(lines) == 2
    assert "weights.ckpt' gets no residuals, as it has no optimizer" in lines[0]
    assert "both.ckpt') without a state restores nothing" in lines[1]
    assert silent == []
    assert items == ["model", "optimizer", sidecars.KEY]
    for kinds, text in zip(zip(found, others, strict=True), ["none", "'optimizer'", "is damaged"], strict=True):
        for kind, message, seconds in kinds:
            assert kind in ("FileNotFoundError", "KeyError", "ValueError")
            assert text in message
            assert seconds < SOON
    assert not (tmp_path / "weights.ckpt.residuals").exists()


@pytest.mark.parametrize(
    ("exchange", "method"),
    tiers([("update", "topk"), ("gradient", "topk"), ("gradient", "dense")], [("update", "topk")]),
)
def test_a_load_before_setup_is_warned_about(exchange, method, tmp_path):
    """Of dense averages there are no residuals, and no warning."""

    def run(rank: int) -> Any:
        options = {"exchange": exchange, "method": method, "density": None if method == "dense" else 0.05}
        fabric, module = launched(sparse(**options)), net(exchange)
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        fabric.load(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        fabric, module, messages = launched(sparse(**options)), net(exchange), Messages()
        fabric.load(tmp_path / "a.ckpt", {"model": module, "optimizer": module.configure_optimizers()})
        return messages.texts

    first, other = lightning_ranks(2, run)
    assert other == []
    if method == "dense":
        assert first == []
    else:
        [text] = first
        name = OF[exchange][0].__name__
        assert f"a.ckpt' are not loaded, because its {name} is not set up: call fabric.setup" in text


@full
def test_one_rank_alone_loads_a_raw_state(tmp_path):
    """As with stock ddp. Load it on all ranks, or before setup, which broadcasts rank 0's weights."""

    def run(rank: int) -> bool:
        fabric, module = launched(sparse()), Two()
        model, _ = fabric.setup(module, torch.optim.AdamW(module.parameters(), 0.01))
        if rank == 1:
            torch.save({name: x + 1 for name, x in module.state_dict().items()}, tmp_path / "raw.pt")
            fabric.load_raw(tmp_path / "raw.pt", model)
        return torch.equal(module.weights, Two().weights + rank)

    assert lightning_ranks(2, run) == [True, True]


@one_in(2)
@of_both
def test_a_foreign_optimizer_is_an_error_on_all_ranks(exchange, tmp_path):
    def run(rank: int) -> Any:
        resumable(rank, 2, exchange, tmp_path)
        other = "gradient" if exchange == "update" else "update"
        fabric, module = launched(sparse()), net(other)
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        return caught(lambda: fabric.load(tmp_path / "half.ckpt", {"model": model, "optimizer": optimizer}))

    for kind, text, _ in lightning_ranks(2, run):
        assert kind == "ValueError"
        assert "Resume with the optimizers that wrote them" in text
        assert "fabric.load(" in text


@later
def test_a_change_of_the_checkpoint_takes_precedence_over_sidecar_files(tmp_path):
    def run(rank: int) -> Any:
        lines: list[str] = []
        fabric, module = launched(sparse()), net("update")
        fabric.strategy.inform = lines.append
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        steps(fabric, model, optimizer, Loader(rank, 2).batches[:2])
        state = {"model": model, "optimizer": optimizer}
        fabric.save(tmp_path / "x.ckpt", state)
        content = torch.load(tmp_path / "x.ckpt", weights_only=True) if rank == 0 else {}
        if rank == 0:
            content["optimizer"]["state"][0]["exp_avg"].zero_()
            torch.save(content, tmp_path / "x.ckpt")
        fabric.barrier()
        lines.clear()
        before = copy.deepcopy(optimizer.state_dict()["state"])
        fabric.load(tmp_path / "x.ckpt", state)
        return before, optimizer.state_dict()["state"], lines

    ranks = lightning_ranks(2, run)
    for before, after, _ in ranks:
        assert not after[0]["exp_avg"].any()
        assert torch.equal(before[1]["exp_avg"], after[1]["exp_avg"])  # of each rank
        assert torch.equal(before[0]["exp_avg_sq"], after[0]["exp_avg_sq"])
    assert not torch.equal(ranks[0][1][1]["exp_avg"], ranks[1][1][1]["exp_avg"])
    (text,), silent = (lines for *_, lines in ranks)
    assert "optimizer.state.0.exp_avg" in text
    assert silent == []


# Pending exchanges:


@later
@pytest.mark.parametrize("options", tiers([{"local_steps": 3}, {"overlap": "next_step"}], [{"overlap": "next_step"}]))
def test_an_exchange_that_nobody_completes_is_warned_about(options):
    def run(rank: int) -> list[list[str]]:
        found = []
        for completes in (True, False):
            messages = Messages()
            fabric, module = launched(sparse(**options)), net("update")
            model, optimizer = fabric.setup(module, module.configure_optimizers())
            steps(fabric, model, optimizer, Loader(rank, 2).batches[:4])
            if completes:
                exchange_pending(optimizer)
            del fabric, module, model, optimizer
            gc.collect()
            found.append(messages.texts)
        return found

    (completed, pending), others = lightning_ranks(2, run)
    assert completed == []
    assert len(pending) == 1
    assert "The last updates of AdamW were not exchanged" in pending[0]
    assert others == [[], []]


# Failures:


def test_ranks_with_other_settings():
    def run(rank: int) -> list[Any]:
        def with_options(kind: Any = SGD, **options: Any) -> Callable[[], Any]:
            module = Net(kind[0], **kind[1])
            return lambda: launched(sparse(**options)).setup(module, module.configure_optimizers())

        return [
            caught(with_options(exchange="update" if rank else "gradient")),
            caught(with_options(ADAMW if rank else SGD)),
            caught(with_options(density=0.1 if rank else 0.2)),
            caught(with_options(ADAMW, density=0.1 if rank else 0.2)),
            caught(with_options(ADAMW)),
        ]

    for *found, last in lightning_ranks(2, run):
        texts = [
            "in exchange: rank 0 has",
            "in exchange: rank 0 has",
            "density=0.2 and density=0.1",
            "density=0.2 and density",
        ]
        for (kind, message, seconds), text in zip(found, texts, strict=True):
            assert kind == "RankFailure"
            assert text in message
            assert seconds < SOON
        assert last[0] == "no error"


@one_in(2)
@of_both
def test_an_error_on_one_rank_before_the_exchange_is_reported_to_all(exchange):
    def run(rank: int) -> Any:
        fabric, module = launched("topk_ddp"), net(exchange)
        wrapped = nn.parallel.DistributedDataParallel(module)
        return caught(lambda: fabric.setup(wrapped if rank else module, module.configure_optimizers()))

    first, second = lightning_ranks(2, run)
    assert first[0] == "RankFailure"
    assert "Rank 1 cannot attach: TypeError" in first[1]
    assert second[0] == "TypeError"
    assert "with a DistributedDataParallel (the model itself)" in second[1]
    assert max(first[2], second[2]) < SOON


def test_sharded_models_are_an_error():
    def run(rank: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        module = Two()
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        fabric = launched("topk_ddp")
        return caught(lambda: fabric.setup(module, torch.optim.AdamW(module.parameters(), 0.1)))

    for kind, text, _ in lightning_ranks(2, run):
        assert kind == "TypeError"
        assert "FSDPModule" in text
        assert "strategy='topk_hsdp'" in text


@of_both
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks(exchange):
    def run(rank: int) -> Any:
        fabric, module = launched(sparse()), net(exchange)
        model, optimizer = fabric.setup(module, module.configure_optimizers())

        def train() -> None:
            for index, batch in enumerate(Loader(rank, 2).batches[:4]):
                loss = model.training_step(batch, index)
                fabric.backward(loss * float("nan") if rank == index == 1 else loss)
                optimizer.step()
                optimizer.zero_grad()

        return caught(train)

    for kind, text, seconds in lightning_ranks(2, run):
        assert kind == "NonFiniteGradient"
        assert "rank 1" in text
        assert seconds < SOON


@one_in(2)
@of_both
def test_a_step_may_be_skipped(exchange):
    """With on_nonfinite="skip" all ranks skip the gradients of a step; with updates the affected rank skips its own."""

    def run(rank: int) -> Any:
        fabric, module = launched(sparse(on_nonfinite="skip")), net(exchange)
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        before = module.weights
        for index, batch in enumerate(Loader(rank, 2).batches[:4]):
            loss = model.training_step(batch, index)
            fabric.backward(loss * float("inf") if rank == index == 1 else loss)
            optimizer.step()
            optimizer.zero_grad()
        return module.weights, fabric.strategy.reducers[0].skipped, not torch.equal(module.weights, before)

    (first, skipped, moved), (second, *_) = lightning_ranks(2, run)
    assert moved
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert skipped == (exchange == "gradient")


@one_in(2)
@of_both
def test_a_gradient_scaler_skips_steps(exchange):
    def run(rank: int) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
        fabric = launched(sparse(), plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
        module = net(exchange)
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        for index, batch in enumerate(Loader(rank, 2).batches[:4]):
            loss = model.training_step(batch, index).float()
            fabric.backward(loss * float("inf") if rank == index == 1 else loss)
            if exchange == "update":
                fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        return module.weights, fabric.strategy.reducers[0].skipped, scaler.get_scale()

    (first, skipped, scale), (second, _, other_scale) = lightning_ranks(2, run)
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert skipped == (exchange == "gradient")
    assert other_scale == 2.0**7
    assert scale == (2.0**7 if exchange == "gradient" else 2.0**8)


def test_a_scaler_of_one_of_several_models_is_an_error():
    """Residuals of the other model would get its loss scale."""

    def run(rank: int) -> list[Any]:
        fabric = launched(sparse())
        modules = [net("gradient") for _ in range(2)]
        models, optimizers = zip(*(fabric.setup(each, each.configure_optimizers()) for each in modules), strict=True)
        scaler, batch = torch.amp.GradScaler("cpu"), Loader(rank, 2).batches[0]
        fabric.backward(models[1].training_step(batch, 0))
        optimizers[1].step()
        return caught(lambda: scaler.scale(models[0].training_step(batch, 0)).backward())

    for kind, text, _ in lightning_ranks(2, run):
        assert kind == "RuntimeError"
        assert "A GradScaler of your own is not supported while several models train" in text


@full
def test_on_a_node_each_device_clips_its_own_gradient():
    """Before the step, the two ranks of the only node have not averaged their gradients: the factor is √2."""

    def run(rank: int) -> Any:
        told, norms = list[str](), []
        fabric = launched(sparse(hierarchical=True, exchange="update"))
        fabric.strategy.inform = told.append
        module = net("update")
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        for batch in Loader(rank, 2):
            fabric.backward(model.training_step(batch, 0))
            fabric.clip_gradients(model, optimizer, max_norm=1e-3)
            norms.append(nn.utils.get_total_norm([x.grad for x in module.parameters()]).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms, told

    (norms, told), (others, silent) = lightning_ranks(2, run)
    assert [*norms, *others] == pytest.approx([1e-3 * math.sqrt(2)] * len([*norms, *others]), rel=1e-3)  # norm + 1e-6
    assert [("0.00141421 in place of 0.001" in text) for text in told if "clips" in text] == [True]
    assert not any("clips" in text for text in silent)


def test_clip_norm_with_a_scaler_points_to_clip_gradients():
    def run(rank: int) -> Any:
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
        fabric, module = launched(sparse(clip_norm=1.0), plugins=plugin), net("update")
        return caught(lambda: fabric.setup(module, module.configure_optimizers()))

    for kind, text, _ in lightning_ranks(2, run):
        assert kind == "ValueError"
        assert "call fabric.clip_gradients instead" in text


def looks_first(rank: int, folder: Path) -> list[bool]:
    """Forward passes without backward passes, and a model that is frozen at a save."""
    fabric, parts = launched(sparse(exchange="gradient")), Parts()
    models = [parts.generator, nn.Linear(16, 16)]
    both = torch.optim.SGD([param for model in models for param in model.parameters()], 0.05)
    first, second = map(fabric.setup_module, models)
    optimizer = fabric.setup_optimizers(both)
    x = torch.ones(8, 16)
    first(x).sum().item()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = first(x).square().mean()
        fabric.backward(loss)
        return loss

    for _ in range(2):
        second(x).sum().item()
        optimizer.step(closure)
    state = {"first": first, "second": second, "optimizer": optimizer}
    models[0].requires_grad_(False)
    fabric.save(folder / "a.ckpt", state)
    models[0].requires_grad_(True)
    residual = fabric.strategy.reducers[0].state_dict()["elements"]["residual"]
    optimizer.step(closure)
    fabric.load(folder / "a.ckpt", state)
    loaded = fabric.strategy.reducers[0].state_dict()["elements"]["residual"]
    return [torch.equal(loaded[name], residual[name]) for name in residual]


@later
def test_a_forward_pass_needs_no_backward_pass(tmp_path):
    assert lightning_ranks(2, looks_first, tmp_path) == [[True, True]] * 2


@pytest.mark.parametrize("bucket_cap_mb", tiers([0.0005, 25], [25]))
def test_a_model_of_which_a_part_gets_no_gradient(bucket_cap_mb):
    class Part(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(x[:, :1].expand(-1, 24))

    def run(rank: int) -> Any:
        fabric, module = launched(sparse(exchange="gradient", bucket_cap_mb=bucket_cap_mb)), Part()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))

        def train() -> None:
            for step in range(3):
                fabric.backward(loss_of(model, rank, step))
                optimizer.step()

        return *caught(train), torch.equal(module.weights, Part().weights)

    for kind, text, seconds, is_unchanged in lightning_ranks(2, run):
        assert is_unchanged
        assert kind == "RuntimeError"
        assert "find_unused_parameters" in text
        assert seconds < SOON


@pytest.mark.parametrize("buffers", tiers([False, True], [True]))
@pytest.mark.parametrize("exchange", ["update", *in_full("gradient")])
def test_a_rank_that_dies(exchange, buffers):
    def run(rank: int) -> Any:
        fabric, module = launched(sparse()), Two()
        if buffers:  # DistributedDataParallel broadcasts them in the forward pass
            module.second = nn.Sequential(module.second, nn.BatchNorm1d(4))
        model, optimizer = fabric.setup(module, OF[exchange][0](module.parameters(), **OF[exchange][1]))

        def train() -> None:
            for step in range(8):
                if rank == 1 and step == 2:
                    os._exit(1)
                fabric.backward(loss_of(model, rank, step))
                optimizer.step()
                optimizer.zero_grad()

        return caught(train)

    first, second = lightning_ranks(2, run)
    assert second is None
    assert first[0] == ("RuntimeError" if buffers and exchange == "gradient" else "RankFailure")
    assert "No answer from rank 1" in first[1]
    assert first[2] < SOON


def test_one_rank_is_warned_about():
    def run(rank: int) -> list[str]:
        messages = Messages()
        fabric, module = launched("topk_ddp", 1), net("update")
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        steps(fabric, model, optimizer, Loader(0, 1).batches[:2])
        return messages.texts

    ((text, *_),) = lightning_ranks(1, run)
    assert "FabricSparseDDPStrategy on one rank sends nothing to anybody" in text


def test_setup_without_launch_is_lightnings_error():
    fabric, module = Fabric(accelerator="cpu", devices=2, strategy="topk_ddp"), net("update")
    with pytest.raises(RuntimeError, match=r"you must call `\.launch\(\)`"):
        fabric.setup(module, module.configure_optimizers())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ddp_comm_hook": 1}, r"FabricSparseDDPStrategy\(ddp_comm_hook=\.\.\.\)"),
        ({"density_warmup": [0.5]}, "density_warmup_steps"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FabricSparseDDPStrategy("topk", **options)


# Lightning's two names, registries and launches:


@pytest.mark.parametrize("package", [lightning_fabric, lightning.fabric])
def test_names(package):
    registry = package.strategies.STRATEGY_REGISTRY
    assert set(pytorch_lightning.strategies.StrategyRegistry) >= {*METHODS}
    for name in METHODS:
        for start in ("", "_spawn", "_fork", "_notebook"):
            for end in ("", "_find_unused_parameters_true", "_find_unused_parameters_false"):
                assert f"{name}_ddp{start}{end}" in registry
    for alias in ("topk", "ddp_topk"):
        strategy = package.Fabric(strategy=alias, accelerator="cpu", devices=2).strategy
        assert isinstance(strategy, package.strategies.DDPStrategy)
        assert strategy._options.method == method("topk")
    strategy = registry.get("topk_ddp_fork_find_unused_parameters_true")
    assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs["find_unused_parameters"] is True


@pytest.mark.parametrize("made_for", [ForPytorchLightning, ForLightning])
@pytest.mark.parametrize("package", [lightning_fabric, lightning.fabric])
def test_a_strategy_goes_with_both_of_lightnings_names(made_for, package):
    strategy = made_for("topk", density=0.1, find_unused_parameters=True)
    fabric = package.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    assert fabric.strategy is strategy
    assert type(strategy).__mro__[-3].__module__.startswith(f"{package.__name__}.")
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert strategy._options.density == 0.1


def test_copies():
    strategy = FabricSparseDDPStrategy("topk", density=0.1)
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied._options.method == method("topk", density=0.1)
        assert copied._checkpoints.strategy is copied


SCRIPT = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
import torch
package, strategy, folder, kind = sys.argv[1:]
Fabric = importlib.import_module(package).Fabric
import lightning_sparse

def train(fabric):
    torch.manual_seed(fabric.global_rank)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = getattr(torch.optim, kind.split()[0])(model.parameters(), 0.01)
    model, optimizer = fabric.setup(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
    for step, (x,) in enumerate(fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=8))):
        if "pending" in kind:
            globals()["kept"] = model  # until the interpreter exits
        if "fails" in kind and fabric.global_rank == 1 and step == 2:
            raise KeyError("a bad batch")
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    reducer, = fabric.strategy.reducers
    weights = [float(param.double().sum()) for param in model.parameters()]
    seen = {"weights": weights, "steps": reducer.step, "exchanged": reducer.exchanged}
    with open(f"{folder}/rank{fabric.global_rank}.json", "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    if "pending" in kind:
        strategy = lightning_sparse.FabricSparseDDPStrategy("topk", overlap="next_step")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    if any(end in sys.argv[2] for end in ("spawn", "fork", "notebook")):
        fabric.launch(train)
    else:
        fabric.launch()
        train(fabric)
"""


def run_script(folder: Path, package: str, strategy: str, kind: str, *launcher: str) -> Any:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), package, strategy, str(folder), kind]
    return run_program(command, {**os.environ, "PYTHONPATH": str(ROOT)}, 180)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


@full
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("package", "strategy", "launcher"),
    [
        ("lightning_fabric", "topk_ddp", ()),
        ("lightning.fabric", "topk_ddp", TORCHRUN),
        ("lightning_fabric", "topk_ddp_spawn", ()),
        ("lightning.fabric", "topk_ddp_fork", ()),
        ("lightning_fabric", "topk_ddp_notebook", ()),
    ],
)
def test_launches(package, strategy, launcher, optimizer, tmp_path):
    done = run_script(tmp_path, package, strategy, optimizer, *launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["steps"] == 4
    assert first["exchanged"] == ("update" if optimizer == "AdamW" else "gradient")
    assert "Chosen by the optimizer" in done.stderr + done.stdout


@full
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_an_error_that_ends_one_rank_is_named_by_the_others(optimizer, tmp_path):
    """Torchrun kills the others only after its next look, so they report the cause first."""
    done = run_script(tmp_path, "lightning_fabric", "topk_ddp", f"{optimizer} fails", *TORCHRUN)
    assert done.returncode != 0
    assert "KeyError: 'a bad batch'" in done.stderr
    assert "Rank 1 failed" in done.stderr


@full
def test_a_program_that_ends_with_a_pending_exchange_says_so(tmp_path):
    done = run_script(tmp_path, "lightning_fabric", "topk_ddp", "AdamW pending", *TORCHRUN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("The last updates of AdamW were not exchanged") == 1
