import logging

import pytest
import torch
from torch import Tensor

from lightning_sparse import METHODS, Method, Reducer, method, simulate
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import TopK
from lightning_sparse.memory import NoMemory
from lightning_sparse.observer import Observer


def test_two_steps_by_hand():
    """Two ranks, two of eight entries a step."""
    given = {
        0: [[4.0, -3.0, 2.0, 0, 0, 0, 0, 0], [0.0, -3.0, 1.0, 0, 0, 0, 0, 0]],
        1: [[0.0, 0, 0, 0, 1.0, 0, -6.0, -5.0], [0.0, 0, 0, 0, 1.0, 0.5, 0, 0]],
    }

    def rank(comm: Comm) -> list[list[float]]:
        reducer = Reducer(method("topk", density=0.25), comm)
        seen = []
        for step in range(2):
            grads = {"w": torch.tensor(given[comm.rank][step]).view(2, 4)}
            reducer.reduce_(grads)
            seen.append(grads["w"].flatten().tolist())
            seen.append(reducer.state_dict()["elements"]["residual"]["w"].flatten().tolist())
        return seen

    first, second = simulate(2, rank)
    assert first[0] == second[0] == [2.0, -1.5, 0, 0, 0, 0, -3.0, -2.5]
    assert first[1] == [0, 0, 2.0, 0, 0, 0, 0, 0]
    assert second[1] == [0, 0, 0, 0, 1.0, 0, 0, 0]
    # What was kept comes back: rank 0 has 2 + 1 at entry 2, rank 1 has 1 + 1 at entry 4.
    assert first[2] == second[2] == [0, -1.5, 1.5, 0, 1.0, 0.25, 0, 0]
    assert first[3] == second[3] == [0.0] * 8


def test_bytes_are_counted():
    def rank(comm: Comm) -> int:
        Reducer(method("topk", density=0.01), comm, granularity="model").reduce_({"w": torch.randn(10_000)})
        return comm.sent_bytes

    # 100 entries of 4 + 4 bytes, a count in 8, a header of 16, to two others.
    assert simulate(3, rank) == [2 * (800 + 8 + 16)] * 3


@pytest.mark.parametrize(
    ("name", "size", "density", "dense"),
    [
        # Pairs of 8 bytes to P − 1 others against 2(P − 1)/P · 4d: less up to a density of 1/P ...
        ("topk", 2, 0.49, False),
        ("topk", 2, 0.5, True),
        ("topk", 4, 0.24, False),
        ("topk", 4, 0.25, True),
        # ... room for 4/3 as many: up to 3/(4P). One worker has nothing to save, and does what it is told.
        ("gaussiank", 4, 0.18, False),
        ("gaussiank", 4, 0.19, True),
        ("topk", 1, 0.5, False),
        # Values at shared indices, added up on the way: always less.
        ("randk", 8, 0.9, False),
    ],
)
def test_dense_above_the_methods_own_point(name, size, density, dense, caplog):
    def rank(comm: Comm) -> int:
        reducer = Reducer(method(name, density=density), comm)
        for _ in range(3):
            grads = {"w": torch.arange(1.0, 1001) * (1 + comm.rank)}
            reducer.reduce_(grads)
        return int(grads["w"].count_nonzero())

    with caplog.at_level(logging.INFO):
        counts = simulate(size, rank)
    assert (counts[0] == 1000) == dense
    said = [record.message for record in caplog.records]
    assert len(said) == dense
    if dense:
        assert f"at density {density:g} would send no less than dense gradients do among {size} ranks" in said[0]
        assert "1,000 of 1,000 elements go dense (1 of 1 segments)" in said[0]


def test_what_was_kept_is_sent_when_a_warm_up_ends_dense():
    def rank(comm: Comm) -> tuple[float, float]:
        reducer = Reducer(method("topk", density=0.01), comm, warmup=[0.01, 1.0], granularity="model")
        total = 0.0
        for reducer.epoch in (0, 0, 1):
            grads = {"w": torch.arange(1.0, 101)}
            reducer.reduce_(grads)
            total += grads["w"].sum().item()
        return total, reducer.state_dict()["elements"]["residual"]["w"].abs().max().item()

    assert simulate(2, rank) == [(3 * 5050.0, 0.0)] * 2


def test_warm_up_by_epochs_and_by_steps():
    reducer = simulate(1, lambda comm: Reducer(method("topk", density=0.01), comm, warmup=[0.25, 0.05]))[0]
    densities = []
    for reducer.epoch in range(4):
        densities.append(reducer.density)
    assert densities == [0.25, 0.05, 0.01, 0.01]
    reducer = simulate(
        1, lambda comm: Reducer(method("topk", density=0.01), comm, warmup=[0.25, 0.05], warmup_steps=2)
    )[0]
    densities = []
    for reducer.step in range(6):
        densities.append(reducer.density)
    assert densities == [0.25, 0.25, 0.05, 0.05, 0.01, 0.01]


def test_rounding_to_16_bits_goes_back_into_the_residual():
    def rank(comm: Comm) -> tuple[float, float]:
        reducer = Reducer(method("topk", density=0.25), comm)
        grads = {"w": torch.tensor([[1.0, 256.0], [256.0, 0.0]][comm.rank] + [0.0] * 6).bfloat16()}
        reducer.reduce_(grads)
        return grads["w"].double().sum().item(), sum(
            e.double().sum().item() for e in reducer.state_dict()["elements"]["residual"].values()
        )

    (out, kept0), (out1, kept1) = simulate(2, rank)
    assert out == out1
    # bf16 has 8 bits: (256 + 1)/2 = 128.5 is handed out as 128, and both ranks keep the other half.
    assert out == 128 + 128
    assert 2 * out + kept0 + kept1 == 1 + 256 + 256


def test_without_memory_nothing_is_kept():
    def rank(comm: Comm) -> dict[str, object]:
        reducer = Reducer(Method(TopK(0.1), memory=NoMemory()), comm)
        for _ in range(2):
            grads = {"w": torch.arange(20.0)}
            reducer.reduce_(grads)
        assert grads["w"].nonzero().flatten().tolist() == [18, 19]
        return reducer.state_dict()["elements"]

    assert simulate(2, rank) == [{}, {}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "Method(something else)"}, "state is of method 'Method"),
        ({"rank": 1}, "state is of rank 1, here it is 0"),
        ({"size": 3}, "state is of size 3, here it is 1"),
        ({"version": 2}, "state is of version 2"),
        ({"elements": {"residual": {"v": torch.zeros(4)}}}, "differ in their parameters: v, w"),
        ({"elements": {"residual": {"w": torch.zeros(5)}}}, r"'w' has shape \(5,\), not \(4,\)"),
    ],
)
def test_foreign_state_is_refused(change, message):
    def rank(comm: Comm) -> None:
        reducer = Reducer("topk", comm)
        reducer.reduce_({"w": torch.ones(4)})
        with pytest.raises(ValueError, match=message):
            reducer.load_state_dict({**reducer.state_dict(), **change})

    simulate(1, rank)


def test_non_contiguous_gradients_are_written_in_place():
    def rank(comm: Comm) -> bool:
        grad = torch.arange(12.0).view(3, 4).t()
        Reducer("dense", comm).reduce_({"w": grad})
        return bool(torch.equal(grad, torch.arange(12.0).view(3, 4).t()))

    assert simulate(2, rank) == [True, True]


def test_two_reducers_share_a_method_but_no_state():
    shared = method("topk", density=0.25)

    def rank(comm: Comm) -> bool:
        one, two = Reducer(shared, comm), Reducer(shared, comm)
        one.reduce_({"w": torch.arange(8.0)})
        two.setup({"w": torch.zeros(8)})
        return two.state_dict()["elements"]["residual"]["w"].count_nonzero().item() == 0

    assert all(simulate(2, rank))


class Recorder(Observer):
    def __init__(self):
        self.seen = []

    def gradients(self, segment, grads, ctx):
        self.g = torch.cat([grad.float() for grad in grads])
        self.e = ctx.state["residual"].clone() if "residual" in ctx.state else torch.zeros_like(self.g)

    def compensated(self, segment, u, ctx):
        self.u = u.clone()

    def aggregated(self, segment, u, used, compressor, ctx):
        self.seen.append((self.g, self.e, self.u, compressor.remove_(u.clone(), used, segment, ctx)))


@pytest.mark.parametrize("name", METHODS)
def test_an_observer_sees_what_is_added_sent_and_kept_and_changes_nothing(name):
    def rank(comm: Comm, watched: bool) -> tuple[Tensor, list]:
        reducer = Reducer(name, comm, granularity="layer")
        recorder = Recorder()
        for step in range(4):
            reducer.observers = [recorder] if watched and step != 2 else []
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            grads = {"a": torch.randn(300, generator=generator), "b": torch.randn(40, 50, generator=generator)}
            reducer.reduce_(grads)
        kept = reducer.state_dict()["elements"].get("residual", {}).get("a")
        assert not watched or kept is None or torch.equal(recorder.seen[-1][3], kept)
        return torch.cat([grad.view(-1) for grad in grads.values()]), recorder.seen

    unwatched = simulate(2, lambda comm: rank(comm, False))
    watched = simulate(2, lambda comm: rank(comm, True))
    for (expected, _), (result, seen) in zip(unwatched, watched, strict=True):
        assert torch.equal(result, expected)
        assert len(seen) == 2 * 3
        for g, e, u, rest in seen:
            assert torch.equal(u, g + e)
            assert rest.norm() < u.norm()
