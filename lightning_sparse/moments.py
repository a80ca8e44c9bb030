"""The moments of torch's optimizers: what momentum would still change, and how much of the second moment is noise.

**Payout.** A first moment spreads each gradient over the steps to come. If no further gradient came, the weights would
still move by p = β / (1 − β) times the present update. Where entries are sent seldom, this delay comes on top of the
residual's. So p is paid out at once where an entry is sent, and the moment is set to zero there. (Momentum factor
masking, Lin et al. 2018, arXiv 1712.01887, sets it to zero and drops p.) p is sent without the factor below, although
those later updates would have got it: with four ranks the GPT of `benchmarks.updates` was worse with p rescaled.
Optimizers that are not torch's keep their moments as they like. Where one keeps them under Adam's names, p is taken as
that multiple of what it has changed, its weight decay included: right if its steps are linear in the first moment.

**Rescaling.** Adam divides by the root of v, the mean of squared gradients. A gradient of one rank's batch has P times
the variance of the mean over P ranks. So where noise dominates, a rank's v is P times as large as in dense training,
its updates are √P times smaller, and a learning rate that is right for dense training is too small. With q, the part of
v that is signal, v of the mean gradient would be (q + (1 − q)/P) v, so updates are multiplied with 1/√(q + (1 − q)/P),
parameter by parameter. Adam's moments estimate q: of a gradient's signal all is in m̂, and of the variance of its noise
c = (1 − β₁)/(1 + β₁), so Σm̂² = (q + (1 − q)c) Σv̂.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.compressors.base import Entries
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.kernels.payout import Payout
from lightning_sparse.kernels.rescaling import rescaling
from lightning_sparse.kernels.write_back import clear_entries_
from lightning_sparse.layout import Segment

State = Mapping[str, Any]


class Moments(NamedTuple):
    """How an optimizer keeps its momentum.

    Attributes:
        first: key of the first moment in the optimizer's state of a parameter.
        beta: what the moment is multiplied with in each step, from a parameter group.
        payout: what would still be subtracted is a·m / (b·√v + c): returns a, b and c, each a number or 1-D, for a
            parameter group, the steps of some of its parameters, 1-D, and their states. None: β/(1 − β) times what has
            been changed, of parameters whose second moment is in the state, too.
        divisor: key of what the first moment is divided by, from a parameter group; None if there is no such thing.
        root: whether it is divided by the root of that.
        second: key of the second moment, the mean of squared gradients, if the update is that of Adam: then it can be
            rescaled.
    """

    first: str
    beta: Callable[[State], float]
    payout: Callable[[State, Tensor, Sequence[State]], tuple[Any, Any, Any]] | None
    divisor: Callable[[State], str] | None = None
    root: bool = True
    second: str | None = None


class SegmentMoments:
    """The moments of the parameters of one segment, in one step.

    Args:
        segment: the segment.
        kind: how the optimizer keeps them.
        groups: the parameter group of each parameter, in the segment's order.
        states: the optimizer's state of each parameter; empty for one that has had no gradient.
        device: where the parameters are.
    """

    def __init__(
        self,
        segment: Segment,
        kind: Moments,
        groups: Sequence[State],
        states: Sequence[State],
        device: torch.device,
    ) -> None:
        self._segment, self._kind, self._groups, self._states, self._device = segment, kind, groups, states, device
        self._first: list[Tensor | None] = [state.get(kind.first) for state in states]
        if kind.payout is None:
            plain = map(_has_adams_moments, states, segment.shapes)
            self._first = [m if is_plain else None for m, is_plain in zip(self._first, plain, strict=True)]
        self._flat_first = _flat(self._first)
        self._factors: Tensor | None = None  # of each parameter, by which `rescaling` has it rescaled

    def rescaling(self, steps_before: Sequence[Any], size: int) -> tuple[Tensor, Tensor] | None:
        """Return by which factors to rescale what the optimizer has changed in a step.

        Decoupled weight decay keeps its size: it has no noise. Parameters that have not been stepped stay as they are.

        Args:
            steps_before: the optimizer's steps of each parameter before this one, see `steps_of`.
            size: P, the number of ranks.

        Returns:
            f = 1/√(q + (1 − q)/P) of each parameter, and r = (1 − f) · rate · weight decay: the change c of weights w
            becomes f·c + r·w. 1-D fp32, on the parameters' device. None if there are no moments yet.
        """
        if all(moment is None for moment in self._first):
            return None

        def rows(group: State, steps: Tensor, indices: Sequence[int]) -> tuple[Any, ...]:
            beta, beta_of_second = group["betas"]
            decay = group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
            before = _together([steps_before[index] for index in indices])
            stepped = steps > to_device(before, steps.device)  # before the first step there are none on the device
            corrections = _correction(beta, steps), _correction(beta_of_second, steps)
            return *corrections, (1 - beta) / (1 + beta), decay, stepped.to(steps.dtype)

        pairs = zip(self._states, self._first, strict=True)
        second = _flat(None if m is None else state[self._kind.second or ""] for state, m in pairs)
        numbers = self._numbers(rows, without=(1.0, 1.0, 0.0, 0.0, 0.0))
        factors, rests = rescaling(self._flat_first, second, self._segment.bounds, numbers, size)
        self._factors = factors
        return factors, rests

    def payout(self, changes: Sequence[Tensor]) -> Payout | None:
        """Return what would still be subtracted from the segment's weights; None if there is no momentum yet.

        Args:
            changes: what the optimizer has subtracted, 1-D fp32, of each parameter.
        """
        if all(moment is None for moment in self._first):
            return None

        def rows(group: State, steps: Tensor, indices: Sequence[int]) -> tuple[Any, ...]:
            if self._kind.payout is not None:
                return self._kind.payout(group, steps, [self._states[index] for index in indices])
            beta = group["betas"][0]
            return beta / (1 - beta), 0.0, 1.0

        first, second, divisor = self._flat_first, None, self._kind.divisor
        coefficients = self._numbers(rows, without=(0.0, 0.0, 1.0))
        if self._kind.payout is None:
            first = [None if m is None else change for m, change in zip(first, changes, strict=True)]
            if self._factors is not None:
                coefficients[0] /= self._factors  # the changes are rescaled
        if divisor is not None:
            second = _flat(state.get(divisor(group)) for group, state in zip(self._groups, self._states, strict=True))
        return Payout(first, second, coefficients, self._kind.root)

    def take_out(self, applied: Entries) -> None:
        """Set the moments to zero where entries were applied."""
        for indices, _ in applied.lists:
            clear_entries_(self._flat_first, self._segment.bounds, indices)
        for moment, emptied in zip(self._first, self._flat_first, strict=True):
            if moment is not None and emptied is not None and not moment.is_contiguous():
                moment.copy_(emptied.view(moment.shape))

    def _numbers(
        self, rows: Callable[[State, Tensor, Sequence[int]], Sequence[Any]], without: Sequence[float]
    ) -> Tensor:
        """Return some numbers of each parameter, (rows, parameters), fp32, on their device.

        They are made for all parameters of a group at a time: steps may lie on the device, where each operation counts.

        Args:
            rows: called once for each parameter group, with it, the steps of its parameters, 1-D, and their indices;
                returns, for each row, one number, or one for each of these parameters.
            without: the rows of parameters without momentum.
        """
        of_group: dict[int | None, list[int]] = {}
        for index, (group, moment) in enumerate(zip(self._groups, self._first, strict=True)):
            of_group.setdefault(None if moment is None else id(group), []).append(index)
        made: list[Sequence[Any]] = []
        for key, indices in of_group.items():
            group = self._groups[indices[0]]
            steps = _together([self._states[index].get("step", 0) for index in indices])
            if any(_on_device(x) for x in (group.get("lr"), *group.get("betas", ()))):
                steps = to_device(steps, self._device)
            made.append(without if key is None else rows(group, steps, indices))
        device = self._device if any(_on_device(x) for each in made for x in each) else torch.device("cpu")
        parts = [
            [_row(x, len(indices), device) for x in each] for each, indices in zip(made, of_group.values(), strict=True)
        ]
        numbers = torch.stack([row[0] if len(row) == 1 else torch.cat(row) for row in zip(*parts, strict=True)])
        order = [index for indices in of_group.values() for index in indices]
        if order != sorted(order):
            places = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device="cpu")
            numbers = numbers.index_select(1, to_device(places, numbers.device))
        return to_device(numbers, self._device)


def _on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _row(x: Any, count: int, device: torch.device) -> Tensor:
    """Return a number, or numbers on the device, as so many fp32 numbers there."""
    if isinstance(x, Tensor) and (x.dim() or x.device == device):
        return to_device(x.float(), device).expand(count)
    return torch.full((count,), float(x), dtype=torch.float32, device=device)


def _together(numbers: Sequence[Any]) -> Tensor:
    """Return numbers, or scalars, 1-D: fp32 on the device if one of them is there, else fp64."""
    device = next((x.device for x in numbers if _on_device(x)), None)
    if device is None:
        return torch.tensor([float(x) for x in numbers], dtype=torch.float64, device="cpu")
    # A parameter that was trained later than others, or loaded, may have its own on the host.
    return torch.stack([x.float() if _on_device(x) else torch.full((), float(x), device=device) for x in numbers])


def _flat(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return tensors as 1-D, contiguous ones: views of those that are contiguous, and copies of others."""
    return [None if x is None else x.contiguous().view(-1) for x in tensors]


def moments_of(optimizer: Optimizer) -> Moments | None:
    """Return how an optimizer keeps its momentum; None if it is not known."""
    kinds = type(optimizer).__mro__
    known = next((MOMENTS[kind] for kind in kinds if kind in MOMENTS), None)
    # Not by the state alone: Ranger and SOAP have moments by Adam's names, but change weights by other rules as well.
    # A payout of these changes feeds on itself, and the training diverges. These three were measured, and gain by it.
    is_adam = any(name in kind.__name__.lower() for kind in kinds for name in ("adam", "lamb", "adopt"))
    if known is None and is_adam and all(_has_betas(group) for group in optimizer.param_groups):
        return OTHERS
    return known


def _has_betas(group: State) -> bool:
    betas = group.get("betas")
    return isinstance(betas, Sequence) and len(betas) == 2 and all(isinstance(x, int | float | Tensor) for x in betas)


def _has_adams_moments(state: State, shape: Sequence[int]) -> bool:
    """Return whether a state has both moments of Adam, each a number for each element of its parameter."""
    moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
    # Others have quantized ones, in classes of their own, or factors of a matrix.
    return all(type(m) is Tensor and m.shape == torch.Size(shape) and m.is_floating_point() for m in moments)


def _sgd(group: State, steps: Tensor, states: Sequence[State]) -> tuple[Any, Any, Any]:
    beta = group["momentum"]
    # Nesterov's update is one step ahead: it contains β times the buffer beside the gradient.
    ahead = beta if group["nesterov"] else 1.0
    return group["lr"] * ahead * beta / (1 - beta), 0.0, 1.0


def _adam(group: State, steps: Tensor, states: Sequence[State]) -> tuple[Any, Any, Any]:
    return _of_first(group, steps), _correction(group["betas"][1], steps) ** -0.5, group["eps"]


def _nadam(group: State, steps: Tensor, states: Sequence[State]) -> tuple[Any, Any, Any]:
    beta = group["betas"][0]
    product = _together([state["mu_product"] for state in states])
    if _on_device(product):  # where a loaded one lies, though steps do not
        steps = to_device(steps.float(), product.device)
    product = to_device(product, steps.device)
    # As with Nesterov, by a factor of its own that grows with the steps towards β.
    ahead = beta * (1 - 0.5 * 0.96 ** ((steps + 1) * group["momentum_decay"]))
    of_first = group["lr"] * ahead * beta / (1 - beta) / (1 - product * ahead)
    return of_first, _correction(group["betas"][1], steps) ** -0.5, group["eps"]


def _radam(group: State, steps: Tensor, states: Sequence[State]) -> tuple[Any, Any, Any]:
    beta = group["betas"][1]
    correction = _correction(beta, steps)
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * steps * beta**steps / correction
    rectifier = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    root, divided = rectifier.clamp(min=1e-12).sqrt(), length > 5
    divisor = torch.where(divided, correction**-0.5 / root, 0.0)
    return _of_first(group, steps), divisor, torch.where(divided, group["eps"] / root, 1.0)


def _adamax(group: State, steps: Tensor, states: Sequence[State]) -> tuple[Any, Any, Any]:
    return _of_first(group, steps), 1.0, 0.0


def _of_first(group: State, steps: Tensor) -> Tensor:
    """Return lr · β / (1 − β), divided by the correction of the first moment's bias."""
    beta = group["betas"][0]
    result: Tensor = group["lr"] * beta / (1 - beta) / _correction(beta, steps)
    return result


def _correction(beta: Any, steps: Tensor) -> Tensor:
    """Return 1 − βᵗ, and a tiny number before the first step: a scaler lets a fused optimizer leave that out."""
    correction: Tensor = 1 - beta**steps
    return correction.clamp(min=1e-30)


def steps_of(states: Sequence[State]) -> list[Any]:
    """Return the number of steps in each state, 0 if none is kept: copies, on the device where they lie there."""
    steps = [state.get("step", 0) for state in states]
    there = [x for x in steps if _on_device(x)]
    copies = iter(torch.stack(there).unbind() if there else ())
    return [next(copies) if _on_device(x) else float(x) for x in steps]


def _beta(group: State) -> float:
    return float(group["betas"][0])


def _second(group: State) -> str:
    return "exp_avg_sq"


def _adams_second(group: State) -> str:
    return "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"


MOMENTS: Mapping[type[Optimizer], Moments] = {
    torch.optim.SGD: Moments("momentum_buffer", lambda group: float(group["momentum"]), _sgd),
    torch.optim.Adam: Moments("exp_avg", _beta, _adam, _adams_second, second="exp_avg_sq"),
    torch.optim.AdamW: Moments("exp_avg", _beta, _adam, _adams_second, second="exp_avg_sq"),
    torch.optim.NAdam: Moments("exp_avg", _beta, _nadam, _second, second="exp_avg_sq"),
    torch.optim.RAdam: Moments("exp_avg", _beta, _radam, _second),
    torch.optim.Adamax: Moments("exp_avg", _beta, _adamax, lambda group: "exp_inf", root=False),
}
"""Subclasses count as their base class; fused and foreach forms keep the same state."""
OTHERS = Moments("exp_avg", _beta, None, second="exp_avg_sq")
"""Adam, Lamb and ADOPT by other packages: named so, with betas. Only for parameters whose state has Adam's moments."""
