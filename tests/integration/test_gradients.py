"""Gradients that appear and disappear, and everything else that happens between backward and step.

Each form of training runs with stock ddp, at density 1, and at density 0.1. At density 1 it must equal stock ddp bit by
bit. At density 0.1 it runs with topk and one other method in turn: nothing may be lost, and all ranks must agree.
"""

import copy
import gc
import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_sparse import Comm, Reducer, SparseDDPStrategy, attach, attach_updates, simulate
from lightning_sparse.callbacks import CommunicationMonitor, GradientDistribution
from lightning_sparse.hooks import rates
from lightning_sparse.strategies import FabricSparseDDPStrategy
from tests.integration.trainers import (
    Gan,
    Loader,
    Messages,
    Net,
    Unfreezing,
    Watch,
    keeps_all,
    lightning_ranks,
    lost,
    same,
    sends_all,
    strategy,
    trainer,
)
from tests.processes import run_ranks
from tests.support.representatives import OTHERS, REPRESENTATIVES, in_turn
from tests.support.tiers import full, in_full, later, tiers

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
LAYERS = {"granularity": "layer", "bucket_cap_mb": 0.001}
FIND = {"find_unused_parameters": True}


class Scheduled(Net):
    """Has a schedule: the learning rate is a function of the step."""

    def __init__(self, rate: Callable[[int], float], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rate = rate

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Groups(Net):
    """Two parameter groups, one of them at rest."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.embedding.parameters(), "lr": 0.0},
            {"params": self.layers[0].parameters(), "lr": 0.5, "weight_decay": 0.1},
            {"params": self.layers[1:].parameters()},
        ]
        return self.optimizer(groups, **self.options)


class Tied(Net):
    """The head, which shares its weight with the embedding, is registered first."""

    def __init__(self) -> None:
        super().__init__()
        embedding, layers = self.embedding, self.layers
        del self.embedding, self.layers
        self.head = nn.Linear(8, 16, bias=False)
        self.embedding, self.layers = embedding, layers
        self.head.weight = embedding.weight

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) + nn.functional.cross_entropy(
            self.head(self.embedding(batch[0]).tanh()), batch[0]
        )


class ChannelsLast(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 2 * 36)
        self.layers = nn.Sequential(
            nn.Unflatten(1, (2, 6, 6)), nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4)
        ).to(memory_format=torch.channels_last)


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.embedding(batch[0])
        for part in (self.layers[:2], self.layers[2:]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(x, batch[1])


class Compiled(Net):
    """Its layers are compiled before the module is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.compile(self.layers, backend="aot_eager")


class Unused(Net):
    """Has a branch, which takes part in a step if `uses(rank, number of the batch)` is true."""

    def __init__(self, uses: Callable[[int, int], bool], **options: Any) -> None:
        super().__init__(**options)
        self.branch = nn.Linear(8, 8)
        self.uses, self.count = uses, -1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.count += 1
        x = self.embedding(batch[0])
        if self.uses(self.global_rank, self.count):
            x = x + self.branch(x)
        return nn.functional.cross_entropy(self.layers(x), batch[1])


class Freezing(Net):
    """The embedding is frozen after three batches."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 3:
            self.embedding.requires_grad_(False)


class Manual(Net):
    """Accumulates two batches for a step, without Lightning's accumulation."""

    def __init__(self, no_sync: bool) -> None:
        super().__init__(momentum=0.9)
        self.automatic_optimization, self.no_sync = False, no_sync

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        last = index % 2 == 1 or self.trainer.is_last_batch
        if index % 2 == 0:
            optimizer.zero_grad()
        with (
            torch.enable_grad(),
            self.trainer.strategy.block_backward_sync() if self.no_sync and not last else nullcontext(),
        ):
            self.manual_backward(super().training_step(batch, index))
        if last:
            optimizer.step()


class Form:
    """One form of training: how to make the module, and options of the trainer and the strategy."""

    def __init__(self, make: Callable[[], Any], trainer: Callable[[], dict[str, Any]] = dict, **options: Any) -> None:
        self.make, self.trainer, self.options = make, trainer, options

    def fit(self, name: str, density: float, rank: int) -> dict[str, Any]:
        net = self.make()
        watch = Watch()
        options = {**self.trainer()}
        callbacks = [*options.pop("callbacks", []), *([] if name == "ddp" else [watch])]
        validation = options.pop("validation", False)
        run = trainer(strategy(name, density, **{**LAYERS, **self.options}), 2, callbacks=callbacks, **options)
        run.fit(net, Loader(rank, 2, 5), Loader(rank, 2, 2) if validation else None)
        module = getattr(net, "_orig_mod", net)
        result = {"state": module.state_dict(), "weights": module.weights, "steps": run.global_step}
        if name != "ddp":
            result.update(sums=watch.sums, kept=run.strategy.reducer.state_dict())
        return result


def warm(step: int) -> float:
    return [0.0, 0.0, 0.1, 1.0][min(step, 3)] / (1 + step)


FORMS = {
    "momentum, decay, warm-up from 0": Form(partial(Scheduled, warm, momentum=0.9, weight_decay=0.01)),
    "nesterov": Form(partial(Net, momentum=0.9, nesterov=True)),
    "adam": Form(partial(Net, ADAM, lr=0.01, weight_decay=0.01)),
    "adamw, schedule": Form(partial(Scheduled, warm, ADAMW, lr=0.01)),
    "parameter groups": Form(partial(Groups, ADAMW)),
    "accumulation, last group smaller": Form(Net, lambda: {"accumulate_grad_batches": 3}),
    "accumulation scheduler": Form(
        Net, lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})], "max_epochs": 2}
    ),
    "validation in between": Form(Net, lambda: {"validation": True, "val_check_interval": 2}),
    "manual accumulation, no_sync": Form(partial(Manual, True)),
    "manual accumulation": Form(partial(Manual, False)),
    "tied weights, head first": Form(Tied),
    "channels_last": Form(ChannelsLast),
    "checkpointing": Form(partial(Checkpointed, False)),
    "reentrant checkpointing": Form(partial(Checkpointed, True)),
    "compiled part": Form(Compiled, bucket_cap_mb=25),
    "compiled module": Form(lambda: torch.compile(Net(), backend="aot_eager"), bucket_cap_mb=25),
    **(
        {"EMA": Form(Net, lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5)]})}
        if hasattr(callbacks, "EMAWeightAveraging")  # since Lightning 2.6
        else {}
    ),
    "SWA": Form(Net, lambda: {"callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1)], "max_epochs": 3}),
    "unused on one rank": Form(partial(Unused, lambda rank, step: rank == 0, momentum=0.9), **FIND),
    "unused on all ranks": Form(partial(Unused, lambda rank, step: False, weight_decay=0.1), **FIND),
    "unused every other step": Form(partial(Unused, lambda rank, step: step % 2 == 0, momentum=0.9), **FIND),
    "unused here and there": Form(partial(Unused, lambda rank, step: (step + rank) % 3 == 0, momentum=0.9), **FIND),
    "unused within an accumulation": Form(
        partial(Unused, lambda rank, step: (step + rank) % 3 == 0), lambda: {"accumulate_grad_batches": 2}, **FIND
    ),
    "unused, static_graph": Form(partial(Unused, lambda rank, step: rank == 0), static_graph=True),
    "unused, gradient_as_bucket_view": Form(
        partial(Unused, lambda rank, step: (step + rank) % 3 == 0), gradient_as_bucket_view=True, **FIND
    ),
    "static_graph": Form(partial(Net, momentum=0.9), static_graph=True),
    "static_graph, manual": Form(partial(Manual, False), static_graph=True),
    "frozen later": Form(partial(Freezing, momentum=0.9), **FIND),
    "two optimizers, manual": Form(Gan, **FIND),
}


# At density 1 all methods take the same way; test_precision.py has each of them.
FULL = ["dense", "topk"]
SPARSE = in_turn(FORMS, [name for name in OTHERS if name != "dense"])
QUICK = [
    "accumulation, last group smaller",
    "two optimizers, manual",
]


@pytest.mark.reliability(
    f"{len(FORMS)} forms of training: accumulation, unused parameters, GAN, checkpointing, SWA, ...",
    checked="nothing lost; at density 1 equal to ddp",
    methods=REPRESENTATIVES,
)
@pytest.mark.parametrize("form", tiers(FORMS, QUICK))
def test_form(form):
    sparse = ["topk", SPARSE[form]]
    if "compiled" in form:
        sparse = ["topk"]  # seconds each, and methods have no part in it

    def rank(rank: int) -> dict[Any, Any]:
        results = {"ddp": FORMS[form].fit("ddp", 1.0, rank)}
        results.update({(name, 1.0): FORMS[form].fit(name, 1.0, rank) for name in FULL})
        return {**results, **{(name, 0.1): FORMS[form].fit(name, 0.1, rank) for name in sparse}}

    ranks = lightning_ranks(2, rank)
    wrong = []
    for name, density in [(name, 1.0) for name in FULL] + [(name, 0.1) for name in sparse]:
        runs = [results[name, density] for results in ranks]
        if not torch.equal(runs[0]["weights"], runs[1]["weights"]) or not runs[0]["weights"].isfinite().all():
            wrong.append(f"{name} {density}: ranks differ")
        if density == 1.0:
            for run, results in zip(runs, ranks, strict=True):
                if not all(same(run[key], results["ddp"][key]) for key in ("state", "steps")):
                    wrong.append(f"{name}: not equal to stock ddp")
        elif same(runs[0]["state"], ranks[0]["ddp"]["state"]) and not sends_all(name):
            wrong.append(f"{name}: nothing is compressed")
        if keeps_all(name):
            gone = lost([run["sums"] for run in runs], [run["kept"] for run in runs])
            # At most 15 additions to an fp32 residual, 6e-8 each.
            if gone > 1e-6:
                wrong.append(f"{name} {density}: {gone:.3g} of the gradients is lost")
    assert not wrong


def simulated(
    make: Callable[[], Net], name: str, loaders: list[Loader], together: int, clip: float | None
) -> list[Tensor]:
    """The same training without DDP and without Lightning."""
    nets = [make() for _ in loaders]  # one after the other: they seed the global generator

    def rank(comm: Comm) -> Tensor:
        net, batches = nets[comm.rank], list(loaders[comm.rank])
        made = net.configure_optimizers()
        optimizer = made["optimizer"] if isinstance(made, dict) else made
        reducer = Reducer(strategy(name, 0.1)._options.method, comm, **LAYERS, clip_norm=clip)
        for first in range(0, len(batches), together):
            optimizer.zero_grad()
            for batch in batches[first : first + together]:
                (net.training_step(batch, 0) / together).backward()
            reducer.reduce_({name: param.grad for name, param in net.named_parameters()})
            optimizer.step()
            if isinstance(made, dict):
                made["lr_scheduler"]["scheduler"].step()
        return net.weights

    return simulate(len(loaders), rank)


@full
@pytest.mark.parametrize("name", tiers(REPRESENTATIVES, ["topk"]))
def test_equal_to_a_simulation(name):
    trainings = [
        (partial(Scheduled, warm, momentum=0.9, weight_decay=0.01), 3, None),
        (partial(Net, momentum=0.9, nesterov=True), 1, None),
        (partial(Scheduled, warm, ADAM, lr=0.01), 1, None),
        (partial(Groups, ADAMW), 2, None),
        (Tied, 1, None),
        (partial(Net, momentum=0.9), 1, 0.3),
        (partial(Net, momentum=0.9), 3, 1e-3),
    ]
    if name != "topk":  # each training with topk and with two or three others
        trainings = trainings[OTHERS.index(name) % 3 :: 3]

    def rank(rank: int) -> list[Tensor]:
        results = []
        for make, together, clip in trainings:
            net = make()
            how = strategy(name, 0.1, **LAYERS, clip_norm=clip)
            trainer(how, 2, accumulate_grad_batches=together).fit(net, Loader(rank, 2, 5))
            results.append(net.weights)
        return results

    first, second = lightning_ranks(2, rank)
    for (make, together, clip), one, other in zip(trainings, first, second, strict=True):
        loaders = [Loader(rank, 2, 5) for rank in range(2)]
        assert same(simulated(make, name, loaders, together, clip), [one, other]), (make, together, clip)


@full
@pytest.mark.parametrize("name", tiers(REPRESENTATIVES, ["topk"]))
def test_at_rate_0_nothing_moves(name):
    def rank(rank: int) -> list[Any]:
        resting, groups = Scheduled(lambda step: float(step > 2)), Groups(ADAMW)
        before = groups.embedding.weight.clone()
        moved = []
        resting.on_train_batch_start = lambda *_: moved.append(resting.weights)
        for net in (resting, groups):
            trainer(strategy(name, 0.1, **LAYERS), 2).fit(net, Loader(rank, 2, 5))
        stays = [torch.equal(moved[0], weights) for weights in [*moved, resting.weights]]
        return [*stays, torch.equal(before, groups.embedding.weight)]

    assert lightning_ranks(2, rank) == [[True] * 4 + [False] * 2 + [True]] * 2


@pytest.mark.parametrize("name", tiers(["dense", "topk", "signsgd"], ["topk"]))
def test_a_stale_gradient_is_not_applied(name):
    """If a parameter takes part on the other rank only, the old content of its .grad does not count."""

    class Stale(Unused):
        def backward(self, loss: Tensor, *_: Any) -> None:
            if self.stale and self.global_rank == 1 and self.count > 0:
                for param in self.branch.parameters():
                    param.grad = torch.full_like(param, 100.0)
            loss.backward()

    def rank(rank: int) -> list[Tensor]:
        results = []
        for how in (name, "ddp"):
            for stale in (False, True):
                net = Stale(lambda rank, step: rank == 0)
                net.stale = stale
                trainer(strategy(how, 0.1, **LAYERS, **FIND), 2).fit(net, Loader(rank, 2, 5))
                results.append(net.weights)
        return results

    for ours, with_stale, stock, applied in lightning_ranks(2, rank):
        assert torch.equal(ours, with_stale)
        assert (applied - stock).abs().max() > 1  # stock ddp's answer


def failing(rank: int, make: Callable[[], Any], how: Any, **options: Any) -> tuple[str, str, Tensor]:
    """Fit, and return the error and the weights, to which nothing may have happened that other ranks do not share."""
    net = make()
    kind, text = "no error", ""
    try:
        trainer(how, 2, **options).fit(net, Loader(rank, 2, 5))
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, net.weights


@pytest.mark.reliability(
    "frozen layer unfrozen later", checked="an error on all ranks, before their weights differ", methods=REPRESENTATIVES
)
@pytest.mark.parametrize("methods", [["topk"], pytest.param(REPRESENTATIVES, marks=full)], ids=["quick", "others"])
def test_unfreezing_later_is_an_error(methods):
    def rank(rank: int) -> list[Any]:
        return [
            failing(rank, Net, strategy(name, 0.1), max_epochs=2, callbacks=[Unfreezing()])
            for name in ["ddp", *methods]
        ]

    (stock, *ours), (other, *theirs) = lightning_ranks(2, rank)
    assert stock[0] == "no error"
    assert not torch.equal(stock[2], other[2])  # drifted apart, silently
    for first, second in zip(ours, theirs, strict=True):
        assert torch.equal(first[2], second[2])
        for kind, text, _ in (first, second):
            assert kind in ("RuntimeError", "RankFailure")
            assert "'embedding.weight' was frozen when the model was wrapped and takes gradients now" in text
            assert "exchange='update'" in text  # with callbacks that unfreeze layers there is no other way


@pytest.mark.reliability(
    "a parameter takes no part, without find_unused_parameters",
    checked="an error on all ranks, before their weights differ",
    methods=REPRESENTATIVES,
)
@pytest.mark.parametrize(
    ("methods", "make", "options", "missing"),
    [
        pytest.param(REPRESENTATIVES, Freezing, LAYERS, "'embedding.weight'", marks=full),
        (["topk"], Freezing, {"static_graph": True}, "'embedding.weight'"),
        pytest.param(
            REPRESENTATIVES,
            partial(Unused, lambda rank, step: rank == 0 or step < 4),
            LAYERS,
            "'branch.weight', 'branch.bias'",
            marks=full,
        ),
        (["topk"], partial(Unused, lambda rank, step: rank == 0 or step < 4), {}, "'branch.weight', 'branch.bias'"),
        (["topk"], Gan, {}, "'generator.weight', 'generator.bias'"),
    ],
    ids=["frozen later", "frozen later, static_graph", "unused on one rank at last", "the same in one bucket", "gan"],
)
def test_a_parameter_without_a_gradient_is_an_error(methods, make, options, missing):
    def rank(rank: int) -> Any:
        return [failing(rank, make, strategy(name, 0.1, **options)) for name in methods]

    for one, other in zip(*lightning_ranks(2, rank), strict=True):
        assert torch.equal(one[2], other[2])
        for _, text, _ in (one, other):
            assert f"{missing} got no gradient on rank" in text
            assert "set find_unused_parameters=True" in text


class Untouched(Net):
    """Its loss does not depend on the model in one step."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return torch.zeros((), requires_grad=True) if self.trainer.global_step == 2 else loss


@pytest.mark.parametrize("options", [FIND, {}, {"static_graph": True}])
def test_a_loss_that_touches_no_parameter_is_told_what_helps(options):
    """In such a step stock ddp exchanges nothing, and does not warn."""
    for _, text, _ in lightning_ranks(2, lambda rank: failing(rank, Untouched, strategy("topk", **options))):
        assert "'embedding.weight', 'layers.0.weight', 'layers.0.bias' and others got no gradient on rank" in text
        assert "find_unused_parameters=True does not help there. Let the loss touch the parameters" in text


def test_what_is_left_of_a_failure_does_not_block_the_process():
    # While rank 1 keeps its end of the connection, rank 0's exchange stays pending. The destructor of rank 0's group
    # waits for the timeout, 30 s.
    def rank(rank: int) -> float:
        gc.disable()
        failing(rank, partial(Unused, lambda rank, step: rank == 0), strategy("topk"))
        started = time.monotonic()
        if rank == 0:
            gc.collect()
        return time.monotonic() - started

    assert max(lightning_ranks(2, rank)) < 15


class Sparse(Net):
    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.by_module = by_module
        if by_module:
            self.embedding = nn.Embedding(16, 8, sparse=True)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = nn.functional.embedding(batch[0], self.embedding.weight, sparse=True)
        return nn.functional.cross_entropy(self.layers(x), batch[1])


@pytest.mark.parametrize("by_module", [True, False])
def test_sparse_gradients_are_an_error(by_module):
    for kind, text, _ in lightning_ranks(2, lambda rank: failing(rank, partial(Sparse, by_module), strategy("topk"))):
        # A gradient that is sparse because of a function is an error in DDP itself, before the hook runs.
        assert kind == ("TypeError" if by_module else "NotImplementedError")
        assert ("Set sparse=False" if by_module else "SparseTensorImpl") in text


class Spike(Net):
    """Zeroes all gradients whose norm is far from the others', and counts how often."""

    zeroed = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) * (1000 if index == 3 and self.global_rank == 0 else 1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if torch.stack([param.grad.norm() for param in self.parameters()]).norm() > 20:
            optimizer.zero_grad()
            self.zeroed += 1


@later
def test_a_spike_that_a_hook_zeroes_comes_back_with_a_warning_and_not_at_all_where_updates_are_exchanged():
    def rank(rank: int) -> list[tuple[int, bool]]:
        found = []
        for how in (strategy("ddp"), strategy("topk", 0.1), strategy("topk", 0.1, exchange="update")):
            messages, net = Messages(), Spike()
            trainer(how, 2).fit(net, Loader(rank, 2, 12))
            warned = [text for text in messages.texts if "was written before the step" in text]
            found.append((net.zeroed, len(warned) == 1))
        return found

    (stock, gradients, updates), (_, silent, other) = lightning_ranks(2, rank)
    assert stock == updates == (1, False)
    assert gradients[0] > 3
    assert gradients[1]
    assert not silent[1]
    assert other == (0, False)  # each rank sees its own gradient


class Keeps(Net):
    """Keeps the last step's gradient, as conjugate directions and checks of alignment do, and detaches it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.cosines: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.layers[0].weight.grad.detach_()
        if self.kept is not None:
            self.cosines.append(float(nn.functional.cosine_similarity(gradient.flatten(), self.kept.flatten(), dim=0)))
        self.kept = gradient


@full
def test_a_reference_to_the_last_gradient_keeps_that_gradient():
    def rank(rank: int) -> list[list[float]]:
        found = []
        for how in (
            pl.strategies.DDPStrategy(),
            SparseDDPStrategy("topk", density=1.0),
            SparseDDPStrategy("topk", density=0.1),
            SparseDDPStrategy("topk", density=0.1, exchange="update"),
        ):
            net = Keeps()
            trainer(how, 2).fit(net, Loader(rank, 2, 5))
            found.append(net.cosines)
        return found

    for stock, all_of_it, part, own in lightning_ranks(2, rank):
        assert stock == all_of_it
        assert max(*part, *own) < 0.99


class Copies(Net):
    """Copies all parts of a training in the middle of it."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for part in (self, self.trainer.model, self.trainer.strategy, optimizer):
            copy.deepcopy(part)
            torch.save(part, io.BytesIO())
        copied = copy.deepcopy(self.trainer.strategy).precision_plugin
        copied.clip_gradients(optimizer, clip_val=0.0, gradient_clip_algorithm="norm")


@full
def test_a_trainer_can_be_copied_within_and_after_a_training_and_its_copy_trains(tmp_path):
    def rank(rank: int) -> list[bool]:
        found = []
        for how in (
            pl.strategies.DDPStrategy(),
            strategy("topk", 0.1),
            strategy("topk", 0.1, exchange="update"),
            strategy("topk", 0.1, exchange="update", overlap="next_step"),
        ):
            ours = [] if type(how) is pl.strategies.DDPStrategy else [CommunicationMonitor(), GradientDistribution()]
            run = trainer(how, 2, callbacks=ours, logger=pl.loggers.CSVLogger(tmp_path), log_every_n_steps=1)
            run.fit(Copies(), Loader(rank, 2, 2))
            assert not any(type(each) is pl.Callback for each in run.callbacks)  # a fit removes its callback
            weights = []
            for each in (copy.deepcopy(run), run):
                net, each.fit_loop.max_epochs = Net(), 2
                each.fit(net, Loader(rank, 2, 2))
                weights.append(net.weights)
            found.append(torch.equal(*weights))
        return found

    assert lightning_ranks(2, rank) == [[True] * 4] * 2


class Spectral(Net):
    """Has a complex buffer and a complex weight. If `real`, forward takes a complex view of a real weight."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        weight = torch.randn(8, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
        self.spectrum = nn.Parameter(torch.view_as_real(weight).clone() if real else weight)
        self.register_buffer("phase", torch.ones(8, dtype=torch.complex64) * 1j)
        self.real = real

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        weight = torch.view_as_complex(self.spectrum) if self.real else self.spectrum
        x = (self.embedding(batch[0]) * self.phase) @ weight
        return nn.functional.cross_entropy(self.layers(torch.view_as_real(x).sum(-1)), batch[1])


@later
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="with torch 2.8 gloo has no complex numbers")
def test_complex_weights_as_the_error_message_says_train_as_under_ddp():
    def rank(rank: int) -> list[Tensor]:
        found = []
        for how, real in (
            (pl.strategies.DDPStrategy(), False),
            (strategy("topk", 1.0), True),
            (strategy("topk", 1.0, exchange="update"), True),
        ):
            net = Spectral(real)
            trainer(how, 2).fit(net, Loader(rank, 2))
            found.append(net.spectrum.detach() if real else torch.view_as_real(net.spectrum.detach()))
        return found

    for stock, gradients, updates in lightning_ranks(2, rank):
        assert torch.allclose(stock, gradients, atol=1e-6)
        assert torch.allclose(stock, updates, atol=1e-6)


class Plateau(Net):
    """Lowers the rate by a metric that gets worse from epoch to epoch: each rank's own, or the mean of all."""

    def __init__(self, synchronised: bool) -> None:
        super().__init__()
        self.synchronised = synchronised

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        worse = float(self.current_epoch * (2 * self.global_rank - 1))
        self.log("metric", worse, on_step=False, on_epoch=True, sync_dist=self.synchronised)
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "metric"}}


@full
@pytest.mark.parametrize(
    "options", [*in_full({}, {"exchange": "update"}), {"exchange": "update", "overlap": "next_step"}]
)
def test_rates_that_differ_among_ranks_are_warned_of_once(options, monkeypatch):
    """Under stock ddp, too, weights drift apart, but without a warning."""
    monkeypatch.setattr(rates, "PERIOD", 5)

    def rank(rank: int) -> list[list[str]]:
        said = []
        for synchronised in (False, True):
            messages = Messages()
            trainer(strategy("topk", 0.1, **options), 2, max_epochs=4).fit(Plateau(synchronised), Loader(rank, 2, 8))
            said.append(messages.texts)
        return said

    (apart, together), silent = lightning_ranks(2, rank)
    assert silent == [[], []]
    assert together == []
    (text,) = apart
    assert "that of the first parameter group is 0.05 on rank 0, 0.005 on rank 1" in text


class OwnRate(Net):
    """Has different learning rates on the ranks, as after a search with each rank's own losses."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1 / (1 + self.global_rank))


def test_rates_that_differ_from_the_start_are_warned_of_at_the_first_step():
    def rank(rank: int) -> list[str]:
        messages = Messages()
        trainer(strategy("topk", 0.1), 2).fit(OwnRate(), Loader(rank, 2, 1))
        return messages.texts

    (text,), _ = lightning_ranks(2, rank)
    assert "0.1 on rank 0, 0.05 on rank 1" in text


def own_rates(rank: int) -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    attach_updates(net, optimizer, local_steps=4)
    for step in range(16):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 4 else 0.1 / (1 + rank)
        net(torch.ones(1, 8)).sum().backward()
        optimizer.step()


def test_rates_are_compared_in_a_plain_loop_with_local_steps(monkeypatch):
    monkeypatch.setattr(rates, "PERIOD", 5)

    def rank(rank: int) -> list[str]:
        messages = Messages()
        own_rates(rank)
        return messages.texts

    (text,), silent = run_ranks(2, rank)
    assert "0.1 on rank 0, 0.05 on rank 1" in text
    assert "if a gradient scaler skips a step lags on one rank: step it always" in text
    assert silent == []


class Adaptive(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@full
def test_adam_is_warned_about():
    def rank(rank: int) -> list[list[str]]:
        seen = []
        for name, net in (("topk", Adaptive()), ("dense", Adaptive()), ("topk", Net())):
            messages = Messages()
            trainer(strategy(name, 0.1), 2).fit(net, Loader(rank, 2, 2))
            seen.append(messages.texts)
        return seen

    first, second = lightning_ranks(2, rank)
    assert second == [[], [], []]
    assert [len(texts) for texts in first] == [1, 0, 0]
    assert "AdamW takes too large steps" in first[0][0]


class Head(Net):
    """Its embedding requires gradients, but the optimizer does not get it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.layers.parameters(), lr=0.05)


def in_two(rank: int) -> None:
    """Give Fabric the optimizers of a model one after the other."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricSparseDDPStrategy("topk", exchange="gradient"))
    fabric.launch()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fabric.setup_module(net)
    optimizers = [fabric.setup_optimizers(SGD(part.parameters(), lr=0.1)) for part in net]
    fabric.backward(model(torch.ones(1, 4)).sum())
    for optimizer in optimizers:
        optimizer.step()


@later
def test_trained_parameters_without_an_optimizer_are_warned_of_with_sparse_gradients():
    def rank(rank: int) -> list[list[str]]:
        seen = []
        for name, net in (("topk", Head()), ("int4", Head()), ("topk", Net()), ("topk", Gan())):
            messages = Messages()
            trainer(strategy(name, 0.1, find_unused_parameters=True), 2, max_steps=4).fit(net, Loader(rank, 2, 4))
            seen.append(messages.texts)
        messages = Messages()
        in_two(rank)
        return [*seen, messages.texts]

    (warned, *silent), others = lightning_ranks(2, rank)
    (text,) = warned
    assert text.startswith("'embedding.weight' require gradients but are in no optimizer")
    assert silent == [[]] * 4
    assert others == [[]] * 5


class Steep(Net):
    """Its gradient has a norm that one can name: `norm` on rank 0, nothing on rank 1."""

    def __init__(self, norm: float) -> None:
        super().__init__()
        self.norm = norm

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        size = self.norm / sum(p.numel() for p in self.parameters()) ** 0.5 if self.global_rank == 0 else 0.0
        return size * sum(p.sum() for p in self.parameters())


@pytest.mark.parametrize("kind", ["32-true", *in_full("bf16-true")])
def test_local_clipping_is_right_over_all_segments(kind):
    def rank(rank: int) -> list[float]:
        moved = []
        for norm in (1e-3, 4.0, 0.0, 1e30):
            net = Steep(norm)
            watch = Watch()
            how = strategy("dense", **LAYERS, clip_norm=0.5)
            trainer(how, 2, precision=kind, callbacks=[watch], max_steps=1).fit(net, Loader(rank, 2, 5))
            moved.append(torch.cat(list(watch.sums["applied"].values())).norm().item())
        return moved

    for moved in lightning_ranks(2, rank):
        # The mean of the clipped gradient and 0. fp32 sums of 500 squares; bf16 rounds to 2^-9.
        near = {"rel": 1e-5 if kind == "32-true" else 2**-9}
        assert moved == pytest.approx([0.5e-3, 0.25, 0.0, 0.25], **near)


def compiled(rank: int, name: str | None) -> list[Tensor]:
    net = Net()
    model = DistributedDataParallel(nn.Sequential(net.embedding, net.layers))
    if name is not None:
        attach(model, strategy(name, 1.0)._options.method)
    model = torch.compile(model, backend="aot_eager")
    optimizer = SGD(net.parameters(), lr=0.1)
    for inputs, targets in Loader(rank, 2, 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return [param.detach() for param in net.parameters()]


@full
def test_compiled_after_wrapping():
    stock, ours = lightning_ranks(2, lambda rank: [compiled(rank, None), compiled(rank, "topk")])[0]
    assert same(stock, ours)
