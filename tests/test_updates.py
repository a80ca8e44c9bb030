"""Updates instead of gradients: equal weights, no loss, and equality with dense training if all entries are sent."""

import gc
import itertools
import math
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import TopK
from lightning_sparse.kernels.payout import add_with_payout_
from lightning_sparse.layout import Layout
from lightning_sparse.methods import resolve_updates
from lightning_sparse.momentum import ADAM_LIKE, LIKE, SegmentMoments, moments_of
from lightning_sparse.options import ReducerOptions
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.parameters import exchanged_parameters
from tests.support.tiers import in_diagonals, one_in, tiers
from tests.support.update_training import (
    ADAMW,
    OPTIMIZERS,
    SGD,
    CountsInGroups,
    Net,
    OthersAdam,
    flat,
    residual,
    train,
    weights,
)

SIZES = [1, 2, 3, 5, 8]


def test_two_ranks_by_hand():
    """SGD at rate 1: x − w is the gradient. Each rank sends one of three entries, and keeps the others."""

    def rank(comm: Comm) -> tuple[list[float], list[float]]:
        net = nn.Module()
        net.w = nn.Parameter(torch.tensor([10.0, 20.0, 30.0]))
        optimizer = SGD(net.parameters(), 1.0)
        reducer = Reducer(Method(TopK(density=0.34)), comm, exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]  # few elements would go dense
        net.w.grad = torch.tensor([[4.0, 1.0, 2.0], [1.0, 2.0, 8.0]][comm.rank])
        updates.begin(optimizer)
        optimizer.step()
        updates.exchange(optimizer)
        return net.w.tolist(), reducer.states[0]["residual"].tolist()

    first, second = simulate(2, rank)
    assert first == ([8.0, 20.0, 26.0], [0.0, 1.0, 2.0])
    assert second == ([8.0, 20.0, 26.0], [1.0, 2.0, 0.0])


# All pairs of optimizer, method and number of ranks.
NAMES = ["topk", "gtopk", "oktopk", "scalecom", "gaussiank"]
CASES = [
    (optimizer, name, SIZES[(row + column) % len(SIZES)])
    for row, optimizer in enumerate(OPTIMIZERS)
    for column, name in enumerate(NAMES)
]


@one_in(2)
@pytest.mark.parametrize(
    ("optimizer", "name", "size"),
    tiers(CASES, [case for case in CASES if case[2] in (2, 3) and case[1] != "gaussiank"]),
)
def test_equal_on_all_ranks_and_nothing_lost(optimizer, name, size):
    ranks = simulate(size, lambda comm: train(comm, optimizer, method(name, density=0.05))[0])
    assert all(torch.equal(other, ranks[0]) for other in ranks)


@pytest.mark.parametrize(
    ("name", "value_format"),
    in_diagonals(
        ["topk", "gaussiank", "gtopk", "oktopk", "doublesqueeze", "chunktopk"], ["int2", "int4", "int8", "bfloat16"], 8
    ),
)
@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.bfloat16], [torch.float32]))
def test_nothing_is_lost_of_rounded_updates(name, value_format, dtype):
    def rank(comm):
        net = Net(dtype, {"a": (40, 50), "b": (64,), "c": (1,)})
        chosen = method(name, density=0.05, value_format=value_format)
        return train(comm, "adamw", chosen, net=net, dtype=dtype)[0]

    ranks = simulate(3, rank)
    assert all(torch.equal(other, ranks[0]) for other in ranks)


def test_a_checkpoint_of_the_earlier_default_resumes_and_the_other_way_round():
    """Density 0.01 in fp32, and two bits after a warm-up: residuals are the same tensors."""
    ways = [
        ("earlier", method("topk", density=0.01), ReducerOptions()),
        ("default", *resolve_updates("topk", None)),
    ] * 2

    def rank(comm: Comm) -> list[Tensor]:
        net, state, found = Net(shapes={"a": (100, 70), "b": (64,)}), None, []
        optim = ADAMW(net.parameters(), 0.01)
        for _, chosen, options in ways:
            reducer = Reducer(chosen, comm, exchanged="update", **vars(options))
            updates = DeltaExchange(reducer, net, [optim])
            if state is not None:
                reducer.load_state_dict(state)
                assert torch.equal(residual(reducer), found[-1])
                assert reducer.step == len(found) * 3
            for step in range(3):
                net.backward(comm.rank, reducer.step + step)
                updates.begin(optim)
                optim.step()
                updates.exchange(optim)
            state = reducer.state_dict()
            found.append(residual(reducer))
        return [weights(net), *found]

    first, second = simulate(2, rank)
    assert torch.equal(first[0], second[0])
    assert all(kept.any() for kept in (*first[1:], *second[1:]))


def test_two_levels():
    chosen = Method(TopK(density=0.05), aggregator=TwoLevel(ranks_per_node=2))
    ranks = simulate(4, lambda comm: train(comm, "adamw", chosen)[0])
    assert all(torch.equal(other, ranks[0]) for other in ranks)


@one_in(2)
@pytest.mark.parametrize("granularity", ["layer", "bucket", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, granularity):
    ranks = simulate(
        2,
        lambda comm: train(comm, "momentum", method("topk", density=0.05), granularity=granularity, dtype=dtype)[0],
    )
    assert torch.equal(*ranks)


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_everything_sent_is_dense_training(name):
    """The mean of updates is the update of the mean, but for rounding: once for each rank's weights, once for all."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        found = train(comm, name, method("topk", density=1.0))[0]
        net = Net()
        optimizer = OPTIMIZERS[name](net.parameters())
        for step in range(6):
            grads = []
            for other in range(comm.size):
                net.backward(other, step)
                grads.append([param.grad for param in net.parameters()])
            for param, *own in zip(net.parameters(), *grads, strict=True):
                param.grad = torch.stack(own).mean(0)
            optimizer.step()
        return found, weights(net)

    for found, dense in simulate(3, rank):
        assert (found - dense).abs().max() <= 6 * 4 * 2**-23 * dense.abs().max()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_that_sends_everything_is_the_plain_optimizer(name):
    def rank(comm: Comm) -> Tensor:
        return train(comm, name, method("topk", density=1.0))[0]

    (found,) = simulate(1, rank)
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    for step in range(6):
        net.backward(0, step)
        optimizer.step()
    assert torch.equal(found, weights(net))


def test_one_rank_that_sends_everything_sends_what_a_residual_held_before():
    """As after a resume with another density, on one rank instead of two."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        net = Net()
        optimizer = SGD(net.parameters(), 0.5)
        start, given = weights(net), torch.zeros(())
        state = None
        for step, density in enumerate((0.1, 1.0, 1.0)):
            reducer = Reducer(method("topk", density=density), comm, exchanged="update")
            updates = DeltaExchange(reducer, net, [optimizer])
            if state is not None:
                reducer.load_state_dict(state)
            net.backward(0, step)
            given = given + 0.5 * flat(param.grad for _, param in sorted(net.named_parameters()))
            updates.begin(optimizer)
            optimizer.step()
            updates.exchange(optimizer)
            state = reducer.state_dict()
        return weights(net), start - given

    ((found, expected),) = simulate(1, rank)
    assert torch.allclose(found, expected, rtol=0, atol=3 * 2 * 2**-23 * float(expected.abs().max()))


@one_in(2)
@pytest.mark.parametrize("decay", [0, 0.1])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("sgd", "rmsprop")])
def test_unspent_momentum(name, decay):
    """Without further gradients, the weights would change by the unspent momentum, except for factors that depend on
    the step.

    Decoupled weight decay is no part of it.
    """
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    if decay and not optimizer.param_groups[0].get("decoupled_weight_decay"):
        pytest.skip("weight decay is in the gradient")
    for group in optimizer.param_groups:
        group["weight_decay"] = decay
    for step in range(400):
        net.backward(0, step % 7)
        before = [param.detach().clone() for param in net.parameters()]
        optimizer.step()
    params = dict(net.named_parameters())
    (segment,) = Layout.of({key: tuple(param.shape) for key, param in params.items()}, "model").segments
    kind, (group,) = moments_of(optimizer), optimizer.param_groups
    assert kind is not None
    states = [optimizer.state[params[key]] for key in segment.names]
    moments = SegmentMoments(segment, kind, [group] * len(states), states, torch.device("cpu"))
    old = dict(zip(params, before, strict=True))
    deltas = [(old[key] - params[key].detach()).view(-1) for key in segment.names]
    payout = moments.payout([old[key].view(-1) for key in segment.names])
    assert payout is not None
    assert (payout.references is not None) == (bool(decay) or name in ("nesterov", "nadam"))
    u = torch.empty(segment.numel)
    add_with_payout_(torch.zeros(segment.numel), segment.bounds, deltas, 1.0, payout, None, u)
    unspent = u - flat(deltas)
    group["weight_decay"] = 0
    start = flat(params[key] for key in segment.names)
    for _ in range(100):
        # Each step restores the second moments, because the unspent momentum is defined with their present values.
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        second = {
            param: {key: value.clone() for key, value in state.items() if key in ("exp_avg_sq", "exp_inf")}
            for param, state in optimizer.state.items()
        }
        optimizer.step()
        for param, state in second.items():
            optimizer.state[param].update(state)
    moved = start - flat(params[key] for key in segment.names)
    # Second moments decay once before they are restored (Adam's by 0.1 %, Adamax's too); biases have died out. A change
    # is a difference of weights near 1, so it is off by 2⁻²⁴ of them. The error of the payout is nine times that.
    torch.testing.assert_close(moved, unspent, rtol=0.03, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_unspent_momentum_after_local_steps_is_that_of_the_last_step(name):
    """Only the second of two local steps counts, although the delta contains both."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        net = Net()
        optimizer = OPTIMIZERS[name](net.parameters())
        rule = UpdateRule(local_steps=2)
        reducer = Reducer(
            replace(method("topk", density=0.02), update_rule=rule), comm, granularity="model", exchanged="update"
        )
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        start = weights(net)
        updates.begin(optimizer)
        net.backward(comm.rank, 0)
        optimizer.step()
        between = weights(net)
        updates.begin_last_step(optimizer)
        net.backward(comm.rank, 1)
        optimizer.step()
        after = weights(net)
        (group,) = optimizer.param_groups
        decay = group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
        updates.exchange(optimizer)
        return weights(net) - start, after - start - 9 * ((1 - decay) * between - after)

    ((moved, expected),) = simulate(1, rank)
    sent = moved != 0
    assert int(sent.sum()) == round(0.02 * len(moved)) or int(sent.sum()) == 1
    torch.testing.assert_close(moved[sent], expected[sent], rtol=1e-4, atol=1e-5)


def test_a_payout_that_is_not_sent_stays_in_the_moment():
    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("topk", density=0.05), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        net.backward(comm.rank, 0)
        updates.begin(optimizer)
        optimizer.step()
        moments = flat(optimizer.state[param]["exp_avg"] for param in net.parameters())
        before = flat(net.parameters())
        updates.exchange(optimizer)
        return moments, flat(optimizer.state[param]["exp_avg"] for param in net.parameters()), before

    for before, after, _ in simulate(2, rank):
        sent = after == 0
        assert int(sent.sum()) == round(0.05 * before.numel())
        assert torch.equal(after[~sent], before[~sent])


@pytest.mark.parametrize(("delayed", "others"), [(False, OthersAdam), (True, OthersAdam), (False, CountsInGroups)])
def test_adam_by_others_is_exchanged_as_torchs(delayed, others):
    """Only the names in the state of other packages' Adam are known. Yet the payout and the factor are the same."""

    def rank(comm: Comm, kind: Any) -> tuple[Tensor, Tensor, Tensor]:
        net = Net()
        optimizer = kind(net.parameters(), 0.01)
        rule = UpdateRule(overlap="next_step" if delayed else "none")
        chosen = replace(method("topk", density=0.1), update_rule=rule)
        reducer = Reducer(chosen, comm, granularity="model", exchanged="update")
        updates: Any = None
        for step in range(9):
            net.backward(comm.rank if updates else 0, step)
            if step == 3:  # Adam's first updates are nearly equal in size, so rounding decides which entries are sent
                updates = DeltaExchange(reducer, net, [optimizer])
                reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
            if updates:
                updates.begin(optimizer)
            optimizer.step()
            if updates:
                updates.exchange(optimizer)
        updates.complete()
        return weights(net), residual(reducer), flat(optimizer.state[x]["exp_avg"] for x in net.parameters()) == 0

    of_others, of_torch = (simulate(3, partial(rank, kind=kind)) for kind in (others, torch.optim.Adam))
    for found, expected in zip(of_others, of_torch, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_moments_of_others_stay_where_a_parameter_was_not_stepped():
    """Its delta is zero then, and does not determine the unspent momentum."""

    def rank(comm: Comm) -> tuple[bool, bool]:
        net = Net()
        optimizer = OthersAdam(net.parameters(), 0.01, betas=(0.2, 0.999))
        reducer = Reducer(method("topk", density=0.7), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        for step in range(2):
            net.backward(0, step)
            if step:
                net.a.grad = None
                reducer.states[0]["residual"].fill_(1.0)  # so that entries of all parameters are sent
            updates.begin(optimizer)
            optimizer.step()
            moments = [optimizer.state[x]["exp_avg"] for x in (net.a, net.c)]
            before = [x.clone() for x in moments]
            updates.exchange(optimizer)
        return torch.equal(moments[0], before[0]), torch.equal(moments[1], before[1])

    assert simulate(2, rank) == [(True, False)] * 2


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        *((name, ADAM_LIKE) for name in ("FusedAdam", "StableAdamW", "DeepSpeedCPUAdam", "AdamP", "Lamb", "FusedLAMB")),
        ("ADOPT", LIKE["adopt"]),  # momentum payout alone
        *((name, None) for name in ("Ranger", "SOAP", "AdEMAMix", "Prodigy", "Lookahead")),
        *((name, None) for name in ("NAdamW", "QHAdam", "EXAdam", "DAdaptAdam", "AdaMuon")),
    ],
)
def test_only_adam_lamb_and_adopt_are_treated_as_adam(name, moments):
    """Ranger and SOAP have moments with Adam's names. With Adam's momentum payout they diverged."""

    def init(self, params):
        torch.optim.Optimizer.__init__(self, params, {"lr": 0.1, "betas": (0.9, 0.999)})

    optimizer = type(name, (torch.optim.Optimizer,), {"__init__": init})([torch.ones(1)])
    assert moments_of(optimizer) is moments


class Elsewhere(OthersAdam):
    first = "momentum"


class Quantized(Tensor):
    pass


class EightBit(OthersAdam):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].as_subclass(Tensor)
        super().step()
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].as_subclass(Quantized)


@pytest.mark.parametrize(
    ("kind", "options", "every"),
    [
        (Elsewhere, {}, 1),
        (EightBit, {}, 1),
        (OthersAdam, {"betas": (0.9, 0.999, 0.9)}, 1),
        (OthersAdam, {}, 2),  # the delta of two steps does not determine the momentum
    ],
)
def test_moments_that_are_kept_otherwise_are_left_alone(kind, options, every):
    def rank(comm: Comm) -> tuple[bool, Tensor, Tensor]:
        net = Net()
        optimizer = kind(net.parameters(), 0.01, **options)
        chosen = replace(method("topk", density=0.05), update_rule=UpdateRule(local_steps=every))
        reducer = Reducer(chosen, comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        updates.begin(optimizer)
        before = weights(net)
        for step in range(every):
            net.backward(0, step)
            optimizer.step()
        changed = before - weights(net)
        updates.exchange(optimizer)
        # Ranks are alike, so the sent and the kept part add up to the delta of each rank.
        kept = before - weights(net) + residual(reducer)
        return all(bool((state[kind.first] != 0).all()) for state in optimizer.state.values()), kept, changed

    for untouched, kept, changed in simulate(2, rank):
        assert untouched
        torch.testing.assert_close(kept, changed, rtol=0, atol=1e-6)


def test_without_a_payout_the_optimizer_is_left_alone():
    def rank(comm: Comm) -> bool:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("memsgd", density=0.05), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        net.backward(comm.rank, 0)
        updates.begin(optimizer)
        optimizer.step()
        before = flat(optimizer.state[param]["exp_avg"] for param in net.parameters())
        updates.exchange(optimizer)
        return torch.equal(before, flat(optimizer.state[param]["exp_avg"] for param in net.parameters()))

    assert all(simulate(2, rank))


def test_each_optimizer_exchanges_its_own_parameters():
    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        net = Net()
        first, second = SGD([net.a, net.b], 1.0), SGD([net.c, net.one, net.none], 1.0)
        reducer = Reducer(method("topk", density=1.0), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [first, second])
        assert reducer.layout is not None
        assert [set(segment.names) for segment in reducer.layout.segments] == [{"a", "b"}, {"c", "one", "none"}]
        net.backward(comm.rank, 0)
        updates.begin(first)
        first.step()
        second.step()
        own = flat([net.c])
        updates.exchange(first)
        return flat([net.a, net.b]), flat([net.c]), own

    (one, other_one, own_one), (two, _, _) = simulate(2, rank)
    assert torch.equal(one, two)
    assert torch.equal(other_one, own_one)


def test_an_exchange_begins_before_the_step():
    def rank(comm: Comm) -> None:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates = DeltaExchange(Reducer(method("topk"), comm, exchanged="update"), net, [optimizer])
        net.backward(comm.rank, 0)
        optimizer.step()
        with pytest.raises(RuntimeError, match="begin"):
            updates.exchange(optimizer)

    simulate(1, rank)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_named_on_all_ranks(bad):
    def rank(comm: Comm) -> str:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates = DeltaExchange(Reducer(method("topk"), comm, exchanged="update"), net, [optimizer])
        before = flat(net.parameters())
        net.backward(comm.rank, 0)
        if comm.rank == 1:
            assert net.c.grad is not None
            net.c.grad[1, 2, 0] = bad
        updates.begin(optimizer)
        optimizer.step()
        with pytest.raises(NonFiniteGradient) as caught:
            updates.exchange(optimizer)
        assert torch.equal(flat(net.parameters()), before)
        return str(caught.value)

    said = simulate(3, rank)
    assert all(text.startswith("The update of 'c' is not finite on rank 1 at step 0.") for text in said)
    assert all(text.endswith("set eps=1e-4, or train in bf16.") for text in said)


def test_a_parameter_of_two_optimizers_and_one_of_another_model_are_refused():
    net, other = Net(), Net()

    def rank(comm: Comm) -> None:
        reducer = Reducer(method("topk"), comm, exchanged="update")
        with pytest.raises(ValueError, match="'b' belongs to two optimizers"):
            DeltaExchange(reducer, net, [SGD([net.a, net.b], 1.0), SGD([net.b], 1.0)])
        with pytest.raises(ValueError, match=r"a parameter of shape \[3\] that the model does not have"):
            DeltaExchange(reducer, net, [SGD([other.b], 1.0)])

    simulate(1, rank)


def test_residuals_of_gradients_are_of_no_use_for_updates_nor_the_reverse(caplog):
    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        net = Net()
        gradients = Reducer(method("topk", density=0.05), comm)
        net.backward(0, 0)
        gradients.reduce_({name: param.grad for name, param in net.named_parameters()})  # type: ignore[misc]
        before = residual(gradients)
        updates = Reducer(method("topk", density=0.05), comm, exchanged="update")
        updates.setup(dict(net.named_parameters()))
        updates.load_state_dict(gradients.state_dict())
        gradients.load_state_dict(updates.state_dict())
        return before, residual(updates), residual(gradients)

    for before, *after in simulate(2, rank):
        assert before.any()
        assert not any(kept.any() for kept in after)
    ways = [("gradients", "updates"), ("updates", "gradients")]
    assert [record.message for record in caplog.records] == [  # one each, for both ranks
        f"The saved state (residual) is from a run that exchanged {old}; this one exchanges {new}, which are in other "
        f"units: it is dropped, and residuals start at 0."
        for old, new in ways
    ]


def test_parameters_that_are_given_to_an_optimizer_later():
    def rank(comm: Comm) -> tuple[Tensor, int]:
        net = Net()
        optimizer = SGD([net.a, net.b], 0.1, momentum=0.9)
        reducer = Reducer(method("topk", density=1.0), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [net.c, net.one], "lr": 0.2})
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            updates.exchange(optimizer)
        return weights(net), reducer.step

    (first, steps), (second, _) = simulate(2, rank)
    assert torch.equal(first, second)
    assert steps == 4


def test_a_layer_that_was_made_during_training_becomes_rank_0s():
    def rank(comm: Comm) -> Tensor:
        net = Net()
        optimizer = SGD([net.a, net.b], 0.1)
        reducer = Reducer("topk", comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        net.new = nn.Parameter(torch.full((2, 3), 1.0 + comm.rank))
        optimizer.add_param_group({"params": [net.new]})
        for step in range(2):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            updates.exchange(optimizer)
        return weights(net)

    first, *others = simulate(3, rank)
    assert all(torch.equal(first, other) for other in others)


@one_in(2)
@pytest.mark.parametrize(
    ("name", "every", "kind"),
    [*itertools.product(["topk", "randk", "int4"], [1, 2], ["residual"]), ("diloco", 2, "outer_momentum")],
)
def test_a_parameter_that_is_frozen_rests_and_goes_on_later(name, every, kind):
    def rank(comm: Comm) -> tuple[list[Tensor], Tensor]:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        chosen = method(name, **({"density": 0.1} if name in ("topk", "randk") else {}))
        reducer = Reducer(chosen, comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        path, kept, momentum = [], {}, {}
        for step in range(4 * every * 3):
            frozen = step // (4 * every) == 1
            net.a.requires_grad_(not frozen)
            net.backward(comm.rank, step)
            if frozen:
                net.a.grad = None
            if step % every == 0:
                updates.begin(optimizer)
            optimizer.step()
            if (step + 1) % every == 0:
                updates.exchange(optimizer)
                path.append(net.a.detach().clone())
                kept[len(path)] = reducer.state_dict()["elements"][kind]["a"]
                momentum[len(path)] = optimizer.state[net.a]["exp_avg"].clone()
        assert torch.equal(kept[4], kept[8])
        assert torch.equal(momentum[4], momentum[8])
        assert kept[4].any()
        return path, weights(net)

    (path, end), (_, other) = simulate(2, rank)
    assert all(torch.equal(path[3], frozen) for frozen in path[4:8])
    assert not torch.equal(path[3], path[8])
    assert torch.equal(end, other)


@pytest.mark.parametrize(("every", "overlap"), [(1, "none"), (2, "none"), (1, "next_step")])
def test_a_parameter_that_is_frozen_after_backward_is_stepped_and_exchanged(every, overlap):
    """Torch's optimizers step it, as it has a gradient: in a GAN whose optimizers step after both backward passes."""

    def rank(comm: Comm, freezes: bool) -> Tensor:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        made = replace(method("topk", density=0.1), update_rule=UpdateRule().changed(every, overlap))
        reducer = Reducer(made, comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        for step in range(8):
            net.backward(comm.rank, step)
            net.a.requires_grad_(not freezes)
            if step % every == 0:
                updates.begin(optimizer)
            optimizer.step()
            if (step + 1) % every == 0:
                updates.exchange(optimizer)
            net.a.requires_grad_(True)
        updates.complete()
        return weights(net)

    frozen, trained = ([*simulate(2, partial(rank, freezes=freezes))] for freezes in (True, False))
    assert torch.equal(frozen[0], frozen[1])
    assert torch.equal(frozen[0], trained[0])


def test_what_all_ranks_do_to_their_weights_stays_done():
    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        reducer = Reducer(method("topk", density=0.05), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        for step in range(3):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            updates.exchange(optimizer)
            for param in net.parameters():
                param.data.clamp_(-0.1, 0.1)  # as a Wasserstein GAN does
        return weights(net), residual(reducer)

    (first, kept), (second, _) = simulate(2, rank)
    assert torch.equal(first, second)
    assert first.abs().max() <= 0.1
    assert kept.abs().max() < 1  # of three gradients at rate 0.1, not of clipped weights


def test_u_with_a_payout_is_freed_without_the_garbage_collector(monkeypatch):
    """u has the size of the segment. In a reference cycle, one u of each step would stay in memory."""
    paid = []

    def watched(*args: Any) -> Tensor:
        u = add_with_payout_(*args)
        paid.append(weakref.ref(u))
        return u

    monkeypatch.setattr("lightning_sparse.memory.add_with_payout_", watched)

    def rank(comm: Comm) -> None:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("topk", density=0.05), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        for step in range(2):
            net.backward(comm.rank, step)
            updates.begin(optimizer)
            optimizer.step()
            updates.exchange(optimizer)

    gc.disable()
    try:
        simulate(2, rank)
        assert len(paid) == 4
        assert all(reference() is None for reference in paid)
    finally:
        gc.enable()


class New(TorchDispatchMode):
    """Counts elements of the tensors that `where` allocates."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::where" and "out" not in (kwargs or {}):
            self.count += out.numel()
        return out


def test_beginning_after_the_closure_makes_no_copy_of_the_model():
    net = Net()
    optimizer = ADAMW(net.parameters(), 0.01)

    def rank(comm: Comm) -> tuple[int, bool]:
        updates = DeltaExchange(Reducer("topk", comm, exchanged="update"), net, [optimizer])
        updates.begin(optimizer)
        before = weights(net).clone()
        with torch.no_grad():
            for param in net.parameters():
                param.add_(1)
        with New() as new:
            updates.begin(optimizer, updates.changed(optimizer))
        kept = torch.cat([w.flatten() for w in updates.weights.values()])
        return new.count, torch.equal(kept.sort().values, before.flatten().sort().values)

    assert simulate(1, rank) == [(0, True)]


@one_in(2)
@pytest.mark.parametrize(
    ("name", "every", "delayed"),
    tiers(
        [
            *itertools.product(["topk", "randk", "int4", "int8", "powersgd"], [1, 2], [False]),
            *itertools.product(["topk", "randk"], [1, 2], [True]),
            ("local_sgd", 3, False),
            ("diloco", 3, False),
        ],
        [("topk", 2, False), ("topk", 1, True), ("randk", 2, True), ("int4", 2, False), ("local_sgd", 3, False)],
    ),
)
def test_what_a_module_changes_of_frozen_parameters_itself_is_left_alone(name, every, delayed):
    """Such as a momentum encoder. It is frozen from step 6 to step 17, and then trained again, equal on all ranks."""

    def rank(comm: Comm) -> tuple[list[bool], Tensor]:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        made = method(name, **({"density": 0.1} if name in ("topk", "randk") else {}))
        made = replace(
            made, update_rule=(made.update_rule or UpdateRule()).changed(every, "next_step" if delayed else "none")
        )
        reducer = Reducer(made, comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]  # few elements would go dense
        alone = []
        for step in range(24):
            frozen = 6 <= step < 18
            net.a.requires_grad_(not frozen)
            net.backward(comm.rank, step)
            if frozen:
                net.a.grad = None
            if step % every == 0:
                updates.begin(optimizer)
            own = net.a.detach().clone()
            if frozen:
                with torch.no_grad():
                    own = net.a.lerp_(net.c.flatten()[0], 0.1).clone()
            optimizer.step()
            if (step + 1) % every == 0:
                updates.exchange(optimizer)
            if step == 11:
                updates.complete()
            if frozen:
                alone.append(torch.equal(net.a, own))
        updates.complete()
        return alone, weights(net)

    results = simulate(2, rank)
    assert all(all(alone) for alone, _ in results)
    assert torch.equal(results[0][1], results[1][1])


def test_a_frozen_parameter_that_was_made_in_inference_mode_is_left_alone():
    """Torch lets no other code write it. A frozen encoder may have been loaded so, and optimizers may be given it."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        net = Net()
        with torch.inference_mode():
            net.encoder = nn.Parameter(torch.ones(3), requires_grad=False)
        optimizer = SGD(net.parameters(), 0.1)
        updates = DeltaExchange(Reducer(method("dense"), comm, exchanged="update"), net, [optimizer])
        updates.begin(optimizer)
        net.backward(comm.rank, 0)
        net.encoder.grad = None
        optimizer.step()
        updates.exchange(optimizer)
        return net.encoder, weights(net)

    (encoder, one), (_, two) = simulate(2, rank)
    assert torch.equal(one, two)
    assert encoder.tolist() == [1, 1, 1]


def test_samples_before_the_first_step_are_zeros():
    """A scaler may make a fused optimizer skip its first step, with infinite gradients. Then its moments are zero."""
    segment = Layout.of({"w": (4,)}, "model").segments[0]
    group = {"betas": (0.9, 0.999), "lr": 0.1, "weight_decay": 0.0}
    state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4), "step": 0}
    moments = SegmentMoments(segment, ADAM_LIKE, [group], [state], torch.device("cpu"))
    assert moments.sample([torch.full((4,), math.inf)], [torch.zeros(4)], range(4)).tolist() == [0.0] * 4


def test_a_parameter_without_a_shape_is_an_error():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet: run one batch through the model"):
        exchanged_parameters(model, [torch.optim.SGD(model.parameters(), 0.1)])


def test_a_parameter_may_occur_twice_in_one_optimizer():
    """Tied weights do, and torch warns of them only."""
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = ADAMW([*model.parameters(), model.weight])
    params, of, _ = exchanged_parameters(model, [optimizer])
    assert [*params] == ["weight", "bias"]
    assert {*of.values()} == {optimizer}
    with pytest.raises(ValueError, match="'weight' belongs to two optimizers"):
        exchanged_parameters(model, [optimizer, ADAMW([model.weight])])


@pytest.mark.parametrize("rule", [UpdateRule(local_steps=2), UpdateRule(overlap="next_step")])
def test_unfrozen_parameters_are_sent_in_the_same_order_by_all_processes(rule):
    """Each process has its own order of sets of names."""

    def rank(comm):
        net = nn.ParameterList([torch.zeros(3) for _ in range(12)])
        optim = SGD(net.parameters(), 0.1)
        reducer = Reducer(replace(method("topk", density=0.5), update_rule=rule), comm, exchanged="update")
        updates = DeltaExchange(reducer, net, [optim])
        for requires_grad in (True, False, True):
            net.requires_grad_(requires_grad)
            updates.begin(optim)
        return updates._new

    (names,) = simulate(1, rank)
    assert names == sorted(map(str, range(12)))
