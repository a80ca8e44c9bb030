"""Updates through Lightning and plain torch, with real ranks: equal weights, resume, scalers, local steps, failures."""

import copy
import inspect
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from packaging.version import Version
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import (
    METHODS,
    Method,
    NonFiniteGradient,
    RankFailure,
    Reducer,
    SparseDDPStrategy,
    attach,
    attach_updates,
    exchange_pending,
    method,
)
from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import in_backward
from lightning_sparse.callbacks import CommunicationMonitor, ContractionRatio, GradientDistribution
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.compressors import Identity
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.contrib.weight_averaging import AverageAtEnd, WeightAveraging
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.hooks import session as session_module
from lightning_sparse.hooks.equal_states import average_states
from lightning_sparse.hooks.optimizer_kinds import RECOMPUTES, reason_for_gradients
from lightning_sparse.hooks.update_exchange import check_updates
from lightning_sparse.memory import NoMemory
from lightning_sparse.options import ReducerOptions
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.segment import UpdateSegment
from tests.integration.checkpoints import AtStart
from tests.integration.failing import SOON, caught, of_both
from tests.integration.forms import (
    FORMS,
    AdamNet,
    OwnScaler,
    Unused,
    scaler,
)
from tests.integration.trainers import Gan, Loader, Lookahead, Messages, Net, Unfreezing, lightning_ranks, same, trainer
from tests.processes import reserve_port, run_ranks
from tests.support.tiers import full, in_full, later, one_in, tiers
from tests.support.update_training import OthersAdam
from tests.support.vectors import flat

ADAMW, SGD, LBFGS = torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS


def sparse(**options: Any) -> SparseDDPStrategy:
    # One segment for the whole model, because small segments would fall back to dense.
    return SparseDDPStrategy(**{"method": "topk", "density": 0.02, "granularity": "model", **options})


def fit(
    rank: int, net: Any, strategy: dict[str, Any], size: int = 2, *, scaled: bool = False, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(rank)
    module = net()
    if scaled:
        options["plugins"] = scaler()
    messages, first_lines = Messages(), []
    run = trainer(sparse(**strategy), size, **options)
    run.strategy.inform = first_lines.append
    run.fit(module, Loader(rank, size))
    reducer = run.strategy.reducer
    return {
        "weights": module.weights,
        "buffers": torch.cat([buffer.float().reshape(-1) for buffer in (*module.buffers(), torch.zeros(0))]),
        "exchanged": reducer.exchanged,
        "steps": reducer.step,
        "residual": reducer.state_dict()["elements"].get("residual"),
        "messages": messages.texts,
        "first line": " ".join(first_lines[:1]),  # of rank 0
    }


def fits(cases: Sequence[tuple[Any, dict[str, Any]]], **options: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Fit nets with options of the strategy, one after the other in the same two ranks. Return the results of `fit`."""

    def all_of_them(rank: int) -> list[dict[str, Any]]:
        return [fit(rank, net, strategy, **options) for net, strategy in cases]

    return list(zip(*lightning_ranks(2, all_of_them), strict=True))


def test_adaptive_optimizers_exchange_updates_unless_it_is_said():
    cases = [(AdamNet, "auto"), (Net, "auto"), (AdamNet, "gradient"), (Net, "update")]
    found = fits([(net, {"exchange": given}) for net, given in cases], max_steps=1)
    assert [first["exchanged"] for first, _ in found] == ["update", "gradient", "gradient", "update"]
    for (net, _), (first, second) in zip(cases, found, strict=True):
        exchanged = first["exchanged"]
        assert ("the updates are exchanged" in first["first line"]) == (exchanged == "update")
        assert ("Gradients are exchanged." in first["first line"]) == (exchanged == "gradient")
        assert torch.equal(first["weights"], second["weights"])
        warned = any("takes too large steps" in text for text in first["messages"])
        assert warned == (net is AdamNet and exchanged == "gradient")


@pytest.mark.parametrize("method", tiers(["int4", "int8", "qsgd", "powersgd"], ["int4"]))
def test_methods_that_send_every_element_exchange_gradients_with_any_optimizer(method):
    first, second = lightning_ranks(2, fit, AdamNet, {"method": method, "density": None})
    assert first["exchanged"] == "gradient"
    assert torch.equal(first["weights"], second["weights"])
    assert "Gradients are exchanged." in first["first line"]
    assert not any("takes too large steps" in text for text in first["messages"])


class InTurn(Net):
    """SGD and Adam step the same parameters, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.05), torch.optim.Adam(self.parameters(), 0.01)]


@later
def test_optimizers_of_the_same_parameters_exchange_gradients_unless_updates_are_asked_for():
    def fits(rank: int, how: Any) -> Tensor:
        net = InTurn()
        trainer(how, 2).fit(net, Loader(rank, 2, 4))
        return net.weights

    def rank(rank: int) -> list[Any]:
        messages = Messages()
        found: list[Any] = [fits(rank, how) for how in (pl.strategies.DDPStrategy(), sparse(density=1.0), sparse())]
        refused = [
            sparse(**options) for options in ({"exchange": "update"}, {"local_steps": 2}, {"overlap": "next_step"})
        ]
        return [messages.texts, *found, *(caught(partial(fits, rank, how))[1] for how in refused)]

    (warnings, *first), (_, *second) = lightning_ranks(2, rank)
    assert same(first, second)
    stock, all_of_it, _, *refused = first
    assert torch.equal(stock, all_of_it)
    for text in refused:
        assert (
            "or let ranks exchange gradients: exchange='gradient' of the strategy, without local_steps and overlap"
            in text
        )
    (warning,) = (text for text in warnings if "density=1" not in text)
    assert "Take a method that sends every element, such as 'int4', as optimizers share parameters here" in warning


class Averaged(Net):
    """Has timm's Lookahead around SGD, and a schedule, which replaces its `step` before training begins."""

    def configure_optimizers(self) -> Any:
        optimizer = Lookahead(torch.optim.SGD(self.parameters(), 0.05))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@later
def test_an_optimizer_around_another_one_trains_as_under_ddp():
    def rank(rank: int) -> list[Tensor]:
        found = []
        for how in (
            pl.strategies.DDPStrategy(),
            sparse(density=1.0, exchange="gradient"),
            sparse(density=1.0, exchange="update"),
        ):
            net = Averaged()
            trainer(how, 2, max_epochs=2).fit(net, Loader(rank, 2))
            found.append(net.weights)
        return found

    first, second = lightning_ranks(2, rank)
    assert same(first, second)
    stock, gradients, updates = first
    assert torch.equal(stock, gradients)
    assert torch.allclose(stock, updates, atol=1e-6)


class Numbered(Net):
    """Has a buffer whose initial value is the rank's number, and which never changes."""

    def __init__(self) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.register_buffer("number", torch.zeros(1))

    def setup(self, stage: str) -> None:
        self.number.fill_(self.global_rank)


@pytest.mark.parametrize(
    ("option", "numbers"),
    [
        (option, numbers)
        for option, numbers in (("broadcast_buffers", [0, 1]), ("forward_sync_buffers", [0, 0]))
        if option in inspect.signature(DistributedDataParallel).parameters  # the second since torch 2.9
    ],
)
def test_buffers_stay_each_ranks_own_where_that_is_asked_for(option, numbers):
    """With the second option, buffers start from rank 0's."""
    ranks = lightning_ranks(2, partial(fit, max_epochs=1), Numbered, {option: False})
    assert [rank["exchanged"] for rank in ranks] == ["update"] * 2
    assert same(*(rank["weights"] for rank in ranks))
    assert [float(rank["buffers"][0]) for rank in ranks] == numbers
    assert not same(*(rank["buffers"][1:] for rank in ranks))


class Wide(pl.LightningModule):
    """Each of its 180,000 gradients is 8 times a factor, on all ranks."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = torch.nn.Linear(8, 20_000), factor

    def training_step(self, batch, index):
        return (self.layer(torch.ones(8, 8, dtype=self.layer.weight.dtype)) * self.factor).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=100.0)

    @property
    def weights(self):
        return torch.nn.utils.parameters_to_vector(self.parameters()).detach().float()


# Sums of squares in fp16 or in fp32 are out of range. In fp16 a step of 100 / √180000 = 0.236 is rounded twice, by
# 2⁻¹¹ of itself. Weights below 1 are rounded up to four times, by 2⁻¹², which is 0.1 % of the step.
@full
@pytest.mark.parametrize(("precision", "factor", "rel"), [("16-true", 60.0, 0.006), ("32-true", 1e24, 1e-5)])
def test_a_norm_out_of_range_clips_to_what_was_asked_for(precision, factor, rel):
    def rank(rank):
        model = Wide(factor)
        before = (model.half() if precision == "16-true" else model).weights
        strategy = SparseDDPStrategy("dense", exchange="update", clip_norm=1.0)
        trainer(strategy, 2, precision=precision, max_steps=1).fit(model, Loader(rank, 2))
        return float((model.weights - before).double().norm())

    assert lightning_ranks(2, rank) == pytest.approx([100.0] * 2, rel=rel)


class Embedded(Net):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__(torch.optim.SGD, lr=0.1)
        self.embedding.sparse = sparse


@full
@pytest.mark.parametrize("option", [{"clip_norm": 0.1}, *in_full({"on_nonfinite": "skip"})], ids=str)
def test_sparse_gradients_of_torch_are_checked_like_others(option):
    run = partial(fit, max_epochs=1)
    found, expected = (
        lightning_ranks(2, run, partial(Embedded, sparse=sparse), {"exchange": "update", **option})[0]
        for sparse in (True, False)
    )
    assert torch.allclose(found["weights"], expected["weights"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "form",
    tiers(
        FORMS,
        ["accumulation", "16-mixed", "gan", "delayed"],
    ),
)
def test_weights_and_buffers_are_equal_in_every_form(form):
    net, strategy, options = FORMS[form]
    late = strategy.get("overlap") == "next_step"

    def run(rank: int) -> list[dict[str, Any]]:
        ways = [strategy] if late else [strategy, {**strategy, "overlap": "none"}]
        return [fit(rank, net, way, max_epochs=2, **copy.deepcopy(options)) for way in ways]

    (first, *waited), (second, *_) = lightning_ranks(2, run)
    assert first["exchanged"] == "update"
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["buffers"], second["buffers"])
    # Every third of 16 steps, and the rest at the end.
    assert first["steps"] == {
        "accumulation": 8,
        **dict.fromkeys(["gan", "delayed gan"], 32),
        **dict.fromkeys(["every third step", "diloco", "sparseloco"], 6),
        **dict.fromkeys(["delayed, every third step", "delayed, dense"], 6),
    }.get(form, 16)
    if late:
        assert "while the next step runs" in first["first line"]
        return
    # Whether an exchange waits for the end of backward makes no difference, to the last bit.
    (after,) = waited
    assert "exchanged after backward: overlap='none'." in after["first line"]
    assert all(same(first[key], after[key]) for key in ("weights", "buffers", "residual"))


class Looks(pl.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        """Look at gradients, perhaps."""


class Logs:
    """A callable object, which has no code as a function has."""

    def __call__(self, *_: Any) -> None:
        pass


class Own(Net):
    """Looks at gradients, or would."""

    def on_after_backward(self) -> None:
        pass


class Patched(Net):
    """Clips gradients in the optimizer's step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step = optimizer.step

        def clipped(_: Any, closure: Any) -> Any:
            loss = closure()
            nn.utils.clip_grad_value_(self.parameters(), 0.01)
            step()
            return loss

        optimizer.step = MethodType(clipped, optimizer)  # type: ignore[method-assign]
        return optimizer


class Scheduled(Net):
    """Has a schedule, which replaces the optimizer's step by a function that counts."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class EditsGradients(SparseDDPStrategy):
    def post_backward(self, closure_loss: Any) -> None:
        super().post_backward(closure_loss)


def test_a_strategy_of_the_user_may_look_at_all_gradients():
    def run(rank: int) -> str:
        lines: list[str] = []
        run = trainer(EditsGradients("topk", granularity="model"), 2, max_steps=2)
        run.strategy.inform = lines.append
        run.fit(AdamNet(), Loader(rank, 2, 2))
        return lines[0] if lines else ""

    assert "after backward: EditsGradients.post_backward is a function of yours" in lightning_ranks(2, run)[0]


@full
def test_an_exchange_goes_on_within_backward_unless_something_needs_all_gradients():
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], str | None]] = [
        (AdamNet, {}, {}, None),
        (AdamNet, {}, {"callbacks": [pl.callbacks.Timer()], "accumulate_grad_batches": 2}, None),
        (AdamNet, {}, {"gradient_clip_val": 1.0}, "gradient_clip_val needs all gradients"),
        (AdamNet, {"clip_norm": 1.0}, {}, "clip_norm needs all gradients"),
        (AdamNet, {"on_nonfinite": "skip"}, {}, "on_nonfinite='skip' needs all gradients"),
        (AdamNet, {}, {"scaled": True}, "the gradient scaler looks at all gradients"),
        (AdamNet, {"local_steps": 2}, {}, "there are several steps before"),
        (AdamNet, {}, {"callbacks": [Looks()]}, "Looks.on_before_optimizer_step comes first"),
        (
            AdamNet,
            {},
            {"callbacks": [pl.callbacks.LambdaCallback(on_after_backward=Logs())]},
            "LambdaCallback.on_after_backward comes first",
        ),
        (partial(Own, ADAMW, lr=0.01), {}, {}, "Own.on_after_backward comes first"),
        (Gan, {"exchange": "update"}, {}, "optimization is manual"),
        (lambda: Net(Unknown, lr=0.01), {"exchange": "update"}, {}, "Unknown may look at all gradients"),
        (partial(Patched, ADAMW, lr=0.01), {}, {}, "AdamW.step is a function of yours"),
        (partial(Scheduled, ADAMW, lr=0.01), {}, {}, None),
    ]

    def run(rank: int) -> Any:
        begin, found = DeltaExchange.begin, []

        def noted(updates: Any, optimizer: Any, *rest: Any, **options: Any) -> None:
            found[-1].append(in_backward())
            begin(updates, optimizer, *rest, **options)

        DeltaExchange.begin = noted
        lines = []
        for net, strategy, options, _ in cases:
            found.append([])
            lines.append(fit(rank, net, strategy, **options)["first line"])
        return lines, found

    (lines, found), _ = lightning_ranks(2, run)
    for (*_, obstacle), line, within in zip(cases, lines, found, strict=True):
        assert f"They are exchanged {'after backward: ' + obstacle if obstacle else 'within backward'}." in line
        # Once as training starts, and the first pass is only watched.
        assert within == ([False] * len(within) if obstacle else [False, False, *[True] * (len(within) - 2)]), line
        assert len(within) > 3


class ClipsItself(Net):
    """Clips the gradient of its rank, at the threshold for one of two ranks."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1 * math.sqrt(2))


class ClipsManually(Net):
    """Clips in manual optimization, by Lightning's function."""

    own = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        if self.own:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1 * math.sqrt(2))
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class ClipsManuallyItself(ClipsManually):
    own = True


class ClipsElements(ClipsItself):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01 * math.sqrt(2))


@pytest.mark.parametrize(
    ("net", "own", "options", "strategy"),
    [
        (Net, ClipsItself, {"gradient_clip_val": 0.1}, {}),
        *in_full(
            (Net, ClipsElements, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
            (Net, ClipsItself, {"gradient_clip_val": 0.1}, {"overlap": "next_step"}),
            (Net, ClipsItself, {"gradient_clip_val": 0.1}, {"method": "dense", "density": None}),
            (Net, ClipsItself, {"gradient_clip_val": 0.1}, {"method": "memsgd"}),
            (ClipsManually, ClipsManuallyItself, {}, {}),
        ),
    ],
)
def test_thresholds_for_clipping_are_of_the_mean_gradient(net, own, options, strategy):
    """The gradient of one of two ranks is longer than the mean, by up to √2. So the threshold is larger by √2."""

    def run(rank: int) -> list[Any]:
        ours = {"exchange": "update", **strategy}
        clipped, by_hand = (partial(each, torch.optim.AdamW, lr=0.01) for each in (net, own))
        fits = [fit(rank, clipped, ours, **options), fit(rank, by_hand, ours), fit(rank, AdamNet, ours)]
        return [found["weights"] for found in fits]

    for clipped, by_hand, not_clipped in lightning_ranks(2, run):
        assert torch.equal(clipped, by_hand)
        assert not torch.equal(clipped, not_clipped)


@full
def test_local_steps_clip_as_their_papers_do():
    """After a fit, the precision plugin clips as before."""

    def run(rank: int) -> Any:
        told, precision = list[str](), pl.plugins.MixedPrecision("bf16-mixed", "cpu")
        for name in ("diloco", "topk"):
            run = trainer(SparseDDPStrategy(name), 2, gradient_clip_val=0.1, plugins=[precision])
            run.strategy.inform = told.append
            run.fit(AdamNet(), Loader(rank, 2))
        return [text for text in told if "clips" in text], [*vars(precision)]

    (told, attributes), (others, _) = lightning_ranks(2, run)
    assert len(told) == 1, "DiLoCo's ranks clip at the given threshold"
    assert "0.141421 in place of 0.1" in told[0]
    assert not others
    assert "clip_gradients" not in attributes


class Late(pl.Callback):
    """Has gradients clipped in a way that was not there when training began."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.how == "value":
            trainer.gradient_clip_val = 0.01
        elif self.how == "callback":
            trainer.callbacks.append(Halves())
        elif self.how == "closure":
            trainer.optimizers[0].register_step_pre_hook(self.clip)
        else:
            module.layers[3].register_full_backward_hook(self.halve)

    def clip(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        def clipped() -> Any:
            loss = kwargs["closure"]()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
            return loss

        return args, {**kwargs, "closure": clipped}

    def halve(self, module: nn.Linear, *_: Any) -> None:
        if module.weight.grad is not None:
            module.weight.grad.mul_(0.5)


class Halves(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        for param in module.parameters():
            param.grad.mul_(0.5)


class Clips(pl.plugins.Precision):
    """A precision plugin of the user's own."""

    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        return super().post_backward(tensor, module)


@full
@pytest.mark.parametrize("how", ["value", "callback", "closure", *in_full("hook", "plugin")])
def test_what_looks_at_gradients_is_seen_whenever_it_comes(how):
    def run(rank: int) -> Any:
        options = {"plugins": [Clips()]} if how == "plugin" else {"callbacks": [Late(how)]}
        return [fit(rank, AdamNet, {"overlap": overlap}, **options)["weights"] for overlap in ("backward", "none")]

    (within, after), _ = lightning_ranks(2, run)
    assert torch.equal(within, after)


class Saves(Net):
    """Saves in the middle of a step, as a handler of a signal does."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = {name: x.clone() for name, x in self.state_dict().items()}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        hidden = self.embedding(batch[0])
        if index == 3:
            hidden.register_hook(self.save)
        return nn.functional.cross_entropy(self.layers(hidden), batch[1])

    def save(self, _: Tensor) -> None:
        weights = [name for name, _ in self.named_parameters()]
        self.saved = self.trainer.strategy.lightning_module_state_dict()
        self.wrong = [name for name in weights if not torch.equal(self.saved[name], self.before[name])]
        self.stepped = [name for name in weights if not torch.equal(self.state_dict()[name], self.before[name])]


@later
def test_what_is_saved_in_the_middle_of_a_step_has_the_weights_before_it():
    def run(rank: int) -> Any:
        module = Saves(ADAMW, lr=0.01)
        trainer(sparse(granularity="layer"), 2).fit(module, Loader(rank, 2))
        return module.wrong, module.stepped

    for wrong, stepped in lightning_ranks(2, run):
        assert wrong == []
        assert stepped


class Stumbles(Net):
    """Rank 1 fails in its fourth step."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        assert self.global_rank == 0 or index < 3, "stumbled"
        return super().training_step(batch, index)


class OnFailure(pl.Callback):
    """If training fails, keeps the state that a checkpoint would contain."""

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self.state = trainer.strategy.lightning_module_state_dict()
        self.consistent = trainer.strategy.exchanger.is_consistent


def test_what_is_saved_on_an_exception_during_an_exchange_has_weights_that_all_ranks_agreed_on():
    def run(rank: int) -> Any:
        module, kept = Stumbles(ADAMW, lr=0.01), OnFailure()
        failed = caught(lambda: trainer(sparse(overlap="next_step"), 2, callbacks=[kept]).fit(module, Loader(rank, 2)))
        names = [name for name, _ in module.named_parameters()]
        return failed, {name: kept.state[name] for name in names}, kept.consistent

    (first, weights, _), (second, others, consistent) = lightning_ranks(2, run)
    assert "stumbled" in first[1]
    assert "stumbled" in second[1]
    assert same(weights, others)
    assert consistent  # on the rank that failed between two steps: the previous exchange had all its data


class SavesInForward(Net):
    """Saves in the middle of a forward pass, as a signal's handler may."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        hidden = self.layers(self.embedding(batch[0]))
        if index == 3:
            self.trainer.save_checkpoint(self.options["path"])
        return nn.functional.cross_entropy(hidden, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW(self.parameters(), 0.01)


@later
@pytest.mark.parametrize(
    "options",
    tiers(
        [{"overlap": "next_step"}, {"local_steps": 2}, {"overlap": "next_step", "local_steps": 2}],
        [{"overlap": "next_step", "local_steps": 2}],
    ),
    ids=str,
)
def test_a_signals_handler_saves_during_an_exchange_and_backward_has_its_weights(options, tmp_path):
    def run(rank: int) -> Any:
        path = tmp_path / "saved.ckpt"
        module = SavesInForward(path=path)
        messages = Messages()
        trainer(sparse(**options), 2).fit(module, Loader(rank, 2))
        dist.barrier()
        saved = torch.load(path, weights_only=True)
        started = AdamNet()
        again = trainer(sparse(**options), 2, max_steps=3)  # three steps are done, so none follows
        again.fit(started, Loader(rank, 2), ckpt_path=path)
        same_weights = all(same(saved["state_dict"][name], param) for name, param in started.named_parameters())
        elements = again.strategy.reducer.state_dict()["elements"]
        return module.weights, same_weights, any(x.any() for x in elements["residual"].values()), messages.texts

    (first, fits, kept, texts), (second, _, others_kept, _) = lightning_ranks(2, run)
    assert torch.equal(first, second)
    assert fits
    assert kept
    assert others_kept
    assert not any("residuals" in text for text in texts)


@full
@pytest.mark.parametrize(
    ("owner", "place"), [(DeltaExchange, "wait"), *in_full((UpdateSegment, "begin_"), (ADAMW, "_init_group"))]
)
def test_a_handler_that_saves_within_a_step_has_weights_of_all_ranks_and_no_residuals(tmp_path, owner, place):
    def run(rank: int) -> Any:
        module, messages, path = AdamNet(), Messages(), tmp_path / "saved.ckpt"
        run = trainer(sparse(overlap="next_step", granularity="layer"), 2)
        real, calls = getattr(owner, place), []

        def handled(*args: Any, **options: Any) -> Any:
            calls.append(place)
            if len(calls) == 20:
                run.save_checkpoint(path)
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, place, handled)
            run.fit(module, Loader(rank, 2, 24))
        return module.weights, messages.texts, path.exists()

    (first, texts, saved), (second, _, _) = lightning_ranks(2, run)
    assert torch.equal(first, second)
    assert saved
    assert any("gets no residuals" in text for text in texts)


@pytest.mark.parametrize("overlap", ["backward", *in_full("next_step")])
def test_a_rank_with_fewer_batches_is_named_though_there_are_buffers(overlap):
    def run(rank: int) -> tuple[str, str, float]:
        strategy = sparse(overlap=overlap)
        return caught(lambda: trainer(strategy, 2).fit(AdamNet(), Loader(rank, 2, 8 if rank else 4)))

    (kind, _, _), (other, text, seconds) = lightning_ranks(2, run)
    assert kind == ("no error" if overlap == "backward" else "RankFailure")  # it waits for buffers then
    assert other == "RankFailure"
    assert re.search(r"Rank 0 pauses after 4 steps,.* while other ranks go on", text)
    assert seconds < SOON


class Meets(Net):
    """Ranks meet at the end of an epoch, in a validation or for the mean of a metric."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.options["lr"] == 0.01:
            self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validated", super().training_step(batch, index), sync_dist=True)


@pytest.mark.parametrize("exchange", [*in_full("gradient"), "update"])
@pytest.mark.parametrize("place", ["validation", *in_full("metric", "checkpoint")])
def test_ranks_that_meet_with_other_numbers_of_batches_do_not_wait(place, exchange, tmp_path):
    """Rank 0 waits in a collective of Lightning, and rank 1 in a step, perhaps in DDP's broadcast of buffers."""

    def run(rank: int) -> tuple[str, str, float]:
        options: dict[str, Any] = {"limit_val_batches": 1 if place == "validation" else 0, "num_sanity_val_steps": 1}
        if place == "checkpoint":
            options["callbacks"] = [pl.callbacks.ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)]
        net = Meets(ADAMW, lr=0.01 if place == "metric" else 0.02)
        fit = trainer(sparse(exchange=exchange), 2, max_epochs=2, **options).fit
        return caught(lambda: fit(net, Loader(rank, 2, 8 if rank else 4), Loader(rank, 2, 1)))

    # Rank 0's collective ends by the timeout here, because the process of rank 1 lives on.
    first, second = lightning_ranks(2, run, timeout=4)
    for _, text, _ in (first, second) if exchange == "update" else (second,):
        assert "Rank 0 pauses after 4 steps, for a validation, a checkpoint, another density or" in text
    if exchange == "update":
        assert second[0] == "RankFailure"
        assert second[2] < first[2]


@full
@pytest.mark.parametrize("exchange", [*in_full("gradient"), "update"])
def test_ranks_that_meet_with_equal_numbers_of_batches_go_on(exchange, tmp_path):
    def run(rank: int) -> Tensor:
        callbacks = [pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)]
        net = Meets(ADAMW, lr=0.01)
        options = {"max_epochs": 3, "val_check_interval": 2, "limit_val_batches": 1, "callbacks": callbacks}
        trainer(sparse(exchange=exchange), 2, **options).fit(net, Loader(rank, 2, 6), Loader(rank, 2, 1))
        return net.weights

    first, second = lightning_ranks(2, run)
    assert torch.equal(first, second)


class FailsInBackward(Net):
    """Rank 1 fails in its fourth backward pass, when a gradient has come already."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        hidden = self.embedding(batch[0])
        if self.global_rank == 1 and index == 3:
            hidden.register_hook(lambda _: 1 / 0)
        return nn.functional.cross_entropy(self.layers(hidden), batch[1])


@pytest.mark.parametrize("overlap", [*in_full("none"), "backward"])
def test_an_error_within_backward_is_told_to_the_others(overlap):
    def run(rank: int) -> tuple[str, str, float]:
        return caught(lambda: fit(rank, partial(FailsInBackward, ADAMW, lr=0.01), {"overlap": overlap}))

    first, second = lightning_ranks(2, run)
    assert first[:2] == ("RankFailure", "Rank 1 failed at step 3: ZeroDivisionError: division by zero")
    assert second[0] == "ZeroDivisionError"
    assert all(seconds < SOON for _, _, seconds in (first, second))


class FailsInStep(torch.optim.AdamW):
    """Raises on rank 0 in its third step, when it has changed the weights."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == 0:
            raise ZeroDivisionError("too late")
        return result


class SavesOnException(pl.Callback):
    before: Tensor
    saved: Tensor

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.before = module.weights

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.saved = torch.cat([state[name].flatten() for name, _ in module.named_parameters()])


def test_a_checkpoint_on_an_error_within_the_step_has_the_weights_before_it():
    def run(rank: int) -> tuple[Tensor, Tensor]:
        watch = SavesOnException()
        train = trainer(SparseDDPStrategy("topk"), 2, callbacks=[watch], gradient_clip_val=1.0)
        caught(lambda: train.fit(Net(FailsInStep, lr=0.01), Loader(rank, 2)))
        return watch.before, watch.saved

    (before, saved), _ = lightning_ranks(2, run)
    assert torch.equal(before, saved)


class FailsBetweenExchanges(Net):
    """Rank 1 raises in its fourth batch. Each batch takes a tenth of a second."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        time.sleep(0.1)
        if self.global_rank == 1 and index == 3:
            raise ZeroDivisionError("no more data")
        return super().training_step(batch, index)


def test_an_error_between_two_exchanges_is_told_to_the_others_before_the_next():
    def run(rank: int) -> tuple[str, str, float]:
        options = {"local_steps": 1000, "process_group_backend": "gloo"}
        train = trainer(SparseDDPStrategy("topk", exchange="update", **options), 2)
        net = FailsBetweenExchanges(ADAMW, lr=0.01)
        return caught(lambda: train.fit(net, Loader(rank, 2, 1000)))

    first, second = lightning_ranks(2, run)
    assert first[:2] == ("RankFailure", "Rank 1 failed at step 0: ZeroDivisionError: no more data")
    assert second[0] == "ZeroDivisionError"
    assert first[2] < SOON  # 1,000 batches would take 100 s


class ValidatesAlone(Net):
    """Rank 1 has no batches to validate, and rank 0 takes longer than a look for failures."""

    def __init__(self) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def validation_step(self, batch: Any, index: int) -> None:
        time.sleep(1.5)


def test_a_rank_without_batches_to_validate_waits_for_the_others():
    def run(rank: int) -> tuple[int, Tensor]:
        net = ValidatesAlone()
        options = {"max_epochs": 2, "use_distributed_sampler": False}
        train = trainer(SparseDDPStrategy("topk", process_group_backend="gloo"), 2, **options)
        validated: Any = torch.utils.data.DataLoader([0] * (1 - rank), batch_size=None)
        train.fit(net, Loader(rank, 2, 3), validated)
        return train.global_step, net.weights

    (steps, weights), (others, theirs) = lightning_ranks(2, run)
    assert steps == others == 6
    assert torch.equal(weights, theirs)


class Overflowing(Net):
    """Rank 1's loss overflows in its third batch."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * math.inf if self.global_rank == 1 and index == 2 else loss


class ClippedAndOverflowing(Overflowing):
    """Its weights are clipped on all ranks alike before each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.clamp_(-0.05, 0.05)


@later
def test_a_rank_that_leaves_a_step_out_takes_clipped_weights_as_the_others_do():
    net = partial(ClippedAndOverflowing, ADAMW, lr=0.01)
    first, second = lightning_ranks(2, partial(fit, scaled=True), net, {})
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.parametrize(("strategy", "options"), [*in_full(({"on_nonfinite": "skip"}, {})), ({}, {"scaled": True})])
def test_a_rank_that_leaves_a_step_out_goes_on_with_the_others(strategy, options):
    first, second = lightning_ranks(2, partial(fit, **options), partial(Overflowing, ADAMW, lr=0.01), strategy)
    assert first["weights"].isfinite().all()
    assert torch.equal(first["weights"], second["weights"])
    assert first["steps"] == second["steps"] == 8


def test_a_gradient_that_is_not_finite_ends_all_ranks():
    def run(rank: int) -> tuple[str, str, float]:
        return caught(lambda: fit(rank, partial(Overflowing, ADAMW, lr=0.01), {}))

    for kind, text, seconds in lightning_ranks(2, run):
        assert kind == NonFiniteGradient.__name__
        assert "The update of" in text
        assert "is not finite on rank 1 at step 2" in text
        assert seconds < SOON


class SlowBackward(Net):
    """Rank 1's loss overflows in its third batch. Backward then waits, in its middle, for the error of the exchange."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        hidden = self.embedding(batch[0])
        if index == 2:
            hidden.register_hook(lambda _: self.wait())
        loss = nn.functional.cross_entropy(self.layers(hidden), batch[1])
        return loss * math.inf if self.global_rank == 1 and index == 2 else loss

    def wait(self) -> None:
        until = time.monotonic() + 20
        while self.trainer.strategy.exchanger.session.error is None and time.monotonic() < until:
            time.sleep(0.01)


@later
def test_after_an_error_within_backward_the_model_has_the_agreed_weights():
    """The other thread fails in the first segment while backward continues. The memory of its weights holds updates."""

    def run(rank: int) -> Any:
        messages, net, before = Messages(), SlowBackward(ADAMW, lr=0.01), []
        look = pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: before.append(net.weights))
        strategy = SparseDDPStrategy("topk", density=0.02, bucket_cap_mb=0.0005, process_group_backend="gloo")
        with pytest.raises(NonFiniteGradient):
            trainer(strategy, 2, callbacks=[look]).fit(net, Loader(rank, 2))
        assert messages.texts == []
        gradients = [param.grad is not None for param in net.parameters()]
        return net.weights, before[-1], len(before), gradients

    results = lightning_ranks(2, run)
    for weights, before, batches, gradients in results:
        assert batches == 3
        assert torch.equal(weights, before)
        assert all(gradients)
    assert torch.equal(results[0][0], results[1][0])


def saving(
    rank: int,
    folder: Path,
    net: Any,
    strategy: dict[str, Any],
    size: int,
    *,
    scaled: bool = False,
    epochs: int = 2,
    **options: Any,
) -> Any:
    module = net()
    callback = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    plugins = scaler() if scaled else None
    run = trainer(sparse(**strategy), size, callbacks=[callback], max_epochs=epochs, plugins=plugins)
    run.fit(module, Loader(rank, size), **options)
    states = [optimizer.state_dict() for optimizer in run.strategy.optimizers]
    return module.weights, run.strategy.reducer.state_dict(), states


AVERAGING = [name for name, spec in METHODS.items() if spec.aggregator.averages]


def of_updates(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"method": name, "exchange": "update"}
    if "density" not in METHODS[name].options or METHODS[name].update_rule:
        options["density"] = None
    return options | ({"local_steps": 3} if method(name).local_steps > 1 else {})


RESUMED = [(name, {}) for name in AVERAGING] + [
    (name, {"overlap": "next_step"}) for name in ("topk", "randk", "local_sgd")
]


@pytest.mark.parametrize(
    ("name", "further"), tiers(RESUMED, [case for case in RESUMED if case[0] in ("topk", "diloco")])
)
def test_resume_is_bit_for_bit(tmp_path, name, further):
    def run(rank: int) -> bool:
        options = of_updates(name) | further
        whole = saving(rank, tmp_path, AdamNet, options, 2)
        dist.barrier()
        start = tmp_path / "step=5.ckpt"  # for diloco between two exchanges
        return same(whole, saving(rank, tmp_path / "again", AdamNet, options, 2, ckpt_path=start))

    assert lightning_ranks(2, run) == [True, True]


def halve_rate(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] *= 0.5


def empty_state(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["state"] = {}


def leave_out(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = []


def set_a_moment(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["state"][1]["exp_avg"] = torch.full((24, 8), 3.0)


def remove_a_parameters(checkpoint: dict[str, Any]) -> None:
    del checkpoint["optimizer_states"][0]["state"][1]


EDITS = [halve_rate, empty_state, leave_out, set_a_moment, remove_a_parameters]


class Edited(AtStart):
    """Edits the checkpoint when it is saved or loaded. A module's hooks get the same dictionary."""

    def __init__(self, where: str, edit: Any) -> None:
        self.where, self.edit = where, edit

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.where == "saved":
            self.edit(checkpoint)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.where == "loaded":
            self.edit(checkpoint)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        self.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())


@full
@pytest.mark.parametrize(
    ("where", "edit"),
    tiers(itertools.product(["loaded", "saved", "file"], EDITS), [("loaded", halve_rate)]),
)
def test_what_a_hook_changes_of_a_checkpoint_wins_and_the_rest_is_each_ranks_own(where, edit, tmp_path):
    """If stock `ddp` loads another value than it saved, ours loads it too. All other values are this rank's."""

    def states(rank: int, ours: bool) -> tuple[Any, Any, Any]:
        path = tmp_path / f"{ours}.ckpt"
        chosen = sparse() if ours else "ddp"
        run = trainer(chosen, 2, callbacks=[Edited(where, edit)])
        run.fit(AdamNet(), Loader(rank, 2))
        saved = copy.deepcopy(run.optimizers[0].state_dict())
        residual = run.strategy.reducer.state_dict()["elements"] if ours else None
        run.save_checkpoint(path)
        dist.barrier()
        if where == "file" and rank == 0:
            content = torch.load(path)
            edit(content)
            torch.save(content, path)
        dist.barrier()
        callback = Edited(where, edit)
        again = trainer(sparse() if ours else "ddp", 2, callbacks=[callback], max_epochs=2)
        again.fit(AdamNet(), Loader(rank, 2), ckpt_path=path)
        assert not ours or same(callback.state["elements"], residual)
        return saved, callback.optimizer

    def flat(state: Any, name: str = "") -> dict[str, Any]:
        if not isinstance(state, dict | list):
            return {name: state}
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for each, item in items for key, value in flat(item, f"{name}.{each}").items()}

    by_ddp, _ = lightning_ranks(2, states, False)
    for saved, loaded in lightning_ranks(2, states, True):
        ddps, ddps_saved, own, result = flat(by_ddp[1]), flat(by_ddp[0]), flat(saved), flat(loaded)
        assert result.keys() == ddps.keys()
        for name, value in result.items():
            assert same(value, own[name] if same(ddps[name], ddps_saved[name]) else ddps[name]), name


@full
def test_a_checkpoint_whose_step_or_residuals_a_hook_removes_starts_without(tmp_path):
    def without(checkpoint: dict[str, Any]) -> None:
        del checkpoint[sidecars.KEY]

    def other_step(checkpoint: dict[str, Any]) -> None:
        checkpoint[sidecars.KEY]["step"] = 100

    def run(rank: int) -> tuple[bool, int]:
        first = trainer(sparse(), 2)
        first.fit(AdamNet(), Loader(rank, 2))
        first.save_checkpoint(tmp_path / "x.ckpt")
        found = []
        for edit in (without, other_step):
            callback = Edited("loaded", edit)
            again = trainer(sparse(), 2, callbacks=[callback], max_epochs=2)
            again.fit(AdamNet(), Loader(rank, 2), ckpt_path=tmp_path / "x.ckpt")
            residual = callback.state["elements"]["residual"]
            found.append((any(x.any() for x in residual.values()), callback.state["step"]))
        return found

    assert lightning_ranks(2, run) == 2 * [[(False, 0), (True, 100)]]


def in_mode(rank: int, options: dict[str, Any], mode: Any) -> Tensor:
    torch.manual_seed(rank)
    net = AdamNet()
    optimizer = net.configure_optimizers()
    with mode():
        attach_updates(net, optimizer, "topk", density=0.1, **options)
    for step, batch in enumerate([*Loader(rank, 2).batches, *Loader(rank, 2).batches]):
        optimizer.zero_grad()
        net.training_step(batch, step).backward()
        optimizer.step()
        if step in (3, 7):
            with mode():
                exchange_pending(optimizer)
                net.training_step(batch, step)
    exchange_pending(optimizer)
    return net.weights


@full
@pytest.mark.parametrize(
    "options",
    tiers(
        [{"local_steps": 3, "overlap": "next_step"}, {"overlap": "next_step"}, {"local_steps": 3}, {}],
        [{"local_steps": 3, "overlap": "next_step"}],
    ),
)
def test_pending_updates_are_exchanged_in_inference_mode(options):
    first, second = run_ranks(2, in_mode, options, torch.inference_mode, backend="gloo")
    assert torch.equal(first, second)
    assert torch.equal(first, run_ranks(2, in_mode, options, torch.no_grad, backend="gloo")[0])


class OwnFormat(torch.optim.SGD):
    """Wraps an optimizer: has a custom format of its state, and options outside its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.defaults["every"] = 5

    def state_dict(self) -> Any:
        return {"wrapped": super().state_dict(), "every": 5}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["wrapped"])


class Signs(torch.optim.Optimizer):
    """Takes steps by signs. Its only option is the learning rate; torch's other options are missing."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                    param.add_(param.grad.sign(), alpha=-group["lr"] / self.state[param]["steps"])
        return loss


@full
@one_in(3)
@of_both
@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, Signs, OwnFormat])
def test_optimizers_without_usual_options_resume_bit_for_bit(optimizer, tmp_path, exchange):
    net = partial(Net, optimizer, lr=0.01)

    def run(rank: int) -> bool:
        whole = saving(rank, tmp_path, net, {"exchange": exchange}, 2)
        dist.barrier()
        return same(
            whole, saving(rank, tmp_path / "again", net, {"exchange": exchange}, 2, ckpt_path=tmp_path / "step=5.ckpt")
        )

    assert lightning_ranks(2, run) == [True, True]


class OneRankNeedsMore(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        if self.trainer.global_rank == 1:
            optimizer.defaults["slowness"] = optimizer.param_groups[0]["slowness"] = 3
        return optimizer


@full
@pytest.mark.parametrize("exchange", ["update", *in_full("gradient")])
def test_an_optimizer_of_another_kind_does_not_resume(tmp_path, exchange):
    momentum = partial(Net, SGD, momentum=0.9)

    def run(rank: int) -> list[tuple[str, str, float]]:
        nets = {"adamw": AdamNet, "sgd": momentum, "adam": partial(Net, torch.optim.Adam)}
        for name, net in nets.items():
            saving(rank, tmp_path / name, net, {"exchange": exchange}, 2, epochs=1)
        dist.barrier()

        def resume(name: str, net: Any) -> tuple[str, str, float]:
            start = tmp_path / name / "step=5.ckpt"
            return caught(lambda: saving(rank, tmp_path, net, {"exchange": exchange}, 2, epochs=1, ckpt_path=start))

        # One after the other in the same processes: no rank is left waiting.
        wrong = [("adamw", momentum), ("sgd", AdamNet), ("sgd", partial(OneRankNeedsMore, SGD, momentum=0.9))]
        return [resume(name, net) for name, net in (*wrong, ("adam", AdamNet), ("adamw", AdamNet))]

    first, second = lightning_ranks(2, run)
    assert [(kind, text) for kind, text, _ in first] == [(kind, text) for kind, text, _ in second]
    assert [kind for kind, *_ in first] == ["ValueError"] * 3 + ["no error"] * 2
    (_, to_sgd, _), (_, to_adamw, _), (_, on_one_rank, _), *_ = first
    assert "SGD needs momentum, dampening, but another kind of optimizer wrote these" in to_sgd
    assert "their parameter groups have lr, betas, eps, weight_decay" in to_sgd
    assert f"Net.load_from_checkpoint('{tmp_path}/adamw/step=5.ckpt'), and fit without ckpt_path." in to_sgd
    assert "AdamW needs betas, eps, but" in to_adamw, "where torch ends in a KeyError of its own"
    assert "SGD needs slowness, but" in on_one_rank


@full
def test_one_ranks_own_states_of_another_optimizer_end_all_ranks(tmp_path):
    start = tmp_path / "step=5.ckpt"

    def run(rank: int) -> tuple[str, str, float]:
        saving(rank, tmp_path, AdamNet, {}, 2)
        if rank == 1:
            info = torch.load(start, weights_only=True)[sidecars.KEY]
            state, _ = sidecars.read(start, info, 1, 2)
            assert state is not None
            del state["optimizers"]["0"]["param_groups"][0]["betas"]
            sidecars.write(start, info["tag"], state)
        dist.barrier()
        return caught(lambda: saving(rank, tmp_path, AdamNet, {}, 2, ckpt_path=start))

    for kind, text, _ in lightning_ranks(2, run):
        assert kind == "ValueError"
        assert "cannot be loaded (rank 1: AdamW needs betas, but another kind of optimizer wrote these" in text


@full
@pytest.mark.parametrize("name", AVERAGING)
def test_every_method_goes_on_with_more_ranks_and_a_scaler(tmp_path, name):
    def two(rank: int) -> Any:
        return saving(rank, tmp_path, AdamNet, of_updates(name), 2, scaled=True)[0]

    def three(rank: int) -> Any:
        start = tmp_path / "step=5.ckpt"
        return saving(rank, tmp_path / "3", AdamNet, of_updates(name), 3, scaled=True, ckpt_path=start)[0]

    for ranks, run in ((2, two), (3, three)):
        first, *others = lightning_ranks(ranks, run)
        assert first.isfinite().all()
        assert all(torch.equal(first, other) for other in others), f"{ranks} ranks"


@later
def test_moments_differ_among_ranks_and_their_mean_goes_to_fewer(tmp_path):
    def two(rank: int) -> Any:
        return saving(rank, tmp_path, AdamNet, {}, 2)

    first, second = lightning_ranks(2, two)
    moments = [state[2][0]["state"][0]["exp_avg"] for state in (first, second)]
    assert not torch.equal(*moments)

    def one(rank: int) -> Any:
        return saving(rank, tmp_path / "one", AdamNet, {}, 1, ckpt_path=tmp_path / "step=15.ckpt")

    (alone,) = lightning_ranks(1, one)
    assert alone[0].isfinite().all()


@full
def test_moments_of_a_layer_that_had_gradients_on_one_rank_alone_go_to_fewer_ranks(tmp_path):
    def two(rank: int) -> Any:
        return saving(rank, tmp_path, Unused, {}, 2)

    lightning_ranks(2, two)

    def one(rank: int) -> Any:
        return saving(rank, tmp_path / "one", Unused, {}, 1, ckpt_path=tmp_path / "step=15.ckpt")

    (alone,) = lightning_ranks(1, one)
    assert alone[0].isfinite().all()


@full
@pytest.mark.parametrize(
    ("before", "after"), [("update", "gradient"), ("gradient", "update"), ("ddp", "update"), ("update", "ddp")]
)
def test_resume_from_another_way(tmp_path, before, after):
    def run(rank: int) -> tuple[Tensor, list[str]]:
        messages = Messages()

        def strategy(kind: str) -> Any:
            return pl.strategies.DDPStrategy() if kind == "ddp" else sparse(exchange=kind)

        for kind, start in ((before, None), (after, tmp_path / "step=5.ckpt")):
            module = AdamNet()
            callback = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
            trainer(strategy(kind), 2, callbacks=[callback]).fit(module, Loader(rank, 2), ckpt_path=start)
        return module.weights, messages.texts

    (first, said), (second, other) = lightning_ranks(2, run)
    assert torch.equal(first, second)
    states = "residual, signal" if before == "update" else "residual"
    text = f"({states}) is from a run that exchanged {before}s; this one exchanges {after}s"
    assert sum(text in message for message in said) == ("ddp" not in (before, after))
    assert not any("The saved state" in message for message in other)


class Normalized(Net):
    """Changes weights itself: some in the training step or before it, and some by a hook of the optimizer's."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(ADAMW, lr=0.05, **options)
        self.where, self.momentum = where, nn.Linear(8, 24).requires_grad_(False)
        self.clamped: list[Tensor] = []

    @torch.no_grad()
    def normalize(self) -> None:
        self.layers[3].weight.copy_(nn.functional.normalize(self.layers[3].weight, dim=1))
        self.momentum.weight.lerp_(self.layers[0].weight, 0.5)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.where == "before":
            self.normalize()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.where == "within":
            self.normalize()
        return super().training_step(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.clamp)
        return optimizer

    @torch.no_grad()
    def clamp(self, *_: Any) -> None:
        self.layers[0].weight.clamp_(-0.2, 0.2)
        self.clamped.append(self.weights)


def normalized(rank: int, where: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(rank)
    module = Normalized(where)
    trainer(sparse(density=0.1), 2).fit(module, Loader(rank, 2))
    return (
        module.weights,
        torch.stack([x.weight.detach().abs().max() for x in (module.layers[0], module.momentum)]),
        module.clamped,
    )


@full
def test_what_a_module_does_to_weights_itself_is_no_update():
    before, within = run_ranks(2, normalized, "before"), run_ranks(2, normalized, "within")
    for (weights, (largest, _), clamped), (others, _, _) in zip(before, within, strict=True):
        assert torch.equal(weights, before[0][0])
        assert torch.equal(weights, others), "a training step is a closure of the optimizer's step"
        assert largest <= 0.2, "the optimizer's other hooks come after the exchange"
        assert all(map(torch.equal, clamped, before[0][2]))
    assert Normalized("").momentum.weight.abs().max() > 0.3 > within[0][1][1], "a momentum encoder follows"


def test_plain_torch():
    def run(rank: int, density: float) -> tuple[Tensor, int]:
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 1))
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = attach_updates(net, optimizer, "topk", density=density, granularity="model")
        assert isinstance(reducer, Reducer)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(8, 20)).pow(2).mean().backward()
            optimizer.step()
        return torch.cat([value.float().reshape(-1) for value in net.state_dict().values()]), reducer.step

    for density in (0.01, 1.0):
        (first, steps), (second, _) = run_ranks(2, run, density)
        assert torch.equal(first, second)
        assert steps == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"local_steps": 0}, "local_steps=0 must be a whole number of steps, 1 or more"),
        ({"local_steps": 2.5}, "local_steps=2.5 must be a whole number"),
        ({"exchange": "weights"}, "exchange='weights' is not known; choose from auto, gradient, update"),
        ({"exchange": "gradient", "local_steps": 4}, "gradients are exchanged in every step"),
        ({"method": "diloco", "exchange": "gradient"}, "it is made to exchange updates"),
        ({"method": "diloco", "local_steps": 1}, "Take several local steps"),
        ({"method": "signsgd", "exchange": "update"}, "no mean of what ranks send, so it cannot exchange updates"),
        ({"method": "signum", "exchange": "update", "hierarchical": True}, "makes no mean of what ranks send"),
        ({"method": "median", "exchange": "update"}, "makes no mean of what ranks send"),
        ({"method": "signsgd", "local_steps": 4}, "makes no mean of what ranks send"),
        ({"overlap": True}, "overlap=True is not known; choose from none, backward, next_step"),
        ({"exchange": "gradient", "overlap": "next_step"}, "every step waits for its gradients. Set exchange='update'"),
        ({"method": "gtopk", "overlap": "next_step"}, r"overlap='next_step' with 'gtopk': .* take topk"),
        (
            {"method": "topk", "overlap": "next_step", "hierarchical": True},
            r"overlap='next_step' with hierarchical: .* Leave hierarchical out",
        ),
        ({"method": "diloco", "overlap": "next_step"}, "Leave overlap out, or take a rule without an outer step"),
        ({"method": "signsgd", "overlap": "next_step"}, r"overlap='next_step' with 'signsgd'"),
        (
            {"method": Method(Sign(), NoMemory(), MajorityVote(), UpdateRule(local_steps=4))},
            "makes no mean of what ranks send",
        ),
    ],
)
def test_options_that_make_no_sense(options, text):
    with pytest.raises(ValueError, match=text):
        SparseDDPStrategy(**{"method": "topk", **options})


def test_a_vote_makes_no_updates():
    def run(rank: int) -> tuple[str, str, float]:
        net = nn.Linear(4, 2)
        return caught(lambda: attach_updates(net, ADAMW(net.parameters(), 0.01), "signsgd"))

    for kind, text, seconds in run_ranks(2, run):
        assert kind in ("ValueError", "RankFailure")
        assert "makes no mean of what ranks send, so it cannot exchange updates" in text
        assert seconds < SOON


@pytest.mark.parametrize("options", [{}, {"local_steps": 1}, {"exchange": "gradient"}, {"hierarchical": True}])
def test_a_vote_exchanges_gradients_whatever_the_optimizer(options):
    strategy = SparseDDPStrategy("signsgd", **options)
    assert strategy._options.choose([ADAMW(nn.Linear(4, 2).parameters(), 0.01)])[0] == "gradient"


@full
@pytest.mark.parametrize("local_steps", [1, *in_full(4)])
def test_a_scaler_of_the_modules_own_may_leave_a_step_out_on_one_rank(local_steps):
    """The result is the same as if that rank's optimizer had had no gradient."""

    def run(rank: int, scaled: bool, wrapped: bool = False) -> tuple[Tensor, int, bool]:
        modules = [OwnScaler(scaled, rank == 1, wrapped)]
        ended = fit(rank, modules.pop, {"density": 0.1, "local_steps": local_steps})
        return ended["weights"], ended["steps"], torch.amp.GradScaler.step is step

    step = torch.amp.GradScaler.step
    expected = lightning_ranks(2, run, False)
    for wrapped in (False, True):
        for (weights, steps, is_torchs), (others, _, _) in zip(
            lightning_ranks(2, run, True, wrapped), expected, strict=True
        ):
            assert torch.equal(weights, others)
            assert torch.equal(weights, expected[0][0])
            assert steps == 8 // local_steps
            assert is_torchs, "after fit torch is as it was"


@full
def test_plain_torch_with_a_scaler_that_leaves_a_step_out_on_one_rank():
    def run(rank: int, scaled: bool, fused: bool) -> tuple[Tensor, int, float]:
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 1))
        optimizer = ADAMW(net.parameters(), 0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        reducer = attach_updates(net, optimizer, "topk", density=0.1, granularity="model")
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(8, 20)).pow(2).mean()).backward()
            if rank == 1 and step == 3:
                net[0].weight.grad.fill_(math.inf) if scaled else optimizer.zero_grad()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([param.detach().view(-1) for param in net.parameters()]), reducer.step, scaler.get_scale()

    for fused in (False, True):
        first, second = run_ranks(2, run, True, fused)
        assert [first[1:], second[1:]] == [(6, 2.0**8), (6, 2.0**7)]
        assert torch.equal(first[0], second[0])
        if not fused:  # its steps of unscaled gradients have other roundings
            assert torch.equal(first[0], run_ranks(2, run, False, fused)[0][0])


class Killed(Net):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.global_rank == 1 and index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


@pytest.mark.parametrize("overlap", ["backward", *in_full("next_step")])
def test_a_rank_that_is_killed_is_named(overlap):
    def run(rank: int) -> tuple[str, str, float]:
        return caught(lambda: fit(rank, partial(Killed, ADAMW, lr=0.01), {"overlap": overlap}, 3))

    first, killed, third = lightning_ranks(3, run)
    assert killed is None
    for kind, text, seconds in (first, third):
        assert kind == "RankFailure"
        assert "rank 1" in text
        assert seconds < SOON


@pytest.mark.parametrize(
    ("differ", "said"),
    [
        ({"exchange": "update"}, "rank 0 has gradient of float32 by SGD, rank 1 has update of float32 by SGD"),
        ({"precision": "16-true"}, "rank 0 has gradient of float32 by SGD, rank 1 has gradient of float16 by SGD"),
        ({"optimizer": LBFGS}, "rank 0 has gradient of float32 by SGD, rank 1 has gradient of float32 by LBFGS"),
    ],
)
def test_ranks_that_would_exchange_different_things_are_told_so(differ, said):
    def run(rank: int) -> tuple[str, str, float]:
        own = {"exchange": "gradient", "precision": "32-true", "optimizer": SGD} | (differ if rank else {})
        net = partial(Net, own["optimizer"], lr=0.1)
        return caught(lambda: fit(rank, net, {"exchange": own["exchange"]}, precision=own["precision"]))

    for kind, text, seconds in lightning_ranks(2, run):
        assert kind == "RankFailure"
        assert f"Ranks differ in exchange: {said}" in text
        assert seconds < SOON


@full
@pytest.mark.parametrize("overlap", [*in_full("backward"), "next_step"])
def test_callbacks_show_updates(tmp_path, overlap):
    def run(rank: int, watch: bool = True) -> Tensor:
        watching = [GradientDistribution(True), ContractionRatio(True), CommunicationMonitor()] if watch else []
        logger = TensorBoardLogger(tmp_path, name="", version="") if watch else False
        options = {"callbacks": watching, "log_every_n_steps": 2, "logger": logger}
        return fit(rank, AdamNet, {"overlap": overlap}, **options)["weights"]

    watched, _ = lightning_ranks(2, run)
    assert torch.equal(watched, lightning_ranks(2, partial(run, watch=False))[0])
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()
    assert {"distribution/update g", "distribution/residual e", "distribution/u = g + e"} <= set(tags["histograms"])
    shares = [scalar.value for scalar in found.Scalars("seconds/hidden_share")]
    assert all(0 <= share <= 1 for share in shares), shares
    assert overlap == "next_step" or all(share < 1 for share in shares), "training waits for the end of the exchange"
    assert {scalar.value for scalar in found.Scalars("communication/bytes_per_step")[1:]} == {
        found.Scalars("communication/bytes_per_step")[0].value
    }
    assert 0 < found.Scalars("contraction/measured")[-1].value < 1


@pytest.mark.parametrize("overlap", [*in_full("none"), "next_step"])
def test_callbacks_leave_the_error_of_an_exchange_as_it_is(overlap):
    class Breaks(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_rank == 1 and self.trainer.global_step == 3:
                next(self.parameters()).grad.fill_(math.nan)

    def run(rank: int) -> tuple[str, str, float]:
        options = {"callbacks": [CommunicationMonitor(), ContractionRatio()], "log_every_n_steps": 1}
        return caught(lambda: fit(rank, partial(Breaks, ADAMW, lr=0.01), {"overlap": overlap}, **options))

    for kind, text, _ in lightning_ranks(2, run):
        assert kind == NonFiniteGradient.__name__, text


@later
def test_callbacks_wait_for_the_exchange_and_show_how_far_ranks_drift(tmp_path):
    """Every fifth of 16 steps logs, every third has an exchange. Steps 5, 10 and 15 are reported with 6, 12 and 15."""

    def run(rank: int) -> None:
        options = {"callbacks": [CommunicationMonitor()], "logger": TensorBoardLogger(tmp_path, name="", version="")}
        fit(
            rank,
            AdamNet,
            {"method": "local_sgd", "density": None, "local_steps": 3},
            log_every_n_steps=5,
            max_epochs=2,
            **options,
        )

    lightning_ranks(2, run)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    drift = found.Scalars("communication/drift")
    assert [scalar.step for scalar in drift] == [5, 11, 14]  # counted from 0
    assert all(0 < scalar.value < 10 for scalar in drift)


@full
@pytest.mark.skipif(
    Version(pl.__version__) < Version("2.5.3"),
    reason="after its learning rate finder Lightning 2.5.0 trains no step, with any strategy",
)
def test_a_learning_rate_finder_leaves_nothing_behind():
    def run(rank: int) -> list[Tensor]:
        found = []
        for callbacks in ([], [pl.callbacks.LearningRateFinder(num_training_steps=5, update_attr=False)]):
            net = AdamNet()
            net.lr = 0.0
            batches = torch.utils.data.DataLoader(list(Loader(rank, 2)), batch_size=None)
            trainer(sparse(), 2, callbacks=callbacks, enable_checkpointing=False).fit(net, batches)
            found.append(net.weights)
        return found

    ranks = lightning_ranks(2, run)
    assert all(torch.equal(weights, ranks[0][0]) for found in ranks for weights in found)


class Unknown(torch.optim.Optimizer):
    """Steps by the sign of the gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad.sign()
        return loss


SCALES, SIGNS = "scales the gradient", "takes signs"


@pytest.mark.parametrize(
    ("name", "base", "expected"),
    [
        *((name, Unknown, None) for name in ("FusedAdam", "PagedAdamW8bit", "Ranger", "AdEMAMix", "ADOPT", "SOAP")),
        *((name, Unknown, None) for name in ("Prodigy", "Sophia", "DAdaptSGD", "SingleDeviceMuon", "Whatever")),
        *((base.__name__, base, None) for base in (torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Adagrad)),
        *(("Mine", base, SCALES) for base in (SGD, torch.optim.ASGD)),
        *((name, Unknown, SIGNS) for name in ("Lion", "DAdaptLion", "SignSGD", "Tiger")),
        ("Mine", torch.optim.Rprop, SIGNS),
        ("ZeroRedundancyOptimizer", Unknown, "shares its steps among ranks"),
        *((name, Unknown, RECOMPUTES) for name in ("MADGRAD", "FTRL", "MirrorMADGRAD")),
    ],
)
def test_updates_are_exchanged_unless_an_optimizer_is_known_to_want_gradients(name, base, expected):
    optimizer = type(name, (base,), {})([torch.ones(1, requires_grad=True)], lr=0.1)
    assert reason_for_gradients(optimizer) == expected
    type(optimizer).eval = lambda self: None  # makes weights of each rank's own state
    if expected not in ("shares its steps among ranks", RECOMPUTES):
        assert reason_for_gradients(optimizer) == "evaluates other weights than it trains"


class Master(torch.optim.AdamW):
    """Steps copies of the weights in double precision, and then copies them into the weights."""

    dtype = torch.float64

    def copies(self) -> list[Tensor]:
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("master", param.detach().to(self.dtype, copy=True))
        return [self.state[param]["master"] for param in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        copies, params = self.copies(), self.param_groups[0]["params"]
        for copied, param in zip(copies, params, strict=True):
            copied.sub_(param.grad, alpha=0.01)
            param.copy_(copied)
        return loss


class Copying(Master):
    """Keeps copies in the dtype of the weights."""

    dtype = torch.float32


class Flat(Master):
    """Keeps its copies in one tensor."""

    def copies(self) -> list[Tensor]:
        params = self.param_groups[0]["params"]
        if not hasattr(self, "groups"):
            self.groups = [{"flat": torch.cat([param.detach().flatten() for param in params])}]
        parts = self.groups[0]["flat"].split([param.numel() for param in params])
        return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


class Unreadable(Tensor):
    """A subclass of tensors without storage, as of quantized states."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


class Odd(torch.optim.AdamW):
    """Keeps tensors that have no storage or no strides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param] |= {"codes": Unreadable(param), "rows": param.to_sparse(), "phase": param * 1j}
        return loss


class Slow(torch.optim.AdamW):
    """Keeps slow weights, as Lookahead does, and the first weights, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = [param.detach().clone() for param in self.param_groups[0]["params"]]
        loss = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        for param, first in zip(self.param_groups[0]["params"], before, strict=True):
            self.state[param].setdefault("first", first)
            slow = self.state[param].setdefault("slow", first.clone())
            if self.steps % 2 == 0:
                param.copy_(slow.lerp_(param, 0.5))
        return loss


@full
@pytest.mark.parametrize(
    ("optimizer", "method", "refused"),
    [
        (Master, "topk", True),
        (Flat, "topk", True),
        (Copying, "topk", None),
        (Slow, "topk", False),
        (Odd, "topk", False),
        *in_full((torch.optim.AdamW, "topk", False), (Master, "diloco", True)),
        *in_full((Master, "local_sgd", False), (Master, "local_sgd, 2 steps", True)),
    ],
)
def test_an_optimizer_that_steps_its_own_copy_of_the_weights_is_refused_or_warned_of(optimizer, method, refused):
    def run(rank: int) -> Any:
        name, _, several = method.partition(",")
        options = {} if name == "topk" else {"local_steps": 2 if several or name == "diloco" else 1}
        strategy, net = SparseDDPStrategy(name, process_group_backend="gloo", **options), Net(optimizer, lr=0.01)
        messages, error = Messages(), ""
        try:
            trainer(strategy, 2, max_steps=8).fit(net, Loader(rank, 2))
        except RuntimeError as caught:
            error = str(caught)
        return error, [each for each in messages.texts if "its own copy" in each], net.weights

    (first, warned, weights), (second, silent, other) = lightning_ranks(2, run)
    text = f"{optimizer.__name__} keeps its own copy of '"
    for error in (first, second):
        assert text in error if refused else not error
    assert ([each.startswith(text) for each in warned], silent) == ([True] if refused is None else [], [])
    assert refused or torch.equal(weights, other)


def test_an_optimizer_that_recomputes_weights_exchanges_gradients():
    optimizer = type("MADGRAD", (Unknown,), {})([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="MADGRAD computes weights from the first ones and the sum of all gradients"):
        check_updates(method("topk"), [optimizer])
    with pytest.raises(ValueError, match="MADGRAD computes weights from the first ones"):
        check_updates(method("local_sgd"), [optimizer])  # the next local step would undo the mean
    check_updates(Method(Identity(), NoMemory(), update_rule=UpdateRule()), [optimizer])


@later
def test_an_optimizer_that_shares_its_steps_trains_as_with_ddp():
    """Each rank steps its part of the parameters for all ranks, so all ranks have the same update of one gradient."""

    def run(rank: int) -> Any:
        make: Any = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=0.01)
        gloo = partial(SparseDDPStrategy, process_group_backend="gloo")
        results = []
        for strategy in ("ddp", gloo("topk", density=1.0), gloo("topk", exchange="update")):
            net, messages = Net(make), Messages()
            try:
                trainer(strategy, 2, max_steps=3).fit(net, Loader(rank, 2))
            except ValueError as error:
                results.append(str(error))
                break
            results.append((net.weights, messages.texts))
        return results

    for (stock, _), (ours, _), text in lightning_ranks(2, run):
        torch.testing.assert_close(ours, stock)
        assert not torch.equal(stock, Net().weights)
        assert "ZeroRedundancyOptimizer broadcasts each rank's part of the step to all ranks" in text
        assert "use AdamW itself" in text


class Unhooked(torch.optim.Optimizer):
    """Like apex's LARC, does not call torch's constructor, and so calls no hooks."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.AdamW(params, lr)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@later
def test_an_optimizer_without_hooks_trains_as_with_ddp_and_auto_ddp_takes_it():
    """Its updates cannot be exchanged, also beside an optimizer with hooks."""
    options = StrategyOptions("topk", None, {}, ReducerOptions())
    ours, torchs = (kind([torch.ones(1, requires_grad=True)], lr=0.1) for kind in (Unhooked, torch.optim.AdamW))
    assert options.choose([torchs, ours]) == ("gradient", "the optimizer: Unhooked calls no hooks of torch")

    def run(rank: int) -> Any:
        gloo = partial(SparseDDPStrategy, process_group_backend="gloo")
        strategies = ("ddp", "auto_ddp", gloo("topk", density=1.0), gloo("topk"), gloo("topk", exchange="update"))
        results: list[Any] = []
        for strategy in strategies:
            net, messages = Net(Unhooked, lr=0.01), Messages()
            try:
                trainer(strategy, 2, max_steps=3).fit(net, Loader(rank, 2))
            except TypeError as error:
                return [*results, str(error)]
            results.append((net.weights, messages.texts))
        return results

    for number, ((stock, _), (auto, _), (all_of_it, _), (_, messages), text) in enumerate(lightning_ranks(2, run)):
        assert torch.equal(auto, stock)
        torch.testing.assert_close(all_of_it, stock)
        assert any("Unhooked calls no hooks of torch, so ranks exchange gradients" in x for x in messages) == (
            number == 0
        )
        assert "Unhooked calls no hooks of torch around its steps, so its updates cannot be exchanged" in text


class Dividing(Unknown):
    """Each rank steps its part of the parameters for all ranks, as Jordan's Muon does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if index % 2 == dist.get_rank():
                    param -= group["lr"] * param.grad
                every = [torch.empty_like(param) for _ in range(2)]
                dist.all_gather(every, param)
                param.copy_(every[index % 2])
        return loss


class Plain(SGD):
    """Exchanges nothing, but is not torch's. Its weight decay changes unused rows equally on all ranks."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, weight_decay=0.1)


class Hidden(Unknown):
    """As `Dividing`, but `step` itself calls no collective."""

    def step(self, closure: Any = None) -> Any:
        return Dividing.step(self, closure)  # type: ignore[arg-type]


class WithClosure(Dividing):
    """Leaves the step to its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Dividing, WithClosure])
def test_of_two_optimizers_one_that_shares_its_steps_decides(kind):
    first, second = (each([torch.ones(1, requires_grad=True)], lr=0.1) for each in (kind, ADAMW))
    options = StrategyOptions("topk", None, {}, ReducerOptions())
    assert options.choose([second])[0] == "update"
    for optimizers in ([first, second], [second, first]):
        reason = f"the optimizer: {kind.__name__} shares its steps among ranks"
        assert options.choose(optimizers) == ("gradient", reason)


@later
def test_an_optimizer_whose_step_gathers_parameters_is_detected():
    def run(rank: int) -> Any:
        results = []
        for kind, density in ((Dividing, None), (Dividing, 1.0), (Dividing, 0.5), (Hidden, 0.5), (Plain, 0.5)):
            messages, net, strategy = Messages(), Net(kind, lr=0.01), "ddp"
            if density is not None:
                exchange: Any = "update" if kind is Plain else "auto"
                options = {"exchange": exchange, "process_group_backend": "gloo"}
                strategy = SparseDDPStrategy("topk", density=density, **options)
            trainer(strategy, 2, max_steps=3).fit(net, Loader(rank, 2))
            results.append((net.weights, messages.texts))
        return results

    (stock, ours, sparse, hidden, plain), (_, other, *_) = lightning_ranks(2, run)
    torch.testing.assert_close(ours[0], stock[0])
    assert torch.equal(ours[0], other[0])
    assert "Dividing shares its steps among ranks, so ranks exchange gradients" in sparse[1][0]
    assert "use an optimizer for one rank" in sparse[1][0]
    (text,) = hidden[1]
    assert "All ranks have made the same update of 'layers.3.weight', 'layers.0.weight'. " in text
    assert "If Hidden exchanges its results among ranks, gradients are lost" in text
    assert plain[1] == []


@full
@pytest.mark.parametrize("overlap", ["backward", "next_step"])
def test_ranks_with_the_same_batches_are_warned_of(overlap):
    """Updates of AdamW are rescaled as if ranks had different batches."""

    def run(rank: int) -> list[list[str]]:
        said = []
        for number, net in ((0, AdamNet), (rank, AdamNet), (0, Net)):
            messages = Messages()
            run = trainer(sparse(overlap=overlap, exchange="update"), 2, max_steps=4)
            run.fit(net(), Loader(number, 2))
            said.append(messages.texts)
        return said

    (same_batches, own_batches, of_sgd), others = lightning_ranks(2, run)
    (text,) = same_batches
    assert "All ranks have made the same update of " in text
    assert "'layers.0.weight'" in text
    assert "If your code averages gradients among ranks, steps become too large: let ranks exchange gradients" in text
    assert own_batches == []
    assert not any("the same update" in text for text in of_sgd)  # the same steps as with `ddp`
    assert others == [[], [], []]


class Tasks(Net):
    """A head for each rank's task."""

    def __init__(self, *args: Any, touches: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heads, self.touches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), touches

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        output = self.heads[self.global_rank](self.layers(self.embedding(batch[0])))
        loss = nn.functional.cross_entropy(output, batch[1])
        return loss + sum(0 * param.sum() for param in self.heads.parameters()) if self.touches else loss


@full
@pytest.mark.parametrize("overlap", ["backward", "next_step"])
def test_a_gradient_that_one_rank_lacks_is_warned_of(overlap, monkeypatch):
    monkeypatch.setattr("lightning_sparse.hooks.rates.PERIOD", 3)

    def run(rank: int) -> list[list[str]]:
        said = []
        for touches in (False, True):
            messages = Messages()
            net = Tasks(ADAMW, lr=0.01, touches=touches)
            trainer(sparse(overlap=overlap), 2, max_steps=12, max_epochs=2).fit(net, Loader(rank, 2))
            said.append(messages.texts)
        return said

    (without, touched), others = lightning_ranks(2, run)
    (text,) = without
    assert "Rank 1 has no gradient of 'heads.0.weight' in a step, and other ranks have one" in text
    assert "4 of 11 had gradients on some ranks only" in text
    assert touched == []
    assert others == [[], []]


class Manual(Net):
    """Its optimizer is unknown to Lightning."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.own = [kind(self.parameters(), lr=0.01)]

    def configure_optimizers(self) -> None:  # type: ignore[override]
        pass

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        self.own[0].zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.own[0].step()


@later
def test_an_optimizer_that_lightning_does_not_know_is_warned_of_if_gradients_are_sparse():
    def run(rank: int) -> list[list[str]]:
        said = []
        for kind, density in ((ADAMW, 0.02), (ADAMW, 1.0), (SGD, 0.02)):
            messages = Messages()
            trainer(sparse(density=density), 2, max_epochs=1).fit(Manual(kind), Loader(rank, 2))
            said.append([text for text in messages.texts if "gradients that arrive seldom" in text])
        return said

    first, second = lightning_ranks(2, run)
    assert [len(texts) for texts in first] == [1, 0, 0]
    assert "AdamW takes too large steps" in first[0][0]
    assert second == [[], [], []]


@later
def test_without_an_optimizer_nothing_changes():
    """Lightning has a stand-in for the optimizer of a module that returns none. Gradients are still exchanged."""

    class Untrained(Net):
        def configure_optimizers(self) -> None:
            return None

    def run(rank: int) -> list[Tensor]:
        nets = [Untrained() for _ in range(3)]
        for net, strategy in zip(nets, ("topk_ddp", "int4_ddp", "auto_ddp"), strict=True):
            trainer(strategy, 2, max_epochs=1).fit(net, Loader(rank, 2))
        return [net.weights for net in nets]

    for weights in lightning_ranks(2, run):
        assert all(torch.equal(each, Net().weights) for each in weights)


class Lion(Unknown):
    """Takes signs, as its name says."""


@full
def test_sparse_gradients_are_warned_of_with_any_optimizer_that_wants_none():
    def run(rank: int) -> list[list[str]]:
        nets = [(Unknown, "auto"), (Unknown, "gradient"), (Lion, "auto"), (Lion, "gradient"), (SGD, "gradient")]
        fits = [fit(rank, partial(Net, kind, lr=0.01), {"exchange": exchange}, max_steps=1) for kind, exchange in nets]
        int4 = fit(rank, partial(Net, Lion, lr=0.01), {"method": "int4", "density": None}, max_steps=1)
        return [each["messages"] for each in (*fits, int4)]

    first, _ = lightning_ranks(2, run)
    assert [len(texts) for texts in first] == [0, 1, 1, 1, 0, 0]
    assert "Unknown takes too large steps with gradients that arrive seldom" in first[1][0]
    assert "exchange='update'" in first[1][0]
    for texts in first[2:4]:
        assert "Lion takes signs" in texts[0]
        assert "'int4'" in texts[0]


class AdamW8bit(OthersAdam):
    """Is not torch's, and takes no closure."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        super().step()
        return loss


class ScheduleFree(Unknown):
    """Has an `eval`, as schedule-free optimizers do."""

    def eval(self) -> None:
        raise AssertionError("not called by this package")


@later
def test_an_optimizer_that_evaluates_other_weights_is_warned_of_where_they_differ():
    def run(rank: int) -> list[list[str]]:
        net = partial(Net, ScheduleFree, lr=0.01)
        return [fit(rank, net, {"exchange": exchange})["messages"] for exchange in ("gradient", "update")]

    (first, warned), others = lightning_ranks(2, run)
    assert others == [[], []]
    (gradients,) = first
    assert gradients.startswith("ScheduleFree evaluates other weights than it trains, so ranks exchange gradients.")
    assert len(warned) == 1
    assert warned[0].startswith("ScheduleFree.eval() makes weights of its own state, in which ranks differ")


class Replaces(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.optimizers = [torch.optim.AdamW(module.parameters(), 0.01)]


def test_an_optimizer_that_a_callback_puts_in_place_is_an_error():
    def rank(rank: int) -> str:
        run = trainer(SparseDDPStrategy("topk"), 2, callbacks=[Replaces()])
        return caught(lambda: run.fit(AdamNet(), Loader(rank, 2)))[1]

    for text in lightning_ranks(2, rank):
        assert "This AdamW is not one of the optimizers that fit began with" in text


@later
def test_a_density_that_is_small_for_updates_is_warned_of_unless_the_optimizer_is_sgd():
    def run(rank: int) -> list[list[str]]:
        cases = [(AdamNet, 0.001), (AdamNet, 0.01), (AdamNet, None), (Net, 0.001)]
        settings = [(net, {"exchange": "update", "density": density}) for net, density in cases]
        settings.append((AdamNet, {"method": "memsgd", "density": 0.001}))  # of its paper
        return [fit(rank, net, options, max_steps=1)["messages"] for net, options in settings]

    (warned, *quiet), others = lightning_ranks(2, run)
    assert len(warned) == 1
    assert warned[0].startswith("density=0.001 is small for updates of AdamW: at 0.001 a GPT with AdamW needed 1.24")
    assert [*quiet, *others] == [[]] * 9


class TwoKinds(Gan):
    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [ADAMW(self.generator.parameters(), lr=0.01), Unknown(self.discriminator.parameters(), lr=0.01)]


class MuonNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in self.parameters() if param.dim() == 2], lr=0.01)


@full
def test_the_first_line_says_what_is_done_to_which_optimizer_and_why():
    cases: list[tuple[Any, dict[str, Any], list[str]]] = [
        (
            AdamNet,
            {},
            ["momentum of AdamW is paid out and cleared at sent entries", "updates of AdamW are rescaled by up to √2"],
        ),
        (AdamNet, {}, ["Chosen by the optimizer, AdamW."]),
        (
            Net,
            {"exchange": "update"},
            ["Each rank steps its own SGD, and the updates are exchanged.", "Chosen by exchange='update'."],
        ),
        (Net, {}, ["Gradients are exchanged. Chosen by the optimizer: SGD scales the gradient."]),
        (
            partial(Net, AdamW8bit, lr=0.01),
            {},
            [
                "exchanged; AdamW8bit is treated like Adam if its state has Adam's exp_avg and exp_avg_sq. They",
                "Chosen by the optimizer, AdamW8bit.",
                "They are exchanged after backward: AdamW8bit may look at all gradients.",
            ],
        ),
        (AdamNet, {"method": "int4", "density": None}, ["Gradients are exchanged. Chosen by the method."]),
        (
            partial(Net, torch.optim.RMSprop),
            {},
            ["momentum of RMSprop is unchanged, because its place in the state is unknown"],
        ),
        (
            TwoKinds,
            {"exchange": "update"},
            [
                "momentum of AdamW is paid out and cleared at sent entries; ",
                "; momentum of Unknown is unchanged",
            ],
        ),
    ]
    if hasattr(torch.optim, "Muon"):  # since torch 2.9
        cases.append((MuonNet, {}, ["Each rank steps its own Muon", "Chosen by the optimizer, Muon."]))
    for (*_, said), (first, _) in zip(cases, fits([case[:2] for case in cases], max_steps=1), strict=True):
        assert all(text in first["first line"] for text in said), first["first line"]


def test_what_is_sent_where_no_density_is_given():
    cases = [
        (AdamNet, {}, "TopK(density=0.003, value_format='int2')"),
        (AdamNet, {"value_format": "int4"}, "TopK(density=0.003, value_format='int4')"),
        (AdamNet, {"method": "scalecom"}, "TopK(density=0.003) + Residual() + ScaleCom()"),
        (Net, {}, "TopK(density=0.001)"),
        (AdamNet, {"density": 0.001}, "TopK(density=0.001)"),
        (AdamNet, {"method": "memsgd"}, "TopK(density=0.001)"),
        (AdamNet, {"method": method("topk")}, "TopK(density=0.001)"),
    ]
    found = fits([(net, {"density": None, **options}) for net, options, _ in cases], max_steps=1)
    for (*_, sent), (first, _) in zip(cases, found, strict=True):
        assert first["first line"].startswith(sent)


@full
def test_updates_have_a_warm_up_of_their_own_where_nothing_is_said():
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, "after a warm-up at density 0.024, 0.012, 0.006, 15 steps each"),
        ({"density_warmup": None}, "after a warm-up at density 0.024, 0.012, 0.006, 15 steps each"),
        ({"density_warmup": ()}, None),
        ({"density": 0.003}, None),
        ({"exchange": "gradient"}, None),
        ({"density_warmup": [0.5], "density_warmup_steps": 2}, "after a warm-up at density 0.5, 2 steps each"),
        ({"hierarchical": True}, "after a warm-up at density 0.024, 0.012, 0.006, 15 steps each"),
    ]
    found = fits([(AdamNet, {"density": None, **options}) for options, _ in cases], max_steps=1)
    for (_, said), (first, _) in zip(cases, found, strict=True):
        assert (said in first["first line"]) if said else "warm-up" not in first["first line"]


class Swapping(pl.Callback):
    """Validates with a moving average of the weights, and puts them back afterwards."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = {name: param.detach().clone() for name, param in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, param in module.named_parameters():
            self.average[name].lerp_(param.detach(), 0.1)

    def _swap(self, module: Any) -> None:
        for name, param in module.named_parameters():
            self.average[name], param.data = param.detach().clone(), self.average[name]

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._swap(module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._swap(module)


class Validated(Net):
    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return Loader(0, 1, 1)


@later
@pytest.mark.parametrize("options", [{"local_steps": 3}, *in_full({"overlap": "next_step"})], ids=str)
def test_callbacks_that_swap_weights_find_them_exchanged(options):
    def run(rank: int) -> list[Tensor]:
        net, found = Validated(ADAMW, lr=0.01), []
        run = trainer(
            sparse(**options), 2, callbacks=[Swapping()], num_sanity_val_steps=0, val_check_interval=5, max_epochs=2
        )
        for _ in range(2):  # the second fit continues with the same Trainer
            run.fit(net, Loader(rank, 2, 10))
            found.append(net.weights)
        assert len(run.callbacks) == len({id(callback) for callback in run.callbacks})
        return found

    first, second = lightning_ranks(2, run)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Averaging(WeightAveraging):
    """Averages after every n-th step, or, without a number, at the ends of epochs."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self.n = steps

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if self.n is None:
            return epoch_idx is not None
        return step_idx is not None and (step_idx + 1) % self.n == 0


AVERAGES = [(AverageAtEnd, True), (partial(pl.callbacks.StochasticWeightAveraging, 0.01, swa_epoch_start=1), False)]
if hasattr(pl.callbacks, "WeightAveraging"):  # since Lightning 2.6
    AVERAGES += [(WeightAveraging, True), *((partial(Averaging, n), n == 2) for n in (2, 4, None))]


DELAYED_AVERAGES = [(*case, {"overlap": "next_step"}) for case in AVERAGES if not isinstance(case[0], partial)]
DELAYED_AVERAGES += [(*case, {"overlap": "next_step"}) for case in AVERAGES if case[0] == AVERAGES[1][0]]


@one_in(3)
@pytest.mark.parametrize(
    ("average", "fails", "options"), [*((*case, {"local_steps": 4}) for case in AVERAGES), *DELAYED_AVERAGES]
)
def test_averages_are_of_weights_that_are_equal_on_all_ranks(average, fails, options):
    def run(rank: int) -> Any:
        net = AdamNet()
        net.layers[1] = nn.LayerNorm(24)  # whose averages are those of parameters alone
        run = trainer(sparse(**options), 2, callbacks=[average()], max_epochs=3)
        outcome = caught(lambda: run.fit(net, Loader(rank, 2, 10)))
        return outcome[1], net.weights

    (text, first), (_, second) = lightning_ranks(2, run)
    assert ("averages the weights after step" in text) == fails
    assert fails or torch.equal(first, second)


@full
@pytest.mark.parametrize("options", [{"local_steps": 3}, {"overlap": "next_step"}])
def test_pruned_weights_are_equal_on_all_ranks(options):
    """The masks of the last epoch come from weights that may differ among ranks, and no exchange follows."""

    def run(rank: int) -> Tensor:
        net = Net(momentum=0.9)
        prune = pl.callbacks.ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])
        how = SparseDDPStrategy("topk", density=0.1, exchange="update", **options)
        trainer(how, 2, callbacks=[prune], max_epochs=3).fit(net, Loader(rank, 2))
        return net.weights

    first, second = lightning_ranks(2, run)
    assert torch.equal(first, second)
    assert (first == 0).sum() > 100


def test_statistics_of_batches_that_wait_for_a_step_outlast_a_validation():
    """With overlap="next_step", an exchange broadcasts rank 0's buffers of its beginning."""

    class Validated(Net):
        def validation_step(self, batch: list[Tensor], index: int) -> None:
            pass

    def run(rank: int) -> list[Tensor]:
        net, how = Validated(), SparseDDPStrategy("topk", density=0.1, exchange="update", overlap="next_step")
        run = trainer(how, 2, accumulate_grad_batches=3, val_check_interval=2, num_sanity_val_steps=0)
        run.fit(net, Loader(rank, 2), Loader(rank, 2, 1))
        return list(net.buffers())

    first, second = lightning_ranks(2, run)
    assert same(first, second)
    assert first[-1] == 8  # num_batches_tracked


class InfiniteAtFirst(Net):
    """Its first gradient is infinite on the given ranks."""

    def __init__(self, ranks: tuple[int, ...], optimizer: Any) -> None:
        super().__init__(optimizer, lr=0.01)
        self.ranks = ranks

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * math.inf if index == 0 and self.global_rank in self.ranks else loss


@full
@pytest.mark.parametrize("ranks", [pytest.param((0, 1), marks=full), (1,)])
def test_a_fused_optimizer_whose_first_step_overflows(ranks):
    """The optimizer is called and skips the step itself. Then it has moments, but has taken no step."""
    net = partial(InfiniteAtFirst, ranks, partial(ADAMW, fused=True))
    first, second = lightning_ranks(2, partial(fit, scaled=True), net, {})
    assert first["weights"].isfinite().all()
    assert torch.equal(first["weights"], second["weights"])


class Finetuned(Net):
    def configure_optimizers(self) -> Any:
        return ADAMW([param for param in self.parameters() if param.requires_grad], lr=0.01)


class StaysUnfrozen(Unfreezing):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch:  # Lightning freezes it again if a resumed run begins within an epoch
            self.make_trainable(module.embedding)


@full
def test_resume_after_parameters_were_added(tmp_path):
    def run(rank: int) -> list[Tensor]:
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
        whole, resumed = Finetuned(), Finetuned()
        trainer(sparse(), 2, callbacks=[saving, StaysUnfrozen()], max_epochs=2).fit(whole, Loader(rank, 2, 8))
        again = trainer(sparse(), 2, callbacks=[StaysUnfrozen()], max_epochs=2)
        again.fit(resumed, Loader(rank, 2, 8), ckpt_path=tmp_path / "step=12.ckpt")
        return [whole.weights, resumed.weights]

    for weights, again in lightning_ranks(2, run):
        assert torch.equal(weights, again)


class NumpysSchedule(Net):
    def configure_optimizers(self) -> Any:
        optimizer = ADAMW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: np.float64(1) / (1 + t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@full
def test_rates_of_numpy_do_not_spoil_a_sidecar_file(tmp_path):
    def run(rank: int) -> list[Tensor]:
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        whole, resumed = NumpysSchedule(), NumpysSchedule()
        trainer(sparse(), 2, callbacks=[saving]).fit(whole, Loader(rank, 2, 8))
        options = {} if Version(pl.__version__) < Version("2.6") else {"weights_only": False}  # for Lightning's file
        trainer(sparse(), 2).fit(resumed, Loader(rank, 2, 8), ckpt_path=tmp_path / "step=4.ckpt", **options)
        return [whole.weights, resumed.weights]

    for weights, again in lightning_ranks(2, run):
        assert torch.equal(weights, again)


class Reassigning(Net):
    """A buffer that is another tensor in each step, and differs among ranks."""

    def __init__(self) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.total = self.total + self.global_rank + 1
        return super().training_step(batch, index)


@later
def test_buffers_that_a_module_replaces_become_rank_0s():
    first, second = lightning_ranks(2, fit, Reassigning, {})
    assert first["buffers"].any()
    assert torch.equal(first["buffers"], second["buffers"])


class Cached(nn.Module):
    """Makes a buffer again, or first makes it, in the forward pass of one rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(4, 2)
        self.register_buffer("mask", torch.zeros(3))

    def forward(self, x: Tensor, here: bool) -> Tensor:
        if here:
            self.register_buffer(self.name, torch.ones(5))
        return self.linear(x)  # type: ignore[no-any-return]


def with_a_buffer_of_one_rank(rank: int, name: str, where: int, **options: Any) -> str:
    net = Cached(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    attach_updates(net, optimizer, density=0.1, **options)

    def train() -> None:
        for _ in range(4):
            net(torch.ones(1, 4), rank == where).sum().backward()
            optimizer.step()

    kind, text, _ = caught(train)
    return f"{kind}: {text}"


@pytest.mark.parametrize(
    ("name", "where", "options"), [("mask", 1, {}), ("cache", 0, {}), ("mask", 0, {"overlap": "next_step"})]
)
def test_buffers_whose_shapes_differ_among_ranks_are_an_error_that_names_them(name, where, options):
    found = run_ranks(2, partial(with_a_buffer_of_one_rank, name=name, where=where, **options))
    assert all(text.startswith("RankFailure: Ranks are out of step") for text in found)
    assert f"On this rank, the buffers {name!r} are new, gone or of another shape" in found[where]
    assert "On this rank" not in found[1 - where]


def with_a_long_buffer(rank: int) -> list[str]:
    messages = Messages()
    for length, broadcast_buffers in ((1 << 15, True), (1 << 14, True), (1 << 15, False)):
        net = nn.Linear(4, 2)
        net.register_buffer("mask", torch.ones(length))
        optimizer = torch.optim.AdamW(net.parameters())
        attach_updates(net, optimizer, broadcast_buffers=broadcast_buffers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 renames the option
            attach(DistributedDataParallel(net, broadcast_buffers=broadcast_buffers))
    return messages.texts


def test_buffers_longer_than_the_exchange_are_a_warning_unless_they_stay():
    first, second = run_ranks(2, with_a_long_buffer)
    assert [text.split(" bytes")[0] for text in first] == ["Rank 0 broadcasts 131,072"] * 2
    assert [re.search(r"(after|in) each \w+", text)[0] for text in first] == ["after each exchange", "in each forward"]
    assert all("The largest is 'mask'." in text for text in first)
    assert second == []


def opened_before(rank: int) -> list[int]:
    """Return the bytes that were counted whenever an exchange opened its connections."""
    opened = []
    session_module.Session.open_connections = lambda self: opened.append(self.comm.sent_bytes)
    net = nn.Linear(4, 4)
    attach_updates(net, torch.optim.AdamW(net.parameters()))
    attach(DistributedDataParallel(nn.Linear(4, 4)))
    return opened


def test_exchanges_of_updates_and_of_gradients_open_their_connections():
    assert run_ranks(2, opened_before) == [[0, 0]] * 2


def far_away(rank: int) -> list[str]:
    messages = Messages()
    for seconds, granularity in ((0.025, "layer"), (0.025, "model"), (0.001, "layer")):
        session_module.shortest_gather = lambda *_, seconds=seconds: seconds
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(net.parameters())
        attach_updates(net, optimizer, granularity=granularity)
    return messages.texts


def test_segments_that_wait_for_a_long_round_trip_are_a_warning():
    first, second = run_ranks(2, far_away)
    (text,) = first
    assert text.startswith("A step exchanges 4 segments, one after the other, and each waits at least 25 ms")
    assert "Set granularity='model'" in text
    assert second == []


def test_one_rank_is_warned_that_nothing_is_gained():
    (only,) = lightning_ranks(1, fit, AdamNet, {}, 1)
    assert any("SparseDDPStrategy on one rank sends nothing to anybody" in text for text in only["messages"])


def test_attach_updates_says_what_is_wrong_with_model_and_optimizers(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    net = nn.Sequential(body, head)
    with pytest.raises(ValueError, match=r"'1\.weight', '1\.bias' require gradients but are in no optimizer"):
        attach_updates(net, ADAMW(body.parameters()))
    head.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"needs a process group: call torch\.distributed\.init_process_group"):
        attach_updates(net, ADAMW(body.parameters()))
    with pytest.raises(TypeError, match=r"model=AdamW\(\.\.\.\)\): give the model itself, and then its optimizer"):
        attach_updates(ADAMW(net.parameters()), net)


def attached_twice(rank: int) -> tuple[str, str, float]:
    net = nn.Linear(4, 1)
    optimizer = ADAMW(net.parameters())
    attach_updates(net, optimizer)
    return caught(lambda: attach_updates(net, optimizer, local_steps=2))


def test_updates_are_not_exchanged_twice():
    for kind, text, _ in run_ranks(2, attached_twice):
        assert kind == "ValueError"
        assert "The updates of this AdamW are exchanged already: attach_updates was called with it before" in text


def attached_during_an_exchange(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    found = []
    for rate in (0.1, 0.2):  # the second replaces the first, whose exchange is pending
        optimizer = ADAMW(net.parameters(), lr=rate)
        attach_updates(net, optimizer, density=0.5, overlap="next_step")
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 6) + rank).square().mean().backward()
            optimizer.step()
        found.append(flat(net))
    exchange_pending(optimizer)
    return [*found, flat(net)]


LEAVING = """
import atexit, os, threading, time, torch

atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.endswith("updates")]))  # runs last
from lightning_sparse import attach_updates, exchange_pending

rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
net = torch.nn.Linear(50, 50)
optimizer = torch.optim.AdamW(net.parameters())
attach_updates(net, optimizer, overlap="next_step")
for step in range(4):
    if rank == 0 and step == 3:
        time.sleep(1)
    optimizer.zero_grad()
    net(torch.ones(4, 50) + rank).square().mean().backward()
    optimizer.step()
if rank == 0:  # only this one asks for what is on its way; the other one has come to its end, a second before
    exchange_pending(optimizer)
"""


@full
def test_a_process_ends_after_its_last_exchange():
    with reserve_port() as holder:
        ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1]), "WORLD_SIZE": "2"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", LEAVING],
                env={**os.environ, **ports, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            ends = [(process.communicate(timeout=120)[0], process.returncode) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert ends == [("[]\n", 0)] * 2  # a thread that comes back to an interpreter that has ended may abort it


def test_updates_are_attached_anew_during_an_exchange():
    first, second = run_ranks(2, attached_during_an_exchange)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])


def with_pending_steps(rank: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(rank)
    net = nn.Linear(6, 3)
    optimizer = ADAMW(net.parameters(), lr=0.1)
    attach_updates(net, optimizer, density=0.5, **options)
    found = []
    for _ in range(7):
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    for _ in range(2):  # the second time nothing is pending
        found.append(flat(net))
        exchange_pending(optimizer)
    return [*found, flat(net)]


@pytest.mark.parametrize(
    "options", [{"local_steps": 3}, {"overlap": "next_step"}, {"local_steps": 3, "overlap": "next_step"}], ids=str
)
def test_pending_updates_are_exchanged_when_it_is_asked_for(options):
    first, second = run_ranks(2, partial(with_pending_steps, **options))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[1], first[2])
    with pytest.raises(ValueError, match="exchange_pending got a SGD whose updates are not exchanged"):
        exchange_pending(torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1))
    with pytest.raises(TypeError, match="exchange_pending got a list: give one optimizer of attach_updates"):
        exchange_pending([])
    with pytest.raises(TypeError, match=r"'clip_norm': call torch\.nn\.utils\.clip_grad_norm_ before"):
        attach_updates(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), 0.1), clip_norm=1.0)


def failed_between_steps(rank: int) -> list[int]:
    """Return the number of weights that a checkpoint replaces after a step, and then after another rank has failed."""
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    exchanger = UpdateExchanger(net, [optimizer], method("topk", density=0.5), ReducerOptions())
    exchanger.begin()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).square().sum()
        exchanger.before_backward()
        loss.backward()
        return loss

    for _ in range(3):
        with exchanger.one_step(optimizer):
            optimizer.step(exchanger.overlapped(optimizer, closure))
    found = [len(exchanger.agreed_weights())]
    exchanger.session.error = RankFailure("Rank 1 failed")  # as the worker's thread finds it over NCCL
    return [*found, len(exchanger.agreed_weights())]


def test_a_checkpoint_after_a_failure_between_steps_has_the_weights_of_the_last_step():
    assert run_ranks(1, failed_between_steps) == [[0, 0]]


def test_an_optimizer_without_parameters_has_no_state_to_average():
    optimizer = torch.optim.AdamW([{"params": []}])
    average_states(cast(ProcessGroupComm, None), optimizer)  # without a collective
    assert not optimizer.state


def interrupted_within_an_exchange(rank: int) -> list[str]:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reducer = attach_updates(net, optimizer, density=0.1)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        with pytest.MonkeyPatch.context() as patched:
            if step == 1 and rank == 1:
                patched.setattr(reducer, "begin", interrupt)
            try:
                optimizer.step()
            except BaseException as error:
                found.append(f"{type(error).__name__}: {error}")
                if not isinstance(error, KeyboardInterrupt):
                    break
    return found


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_step_after_an_interrupted_exchange_is_an_error_on_all_ranks():
    first, second = run_ranks(2, interrupted_within_an_exchange)
    assert second[0].startswith("KeyboardInterrupt")
    assert second[1].startswith("RuntimeError: An exchange of updates was interrupted on this rank")
    assert "Rank 1 failed at step 1: RuntimeError: An exchange of updates was interrupted" in first[0]


def test_lbfgs_is_refused_for_what_it_keeps():
    def run(rank: int) -> tuple[str, str, float]:
        return caught(lambda: fit(rank, partial(Net, torch.optim.LBFGS), {"exchange": "update"}))

    for kind, text, _ in lightning_ranks(2, run):
        assert "LBFGS keeps differences of gradients from step to step" in text, kind


def test_a_warm_up_needs_steps_where_nobody_counts_epochs():
    net = nn.Linear(4, 1)
    with pytest.raises(
        ValueError, match=r"density_warmup=\(0.1,\) without epochs: say how many steps each density lasts"
    ):
        attach_updates(net, ADAMW(net.parameters()), density_warmup=[0.1])


def test_only_the_strategy_exchanges_updates_during_backward():
    net = nn.Linear(4, 1)
    with pytest.raises(
        ValueError, match=r"attach_updates\(overlap='backward'\): only SparseDDPStrategy .* Leave overlap"
    ):
        attach_updates(net, ADAMW(net.parameters()), overlap="backward")
    with pytest.raises(ValueError, match=r"overlap=True is not known; choose from none, backward, next_step"):
        attach_updates(net, ADAMW(net.parameters()), overlap=True)


class Byol(Net):
    """Its teacher is a moving average of its embedding, by the module itself; validation goes through the teacher."""

    def __init__(self, given: bool = True, how: str = "in place") -> None:
        super().__init__(ADAMW, lr=0.01)
        self.given, self.how, self.teacher = given, how, nn.Embedding(16, 8).requires_grad_(False)
        self.teacher.load_state_dict(self.embedding.state_dict())
        self.start, self.seen = self.teacher.weight.detach().clone(), list[Tensor]()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        distance = (self.embedding(batch[0]) - self.teacher(batch[0])).square().mean()
        return super().training_step(batch, index) + distance

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        mean = self.teacher.weight.lerp(self.embedding.weight, 0.2)
        if self.how == "in place":
            self.teacher.weight.copy_(mean)
        else:
            self.teacher.weight.data = mean

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append(self.teacher(batch[0]).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW([param for param in self.parameters() if self.given or param.requires_grad], lr=0.01)


def byol(rank: int, strategy: Any, *args: Any) -> tuple[Tensor, float, list[Tensor], Tensor]:
    torch.manual_seed(rank)
    module = Byol(*args)
    run = trainer((strategy and sparse(**strategy)) or "ddp", 2, max_epochs=3, limit_val_batches=2)
    run.fit(module, Loader(rank, 2), Loader(0, 2))
    teacher, student = module.teacher.weight.detach().clone(), module.embedding.weight.detach()
    lag = float((teacher - student).norm() / (student - module.start).norm())
    return teacher, lag, module.seen, module.weights


@full
@pytest.mark.parametrize(
    ("strategy", "given", "how"),
    tiers(
        [
            (strategy, given, how)
            for strategy in (
                {"local_steps": 3, "density": 0.2},
                {"overlap": "next_step", "density": 0.2},
                {"method": "local_sgd"},
            )
            for given in (True, False)
            for how in ("in place", "anew")
        ],
        [
            ({"local_steps": 3, "density": 0.2}, True, "in place"),
            ({"overlap": "next_step", "density": 0.2}, False, "anew"),
        ],
    ),
)
def test_a_momentum_encoder_follows_as_with_ddp_and_is_equal_on_all_ranks(strategy, given, how):
    strategy = {**strategy, "density": strategy.get("density")}
    (first, lag, seen, weights), (second, _, others, others_weights) = lightning_ranks(2, byol, strategy, given, how)
    assert torch.equal(first, second)
    assert torch.equal(weights, others_weights)
    assert same(seen, others)  # of the same batches
    (_, ddps_lag, _, _), _ = lightning_ranks(2, byol, None, given, how)
    assert lag < 2 * ddps_lag


class ByHand(Net):
    """Manual optimization with a raw optimizer, in three ways, or with Lightning's."""

    def __init__(self, way: str, nan_at: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization, self.way, self.nan_at, self.count = False, way, nan_at, 0

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.way == "Lightning's")

        def closure() -> Tensor:
            self.count += 1
            optimizer.zero_grad()
            loss: Tensor = Net.training_step(self, batch, index)
            self.manual_backward(loss * (math.nan if self.count == self.nan_at and self.global_rank else 1))
            return loss

        if self.way == "closure":
            optimizer.step(closure)
            return
        closure()
        if self.way == "scaler":
            torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
        else:
            optimizer.step()


@full
@pytest.mark.parametrize("way", tiers(["raw", "closure", "scaler"], ["raw"]))
@pytest.mark.parametrize(
    ("options", "nan_at"),
    [
        ({"clip_norm": 0.05, "exchange": "update"}, None),
        ({"on_nonfinite": "skip", "exchange": "update"}, 3),
        ({"on_nonfinite": "skip", "exchange": "gradient"}, 3),
    ],
)
def test_raw_optimizers_are_clipped_and_skip_steps_like_lightnings(way, options, nan_at):
    def run(rank: int) -> Any:
        made = {"method": "topk", "density": 0.2, "granularity": "model", **options}
        ways = ["Lightning's", way] + ["Lightning's"] * (nan_at is None)
        found = []
        for number, each in enumerate(ways):
            if number == 2:
                made.pop("clip_norm")
            net = ByHand(each, nan_at)
            trainer(SparseDDPStrategy(**made), 2).fit(net, Loader(rank, 2, 6))
            found.append(net.weights)
        return found

    for wrapped, raw, *unclipped in lightning_ranks(2, run):
        assert wrapped.isfinite().all()
        assert torch.equal(wrapped, raw)
        assert not any(torch.equal(wrapped, each) for each in unclipped)


class Moving(Net):
    """Moves a parameter from one optimizer to the other, or gives it to both, after two steps."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.joins, self.automatic_optimization = joins, False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), 0.01) for part in (self.embedding, self.layers)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:  # of two optimizers
            first, second = self.optimizers(use_pl_optimizer=False)
            moved = self.layers[3].weight
            for group in second.param_groups:
                group["params"] = [param for param in group["params"] if self.joins or param is not moved]
            first.add_param_group({"params": [moved]})


@full
def test_a_parameter_that_moves_to_another_optimizer_stays_equal_on_all_ranks():
    def run(rank: int) -> Any:
        net, said = Moving(False), {"method": "topk", "density": 0.2, "granularity": "layer"}
        trainer(SparseDDPStrategy(**said), 2).fit(net, Loader(rank, 2, 8))
        both = caught(lambda: trainer(SparseDDPStrategy(**said), 2).fit(Moving(True), Loader(rank, 2, 8)))
        return net.weights, both[:2]

    (weights, both), (same_weights, _) = lightning_ranks(2, run)
    assert torch.equal(weights, same_weights)
    assert both[0] == "ValueError"
    assert "'layers.3.weight' belongs to two optimizers" in both[1]


class SOAP(Unknown):
    """Has the name of an optimizer that trained worse with updates than with dense averages."""


def test_optimizers_that_train_badly_with_sparse_updates_are_warned_of():
    def run(rank: int) -> list[list[str]]:
        found = []
        for kind in (Lion, SOAP, Unknown):
            messages = Messages()
            trainer(sparse(exchange="update"), 1, max_steps=1).fit(Net(kind, lr=1e-3), Loader(0, 1, 2))
            found.append([text for text in messages.texts if "'int4'" in text])
        return found

    (signs,), (higher,), none = lightning_ranks(1, run)[0]
    assert signs.startswith("Lion takes signs")
    assert higher.startswith("The loss of a GPT with SOAP was higher with sparse updates than with dense averages")
    assert none == []


class Backbone(Net):
    """Its optimizer has a frozen backbone, which is unfrozen before the epoch `at`, if at all."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.at, self.sizes = at, []
        self.embedding.requires_grad_(False)
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.at is not None and self.current_epoch >= self.at:
            self.requires_grad_(True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.sizes.append(self.trainer.strategy.reducer.layout.numel)


@full
def test_frozen_parameters_of_an_optimizer_get_no_state_until_they_are_unfrozen(tmp_path):
    def run(rank: int) -> Any:
        net, epochs = Backbone(1), {"max_epochs": 3, "callbacks": [AtStart()]}
        saves = [pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]
        trainer(sparse(), 2, max_epochs=3, callbacks=saves).fit(net, Loader(rank, 2, 4))
        resumed = [Backbone(1), Backbone(1)]
        for each, epoch in zip(resumed, (0, 1), strict=True):
            path = tmp_path / f"epoch={epoch}.ckpt"
            run = trainer(sparse(), 2, **epochs)
            run.fit(each, Loader(rank, 2, 4), ckpt_path=path)
        again = Backbone()
        again.embedding.weight.grad = torch.ones_like(again.embedding.weight)  # left from an earlier fit
        trainer(sparse(), 2).fit(again, Loader(rank, 2, 2))
        return net.sizes, net.weights, [each.weights for each in resumed], again.sizes

    (sizes, weights, resumed, of_frozen), (_, others, *_) = lightning_ranks(2, run)
    every = sum(param.numel() for param in Net().parameters())
    frozen = 16 * 8 + 8 * 24 + 24
    assert sizes == [every - frozen] * 4 + [every] * 8
    assert of_frozen == [every - frozen] * 2
    assert torch.equal(weights, others)
    # The second checkpoint has residuals of parameters that are frozen when the resumed run loads it.
    assert all(torch.equal(each, weights) for each in resumed)


class Twice(Net):
    """Gives its optimizer a parameter twice, as of tied weights. Torch warns only."""

    def configure_optimizers(self) -> Any:
        return ADAMW([*self.parameters(), self.layers[3].weight], 0.01)


class Ahead(Gan):
    """Steps both optimizers after both backward passes, and keeps the discriminator frozen but for these."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return [ADAMW(part.parameters(), 0.01) for part in (self.generator, self.discriminator)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        noise, real = (nn.functional.one_hot(part, 16).float() for part in batch)
        first, second = self.optimizers()
        self.discriminator.requires_grad_(True)
        self.manual_backward(self.discriminator(self.generator(noise)).mean() - self.discriminator(real).mean())
        self.discriminator.requires_grad_(False)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("overlap", ["backward", *in_full("none", "next_step")])
def test_a_parameter_given_twice_is_exchanged_and_so_is_a_frozen_one_with_a_gradient(overlap):
    def run(rank: int) -> Any:
        found, lays, setup = [], [], Reducer.setup
        Reducer.setup = lambda *args: lays.append(setup(*args))  # type: ignore[method-assign]
        for net in (Twice(), Ahead()):
            lays.clear()
            trainer(SparseDDPStrategy("topk", density=0.2, overlap=overlap), 2).fit(net, Loader(rank, 2, 6))
            found.append((torch.cat([x.detach().flatten() for x in net.parameters()]), len(lays)))
        return found

    first, second = lightning_ranks(2, run)
    for (weights, lays), (others, _), most in zip(first, second, (1, 2), strict=True):
        assert torch.equal(weights, others)
        assert lays <= most  # not in each step


@later
@pytest.mark.parametrize("overlap", [*in_full("none"), "next_step"])
def test_an_optimizer_of_frozen_parameters_alone_waits_for_nothing(overlap, tmp_path):
    class Alternating(Net):
        def configure_optimizers(self) -> Any:
            return [ADAMW(part.parameters(), 0.01) for part in (self.layers, self.embedding)]

        def training_step(self, batch: list[Tensor], index: int) -> None:
            self.embedding.requires_grad_(index > 5)
            self.manual_backward(super().training_step(batch, index))
            self.optimizers()[index % 2].step()
            self.zero_grad()

    def run(rank: int) -> Tensor:
        net = Alternating()
        net.automatic_optimization = False
        net.embedding.requires_grad_(False)
        saves = [pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)]
        trainer(sparse(overlap=overlap), 2, callbacks=saves).fit(net, Loader(rank, 2, 8))
        return net.weights

    first, second = lightning_ranks(2, run)
    assert torch.equal(first, second)
