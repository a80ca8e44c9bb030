"""Segments stepped within backward: equal to an exchange after backward, bit by bit."""

import copy
import math
import time
from concurrent.futures import wait
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_sparse import NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.comm.worker import Worker
from lightning_sparse.hooks.overlap import BackwardOverlap
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.segment import UpdateSegment
from tests.support.tiers import one_in
from tests.support.update_training import ADAMW

STEPS = 6


class Net(nn.Module):
    """Layers registered in another order than they are used, one of them used twice, and one not at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.reentrant, self.detached = None, False

    def forward(self, x):
        early = nn.functional.linear(torch.tanh(self.layers[2](x)), self.layers[5].weight.detach())
        for index in (1, 0, 2, 1, 4, 5):
            layer = self.layers[index]
            x = torch.tanh(layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x + early if self.detached else x


@pytest.fixture(autouse=True)
def _sparse(monkeypatch):
    # Few elements would fall back to dense.
    monkeypatch.setattr("lightning_sparse.routing.Routing._pays", lambda *_: True)


class Training:
    """A rank's training; `begun` says of each step whether segments were stepped before backward had ended."""

    def __init__(self, comm, start, within, accumulate=1):
        self.net, self.random = copy.deepcopy(start), torch.Generator().manual_seed(comm.rank)
        self.comm, self.accumulate, self.begun, self.gradients, self.errors = comm, accumulate, [], [], []
        decayed = [param for param in self.net.parameters() if param.dim() > 1]
        rest = [param for param in self.net.parameters() if param.dim() == 1]
        self.optimizer = ADAMW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], 0.01)
        self.reducer = Reducer(method("topk", density=0.01), comm, bucket_cap_mb=0.008, exchanged="update")
        self.updates = DeltaExchange(self.reducer, self.net, [self.optimizer])
        self.within = None
        if within:
            self.within = BackwardOverlap(self.updates, self.optimizer)
        assert len(self.reducer.layout.segments) == 3

    def backward(self):
        x = torch.randn(8, 32, generator=self.random, requires_grad=True)
        self.net(x).square().mean().backward()

    def last_backward(self):
        if self.within:
            self.within.watch()
        self.backward()

    def step(self):
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + len(self.begun))  # as a schedule does
        self.optimizer.zero_grad()
        for _ in range(self.accumulate - 1):
            self.backward()
        if self.within:
            self.within.run_closure(self.last_backward, self.errors.append)
        else:
            self.last_backward()
        self.begun.append(self.within is not None and self.within.has_begun)
        if self.begun[-1]:
            self.optimizer.step()  # does nothing
            self.within.finish()
        else:
            self.updates.begin(self.optimizer)
            self.optimizer.step()
            self.updates.exchange(self.optimizer)
        self.gradients += [param.grad.clone() for param in self.net.parameters() if param.grad is not None]

    def found(self):
        """Everything that training has made."""
        if self.within:
            self.within.close()
            assert self.updates.close()
        state = self.optimizer.state_dict()["state"]
        moments = {f"{number} {key}": x for number, kept in state.items() for key, x in kept.items()}
        gradients = {f"gradient {number}": x for number, x in enumerate(self.gradients)}
        residual = self.reducer.state_dict()["elements"]["residual"]
        return {**self.net.state_dict(), **residual, **moments, **gradients}, self.comm.sent_bytes


def both(size, start, change=lambda *_: None, **options):
    """Train after backward and within it; return when segments were stepped within, by rank.

    `change` is called with a training and the step before each.
    """

    def train(within, comm):
        training = Training(comm, start, within, **options)
        for step in range(STEPS):
            change(training, step)
            training.step()
        assert training.reducer.step == STEPS
        return training.found(), training.begun

    after, during = (simulate(size, partial(train, within)) for within in (False, True))
    for ((found, sent), _), ((expected, as_many), begun) in zip(during, after, strict=True):
        assert sent == as_many > 0
        assert not any(begun)
        assert found.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    return [begun for _, begun in during]


@one_in(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_weights_residuals_and_moments_are_the_same_to_the_last_bit(size, accumulate):
    assert both(size, Net(), accumulate=accumulate) == [[False, *[True] * (STEPS - 1)]] * size


def test_a_segment_is_stepped_before_backward_has_ended():
    def rank(comm):
        training = Training(comm, Net(), within=True)
        training.step()
        seen = []
        # This layer is the first in the forward pass, so its gradient is the last.
        training.net.layers[1].weight.register_hook(
            lambda _: seen.append(training.optimizer.state[training.net.layers[5].weight]["step"].item())
        )
        training.step()
        return seen[-1]

    assert simulate(2, rank) == [2, 2]


def test_parameters_may_be_frozen():
    def change(training, step):
        for layer in (0, 5):  # one of a segment, and all of another one
            training.net.layers[layer].requires_grad_(step < 2)

    assert both(2, Net(), change) == [[False, True, False, True, True, True]] * 2


def test_a_parameter_may_change_its_group():
    """The group has another learning rate and another weight decay. Then groups are joined."""

    def change(training, step):
        first, second = training.optimizer.param_groups[:2] if step < 5 else (None, None)
        if step == 2:
            second["params"].append(first["params"].pop())
        if step == 4:
            first["params"] += second["params"]
            del training.optimizer.param_groups[1]

    assert both(2, Net(), change) == [[False, True, False, True, False, True]] * 2


def halve(param):
    param.grad.mul_(0.5)


def test_ranks_decide_for_themselves():
    def change(training, step):
        if step == 2 and training.comm.rank == 1:
            training.net.layers[0].weight.register_post_accumulate_grad_hook(halve)

    assert both(2, Net(), change) == [[False, *[True] * 5], [False, True, *[False] * 4]]


@one_in(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing_the_exchange_waits_for_the_end_of_backward(reentrant):
    """Gradients arrive in parts, because layer 1 is used twice. Or a recomputation might use changed weights."""
    start = Net()
    start.reentrant = reentrant
    assert both(2, start) == [[False] * STEPS] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reentrant": True}, r"The gradient of 'layers.1.bias' came in two parts.*use_reentrant=F"),
        ({"detached": True}, r"(?s)A weight may have been needed .* overlap='none' .*inplace operation"),
    ],
)
def test_a_pass_that_is_not_as_the_one_before_is_an_error_with_a_remedy(change, said):
    def rank(comm):
        training = Training(comm, Net(), within=True)
        training.step()
        vars(training.net).update(change)
        with pytest.raises(RuntimeError, match=said):
            training.step()
        training.within.close()
        assert training.updates.ends_soon()

    simulate(2, rank)


def test_a_segment_with_a_frozen_weight_waits_as_backward_may_need_it():
    def rank(comm):
        training = Training(comm, Net(), within=True)
        training.net.layers[5].weight.requires_grad_(False)
        training.step()
        seen = []
        training.net.layers[1].weight.register_hook(
            lambda _: seen.append(training.optimizer.state[training.net.layers[5].bias]["step"].item())
        )
        training.step()
        return seen[-1], training.begun[-1]

    assert simulate(2, rank) == [(1, True)] * 2


def test_an_error_in_backward_ends_the_thread_and_gives_back_the_weights():
    def fail(_):
        raise ArithmeticError("no gradient")

    def rank(comm):
        training = Training(comm, Net(), within=True)
        training.step()
        before = {name: param.detach().clone() for name, param in training.net.named_parameters()}
        training.net.layers[1].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            training.step()
        assert all(torch.equal(param, before[name]) for name, param in training.net.named_parameters())
        training.within.close()
        assert training.updates.ends_soon()
        return [type(error) for error in training.errors]

    assert simulate(2, rank) == [[ArithmeticError]] * 2


def test_an_error_of_the_exchange_leaves_backward_the_weights_it_needs():
    """A rank's update is not finite. Backward continues, and its weights are restored only when it has ended."""

    def rank(comm):
        training = Training(comm, Net(), within=True)
        training.step()
        before = {name: param.detach().clone() for name, param in training.net.named_parameters()}
        weight = training.net.layers[1].weight  # whose gradient is the last
        if comm.rank == 1:
            training.net.layers[5].bias.register_hook(lambda grad: grad * math.inf)

        def until_the_first_segment_is_exchanged(_):
            wait(training.updates._futures, 0.2)

        weight.register_hook(until_the_first_segment_is_exchanged)
        with pytest.raises(NonFiniteGradient, match=r"The update of 'layers.5.\w+' is not finite on rank 1 at step 1"):
            training.step()
        assert all(torch.equal(param, before[name]) for name, param in training.net.named_parameters())

    simulate(2, rank)


def test_after_an_interrupt_the_worker_no_longer_writes_to_the_weights():
    """Ctrl-C while the ranks wait for a slow link."""

    def interrupt(futures):
        raise KeyboardInterrupt

    def rank(comm):
        training, gather = Training(comm, Net(), within=True), comm.all_gather
        training.step()
        before = {name: param.detach().clone() for name, param in training.net.named_parameters()}
        comm.all_gather = lambda x: (time.sleep(0.3), gather(x))[1]
        training.updates._worker.wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            training.step()
        training.updates._worker.join()
        assert all(torch.equal(param, before[name]) for name, param in training.net.named_parameters())

    simulate(2, rank)


def test_an_error_before_any_gradient_harms_nothing():
    def change(training, step):
        if step == 3 and training.within:
            generator = training.random.get_state()
            with pytest.raises(ZeroDivisionError):
                training.within.run_closure(lambda: (training.within.watch(), 1 / 0), training.errors.append)
            training.backward()  # is of no step
            training.random.set_state(generator)

    assert both(2, Net(), change)[0] == [False, *[True] * (STEPS - 1)]


def test_on_cuda_streams_wait_for_each_other(monkeypatch):
    """Seen without a GPU, by stand-ins that keep a log."""
    log = []

    class Event:
        def __init__(self, number):
            self.number = number

        def wait(self):
            log.append(f"wait for step {self.number}")

    class Stream:
        def __init__(self, name):
            self.name, self.device, self.events = name, "cuda:0", 0

        def record_event(self):
            self.events += 1
            return Event(self.events)

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    callers, ours = Stream("caller"), Stream("ours")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: callers)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(f"use {device}"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"launch on {stream.name}"))
    exchange_segment = UpdateSegment.exchange_

    def logged(each, *args):
        log.append(f"exchange segment {each.segment.index}")
        exchange_segment(each, *args)

    monkeypatch.setattr(UpdateSegment, "exchange_", logged)

    def rank(comm):
        training = Training(comm, Net(), within=True)
        training.updates._worker = Worker(ours)
        training.within._stream = ours
        training.step()
        log.clear()
        training.step()

    simulate(1, rank)
    # The second segment has the layer that is not used: it is stepped last, and exchanged in its turn.
    assert log == [
        *("use cuda:0", "launch on ours"),
        *("wait for step 1", "exchange segment 0"),
        *("wait for step 3", "exchange segment 1"),
        *("wait for step 2", "exchange segment 2"),
        "caller waits for ours",
    ]
