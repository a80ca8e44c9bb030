"""The ranks of a node average gradients before their optimizers step, so that a node is one worker."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse import Method, Reducer, attach_updates, exchange_pending, simulate
from lightning_sparse.aggregators import GlobalTopK, Mean, OkTopK, TwoLevel, TwoPass
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.blocks import Blocks
from lightning_sparse.contrib.scaled_sign import ScaledSign
from lightning_sparse.hooks.update_exchange import exchange_of
from lightning_sparse.updates import node
from lightning_sparse.updates.exchange import DeltaExchange
from tests.integration.failing import SOON, caught
from tests.processes import run_ranks
from tests.support.tiers import later

SHAPES = {"a": (3, 2), "b": (5,), "never": (4,), "none": (0,)}


def averaged(comm: Comm, grads: list[dict[str, Any]], dtype: torch.dtype) -> dict[str, Any]:
    """Average the gradients of rank i of a node, which are in `grads[i]`; return them as lists."""
    first = comm.rank // len(grads) * len(grads)
    given = grads[comm.rank - first]
    params = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    for name, values in given.items():
        params[name].grad = torch.as_tensor(values, dtype=dtype).reshape(SHAPES[name])
    with torch.no_grad():
        node.average_gradients_(comm.sub(range(first, first + len(grads)), counted=False), [*params.values()])
    assert comm.sent_bytes == 0
    return {name: None if x.grad is None else x.grad.flatten().tolist() for name, x in params.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_means_by_hand(dtype, chunk):
    """The second rank lacks "a", and no rank has "never"."""
    grads = [{"a": [3.0, 0, 1, 4, 0, 9], "b": range(5)}, {"b": [2.0] * 5}, {"a": [0.0] * 6, "b": [1.0] * 5}]
    with mock.patch.object(node, "CHUNK", chunk):
        found = simulate(6, lambda comm: averaged(comm, grads, dtype))
    b = torch.zeros(5, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    for x in grads:
        b += torch.as_tensor(x["b"], dtype=b.dtype) / 3
    for rank in found:
        assert rank["never"] is None
        assert rank["none"] is None
        assert rank["a"] == pytest.approx([1, 0, 1 / 3, 4 / 3, 0, 3], rel=2 * torch.finfo(dtype).eps)
        assert rank["b"] == pytest.approx(b.tolist(), rel=2 * torch.finfo(dtype).eps)
        assert rank == found[0]


def test_equal_gradients_of_two_ranks_come_back_exactly():
    grads = {"a": torch.randn(6).tolist(), "b": [1e-40, 3e38, -0.1, 0.0, 1 / 3]}
    given = {name: torch.tensor(x).tolist() for name, x in grads.items()}
    for found in simulate(4, lambda comm: averaged(comm, [grads, grads], torch.float32)):
        assert found == {**given, "never": None, "none": None}


def test_the_gradient_of_a_sum_has_one_value_in_memory():
    def rank(comm: Comm) -> list[float]:
        param = nn.Parameter(torch.zeros(5))
        (param.grad,) = torch.autograd.grad(param.sum() * (1 + comm.rank), [param])
        with torch.no_grad():
            node.average_gradients_(comm, [param])
        return param.grad.tolist()

    assert simulate(2, rank) == [[1.5] * 5] * 2


def test_values_that_are_not_finite_reach_all_ranks_of_the_node_and_no_others():
    def rank(comm: Comm) -> list[float]:
        value = float("nan") if comm.rank == 1 else 1.0
        return averaged(comm, [{"b": [value] * 5}] * 2, torch.float32)["b"]

    found = torch.tensor(simulate(4, rank))
    assert found[:2].isnan().all()
    assert torch.equal(found[2:], torch.ones(2, 5))


# With optimizers:


class Linear(nn.Module):
    """Its loss is the product of the weights and a rank's input, so that the input is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(size, generator=generator)) for size in (2000, 31))

    def input(self, rank: int, step: int, part: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
        return [torch.randn(len(x), generator=generator) for x in self.parameters()]

    def loss(self, *given: Any) -> Tensor:
        return torch.stack(
            [(x * value).sum() for x, value in zip(self.parameters(), self.input(*given), strict=True)]
        ).sum()


def backward(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    net.loss(rank, step).backward()
    optimizer.step()


def accumulated(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    for part in range(1 + rank):  # not equally often on all ranks
        net.loss(rank, step, part).backward()
    optimizer.step()


def closure(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    def evaluate() -> Tensor:
        loss = net.loss(rank, step)
        loss.backward()
        return loss

    optimizer.step(evaluate)


class Sharp(torch.optim.AdamW):
    """Evaluates its closure twice, as SAM does."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


def evaluated_twice(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    def evaluate() -> None:
        optimizer.zero_grad()
        net.loss(rank, step).backward()

    optimizer.step(evaluate)


def without_backward(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    net.a.grad, net.b.grad = torch.autograd.grad(net.loss(rank, step), [net.a, net.b])
    optimizer.step()


def sometimes(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    """Rank 3 has no batch in the second step."""
    if (rank, step) != (3, 1):
        net.loss(rank, step).backward()
    optimizer.step()


def partly(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    """Rank 0 does not use `b`."""
    (net.loss(rank, step) if rank else (net.a * net.input(rank, step)[0]).sum()).backward()
    optimizer.step()


def frozen(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    """One rank of a node trains `a`, the other `b`, in turn."""
    for number, param in enumerate(net.parameters()):
        param.requires_grad_((rank + step + number) % 2 == 0)
    net.loss(rank, step).backward()
    optimizer.step()


def frozen_after_backward(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    net.requires_grad_(True)
    net.loss(rank, step).backward()
    net.b.requires_grad_(False)
    optimizer.step()


def scaled_by(net: Linear) -> torch.amp.GradScaler:
    """Return the gradient scaler of a model."""
    return vars(net).setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000))


def scaled(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    """In the second step the gradient of rank 2 overflows, and its node leaves the step out."""
    found = scaled_by(net)
    found.scale(net.loss(rank, step) * (float("inf") if (rank, step) == (2, 1) else 1)).backward()
    found.step(optimizer)
    found.update()


def unscaled(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    """As `scaled`. Code looks at the gradients before."""
    found = scaled_by(net)
    found.scale(net.loss(rank, step) * (float("inf") if (rank, step) == (2, 1) else 1)).backward()
    found.unscale_(optimizer)
    found.step(optimizer)
    found.update()


def of_node(how: Callable[..., None], net: Linear, number: int, step: int) -> list[Tensor] | None:
    """Return the mean gradient of a node of two ranks; None if the node leaves the step out."""
    if how in OVERFLOWS and (number, step) == (1, 1):
        return None
    inputs = [net.input(rank, step) for rank in (2 * number, 2 * number + 1)]
    if how is accumulated:
        for rank, values in enumerate(inputs, 2 * number):
            for part in range(1, 1 + rank):
                values[:] = map(torch.add, values, net.input(rank, step, part))
    if how is sometimes and (number, step) == (1, 1):
        inputs[1] = [torch.zeros_like(x) for x in inputs[1]]
    if how is partly and number == 0:
        inputs[0][1].zero_()
    if how is frozen:
        for rank, values in enumerate(inputs):
            values[(rank + step + 1) % 2].zero_()
    return [x / 2 + y * 0.5 for x, y in zip(*inputs, strict=True)]


def fused(net: Linear, optimizer: Any, rank: int, step: int) -> None:
    """As `scaled`, but the optimizer unscales gradients."""
    scaled(net, optimizer, rank, step)


WAYS = [
    *(backward, accumulated, closure, evaluated_twice, without_backward, sometimes, partly, frozen),
    *(frozen_after_backward, scaled, unscaled, fused),
]
OVERFLOWS = [scaled, unscaled, fused]
STEPS = 4


def trained(how: Any, take_step: Callable[..., None], method: Method) -> Iterator[dict[str, Any]]:
    """Yield the weights, gradients and states after each step."""
    net = Linear()
    kind = Sharp if how is evaluated_twice else torch.optim.AdamW
    optimizer = kind(net.parameters(), 0.01, fused=how is fused)
    attach_updates(net, optimizer, method, granularity="model")
    for step in range(STEPS):
        optimizer.zero_grad()
        take_step(net, optimizer, step)
        yield {
            "weights": [x.detach().clone() for x in net.parameters()],
            "gradients": [x.grad for x in net.parameters()],
            "moments": [optimizer.state[x]["exp_avg_sq"].clone() for x in net.parameters()],
        }
    exchange_of(optimizer).close()


def with_nodes(density: float, ways: Sequence[Callable[..., None]], rank: int) -> list[list[dict[str, Any]]]:
    method = Method(TopK(density), aggregator=TwoLevel(Mean(), 2))
    return [
        [*trained(how, lambda net, optimizer, step, how=how: how(net, optimizer, rank, step), method)] for how in ways
    ]


def alone(number: int) -> list[list[dict[str, Any]]]:
    """Train as a single rank in place of a node."""

    def take_step(how: Callable[..., None], net: Linear, optimizer: Any, step: int) -> None:
        net.a.grad, net.b.grad = of_node(how, net, number, step) or (None, None)
        optimizer.step(lambda: None)

    return [[*trained(how, functools.partial(take_step, how), Method(TopK(1.0)))] for how in WAYS]


def test_a_node_is_one_worker_whatever_makes_the_gradients():
    """Two nodes of two ranks train as two ranks with the mean gradients of the nodes, bit for bit."""
    workers = run_ranks(2, alone)
    for rank, found in enumerate(run_ranks(4, functools.partial(with_nodes, 1.0, WAYS))):
        for how, steps, expected in zip(WAYS, found, workers[rank // 2], strict=True):
            for step in range(STEPS):
                keys = {"weights", "moments", "gradients"}
                if how in OVERFLOWS and step == 1 and rank > 1:
                    assert any(x.isinf().any() for x in steps[step]["gradients"])
                    keys.remove("gradients")
                for key in keys:
                    same = map(torch.equal, steps[step][key], expected[step][key])
                    assert all(same), (how.__name__, rank, step, key)


@pytest.mark.parametrize("ways", [[backward, partly, unscaled], pytest.param(WAYS, marks=later)], ids=len)
def test_ranks_are_equal_in_weights_and_those_of_a_node_in_moments_if_entries_wait(ways):
    first, second, third, last = run_ranks(4, functools.partial(with_nodes, 0.05, ways))
    for left, right in ((first, second), (third, last), (second, third)):
        for how, *both in zip(ways, left, right, strict=True):
            for step, (one, other) in enumerate(zip(*both, strict=True)):
                for key in ("weights", "moments") if right is not third else ("weights",):
                    assert all(map(torch.equal, one[key], other[key])), (how.__name__, step, key)
    assert not torch.equal(first[0][0]["moments"][0], third[0][0]["moments"][0])


WAITING = [
    (TopK(0.3, value_format="int2"), Mean()),
    (TopK(0.1), GlobalTopK()),
    (TopK(0.1), OkTopK()),
    (ScaledSign(), Mean()),
    (Blocks(4, 64), TwoPass()),
]


def linear_loss(compressor: Any, aggregator: Any, loaded: bool, comm: Comm) -> tuple[Tensor, ...]:
    """Train with gradients that do not depend on weights.

    Returns:
        The weights' change; the mean gradients of the node, summed up; the residuals before and after.
    """
    net = nn.ParameterList([torch.zeros(101), torch.zeros(7, 11)])
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    reducer = Reducer(Method(compressor, aggregator=TwoLevel(aggregator, 2)), comm, exchanged="update")
    updates, numel = DeltaExchange(reducer, net, [optimizer]), 101 + 77
    if loaded:
        state = reducer.state_dict()
        for rest in state["elements"]["residual"].values():
            rest.copy_(torch.randn(rest.shape, generator=torch.Generator().manual_seed(comm.rank)))
        reducer.load_state_dict(state)
    before, given = residual_of(reducer), torch.zeros(numel)
    for step in range(4):
        drawn = [torch.randn(numel, generator=torch.Generator().manual_seed(10 * rank + step)) for rank in range(4)]
        net[0].grad, net[1].grad = (x.clone() for x in (drawn[comm.rank][:101], drawn[comm.rank][101:].view(7, 11)))
        first = comm.rank // 2 * 2
        given += (drawn[first] + drawn[first + 1]) / 2
        updates.average_gradients(optimizer)
        updates.begin(optimizer)
        optimizer.step()
        updates.exchange(optimizer)
    updates.close()
    return torch.cat([x.detach().view(-1) for x in net]), given, before, residual_of(reducer)


def residual_of(reducer: Reducer) -> Tensor:
    return torch.cat([x.view(-1) for _, x in sorted(reducer.state_dict()["elements"]["residual"].items())])


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(("compressor", "aggregator"), WAITING, ids=str)
def test_no_update_is_lost_between_nodes(compressor, aggregator, loaded):
    ranks = simulate(4, lambda comm: linear_loss(compressor, aggregator, loaded, comm))
    moved = [rank[0] for rank in ranks]
    given, before, after = (torch.stack([rank[i] for rank in ranks]) for i in (1, 2, 3))
    assert all(torch.equal(x, moved[0]) for x in moved)
    assert after.any()
    assert before.any() == loaded
    # Sums of a few numbers below 20, with an fp32 rounding for each of 4 steps and ranks.
    error = moved[0] + 0.5 * given.mean(0) + before.mean(0) - after.mean(0)
    assert error.abs().max() <= 20 * 4 * 4 * 2**-23


def after_training_alone(loaded: bool, rank: int) -> list[Tensor]:
    """Train without nodes, so that ranks have different moments and numbers of steps; then with them.

    Args:
        loaded: whether ranks load the states of the training without nodes after a step with them.
    """
    net = Linear()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    attach_updates(net, optimizer, Method(TopK(0.1)))
    partly(net, optimizer, rank, 0)  # rank 0 has no moments of `b`
    exchange_of(optimizer).close()
    for state in optimizer.state.values():
        state["step"] += rank
    saved = copy.deepcopy(optimizer.state_dict())
    reducer = attach_updates(net, optimizer, Method(TopK(0.1), aggregator=TwoLevel(Mean(), 2)))
    if loaded:
        backward(net, optimizer, rank, 0)
        optimizer.load_state_dict(saved)
        reducer.load_state_dict(reducer.state_dict())
    for step in (1, 2):
        optimizer.zero_grad()
        backward(net, optimizer, rank, step)
    return [*net.parameters(), *(x for param in net.parameters() for x in optimizer.state[param].values())]


@pytest.mark.parametrize("loaded", [False, True])
def test_ranks_that_have_trained_alone_take_the_states_of_their_nodes_first_rank(loaded):
    first, second, third, last = run_ranks(4, functools.partial(after_training_alone, loaded))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, third, last))
    assert all(map(torch.equal, first[:2], third[:2]))
    assert not all(map(torch.equal, first, third))


def interrupted_then_on(rank: int) -> Any:
    net = Linear()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    attach_updates(net, optimizer, Method(TopK(0.1), aggregator=TwoLevel(Mean(), 2)))
    backward(net, optimizer, rank, 0)
    if rank == 0:
        with mock.patch.object(node, "_means", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            backward(net, optimizer, rank, 1)
    return caught(lambda: backward(net, optimizer, rank, 1))


def test_an_interrupt_within_an_average_ends_training():
    for _, text, seconds in run_ranks(2, interrupted_then_on):
        assert "An exchange of updates was interrupted on this rank, as by Ctrl-C" in text
        assert seconds < SOON


def pending_too_early(net: Linear, optimizers: Any, rank: int) -> None:
    if rank == 2:
        exchange_pending(optimizers[0])


def in_another_order(net: Linear, optimizers: Any, rank: int) -> None:
    if rank == 2:
        optimizers.reverse()


@pytest.mark.parametrize("mistake", [pending_too_early, in_another_order])
def test_ranks_that_are_out_of_step_get_an_error(mistake):
    def run(rank: int) -> Any:
        net = Linear()
        optimizers = [torch.optim.AdamW([param], 0.01) for param in net.parameters()]
        attach_updates(net, optimizers, Method(TopK(0.1), aggregator=TwoLevel(Mean(), 2)), local_steps=2)

        def train() -> None:
            for step in range(2):
                net.loss(rank, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
                mistake(net, optimizers, rank)

        return caught(train)

    for kind, text, seconds in run_ranks(4, run):
        assert kind == "RankFailure"
        assert "Ranks are out of step" in text
        assert seconds < SOON


def test_the_error_of_a_value_that_is_not_finite_says_that_its_node_made_it():
    def run(rank: int) -> Any:
        net = Linear()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        attach_updates(net, optimizer, Method(TopK(0.1), aggregator=TwoLevel(Mean(), 2)))
        (net.loss(rank, 0) * (float("nan") if rank == 3 else 1)).backward()
        return caught(optimizer.step)

    for kind, text, seconds in run_ranks(4, run):
        assert kind == "NonFiniteGradient"
        assert "is not finite on rank 2" in text
        assert text.count("another rank of this rank's node may have made the value") == 1
        assert seconds < SOON


def test_a_sparse_gradient_is_an_error_on_all_ranks():
    def rank(rank: int) -> Any:
        net = nn.Embedding(50, 4, sparse=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        attach_updates(net, optimizer, Method(TopK(0.1), aggregator=TwoLevel(Mean(), 2)))
        net(torch.tensor([rank])).sum().backward()
        return caught(optimizer.step)

    for kind, text, seconds in run_ranks(2, rank):
        assert kind in ("ValueError", "RankFailure")
        assert (
            "A parameter of shape [50, 4] has a sparse gradient, and the ranks of a node average dense gradients"
            in text
        )
        assert seconds < SOON
