"""Local steps, the outer optimizer, momentum factor masking, and residual decay."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse import METHODS, Method, Reducer, method, simulate
from lightning_sparse.aggregators import AllReduceMean, TwoLevel
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Identity, TopK
from lightning_sparse.layout import Layout
from lightning_sparse.memory import DecayingResidual, NoMemory
from lightning_sparse.methods import MethodSpec
from lightning_sparse.momentum import ADAM, SegmentMoments, moments_of, second_decay
from lightning_sparse.state import resized, sources
from lightning_sparse.update_rule import SIGNAL, UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.signal_share import INTERVAL, SAMPLES, WEIGHT, excess_of, is_due, signal_of
from tests.support.tiers import full, one_in, tiers
from tests.support.update_training import ADAMW, SGD, Net, residual, weights

LOCAL = [name for name, spec in METHODS.items() if spec.update_rule and spec.update_rule.local_steps > 1]


def local_steps(net: Net, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        net.backward(rank, step)
        optimizer.step()


def after_an_outer_step(comm: Comm, net: Net) -> dict[str, Any]:
    """Take one outer step of DiLoCo's, and return the reducer's state."""
    optimizer = ADAMW(net.parameters(), 0.01)
    reducer = Reducer("diloco", comm, exchanged="update")
    updates = DeltaExchange(reducer, net, [optimizer])
    updates.begin(optimizer)
    local_steps(net, optimizer, comm.rank, 0, 3)
    updates.exchange(optimizer)
    return reducer.state_dict()


def dense(rule: UpdateRule) -> Method:
    return Method(Identity(), NoMemory(), AllReduceMean(), rule)


def test_the_outer_step_by_hand():
    """Mean update 3, then 1; m = 3, then 0.5 · 3 + 1; weights change by 2 · (mean + 0.5 m)."""

    def rank(comm: Comm) -> list[float]:
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(net.weight, 100.0)
        optimizer = SGD(net.parameters(), 1.0)
        rule = UpdateRule(local_steps=2, outer_lr=2.0, outer_momentum=0.5)
        updates, seen = DeltaExchange(Reducer(dense(rule), comm, exchanged="update"), net, [optimizer]), []
        for grads in ([[2.0, 2.0], [1.0, 1.0]], [[1.0, 2.0], [-2.0, 1.0]]):
            updates.begin(optimizer)
            for grad in grads[comm.rank]:
                net.weight.grad = torch.full((1, 1), grad)
                optimizer.step()
            updates.exchange(optimizer)
            seen.append(net.weight.item())
        return seen

    assert simulate(2, rank) == [[91.0, 86.5], [91.0, 86.5]]


@pytest.mark.parametrize("size", tiers([1, 2, 3, 5, 8], [1, 3]))
def test_the_outer_optimizer_is_torchs_sgd_with_nesterov_on_the_mean_update(size):
    rule = UpdateRule(local_steps=3, rescale=False, outer_lr=0.7, outer_momentum=0.9)

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        net, theirs = Net(), Net()
        optimizer, inner = ADAMW(net.parameters(), 0.01), ADAMW(theirs.parameters(), 0.01)
        outer_net = copy.deepcopy(theirs)
        outer = SGD(outer_net.parameters(), 0.7, momentum=0.9, nesterov=True)
        updates = DeltaExchange(Reducer(dense(rule), comm, exchanged="update"), net, [optimizer])
        for first in (0, 3, 6):
            updates.begin(optimizer)
            local_steps(net, optimizer, comm.rank, first, 3)
            updates.exchange(optimizer)
            local_steps(theirs, inner, comm.rank, first, 3)
            for x, w in zip(outer_net.parameters(), theirs.parameters(), strict=True):
                x.grad = comm.all_reduce((x.detach() - w.detach()).reshape(-1)).view(x.shape) / comm.size
            outer.step()
            for x, w in zip(outer_net.parameters(), theirs.parameters(), strict=True):
                w.data.copy_(x)
        return weights(net), weights(theirs)

    for ours, theirs in simulate(size, rank):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_local_sgd_is_the_mean_of_the_weights():
    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        net = Net()
        optimizer = SGD(net.parameters(), 0.1)
        updates = DeltaExchange(Reducer("local_sgd", comm, exchanged="update"), net, [optimizer])
        updates.begin(optimizer)
        local_steps(net, optimizer, comm.rank, 0, 4)
        mean = comm.all_reduce(weights(net)) / comm.size
        updates.exchange(optimizer)
        return weights(net), mean

    (one, mean), (two, _), _ = simulate(3, rank)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", ["pay_out", "mask", "keep"])
def test_what_becomes_of_momentum_where_entries_are_sent(momentum):
    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        net = Net()
        optimizer = SGD(net.parameters(), 1.0, momentum=0.75)
        chosen = Method(TopK(density=0.05), update_rule=UpdateRule(momentum=momentum))
        reducer = Reducer(chosen, comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]  # few elements would go dense
        before = weights(net)
        net.backward(comm.rank, 0)
        grads = torch.cat([param.grad.reshape(-1) for _, param in sorted(net.named_parameters())])
        updates.begin(optimizer)
        optimizer.step()
        updates.exchange(optimizer)
        left = [optimizer.state[param]["momentum_buffer"].reshape(-1) for _, param in sorted(net.named_parameters())]
        return grads, torch.cat(left), before - weights(net), residual(reducer)

    (grads, buffer, moved, kept) = simulate(1, rank)[0]
    sent = moved != 0
    assert int(sent.sum()) == round(0.05 * len(grads))
    assert torch.equal(buffer[~sent], grads[~sent])
    assert torch.equal(kept, torch.where(sent, 0.0, grads))
    assert torch.equal(buffer[sent], grads[sent] if momentum == "keep" else torch.zeros_like(grads[sent]))
    # The unspent momentum is 0.75 + 0.75² + … = 3 times the gradient.
    torch.testing.assert_close(moved[sent], grads[sent] * (4 if momentum == "pay_out" else 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_one_step_of_adamw_is_rescaled_by_hand(decay):
    """Two of four ranks have the gradient 3, and two have 0. So u = g/√v is equal on two ranks, and 0 on two.

    The mean of u is u/2, and its square u²/4. The mean of the squares is u²/2. So (4 · 1/2 − 1)/3 = 1/3 of v is signal,
    and f = 1/√(1/3 + (2/3)/4) = √2. The first step is not rescaled. Its change is lr on two ranks, and on average lr/2.
    """

    def rank(comm: Comm) -> list[float]:
        net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(net.weight, 8.0)
        optimizer = ADAMW(net.parameters(), 0.1, betas=(0.5, 0.5), weight_decay=decay)
        chosen = replace(dense(UpdateRule()), update_rule=UpdateRule())
        updates, changed = DeltaExchange(Reducer(chosen, comm, exchanged="update"), net, [optimizer]), []
        for _ in range(3):
            updates.begin(optimizer)
            before = net.weight[0, 0].item()
            net.weight.grad = torch.full((1, 2), 3.0 if comm.rank < 2 else 0.0)
            optimizer.step()
            updates.exchange(optimizer)
            changed.append(before - net.weight[0, 0].item() - 0.1 * decay * before)
        return changed

    # u has 8 bits in the comparison, and the same error on both ranks. Weights are 8, with an ulp of 9.5e-7.
    for changed in simulate(4, rank):
        assert changed == pytest.approx([0.05, 0.05 * 2**0.5, 0.05 * 2**0.5], rel=1e-4)


def test_the_share_of_signal_by_hand():
    """Equal gradients are signal. Gradients that cancel are less than noise. NaN and infinity do not count."""
    ones, before, unknown = torch.ones(4, 3), torch.tensor(0.5), torch.tensor(math.nan)
    assert signal_of(ones, unknown) == 1
    assert signal_of(ones, before) == 0.5 + WEIGHT * 0.5
    assert signal_of(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), unknown) == pytest.approx(-1 / 3)
    assert signal_of(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), unknown) == 0  # no element in common
    for hostile in (torch.zeros(4, 3), ones * math.inf, ones * torch.tensor([1, 1, math.nan])):
        assert signal_of(hostile, before) == before
        assert signal_of(hostile, unknown).isnan()


@one_in(2)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
def test_the_share_of_signal_of_random_gradients(noise, size):
    """With the variance s of the signal and n of the noise, q is s/(s + n)."""
    generator = torch.Generator().manual_seed(size)
    signal = torch.randn(1, 100_000, generator=generator)
    samples = signal + noise * torch.randn(size, 100_000, generator=generator)
    # The variance of a sum of 100,000 squares is 2e-5 of its square, and numerator and denominator are such sums. Four
    # standard deviations of the larger of the two, the mean over the ranks, are 0.018 of 1, times P/(P - 1), at most 2.
    assert signal_of(samples, torch.tensor(math.nan)).item() == pytest.approx(1 / (1 + noise**2), abs=0.036)
    anything = samples[:, :1000] * 10 ** torch.empty(1, 1000).uniform_(-3, 3, generator=generator)
    assert -1 / (size - 1) - 1e-5 <= signal_of(anything, torch.tensor(math.nan)).item() <= 1 + 1e-5


def test_samples_are_of_the_same_elements_on_all_ranks():
    """u = g/√v, and 0 without a gradient, without moments, and if v is 0. Any parameter may be without elements."""
    lengths = {"b": (3,), "new": (2,), "none": (3,), "empty": (0,), "a": (2, 2)}
    segment = Layout.of(lengths).segments[0]  # in reverse order
    grads = [torch.arange(1.0, 5).view(2, 2), torch.ones(0), None, torch.ones(2), torch.tensor([5.0, 6.0, 7.0])]
    seconds = [torch.full((2, 2), 4.0), torch.ones(0), torch.ones(3), None, torch.tensor([1.0, 0.0, 0.25])]
    states = [{} if v is None else {"exp_avg": v, "exp_avg_sq": v} for v in seconds]
    group = {"betas": (0.9, 0.999)}
    moments = SegmentMoments(segment, ADAM, [group] * 5, states, torch.device("cpu"))
    weights = [*map(torch.ones, lengths.values())][::-1]
    everything = moments.sample(grads, weights, range(segment.numel))
    assert everything.tolist() == [0.5, 1, 1.5, 2, 0, 0, 0, 0, 0, 5, 0, 14]
    some = [0, 3, 3, 6, 11]
    assert moments.sample(grads, weights, some).tolist() == everything[some].tolist()
    assert moments.sample([None] * 5, weights, some).tolist() == [0] * 5


@pytest.mark.parametrize(("decoupled", "maximize", "u"), [(True, False, 0.5), (False, False, 1.5), (False, True, -0.5)])
def test_samples_contain_weight_decay_if_the_moments_do(decoupled, maximize, u):
    """With v = 4 and the weight 1, the gradient 1 gives 1/2. Coupled decay of 2 adds 1, or subtracts it."""
    group = {"betas": (0.9, 0.999), "weight_decay": 2.0, "maximize": maximize, "decoupled_weight_decay": decoupled}
    state = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.full((1,), 4.0)}
    moments = SegmentMoments(Layout.of({"w": (1,)}).segments[0], ADAM, [group], [state], torch.device("cpu"))
    assert moments.sample([torch.ones(1)], [torch.ones(1)], [0]).tolist() == [u]


@pytest.mark.parametrize("rare", [1, 6])
def test_comparisons_become_rare(rare):
    """There are four while the number of steps doubles, and later one in each `INTERVAL`, also if few steps are."""
    steps = []
    for step in range(3, 100 * INTERVAL, rare):
        if is_due(step, len(steps), steps[-1] if steps else -1):
            steps.append(step)
    assert [(t - 3) // rare for t in steps[:8]] == [*range(8)]
    doublings = [len([t for t in steps if start <= t - 3 < 2 * start]) for start in (8, 16, 32, 64, 128, 256)]
    assert doublings == [4] * 6 if rare == 1 else min(doublings[3:]) >= 3
    late = [b - a for a, b in itertools.pairwise(steps) if a >= 8 * INTERVAL]
    assert {*late} == {-(-INTERVAL // rare) * rare}


@full
@one_in(2)
@pytest.mark.parametrize(("noise", "size"), [(0.0, 4), (1.0, 4), (10.0, 4), (10.0, 2)])
def test_rescaled_updates_are_as_large_as_dense_adams(noise, size):
    """Gradients are 1 plus noise. The mean change over many elements is that of the signal, as in dense training."""

    def rank(comm: Comm) -> tuple[float, float, float]:
        one, all_ranks = (torch.nn.Linear(2000, 1, bias=False) for _ in range(2))
        mine, dense_adam = (torch.optim.Adam(net.parameters(), 1.0) for net in (one, all_ranks))
        generator, signal = torch.Generator().manual_seed(comm.rank), torch.tensor(math.nan)
        segment = Layout.of({"weight": (1, 2000)}).segments[0]
        for step in range(300):
            grad = 1 + noise * torch.randn(1, 2000, generator=generator)
            one.weight.grad = grad
            all_ranks.weight.grad = comm.all_reduce(grad.clone().view(-1)).view(1, -1) / size
            with torch.no_grad():
                before, dense_before = one.weight.clone(), all_ranks.weight.clone()
            mine.step()
            dense_adam.step()
            kind, state = moments_of(mine), mine.state[one.weight]
            moments = SegmentMoments(segment, kind, mine.param_groups, [state], grad.device)
            if step % 20 == 0:
                own = moments.sample([grad], [one.weight], range(step, step + SAMPLES))
                signal = signal_of(comm.all_gather(own), signal)
        change = (before - one.weight).detach().view(-1)
        unscaled = change.clone()
        factors, _ = moments.rescaling(excess_of(signal, size))
        change = change * factors
        wanted = (dense_before - all_ranks.weight).detach()
        return change.mean().item(), wanted.mean().item(), unscaled.mean().item()

    for change, wanted, unscaled in simulate(size, rank):
        # An element's update is 1/√(1 + noise²) plus noise of standard deviation √c = 0.23. The mean of 2,000 is off by
        # 5 % of the former for noise 10, and by 0.7 % for noise 1. The limit is three times that, plus the errors of f
        # and of dense training.
        assert change / wanted == pytest.approx(1, abs={0.0: 1e-4, 1.0: 0.03, 10.0: 0.17}[noise])
        assert change / unscaled <= size**0.5 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("dtype", "options", "decays"),
    [
        (torch.float32, {}, True),
        (torch.bfloat16, {}, False),
        (torch.bfloat16, {"foreach": True}, False),
        (torch.bfloat16, {"capturable": True, "lr": torch.tensor(1e-3)}, False),
        (torch.bfloat16, {"fused": True}, True),
        (torch.bfloat16, {"weight_decay": 10.0}, True),
    ],
    ids=str,
)
def test_weight_decay_that_rounding_undoes_is_not_compensated(dtype, options, decays):
    """An AdamW of torch that is not fused decays 16-bit weights before the step, and the rounding undoes it.

    A compensation would then increase the weights in each step.
    """
    weight = torch.nn.Parameter(torch.linspace(0.5, 2, 64).to(dtype))
    before, weight.grad = weight.detach().clone(), torch.zeros_like(weight)
    capturable = options.get("capturable", False)
    optimizer = torch.optim.AdamW([weight], **{"lr": 1e-3, "weight_decay": 0.1, **options, "capturable": False})
    optimizer.step()
    if not options.get("fused"):
        assert torch.equal(before, weight) == (not decays)
    state, group = optimizer.state[weight], {**optimizer.param_groups[0], "capturable": capturable}
    state |= {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.ones_like(weight)}
    segment = Layout.of({"weight": (64,)}).segments[0]
    moments = SegmentMoments(segment, moments_of(optimizer), [group], [state], before.device, dtype=dtype)
    factors, decay = moments.rescaling(torch.tensor(1.0))
    assert factors.item() > 1
    assert (decay.item() != 0) == decays
    assert (moments.payout([before]).coefficients[1].item() != 0) == decays


def exchanged_once(
    comm: Comm, net: torch.nn.Module, optimizer: torch.optim.Optimizer, rule: UpdateRule, grad: float = 1.0
) -> DeltaExchange:
    """Exchange the update of a step with equal gradients, everything sent."""
    updates = DeltaExchange(Reducer(dense(rule), comm, exchanged="update"), net, [optimizer])
    updates.begin(optimizer)
    for param in net.parameters():
        param.grad = torch.full_like(param, grad)
    optimizer.step()
    updates.exchange(optimizer)
    return updates


def test_a_parameter_that_was_not_stepped_is_not_rescaled():
    """AdamW does not change a parameter without a gradient, not even by weight decay, although there is state."""

    def rank(comm: Comm) -> bool:
        net = torch.nn.Linear(3, 2)
        optimizer = ADAMW(net.parameters(), 0.1, weight_decay=0.5)
        updates = exchanged_once(comm, net, optimizer, UpdateRule(), -1.0 if comm.rank else 1.0)
        before = net.weight.detach().clone()
        assert updates.segments[0].signal.excess > 0
        updates.begin(optimizer)
        net.weight.grad = None
        net.bias.grad = torch.full_like(net.bias, -1.0)
        optimizer.step()
        updates.exchange(optimizer)
        return torch.equal(net.weight, before)

    torch.manual_seed(0)
    assert all(simulate(4, rank))


@pytest.mark.parametrize(
    ("kind", "rule", "is_rescaled"),
    [
        (partial(ADAMW, lr=0.1), UpdateRule(), True),
        (partial(ADAMW, lr=0.1, betas=(0.0, 0.9)), UpdateRule(), True),
        (partial(ADAMW, lr=0.1), UpdateRule(rescale=False), False),
        (partial(ADAMW, lr=0.1), UpdateRule(local_steps=2), False),  # several steps are not one dense step
        (partial(torch.optim.RAdam, lr=0.1), UpdateRule(), False),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), UpdateRule(), False),
    ],
    ids=str,
)
def test_only_one_step_of_adam_is_rescaled(kind, rule, is_rescaled):
    """Gradients of the others are not compared, so no bytes are sent for them."""

    def rank(comm: Comm) -> bool:
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = kind(net.parameters())
        reducer = Reducer(dense(rule), comm, exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        for _ in range(2):
            updates.begin(optimizer)
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
            updates.exchange(optimizer)
        compared = SIGNAL in reducer.states[0]
        assert (SIGNAL in reducer.state_dict()["segments"]["weight"]) == compared
        assert ("rescaled" in updates.note) == compared
        return compared

    assert simulate(3, rank) == [is_rescaled] * 3


def test_thresholds_for_clipping_grow_with_the_root_of_the_ranks():
    """√P, by which the noise of one rank exceeds that of the mean; methods with local steps clip as their papers do."""
    assert [UpdateRule().clip_factor(size) for size in (1, 4, 9)] == [1, 2, 3]
    others = [UpdateRule(local_steps=2), *(METHODS[name].update_rule for name in LOCAL)]
    assert {rule.clip_factor(4) for rule in others} == {1}


@pytest.mark.parametrize(
    ("beta", "size", "expected"),
    [(0.95, 1, 0.95), (0.95, 4, 0.9875), (0.5, 2, 0.75), (0.99, 100, 0.999), (0.999, 8, 0.999), (0.9999, 2, 0.9999)],
)
def test_the_window_of_the_second_moment_by_hand(beta, size, expected):
    """1 − β₂ is divided by the number of ranks, up to a window of 1,000 steps. Windows that are longer stay."""
    assert second_decay(beta, size) == pytest.approx(expected, abs=1e-15)
    found = second_decay(torch.tensor(beta, dtype=torch.float64), size)
    assert found == torch.tensor(second_decay(beta, size), dtype=torch.float64)


@pytest.mark.parametrize(("rule", "expected"), [(UpdateRule(), 0.9875), (UpdateRule(rescale=False), 0.95)])
def test_windows_are_longer_during_a_step(rule, expected):
    """v = (1 − β₂) g² after the first step. Then, and if an error ends a step, the optimizer has its own betas."""

    def rank(comm: Comm) -> list[Any]:
        net, betas = torch.nn.Linear(1, 1, bias=False), (0.9, 0.95)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1, betas=betas)
        updates = exchanged_once(comm, net, optimizer, rule)
        (state,) = optimizer.state.values()
        found = [state["exp_avg_sq"].item(), optimizer.param_groups[0]["betas"] == betas]
        updates.begin(optimizer)  # and the step raises an error
        during = optimizer.param_groups[0]["betas"]
        saved = optimizer.state_dict()["param_groups"][0]["betas"]
        updates.begin(optimizer)
        again = optimizer.param_groups[0]["betas"]
        updates.abandon(optimizer)
        updates.close()
        return [*found, during, again, saved == betas, optimizer.param_groups[0]["betas"] == betas]

    for v, kept, during, again, saved_kept, abandoned in simulate(4, rank):
        assert v == pytest.approx(1 - expected, rel=1e-6)
        assert during == again == (0.9, pytest.approx(expected))
        assert kept
        assert saved_kept
        assert abandoned


def test_code_within_a_step_sees_long_windows_and_may_write_its_own_betas():
    """A saved state has the optimizer's own betas, and the step keeps the long windows. A close restores the betas."""

    def rank(comm: Comm) -> list[Any]:
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1, betas=(0.9, 0.95))
        updates = exchanged_once(comm, net, optimizer, UpdateRule())
        assert "while a rank steps, β₂ is 0.9875" in updates.note
        found = []
        for written in (None, (0.8, 0.97)):
            updates.begin(optimizer)
            found += [optimizer.state_dict()["param_groups"][0]["betas"], optimizer.param_groups[0]["betas"]]
            if written:
                optimizer.param_groups[0]["betas"] = written
            optimizer.step()
            updates.exchange(optimizer)
            found.append(optimizer.param_groups[0]["betas"])
        updates.begin(optimizer)
        updates.close()
        return [*found, optimizer.param_groups[0]["betas"], optimizer.state_dict()["param_groups"][0]["betas"]]

    own, longer = (0.9, 0.95), (0.9, pytest.approx(0.9875))
    expected = [own, longer, own, own, longer, (0.8, 0.97), (0.8, 0.97), (0.8, 0.97)]
    assert simulate(4, rank) == [expected] * 4


def test_a_scheduler_that_copies_a_long_window_after_an_error_does_not_keep_it():
    """OneCycleLR writes a new tuple with another β₁ and the present β₂."""

    def rank(comm: Comm) -> list[Any]:
        net = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1, betas=(0.9, 0.95))
        updates = exchanged_once(comm, net, optimizer, UpdateRule())
        (group,), found = optimizer.param_groups, []
        for _ in range(2):
            updates.begin(optimizer)  # and the step raises an error
            found.append(group["betas"])
            group["betas"] = (0.8, group["betas"][1])
            found.append(optimizer.state_dict()["param_groups"][0]["betas"])
        optimizer.step()
        updates.exchange(optimizer)
        return [*found, group["betas"]]

    during, after = pytest.approx(0.9875), (0.8, 0.95)
    assert simulate(4, rank) == [[(0.9, during), after, (0.8, during), after, after]] * 4


def test_each_parameter_has_the_numbers_of_its_own_group():
    """Groups alternate in the segment, as weights and biases do, and the parameter "c" has no moments yet."""
    segment = Layout.of(dict.fromkeys("edcba", (1,)), "model").segments[0]
    slow, fast = ({"betas": (beta, 0.999), "lr": 1.0, "weight_decay": 0.0} for beta in (0.9, 0.5))
    states = [{"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)} if name != "c" else {} for name in segment.names]
    groups = [slow, fast, slow, slow, fast]
    moments = SegmentMoments(segment, ADAM, groups, states, torch.device("cpu"))
    payout = moments.payout([torch.ones(1)] * 5)
    assert payout.coefficients[0].tolist() == pytest.approx([9.0, 1.0, 0.0, 9.0, 1.0])
    factors, _ = moments.rescaling(torch.tensor(0.5))
    assert factors.tolist() == [1.5, 1.5, 1.0, 1.5, 1.5]


def test_momentum_of_0_is_not_paid_out():
    def rank(comm: Comm) -> str:
        net = Net()
        reducer = Reducer(method("topk"), comm, exchanged="update")
        return DeltaExchange(reducer, net, [SGD(net.parameters(), 0.1)]).note

    assert "paid out" not in simulate(1, rank)[0]


@pytest.mark.parametrize(
    ("every", "density", "pays"),
    [(1, 0.09, True), (1, 0.11, False), (5, 0.01, True), (5, 0.03, False), (8, 0.01, True), (12, 0.01, False)],
)
def test_momentum_is_paid_out_only_if_density_times_steps_is_below_1_minus_beta(every, density, pays):
    def rank(comm: Comm) -> str:
        net, chosen = Net(), Method(TopK(density=density), update_rule=UpdateRule(local_steps=every))
        reducer = Reducer(chosen, comm, exchanged="update")
        return DeltaExchange(reducer, net, [SGD(net.parameters(), 0.1, momentum=0.9)]).note

    assert ("paid out" in simulate(1, rank)[0]) == pays


def test_outer_momentum_is_loaded_with_another_number_of_steps():
    def rank(comm: Comm) -> bool:
        net = Net()
        saved = after_an_outer_step(comm, net)
        again = Reducer(
            replace(method("diloco"), update_rule=method("diloco").update_rule.changed(7, "none")),
            comm,
            exchanged="update",
        )
        again.setup(dict(net.named_parameters()))
        again.load_state_dict(saved)
        kept, loaded = (each["elements"]["outer_momentum"] for each in (saved, again.state_dict()))
        return all(torch.equal(kept[name], loaded[name]) for name in kept) and any(part.any() for part in kept.values())

    assert all(simulate(2, rank))


def test_at_density_1_nothing_waits_so_gradients_are_exchanged():
    assert method("topk", density=0.5).is_sparse
    assert not method("topk", density=1.0).is_sparse


def test_a_decaying_residual_by_hand():
    def rank(comm: Comm) -> list[list[float]]:
        chosen = Method(TopK(density=0.25), DecayingResidual(0.5))
        reducer, kept = Reducer(chosen, comm), []
        reducer.setup({"w": torch.zeros(4)})
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
        for grad in ([4.0, 2.0, -1.0, 0.0], [0.0, 2.0, 0.0, -8.0], [0.0, 0.0, 0.0, 0.0]):
            reducer.reduce_({"w": torch.tensor(grad)})
            kept.append(reducer.states[0]["residual"].tolist())
        return kept

    assert simulate(1, rank)[0] == [[0.0, 2.0, -1.0, 0.0], [0.0, 3.0, -0.5, 0.0], [0.0, 0.0, -0.25, 0.0]]


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("size", [2, 3])
def test_saved_and_loaded_goes_on_bit_for_bit(name, size):
    def train(comm: Comm, saved: dict[str, Any] | None, stop: int) -> tuple[Tensor, dict[str, Any]]:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(name, comm, exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        first = 0
        if saved:
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            reducer.load_state_dict(saved["reducer"])
            first = 2
        for exchange in range(first, stop):
            updates.begin(optimizer)
            local_steps(net, optimizer, comm.rank, 3 * exchange, 3)
            updates.exchange(optimizer)
        parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "reducer": reducer.state_dict()}
        return weights(net), copy.deepcopy(parts)

    whole = simulate(size, lambda comm: train(comm, None, 4)[0])
    half = simulate(size, lambda comm: train(comm, None, 2)[1])
    rest = simulate(size, lambda comm: train(comm, half[comm.rank], 4)[0])
    assert all(torch.equal(one, other) for one, other in zip(whole, rest, strict=True))


@pytest.mark.parametrize("stop", [8, 9])
def test_the_share_of_signal_goes_on_bit_for_bit(stop):
    """Ranks compare gradients in step 9 and not in 8."""

    def train(comm: Comm, saved: dict[str, Any] | None, stop: int) -> tuple[list[Tensor], dict[str, Any]]:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("topk", density=0.05), comm, granularity="model", exchanged="update")
        updates, found, first = DeltaExchange(reducer, net, [optimizer]), [], 0
        if saved:
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            reducer.load_state_dict(saved["reducer"])
            first = reducer.step
        for step in range(first, stop):
            updates.begin(optimizer)
            local_steps(net, optimizer, comm.rank, step, 1)
            updates.exchange(optimizer)
            found += [weights(net), reducer.states[0][SIGNAL][0].clone()]
        parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "reducer": reducer.state_dict()}
        return found, copy.deepcopy(parts)

    whole = simulate(3, lambda comm: train(comm, None, 14)[0])
    half = simulate(3, lambda comm: train(comm, None, stop)[1])
    rest = simulate(3, lambda comm: train(comm, half[comm.rank], 14)[0])
    for one, other in zip(whole, rest, strict=True):
        assert all(map(torch.equal, one[2 * stop :], other))
        signal = one[1::2]
        assert all(map(torch.equal, signal, whole[0][1::2]))  # on all ranks
        assert torch.equal(signal[7], signal[8])
        assert not torch.equal(signal[8], signal[9])


@pytest.mark.parametrize("change", ["forgets", "has nodes"])
def test_comparisons_begin_anew_if_the_share_of_signal_is_unknown(change):
    """It is so after residuals are forgotten, and if the ranks of a node begin to average gradients."""

    def rank(comm: Comm) -> tuple[list[Tensor], int]:
        net, found = Net(), []
        optimizer = ADAMW(net.parameters(), 0.01)
        made = method("topk", density=0.05)
        reducer = Reducer(made, comm, granularity="model", exchanged="update")
        reducer.step = 1001
        for step in range(4):
            if step == 2 and change == "forgets":
                reducer.forget_residuals()
            if step == 2 and change == "has nodes":
                state, of_nodes = reducer.state_dict(), replace(made, aggregator=TwoLevel(made.aggregator, 2))
                reducer = Reducer(of_nodes, comm, granularity="model", exchanged="update")
                reducer.load_state_dict(state)
            if step in (0, 2):
                updates = DeltaExchange(reducer, net, [optimizer])
            updates.begin(optimizer)
            local_steps(net, optimizer, comm.rank, step, 1)
            updates.exchange(optimizer)
            found.append(reducer.states[0][SIGNAL].clone())
        return found

    ranks = 2 if change == "has nodes" else 1
    for found in simulate(4, rank):
        assert [x[1:].tolist() for x in found] == [
            [1, 1001, 1],
            [2, 1002, 1],
            [1, 1003, ranks],
            [2, 1004, ranks],
        ]
        assert not any(x[0].isnan() for x in found)
        assert not torch.equal(found[2], found[3])


@pytest.mark.parametrize("way", ["by a scaler", "in a fused step", "without gradients"])
def test_a_skipped_step_is_not_compared(way):
    """Rank 1 has no usable gradients then, and its zeros would count as noise."""

    def rank(comm: Comm) -> list[Tensor]:
        net, found = Net(), []
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("topk", density=0.05), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        for step in range(4):
            updates.begin(optimizer)
            skips = comm.rank == 1 and step in (0, 2)
            if not skips:
                local_steps(net, optimizer, comm.rank, step, 1)
            elif way == "in a fused step":
                optimizer.found_inf = torch.ones(())
            elif way == "without gradients":
                optimizer.zero_grad()
                optimizer.step()
            updates.exchange(optimizer, stepped=not skips or way != "by a scaler")
            optimizer.found_inf = None
            found.append(reducer.states[0][SIGNAL][0].clone())
        return found

    for first, second, third, fourth in simulate(2, rank):
        assert first.isnan()
        assert second.isfinite()
        assert torch.equal(second, third)
        assert not torch.equal(third, fourth)


def test_ranks_compare_after_a_step_that_only_one_of_them_has_begun():
    """A backward pass may fail after the first segment's step, as for lack of memory. Programs skip such a batch."""

    def rank(comm: Comm) -> list[float]:
        net = Net()
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("topk", density=0.05), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        updates.begin(optimizer)
        local_steps(net, optimizer, comm.rank, 0, 1)
        if comm.rank == 0:
            updates.of(optimizer)[0].note_step({id(param): optimizer.param_groups[0] for param in net.parameters()})
        updates.abandon(optimizer)
        for step in range(3):
            updates.begin(optimizer)
            local_steps(net, optimizer, comm.rank, step, 1)
            updates.exchange(optimizer)
        return reducer.states[0][SIGNAL].tolist()

    first, second = simulate(2, rank)
    assert first == second
    assert first[1:] == [3, 2, 1]


def test_a_model_with_another_name_keeps_the_share_of_signal():
    """PEFT renames parameters."""

    def rank(comm: Comm) -> Tensor:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        optimizer = ADAMW(net.parameters(), 0.01)
        reducer = Reducer(method("topk", density=0.5), comm, granularity="model", exchanged="update")
        updates = DeltaExchange(reducer, net, [optimizer])
        updates.begin(optimizer)
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        updates.exchange(optimizer)
        before = reducer.states[0][SIGNAL].clone()
        net[0] = torch.nn.Sequential(net[0])
        updates.refresh_parameters(names=True)
        assert {*reducer.layout.names} == {"0.0.weight", "0.0.bias"}
        assert torch.equal(reducer.states[0][SIGNAL], before)
        return before

    for signal in simulate(2, rank):
        assert signal.tolist() == [1, 1, 0, 1]


def test_another_number_of_ranks_keeps_the_outer_momentum():
    states = simulate(3, lambda comm: after_an_outer_step(comm, Net()))
    for new in range(2):
        kept = resized([states[old] for old in sources(new, 2, 3)], new, 2)
        for name, momentum in kept["elements"]["outer_momentum"].items():
            assert momentum.numel() == 0 or momentum.any()
            assert torch.equal(momentum, states[0]["elements"]["outer_momentum"][name])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"local_steps": 0}, r"UpdateRule\(local_steps=0\): local_steps must be a whole number of steps, 1 or more"),
        ({"momentum": "payout"}, "choose from pay_out, mask, keep"),
        ({"outer_lr": 0.0}, "outer_lr must be a number above 0"),
        ({"outer_lr": math.nan}, "outer_lr must be a number above 0"),
        ({"outer_momentum": 1.0, "local_steps": 2}, r"outer_momentum must be in \[0, 1\)"),
        ({"outer_momentum": 0.9}, "Take several local steps"),
    ],
)
def test_bad_rules(options, text):
    with pytest.raises(ValueError, match=text):
        UpdateRule(**options)


@pytest.mark.parametrize("decay", [0.0, 1.5, "1", math.nan])
def test_bad_decays(decay):
    with pytest.raises(ValueError, match=r"DecayingResidual\(decay=.*must be in \(0, 1\]"):
        DecayingResidual(decay)


def test_a_rule_that_is_none():
    with pytest.raises(TypeError, match="update_rule must be an UpdateRule, or None"):
        Method(TopK(), update_rule=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, spec in METHODS.items() if spec.update_rule])
def test_rows_have_their_rule(name: str, spec: MethodSpec):
    assert method(name).update_rule == spec.update_rule
    assert (
        f"UpdateRule({'local_steps' if spec.update_rule and spec.update_rule.local_steps > 1 else 'momentum'}="
        in str(method(name))
    )
