"""The momentum of optimizers: its place in their states, its unspent part, and the rescaling of updates.

**Momentum payout.** A first moment spreads each gradient over later steps. The unspent momentum p is the weight change
that the moment would still make without new gradients. It is β/(1 − β) · (change of the last step − its decoupled
weight decay). The residual already delays an entry that is sent seldom, and the moment delays it again. So p is added
to the delta before entries are selected, and the moment is cleared at the sent entries. For other entries p stays in
the moment. Momentum factor masking (Lin et al. 2018, arXiv 1712.01887) clears the moment, but does not send p.

Up to the bias correction, p is exact for steps that are linear in the first moment. These are the steps of SGD, Adam,
AdamW, RAdam, Adamax, and most optimizers of other packages. Steps with Nesterov momentum and NAdam's also contain the
last gradient itself. For them p is computed from the moments: by the change, the GPT of `benchmarks.optimizers`
diverged with NAdam. Later updates would be rescaled (below), but p is not. With four ranks, the GPT of
`benchmarks.updates` ended at a higher loss with p rescaled.

**Second-moment rescaling.** Adam divides by the root of v, the mean of squared gradients. A gradient of one rank's
batch has P times the variance of the mean over P ranks. If noise dominates, a rank's v is P times that of dense
training. Its updates are then too small by √P, and a learning rate for dense training is too low.

Let q be the fraction of v that is signal. The mean gradient would have the second moment (q + (1 − q)/P) v. So deltas
are multiplied by f = 1/√(q + (1 − q)/P), one f per segment. Ranks find q by comparing gradients, see
`lightning_sparse.updates.signal_share`.

v is a mean over about 1/(1 − β₂) steps, and in each step one rank has a P-th of the examples. So while a rank steps,
1 − β₂ is divided by P (`second_decay`). This is the scaling rule of Adam for smaller batches (Malladi et al. 2022,
arXiv 2205.10287). Otherwise v follows single examples. With β₂ = 0.95, 20 steps, a rank's steps are then too small
for large, rare gradients. Also, v shrinks while an entry waits. With torch's β₂ = 0.999 the window is long enough.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.compressors.base import Entries
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.kernels.payout import Payout
from lightning_sparse.kernels.write_back import clear_entries_
from lightning_sparse.layout import Segment

State = Mapping[str, Any]
LONGEST = 0.999
"""The largest β₂ that `second_decay` makes: a window of 1,000 steps."""


class Moments(NamedTuple):
    """The keys and the decay of the moments in one kind of optimizer.

    Attributes:
        first: key of the first moment in the optimizer's state of a parameter.
        beta: returns the decay of the first moment, from a parameter group.
        second: key of the second moment, the mean of squared gradients. None if the optimizer's updates are not those
            of Adam, so that they cannot be rescaled.
        unspent: returns the unspent momentum of a parameter, fp32, from its group and state. None if a step is linear
            in the first moment, so that the change gives it.
        is_guessed: whether the kind is a guess from the optimizer's name. Then a parameter has moments only if its
            state contains both moments of Adam.
    """

    first: str
    beta: Callable[[State], float]
    second: str | None = None
    unspent: Callable[[State, State], Tensor] | None = None
    is_guessed: bool = False


class SegmentMoments:
    """The moments of the parameters of one segment, after one step.

    Args:
        kind: the kind of the optimizer's moments.
        groups: the parameter group of each parameter, in the segment's order.
        states: the optimizer's state of each parameter; empty for a parameter that the optimizer has not stepped.
        skipped: an fp32 scalar on the device: 1 if a gradient scaler made the optimizer skip the step, else 0. None if
            the optimizer took the step.
        dtype: the dtype of the weights.
    """

    def __init__(
        self,
        segment: Segment,
        kind: Moments,
        groups: Sequence[State],
        states: Sequence[State],
        device: torch.device,
        skipped: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._segment, self._kind, self._groups, self._states, self._device = segment, kind, groups, states, device
        self._dtype = dtype
        self._skipped = None if skipped is None else skipped.reshape(())
        self._first: list[Tensor | None] = [state.get(kind.first) for state in states]
        if kind.is_guessed:
            plain = map(_has_adams_moments, states, segment.shapes)
            self._first = [m if is_plain else None for m, is_plain in zip(self._first, plain, strict=True)]
        self._flat_first = _flat(self._first)
        self._factors: Tensor | None = None  # f of each parameter, after a call of `rescaling`

    @property
    def _is_empty(self) -> bool:
        return all(moment is None for moment in self._first)

    def sample(self, grads: Sequence[Tensor | None], weights: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
        """Return g/√v at some elements, 1-D bf16: 0 without a gradient or without moments, NaN if the step was skipped.

        If weight decay is not decoupled, the optimizer adds it to the gradient. So it is in v, and is added to g, too.

        Args:
            grads: the gradient of each parameter, in the segment's order.
            weights: each parameter.
            indices: indices of elements of the segment, ascending.
        """
        bounds, second = self._segment.bounds, self._kind.second or ""
        own = [index - bounds[bisect_right(bounds, index) - 1] for index in indices]  # index in the parameter
        places = to_device(torch.tensor(own, device="cpu"), self._device)
        g, v = torch.zeros(2, len(indices), dtype=torch.float32, device=self._device)
        for number, (start, stop) in enumerate(pairwise(bounds)):
            first, last = bisect_left(indices, start), bisect_left(indices, stop)
            grad, chosen = grads[number], places[first:last]
            if first < last and grad is not None and self._first[number] is not None:
                g[first:last] = grad.reshape(-1)[chosen]
                if decay := _coupled_decay(self._groups[number]):
                    g[first:last] += decay * weights[number].reshape(-1)[chosen]
                v[first:last] = self._states[number][second].reshape(-1)[chosen]
        u = torch.where(v == 0, 0.0, g * v.rsqrt())
        if self._skipped is not None:
            u = torch.where(self._skipped > 0, math.nan, u)
        return u.bfloat16()

    def rescaling(self, excess: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the factors that rescale the segment's deltas.

        Decoupled weight decay is not rescaled, because it has no noise. Parameters without a step get a factor of 1.

        Args:
            excess: f − 1, an fp32 scalar on the parameters' device.

        Returns:
            f and r = (1 − f) · rate · weight decay of each parameter, 1-D fp32, on the parameters' device. The delta c
            of weights w becomes f·c + r·w. None if there are no moments yet.
        """
        if self._is_empty:
            return None
        numbers = self._per_parameter(lambda group: (1.0, -_decay(group, self._dtype)))
        if self._skipped is not None:
            numbers = torch.where(self._skipped > 0, 0.0, numbers)
        self._factors, decay_terms = numbers * excess
        return self._factors.add_(1), decay_terms

    def payout(self, weights: Sequence[Tensor], before_last: Sequence[Tensor] | None = None) -> Payout | None:
        """Return the unspent momentum of the segment, in terms of its deltas; None if there is none yet.

        Args:
            weights: the weights before the step, 1-D, one per parameter.
            before_last: after several local steps, `last_step_references` of the last one. The deltas then contain the
                changes of all local steps.
        """
        if self._is_empty:
            return None
        references: Sequence[Tensor] | None
        factors = self._factors
        if self._kind.unspent is not None and any(group.get("nesterov", True) for group in self._groups):
            # From the moments: independent of the deltas, and not rescaled.
            references, factors = self._from_moments(self._kind.unspent, weights), None
            rows: Callable[[State], tuple[Any, Any]] = lambda _: (0.0, 1.0)  # noqa: E731
        else:
            decays = any(map(_decays, self._groups))
            references = before_last if before_last is not None else weights if decays else None

            def rows(group: State) -> tuple[Any, Any]:
                beta = self._kind.beta(group)
                unspent = beta / (1 - beta)
                return unspent, -unspent * (_decay(group, self._dtype) if before_last is None else 1.0)

        coefficients = self._per_parameter(rows)
        if self._skipped is not None:
            coefficients = torch.where(self._skipped > 0, 0.0, coefficients)
        return Payout(coefficients, references, factors)

    def _from_moments(self, unspent: Callable[[State, State], Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the unspent momentum of each parameter, 1-D fp32; zeros without momentum."""
        each = zip(self._first, weights, self._groups, self._states, strict=True)
        return [
            torch.zeros_like(w, dtype=torch.float32) if moment is None else unspent(group, state).contiguous().view(-1)
            for moment, w, group, state in each
        ]

    def clear_(self, applied: Entries) -> None:
        """Set the moments of applied entries to zero, unless the optimizer skipped the step."""
        for indices, _ in applied.lists:
            if self._skipped is not None:
                indices = torch.where(self._skipped > 0, self._segment.numel, indices)  # as padding
            clear_entries_(self._flat_first, self._segment.bounds, indices)
        for moment, cleared in zip(self._first, self._flat_first, strict=True):
            if moment is not None and cleared is not None and not moment.is_contiguous():
                moment.copy_(cleared.view(moment.shape))

    def _per_parameter(self, rows: Callable[[State], tuple[Any, Any]]) -> Tensor:
        """Return two numbers for each parameter, (2, parameters), fp32, on the parameters' device; 0 without momentum.

        They are computed for all parameters of a group at once, because an operation on the device is a launch.

        Args:
            rows: returns the two numbers of a parameter group.
        """
        of_group: dict[int | None, list[int]] = {}
        for index, (group, moment) in enumerate(zip(self._groups, self._first, strict=True)):
            of_group.setdefault(None if moment is None else id(group), []).append(index)
        made: list[Sequence[Any]] = []
        for key, indices in of_group.items():
            made.append((0.0, 0.0) if key is None else rows(self._groups[indices[0]]))
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


def last_step_references(
    weights: Sequence[Tensor], before_last: Sequence[Tensor], groups: Sequence[State]
) -> list[Tensor]:
    """Return fp32 z with (delta of all local steps) − z = the last step's change without its decoupled weight decay.

    Args:
        weights: the weights before the first local step, one per parameter.
        before_last: the weights before the last local step, one per parameter.
        groups: the parameter group of each parameter, with the settings of the last step.
    """
    each = zip(weights, before_last, groups, strict=True)
    return [w.float() - (1 - _decay(group, x.dtype)) * x.float() for w, x, group in each]


def _decay(group: State, dtype: torch.dtype) -> Any:
    """Return the share of the weights that decoupled weight decay subtracts in each step.

    Optimizers of torch decay the weights before the step. In 16 bits such a small change is lost by rounding, unless a
    fused kernel rounds once for decay and step.
    """
    decay = group["lr"] * group["weight_decay"] if _decays(group) else 0.0
    if dtype.itemsize > 2 or group.get("fused"):
        return decay
    least = torch.finfo(dtype).eps / 8  # eps / 4 changes no weight
    return torch.where(decay < least, 0.0, decay) if isinstance(decay, Tensor) else decay * (decay >= least)


def _decays(group: State) -> bool:
    return bool(group.get("decoupled_weight_decay") and group["weight_decay"])


def _coupled_decay(group: State) -> Any:
    """Return the decay that the optimizer adds to gradients; negative if it maximizes."""
    coupled = group.get("decoupled_weight_decay") is False  # other packages' optimizers without this key may decouple
    return group["weight_decay"] * (-1 if group.get("maximize") else 1) if coupled else 0


def _on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _row(x: Any, count: int, device: torch.device) -> Tensor:
    """Return a number, or a scalar, as `count` fp32 numbers on the device."""
    if isinstance(x, Tensor) and x.device == device:
        return x.float().expand(count)
    return torch.full((count,), float(x), dtype=torch.float32, device=device)


def _flat(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors as 1-D and contiguous: views of contiguous tensors, copies of others."""
    return [None if x is None else x.contiguous().view(-1) for x in tensors]


def moments_of(optimizer: Optimizer) -> Moments | None:
    """Return the kind of an optimizer's moments; None if it is unknown."""
    kinds = type(optimizer).__mro__
    known = next((MOMENTS[kind] for kind in kinds if kind in MOMENTS), None)
    # The state alone is not enough: Ranger and SOAP have moments with Adam's names, but other rules also change their
    # weights. A payout of these changes amplifies itself, and training diverges. The names below were measured: their
    # training gains by the payout.
    if known is None and all(_has_betas(group) for group in optimizer.param_groups):
        names = [kind.__name__.lower() for kind in kinds if not kind.__module__.startswith("torch.optim.")]
        if not any(part in name for part in UNLIKE for name in names):
            known = next((LIKE[part] for part in LIKE if any(part in name for name in names)), None)
    return known


def second_decay(beta: Any, size: int) -> Any:
    """Return β₂ for the gradients of one of `size` ranks: 1 − (1 − β₂)/P, at most `LONGEST`. A larger β₂ stays.

    Args:
        beta: β₂ for dense training, a number or a scalar tensor.
    """
    longer = 1 - (1 - beta) / size
    if isinstance(beta, Tensor):
        return torch.minimum(longer, beta.clamp(min=LONGEST))
    return min(longer, max(beta, LONGEST))


def _has_betas(group: State) -> bool:
    betas = group.get("betas")
    return isinstance(betas, Sequence) and len(betas) == 2 and all(isinstance(x, int | float | Tensor) for x in betas)


def _has_adams_moments(state: State, shape: Sequence[int]) -> bool:
    """Return whether a state has both moments of Adam, each with one number per element of its parameter."""
    moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
    # Other optimizers quantize their moments, in custom classes, or keep factors of a matrix.
    return all(type(m) is Tensor and m.shape == torch.Size(shape) and m.is_floating_point() for m in moments)


def _beta(group: State) -> float:
    return float(group["betas"][0])


def _unspent_of_sgd(group: State, state: State) -> Tensor:
    """Return lr · μ / (1 − μ) · buffer; with Nesterov momentum μ times that, because a step is one ahead."""
    momentum = group["momentum"]
    factor = group["lr"] * (momentum if group["nesterov"] else 1.0) * momentum / (1 - momentum)
    result: Tensor = state["momentum_buffer"].float() * factor
    return result


def _unspent_of_nadam(group: State, state: State) -> Tensor:
    """Return the unspent momentum of NAdam. Its steps are one ahead by a factor that grows towards β₁."""
    first, (beta, beta_of_second) = state["exp_avg"], group["betas"]
    step, product = (to_device(state[name].float(), first.device) for name in ("step", "mu_product"))
    ahead = beta * (1 - 0.5 * 0.96 ** ((step + 1) * group["momentum_decay"]))
    of_first = group["lr"] * ahead * beta / (1 - beta) / (1 - product * ahead)
    correction = (1 - beta_of_second**step).clamp(min=1e-30)
    divisor = (state["exp_avg_sq"].float() / correction).sqrt_().add_(group["eps"])
    result: Tensor = first.float() * of_first / divisor
    return result


ADAM = Moments("exp_avg", _beta, second="exp_avg_sq")
MOMENTS: Mapping[type[Optimizer], Moments] = {
    torch.optim.SGD: Moments("momentum_buffer", lambda group: float(group["momentum"]), unspent=_unspent_of_sgd),
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.NAdam: Moments("exp_avg", _beta, "exp_avg_sq", _unspent_of_nadam),
    torch.optim.RAdam: Moments("exp_avg", _beta),
    torch.optim.Adamax: Moments("exp_avg", _beta),
}
"""Class of an optimizer to its moments; subclasses count as their base class. Fused forms have the same state."""
ADAM_LIKE = Moments("exp_avg", _beta, "exp_avg_sq", is_guessed=True)
LIKE = {"adam": ADAM_LIKE, "lamb": ADAM_LIKE, "adopt": Moments("exp_avg", _beta, is_guessed=True)}
"""Part of a name to the moments of optimizers of other packages with betas; see `Moments.is_guessed`. ADOPT divides a
gradient before it enters the first moment. Rescaling was not tried with it."""
UNLIKE = ("nadam", "qhadam", "exadam", "dadapt", "muon")
"""Parts of names of other packages' optimizers that step by more than the first moment, or have moments in different
units. A payout computed from the change of the weights would also send the last gradient many times."""
