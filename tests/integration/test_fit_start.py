"""Unsupported settings raise an error on all ranks, before they do harm."""

import json
import os
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.strategies.fit_checks import check_placement
from tests.integration.trainers import Gan, Loader, Messages, Net, lightning_ranks, strategy, trainer
from tests.support.tiers import full, later, tiers


class Twice(torch.optim.SGD):
    """Evaluates its closure twice a step, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Again(Net):
    """Manual optimization with a closure."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        def closure() -> torch.Tensor:
            self.zero_grad()
            loss = super(Again, self).training_step(batch, index)
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure=closure)


def refusals(make: Any, name: str) -> list[str]:
    def rank(rank: int) -> str:
        net = make()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            trainer(strategy(name, 0.1), 2).fit(net, Loader(rank, 2))
        return str(caught.value)

    return lightning_ranks(2, rank)


@pytest.mark.parametrize("name", ["topk", "randk"])
def test_lbfgs_is_refused_when_fit_starts(name):
    first, second = refusals(lambda: Net(torch.optim.LBFGS), name)
    assert first == second
    assert first.startswith("LBFGS does not work with")
    assert "torch.optim.SGD, or train with strategy='ddp'" in first


@pytest.mark.parametrize("kind", [Net, Again])
def test_an_optimizer_that_evaluates_its_closure_twice_is_refused_at_the_second(kind):
    first, second = refusals(lambda: kind(optimizer=Twice), "topk")
    assert first == second
    assert first.startswith("Twice evaluates its closure several times a step, each with an exchange of gradients.")
    assert "attach_updates, which take such optimizers but for LBFGS; or use one that needs one gradient" in first
    vote, _ = refusals(lambda: kind(optimizer=Twice), "signsgd")
    assert "Use an optimizer that needs one gradient a step" in vote, "a vote makes no updates"


@pytest.mark.parametrize("kind", [Net, Again])
def test_updates_may_come_of_several_evaluations(kind):
    def rank(rank: int) -> tuple[torch.Tensor, int]:
        net = kind(optimizer=Twice)
        run = trainer(strategy("topk", 0.1, exchange="update"), 2)
        run.fit(net, Loader(rank, 2))
        return net.weights, run.strategy.reducer.step

    (first, steps), (second, _) = lightning_ranks(2, rank)
    assert torch.equal(first, second)
    assert steps == 8


@full
def test_dense_gradients_are_exchanged_as_often_as_an_optimizer_likes():
    def rank(rank: int) -> bool:
        weights = []
        for how in ("ddp", "dense"):
            for optimizer in (torch.optim.LBFGS, Twice):
                net = Net(optimizer)
                trainer(strategy(how), 2).fit(net, Loader(rank, 2, 3))
                weights.append(net.weights)
        return torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[3])

    assert lightning_ranks(2, rank) == [True, True]


def test_accumulation_is_no_second_evaluation():
    def rank(rank: int) -> int:
        run = trainer(strategy("topk", 0.1), 2, accumulate_grad_batches=4)
        run.fit(Net(), Loader(rank, 2, 8))
        return run.strategy.reducer.step

    assert lightning_ranks(2, rank) == [2, 2]


class Clipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class Inherited(Clipping):
    pass


class Edits(Net):
    """Zeroes a large gradient, as a user does against spikes."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 2:
            self.embedding.weight.grad.zero_()


class Drops(Net):
    """Leaves the optimizer's step out, and throws the gradient away."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        closure() if index == 2 else optimizer.step(closure=closure)


class Overflows(Net):
    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return super().training_step(batch, index) * (torch.inf if index == 1 else 1)


FP16 = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))]}
CHANGED = {
    "a hook zeroes a gradient": (Edits, "topk", {}, {}),
    "gradient_clip_val": (Net, "topk", {}, {"gradient_clip_val": 0.5}),
    "clipping of values": (
        Net, "topk", {"clip_norm": 1.0}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    ),
    "a module clips": (Clipping, "topk", {}, {}),
    "a module clips after unscaling": (Clipping, "topk", {}, FP16),
    "a step is left out": (Drops, "topk", {}, {}),
    "gradients are views of buckets": (Edits, "topk", {"gradient_as_bucket_view": True}, {}),
    "a step is left out, and gradients are views of buckets": (Drops, "topk", {"gradient_as_bucket_view": True}, {}),
}  # fmt: skip
AS_EXCHANGED = {
    "a training": (Net, "topk", {}, {}),
    "clip_norm": (Net, "topk", {"clip_norm": 0.1}, {}),
    "a method without residuals": (Clipping, "dense", {}, {}),
    "manual optimization with a closure": (Again, "topk", {}, {}),
    "Nesterov's momentum, which writes into gradients": (
        partial(Net, momentum=0.9, nesterov=True, foreach=True), "topk", {}, {},
    ),
    "accumulation": (Net, "topk", {}, {"accumulate_grad_batches": 2}),
    "a loss scale": (Net, "topk", {}, FP16),
    "a loss scale that overflows": (Overflows, "topk", {}, FP16),
    "a gradient that is not finite": (Overflows, "topk", {"on_nonfinite": "skip"}, {}),
    "gradients that are views of buckets": (Net, "topk", {"gradient_as_bucket_view": True}, {}),
    "unused parameters": (Gan, "topk", {"find_unused_parameters": True}, {}),
    "the static graph": (Net, "topk", {"static_graph": True}, {}),
}  # fmt: skip
if "post_backward" in vars(pl.strategies.DDPStrategy):  # older versions do not reduce the first gradients: an error
    AS_EXCHANGED["the static graph, by hand"] = (Again, "topk", {"static_graph": True}, {})


@later
@pytest.mark.skipif("the static graph, by hand" not in AS_EXCHANGED, reason="an error in older versions")
def test_the_first_gradients_of_a_static_graph_are_reduced_in_a_second_fit_too():
    def rank(rank: int) -> list[torch.Tensor]:
        run, nets = trainer(strategy("topk", 0.1, static_graph=True), 2), [Again(), Again()]
        for epochs, net in enumerate(nets, 1):
            run.fit_loop.max_epochs = epochs
            run.fit(net, Loader(rank, 2, 4))
        return [net.weights for net in nets]

    first, second = lightning_ranks(2, rank)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], Again().weights)
    assert not torch.equal(first[1], Again().weights)


def test_a_second_fit_that_continues_the_first_warns_of_lost_residuals(tmp_path):
    def rank(rank: int) -> list[int]:
        counts = []
        for method, nets in (("topk", [Net()] * 3), ("topk", [Net(), Net()]), ("qsgd", [Net()] * 2)):
            messages, run = Messages(), trainer(strategy(method, 0.1 if method == "topk" else None), 2)
            for epochs, net in enumerate(nets, 1):
                run.fit_loop.max_epochs = epochs
                run.fit(net, Loader(rank, 2, 4))
            run.save_checkpoint(tmp_path / "last.ckpt")
            run.fit_loop.max_epochs += 1
            run.fit(net, Loader(rank, 2, 4), ckpt_path=tmp_path / "last.ckpt")
            counts.append(sum("begins without the residuals" in text for text in messages.texts))
        return counts

    assert lightning_ranks(2, rank) == [[2, 0, 0], [0, 0, 0]]


class Indexed(torch.utils.data.Dataset[Any]):
    """Each worker reads an index, so that it collects garbage."""

    def __init__(self) -> None:
        self.text = json.dumps([[number % 16, number % 4] for number in range(30_000)])
        self.index: list[list[int]] | None = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> list[int]:
        self.index = self.index or json.loads(self.text)
        return self.index[number]


def folds(rank: int, name: str) -> int:
    steps = 0
    for _ in range(3):
        loader: Any = torch.utils.data.DataLoader(Indexed(), 4, num_workers=1, timeout=20)
        run = trainer(f"{name}_ddp", 2, max_steps=2)
        run.fit(Net(torch.optim.AdamW), loader)
        steps += run.global_step
    return steps


@later
@pytest.mark.parametrize("name", tiers(["topk", "auto"], ["topk"]))
def test_workers_of_a_dataloader_live_in_later_fits_of_a_process(name):
    """A garbage collection in a forked worker must not destroy the process group of an earlier fit."""
    assert lightning_ranks(2, folds, name, patience=60) == [6, 6]


@full
def test_a_gradient_that_no_step_takes_as_it_was_exchanged_is_warned_of_once():
    """Stock ddp and an exchange of updates keep no part of a gradient in a residual."""

    def rank(rank: int) -> dict[str, list[str]]:
        said = {}
        for name, (net, method, ours, options) in (CHANGED | AS_EXCHANGED).items():
            messages = Messages()
            trainer(strategy(method, 0.1, **ours), 1, max_epochs=2, **options).fit(net(), Loader(0, 1, 4))
            said[name] = [text for text in messages.texts if "that ranks exchanged for" in text]
        return said

    said = lightning_ranks(1, rank)[0]
    assert {name: len(texts) for name, texts in said.items()} == {
        **dict.fromkeys(AS_EXCHANGED, 0),
        **dict.fromkeys(CHANGED, 1),
    }
    for name in CHANGED:
        dropped = "a step is left out" in name
        how = "was thrown away: zero_grad came, and no step before it" if dropped else "was written before the step"
        assert f"exchanged for SGD {how}" in said[name][0]
        assert "exchange='update'" in said[name][0]
        assert "clip_norm" in said[name][0]


class Raw(Net):
    """Manual optimization with torch's backward, which DDP does not prepare."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.optimizers().zero_grad()
        super().training_step(batch, index).backward()
        self.optimizers().step()


class TwoPasses(Net):
    """DDP averages the gradients of the first backward pass."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("net", [Raw, TwoPasses])
def test_a_step_with_gradients_that_ranks_have_not_exchanged_is_warned_of_once(net):
    def rank(rank: int) -> list[str]:
        messages = Messages()
        trainer(strategy("topk", 0.1), 2).fit(net(), Loader(rank, 2))
        return messages.texts

    first, second = lightning_ranks(2, rank)
    assert [text[: text.index(", so")] for text in first] == [
        "SGD steps with a gradient of 'embedding.weight' that ranks have not exchanged"
    ]
    assert second == []


@pytest.mark.parametrize("exchange", ["gradient", "update"])
def test_optimizers_cannot_be_set_up_anew_within_fit(exchange):
    """A hook may do so to unfreeze layers, for example. Stock ddp trains with the new optimizers."""

    class Anew(Net):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.trainer.strategy.setup_optimizers(self.trainer)

    def rank(rank: int) -> str:
        run = trainer(SparseDDPStrategy("topk", exchange=exchange), 2, max_epochs=2)
        with pytest.raises(RuntimeError) as caught:
            run.fit(Anew(), Loader(rank, 2, 2))
        return str(caught.value)

    for text in lightning_ranks(2, rank):
        assert "setup_optimizers of SparseDDPStrategy was called within fit" in text


@full
@pytest.mark.parametrize(("nodes", "wrong"), [([0, 1, 0, 1], "0 to 1"), ([0, 0, 1, 2], "2 to 3"), ([0, 0, 1, 1], None)])
def test_two_levels_need_the_ranks_of_a_node_next_to_each_other(nodes, wrong):
    """SLURM's --distribution=cyclic separates the ranks of a node."""

    def rank(rank: int) -> str | None:
        os.environ.update(GROUP_RANK=str(nodes[rank]), LOCAL_RANK=str(nodes[:rank].count(nodes[rank])))
        run = trainer(SparseDDPStrategy("topk", density=0.1, hierarchical=True), 2, num_nodes=2)
        try:
            run.fit(Net(), Loader(rank, 4, 2))
        except ValueError as error:
            return str(error)
        return None

    answers = lightning_ranks(4, rank)
    assert len(set(answers)) == 1
    if wrong is None:
        assert answers[0] is None
    else:
        assert f"the ranks {wrong} are to add up their gradients inside one node, but they are on several" in answers[0]


def test_placement_names_the_ranks():
    check_placement([0] * 8, 4)  # parts of a node are fine
    with pytest.raises(ValueError, match=r"ranks 2 to 3 .* \(rank 2 on node 0, rank 3 on node 1\)"):
        check_placement([0, 0, 0, 1], 2)


@later
def test_a_gan_that_does_not_toggle_its_optimizers_is_warned_once():
    class Careless(Gan):
        def toggle_optimizer(self, optimizer):
            """Leave all parameters as they are."""

        untoggle_optimizer = toggle_optimizer

    class BothAtOnce(Careless):
        """Both optimizers step after two backward passes, which both exchange."""

        def training_step(self, batch, index):
            noise = nn.functional.one_hot(batch[0], 16).float()
            for _ in range(2):
                self.manual_backward(self.discriminator(self.generator(noise)).mean())
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def rank(rank: int) -> list[Any]:
        found = []
        for net, name in ((Careless, "topk"), (Gan, "topk"), (BothAtOnce, "topk"), (Careless, "qsgd")):
            messages = Messages()
            how = strategy(name, 0.1, find_unused_parameters=True)
            trainer(how, 1, max_epochs=2).fit(net(), Loader(0, 1, 4))
            found.append([text for text in messages.texts if "toggle_optimizer" in text])
        return found

    careless, toggled, both, without_residual = lightning_ranks(1, rank)[0]
    assert len(careless) == 1
    assert careless[0].startswith("A gradient of 'generator.weight' that ranks exchanged for SGD was thrown away")
    assert toggled == both == without_residual == []


def test_a_momentum_beside_that_of_the_method_is_warned_of():
    sgd, adam = torch.optim.SGD, torch.optim.AdamW
    cases = (
        ("signum", partial(Net, sgd, lr=0.1, momentum=0.9)),
        ("signum", partial(Net, adam, lr=0.001)),
        ("signum", partial(Net, sgd, lr=0.1)),
        ("signum", partial(Net, adam, lr=0.001, betas=(0.0, 0.999))),
        ("signsgd", partial(Net, sgd, lr=0.1, momentum=0.9)),
    )

    def rank(rank: int) -> list[int]:
        found = []
        for name, net in cases:
            messages = Messages()
            trainer(strategy(name), 1).fit(net(), Loader(0, 1, 2))
            found.append(sum(" has a momentum, and Sign() + Momentum() + Major" in text for text in messages.texts))
        return found

    assert lightning_ranks(1, rank) == [[1, 1, 0, 0, 0]]
