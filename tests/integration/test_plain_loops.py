"""Loops without Lightning, as users write them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from lightning_sparse import attach, attach_updates, exchange_pending, load_replica, save_replica
from tests.integration.failing import caught
from tests.integration.trainers import Messages
from tests.processes import run_ranks
from tests.support.tiers import full, later


def flat(module: nn.Module) -> Tensor:
    return torch.cat([x.detach().float().flatten() for x in (*module.parameters(), *module.buffers())])


def gan(rank: int) -> list[Tensor]:
    """Step the discriminator while the generator's batch normalisation waits for its backward pass."""
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)
    both = nn.ModuleList([generator, critic])
    optimizers = [AdamW(part.parameters(), 0.01) for part in both]
    attach_updates(both, optimizers, density=0.5)
    torch.manual_seed(rank)
    for _ in range(4):
        fake = generator(torch.randn(8, 4))
        optimizers[1].zero_grad()
        critic(fake.detach()).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(fake).mean().backward()
        optimizers[0].step()
    return [flat(both)]


def test_a_gan_with_batch_normalisation_trains_on_all_ranks():
    (first,), (second,) = run_ranks(2, gan)
    assert torch.equal(first, second)


class Wrapping(torch.optim.Optimizer):
    """Like a Lookahead, has an optimizer inside, and is attached itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def scaled(rank: int) -> tuple[Tensor, int]:
    """Rank 1's gradient overflows in the second step."""
    torch.manual_seed(0)
    net, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = Wrapping(AdamW(net.parameters(), 0.01))
    reducer = attach_updates(net, optimizer, density=0.5)
    for step in range(4):
        optimizer.zero_grad()
        factor = torch.inf if (rank, step) == (1, 1) else rank + 1
        scaler.scale(net(torch.ones(2, 8) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(net), reducer.step


def test_a_rank_whose_scaler_skips_the_step_of_a_wrapping_optimizer_exchanges():
    (first, steps), (second, same) = run_ranks(2, scaled)
    assert steps == same == 4
    assert torch.equal(first, second)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x))


def two_passes(rank: int, within_no_sync: bool, views: bool) -> list[str]:
    messages = Messages()
    net = DistributedDataParallel(Heads(), find_unused_parameters=True, gradient_as_bucket_view=views)
    attach(net, "topk", density=0.5)
    optimizer = SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if within_no_sync:
            with net.no_sync():
                net(torch.ones(1, 4), 0).sum().backward()
        else:
            net(torch.ones(1, 4), 0).sum().backward()
        net(torch.ones(1, 4), 1).sum().backward()
        optimizer.step()
    return [text for text in messages.texts if "no_sync" in text]


@later
def test_a_gradient_that_waits_while_a_later_pass_leaves_its_parameter_out_is_a_warning():
    (text,), none = run_ranks(2, two_passes, False, True)
    assert "'heads.0.weight' took no part in this backward pass" in text or "'heads.0.bias' took no part" in text
    assert none == []
    assert run_ranks(2, two_passes, False, False) == [[], []]  # DDP keeps the gradient
    assert run_ranks(2, two_passes, True, True) == [[], []]


def unknown_scale(rank: int, given: bool) -> str:
    net, scaler = DistributedDataParallel(nn.Linear(4, 2)), torch.amp.GradScaler("cpu", init_scale=4.0)
    attach(net, "topk", density=0.5, loss_scale=scaler.get_scale if given else None)
    optimizer = SGD(net.parameters(), 0.1)
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    kind, text, _ = caught(lambda: scaler.step(optimizer))
    return f"{kind}: {text}"


def test_a_scaler_without_loss_scale_is_an_error():
    first, _ = run_ranks(2, unknown_scale, False)
    assert first.startswith("ValueError: A GradScaler scales the loss, and attach got no loss_scale.")
    assert run_ranks(2, unknown_scale, True) == ["no error: "] * 2


def trained(net: nn.Module, optimizer: Any, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.full((2, 4), rank + step + 1.0)).square().sum().backward()
        optimizer.step()


def grown(rank: int, folder: Path) -> list[Tensor]:
    """Save after a group was added, and before its first step; resume with all groups from the start."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    model, path = net(), f"{folder}/model"
    model[1].requires_grad_(False)
    optimizer = AdamW(model[0].parameters(), 0.01)
    attach_updates(model, optimizer, density=0.3)
    trained(model, optimizer, rank)
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    save_replica(path, model, optimizer)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    trained(model, optimizer, rank)
    again = net()
    again.load_state_dict(weights)
    resumed = AdamW([{"params": [*part.parameters()]} for part in again], 0.01)
    attach_updates(again, resumed, density=0.3)
    load_replica(path, again, resumed)
    trained(again, resumed, rank)
    return [flat(model), flat(again)]


def test_a_replica_that_is_saved_after_a_group_was_added_resumes(tmp_path):
    for unbroken, resumed in run_ranks(2, grown, tmp_path):
        assert torch.equal(unbroken, resumed)


def joined(rank: int, overlap: str) -> float:
    """Give the optimizer a layer between two exchanges. Its gradient is 1 on rank 0, and 3 on rank 1."""
    net = nn.ModuleList([nn.Linear(1, 1, bias=False)])
    optimizer = SGD(net.parameters(), 1.0)
    attach_updates(net, optimizer, density=1.0, local_steps=4, overlap=overlap)
    for step in range(12):
        if step == 5:
            net.append(nn.Linear(1, 1, bias=False))
            net[1].weight.data.zero_()
            optimizer.add_param_group({"params": [*net[1].parameters()]})
        optimizer.zero_grad()
        sum(each.weight.sum() * (1 + 2 * rank) for each in net).backward()
        optimizer.step()
    exchange_pending(optimizer)
    return net[1].weight.item()


def test_a_layer_that_joins_between_exchanges_keeps_the_local_steps_of_all_ranks():
    for overlap in ("none", "next_step"):
        assert run_ranks(2, joined, overlap) == [-14.0, -14.0]  # seven steps with a mean gradient of 2


def kept_gradients(rank: int, set_to_none: bool, by_hand: float = 0.0) -> list[str]:
    """Freeze a layer before the third step. Its gradient is then None, zeros, or a value that the user sets."""
    messages, net = Messages(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = SGD(net.parameters(), 0.1)
    attach_updates(net, optimizer, density=0.1)
    for step in range(6):
        if step == 2:
            net[0].requires_grad_(False)
        optimizer.zero_grad(set_to_none=set_to_none)
        net(torch.full((2, 4), rank + step + 1.0)).square().sum().backward()
        for param in net[0].parameters() if by_hand and step >= 2 else ():
            param.grad = torch.full_like(param, by_hand)
        optimizer.step()
    return [text.partition(":")[0] for text in messages.texts]


def test_frozen_parameters_that_keep_gradients_are_warned_of():
    said = ["'0.bias', '0.weight' require no gradient, but have one of zeros"]
    assert run_ranks(2, kept_gradients, False) == [said, []]  # rank 1 says nothing
    assert run_ranks(2, kept_gradients, True) == [[], []]
    assert run_ranks(2, kept_gradients, True, 1.0) == [[], []]


class Adapted(nn.Module):
    """Wraps a layer, as PEFT does."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora = base_layer, nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(x)


def renamed(rank: int) -> tuple[Tensor, list[str], float, float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = AdamW(net.parameters(), 0.01)
    reducer = attach_updates(net, optimizer, density=0.1)
    trained(net, optimizer, rank)
    before = reducer.state_dict()["elements"]["residual"]["0.weight"].clone()
    net[0] = Adapted(net[0])
    optimizer.add_param_group({"params": [*net[0].lora.parameters()]})
    optimizer.step()  # of the gradients from before
    after = reducer.state_dict()["elements"]["residual"]
    trained(net, optimizer, rank)
    return flat(net), sorted(after), float(before.abs().sum()), float(after["0.base_layer.weight"].abs().sum())


def test_parameters_that_an_adapter_renames_keep_their_residuals():
    (first, names, before, after), (second, *_) = run_ranks(2, renamed)
    assert names == ["0.base_layer.bias", "0.base_layer.weight", "0.lora.weight", "1.bias", "1.weight"]
    assert before > 0 < after
    assert torch.equal(first, second)


class Prepared(torch.optim.Optimizer):
    """Like accelerate's AcceleratedOptimizer, does not call torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def pruned(rank: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Pruning renames a parameter, and adds none."""

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    model, again, path = net(), net(), f"{folder}/model"
    optimizer, resumed = AdamW(model.parameters(), 0.01), AdamW(again.parameters(), 0.01)
    attach_updates(model, optimizer, density=0.3)
    trained(model, optimizer, rank)
    for each in (model, again):
        nn.utils.prune.l1_unstructured(each[0], "weight", 0.1)
    save_replica(path, model, optimizer)
    again.load_state_dict(model.state_dict())
    attach_updates(again, resumed, density=0.3)
    load_replica(path, again, resumed)
    for each, steps in ((model, optimizer), (again, resumed)):
        trained(each, steps, rank)
    return flat(model), flat(again)


@later
def test_a_replica_of_a_pruned_model_resumes(tmp_path):
    for unbroken, resumed in run_ranks(2, pruned, tmp_path):
        assert torch.equal(unbroken, resumed)


def wrapped(rank: int, folder: Path) -> None:
    net = nn.Linear(4, 4)
    inner = AdamW(net.parameters(), 0.01)
    attach_updates(net, inner, density=0.3, overlap="next_step")
    trained(net, inner, rank)
    prepared = Prepared(inner)
    exchange_pending(prepared)
    save_replica(f"{folder}/model", net, prepared)
    load_replica(f"{folder}/model", net, prepared)
    kind, text, _ = caught(lambda: exchange_pending(Prepared(Prepared(inner))))
    assert kind == "ValueError", text


def compiled(rank: int) -> int:
    net = torch.compile(DistributedDataParallel(nn.Linear(4, 4)), backend="eager")
    reducer = attach(net, "topk", density=0.5)
    net(torch.ones(1, 4)).sum().backward()
    return reducer.step


@full
def test_wrappers_of_optimizers_and_of_models_are_taken(tmp_path):
    run_ranks(2, wrapped, tmp_path)
    assert run_ranks(2, compiled) == [1, 1]


def again(rank: int) -> list[str]:
    """Attach with one optimizer, another, and the first; then exchange gradients with it, twice."""
    messages, net = Messages(), nn.Linear(4, 4)
    first, second = SGD(net.parameters(), 0.01), AdamW(net.parameters(), 0.01)
    for optimizer in (first, second, first):
        attach_updates(net, optimizer, density=0.5)
        trained(net, optimizer, rank)
    kind, text, _ = caught(second.step)
    assert kind == "RuntimeError", text
    kept = []
    for _ in range(2):
        kept.append(DistributedDataParallel(net))
        attach(kept[-1], "topk", density=0.5)
        trained(kept[-1], first, rank)
    attach_updates(net, AdamW(net.parameters(), 0.01))
    for optimizer in (first, second):
        kind, text, _ = caught(optimizer.step)
        assert kind == "RuntimeError"
        assert "the model or a part of it was attached anew" in text
    attach_updates(net, second)
    trained(net, second, rank)
    return [text for text in messages.texts if "drift" in text]


@later
def test_a_model_may_be_attached_again_with_an_earlier_optimizer():
    assert run_ranks(2, again) == [[], []]
