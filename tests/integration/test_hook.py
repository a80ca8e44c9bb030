"""`attach` on plain DistributedDataParallel with forked processes: equal to a simulation without DDP, bit by bit."""

import contextlib
import copy
import gc
import io
import itertools
import math
import random
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from lightning_sparse import METHODS, Comm, NonFiniteGradient, Reducer, attach, method, simulate
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.hooks import GradientExchanger
from lightning_sparse.hooks.ddp import exchange_gradients, trainable_parameters
from lightning_sparse.hooks.session import Session
from lightning_sparse.options import ReducerOptions
from tests.integration.trainers import Messages
from tests.processes import run_ranks
from tests.support.representatives import REPRESENTATIVES, small
from tests.support.tiers import full, in_full, later, one_in, tiers

STEPS = 5


class Net(nn.Module):
    """Layers of different sizes, a strided convolution in channels_last order, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, 200)
        self.out = nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.out(torch.relu(self.hidden(x)))


def train(net: nn.Module, forward: Any, average: Any, rank: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x, y = torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward(x), y).backward()
        average()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def residual_of_a_convolution(rank: int) -> list[bool]:
    """Return whether the applied and the saved part add up to the gradient, also in a model of the other format."""
    found = []
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for first, second in (
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
    ):
        alone, nets = nn.Conv2d(3, 4, 3), []
        alone(x).square().mean().backward()
        for memory_format in (first, second):
            net = nn.Conv2d(3, 4, 3)
            net.load_state_dict(alone.state_dict())
            nets.append(DistributedDataParallel(net.to(memory_format=memory_format)))
        reducer, other = attach(nets[0], "topk", density=0.1), attach(nets[1], "topk", density=0.1)
        nets[0](x).square().mean().backward()
        saved = reducer.state_dict()
        rest = saved["elements"]["residual"]["weight"]
        found.append(
            torch.allclose(nets[0].module.weight.grad + rest, alone.weight.grad, atol=1e-6) and bool(rest.any())
        )
        other.load_state_dict(saved)
        found.append(torch.equal(other.state_dict()["elements"]["residual"]["weight"], rest))
        applied = nets[0].module.weight.grad.clone()
        for _ in range(20):
            nets[1].zero_grad()
            nets[1](x * 0).sum().mul(0).backward()
            applied += nets[1].module.weight.grad
        found.append(torch.allclose(applied, alone.weight.grad, atol=1e-6))
    return found


def test_a_residual_is_saved_in_the_shape_of_its_parameter_whatever_the_order_of_memory():
    assert run_ranks(1, residual_of_a_convolution) == [[True] * 6]


def reordered(rank: int, before_step: int, kernel: int) -> tuple[int, str]:
    warnings.filterwarnings("ignore", "Grad strides do not match")  # torch: "may impair performance"
    net = nn.Conv2d(3, 4, kernel)
    ddp = DistributedDataParallel(net)
    if before_step < 0:
        net.to(memory_format=torch.channels_last)
    attach(ddp, "topk", density=0.1)
    for step in range(3):
        if step == before_step:
            net.to(memory_format=torch.channels_last)
        try:
            ddp(torch.randn(2, 3, 8, 8)).square().mean().backward()
        except RuntimeError as error:
            return step, str(error)
    return -1, ""


def test_a_memory_format_without_effect_may_change_after_wrapping():
    assert run_ranks(2, reordered, 0, 1) == [(-1, "")] * 2


@pytest.mark.parametrize("before_step", [-1, 0, 2])
def test_a_memory_format_that_changes_after_wrapping_is_an_error(before_step):
    """Stock DDP permutes the gradient, and warns of performance only."""
    for step, text in run_ranks(2, reordered, before_step, 3):
        assert step == max(0, before_step)
        assert "'weight' has changed its memory format since DistributedDataParallel wrapped the model" in text


def unusual_in_memory(rank: int) -> list[str]:
    """A NaN is not taken for another order, nor are gaps in memory."""
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(net)
    attach(ddp, "topk", density=0.1)
    with pytest.raises(NonFiniteGradient) as error:
        ddp(torch.full((2, 3, 8, 8), math.nan)).sum().backward()
    gaps = nn.Linear(4, 8, bias=False)
    gaps.weight = nn.Parameter(torch.randn(4, 16)[:, ::2].t())
    ddp = DistributedDataParallel(gaps)
    attach(ddp, "topk", density=0.1)
    ddp(torch.randn(2, 4)).square().sum().backward()
    return [str(error.value)]


def test_a_nan_and_gaps_in_memory_are_no_other_memory_format():
    for (text,) in run_ranks(2, unusual_in_memory):
        assert "is not finite on rank 0 at step 0" in text


def make(name: str, density: float) -> Any:
    return method(name, density=density if "density" in METHODS[name].options else None, **small(name))


def by_hook(rank: int, name: str | None, density: float, granularity: str, options: dict[str, Any]) -> list[Tensor]:
    options = dict(options)
    jitter, rehearsal = options.pop("jitter", None), options.pop("rehearsal", False)
    net = Net()
    ddp = DistributedDataParallel(net, **options)
    if name is not None:
        if rehearsal:
            thread = exchange_gradients(ddp, make(name, density), ReducerOptions(granularity=granularity))
            thread.session.dry_run(trainable_parameters(ddp))
            reducer = thread.reducer
            assert (reducer.step, reducer.comm.sent_bytes, reducer.comm.seconds) == (0, 0, 0.0)
        else:
            reducer = attach(ddp, make(name, density), granularity=granularity)
        if jitter:
            reduce_segment_ = reducer.reduce_segment_

            def late(*args: Any) -> None:
                time.sleep(random.Random(jitter * (1 + rank)).random() * 0.02)
                reduce_segment_(*args)

            reducer.reduce_segment_ = late
    weights = train(net, ddp, lambda: None, rank)
    if name is not None:
        assert reducer.step == STEPS
    return weights


def by_simulation(name: str, density: float, granularity: str, size: int) -> list[list[Tensor]]:
    nets = [Net() for _ in range(size)]  # one after the other: they seed the global generator

    def rank(comm: Comm) -> list[Tensor]:
        net = nets[comm.rank]
        reducer = Reducer(make(name, density), comm, granularity=granularity)

        def average() -> None:
            # As DDP's buckets have it: elements in the order of memory.
            grads = {n: (p.grad.permute(0, 2, 3, 1) if n == "conv.weight" else p.grad) for n, p in params.items()}
            reducer.reduce_(grads)

        params = dict(net.named_parameters())
        return train(net, net, average, comm.rank)

    return simulate(size, rank)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *in_full({"bucket_cap_mb": 0.05}),
        {"bucket_cap_mb": 0.01, "jitter": 1},
        *in_full({"gradient_as_bucket_view": True}),
        {"static_graph": True, "bucket_cap_mb": 0.05},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("granularity", tiers(["layer", "model"], ["layer"]))
def test_equals_simulation(granularity, options):
    size = 3 if "jitter" in options else 2
    with warnings.catch_warnings():
        results = run_ranks(size, by_hook, "topk", 0.02, granularity, options)
    for mine, theirs in zip(by_simulation("topk", 0.02, granularity, size), results, strict=True):
        assert same(mine, theirs)


def held(rank: int, held: bool) -> tuple[list[Tensor], int]:
    """Train as over NCCL, or not, and return the weights and how often a gradient was exchanged within backward."""
    Session.over_nccl = property(lambda session: held)
    Session.launching = Session.launched = lambda *_: None
    enqueue, early = GradientExchanger.enqueue, []

    def watched(thread: GradientExchanger, bucket: Any) -> Any:
        future = enqueue(thread, bucket)
        time.sleep(0.005)
        early.append(bool(thread._step.buckets) or thread.reducer.comm.sent_bytes > sent[0])
        return future

    def at_end(thread: GradientExchanger) -> None:
        end(thread)
        sent[0] = thread.reducer.comm.sent_bytes

    sent, end = [0], GradientExchanger._end_of_backward
    GradientExchanger.enqueue, GradientExchanger._end_of_backward = watched, at_end
    weights = by_hook(rank, "topk", 0.02, "layer", {"find_unused_parameters": True, "bucket_cap_mb": 0.01})
    return weights, sum(early)


@later
def test_where_backward_has_collectives_ours_come_after_them():
    """NCCL wants one order. The result is the same to the last bit."""
    alone, together = run_ranks(2, held, True), run_ranks(2, held, False)
    assert [early for _, early in alone] == [0, 0]
    assert all(early > 0 for _, early in together)
    for mine, theirs in zip(alone, together, strict=True):
        assert same(mine[0], theirs[0])


def together_over_nccl(rank: int) -> tuple[list[str], bool]:
    """Train two models in one backward pass as over NCCL, and then one of them alone."""
    Session.over_nccl = property(lambda session: True)
    Session.launching = Session.launched = lambda *_: None
    models = [DistributedDataParallel(nn.Linear(30, 30)) for _ in range(2)]
    exchangers, calls = [exchange_gradients(each, method("topk")) for each in models], list[str]()
    enqueue, submit = GradientExchanger.enqueue, GradientExchanger._submit

    def noted(call: Any, name: str) -> Any:
        return lambda self, bucket: (calls.append(name), call(self, bucket))[1]

    GradientExchanger.enqueue, GradientExchanger._submit = noted(enqueue, "arrives"), noted(submit, "goes")
    both = models[0](torch.ones(1, 30)) + models[1](torch.ones(1, 30))
    both.sum().backward()
    exchangers[1].close()
    calls.append("alone")
    models[0](torch.ones(1, 30)).sum().backward()
    return calls, exchangers[0].reductions == 2


def test_gradients_of_two_models_are_exchanged_one_after_the_other():
    """Two threads would launch on two communicators in any order."""
    for calls, reduced in run_ranks(2, together_over_nccl):
        assert calls == ["arrives", "arrives", "goes", "goes", "alone", "arrives", "goes"]
        assert reduced


def before_backward(rank: int) -> str:
    """Rank 1 fails before the first backward pass, over NCCL."""
    Session.over_nccl = property(lambda session: True)
    Session.free_device = lambda session: None
    ddp = DistributedDataParallel(nn.Linear(30, 30))
    exchanger = exchange_gradients(ddp, method("topk"))
    if rank == 1:
        exchanger.session.fail(ValueError("a broken image"))
    deadline = time.monotonic() + 20
    while exchanger.session.error is None and time.monotonic() < deadline and rank == 0:
        time.sleep(0.05)
    return str(exchanger.session.error)


def test_a_failure_before_the_first_backward_pass_is_seen():
    assert "a broken image" in run_ranks(2, before_backward)[0]


class Stream:
    """Stands in for the thread's stream, and for its event: busy for some queries, then done."""

    def __init__(self, busy: int) -> None:
        self.busy, self.queries = busy, 0

    def record_event(self) -> Any:
        return self

    def query(self) -> bool:
        self.queries += 1
        return self.queries > self.busy


def queried(rank: int) -> tuple[int, int]:
    ddp = DistributedDataParallel(nn.Linear(30, 30))
    session = exchange_gradients(ddp, method("topk")).session
    counts = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "over_nccl", property(lambda self: True))
        for _ in range(2):
            stream = Stream(busy=2)
            session.launching()
            session.launched(stream)
            for _ in range(6):  # as after half a second in which nothing came
                session.look()
            counts.append(stream.queries)
    return counts[0], counts[1]


def test_an_idle_device_is_left_alone():
    """A query from another thread breaks a graph that is captured meanwhile."""
    assert run_ranks(1, queried) == [(3, 3)]


def failing(rank: int) -> tuple[str, list[bool]]:
    ddp = DistributedDataParallel(nn.Linear(30, 30))
    thread = exchange_gradients(ddp, method("topk"))
    freed, backward_has_ended = [], threading.Event()

    def broken(*args: Any) -> None:
        raise KeyError("mine")

    thread.reducer.reduce_segment_ = broken
    # Backward must not wait for this, because an abort may take until the group's timeout.
    thread._worker._free = lambda: freed.append(backward_has_ended.wait(10))
    try:
        ddp(torch.ones(1, 30)).sum().backward()
    except KeyError as error:
        text = str(error)
    backward_has_ended.set()
    deadline = time.monotonic() + 10
    while not freed and time.monotonic() < deadline:
        time.sleep(0.01)
    return text, freed


def test_a_failure_in_the_thread_frees_the_device():
    """Otherwise a thread that reads a tensor waits for kernels that wait for peers, until the watchdog ends this."""
    assert run_ranks(1, failing) == [("'mine'", [True])]


@one_in(2)
@pytest.mark.parametrize("rehearsal", tiers([False, True], [False]))
@pytest.mark.parametrize("name", tiers(REPRESENTATIVES, ["topk", "signsgd"]))
def test_every_method_equals_simulation(name, rehearsal):
    results = run_ranks(2, by_hook, name, 0.02, "layer", {"rehearsal": rehearsal})
    for mine, theirs in zip(by_simulation(name, 0.02, "layer", 2), results, strict=True):
        assert same(mine, theirs)


@pytest.mark.parametrize(
    "name", tiers([name for name in REPRESENTATIVES if METHODS[name].traits.exact is not None], ["topk"])
)
def test_full_density_equals_stock_ddp(name):
    stock = run_ranks(2, by_hook, None, 1.0, "bucket", {})
    ours = run_ranks(2, by_hook, name, 1.0, "bucket", {})
    assert same(stock[0], stock[1])
    for weights in ours:
        assert same(stock[0], weights)


def unused(rank: int, find: bool) -> tuple[float, float, int]:
    """Branch b is used by both ranks, by rank 0 only, and by no rank, in turn. Gradients are never set to None."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, use_b: bool) -> Tensor:
            y = net["a"](x)
            return net["b"](y) if use_b else y

    ddp = DistributedDataParallel(Both(), find_unused_parameters=find)
    reducer = attach(ddp, "topk", density=0.02, granularity="model")
    given = torch.zeros(())
    received = torch.zeros(())
    for step in range(9):
        use_b = step % 3 == 0 or (step % 3 == 1 and rank == 0)
        used = [net["a"], net["b"]] if use_b else [net["a"]]
        # The gradients that backward will produce, without DDP.
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        y = net["b"](net["a"](x)) if use_b else net["a"](x)
        params = [param for module in used for param in module.parameters()]
        grads = torch.autograd.grad(y.pow(2).mean(), params)
        given = given + sum(grad.double().sum() for grad in grads)
        before = [param.grad.clone() if param.grad is not None else None for param in net["b"].parameters()]
        for param in net.parameters():
            if param.grad is not None and (use_b or param in set(net["a"].parameters())):
                param.grad.zero_()  # if b is not used, its stale gradient stays
        ddp(x, use_b).pow(2).mean().backward()
        got = [param.grad for param in net.parameters()]
        if step % 3 == 2:  # no rank used b: DDP leaves its gradients as they were, so nothing arrived
            assert all(torch.equal(a, b) for a, b in zip(before, [p.grad for p in net["b"].parameters()], strict=True))
            got = [param.grad for param in net["a"].parameters()]
        received = received + sum(grad.double().sum() for grad in got)
    kept = sum(value.double().sum() for value in reducer.state_dict()["elements"]["residual"].values())
    return given.item(), received.item(), kept.item()


def test_parameters_that_come_and_go_lose_nothing():
    (given0, received, kept0), (given1, received1, kept1) = run_ranks(2, unused, True)
    assert received == received1
    assert given0 + given1 == pytest.approx(2 * received + kept0 + kept1, rel=1e-5)
    assert abs(kept0) > 1e-3, "otherwise there was nothing to lose"


def communication_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning_sparse"]


def two_models(rank: int) -> list[bool]:
    models = []
    outcomes = []
    for name in ("topk", "dense"):
        net = Net()
        models.append(DistributedDataParallel(net))
        attach(models[-1], name)
        outcomes.append(all(torch.isfinite(w).all() for w in train(net, models[-1], lambda: None, rank)))
    outcomes.append(len(communication_threads()) == 2)
    outcomes.append(all(thread.daemon for thread in communication_threads()))
    groups = len(dist.distributed_c10d._world.pg_map)
    models.clear()
    gc.collect()
    return [*outcomes, not communication_threads(), len(dist.distributed_c10d._world.pg_map) == groups - 2]


def test_two_models_in_one_process_and_nothing_left_when_they_go():
    assert run_ranks(2, two_models) == [[True] * 6] * 2


def one_after_the_other(rank: int) -> list[int]:
    steps = []
    for name in ("topk", "dense", "topk"):
        net = Net()
        ddp = DistributedDataParallel(net)
        reducer = attach(ddp, name)
        train(net, ddp, lambda: None, rank)
        steps.append(reducer.step)
        if rank == 0:  # ranks need not let go at the same time
            del ddp
            gc.collect()
    return steps


def gan_of_two_models(rank: int, how: str) -> tuple[list[str], int]:
    messages = Messages()
    generator, discriminator = (DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
    models = generator, discriminator
    before = len(_global_optimizer_pre_hooks)
    reducers = [attach(model, "dense" if how == "dense" else "topk", density=None) for model in models]
    first, second = (torch.optim.SGD(model.parameters(), 0.01) for model in models)
    for _ in range(4):
        second.zero_grad()
        discriminator(generator(torch.ones(2, 8)).detach()).sum().backward()
        second.step()
        first.zero_grad()
        with discriminator.no_sync() if how == "no_sync" else contextlib.nullcontext():
            discriminator(generator(torch.ones(2, 8))).sum().backward()
        first.step()
    assert [reducer.step for reducer in reducers] == [4, 4 if how == "no_sync" else 8]
    del models, generator, discriminator
    gc.collect()
    return messages.texts, len(_global_optimizer_pre_hooks) - before


@one_in(3)
@pytest.mark.parametrize("how", ["careless", "no_sync", "dense"])
def test_a_model_that_a_backward_pass_only_goes_through_is_warned_of_once(how):
    (texts, left), silent = run_ranks(2, gan_of_two_models, how)
    assert silent == ([], 0)
    assert left == 0
    assert len(texts) == (how == "careless")
    if texts:
        assert texts[0].startswith("A gradient of 'weight' that ranks exchanged for SGD was thrown away")


def warned_of(rank: int, name: str, kinds: list[Any]) -> list[str]:
    """Return the messages of steps with these optimizers; each wraps the one before, as a Lookahead does."""
    messages = Messages()
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    attach(ddp, name)
    inner: Any = ddp.parameters()
    for kind in kinds:
        inner = kind(inner)
    for _ in range(2):
        ddp(torch.ones(2, 8)).square().mean().backward()
        inner.step()
        inner.zero_grad()
    return messages.texts


class Outer(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@later
@pytest.mark.parametrize("kinds", [[torch.optim.AdamW], *in_full([torch.optim.AdamW, Outer])])
def test_an_optimizer_that_trains_badly_with_sparse_gradients_is_warned_of_once(kinds):
    (text,), silent = run_ranks(2, warned_of, "topk", kinds)
    assert text.startswith(f"{kinds[-1].__name__} takes too large steps with gradients that arrive seldom")
    assert "attach_updates" in text
    assert silent == []
    for name, others in (("int4", kinds), ("topk", [torch.optim.SGD])):
        assert run_ranks(2, warned_of, name, others) == [[], []]


def with_lbfgs(rank: int, name: str) -> str:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    attach(ddp, name)
    optimizer = torch.optim.LBFGS(ddp.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ddp(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["topk", *in_full("dense", "signsgd")])
def test_an_optimizer_that_evaluates_its_closure_twice_raises_an_error_on_all_ranks(name):
    for text in run_ranks(2, with_lbfgs, name):
        assert text.startswith("LBFGS evaluates its closure several times a step") == (name != "dense")
        assert ("attach_updates" in text) == (name == "topk")


def with_a_line_search(rank: int) -> list[float]:
    """The closure is evaluated again without a backward pass, and with an argument."""
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    reducer = attach(ddp, "topk")

    class Search(torch.optim.SGD):
        def step(self, closure: Any) -> float:
            loss = closure(0.0)
            loss.backward()
            super().step()
            with torch.no_grad():
                return float(closure(1.0))

    optimizer = Search(ddp.parameters(), 0.1)
    return [optimizer.step(lambda more: ddp(torch.ones(2, 8)).square().mean() + more) for _ in range(3)] + [
        reducer.step
    ]


def test_a_closure_that_is_evaluated_again_without_an_exchange_is_right():
    (*first, steps), second = run_ranks(2, with_a_line_search)
    assert [*first, steps] == second
    assert steps == 3
    assert first[0] > first[1] > first[2] > 1


CHANGED = "A gradient of "
LOOPS = {  # one batch each, and the start of its warning
    "a plain loop": ("backward step zero", ""),
    "accumulation": ("backward backward step zero", ""),
    "accumulation, one half within no_sync": ("backward alone step zero", ""),
    "steps by hand": ("backward by_hand zero", ""),
    "a scaler": ("scaled scaled_step zero", ""),
    "a scaler, and unscaled before": ("scaled unscale scaled_step zero", ""),
    "a penalty's gradient before the step": ("backward penalty step zero", ""),
    "clipping": ("backward clip step zero", CHANGED),
    "clipping after unscaling": ("scaled unscale clip scaled_step zero", CHANGED),
    "clipping before unscaling": ("scaled clip unscale scaled_step zero", CHANGED),
    "another tensor": ("backward replace step zero", CHANGED),
    "no gradient": ("backward zero step backward step", CHANGED),
    "zeros in place": ("backward zeros backward step zero", CHANGED),
    "as SAM does": ("backward by_hand zero backward step zero", CHANGED),
    "a step left out": ("backward zero backward step zero", CHANGED),
}


def warns(loop: str, views: bool) -> str:
    """Return the warnings of a loop of these actions. Gradients may be views of DDP's buckets."""
    messages = Messages()
    net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001, gradient_as_bucket_view=views)
    scaler = torch.amp.GradScaler("cpu")
    params = list(ddp.parameters())
    optimizer = torch.optim.SGD(params, 0.01)
    attach(ddp, "topk", density=0.1, loss_scale=scaler.get_scale if "scaled" in loop else None)
    register_optimizer_step_pre_hook(lambda *_: None)  # torch goes through a list of hooks
    for action in loop.split() * 4:
        loss = ddp(torch.ones(2, 30)).sum()
        match action:
            case "backward":
                loss.backward()
            case "alone":
                with ddp.no_sync():
                    ddp(torch.ones(2, 30)).sum().backward()
            case "scaled":
                scaler.scale(loss).backward()
            case "penalty":
                torch.autograd.grad(loss, params)
            case "step":
                optimizer.step()
            case "by_hand":
                for param in params:
                    param.data.sub_(param.grad, alpha=0.01)
            case "scaled_step":
                scaler.step(optimizer)
                scaler.update()
            case "unscale":
                scaler.unscale_(optimizer)
            case "clip":
                nn.utils.clip_grad_norm_(params, 1e-3)
            case "replace":
                params[0].grad = params[0].grad * 0
            case "zero":
                optimizer.zero_grad()
            case "zeros":
                optimizer.zero_grad(set_to_none=False)
    return "".join(CHANGED if text.startswith(CHANGED) else text for text in messages.texts)


@full
def test_a_gradient_that_no_step_takes_as_it_was_exchanged_is_warned_of():
    cases = list(itertools.product(LOOPS, (False, True)))
    (found,) = run_ranks(1, lambda _: {case: warns(LOOPS[case[0]][0], case[1]) for case in cases})
    assert found == {case: LOOPS[case[0]][1] for case in cases}


def waits(_: int, clips: bool) -> tuple[list[tuple[bool, bool]], int]:
    """Return, for each step, whether gradients wait before and after it; and the number of messages."""
    messages = Messages()
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    exchanger = exchange_gradients(ddp, method("topk", density=0.1))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        before = exchanger.gradients_wait([optimizer])
        if clips:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        optimizer.step()
        found.append((before, exchanger.gradients_wait([optimizer])))
    return found, len(messages.texts)


@pytest.mark.parametrize("clips", [True, *in_full(False)])
def test_gradients_wait_for_their_step_even_after_a_warning(clips):
    assert run_ranks(1, waits, clips) == [([(True, False)] * 3, int(clips))]


def accumulates_and_clips(rank: int, no_sync: bool) -> list[str]:
    messages = Messages()
    ddp = DistributedDataParallel(nn.Linear(30, 30))
    attach(ddp, "topk", density=0.1, clip_norm=0.1)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for _ in range(3):
        with ddp.no_sync() if no_sync else contextlib.nullcontext():
            ddp(torch.ones(2, 30)).sum().backward()
        ddp(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return messages.texts


@later
def test_clipping_of_what_ranks_have_exchanged_is_warned_of_once():
    (text,), nothing = run_ranks(2, accumulates_and_clips, False)
    assert text.startswith("clip_norm clips the gradient of 'bias' together with the exchanged gradient of an earlier")
    assert nothing == []
    assert run_ranks(2, accumulates_and_clips, True) == [[], []]


def accumulates_and_votes(rank: int, name: str, no_sync: bool) -> list[str]:
    """Throw away a first gradient, and clip the others, which is right if ranks vote."""
    messages = Messages()
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    attach(ddp, name)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    for _ in range(3):
        with ddp.no_sync() if no_sync else contextlib.nullcontext():
            ddp(torch.ones(2, 4)).sum().backward()
        ddp(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return messages.texts


@later
@pytest.mark.parametrize("name", ["signum", *in_full("signsgd")])
def test_the_vote_of_an_earlier_pass_that_wins_again_is_warned_of_once(name):
    (text,), nothing = run_ranks(2, accumulates_and_votes, name, False)
    assert text.startswith("Ranks vote on the gradient of 'bias' together with the exchanged gradient of an earlier")
    assert nothing == []
    assert run_ranks(2, accumulates_and_votes, name, True) == [[], []]


def encoder_and_decoder(rank: int, together: bool) -> list[str]:
    """The gradient of the decoder alone overflows, in the second step."""
    messages = Messages()
    both = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    models = [DistributedDataParallel(nn.Sequential(*both))] if together else [*map(DistributedDataParallel, both)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for each in models:
        attach(each, "topk", density=0.1, loss_scale=scaler.get_scale)
    optimizer = torch.optim.SGD(both.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        for each in models:
            x = each(x)
        with both[1].bias.register_hook(lambda grad: grad * math.inf) if step == 1 else contextlib.nullcontext():
            scaler.scale(x.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return messages.texts


@later
def test_a_step_that_a_scaler_skips_for_another_model_is_warned_of():
    (text,), nothing = run_ranks(2, encoder_and_decoder, False)
    assert text.startswith("A GradScaler skips the step of SGD, but the gradient of 'weight' was exchanged")
    assert nothing == []
    assert run_ranks(2, encoder_and_decoder, True) == [[], []]


def accumulates_and_overflows(rank: int, no_sync: bool) -> list[str]:
    """The second backward pass of the second step has an infinity on rank 1."""
    messages = Messages()
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    reducer = attach(ddp, "topk", density=0.1, loss_scale=scaler.get_scale)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(3):
        with ddp.no_sync() if no_sync else contextlib.nullcontext():
            scaler.scale(ddp(torch.ones(2, 4)).sum()).backward()
        factor = math.inf if (rank, step) == (1, 1) else 1.0
        scaler.scale(ddp(torch.ones(2, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert reducer.skipped == 1
    return messages.texts


def test_entries_of_an_earlier_pass_that_a_skipped_step_loses_are_warned_of():
    (text,), nothing = run_ranks(2, accumulates_and_overflows, False)
    assert "waited for this step, so its entries are lost. Call the model within no_sync()" in text
    assert nothing == []
    assert run_ranks(2, accumulates_and_overflows, True) == [[], []]


def trial_after_a_trial(rank: int) -> float:
    comm = ProcessGroupComm()
    grads = {"w": torch.full((8,), math.nan if rank else 1.0)}
    with pytest.raises(NonFiniteGradient, match="on rank 1 at step 0"):
        Reducer(method("topk", density=0.5), comm).reduce_(grads)
    again, grads = Reducer(method("topk", density=1.0), ProcessGroupComm()), {"w": torch.full((8,), rank + 1.0)}
    time.sleep(rank)  # rank 0 waits, and looks for failures
    again.reduce_(grads)
    return float(grads["w"][0])


def test_a_reducer_after_another_one_that_met_a_nan_does_not_end_by_it():
    assert run_ranks(2, trial_after_a_trial) == [1.5, 1.5]


@full
def test_attach_again_and_again():
    assert run_ranks(2, one_after_the_other) == [[STEPS] * 3] * 2


def group_of_one(rank: int) -> float:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    net = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(net, process_group=alone)
    attach(ddp, "dense")
    ddp(torch.full((1, 3), float(rank + 1))).sum().backward()
    return float(net.weight.grad[0, 0])


def test_ddps_own_process_group_is_respected():
    assert run_ranks(2, group_of_one) == [1.0, 2.0]


def accumulated(rank: int, name: str | None, reentrant: bool) -> list[Tensor]:
    net = nn.Sequential(*[nn.Linear(30, 30) for _ in range(6)])
    torch.manual_seed(0)
    for param in net.parameters():
        nn.init.normal_(param, std=0.1)
    body = Checkpointed(net) if reentrant else net
    ddp = DistributedDataParallel(body, bucket_cap_mb=0.008)
    if name is not None:
        attach(ddp, name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(3, 2, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        if not reentrant:
            with ddp.no_sync():
                ddp(x[0]).pow(2).sum().backward()
                ddp(x[1]).pow(2).sum().backward()
        ddp(x[2].requires_grad_()).pow(2).sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def copies(rank: int, name: str | None) -> list[Tensor]:
    """Return gradients of copies of a model that is in training, as plain data parallelism makes them."""
    ddp = DistributedDataParallel(Power())
    if name is not None:
        attach(ddp, name, density=0.25)
    ddp(torch.full((8,), 1.0 + rank)).sum().backward()
    ddp.zero_grad()
    file = io.BytesIO()
    torch.save(ddp, file)
    found = []
    for copied in (
        copy.deepcopy(ddp),
        torch.load(io.BytesIO(file.getvalue()), weights_only=False),
        torch.optim.swa_utils.AveragedModel(ddp).module,
    ):
        copied(torch.full((8,), 1.0 + rank)).sum().backward()
        found.append(copied.module.weight.grad)
    ddp(torch.full((8,), 1.0 + rank)).sum().backward()
    assert int(ddp.module.weight.grad.count_nonzero()) == (8 if name is None else 2)
    return found


def test_a_model_can_be_copied_saved_and_averaged_as_a_whole():
    stock, ours = (run_ranks(2, copies, name) for name in (None, "topk"))
    assert same(stock[0], ours[0])
    assert same(stock[0], ours[1])


class Power(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 9.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).pow(2)


def with_graphs(rank: int, methods: list[str]) -> dict[str, tuple[Tensor, bool]]:
    """As in torch's test of create_graph. There stock DDP supports only one parameter."""
    found = {}
    for name in (None, "dense", *methods):
        net = Power()
        ddp = DistributedDataParallel(net)
        if name is not None:
            attach(ddp, method(name, **small(name)))
        for _ in range(2):
            net.zero_grad()
            ddp(torch.full((8,), 1.0 + rank)).sum().backward(create_graph=True)
        found[name or "ddp"] = net.weight.grad.detach(), net.weight.grad.requires_grad
        net.weight.grad = None  # a cycle
    return found


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    "methods",
    [["topk"], pytest.param([name for name in REPRESENTATIVES if name not in ("dense", "topk")], marks=full)],
    ids=["quick", "others"],
)
def test_backward_may_make_a_graph(methods):
    first, second = run_ranks(2, with_graphs, methods)
    assert torch.equal(first["ddp"][0], first["dense"][0])
    for name, (grad, requires_grad) in first.items():
        assert requires_grad
        assert torch.equal(grad, second[name][0])


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("reentrant", [False, *in_full(True)], ids=["no_sync", "reentrant checkpointing"])
def test_several_backward_passes_for_a_step(reentrant):
    stock = run_ranks(2, accumulated, None, reentrant)
    ours = run_ranks(2, accumulated, "dense", reentrant)
    assert same(stock[0], ours[0])
    assert same(ours[0], ours[1])


def loader(rank: int) -> float:
    net = nn.Linear(6, 3)
    ddp = DistributedDataParallel(net)
    attach(ddp, "topk", density=0.3)
    data = torch.utils.data.TensorDataset(torch.randn(16, 6))
    total = 0.0
    for _ in range(2):  # the second round forks workers while the communication thread lives
        for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
            ddp(x).sum().backward()
            total += x.sum().item()
    return total


@full
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker:UserWarning")  # on one processor
def test_forked_data_loader_workers_while_the_thread_lives():
    for total in run_ranks(2, loader):
        assert isinstance(total, float)


def warmed_up(rank: int) -> list[int]:
    net = nn.Linear(100, 10, bias=False)
    ddp = DistributedDataParallel(net)
    reducer = attach(ddp, "topk", density=0.01, density_warmup=[1.0, 0.1], density_warmup_steps=2)
    counts = []
    for _ in range(5):
        net.zero_grad()
        ddp(torch.ones(4, 100)).pow(2).sum().backward()
        counts.append(int(net.weight.grad.count_nonzero()))
    assert reducer.density == 0.01
    return counts


def with_disabled_scaler(rank: int) -> str:
    net = nn.Linear(4, 4)
    ddp, scaler = DistributedDataParallel(net, bucket_cap_mb=0), torch.amp.GradScaler("cpu", enabled=False)
    attach(ddp, "topk", density=0.5, loss_scale=scaler.get_scale)
    with pytest.raises(NonFiniteGradient) as error:
        scaler.scale(ddp(torch.full((2, 4), math.nan if rank else 1.0)).sum()).backward()
    return str(error.value)


def test_a_gradient_scaler_that_is_disabled_skips_no_step():
    """Its gradients would be NaN after a skipped step, and it would step with them."""
    assert all("is not finite on rank 1 at step 0" in text for text in run_ranks(2, with_disabled_scaler))


def test_warm_up_by_steps():
    first, second = run_ranks(2, warmed_up)
    assert first == second
    assert first[:2] == [1000, 1000]
    assert all(100 <= count <= 200 for count in first[2:4])
    assert 10 <= first[4] <= 20


def attached_in(rank: int, mode: Any) -> list[Tensor]:
    net = Net()
    ddp = DistributedDataParallel(net)
    with mode():
        attach(ddp, "topk", density=0.1)
    return train(net, ddp, lambda: None, rank)


@full
def test_it_may_be_attached_in_inference_mode():
    first, second = run_ranks(2, attached_in, torch.inference_mode, backend="gloo")
    usual, _ = run_ranks(2, attached_in, torch.no_grad, backend="gloo")
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, usual))
