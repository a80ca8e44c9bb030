"""A LightningModule with its own GradScaler: residuals are unscaled, wherever the scaler is stored."""

import logging
import logging.handlers
from collections.abc import Collection
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_sparse.hooks.scalers import may_depend
from tests.integration.trainers import Loader, Net, lightning_ranks, same, strategy, trainer
from tests.support.tiers import full, later, tiers

SCALE = {"init_scale": 2.0**10, "growth_interval": 10**6}  # one that stays
GROWING = {"init_scale": 32.0, "growth_interval": 1}


class Own(Net):
    """Net with manual optimization and a custom scaler, or none.

    Args:
        held: place of the scaler: an "attribute", in a "list", made in "configure_optimizers", or only in the "step".
        scaler: options of the scaler; None for no scaler.
        overflows: number of the batch in which the gradient is infinite.
    """

    def __init__(
        self, held: str = "attribute", scaler: dict[str, Any] | None = None, overflows: int = -1, **options: Any
    ) -> None:
        super().__init__(momentum=0.9, **options)
        self.automatic_optimization = False
        self.held, self.scaler_options, self.overflows, self.count = held, scaler, overflows, -1
        if scaler is not None:
            made = torch.amp.GradScaler("cpu", **scaler)
            if held == "attribute":
                self.scaler = made
            elif held == "list":
                self.scalers = [made]
            elif held == "step":
                self.step = lambda loss, optimizer: self.scaled_step(made, loss, optimizer)
        self.embedding.weight.register_hook(lambda g: g * float("inf") if self.count == self.overflows else g)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.held == "configure_optimizers" and self.scaler_options is not None:
            self.scaler = torch.amp.GradScaler("cpu", **self.scaler_options)
        return super().configure_optimizers()

    def step(self, loss: Tensor, optimizer: Any) -> None:
        if self.scaler_options is None:
            self.manual_backward(loss)
            optimizer.step()
        else:
            self.scaled_step(self.scalers[0] if self.held == "list" else self.scaler, loss, optimizer)

    def scaled_step(self, scaler: torch.amp.GradScaler, loss: Tensor, optimizer: Any) -> None:
        self.manual_backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.count += 1
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.step(super().training_step(batch, index), optimizer)


def fit(net: Any, rank: int, how: Any, batches: Any = None, **options: Any) -> dict[str, Any]:
    run = trainer(how, 2, **options)
    run.fit(net, Loader(rank, 2, 6) if batches is None else batches)
    state = run.strategy.reducer.state_dict()
    return {"weights": net.weights, "kept": state["elements"], "step": state["step"], "skipped": state["skipped"]}


@pytest.mark.parametrize("name", tiers(["topk", "gtopk"], ["topk"]))
@pytest.mark.parametrize("held", tiers(["attribute", "list", "configure_optimizers", "step"], ["attribute"]))
def test_a_scale_that_grows_changes_nothing(name, held):
    def rank(rank: int) -> bool:
        grown = fit(Own(held, GROWING), rank, strategy(name, 0.1))
        return same(grown, fit(Own(), rank, strategy(name, 0.1)))

    assert lightning_ranks(2, rank) == [True, True]


def test_an_overflow_on_one_rank_is_as_if_the_step_had_not_been():
    def rank(rank: int) -> list[bool]:
        rest = Loader(rank, 2, 6)
        del rest.batches[3]
        control = fit(Own(), rank, strategy("topk", 0.1), rest)
        outcomes = []
        for on_nonfinite in ("raise", "skip"):
            net = Own("attribute", SCALE, overflows=3 if rank == 1 else -1)
            run = fit(net, rank, strategy("topk", 0.1, on_nonfinite=on_nonfinite))
            outcomes += [run.pop("skipped") == 1, net.scaler.get_scale() == 2.0**9]
            outcomes.append(same(run, {key: value for key, value in control.items() if key != "skipped"}))
        return outcomes

    assert lightning_ranks(2, rank) == [[True] * 6] * 2


def test_a_residual_is_handed_out_in_the_units_of_the_present_scale():
    """The 200 of the first step, kept in the residual, came out as 3,200 when the scale had fallen to a sixteenth."""

    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.weight = torch.nn.Parameter(torch.zeros(2))
            del self.embedding, self.layers
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            self.seen: list[list[float]] = []

        def training_step(self, batch: list[Tensor], index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            slope = torch.tensor([[200.0, 1000.0], [0.0, 0.0], [0.0, 0.0]][index])
            self.manual_backward(self.scaler.scale((slope * self.weight).sum()))
            self.scaler.unscale_(optimizer)
            self.seen.append(self.weight.grad.tolist())
            self.scaler.step(optimizer)
            self.scaler.update(1024.0 / 16 ** (index + 1))

    def rank(rank: int) -> list[list[float]]:
        net = Two()
        fit(net, rank, strategy("topk", 0.5), Loader(rank, 2, 3))
        return net.seen

    assert lightning_ranks(2, rank) == [[[0.0, 1000.0], [200.0, 0.0], [0.0, 0.0]]] * 2


@later
def test_with_automatic_optimization_and_a_backward_of_its_own():
    class Backward(Net):
        scaler: torch.amp.GradScaler | None = None

        def backward(self, loss: Tensor, *args: Any) -> None:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
            if self.scaler is None:
                super().optimizer_step(epoch, index, optimizer, closure)
                return
            closure()
            self.scaler.step(optimizer.optimizer)
            self.scaler.update()

    def rank(rank: int) -> bool:
        net = Backward()
        net.scaler = torch.amp.GradScaler("cpu", **GROWING)
        return same(fit(net, rank, strategy("topk", 0.1)), fit(Backward(), rank, strategy("topk", 0.1)))

    assert lightning_ranks(2, rank) == [True, True]


def test_two_scalers_are_refused():
    class Several(Own):
        def step(self, loss: Tensor, optimizer: Any) -> None:
            if self.count == 2:
                self.scaler = torch.amp.GradScaler("cpu", **SCALE)
            super().step(loss, optimizer)

    def rank(rank: int) -> list[str]:
        said = []
        for net, options in (
            (Several("attribute", SCALE), {}),
            (
                Own("attribute", SCALE),
                {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]},
            ),
        ):
            with pytest.raises(RuntimeError, match="residuals are kept in units of one loss scale") as caught:
                fit(net, rank, strategy("topk", 0.1), **options)
            said.append(str(caught.value).split(", but")[0])
        return said

    assert (
        lightning_ranks(2, rank)
        == [
            [
                "Several scales its loss by a GradScaler of its own besides another one",
                "Own scales its loss by a GradScaler of its own besides Lightning's",
            ]
        ]
        * 2
    )


@full
def test_a_scaler_that_scales_nothing_or_is_switched_off_is_none():
    def rank(rank: int) -> list[Any]:
        original = torch.amp.GradScaler.scale
        idle = Own()
        idle.scaler = torch.amp.GradScaler("cpu")
        off = Own("attribute", {"enabled": False})
        control = fit(Own(), rank, strategy("topk", 0.1))
        outcomes = [same(fit(net, rank, strategy("topk", 0.1)), control) for net in (idle, off)]
        return [*outcomes, torch.amp.GradScaler.scale is original]  # after fit torch is as it was

    assert lightning_ranks(2, rank) == [[True, True, True]] * 2


class Probe(pl.Callback):
    """Trains a layer outside of the model after each batch, with a scaler whose scale doubles."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks, self.layer = ranks, torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.01)
        self.scaler = torch.amp.GradScaler("cpu", **GROWING)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank in self.ranks:
            self.scaler.scale(self.layer(torch.ones(2, 3)).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


@pytest.mark.parametrize("ranks", tiers([[0, 1], [0]], [[0]]))
def test_the_scaler_of_a_model_that_is_not_trained_here_is_not_followed(ranks):
    def rank(rank: int) -> list[bool]:
        control = fit(Own(), rank, strategy("topk", 0.1))
        own = fit(Own("attribute", GROWING), rank, strategy("topk", 0.1))
        probe = Probe(ranks)
        probed = fit(Own(), rank, strategy("topk", 0.1), callbacks=[probe])
        both = fit(Own("attribute", GROWING), rank, strategy("topk", 0.1), callbacks=[Probe(ranks)])
        return [same(probed, control), same(both, own), rank not in ranks or probe.scaler.get_scale() > 8]

    assert lightning_ranks(2, rank) == [[True, True, True]] * 2


def test_a_scaler_is_known_by_the_graph_of_its_loss():
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    params, x = dict(layers[1].named_parameters()), torch.ones(2, 3)
    assert may_depend(layers(x), params)
    assert may_depend([x, layers(x).sum()], params)
    assert not may_depend(layers[0](x).sum(), params)
    assert may_depend(layers(x).detach().requires_grad_().sum(), params)  # the caller continues with its gradient
    assert may_depend(x.sum(), params)
    hidden = checkpoint(layers, x.clone().requires_grad_(), use_reentrant=True)
    assert may_depend(hidden.sum(), params)


def test_the_run_says_whose_scaler_it_follows():
    def rank(rank: int) -> list[str]:
        lines = logging.handlers.BufferingHandler(1000)
        for name in ("pytorch_lightning", "lightning_sparse"):  # the second if pytest has set up logging
            logging.getLogger(name).addHandler(lines)
            logging.getLogger(name).setLevel(logging.INFO)
        fit(Own("attribute", SCALE), rank, strategy("topk", 0.1))
        return [text for line in lines.buffer if "GradScaler" in (text := line.getMessage())]

    first, second = lightning_ranks(2, rank)
    assert len(first) == 1
    assert first[0].startswith("Own scales its loss by a GradScaler of its own: residuals are kept unscaled")
    assert second == []
