import logging
import math
import re

import pytest
import torch
from torch import Tensor

from lightning_sparse import METHODS, Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.base import add_
from lightning_sparse.memory import Momentum, NoMemory
from lightning_sparse.observer import Observer
from lightning_sparse.state import resized
from tests.support.representatives import DISTINCT, REPRESENTATIVES, small
from tests.support.tiers import one_in, tiers


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
    # Residuals are added to the next gradients: rank 0 has 2 + 1 at entry 2, rank 1 has 1 + 1 at entry 4.
    assert first[2] == second[2] == [0, -1.5, 1.5, 0, 1.0, 0.25, 0, 0]
    assert first[3] == second[3] == [0.0] * 8


def test_options_of_the_method_and_unknown_ones():
    def rank(comm: Comm) -> Method:
        with pytest.raises(TypeError, match=r"Reducer has no option 'densty', nor has method 'topk'.*'density'"):
            Reducer("topk", comm, densty=0.25)
        return Reducer("topk", comm, density=0.25, value_format="int8", clip_norm=1.0).method

    assert simulate(1, rank) == [method("topk", density=0.25, value_format="int8")]


def test_bytes_are_counted():
    def rank(comm: Comm) -> int:
        Reducer(method("topk", density=0.01), comm, granularity="model").reduce_({"w": torch.randn(10_000)})
        return comm.sent_bytes

    # 100 values of 4 bytes. Their indices take a byte each, and 100 + 10,000 / 256 bits in 18 bytes. Each part fills
    # words of 8 bytes. A count takes 8 bytes, fingerprint and status 16, and the checksum 8. All go to two other ranks.
    assert simulate(3, rank) == [2 * (400 + 104 + 24 + 8 + 16 + 8)] * 3


@pytest.mark.parametrize(
    ("name", "size", "density", "dense"),
    [
        # A payload has 4 bytes per value and k + d bits for all indices, and goes to P − 1 ranks. Dense gradients need
        # 2(P − 1)/P · 4d.
        ("topk", 2, 0.939, False),
        ("topk", 2, 0.940, True),
        ("topk", 4, 0.454, False),
        ("topk", 4, 0.455, True),
        # This payload has room for 4k/3 entries. A single worker has nothing to save, and never falls back to dense.
        ("gaussiank", 4, 0.340, False),
        ("gaussiank", 4, 0.341, True),
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
        assert f"at density {density:g} would send at least as many bytes as dense" in said[0]
        assert f"gradients with {size} ranks" in said[0]
        assert "1,000 of 1,000 elements fall back to dense (1 of 1 segments)" in said[0]


@pytest.mark.parametrize(
    ("density", "granularity", "density_warmup", "warns"),
    [(1, "model", (), True), (0.9, "layer", (), True), (0.4, "layer", (), False), (0.01, "model", (1.0,), False)],
)
def test_a_method_that_compresses_nothing_is_warned_of(density, granularity, density_warmup, warns, caplog):
    """There is no warning if only some segments fall back to dense, or during a density warm-up."""

    def rank(comm: Comm) -> None:
        options = {
            "granularity": granularity,
            "density_warmup": density_warmup,
            "density_warmup_steps": 1 if density_warmup else None,
        }
        reducer = Reducer(method("topk", density=density, index_format="int32"), comm, **options)
        for _ in range(3):
            reducer.reduce_({"large": torch.randn(10_000), "small": torch.randn(3)})

    with caplog.at_level(logging.WARNING):
        simulate(2, rank)
    assert len(caplog.records) == warns
    assert all("Nothing is compressed: lower the density, or use strategy='ddp'." in x.message for x in caplog.records)


@pytest.mark.parametrize(("name", "said"), [("qsgd", 1), ("dense", 0), ("median", 0)])
def test_a_method_without_a_density_says_where_it_goes_dense(name, said, caplog):
    def rank(comm: Comm) -> None:
        Reducer(method(name), comm).reduce_({"w": torch.ones(40_000)})

    with caplog.at_level(logging.INFO):
        simulate(13, rank)
    found = [record.message for record in caplog.records]
    assert len(found) == said
    assert all("bytes as dense gradients with 13 ranks: 40,000 of 40,000" in text for text in found)
    assert all(text.endswith("Nothing is compressed: use strategy='ddp'.") for text in found)


def test_what_was_kept_is_sent_when_a_warm_up_ends_dense():
    def rank(comm: Comm) -> tuple[float, float]:
        reducer = Reducer(method("topk", density=0.01), comm, density_warmup=[0.01, 1.0], granularity="model")
        total = 0.0
        for reducer.epoch in (0, 0, 1):
            grads = {"w": torch.arange(1.0, 101)}
            reducer.reduce_(grads)
            total += grads["w"].sum().item()
        return total, reducer.state_dict()["elements"]["residual"]["w"].abs().max().item()

    assert simulate(2, rank) == [(3 * 5050.0, 0.0)] * 2


def test_warm_up_by_epochs_and_by_steps():
    reducer = simulate(1, lambda comm: Reducer(method("topk", density=0.01), comm, density_warmup=[0.25, 0.05]))[0]
    densities = []
    for reducer.epoch in range(4):
        densities.append(reducer.density)
    assert densities == [0.25, 0.05, 0.01, 0.01]
    reducer = simulate(
        1, lambda comm: Reducer(method("topk", density=0.01), comm, density_warmup=[0.25, 0.05], density_warmup_steps=2)
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
    # bf16 has 8 bits: (256 + 1)/2 = 128.5 is applied as 128, and both ranks keep the other half.
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
        ({"rank": 1}, "state has rank 1, but 0 is needed"),
        ({"size": 3}, "state has size 3, but 1 is needed"),
        ({"version": 1}, "state has version 1, but 2 is needed"),
        ({"elements": {"residual": {"v": torch.zeros(4)}}}, "differ in their parameters: v, w. If one is frozen now"),
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


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_gradients_of_a_graph_leave_none_in_the_state(name):
    """Gradients have a graph with create_graph=True."""

    def reduced(comm: Comm, graph: bool) -> tuple[list[Tensor], bool]:
        reducer = Reducer(method(name, **small(name)), comm)
        found = []
        for _ in range(2):
            weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
            (grad,) = torch.autograd.grad((weight**3).sum() * (comm.rank + 1), weight, create_graph=graph)
            reducer.reduce_({"w": grad})
            found.append(grad.detach())
        return found, any(x.requires_grad for state in reducer.states for x in state.values())

    def rank(comm: Comm) -> list[bool]:
        (with_graph, in_state), (without, _) = reduced(comm, True), reduced(comm, False)
        return [in_state, *map(torch.equal, with_graph, without)]

    assert simulate(2, rank) == [[False, True, True]] * 2


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

    def gradients(self, grads, ctx):
        self.g = torch.cat([grad.float() for grad in grads])
        kept = ctx.state.get("residual", ctx.state.get("momentum"))
        self.e = torch.zeros_like(self.g) if kept is None else kept.clone()

    def compensated(self, u, ctx):
        self.u = u.clone()

    def aggregated(self, u, applied, ctx):
        # If everything is sent, u is now the sum over the ranks.
        rest = torch.zeros_like(u) if applied is u else add_(u.clone(), applied, -1)
        self.seen.append((self.g, self.e, self.u, rest))


@one_in(3)
@pytest.mark.parametrize("name", DISTINCT)
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
            memory = METHODS[name].memory
            if isinstance(memory, Momentum):
                torch.testing.assert_close(u, memory.beta * e + (1 - memory.beta) * g)
            else:
                assert torch.equal(u, g + e * getattr(memory, "decay", 1.0))
            # Error feedback requires this. A vote or random rounding may leave more than u.
            assert rest.norm() <= u.norm() or not memory.error_feedback


def watched_run(comm: Comm, name: str, steps: list[dict], **options) -> tuple[list[Tensor], dict]:
    """Reduce gradients in each step. A step may have a loss scale, which multiplies them, and an overflow on a rank."""
    scale = [1.0]
    reducer = Reducer(name, comm, granularity="layer", **{"loss_scale": lambda: scale[0], **options})
    outs = []
    for number, step in enumerate(steps):
        scale[0] = step.get("scale", 1.0)
        generator = torch.Generator().manual_seed(10 * number + comm.rank)
        grads = {"a": torch.randn(300, generator=generator), "b": torch.randn(40, 50, generator=generator)}
        for grad in grads.values():
            grad.mul_(scale[0])
        if step.get("overflow") == comm.rank:
            grads[step["where"]].view(-1)[7] = step["what"]
        before = reducer.state_dict() if reducer.layout else None
        reducer.reduce_(grads)
        outs.append(torch.cat([grad.flatten() for grad in grads.values()]).div_(scale[0]))
        if "overflow" in step:
            assert outs[-1].isnan().all()
            assert before is None or str(before["elements"]) == str(reducer.state_dict()["elements"])
    return outs, reducer.state_dict()


@one_in(3)
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize(
    ("where", "what"), tiers([("a", math.inf), ("b", math.nan), ("b", -math.inf)], [("a", math.inf)])
)
def test_an_overflow_anywhere_leaves_the_step_out_everywhere(name, where, what):
    ordinary = [{"scale": 4.0}, {"scale": 4.0}, {"scale": 8.0}, {"scale": 2.0**16}]
    expected = simulate(2, lambda comm: watched_run(comm, name, [{}] * 4))
    assert all(out.isfinite().all() for out in expected[0][0])
    for rank in range(2):
        bad = {"overflow": rank, "where": where, "what": what}
        # The gradient is drawn by the number of the step: the steps after the bad one are number 3 and 4.
        disturbed = simulate(2, lambda comm, bad=bad: watched_run(comm, name, [*ordinary, bad]))
        for (outs, state), (control, control_state) in zip(disturbed, expected, strict=True):
            for out, same in zip(outs, control, strict=False):
                assert torch.equal(out, same)
            assert state["skipped"] == 1
            assert state["step"] == 4
            for kept, same in zip(state["elements"].values(), control_state["elements"].values(), strict=True):
                assert all(torch.equal(kept[param], same[param]) for param in same)


def test_a_step_that_is_not_finite_is_skipped_by_option_and_named(caplog):
    bad = {"overflow": 1, "where": "a", "what": float("nan")}
    with caplog.at_level(logging.WARNING):
        outs = simulate(2, lambda comm: watched_run(comm, "topk", [{}, bad, {}], loss_scale=None, on_nonfinite="skip"))
    assert [record.message for record in caplog.records] == [
        "The gradient of 'a' is not finite on rank 1 at step 1. All ranks skip this step; 1 skipped so far."
    ]
    assert all(state["skipped"] == 1 for _, state in outs)
    with pytest.raises(NonFiniteGradient, match="The gradient of 'a' is not finite on rank 1 at step 1"):
        simulate(2, lambda comm: watched_run(comm, "topk", [{}, bad], loss_scale=None))


def test_the_same_parameter_is_blamed_on_all_ranks_in_any_order_and_mode():
    """Rank 0 has a NaN in "a", which is reduced last; rank 1 in all. The first is "c", on rank 1."""

    def rank(comm: Comm, **options) -> str:
        grads = {name: torch.ones(1000) for name in "abc"}
        reducer = Reducer("topk", comm, granularity="layer", **options)
        reducer.setup(grads)
        for name in ["a"] if comm.rank == 0 else "abc":
            grads[name][7] = torch.nan
        if comm.rank == 1:
            grads = {name: grads[name] for name in "bca"}
        with pytest.raises(NonFiniteGradient) as caught:
            reducer.reduce_(grads)
        return str(caught.value)

    texts = {text for ahead in ({}, {"clip_norm": 1.0}) for text in simulate(2, lambda comm: rank(comm, **ahead))}  # noqa: B023
    assert len(texts) == 1
    assert texts.pop().startswith("The gradient of 'c' is not finite on rank 1 at step 0.")


def test_a_sparse_gradient_is_refused_before_anybody_looks_ahead():
    def rank(comm: Comm) -> None:
        reducer = Reducer("topk", comm, clip_norm=1.0)
        reducer.reduce_({"w": torch.ones(20), "v": torch.ones(20)})
        with pytest.raises(TypeError, match=r"gradient of 'w' is sparse \(torch.sparse_coo\)"):
            reducer.reduce_({"w": torch.ones(20).to_sparse(), "v": torch.ones(20)})

    simulate(2, rank)


def test_an_expanded_gradient_is_refused_before_anything_is_kept():
    def rank(comm: Comm) -> None:
        reducer = Reducer(method("topk", density=0.25), comm)
        reducer.reduce_({"w": torch.arange(4.0)})
        before = reducer.state_dict()["elements"]["residual"]["w"]
        with pytest.raises(TypeError, match="gradient of 'w' is expanded, so nothing can be written to it"):
            reducer.reduce_({"w": torch.ones(1).expand(4)})
        assert torch.equal(reducer.state_dict()["elements"]["residual"]["w"], before)
        reducer.reduce_({"w": torch.arange(8.0)[::2]})  # not contiguous, but each element has memory

    simulate(1, rank)


def test_a_gradient_under_two_names_or_none_at_all_is_refused():
    def rank(comm: Comm) -> None:
        shared = torch.ones(4)
        reducer = Reducer("topk", comm)
        for _ in range(2):
            with pytest.raises(ValueError, match="'a' and 'c' are the same gradient, so it would count twice"):
                reducer.reduce_({"a": shared, "b": torch.ones(4), "c": shared})
        with pytest.raises(ValueError, match="'a' and 'b' are two parameters that share memory"):
            reducer.reduce_({"a": shared, "b": shared[1:]})
        packed, empty = torch.ones(6, 4).chunk(2, 1), torch.ones(0)  # the halves share memory, but no element
        reducer.reduce_({"a": packed[0], "b": packed[1], "c": empty, "d": empty})
        with pytest.raises(TypeError, match="gradient of 'b' is None: give a tensor, of zeros if"):
            Reducer("topk", comm).reduce_({"a": shared, "b": None})  # type: ignore[dict-item]

    simulate(1, rank)


def test_a_rank_tells_the_others_that_its_first_gradients_are_refused():
    def rank(comm: Comm) -> None:
        told: list[str] = []
        comm.mark_failed = told.append  # type: ignore[method-assign]
        with pytest.raises(TypeError):
            Reducer("topk", comm).reduce_({"w": None})  # type: ignore[dict-item]
        assert "The gradient of 'w' is None" in told[0]

    simulate(1, rank)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_local_clipping_happens_before_anything_is_kept(scale):
    def rank(comm: Comm) -> tuple[list[float], list[float]]:
        reducer = Reducer(method("topk", density=0.25), comm, clip_norm=5.0, loss_scale=lambda: scale)
        # Rank 0's gradient has norm 10 and is halved, rank 1's has norm 1.
        grads = {"w": torch.tensor([[6.0, 8.0, 0, 0], [0.0, 0, 1.0, 0]][comm.rank]) * scale}
        reducer.reduce_(grads)
        return (grads["w"] / scale).tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()

    assert simulate(2, rank) == [([0, 2.0, 0.5, 0], [3.0, 0, 0, 0]), ([0, 2.0, 0.5, 0], [0, 0, 0, 0])]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"on_nonfinite": "ignore"}, "choose from raise, skip"), ({"clip_norm": 0}, "above 0, or None")],
)
def test_bad_options_about_large_gradients(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(1, lambda comm: Reducer("topk", comm, **options))


@one_in(3)
@pytest.mark.parametrize(("old", "new"), tiers([(4, 2), (2, 3), (2, 1), (1, 2), (3, 2), (5, 8), (8, 3)], [(2, 3)]))
@pytest.mark.parametrize("name", DISTINCT)
def test_another_number_of_ranks_keeps_the_mean_of_what_was_kept(name, old, new):
    def total(states: list[dict]) -> Tensor:
        elements = [
            per_param.values()
            for state in states
            for kind, per_param in state["elements"].items()
            if state["resize"][kind] != "mean"
        ]
        kept = [torch.cat([value.flatten().double() for value in values]) for values in elements]
        return sum(kept, torch.zeros(2300, dtype=torch.float64)) / len(states)

    def rank(comm: Comm) -> dict:
        reducer = Reducer(name, comm)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            grads = {"a": torch.randn(300, generator=generator), "b": torch.randn(40, 50, generator=generator)}
            reducer.reduce_(grads)
        return reducer.state_dict()

    def go_on(comm: Comm) -> dict:
        reducer = Reducer(name, comm, granularity="layer")
        reducer.load_state_dict(resized(before, comm.rank, comm.size))
        reducer.setup({"a": torch.empty(300), "b": torch.empty(40, 50)})
        return reducer.state_dict()

    before = simulate(old, rank)
    after = simulate(new, go_on)
    assert all(state["step"] == 3 for state in after)
    torch.testing.assert_close(total(after), total(before), rtol=0, atol=1e-6)


def test_what_is_equal_on_all_ranks_stays_so_and_what_cannot_be_shared_starts_anew():
    def state(rank: int) -> dict:
        names = {"kept": "sum", "common": "replicate", "own": "drop"}
        elements = {name: {"w": torch.tensor([float(rank + 1)])} for name in names}
        segments = {"w": {"common": torch.tensor([7.0]), "own": torch.tensor([rank])}}
        elements["common"]["w"].fill_(5.0)
        return {"rank": rank, "size": 3, "resize": names, "elements": elements, "segments": segments}

    for rank, kept in ((0, 2 / 3 * (1 + 3)), (1, 2 / 3 * 2)):
        result = resized([state(r) for r in range(3)], rank, 2)
        assert {name: value["w"].item() for name, value in result["elements"].items()} == pytest.approx(
            {"kept": kept, "common": 5.0, "own": 0.0}
        )
        assert result["segments"] == {"w": {"common": torch.tensor([7.0])}}
        assert (result["rank"], result["size"]) == (rank, 2)


def test_reset_forgets_whatever_was_before():
    def rank(comm):
        reducer = Reducer(method("topk", density=0.25), comm)
        reducer.reset()  # nothing yet
        reducer.reduce_({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        again = Reducer(method("topk", density=0.25), comm)
        again.load_state_dict(reducer.state_dict())
        again.reset()  # the loaded state, too
        again.reduce_({"w": torch.tensor([0.0, 0.0, 0.0, 8.0])})
        return again.step, again.states[0]["residual"].tolist()

    assert simulate(1, rank) == [(1, [0.0] * 4)]


def test_the_number_of_skipped_steps_is_saved_and_reset():
    def rank(comm: Comm) -> list[int]:
        reducer, again = (Reducer("topk", comm, density=0.25, on_nonfinite="skip") for _ in range(2))
        reducer.reduce_({"w": torch.tensor([1.0, math.nan, 3.0, 4.0])})
        again.setup({"w": torch.zeros(4)})
        again.load_state_dict(reducer.state_dict())
        found = [reducer.skipped, again.skipped]
        again.reset()
        return [*found, again.skipped]

    assert simulate(1, rank) == [[1, 1, 0]]


def test_residuals_of_weights_that_are_gone_can_be_dropped():
    def rank(comm):
        reducer = Reducer(method("topk", density=0.25), comm)
        grads = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        reducer.reduce_(grads)
        reducer.forget_residuals()
        grads["w"].zero_()
        reducer.reduce_(grads)
        reducer.in_flight = True
        with pytest.raises(RuntimeError, match=r"Reducer\.forget_residuals while an exchange goes on"):
            reducer.forget_residuals()
        return reducer.step, grads["w"].tolist()

    assert simulate(2, rank) == [(2, [0.0] * 4)] * 2


@one_in(2)
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("how", ["reset", "loaded"])
def test_a_rank_that_alone_starts_anew_is_out_of_step(how, name):
    """It would call other collectives than the other ranks, or it has lost its state."""

    def rank(comm):
        reducer = Reducer(method(name), comm)
        for _ in range(2):
            reducer.reduce_({"w": torch.ones(4000)})
        if comm.rank == 1:
            if how == "reset":
                reducer.reset()
                reducer.step = 2
            else:
                reducer.load_state_dict(reducer.state_dict())
        with pytest.raises(RankFailure) as failure:
            reducer.reduce_({"w": torch.ones(4000)})
        return str(failure.value)

    errors = simulate(3, rank)
    # With gTopK rank 2 communicates with rank 0 only, and learns of the error from rank 0.
    for error in errors[: 2 if name == "gtopk" else 3]:
        assert re.match(r"Ranks are out of step: at step 2, .* rank [01] differs from other ranks", error), error


def test_a_rank_whose_gradients_have_another_dtype_is_out_of_step():
    """Their rounding would make its weights others."""

    def rank(comm):
        grads = {"v": torch.ones(30), "w": torch.ones(40, dtype=[torch.float32, torch.bfloat16][comm.rank])}
        with pytest.raises(RankFailure, match=r"Ranks are out of step: at step 0, .* differs from other ranks"):
            Reducer("topk", comm, granularity="layer").reduce_(grads)
        return True

    assert simulate(2, rank) == [True] * 2


def test_a_part_of_another_kind_finds_nothing_and_says_so(caplog):
    def rank(comm: Comm) -> None:
        reducer = Reducer(method("topk", density=0.25), comm)
        reducer.reduce_({"w": torch.tensor([1.0, 2, 3, 4])})
        other = Reducer(method("gaussiank", density=0.5), comm)
        other.load_state_dict(reducer.state_dict())
        other.setup({"w": torch.empty(4)})
        assert other.state_dict()["elements"]["residual"]["w"].tolist() == [1.0, 2, 3, 0]
        assert not caplog.records
        Reducer("dense", comm).load_state_dict(reducer.state_dict())
        dense = Reducer("dense", comm)
        dense.setup({"w": torch.empty(4)})
        dense.load_state_dict(reducer.state_dict())

    with caplog.at_level(logging.WARNING):
        simulate(1, rank)
    text = "The saved state contains residual of Residual, which Identity() + NoMemory() + AllReduceMean() does not use"
    assert [record.message.partition(":")[0] for record in caplog.records] == [text]


def test_parameters_on_several_devices_are_refused_by_name():
    params = {"a": torch.zeros(3), "b": torch.zeros(3, device="meta")}
    with pytest.raises(ValueError, match=r"'a' is on cpu, and 'b' on meta: .* must be on one device"):
        simulate(1, lambda comm: Reducer("topk", comm).setup(params))
