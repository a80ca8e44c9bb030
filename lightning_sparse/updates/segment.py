"""One segment of exchanged updates: its weights, its deltas, and the arithmetic of one exchange.

Let w be the weights that all ranks agree on, and x this rank's weights after its optimizer has stepped from w:

    delta = w − x;   u = residual + delta + unspent momentum;   x ← w − mean of the entries sent by all ranks

With overlap="next_step" the exchange ends one step later. A rank applies its own entries c at once, so its next step
starts from y = w − c. At the next exchange, x are its weights after its optimizer has stepped from y:

    delta = y − x;   w ← w − mean of the c sent last;   c ← entries sent of u;   x ← w − c

So w is equal on all ranks, and no change is lost. But each gradient is computed at weights that lack the other ranks'
last updates. The idea is that of DaSGD (Zhou et al. 2020, arXiv 2006.00441) and of eager updates (Kale et al. 2025,
arXiv 2502.12996). Here it is applied to sparse updates with error feedback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.compressors.base import Entries, Update
from lightning_sparse.kernels.changes import changes_
from lightning_sparse.layout import Segment
from lightning_sparse.momentum import SegmentMoments, last_step_references, moments_of
from lightning_sparse.reducer import PendingExchange, Reducer
from lightning_sparse.shards import local, locals_of
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.signal_share import SignalShare


class _Ahead(NamedTuple):
    """A rank's own entries, which it has applied before the other ranks' entries have arrived.

    Attributes:
        mean: 1-D fp32; the mean of all ranks after the exchange has completed.
        indices: indices of the elements in which y and w differ, int64. They may be padded with the segment's length.
            None: all elements.
        w: the agreed weights of these elements.
    """

    mean: Tensor
    indices: Tensor | None
    w: Tensor


@dataclass
class _Step:
    """The step that is exchanged next.

    Attributes:
        stepped: by parameter, whether the step had a gradient; None if that is unknown.
        references: with several local steps, see `last_step_references`.
    """

    stepped: list[bool] | None = None
    references: list[Tensor] | None = None


class UpdateSegment:
    """The parameters of one segment, the weights that all ranks agree on, and the arithmetic of an exchange.

    If parameters are sharded, weights and deltas are of this rank's shards.

    Args:
        parameters: the model's parameters by name; changed in place.
        weights: the agreed weights by name; copied.
        optimizer: the optimizer of these parameters.
        reducer: compresses and exchanges.

    Attributes:
        segment: the given segment.
        optimizer: the given optimizer.
        frozen: names of parameters that were frozen before the step of their optimizer, and had no gradient.
            Parameters that are still frozen belong to the module, which may change them, as a momentum encoder does.
            An exchange skips them.
        weights: the weights from which this rank's next step starts, by name.
        ahead: this rank's own entries, while an exchange with overlap="next_step" is pending; else None.
        is_stale: whether an exchange has left the model its earlier weights, without the agreed ones.
        signal: the share of signal in squared gradients, from which updates are rescaled.
    """

    def __init__(
        self,
        segment: Segment,
        parameters: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        optimizer: Optimizer,
        reducer: Reducer,
    ) -> None:
        self.segment, self.optimizer, self._reducer = segment, optimizer, reducer
        self._params = {name: parameters[name] for name in segment.names}
        parts = [weights[name].detach().reshape(-1) for name in segment.names]
        self._flat = torch.cat([*parts, parts[0].new_zeros(1)])  # one more element, for the indices of padding
        self._flat_weights = segment.views(self._flat[:-1])
        self.weights = self._shaped(self._flat_weights)
        self.frozen: set[str] = set()
        self.ahead: _Ahead | None = None
        self.is_stale = False
        self.signal = SignalShare(segment, reducer, self._flat.device)
        self._step = _Step()

    @property
    def _rule(self) -> UpdateRule:
        return self._reducer.method.rule

    @property
    def _residual(self) -> Tensor | None:
        return self._reducer.states[self.segment.index].get("residual")

    @property
    def _present(self) -> dict[str, Tensor]:
        """The present weights by name: this rank's part of each parameter."""
        return locals_of(self._params)

    def _shaped(self, flat: Iterable[Tensor]) -> dict[str, Tensor]:
        names, shapes = self.segment.names, self.segment.shapes
        return {name: x.view(shape) for name, x, shape in zip(names, flat, shapes, strict=True)}

    @property
    def agreed(self) -> dict[str, Tensor]:
        """The last agreed weights by name, without frozen parameters, which belong to the module."""
        agreed, frozen = self.weights, self._still_frozen
        if self.ahead is not None:
            flat = self._flat.clone()
            flat[_places(self.ahead)] = self.ahead.w
            agreed = self._shaped(self.segment.views(flat[:-1]))
        return {name: w for name, w in agreed.items() if name not in frozen}

    @property
    def _still_frozen(self) -> set[str]:
        return {name for name in self.frozen if not self._params[name].requires_grad}

    # Before and after a step of the optimizer.

    def take_weights(self, names: Iterable[str] | None = None, unless: Tensor | None = None) -> None:
        """Take the present weights of all parameters, or of some, as the agreed ones.

        If an exchange is pending, only the weights of frozen parameters are taken.

        Args:
            names: names of the parameters; None is all of them.
            unless: a flag on the device; if it is set, the weights stay.
        """
        chosen = self._params if names is None else names
        if self.ahead is not None:
            chosen = [name for name in chosen if name in self.frozen]
        pairs = [(self.weights[name], local(self._params[name])) for name in chosen]
        if unless is not None:
            for w, param in pairs:
                torch.where(unless, w, param, out=w)
        elif pairs:
            torch._foreach_copy_([w for w, _ in pairs], [param for _, param in pairs])

    def note_last_step(self, groups: Mapping[int, Any]) -> None:
        """Record weights before the last of several local steps, to separate its change from earlier ones.

        Args:
            groups: parameter groups by id of the parameter.
        """
        if self._clears and self._rule.momentum == "pay_out":
            ours = [groups[id(param)] for param in self._params.values()]
            flat = [x.reshape(-1) for x in self._present.values()]
            self._step.references = last_step_references(self._flat_weights, flat, ours)

    def note_step(self, groups: Mapping[int, Any], *, skipped: bool = False) -> None:
        """Record after a step which parameters the optimizer has stepped, and perhaps a sample of gradients.

        Args:
            groups: parameter groups by id of the parameter.
            skipped: whether the optimizer skipped the step.
        """
        self._step.stepped = [param.grad is not None and not skipped for param in self._params.values()]
        if self._rule.rescales(self.optimizer, self._reducer.workers):
            self.signal.take_sample(partial(self._moments, groups), [*self._params.values()], skipped)

    @property
    def differs(self) -> list[Tensor]:
        """Flags on the device, one per parameter: whether its weights differ from `weights`."""
        return [(self.weights[name] != x).any() for name, x in self._present.items()]

    # An exchange.

    def exchange_(self, groups: Mapping[int, Any], write: bool = True) -> None:
        """Exchange the delta. Afterwards weights are equal on all ranks.

        Args:
            groups: parameter groups by id of the parameter.
            write: if False, the model keeps its present weights, and the agreed ones are only in `weights`.
        """
        self.take_weights(self._still_frozen)
        reducer, segment, residual = self._reducer, self.segment, self._residual
        params, weights = [*self._present.values()], self._flat_weights
        alone = reducer.comm.size == 1 and not self._rule.has_outer_step
        # On one rank, a lossless exchange leaves weights unchanged: w - (w - x) may differ from x by rounding.
        leaves_weights = (
            alone and reducer.method.compressor.is_exact(reducer.density) and (residual is None or not residual.any())
        )
        in_place = write and not leaves_weights and all(x.dtype == torch.float32 and x.is_contiguous() for x in params)
        flat = [x.reshape(-1) for x in params]  # copies, if weights are not contiguous
        if in_place:  # saves the memory of the segment, and one pass over it
            deltas = flat
        else:
            deltas = segment.views(torch.empty(segment.numel, dtype=torch.float32, device=flat[0].device))
        pending, moments = self._begin(flat, deltas, groups)
        del flat
        sent = reducer.finish(pending)
        self.signal.compare()
        if moments is not None and isinstance(sent, Entries):  # a dense segment has no second delay
            moments.clear_(sent)
        if leaves_weights:
            return
        self._rule.outer_step_(deltas, segment, reducer.states[segment.index], self._still_frozen)
        changes_(deltas, weights, deltas, segment.bounds)
        if in_place:
            return
        self.is_stale, agreed = not write, params if write else [*self.weights.values()]
        torch._foreach_copy_(agreed, [x.view(shape) for x, shape in zip(deltas, segment.shapes, strict=True)])
        if residual is not None:  # it keeps the rounding error of the weights
            changes_(deltas, [x.reshape(-1) for x in agreed], deltas, segment.bounds)
            torch._foreach_add_(segment.views(residual), deltas, alpha=1 / self._rule.outer_gain)

    def begin_(self, groups: Mapping[int, Any], write: bool = True) -> PendingExchange:
        """Apply the pending mean, compress the delta, and apply this rank's own entries until the next mean arrives.

        Args:
            groups, write: see `exchange_`.

        Returns:
            The exchange; `Reducer.finish` completes it, perhaps in another thread.
        """
        segment = self.segment
        mean = torch.empty(segment.numel, dtype=torch.float32, device=self._flat.device)
        flat = [x.reshape(-1) for x in self._present.values()]
        pending, moments = self._begin(flat, segment.views(mean), groups)
        sent = self._reducer.compress(pending)
        if moments is not None and isinstance(sent, Entries):
            moments.clear_(sent)
        self.ahead = _Ahead(mean, *_apply_own_update_(self._flat, sent))
        if write:
            self.write()
        else:
            self.is_stale = True
        return pending

    def _begin(
        self, stepped: list[Tensor], deltas: list[Tensor], groups: Mapping[int, Any]
    ) -> tuple[PendingExchange, SegmentMoments | None]:
        """Write the deltas, rescaled, and begin their exchange.

        Returns:
            The exchange; and the moments, if they must be cleared at the sent entries, else None.
        """
        segment, weights, rule = self.segment, self._flat_weights, self._rule
        workers, step, find = self._reducer.workers, self._step, None
        rescales = rule.rescales(self.optimizer, workers)
        clears = self._clears and step.stepped is not None
        pays = clears and rule.momentum == "pay_out"
        if pays and rule.local_steps > 1 and step.references is None:
            pays = clears = False  # the change of the last step is unknown
        moments = self._moments(groups) if rescales or clears else None
        rescaling = moments.rescaling(self.signal.excess) if moments is not None and rescales else None
        changes_(deltas, weights, stepped, segment.bounds, rescaling)
        if self.ahead is not None:
            self._apply_mean(self.ahead)
        if moments is not None and pays:
            find = partial(moments.payout, weights, step.references)
        self._step = _Step()
        pending = self._reducer.begin(segment, deltas, self._still_frozen, find)
        return pending, moments if clears else None

    def _moments(self, groups: Mapping[int, Any]) -> SegmentMoments:
        kind, params, frozen = moments_of(self.optimizer), self._params, self._still_frozen
        assert kind is not None
        stepped = self._step.stepped or [False] * len(params)
        # Leave the momentum of frozen parameters and of parameters without a step unchanged.
        states = [
            self.optimizer.state.get(param, {}) if has_step and name not in frozen else {}
            for (name, param), has_step in zip(params.items(), stepped, strict=True)
        ]
        states = [{key: local(x) for key, x in state.items()} for state in states]
        ours = [groups[id(param)] for param in params.values()]
        # On the device, 1 if a gradient scaler makes a fused optimizer skip the step that is exchanged.
        found = getattr(self.optimizer, "found_inf", None) if self._step.stepped is not None else None
        skipped = None if found is None else local(found)
        return SegmentMoments(self.segment, kind, ours, states, self._flat.device, skipped, self._flat.dtype)

    @property
    def _clears(self) -> bool:
        density = self._reducer.density if self._reducer.method.is_sparse else None
        return self._rule.clears_momentum(self.optimizer, density)

    # A pending exchange.

    def complete_(self) -> list[tuple[Tensor, Tensor]]:
        """Apply the pending mean to the agreed weights. Changes since the exchange began go into the residual.

        Returns:
            Present weights, and the amounts to subtract to keep these changes in them; empty with a residual.
        """
        assert self.ahead is not None
        self.take_weights(self.frozen)
        segment, residual, params = self.segment, self._residual, self._present.values()
        kept: list[tuple[Tensor, Tensor]] = []
        if not self.is_stale:  # otherwise the model has weights from before the exchange began
            own = segment.views(torch.empty_like(self.ahead.mean))
            changes_(own, self._flat_weights, [x.reshape(-1) for x in params], segment.bounds)
            if residual is not None:
                torch._foreach_add_(segment.views(residual), own)
            else:
                kept = [(w, x.view(w.shape)) for w, x in zip(params, own, strict=True)]
        self._apply_mean(self.ahead)
        self.is_stale = True
        return kept

    def _apply_mean(self, ahead: _Ahead) -> None:
        """Change the agreed weights by the mean."""
        frozen = {name: self.weights[name].clone() for name in self.frozen}
        self._step_back(ahead)
        flat, residual, mean = self._flat[:-1], self._residual, ahead.mean
        exact = torch.sub(flat.float(), mean, out=mean)
        flat.copy_(exact)
        if flat.dtype != torch.float32 and residual is not None:
            residual.add_(torch.sub(flat.float(), exact, out=exact))  # it keeps the rounding error
        for name, weight in frozen.items():
            self.weights[name].copy_(weight)

    def _step_back(self, ahead: _Ahead) -> None:
        self._flat[_places(ahead)] = ahead.w
        self.ahead = None

    def write(self) -> None:
        """Write the weights from which the next step starts into the model, except those of frozen parameters."""
        frozen = self._still_frozen
        if names := [name for name in self._params if name not in frozen]:
            torch._foreach_copy_([local(self._params[name]) for name in names], [self.weights[name] for name in names])
        self.is_stale = False

    def restore_(self) -> None:
        """Write the last agreed weights into the model, after training has failed."""
        if self.ahead is not None:
            self._step_back(self.ahead)
        with contextlib.suppress(RuntimeError):  # CUDA may be broken
            self.write()


def _places(ahead: _Ahead) -> Tensor | slice:
    return ahead.indices if ahead.indices is not None else slice(-1)


def _apply_own_update_(flat: Tensor, sent: Update) -> tuple[Tensor | None, Tensor]:
    """Subtract this rank's entries from weights with one element of padding; return their indices and old values."""
    if isinstance(sent, Entries):
        indices = sent.indices
        w = flat[indices]
        flat[indices] = (w.float() - sent.values).to(flat.dtype)
        return indices, w
    w = flat[:-1].clone()
    flat[:-1].copy_(w.float() - sent)
    return None, w
