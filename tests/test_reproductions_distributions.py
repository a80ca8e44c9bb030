"""The finding on the distribution of u: its pure functions and its checks."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import pandas as pd

from lightning_sparse import Reducer, method, simulate
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.randk import RandK
from reproductions.bells import LEAST, judge, summarize, unimodal
from reproductions.gaussiank_contraction import contraction, of_normal, random_contractions
from reproductions.gaussiank_distributions import (
    WHOLE,
    Look,
    Recorded,
    parts,
    rows,
    shown,
    verdict,
)
from tests.support.tiers import full
from tests.support.vectors import laplace

CONFIG = {"seed": 0, "draws": 3}


@pytest.mark.parametrize(
    ("sample", "one_peak", "bell_shaped"),
    [
        (lambda: torch.randn(LEAST), True, True),
        (lambda: 1e-6 * laplace(100_000), True, True),
        (lambda: torch.cat([x := torch.randn(50_000) ** 5, -x]), True, False),
        (lambda: torch.cat([torch.randn(50_000) - 2, torch.randn(50_000) + 2]), False, False),
        (lambda: torch.randn(100_000) + 1, False, False),
        (lambda: torch.empty(100_000).exponential_() - 0.5, False, False),
    ],
    ids=["normal", "laplace", "spike in a desert", "two peaks", "beside zero", "one-sided"],
)
def test_bells_are_told_from_other_shapes(sample, one_peak, bell_shaped):
    x = sample()
    found = judge(x, summarize(x))
    assert (found["one_peak"], found["bell_shaped"]) == (one_peak, bell_shaped)
    assert sum(map(float, found["histogram"].split())) <= 1 + 1e-3  # four digits each


def test_flat_is_no_bell():
    x = torch.rand(100_000) - 0.5
    assert not judge(x, summarize(x))["bell_shaped"]


def test_nearest_shares_with_one_peak():
    rising = np.array([1.0, 2.0, 4.0, 3.0, 0.0])
    assert unimodal(rising, 3).tolist() == rising.tolist()
    assert unimodal(rising, 1).tolist() == [1.0, 3.0, 3.0, 3.0, 0.0]


def test_contraction_by_hand():
    u = torch.tensor([1.0, -3.0, 0.0, 2.0, 0.0])
    assert contraction(u, TopK(0.4)) == (2, pytest.approx(1 / 14))
    assert contraction(u, TopK(0.001)) == (1, pytest.approx(5 / 14))  # at least one
    k, left = contraction(torch.ones(100), TopK(0.1))
    assert (k, left) == (10, pytest.approx(0.9))  # the worst case


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_contraction_of_normal_numbers(density):
    assert contraction(torch.randn(1_000_000), TopK(density))[1] == pytest.approx(of_normal(density), rel=0.002)
    assert of_normal(density) < (1 - density) ** 2


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_random_entries_leave_their_share_of_any_u(density):
    u = laplace(10_000)
    found = random_contractions(u, density, 400, 0)
    assert found == random_contractions(u, density, 400, 0)
    assert len(set(found)) == 400  # no draw is used twice
    spread = np.std(found) / math.sqrt(400)
    assert np.mean(found) == pytest.approx(1 - density, abs=4 * spread)
    assert contraction(u, TopK(density))[1] < (1 - density) ** 2 < 1 - density


def test_random_contraction_is_that_of_the_compressor():
    u = torch.randn(1000)
    assert random_contractions(u, 0.1, 1, 0)[0] == pytest.approx(contraction(u, RandK(0.1))[1])
    assert random_contractions(torch.ones(100), 0.1, 2, 0) == pytest.approx([0.9, 0.9])


def recording(scale):
    return Recorded(
        {"b": (0, 1000), "a": (1000, 3000)}, {step: scale * torch.randn(3000) for step in shown(300)}, [1.0] * 300
    )


@full
def test_rows_and_verdict():
    sparse, dense = recording(4.0), recording(1.0)
    assert [(name, part.numel()) for name, part in parts(sparse, 1)] == [(WHOLE, 3000), ("a", 2000), ("b", 1000)]
    found = list(rows(sparse, dense, CONFIG))
    widths = [row["times_dense_std"] for row in found]
    assert len(widths) == 3 * len(shown(300)) == 18
    assert all(width == pytest.approx(4, rel=0.2) for width in widths)
    table = pd.DataFrame([{"network": "toy", "topk_loss": 1.0, "dense_loss": 0.5} | row for row in found])
    said = verdict(table)
    assert said.startswith("Held here: u is bell-shaped in 12 of 12 layers × steps. The toy has 12 of 12; ")
    assert "u is wider than the gradient of dense training in 10 of 10 cases. " in said
    assert "top-k leaves less than (1 − k/d)² in 18 of 18, 18 of 18" in said
    randoms = [float(left) for left in said.rpartition("RandK ")[2].rstrip(".").split(", ")]
    assert randoms == pytest.approx([0.999, 0.99, 0.9], abs=0.01)
    table.loc[table["layer"] == "a", "times_dense_std"] = 0.5
    assert verdict(table).startswith("Did not hold here: ")
    table.loc[table["layer"] == "a", "times_dense_std"] = 4.0
    assert verdict(table).startswith("Held here: ")
    table["randk_left_0.1"] *= 0.9
    assert verdict(table).startswith("Did not hold here: ")


def test_layers_without_a_gradient_have_no_contraction():
    u = {1: torch.tensor([0.0, 0.0, 1.0, 2.0])}
    found = rows(Recorded({"b": (0, 2), "a": (2, 4)}, u), Recorded({"b": (0, 2), "a": (2, 4)}, u), CONFIG)
    assert [row["layer"] for row in found if "left_0.1" in row] == [WHOLE, "a"]


def test_the_last_step_is_always_shown():
    assert shown(1) == [1]
    assert shown(30) == [1, 3, 10, 30]
    assert shown(300) == [1, 3, 10, 30, 100, 300]


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(RuntimeError, match="not all finite"):
        summarize(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("name", ["topk", "dense"])
def test_look_sees_gradient_and_residual(name):
    def rank(comm):
        reducer = Reducer(method(name) if name == "dense" else method(name, density=0.1), comm, granularity="model")
        looks, norms = [], []
        for step in range(3):
            torch.manual_seed(10 * step + comm.rank)
            looks.append(Look())
            reducer.observers = [looks[-1]]
            grads = {"w": torch.randn(50), "b": torch.randn(10)}
            norms.append(torch.cat([*grads.values()]).norm())
            reducer.reduce_(grads)
        return looks, norms, reducer.states[0].get("residual")

    (looks, norms, residual), _ = simulate(2, rank)
    widened = looks[-1].u.norm() > norms[-1] * 1.001
    assert bool(widened) == (name == "topk")
    if residual is not None:
        rest = looks[-1].u.clone()
        rest[rest.abs().topk(6).indices] = 0
        assert torch.equal(residual, rest)


def test_look_notices_another_u():
    def rank(comm):
        reducer = Reducer(method("topk", density=0.1), comm)
        look = Look()
        reducer.observers = [look]
        reducer.reduce_({"w": torch.randn(50)})
        with pytest.raises(RuntimeError, match="Step 0: u is not"):
            look.compensated(look.u + 1, Context(look.segment))

    simulate(1, rank)
