"""No tensor depends on the default dtype."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from lightning_sparse import METHODS, Method, Reducer, method, simulate
from lightning_sparse.aggregators import Mean, TwoLevel
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.contrib.memsgd import QuadraticAverage
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from lightning_sparse.contrib.robust.attacked import Attacked
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.tiers import in_diagonals, one_in
from tests.support.training import make
from tests.support.update_training import exchanged_twice

METHODS_AND_PARTS = {
    **{name: make(name) for name in METHODS},
    "paper": Method(PublishedGaussianK(0.05)),
    "topk in 8 bits": Method(TopK(0.05, value_format="int8")),
    "topk in 4 bits": Method(TopK(0.05, value_format="int4")),
    "bfloat16": Method(TopK(0.05, value_format="bfloat16")),
    "two levels": Method(GaussianK(0.05), aggregator=TwoLevel(ranks_per_node=2)),
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


@one_in(2)
@pytest.mark.parametrize(
    ("name", "dtype"), in_diagonals(METHODS_AND_PARTS, [torch.float64, torch.bfloat16, torch.float16], 6), ids=str
)
def test_results_do_not_depend_on_the_default_dtype(name, dtype):
    def rank(comm, **options):
        reducer = Reducer(METHODS_AND_PARTS[name], comm, **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            grads = {
                "w": torch.randn(60, 70, generator=generator, dtype=torch.float32),
                "v": torch.randn(50, generator=generator, dtype=torch.float32).to(torch.bfloat16),
            }
            reducer.reduce_(grads)
        return torch.cat([grad.float().view(-1) for grad in grads.values()]), str(reducer.state_dict())

    for options in ({}, {"clip_norm": 1.0}):
        expected = simulate(2, lambda comm, options=options: rank(comm, **options))
        with default_dtype(dtype):
            found = simulate(2, lambda comm, options=options: rank(comm, **options))
        for (out, _), (same, _) in zip(found, expected, strict=True):
            assert torch.equal(out, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("attack", ["negate", "flip", "scale"])
def test_attacks_do_not_depend_on_the_default_dtype(attack, dtype):
    def rank(comm):
        reducer = Reducer(Method(TopK(0.05), aggregator=Attacked(Mean(), attack, share=0.4)), comm)
        grads = {"w": torch.randn(900, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float32)}
        for _ in range(2):
            reducer.reduce_(grads)
        return torch.cat([grads["w"], *reducer.states[0].values()])

    expected = simulate(3, rank)
    with default_dtype(dtype):
        found = simulate(3, rank)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_quadratic_average_does_not_depend_on_the_default_dtype(dtype):
    def average():
        averaged = AveragedModel(torch.nn.Linear(1, 1, bias=False, dtype=torch.float32), avg_fn=QuadraticAverage(300.0))
        for step in range(60):
            weight = torch.full((1, 1), 2.0 + step / 7, dtype=torch.float32)
            averaged.update_parameters(torch.nn.ParameterList([weight]))
        return averaged.module.weight.item()

    expected = average()
    with default_dtype(dtype):
        assert average() == expected


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "radam", "adamax", "nesterov"])
def test_exchanged_updates_do_not_depend_on_the_default_dtype(optimizer):
    expected = exchanged_twice(optimizer, torch.float32, "cpu")
    with default_dtype(torch.float64):
        found = exchanged_twice(optimizer, torch.float32, "cpu")
    if optimizer != "nadam":
        assert all(map(torch.equal, found, expected))
    else:  # torch keeps its product of betas in the default dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["topk", "efsignsgd"])
@pytest.mark.parametrize(
    "rule", [UpdateRule(outer_lr=0.5), UpdateRule(local_steps=2, outer_lr=0.5, outer_momentum=0.5)]
)
def test_the_rounding_of_16_bit_weights_waits_in_units_of_updates(name, rule):
    """The weights move by the outer step of all updates outside the residual; outer momentum moves them later."""

    def rank(comm):
        net = torch.nn.ParameterList([torch.ones(8, dtype=torch.bfloat16)])
        optim = torch.optim.SGD(net.parameters(), 1.0)
        made = method(name, **({"density": 0.5} if name == "topk" else {}))
        reducer = Reducer(
            replace(made, update_rule=replace(rule, momentum="keep", rescale=False)), comm, exchanged="update"
        )
        updates = DeltaExchange(reducer, net, [optim])
        reducer.routing._pays = lambda *_: True
        changes, found = torch.zeros(8), []
        for step in range(10):
            before = net[0].detach().float().clone()
            updates.begin(optim)
            net[0].grad = torch.full((8,), 2.0**-8 if step < 5 else 0.0).bfloat16()
            optim.step()
            changes += before - net[0].detach().float()
            updates.exchange(optim)
            state = reducer.states[0]
            later = rule.outer_gain * rule.outer_momentum**2 * state.get("outer_momentum", torch.zeros(8))
            moved = 1 - net[0].detach().float() + later
            found.append((moved, rule.outer_gain * (changes - state["residual"])))
        return found

    for moved, expected in (each for found in simulate(2, rank) for each in found):
        torch.testing.assert_close(moved, expected, rtol=0, atol=2.0**-18)
