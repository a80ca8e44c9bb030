"""The moments of torch's optimizers: what momentum would still change, and how much of the second moment is noise.

**Payout.** A first moment spreads each gradient over the steps to come. If no further gradient came, the weights would
still move by p = β / (1 − β) times the present update. Where entries are sent seldom, this delay comes on top of the
residual's. So p is paid out at once where an entry is sent, and the moment is set to zero there. (Momentum factor
masking, Lin et al. 2018, arXiv 1712.01887, sets it to zero and drops p.) p is sent without the factor below, although
those later updates would have got it: with four ranks the GPT of `benchmarks.updates` was worse with p rescaled.

**Rescaling.** Adam divides by the root of v, the mean of squared gradients. A gradient of one rank's batch has P times
the variance of the mean over P ranks. So where noise dominates, a rank's v is P times as large as in dense training,
its updates are √P times smaller, and a learning rate that is right for dense training is too small. With q, the part of
v that is signal, v of the mean gradient would be (q + (1 − q)/P) v, so updates are multiplied with 1/√(q + (1 − q)/P),
parameter by parameter. Adam's moments estimate q: of a gradient's signal all is in m̂, and of the variance of its noise
c = (1 − β₁)/(1 + β₁), so Σm̂² = (q + (1 − q)c) Σv̂.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.compressors.base import Entries
from lightning_sparse.kernels.launch import at_a_time, to_device
from lightning_sparse.kernels.write_back import add_entries_
from lightning_sparse.layout import Segment

State = Mapping[str, Any]
AT_A_TIME = 1 << 23
"""Most elements that are concatenated at a time on CUDA: at least a DDP bucket, so that a bucket needs one batch of
launches; it limits temporaries to 32 MB each where the segment is a whole model."""


class Moments(NamedTuple):
    """How an optimizer keeps its momentum.

    Attributes:
        first: key of the first moment in the optimizer's state of a parameter.
        beta: what the moment is multiplied with in each step, from a parameter group.
        to_come: from a parameter group and a parameter's state, what would still be subtracted from the parameter: a
            new fp32 tensor of its shape.
        second: key of the second moment, the mean of squared gradients, by whose root the first is divided; None if
            there is none.
    """

    first: str
    beta: Callable[[State], float]
    to_come: Callable[[State, State], Tensor]
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

    def rescale_(
        self, changes: Sequence[Tensor], weights: Sequence[Tensor], steps_before: Sequence[Any], size: int
    ) -> None:
        """Multiply what the optimizer has changed in a step with 1/√(q + (1 − q)/P), in place.

        Decoupled weight decay keeps its size: it has no noise. Parameters that have not been stepped stay as they are.

        Args:
            changes: weights before the step minus weights after it, 1-D fp32, one per parameter.
            weights: the weights before the step.
            steps_before: the optimizer's steps of each parameter before it, see `steps_of`.
            size: P, the number of ranks.
        """
        assert self._kind.second is not None
        stepped = [index for index, state in enumerate(self._states) if self._kind.second in state]
        if not stepped:
            return
        groups, states = [self._groups[index] for index in stepped], [self._states[index] for index in stepped]
        first = torch.stack(torch._foreach_norm([state[self._kind.first].float() for state in states])).square()
        second = _sums([state[self._kind.second].float() for state in states])
        betas = [[group["betas"][which] for group in groups] for which in (0, 1)]
        steps = [steps_of(state) for state in states]
        factors = batch_factor(first, second, betas, steps, size)
        decays = [
            group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0 for group in groups
        ]
        after, before, decay = _vectors([steps, [steps_before[index] for index in stepped], decays], first.device)
        factors = torch.where(after > before, factors, 1.0)
        torch._foreach_mul_([changes[index] for index in stepped], list(factors.unbind()))
        rests = (1 - factors).mul_(decay).unbind()
        decayed = [
            (changes[index], weights[index].float().reshape(-1), rest)
            for index, given, rest in zip(stepped, decays, rests, strict=True)
            if isinstance(given, Tensor) or given
        ]
        if self._device.type == "cpu":
            for change, weight, rest in decayed:
                change.addcmul_(weight, rest)
        elif decayed:
            shares = torch._foreach_mul([weight for _, weight, _ in decayed], [rest for *_, rest in decayed])
            torch._foreach_add_([change for change, *_ in decayed], list(shares))

    def to_come(self) -> Tensor:
        """Return what would still be subtracted from the segment's weights: 1-D fp32, a new tensor."""
        result = torch.empty(self._segment.numel, dtype=torch.float32, device=self._device)
        each = AT_A_TIME if result.is_cuda else at_a_time(result)
        for first, last in self._runs(each):
            part = result[self._segment.bounds[first] : self._segment.bounds[last]]
            if self._kind.first not in self._states[first]:
                part.zero_()
                continue
            states = self._states[first:last]
            shape = self._segment.shapes[first]
            keys = [key for key, x in states[0].items() if isinstance(x, Tensor) and x.shape == shape]
            flat = {key: _joined([state[key] for state in states]) for key in keys}
            for start in range(0, part.numel(), each):
                piece = {**states[0], **{key: x[start : start + each] for key, x in flat.items()}}
                part[start : start + each] = self._kind.to_come(self._groups[first], piece)
        return result

    def _runs(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) index ranges of parameters that one operation can process concatenated.

        All of a run have the same options, kinds of state and number of steps, and `most` elements at most; a longer
        parameter is a run of its own, and so is one without dimensions, whose state looks like a number of steps.
        """
        bounds, shapes, start = self._segment.bounds, self._segment.shapes, 0
        steps = [state.get("step", 0) for state in self._states]
        on_device = [isinstance(step, Tensor) and step.is_cuda for step in steps]  # comparing them would wait
        for index in range(1, len(shapes)):
            goes_on = (
                bounds[index + 1] - bounds[start] <= most
                and self._groups[index] is self._groups[start]
                and self._states[index].keys() == self._states[start].keys()
                and not (on_device[index] or on_device[start])
                and steps[index] == steps[start]
                and shapes[index]
                and shapes[start]
            )
            if not goes_on:
                yield start, index
                start = index
        yield start, len(shapes)

    def take_out(self, applied: Entries) -> None:
        """Set the moments to zero where entries were applied."""
        moments = [state.get(self._kind.first) for state in self._states]
        if self._device.type == "cpu":
            edges = torch.tensor(self._segment.bounds)
            for indices, _ in applied.lists:
                cuts = torch.searchsorted(indices, edges).tolist()
                for moment, start, (first, last) in zip(moments, self._segment.bounds, pairwise(cuts), strict=False):
                    if moment is not None and first < last:
                        emptied = moment.reshape(-1).index_fill_(0, indices[first:last] - start, 0)
                        if not moment.is_contiguous():
                            moment.copy_(emptied.view(moment.shape))
            return
        # The host does not know how many entries each parameter has.
        kept = torch.ones(self._segment.numel, device=self._device)
        for indices, _ in applied.lists:
            add_entries_(kept, indices, torch.full(indices.shape, -1.0, device=self._device))
        parts = zip(moments, self._segment.views(kept.clamp_(min=0)), strict=True)
        if pairs := [(moment, part.view(moment.shape)) for moment, part in parts if moment is not None]:
            torch._foreach_mul_([moment for moment, _ in pairs], [part for _, part in pairs])


def batch_factor(
    first: Tensor, second: Tensor, betas: Sequence[Sequence[Any]], steps: Sequence[Any], size: int
) -> Tensor:
    """Return 1/√(q + (1 − q)/P), from 1 to √P, of parameters with these Σm² and Σv, after so many steps (1-D, fp32).

    Numbers of the optimizer, β₁ and β₂ of each parameter and its steps, may be tensors on the device.
    """
    corrections = [[1 - beta**step for beta, step in zip(each, steps, strict=True)] for each in betas]
    of_noise = [(1 - beta) / (1 + beta) for beta in betas[0]]
    of_first, of_second, noise = _vectors([*corrections, of_noise], first.device)
    ratio = first / of_first.square() / (second / of_second).clamp(min=1e-38)
    signal = ((ratio - noise) / (1 - noise)).clamp(0, 1)
    return torch.rsqrt(signal + (1 - signal) / size)


def _sums(nonnegative: list[Tensor]) -> Tensor:
    """Return the sum of each tensor, 1-D."""
    if nonnegative[0].device.type == "cpu":  # where a norm takes three times as long as a sum
        return torch.stack([x.sum() for x in nonnegative])
    return torch.stack(torch._foreach_norm(nonnegative, 1))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, 1-D; of one tensor a view, if it is contiguous."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([x.reshape(-1) for x in tensors])


def _vectors(rows: Sequence[Sequence[Any]], device: torch.device) -> Tensor:
    """Return rows of numbers, or of scalars on the device, as a tensor there: one copy for all if they are numbers."""
    if not any(isinstance(value, Tensor) for row in rows for value in row):
        return to_device(torch.tensor(rows, dtype=torch.float32), device)
    return torch.stack([_vector(row, device) for row in rows])


def _vector(values: Sequence[Any], device: torch.device) -> Tensor:
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value, device=device).reshape(()).float() for value in values])
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def moments_of(optimizer: Optimizer) -> Moments | None:
    """Return how an optimizer keeps its momentum; None if it is not known."""
    return next((MOMENTS[kind] for kind in type(optimizer).__mro__ if kind in MOMENTS), None)


def _sgd(group: State, state: State) -> Tensor:
    beta = group["momentum"]
    # Nesterov's update is one step ahead: it contains β times the buffer beside the gradient.
    ahead = beta if group["nesterov"] else 1.0
    buffer: Tensor = state["momentum_buffer"].float()
    return buffer.mul(group["lr"] * ahead * beta / (1 - beta))


def _adam(group: State, state: State) -> Tensor:
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return _moment(group, state).div_(_root(square, group, state))


def _nadam(group: State, state: State) -> Tensor:
    beta, step = group["betas"][0], steps_of(state)
    # As with Nesterov, by a factor of its own that grows with the steps towards β.
    ahead = beta * (1 - 0.5 * 0.96 ** ((step + 1) * group["momentum_decay"]))
    factor = group["lr"] * ahead * beta / (1 - beta) / (1 - state["mu_product"] * ahead)
    moment: Tensor = state["exp_avg"].float()
    return moment.mul(factor).div_(_root(state["exp_avg_sq"], group, state))


def _radam(group: State, state: State) -> Tensor:
    beta, step = group["betas"][1], torch.as_tensor(steps_of(state))
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * step * beta**step / _correction(beta, state)
    rectifier = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    root = _root(state["exp_avg_sq"], group, state) / rectifier.clamp(min=1e-12).sqrt()
    return _moment(group, state).div_(torch.where(length > 5, root, 1.0))


def _adamax(group: State, state: State) -> Tensor:
    return _moment(group, state).div_(state["exp_inf"].float())


def _moment(group: State, state: State) -> Tensor:
    """Return lr · β / (1 − β) · m̂."""
    beta = group["betas"][0]
    moment: Tensor = state["exp_avg"].float()
    return moment.mul(group["lr"] * beta / (1 - beta) / _correction(beta, state))


def _root(square: Tensor, group: State, state: State) -> Tensor:
    return square.float().sqrt().mul_(_correction(group["betas"][1], state) ** -0.5).add_(group["eps"])


def _correction(beta: float, state: State) -> Any:
    """Return 1 − βᵗ, and a tiny number before the first step: a scaler lets a fused optimizer leave that out."""
    correction = 1 - beta ** steps_of(state)
    return correction.clamp(min=1e-30) if isinstance(correction, Tensor) else max(correction, 1e-30)


def steps_of(state: State) -> Any:
    """Return the number of steps, 0 if none is kept; a new tensor only where reading it would wait for the device."""
    step = state.get("step", 0)
    if not isinstance(step, Tensor):
        return step
    return step.item() if step.device.type == "cpu" else step.clone()


def _beta(group: State) -> float:
    return float(group["betas"][0])


MOMENTS: Mapping[type[Optimizer], Moments] = {
    torch.optim.SGD: Moments("momentum_buffer", lambda group: float(group["momentum"]), _sgd),
    torch.optim.Adam: Moments("exp_avg", _beta, _adam, "exp_avg_sq"),
    torch.optim.AdamW: Moments("exp_avg", _beta, _adam, "exp_avg_sq"),
    torch.optim.NAdam: Moments("exp_avg", _beta, _nadam, "exp_avg_sq"),
    torch.optim.RAdam: Moments("exp_avg", _beta, _radam),
    torch.optim.Adamax: Moments("exp_avg", _beta, _adamax),
}
"""Subclasses count as their base class; fused and foreach forms keep the same state."""
