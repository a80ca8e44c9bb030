"""Exchanges that overlap with the next step: equal weights, no loss, and the relation to exchanges without delay."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse import METHODS, Method, NonFiniteGradient, RankFailure, Reducer, method, simulate
from lightning_sparse.aggregators import GlobalTopK, TwoLevel, TwoPass
from lightning_sparse.comm import Comm
from lightning_sparse.comm.worker import Worker
from lightning_sparse.compressors import Identity, TopK
from lightning_sparse.memory import NoMemory
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.tiers import one_in, tiers
from tests.support.training import make
from tests.support.update_training import ADAMW, OPTIMIZERS, SGD, Net, residual, train, weights

RULE = UpdateRule(overlap="next_step")
# Methods without an outer step whose ranks know their part of the result after compression.
NAMES = [name for name, spec in METHODS.items() if spec.aggregator.applies_all_sent and name != "diloco"]


def delayed(name: str, **options: Any) -> Method:
    made = method(name, **options)
    return replace(made, update_rule=(made.update_rule or UpdateRule()).changed(1, "next_step"))


def exchanging(
    comm: Comm, net: nn.Module, optimizers: Any, made: Method, granularity: Any = "model"
) -> tuple[DeltaExchange, Reducer]:
    reducer = Reducer(made, comm, granularity=granularity, exchanged="update")
    reducer_updates = DeltaExchange(reducer, net, optimizers)
    reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]  # few elements would go dense
    return reducer_updates, reducer


def test_two_ranks_by_hand():
    """SGD at rate 1. Each rank sends one of three entries, and at once applies this entry in full, not half of it."""

    def rank(comm: Comm) -> list[list[float]]:
        net = nn.Module()
        net.w = nn.Parameter(torch.tensor([10.0, 20.0, 30.0]))
        optimizer = SGD(net.parameters(), 1.0)
        updates, reducer = exchanging(comm, net, [optimizer], Method(TopK(density=0.34), update_rule=RULE))
        seen = []
        for gradients in ([[4.0, 1.0, 2.0], [1.0, 2.0, 8.0]], [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]):
            net.w.grad = torch.tensor(gradients[comm.rank])
            updates.begin(optimizer)
            optimizer.step()
            updates.exchange(optimizer)
            updates.wait()
            seen += [net.w.tolist(), reducer.states[0]["residual"].tolist()]
        updates.complete()
        return [*seen, net.w.tolist()]

    first, second = simulate(2, rank)
    # x is [8, 20, 26] after the first exchange, and [8, 18.5, 24.5] after the second.
    assert first == [[6, 20, 30], [0, 1, 2], [8, 20, 23], [0, 1, 0], [8, 18.5, 24.5]]
    assert second == [[10, 20, 22], [1, 2, 0], [8, 17, 26], [1, 0, 0], [8, 18.5, 24.5]]


CASES = [
    (optimizer, name, size)
    for row, optimizer in enumerate(OPTIMIZERS)
    for column, name in enumerate(["topk", "gaussiank", "randk", "chunktopk"])
    for size in [[1, 2, 3, 5, 8][(row + column) % 5]]
]


@one_in(2)
@pytest.mark.parametrize(("optimizer", "name", "size"), tiers(CASES, [case for case in CASES if case[2] == 3]))
def test_equal_on_all_ranks_and_nothing_lost(optimizer, name, size):
    ranks = simulate(size, lambda comm: train(comm, optimizer, make(name), delayed=True)[0])
    assert all(torch.equal(other, ranks[0]) for other in ranks)


@one_in(2)
@pytest.mark.parametrize("granularity", ["layer", "bucket", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, granularity):
    chosen = method("topk", density=0.05)
    ranks = simulate(
        2, lambda comm: train(comm, "momentum", chosen, granularity=granularity, dtype=dtype, delayed=True)[0]
    )
    assert torch.equal(*ranks)


def trained(
    comm: Comm, made: Method, dtype: torch.dtype, land: bool, kind: str = "adamw"
) -> tuple[Tensor, Any, list[Tensor]]:
    net = Net(dtype)
    optimizer = OPTIMIZERS[kind](net.parameters())
    updates, reducer = exchanging(comm, net, [optimizer], made, "layer")
    for step in range(5):
        updates.begin(optimizer)
        net.backward(comm.rank, step)
        optimizer.step()
        updates.exchange(optimizer)
        if land or step == 4:
            updates.complete()
    moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return weights(net), reducer.state_dict()["elements"], moments


@one_in(4)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_without_the_delay_it_is_the_same_exchange_bit_for_bit(name, dtype, size):
    options = dict(METHODS[name].traits.test_options)
    later = delayed(name, **options)
    now = replace(later, update_rule=replace(later.update_rule, overlap="none"))
    landed = simulate(size, lambda comm: trained(comm, later, dtype, land=True))
    for found, expected in zip(landed, simulate(size, lambda comm: trained(comm, now, dtype, land=False)), strict=True):
        if size > 1 or options:  # one rank that sends all of it leaves weights as its optimizer has made them
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_that_goes_on_ends_equal(name):
    """Also for dense methods, because segments of sparse methods may fall back to dense."""
    made = delayed(name, **METHODS[name].traits.test_options)
    ranks = [found[0] for found in simulate(3, lambda comm: trained(comm, made, torch.float32, land=False))]
    assert all(torch.equal(ranks[0], other) for other in ranks)


def test_everything_sent_by_one_rank_is_the_plain_optimizer_up_to_rounding():
    (found,) = simulate(1, lambda comm: trained(comm, delayed("topk", density=1.0), torch.float32, land=False))
    net = Net()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    for step in range(5):
        net.backward(0, step)
        optimizer.step()
    # In each step x is rounded once, and so is y.
    assert (found[0] - weights(net)).abs().max() <= 5 * 2 * 2**-23 * weights(net).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_flight_are_those_that_all_ranks_have_agreed_on(dtype):
    def rank(comm: Comm) -> list[Tensor]:
        net = Net(dtype)
        optimizer = ADAMW(net.parameters(), 0.01)
        updates, reducer = exchanging(comm, net, [optimizer], delayed("topk", density=0.1))
        agreed, own = [weights(net)], []
        for step in range(3):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            updates.exchange(optimizer)
            assert updates.is_pending
            with pytest.raises(RuntimeError, match=r"call exchange_pending\(optimizer\) before"):
                reducer.state_dict()
            found = [updates.weights[id(param)] for _, param in sorted(net.named_parameters())]
            agreed.append(torch.cat([x.float().reshape(-1) for x in found]))
            own.append(weights(net))
            updates.wait()
        assert torch.equal(agreed[0], agreed[1])  # the first mean is still on its way
        assert not torch.equal(agreed[1], own[0])
        updates.complete()
        assert not updates.is_pending
        reducer.state_dict()
        return [*agreed, weights(net)]

    first, *others = simulate(3, rank)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("lands", [False, True])
def test_an_update_that_is_not_finite_is_named_and_weights_are_those_before_it(bad, lands):
    def rank(comm: Comm) -> tuple[str, Tensor, bool]:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates, _ = exchanging(comm, net, [optimizer], delayed("topk", density=0.1))
        before = weights(net)
        for step in range(3):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            if step == 1 and comm.rank == 1:
                net.c.grad[0, 1, 2] = bad
            optimizer.step()
            try:
                updates.exchange(optimizer)
                if lands and step == 1:
                    updates.complete()
            except NonFiniteGradient as error:
                return str(error), weights(net), torch.equal(weights(net), before)
            if step == 0:
                updates.complete()
                before = weights(net)
        raise AssertionError("it was not seen")

    found = simulate(2, rank)
    assert all(text.startswith("The update of 'c' is not finite on rank 1 at step 1") for text, _, _ in found)
    assert all(given_back for _, _, given_back in found)
    assert torch.equal(found[0][1], found[1][1])


def test_a_rank_that_does_not_come_is_named():
    def rank(comm: Comm) -> str:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates, _ = exchanging(comm, net, [optimizer], delayed("topk", density=0.1))
        if comm.rank == 1:
            return ""
        updates.begin(optimizer)
        net.backward(comm.rank, 0)
        optimizer.step()
        updates.exchange(optimizer)
        with pytest.raises(RankFailure, match="waits in a collective for rank 1, which has ended") as caught:
            updates.complete()
        assert not updates.is_pending
        return str(caught.value)

    assert simulate(2, rank)[0]


@pytest.mark.parametrize("every", [1, 3])
def test_each_optimizer_ends_its_own_exchange(every):
    """A step of one leaves weights of the other alone, which backward may still need, and its local steps."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        net = Net()
        first, second = SGD([net.a], 0.1), ADAMW([net.b, net.c], 0.01)
        made = delayed("topk", density=0.2)
        updates, reducer = exchanging(
            comm, net, [first, second], replace(made, update_rule=made.update_rule.changed(every, "next_step"))
        )
        before, changed, taken = net.a.detach().clone(), torch.zeros(()), {first: 0, second: 0}
        for step in range(24):
            optimizer = (first, second)[step % 3 == 2]
            if taken[optimizer] % every == 0:
                updates.begin(optimizer)
            net.backward(comm.rank, step)
            own = net.a.detach().clone()
            optimizer.step()
            changed = changed + own - net.a.detach()
            if (taken[optimizer] + 1) % every == 0:
                updates.exchange(optimizer)
            taken[optimizer] += 1
            assert optimizer is first or torch.equal(net.a, own)
        updates.complete()
        segment = next(x for x in reducer.layout.segments if "a" in x.names)
        left = dict(zip(segment.names, segment.views(reducer.states[segment.index]["residual"]), strict=True))["a"]
        # No change by SGD is lost.
        mean = sum(comm.all_gather(changed.flatten() - left)) / comm.size
        return (mean - (before - net.a).flatten()).abs().max(), weights(net), before.abs().max()

    (lost, end, largest), (_, other, _) = simulate(2, rank)
    assert lost <= 24 * 4 * 2**-23 * max(largest, 1)
    assert torch.equal(end, other)


def test_parameters_that_are_given_later_and_frozen_ones():
    def rank(comm: Comm) -> tuple[list[Tensor], Tensor]:
        net = Net()
        optimizer = ADAMW([net.a, net.b], 0.01)
        updates, _ = exchanging(comm, net, [optimizer], delayed("topk", density=0.2))
        path = []
        for step in range(9):
            if step == 2:
                net.new = nn.Parameter(torch.full((2, 3), 1.0 + comm.rank))  # broadcast from rank 0
                optimizer.add_param_group({"params": [net.c, net.new]})
            net.a.requires_grad_(not 4 <= step < 7)
            net.backward(comm.rank, step)
            if 4 <= step < 7:
                net.a.grad = None
            updates.begin(optimizer)
            optimizer.step()
            updates.exchange(optimizer)
            path.append(net.a.detach().clone())
        updates.complete()
        return path, weights(net)

    (path, end), (_, other) = simulate(2, rank)
    assert torch.equal(end, other)
    assert torch.equal(path[4], path[5])  # the mean of the step before it was frozen has come with path[4]
    assert torch.equal(path[5], path[6])
    assert not torch.equal(path[6], path[8])


@pytest.mark.parametrize("name", ["topk", "local_sgd"])
def test_parameters_are_taken_in_while_another_optimizer_has_taken_steps_of_its_own(name):
    """Its steps are not lost. They are in the residual or, without a residual, in the weights."""

    def rank(comm: Comm) -> list[float]:
        net = nn.Module()
        for key in "abc":
            net.register_parameter(key, nn.Parameter(torch.zeros(4)))
        first, second = SGD([net.a], 1.0), SGD([net.b], 1.0)
        made = method(name, **({"density": 1.0} if name == "topk" else {}))
        rule = UpdateRule(local_steps=3, momentum="keep", rescale=False, overlap="next_step")
        updates, _ = exchanging(comm, net, [first, second], replace(made, update_rule=rule))
        taken = {first: 0, second: 0}
        for optimizer in [*[second] * 5, *[first] * 3, *[second] * 4]:
            if optimizer is first and taken[first] == 0:
                first.add_param_group({"params": [net.c]})  # two steps after an exchange of the second
            if taken[optimizer] % 3 == 0:
                updates.begin(optimizer)
            for param in net.parameters():
                param.grad = -torch.ones(4)
            optimizer.step()
            taken[optimizer] += 1
            if taken[optimizer] % 3 == 0:
                updates.exchange(optimizer)
        updates.complete()
        return [param.mean().item() for param in (net.a, net.b, net.c)]

    assert simulate(2, rank) == [[3.0, 9.0, 3.0]] * 2


def test_what_all_ranks_do_to_weights_in_flight_leaves_them_equal():
    def rank(comm: Comm) -> Tensor:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates, _ = exchanging(comm, net, [optimizer], delayed("topk", density=0.05))
        for step in range(3):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            updates.exchange(optimizer)
            for param in net.parameters():
                param.data.clamp_(-0.1, 0.1)  # as a Wasserstein GAN does, while the exchange is pending
        updates.complete()
        return weights(net)

    first, second = simulate(2, rank)
    assert torch.equal(first, second)


def test_an_interrupt_while_waiting_leaves_the_exchange_to_go_on(monkeypatch):
    def rank(comm: Comm) -> Tensor:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates, reducer = exchanging(comm, net, [optimizer], delayed("topk", density=0.1))
        for step in range(3):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            if step == 2 and comm.rank == 0:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(updates, "wait", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        updates.exchange(optimizer)
                assert updates.is_pending
                with pytest.raises(RuntimeError, match="call exchange_pending"):
                    reducer.state_dict()
            elif step < 2:
                updates.exchange(optimizer)
        updates.complete()
        return weights(net)

    assert torch.equal(*simulate(2, rank))


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_as_an_exchange_begins_is_remembered(monkeypatch):
    def rank(comm: Comm) -> None:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates, reducer = exchanging(comm, net, [optimizer], delayed("topk", density=0.1), "layer")
        before = weights(net)
        for step in range(2):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            if step == 1:
                monkeypatch.setattr(updates, "_exchange_later", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    updates.exchange(optimizer)
            else:
                updates.exchange(optimizer)
                updates.complete()
                before = weights(net)
        assert torch.equal(weights(net), before)
        for later in (updates.complete, reducer.state_dict):
            with pytest.raises(RuntimeError, match=r"interrupted|call exchange_pending"):
                later()

    simulate(1, rank)


@pytest.mark.parametrize("name", ["topk", "local_sgd", "sparseloco"])
def test_several_steps_before_each_exchange(name):
    def rank(comm: Comm) -> Tensor:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        made = make(name)
        rule = (made.update_rule or UpdateRule()).changed(3, "next_step")
        updates, _ = exchanging(comm, net, [optimizer], replace(made, update_rule=rule))
        for step in range(9):
            if step % 3 == 0:
                updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            if step % 3 == 2:
                updates.exchange(optimizer)
        updates.complete()
        return weights(net)

    first, *others = simulate(3, rank)
    assert all(torch.equal(first, other) for other in others)


def test_nothing_is_left_in_the_residual_that_was_sent():
    """After `wait` the residual is the unsent part of the delta, whatever the main thread does meanwhile."""

    def rank(comm: Comm) -> float:
        net = Net()
        optimizer = SGD(net.parameters(), 0.5)
        updates, reducer = exchanging(comm, net, [optimizer], delayed("topk", density=0.3))
        before = weights(net)
        updates.begin(optimizer)
        net.backward(comm.rank, 0)
        optimizer.step()
        changed = before - weights(net)
        updates.exchange(optimizer)
        updates.wait()
        sent = before - weights(net)  # by which the rank has gone on
        return float((residual(reducer) - (changed - sent)).abs().max())

    assert max(simulate(2, rank)) <= 4 * 2**-23 * 4  # weights below 4 are rounded


@pytest.mark.parametrize(
    ("aggregator", "said"),
    [
        (GlobalTopK(), "overlap='next_step' with 'gtopk': .* Leave overlap out, or take topk or gaussiank"),
        (TwoPass(), "overlap='next_step' with 'doublesqueeze': .* Leave overlap out, or take topk or gaussiank"),
        (
            TwoLevel(ranks_per_node=2),
            "overlap='next_step' with hierarchical: .* Leave hierarchical out, or take another overlap",
        ),
    ],
)
def test_aggregators_that_decide_later_are_refused(aggregator, said):
    with pytest.raises(ValueError, match=said):
        Method(TopK(density=0.1), aggregator=aggregator, update_rule=RULE)


def test_an_outer_step_is_refused():
    with pytest.raises(ValueError, match="Leave overlap out, or take a rule without an outer step"):
        UpdateRule(local_steps=4, outer_lr=0.7, overlap="next_step")
    with pytest.raises(ValueError, match=r"UpdateRule\(overlap=True\): overlap is not known; choose from none"):
        UpdateRule(overlap=True)
    with pytest.raises(ValueError, match=r"UpdateRule\(overlap='backward'\): the strategy overlaps .* set overlap="):
        UpdateRule(overlap="backward")
    assert Method(Identity(), NoMemory(), METHODS["dense"].aggregator, RULE).delayed


@pytest.mark.parametrize("over_nccl", [False, True])
def test_on_cuda_both_streams_wait_for_each_other(over_nccl, monkeypatch):
    """Tested without a GPU, by stand-ins that keep a log. Over NCCL the training thread launches all work."""
    log, threads = [], set()

    class Stream:
        def __init__(self, name):
            self.name, self.device = name, "cuda:0"

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            threads.add(threading.current_thread())
            log.append("exchange")

        def __exit__(self, *_):
            log.append("exchanged")

    def set_stream(stream):
        threads.add(threading.current_thread())
        log.append(f"exchange on {stream.name}")

    callers, ours = Stream("caller"), Stream("ours")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: callers)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(f"use {device}"))
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append("record"))

    def rank(comm: Comm) -> None:
        net = Net(shapes={"w": (30,)})
        optimizer = SGD(net.parameters(), 0.1)
        reducer = Reducer(delayed("topk", density=0.1), comm, exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer], worker=Worker(ours, over_nccl))
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        for step in range(2):
            updates.begin(optimizer)
            net.backward(comm.rank, step)
            optimizer.step()
            updates.exchange(optimizer)
        updates.complete()
        assert (threading.current_thread() in threads) == over_nccl
        assert len(threads) == 1

    simulate(1, rank)
    payload = log.count("record") // 2
    assert payload >= 5  # the mean, u, the sent entries, and the message of indices and values
    # A thread's device is 0 until the thread sets another, and it keeps this one. A context on device 0 takes memory.
    launched = ["exchange", "exchanged"] if over_nccl else ["use cuda:0", "exchange on ours"]
    step = ["caller waits for ours", *["record"] * payload, "ours waits for caller"]
    again = launched if over_nccl else []  # the thread stays as it is
    assert log == [*step, *launched, *step, *again, "caller waits for ours"]
