"""Errors for mistakes after `attach_updates` that would make ranks drift apart, and none for valid code."""

import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import attach, attach_updates, exchange_pending, method
from lightning_sparse.hooks import UpdateExchanger, misuse, update_exchange
from lightning_sparse.hooks.optimizer_kinds import LAZY, reason_for_gradients
from lightning_sparse.hooks.update_exchange import check_updates
from tests.integration.failing import caught
from tests.integration.trainers import Lookahead, Messages
from tests.processes import run_ranks
from tests.support.tiers import full, in_full, one_in
from tests.support.vectors import flat


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def gradients(net: nn.Module, step: int) -> None:
    net.zero_grad()
    torch.manual_seed(10 * step + dist.get_rank())
    net(torch.randn(4, 8)).square().mean().backward()


def temporary_container(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters())
    attach_updates(nn.ModuleList([net]), optimizer)
    gradients(net, 0)
    return caught(optimizer.step)


def second_optimizer(net: nn.Module) -> Any:
    first = torch.optim.AdamW(net.parameters())
    attach_updates(net, first)
    gradients(net, 0)
    first.step()
    return caught(torch.optim.SGD(net[2].parameters(), 0.1).step)


def second_optimizer_in_the_list(net: nn.Module) -> Any:
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(net.parameters())]
    attach_updates(net, optimizers)
    gradients(net, 0)
    optimizers[0].step()
    optimizers[0] = torch.optim.SGD(net[2].parameters(), 0.1)
    return caught(optimizers[0].step)


def late_backbone(net: nn.Module) -> Any:
    net[0].requires_grad_(False)
    attach_updates(net, torch.optim.AdamW(net[2].parameters()))
    net[0].requires_grad_(True)
    gradients(net, 0)
    return caught(torch.optim.AdamW(net[0].parameters()).step)


def shared_memory(net: nn.Module) -> Any:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight.data = net[0].weight.data
    return caught(lambda: attach_updates(net, torch.optim.AdamW(net.parameters())))


def earlier_optimizer(net: nn.Module) -> Any:
    first, second = torch.optim.AdamW(net.parameters()), torch.optim.SGD(net.parameters(), 0.1)
    for optimizer in (first, second):
        attach_updates(net, optimizer)
        gradients(net, 0)
        optimizer.step()
    gradients(net, 1)
    return caught(first.step)


def within_ddp(net: nn.Module) -> Any:
    ddp = DistributedDataParallel(net)
    attach_updates(ddp.module, torch.optim.AdamW(net.parameters()))
    return caught(lambda: ddp(torch.zeros(1, 8)))


def within_ddp_later(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters())
    attach_updates(net, optimizer)
    gradients(net, 0)
    optimizer.step()
    ddp = DistributedDataParallel(net)
    return caught(lambda: ddp(torch.zeros(1, 8)))


def part_within_ddp(net: nn.Module) -> Any:
    net[0] = DistributedDataParallel(net[0])
    return caught(lambda: attach_updates(net, torch.optim.AdamW(net.parameters())))


def without_values(net: nn.Module) -> Any:
    net.append(nn.Linear(4, 4, device="meta").requires_grad_(False))
    return caught(lambda: attach_updates(net, torch.optim.AdamW([*net[0].parameters(), *net[2].parameters()])))


class Wrapper(torch.optim.Optimizer):
    """Like accelerate's wrapper, does not call torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def wrapped(net: nn.Module) -> Any:
    return caught(lambda: attach_updates(net, Wrapper(torch.optim.AdamW(net.parameters()))))


def no_optimizer(net: nn.Module) -> Any:
    return caught(lambda: attach_updates(net, net.parameters()))  # type: ignore[arg-type]


def replaced_parameters(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters())
    attach_updates(net, optimizer)
    net[2] = nn.Linear(16, 4)
    optimizer.param_groups[0]["params"][2:] = net[2].parameters()
    gradients(net, 0)
    return caught(optimizer.step)


@pytest.mark.parametrize(
    ("mistake", "kind", "said"),
    [
        (temporary_container, "RuntimeError", "the module that attach_updates got is gone"),
        (second_optimizer, "RuntimeError", "A SGD that attach_updates did not get has stepped '2.weight'"),
        (second_optimizer_in_the_list, "RuntimeError", "A SGD that attach_updates did not get has stepped '2.weight'"),
        (late_backbone, "RuntimeError", "A AdamW that attach_updates did not get has stepped '0.weight' of the Seq"),
        (shared_memory, "ValueError", "'0.weight' and '1.weight' are two parameters that share memory"),
        (earlier_optimizer, "RuntimeError", "AdamW steps, but the model or a part of it was attached anew, without it"),
        (within_ddp, "RuntimeError", "DistributedDataParallel is around the Sequential that attach_updates got"),
        (without_values, "ValueError", "'3.weight' of the Sequential is on 'meta', so ranks cannot agree on its"),
        (part_within_ddp, "TypeError", "'0' of the Sequential is a DistributedDataParallel: its gradients would be"),
        (within_ddp_later, "RuntimeError", "DistributedDataParallel is around the Sequential that attach_updates got"),
        (wrapped, "TypeError", "Wrapper calls no hooks of torch around its steps, so its updates cannot be exchanged"),
        (no_optimizer, "TypeError", "attach_updates(optimizer=generator(...)): give an optimizer, or a list"),
        (replaced_parameters, "ValueError", "AdamW no longer steps '2.weight', '2.bias', which it stepped when"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_mistake_is_an_error_on_all_ranks(mistake, kind, said):
    for found in run_ranks(2, lambda _: mistake(network())):
        assert found[0] == kind, found
        assert said in found[1]


class Derived(torch.optim.AdamW):
    """Torch calls its hooks around this `step`, and around that of AdamW if there has been an AdamW."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.9)  # a change before and one after that step
            super().step()
            self.param_groups[0]["params"][1].add_(0.01 * (1 + dist.get_rank()))


def derived(net: nn.Module) -> Any:
    torch.optim.AdamW(nn.Linear(1, 1).parameters())
    return net, Derived(net.parameters(), 0.01)


class Around(torch.optim.Optimizer):
    """Takes steps through another optimizer, as SAM does, and has its parameters."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__([param for group in base.param_groups for param in group["params"]], {})

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


def around(net: nn.Module) -> Any:
    return net, Around(torch.optim.AdamW(net.parameters(), 0.01))


class Sharp(torch.optim.Optimizer):
    """Like SAM, changes weights on each rank while the closure is evaluated, and restores them before the step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        before = [param.clone() for param in params]
        for param in params:
            param.add_(1.0 + dist.get_rank())
        with torch.enable_grad():
            loss: Tensor = closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old - 0.01 * param.grad.sign())
        return loss


def sharp(_: int) -> tuple[Tensor, int]:
    net = network()
    optimizer = Sharp(net.parameters())
    reducer = attach_updates(net, optimizer, density=1.0)
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            gradients(net, number)
            return torch.tensor(0.0)

        optimizer.step(closure)
    return flat(net), reducer.step


def test_weights_that_an_optimizer_changes_before_its_closure_are_its_own():
    (first, steps), (second, _) = run_ranks(2, sharp)
    assert torch.equal(first, second)
    assert steps == 3
    assert (first - flat(network())).abs().max() < 0.03 + 1e-6, "three steps of 0.01, and nothing of what went back"


class Own(torch.optim.AdamW):
    """Is a subclass, and so not one of torch's optimizers."""


def with_closure(by_name: bool, kind: Any) -> tuple[Tensor, int]:
    net = network()
    optimizer = kind(net.parameters(), 0.001)
    reducer = attach_updates(net, optimizer, density=0.1)
    for number in range(4):

        def closure(number: int = number) -> Tensor:
            with torch.no_grad():
                net[0].weight.mul_(0.5)
            gradients(net, number)
            return torch.tensor(float(number))

        found = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert found == number
    assert net[0].weight.abs().max() < network()[0].weight.abs().max() / 8, "halved four times, and not put back"
    return flat(net), reducer.step


@one_in(2)
@pytest.mark.parametrize(("by_name", "kind"), [(False, torch.optim.AdamW), (True, torch.optim.AdamW), (True, Own)])
def test_what_a_closure_does_to_weights_is_no_update(by_name, kind):
    (first, steps), (second, _) = run_ranks(2, lambda _: with_closure(by_name, kind))
    assert torch.equal(first, second)
    assert steps == 4


def lookahead(net: nn.Module) -> Any:
    return net, Lookahead(torch.optim.AdamW(net.parameters(), 0.01))


def lookahead_with_schedule(net: nn.Module) -> Any:
    """The schedule has put a method in the place of `step` before torch calls hooks around it."""
    optimizer = Lookahead(torch.optim.AdamW(net.parameters(), 0.01))
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return net, optimizer


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager"), torch.optim.AdamW(net.parameters(), 0.01)


def compiled_step(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    return net, optimizer, torch.compile(lambda: optimizer.step(), backend="eager")


def trained(made: Any, inside: bool) -> tuple[Tensor, Any]:
    net = network()
    model, optimizer, *step = made(net)
    reducer = attach_updates(model, optimizer.base if inside else optimizer, density=0.5)
    del model
    for number in range(3):
        gradients(net, number)
        (step[0] if step else optimizer.step)()
    return flat(net), reducer.step


@pytest.mark.parametrize(
    ("made", "inside"),
    [
        *((derived, False), (around, False), (around, True)),
        *in_full((compiled, False), (compiled_step, False)),
        *((lookahead, False), (lookahead_with_schedule, False)),
    ],
    ids=lambda case: getattr(case, "__name__", str(case)),
)
def test_what_is_right_goes_on(made, inside):
    (first, steps), (second, _) = run_ranks(2, lambda _: trained(made, inside))
    assert torch.equal(first, second)
    assert steps == 3, "one exchange a step"
    assert (first - flat(network())).abs().max() > 0.01


class OptimizedModule(nn.Module):
    """Like that of torch.compile."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def attached_anew(_: int, how: str) -> Tensor:
    net = network()
    first = torch.optim.AdamW(net.parameters())
    attach_updates(net, first)
    if how != "gradients at once":
        gradients(net, 0)
        first.step()
    second = torch.optim.SGD(net.parameters(), 0.1)
    trained = net
    if how == "updates":
        attach_updates(net, second)
    else:
        trained = DistributedDataParallel(OptimizedModule(net) if how == "gradients, compiled" else net)
        attach(trained, "topk")
        assert misuse.attached(net) is None
    for step in (1, 2):
        torch.manual_seed(10 * step + dist.get_rank())
        second.zero_grad()
        trained(torch.randn(4, 8)).square().mean().backward()
        second.step()
    return flat(net)


def to_gradients(_: int, of_larger: bool) -> list[bool]:
    """Train by updates, then by gradients; return when the momentum is equal on all ranks, and whether weights are."""
    net, found = network(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    larger = nn.Sequential(net) if of_larger else net
    reducer = attach_updates(larger, optimizer, density=0.1)
    trained = net
    for step in range(6):
        if step == 3:
            trained = DistributedDataParallel(net)
            reducer = attach(trained, "int4")
            assert reducer.comm.sent_bytes == 0
        if step in (2, 3):
            moments = [optimizer.state[param]["momentum_buffer"].flatten() for param in net.parameters()]
            found.append(equal_on_ranks(torch.cat(moments)))
        gradients(trained, step)
        optimizer.step()
    assert reducer.step == 3
    return [*found, equal_on_ranks(flat(net))]


def equal_on_ranks(own: Tensor) -> bool:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return all(torch.equal(own, other) for other in found)


@pytest.mark.parametrize("of_larger", [False, *in_full(True)])
def test_an_optimizer_of_updates_may_go_on_with_gradients(of_larger):
    """Its states, which differ among ranks, become their means. Otherwise equal gradients would make other steps."""
    assert run_ranks(2, to_gradients, of_larger) == [[False, True, True]] * 2


def in_stages(_: int, first: str, second: str) -> tuple[int, int, bool]:
    """Train one module, and then another one that shares parameters with it; both exist to the end."""
    net, found = network(), []
    parts = {"whole": net, "part": net[0], "wrapper": nn.Sequential(net)}
    for step, name in enumerate((first, second)):
        optimizer = torch.optim.AdamW(parts[name].parameters(), 0.01)
        reducer = attach_updates(parts[name], optimizer, density=0.1)
        for number in (2 * step, 2 * step + 1):
            gradients(net, number)
            optimizer.step()
        found.append(reducer.step)
    return *found, equal_on_ranks(flat(net))


@pytest.mark.parametrize(
    ("first", "second"), [("part", "whole"), *in_full(("whole", "part"), ("whole", "wrapper"), ("wrapper", "whole"))]
)
def test_a_module_that_shares_parameters_with_an_earlier_one_may_be_attached(first, second):
    assert run_ranks(2, in_stages, first, second) == [(2, 2, True)] * 2


def a_part_anew(_: int, how: str) -> Any:
    """Attach a part of a model anew; step the optimizer of the rest, whose parameters are not exchanged now."""
    net = network()
    rest, part = (torch.optim.SGD(net[i].parameters(), 0.1) for i in (0, 2))
    attach_updates(net, [rest, part], density=0.1)
    for step in range(2):
        gradients(net, step)
        rest.step()
        part.step()
    kept = []
    for each in how.split(", "):
        if each == "updates":
            attach_updates(net[2], torch.optim.SGD(net[2].parameters(), 0.1), density=0.1)
        elif each == "updates of a probe":
            attach_updates(nn.Sequential(net[0]), torch.optim.SGD(net[0].parameters(), 0.1), density=0.1)
        else:
            kept.append(DistributedDataParallel(net[2] if each == "gradients" else net[0]))
            attach(kept[-1], density=0.1)
    if how.startswith("gradients"):
        part.step()  # DDP exchanges the gradients of its parameters
    return caught(rest.step)


@pytest.mark.parametrize("how", ["updates, gradients", *in_full("updates", "gradients", "updates of a probe")])
def test_the_rest_of_a_model_does_not_train_on_without_an_exchange(how):
    """The module of "updates of a probe" is gone at once."""
    for kind, text, _ in run_ranks(2, a_part_anew, how):
        assert kind == "RuntimeError"
        assert "SGD steps, but the model or a part of it was attached anew, without it" in text


@full
def test_a_model_may_move_to_gradients_part_by_part():
    assert [kind for kind, *_ in run_ranks(2, a_part_anew, "gradients, gradients of the rest")] == ["no error"] * 2


def fine_tuned(_: int) -> bool:
    """Exchange updates, then the gradients of a layer that is new."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    attach_updates(net, optimizer, density=0.1)
    gradients(net, 0)
    optimizer.step()
    net.requires_grad_(False)
    net.append(nn.Linear(4, 4))
    trained = DistributedDataParallel(net)
    attach(trained, density=0.5)
    optimizer = torch.optim.SGD(net[3].parameters(), 0.1)
    for step in range(2):
        gradients(trained, step)
        optimizer.step()
    return equal_on_ranks(flat(net))


@full
def test_a_new_layer_of_an_attached_model_may_be_trained_by_gradients():
    assert run_ranks(2, fine_tuned) == [True] * 2


class Fails(torch.optim.SGD):
    """Its step may fail after it has changed a weight, as without memory for the others."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError
        return super().step(closure)


def half_a_step(rank: int, overlap: Any) -> tuple[list[str], bool]:
    """Train, and let one step of rank 1 fail."""
    net, said = network(), list[str]()
    optimizer = Fails(net.parameters(), 0.1)
    attach_updates(net, optimizer, density=0.1, overlap=overlap)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(update_exchange.log, "warning", said.append)
        for step in range(4):
            gradients(net, step)
            optimizer.fails = rank == 1 and step == 1
            if optimizer.fails:
                with pytest.raises(MemoryError):
                    optimizer.step()
                optimizer.fails = False
            optimizer.step()
    exchange_pending(optimizer)
    return said, equal_on_ranks(flat(net))


def test_a_step_that_failed_after_it_had_changed_weights_is_told():
    for rank, (said, equal) in enumerate(run_ranks(2, half_a_step, "none")):
        assert not equal
        assert [
            text for text in said if "has ended a step on rank 1, after weights of its Fails had changed" in text
        ] == said
        assert len(said) == rank


@full
def test_a_pending_exchange_includes_the_change_of_a_step_that_failed():
    assert run_ranks(2, half_a_step, "next_step") == [([], True)] * 2


def one_of_two_fails(_: int) -> list[str]:
    """One optimizer fails before it changes weights; the other one takes its steps."""
    net, said = network(), list[str]()
    first, second = (Fails(net[i].parameters(), 0.1) for i in (0, 2))
    attach_updates(net, [first, second], density=0.1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(update_exchange.log, "warning", said.append)
        for step in range(3):
            gradients(net, step)
            if step == 1:
                hook = first.register_step_pre_hook(lambda *_: exec("raise MemoryError"))
                with hook, pytest.raises(MemoryError):
                    first.step()
            second.step()
            first.step()
    return said


@full
def test_a_step_that_failed_before_it_changed_weights_is_not_told():
    assert run_ranks(2, one_of_two_fails) == [[]] * 2


def goes_on_after_nan(rank: int) -> list[str]:
    ddp = DistributedDataParallel(network())
    attach(ddp, density=0.1)

    def backward(step: int) -> None:
        (ddp(torch.ones(4, 8)).sum() * (float("nan") if step == rank == 1 else 1.0)).backward()

    found = [caught(partial(backward, step))[1] for step in range(3)]
    with torch.no_grad():
        ddp(torch.ones(4, 8))  # an evaluation works
    return found


def test_after_a_gradient_that_is_not_finite_each_forward_pass_names_it_again():
    """The error of DDP itself, "please report a bug to PyTorch", does not name the cause."""
    for first, second, third in run_ranks(2, goes_on_after_nan):
        assert not first
        assert "is not finite on rank 1 at step 1" in second
        assert third == second


def scripted(_: int) -> tuple[bool, bool]:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters())
    attach_updates(net, optimizer)
    for step in range(2):
        gradients(net, step)
        optimizer.step()
    x = torch.ones(2, 8)
    return b"lightning_sparse" in pickle.dumps(net), torch.equal(torch.jit.script(net)(x), net(x))


def hooks_of_a_compiled_model(_: int) -> list[int]:
    """A traced hook does nothing."""
    net, found = network(), []
    attach_updates(net, torch.optim.SGD(net.parameters(), 0.1))
    optimizer = torch.optim.AdamW(net.parameters())
    attach_updates(net, optimizer)  # anew
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        for step in range(3):
            gradients(net, step)
            found.append(len(net._forward_pre_hooks))
            optimizer.step()
    return found


def test_the_hook_that_looks_for_ddp_goes_from_a_compiled_model_at_the_second_exchange():
    assert run_ranks(2, hooks_of_a_compiled_model) == [[1, 1, 0]] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_a_trained_model_can_be_scripted_and_its_pickle_needs_no_package():
    assert run_ranks(2, scripted) == [(False, True)] * 2


@one_in(4)
@pytest.mark.parametrize("how", ["gradients, compiled", "updates", "gradients", "gradients at once"])
def test_a_model_can_be_attached_anew(how):
    first, second = run_ranks(2, attached_anew, how)
    assert torch.equal(first, second)


def by_hand(_: int, how: str) -> list[str]:
    net = network()
    net.extra = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([*net[0].parameters(), *net[2].parameters()])
    if how == "left alone":
        net.extra.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patched:
        said: list[str] = []
        patched.setattr(misuse.log, "warning", said.append)
        if how == "in no optimizer":  # attach_updates refuses it, a strategy does not
            UpdateExchanger(net, [optimizer], method("topk", density=0.1))
        else:
            attach_updates(net, optimizer)
        for step in range(3):
            net.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            (net(torch.randn(4, 8)) * net.extra).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                net.extra -= 0.01 * (1 if net.extra.grad is None else net.extra.grad)
    return said


@pytest.mark.parametrize("how", ["in no optimizer", "left alone"])
def test_parameters_with_gradients_that_are_changed_by_hand_are_warned_of_once(how):
    for said in run_ranks(2, by_hand, how):
        assert len(said) == (how == "in no optimizer")
        assert all(text.startswith("'extra' has gradients and has changed") for text in said)


def quantized(_: int) -> tuple[Tensor, Tensor]:
    net = network()
    net.base = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    optimizer = torch.optim.AdamW(net.parameters())
    attach_updates(net, optimizer)
    for step in range(2):
        gradients(net, step)
        optimizer.step()
    saved = io.BytesIO()
    torch.save(net, saved)  # with the hook that looks for DistributedDataParallel, before and after it has
    return torch.cat([net[0].weight.detach().flatten(), net[2].weight.detach().flatten()]), net.base.detach()


def test_frozen_parameters_of_other_dtypes_rest():
    first, second = run_ranks(2, quantized)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], torch.arange(6, dtype=torch.uint8))


class WithOwn(nn.Module):
    """A parameter and a buffer of each rank, which DistributedDataParallel is to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.bias = nn.Parameter(torch.full((4,), float(dist.get_rank())))
        self.register_buffer("seen", torch.full((2 + dist.get_rank(),), float(dist.get_rank())))
        self._ddp_params_and_buffers_to_ignore = ["bias", "seen"]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.net(x) + self.bias


def ignoring(overlap: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    model, messages = WithOwn(), Messages()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    reducer = attach_updates(model, optimizer, density=0.5, overlap=overlap)
    for number in range(3):
        gradients(model, number)
        optimizer.step()
    exchange_pending(optimizer)
    return flat(model.net), model.bias.detach(), model.seen, (reducer.step, messages.texts)


@pytest.mark.parametrize("overlap", ["none", "next_step"])
def test_what_ddp_is_to_ignore_is_each_ranks_own(overlap):
    (one, bias, seen, (steps, texts)), (other, its_bias, its_seen, _) = run_ranks(2, lambda _: ignoring(overlap))
    assert torch.equal(one, other)
    assert not torch.equal(bias, its_bias)
    assert not torch.equal(bias, torch.zeros(4))
    assert (seen.tolist(), its_seen.tolist()) == ([3.0] * 2, [4.0] * 3)
    assert (steps, texts) == (3, [])


def test_sparse_adam_is_refused():
    optimizer = torch.optim.SparseAdam(nn.Embedding(4, 2, sparse=True).parameters())
    with pytest.raises(ValueError, match=r"SparseAdam steps only rows that have a gradient.* Set sparse=False"):
        check_updates(method("topk"), [optimizer])
    assert reason_for_gradients(optimizer) == LAZY


def clamped(rank: int, by_hook: bool) -> list[Tensor]:
    """Clamp the weights before each step, in the loop or in a hook that is registered after `attach_updates`."""
    net = network()
    with torch.no_grad():
        net[0].weight[0, 0] = 5.0
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            net[0].weight.clamp_(-0.2, 0.2)

    attach_updates(net, optimizer, density=0.5)
    if by_hook:
        optimizer.register_step_pre_hook(clamp)
    for step in range(4):
        gradients(net, step)
        if not by_hook:
            clamp()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def test_a_later_hook_before_the_step_changes_weights_like_the_loop():
    by_hook, in_loop = (run_ranks(2, clamped, by_hook) for by_hook in (True, False))
    for hooked, looped in zip(by_hook, in_loop, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(hooked, looped, strict=True))
    assert by_hook[0][0].abs().max() < 0.3
