"""Two nodes of two ranks with hierarchical=True: the ranks of a node average gradients, and nodes exchange updates."""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sparse import SparseDDPStrategy
from tests.integration.failing import SOON, caught
from tests.integration.forms import FORMS, OwnScaler, Unused, scaler
from tests.integration.trainers import Loader, Messages, Net, lightning_ranks, trainer
from tests.support.tiers import in_full, later, tiers


class Gradients(pl.Callback):
    """Keeps the gradients before each step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [param.grad for param in module.parameters()]
        self.seen.append(torch.cat([torch.zeros(0) if grad is None else grad.reshape(-1).clone() for grad in grads]))


def fit(rank: int, build: Callable[[], Any], strategy: Any, nodes: int = 2, **options: Any) -> dict[str, Any]:
    each = 4 // nodes
    os.environ.update(GROUP_RANK=str(rank // each), LOCAL_RANK=str(rank % each))
    net, lines, gradients = build(), [], Gradients()
    run = trainer(strategy, each, num_nodes=nodes, callbacks=[gradients], max_epochs=2, **options)
    run.strategy.inform = lines.append
    run.fit(net, Loader(rank, 4))
    optimizers = [getattr(each, "optimizer", each) for each in run.optimizers]
    states = [x for each in optimizers for state in each.state.values() for x in state.values()]
    return {
        "weights": net.weights,
        "moments": torch.cat([x.float().reshape(-1) for x in states if isinstance(x, Tensor)] or [torch.zeros(0)]),
        "gradients": gradients.seen,
        "first line": " ".join(lines[:1]),
    }


FOUND = [
    "accumulation",
    "16-mixed",
    "gan",
    "manual optimization",
    "parameters without gradients",
    "backward in the training step",
    "checkpointing",
    "clipping by the Trainer",
    "clipping by the strategy",
    "compiled",
    "every third step",
    "gtopk by layers",
    "RMSprop",
]


@pytest.mark.parametrize("form", tiers(FOUND, ["accumulation", "16-mixed", "gan", "parameters without gradients"]))
def test_weights_are_equal_on_all_ranks_and_moments_within_a_node(form):
    net, given, options = FORMS[form]

    def run(rank: int) -> dict[str, Any]:
        own = {name: x for name, x in options.items() if name != "scaled"}
        own |= {"plugins": scaler()} if options.get("scaled") else {}
        chosen = {"method": "topk", "density": 0.02, "granularity": "model", "hierarchical": True, **given}
        return fit(rank, net, SparseDDPStrategy(**chosen), **own)

    ranks = lightning_ranks(4, run)
    assert "The ranks of a node average gradients. Each node steps its own" in ranks[0]["first line"]
    if form not in ("gan", "manual optimization", "every third step"):
        assert "exchanged after backward: the ranks of a node average gradients first." in ranks[0]["first line"]
    assert all(torch.equal(ranks[0]["weights"], other["weights"]) for other in ranks[1:])
    for first in (0, 2):
        assert torch.equal(ranks[first]["moments"], ranks[first + 1]["moments"])
        assert all(map(torch.equal, ranks[first]["gradients"], ranks[first + 1]["gradients"]))
    assert not torch.equal(ranks[0]["moments"], ranks[2]["moments"])


class Missing(Unused):
    """One layer takes part on rank 0 only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.parametrize("build", tiers([Net, Missing], [Missing]))
def test_dense_updates_of_sgd_are_the_steps_of_stock_ddp(build):
    def run(rank: int) -> list[Tensor]:
        ours = SparseDDPStrategy("dense", exchange="update", hierarchical=True)
        return [fit(rank, build, each)["weights"] for each in (ours, "ddp_find_unused_parameters_true")]

    for ours, stock in lightning_ranks(4, run):
        assert torch.allclose(ours, stock, rtol=1e-5, atol=1e-6)


@later
@pytest.mark.parametrize("wrapped", [True, *in_full(False)])
def test_a_scaler_of_the_modules_own_leaves_a_step_out_on_a_node(wrapped):
    """The gradient of rank 0 overflows, and the result is as if both ranks of its node had no gradient."""

    def run(rank: int) -> list[Tensor]:
        def weights(scaled: bool, overflows: bool) -> Tensor:
            ours = SparseDDPStrategy("topk", density=0.1, hierarchical=True)
            return fit(rank, lambda: OwnScaler(scaled, overflows, wrapped), ours)["weights"]

        return [weights(True, rank == 0), weights(False, rank < 2)]

    for scaled, expected in (ranks := lightning_ranks(4, run)):
        assert torch.equal(scaled, ranks[0][0])
        assert torch.equal(scaled, expected)


@pytest.mark.parametrize("clip", [{"gradient_clip_val": 0.1}, *in_full({}, {"precision": "bf16-mixed"})], ids=str)
def test_one_node_takes_the_steps_of_stock_ddp(clip):
    """Without selection, with AdamW, and if the mean gradient is clipped."""

    def run(rank: int) -> list[Tensor]:
        net = partial(Net, torch.optim.AdamW, lr=0.01, eps=1e-3)  # biases before BatchNorm have only rounding errors
        ours = SparseDDPStrategy("dense", exchange="update", hierarchical=True)
        return [fit(rank, net, each, nodes=1, **clip)["weights"] for each in (ours, "ddp")]

    for ours, stock in lightning_ranks(4, run):
        assert torch.allclose(ours, stock, rtol=1e-4, atol=1e-5)  # sums have another order


class Own(torch.optim.AdamW):
    """An optimizer of the user."""


@later
def test_one_node_is_told_that_it_sends_nothing():
    """All ranks make the same updates, which is no mistake here."""

    def run(rank: int) -> list[str]:
        messages = Messages()
        ours = SparseDDPStrategy("topk", exchange="update", hierarchical=True)
        fit(rank, partial(Net, Own, lr=0.01), ours, nodes=1)
        return messages.texts

    first, *others = lightning_ranks(4, run)
    assert [text for text in first if "on one node sends nothing to anybody" in text]
    assert not any("same update" in text for text in (*first, *itertools.chain(*others)))


class Absent(Net):
    """The last rank has no loss in the second step, which Lightning refuses."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:  # type: ignore[override]
        return None if (self.global_rank, index) == (3, 1) else super().training_step(batch, index)


def test_an_error_reaches_ranks_that_wait_for_the_gradients_of_their_node():
    def run(rank: int) -> Any:
        return caught(lambda: fit(rank, Absent, SparseDDPStrategy("topk", exchange="update", hierarchical=True)))

    for _, text, seconds in lightning_ranks(4, run):
        assert "by returning None in distributed training is not supported" in text
        assert seconds < SOON
