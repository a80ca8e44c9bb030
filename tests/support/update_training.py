"""A model, optimizers, and steps with exchanged updates, with a check for losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse import Method, Reducer, method
from lightning_sparse.comm import Comm
from lightning_sparse.momentum import ADAM_LIKE, moments_of
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.kernels import Echo

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


class OthersAdam(torch.optim.Optimizer):
    """Adam as in other packages than torch. The names in its state are `first` and "exp_avg_sq"."""

    first = "exp_avg"

    def __init__(self, params: Any, lr: float, betas: Sequence[float] = (0.9, 0.999)) -> None:
        # The last option exists only in torch's Adam; tests that compare both need it.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"][:2]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                for name in (self.first, "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
                step = state["step"] = state.get("step", 0) + 1
                first = state[self.first].lerp_(param.grad, 1 - beta1)
                second = state["exp_avg_sq"].lerp_(param.grad.square(), 1 - beta2)
                divisor = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
                param.addcdiv_(first, divisor, value=-group["lr"] / (1 - beta1**step))


class CountsInGroups(OthersAdam):
    """Counts steps in its parameter groups, as Apex's FusedAdam and pytorch-optimizer do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["step"] = group.get("step", 0)
        super().step()
        for group in self.param_groups:
            group["step"] = max(self.state[param].pop("step") for param in group["params"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: SGD(params, 0.1),
    "momentum": lambda params: SGD(params, 0.1, momentum=0.9),
    "nesterov": lambda params: SGD(params, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "adamw": lambda params: ADAMW(params, 0.01),
    "adamw, foreach": lambda params: ADAMW(params, 0.01, foreach=True),
    "adamw, fused": lambda params: ADAMW(params, 0.01, fused=True),
    "adamw, maximize": lambda params: ADAMW(params, 0.01, maximize=True),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
    "radam": lambda params: torch.optim.RAdam(params, 0.01),
    "adamax": lambda params: torch.optim.Adamax(params, 0.01),
    "adam of others": lambda params: OthersAdam(params, 0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01),
}


SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 5), "b": (3,), "c": (2, 4, 3), "none": (0,), "one": (1,)}


class Net(nn.Module):
    """A model whose gradients are given by a test: its loss is the product of its weights and a rank's input."""

    def __init__(self, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            weights = torch.randn(shape, generator=generator, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(weights.to(dtype)))

    def backward(self, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for param in self.parameters():
            gradient = torch.randn(param.shape, generator=generator, dtype=torch.float32)
            param.grad = gradient.to(param.dtype)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])


def residual(reducer: Reducer) -> Tensor:
    assert reducer.layout is not None
    kept = {
        name: view
        for segment, state in zip(reducer.layout.segments, reducer.states, strict=True)
        for name, view in zip(segment.names, segment.views(state["residual"]), strict=True)
    }
    return flat(kept[name] for name in sorted(kept))


def weights(net: nn.Module) -> Tensor:
    return flat(param for _, param in sorted(net.named_parameters()))


def train(
    comm: Comm,
    optimizer: str,
    chosen: Method,
    *,
    steps: int = 6,
    granularity: Any = "model",
    dtype: torch.dtype = torch.float32,
    net: Net | None = None,
    delayed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Train, and check in every step that the ranks' changes equal the applied plus the kept parts.

    With `delayed` the check covers all steps together, because each step applies the entries of the previous step.

    Returns:
        The weights, the lost part, and the bound of rounding errors.
    """
    net = net or Net(dtype)
    optim = OPTIMIZERS[optimizer](net.parameters())
    # Without rescaling, the weights show the exchanged part.
    rule = UpdateRule(rescale=False, overlap="next_step" if delayed else "none")
    reducer = Reducer(replace(chosen, update_rule=rule), comm, granularity=granularity, exchanged="update")
    updates = DeltaExchange(reducer, net, [optim])
    reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
    lost, bound, start = torch.zeros_like(weights(net)), torch.zeros_like(weights(net)), weights(net)
    differences, largest = torch.zeros_like(start, dtype=torch.float64), 0.0
    for step in range(steps):
        before, kept = weights(net), residual(reducer)
        net.backward(comm.rank, step)
        updates.begin(optim)
        optim.step()
        changed, moments, own = before - weights(net), first_moments(optim, net), from_moments(optim, net)
        updates.exchange(optim)
        # With delay the mean of the step before is applied first, and weight decay counts from these weights.
        base = flat(updates.weights[id(param)] for _, param in sorted(net.named_parameters())) if delayed else before
        updates.wait()
        owed = unspent(optim, net, moments, base, changed, own)
        if delayed and step == steps - 1:
            updates.complete()
        # The ranks' mean of (x − w) + e + (unspent momentum) before the exchange equals the move of x plus the rest.
        left = residual(reducer) + unspent(optim, net, first_moments(optim, net), base, changed, own)
        difference = changed.double() + kept + owed - left
        differences += difference
        total = sum(comm.all_gather(differences if delayed else difference)) / comm.size
        terms = comm.all_gather(torch.cat([before, kept, owed, changed, torch.zeros(1)]))
        largest = max(largest if delayed else 0.0, *(float(part.abs().max()) for part in terms))
        if delayed and step < steps - 1:
            continue
        lost = (total - ((start if delayed else before) - weights(net))).abs()
        eps = 2.0 ** (-8 if dtype == torch.bfloat16 else -23)
        # Weights are rounded once, and each rank's terms three times; with delay, also in each earlier step.
        bound = torch.full_like(lost, largest * (eps + 8 * 2.0**-23) * (2 * steps if delayed else 1))
        assert (lost <= bound).all(), (step, lost.max(), bound.max())
    return weights(net), lost, bound


def first_moments(optim: torch.optim.Optimizer, net: nn.Module) -> Tensor:
    """Return the first moments of all parameters, sorted by name; zeros if there are none."""
    kind, found = moments_of(optim), []
    for _, param in sorted(net.named_parameters()):
        state = optim.state.get(param, {})
        moment = state.get(kind.first) if kind else None
        is_known = moment is not None and not (kind is ADAM_LIKE and "exp_avg_sq" not in state)
        found.append(moment.clone() if is_known else torch.zeros_like(param))
    return flat(found)


def from_moments(optim: torch.optim.Optimizer, net: nn.Module) -> Tensor | None:
    """Return the unspent momentum of NAdam and of Nesterov momentum, which are computed from the moments; else None."""
    kind, (group,) = moments_of(optim), optim.param_groups
    if kind is None or kind.unspent is None or not group.get("nesterov", True):
        return None
    made = []
    for _, param in sorted(net.named_parameters()):
        state = optim.state.get(param, {})
        has_stepped = state.get(kind.first) is not None and param.grad is not None
        made.append(kind.unspent(group, state) if has_stepped else torch.zeros_like(param))
    return flat(made)


def unspent(
    optim: torch.optim.Optimizer,
    net: nn.Module,
    moments: Tensor,
    base: Tensor,
    changed: Tensor,
    own: Tensor | None,
) -> Tensor:
    """Return the unspent momentum after a step: β/(1 − β) · (change − weight decay of `base`) if a moment is not 0."""
    kind, at, found = moments_of(optim), 0, torch.zeros_like(changed)
    groups = {param: group for group in optim.param_groups for param in group["params"]}
    for _, param in sorted(net.named_parameters()):
        part, at = slice(at, at + param.numel()), at + param.numel()
        if kind is None or param not in groups:
            continue
        group, beta = groups[param], kind.beta(groups[param])
        decay = group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
        later = beta / (1 - beta) * (changed[part] - decay * base[part]) if own is None else own[part]
        found[part] = torch.where(moments[part] != 0, later, 0.0)
    return found


def exchanged_twice(optimizer: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Train five steps; in the last two, all ranks send the same payload. One parameter is never trained.

    Returns:
        The weights, the residual, and a mask of zero first moments.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = {"a": (130, 90), "idle": (5,), "b": (90,), "empty": (0,), "c": (3, 3), "d": (100, 90)}

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    model = nn.ParameterDict({name: draw(shape) for name, shape in shapes.items()})
    groups: Any = [
        {"params": [model["a"], model["idle"], model["c"]]},
        {"params": [model["b"], model["empty"], model["d"]]},
    ]
    chosen = OPTIMIZERS[optimizer](groups)
    chosen.param_groups[1]["lr"] *= 0.5
    reducer = Reducer(method("topk", density=0.02), Echo(2), granularity="model", exchanged="update")
    updates = None
    for step in range(5):
        for name, param in model.items():
            grad = draw(shapes[name])
            param.grad = None if name == "idle" else grad
        if step == 3:  # in Adam's first steps, all updates have about equal size, and rounding decides the selection
            updates = DeltaExchange(reducer, model, [chosen])
        if updates is not None:
            updates.begin(chosen)
        chosen.step()
        if updates is not None:
            updates.exchange(chosen)
    kind = moments_of(chosen)
    assert kind is not None
    moments = flat(state[kind.first] for state in chosen.state.values() if kind.first in state)
    return flat(model.values()), reducer.states[0]["residual"], moments == 0
