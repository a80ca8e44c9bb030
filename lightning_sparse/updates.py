"""Exchange of optimizers' updates: a `Reducer` that is given the change of the weights instead of gradients.

    updates = Updates(Reducer("topk", comm, exchanged="update"), model, [optimizer])
    ...                           # a backward pass on every rank, of its own batch
    updates.begin(optimizer)
    optimizer.step()
    updates.exchange(optimizer)   # now weights are equal on all ranks

With x the weights, equal on all ranks, and w what a rank's optimizer has made of them, u = e + (x − w) is compressed,
with the residual e; all ranks go on from x minus the mean of what was sent. Every optimizer steps on its rank's own
gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.comm.broadcast import broadcast
from lightning_sparse.compressors.base import Entries
from lightning_sparse.kernels.changes import changes_
from lightning_sparse.kernels.payout import FindPayout
from lightning_sparse.layout import Segment
from lightning_sparse.moments import OTHERS, SegmentMoments, moments_of, steps_of
from lightning_sparse.options import listed
from lightning_sparse.parameters import exchanged_parameters, rests
from lightning_sparse.reducer import Reducer
from lightning_sparse.update_rule import UpdateRule


class Updates:
    """The weights that all ranks agree on, and the exchange of what optimizers change of them.

    Args:
        reducer: of `exchanged="update"`; set up here, unless it has been for the same parameters.
        model: the model; its weights are equal on all ranks.
        optimizers: its optimizers.

    Attributes:
        parameters: those that are exchanged, by name, in registration order.

    Raises:
        ValueError: a parameter belongs to two optimizers, or is not the model's; or see `Reducer.setup`.
    """

    in_flight = is_unwritten = False
    """Whether an exchange goes on, and whether the model lacks the weights of one that has ended; `DelayedUpdates`."""

    def __init__(self, reducer: Reducer, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._reducer, self._rule = reducer, reducer.method.update_rule or UpdateRule()
        self._model, self._optimizers = weakref.ref(model), optimizers
        self.parameters, self._optimizer_of, numbers = exchanged_parameters(model, optimizers)
        self._ids = {id(param) for param in self.parameters.values()}
        if reducer.layout is None:
            reducer.setup(self.parameters, numbers)
        self._weights = {name: param.detach().clone() for name, param in self.parameters.items()}
        self._steps_before: dict[str, Any] = {}
        self._begun: set[Optimizer] = set()
        self._frozen: set[str] = set()
        self._new: list[str] = []

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, unless: Tensor | None = None) -> None:
        """Take an optimizer's present weights for those that all ranks agree on; to be called before it steps.

        Weights are equal on all ranks after an exchange, and stay equal if every rank then makes the same change, by
        clipping them or by loading a checkpoint. Parameters that the optimizer was given since then are taken in.
        Where the flag `unless`, on the device, is set, those of the last call stay.
        """
        self.adopt()
        self._begun.add(optimizer)
        names = self._names_of(optimizer)
        steps = steps_of([optimizer.state.get(self.parameters[name], {}) for name in names])
        self._steps_before.update(zip(names, steps, strict=True))
        frozen = {name for name in names if not self.parameters[name].requires_grad}
        before = self._frozen.intersection(names)
        if frozen != before:
            self.land()  # a pending exchange has no update of a frozen parameter
            if self._rule.local_steps > 1 or self._rule.delayed:  # ranks may have changed it by weights that differ
                self._new += [name for name in names if name in before - frozen]
        self._frozen.difference_update(names)
        self._frozen.update(frozen)
        if names:
            self._take_weights(names, unless)

    def _take_weights(self, names: Sequence[str], unless: Tensor | None) -> None:
        params = [self.parameters[name].detach() for name in names]
        weights = [self._weights[name] for name in names]
        if unless is None:
            torch._foreach_copy_(weights, params)
        else:
            for w, param in zip(weights, params, strict=True):
                torch.where(unless, w, param, out=w)

    @torch.no_grad()
    def changed(self, optimizer: Optimizer) -> Tensor | None:
        """Return a flag on the device: whether an optimizer's weights have changed since `begin`; None without any."""
        different = [(self._weights[name] != self.parameters[name]).any() for name in self._names_of(optimizer)]
        return torch.stack(different).any() if different else None

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        return [name for name in self._weights if self._optimizer_of[name] is optimizer]

    def adopt(self) -> None:
        """Take in parameters that optimizers were given since the last step; to be called before each step."""
        if not self._is_given_others:
            return
        present, model = self._present, self._model()
        assert model is not None
        if lost := [name for name, param in self.parameters.items() if id(param) not in present]:
            raise ValueError(
                f"{type(self._optimizer_of[lost[0]]).__name__} no longer steps {listed([*map(repr, lost)])}, which it "
                f"stepped when exchanging began. Make a new optimizer of the model's parameters and exchange its "
                f"updates, by attach_updates or by a new fit; or freeze them by requires_grad_(False)."
            )
        self.parameters, self._optimizer_of, numbers = exchanged_parameters(model, self._optimizers)
        self._ids = {id(param) for param in self.parameters.values()}
        new = {name: param.detach() for name, param in self.parameters.items() if name not in self._weights}
        state = self._reducer.state_dict()
        for kept in state["elements"].values():
            kept.update({name: torch.zeros(param.shape, device="cpu") for name, param in new.items()})
        self._reducer.setup(self.parameters, numbers)
        self._reducer.load_state_dict(state)
        self._new += new
        self._weights.update({name: param.clone() for name, param in new.items()})

    @property
    def _present(self) -> set[int]:
        return {id(param) for group in self._groups for param in group["params"] if not rests(param)}

    @property
    def _is_given_others(self) -> bool:
        """Whether optimizers have other parameters than those that are exchanged."""
        return self._model() is not None and self._present != self._ids

    def _frozen_of(self, names: Iterable[str]) -> set[str]:
        """Return the parameters that were frozen before the step of their optimizer, and still are.

        They are the module's own: it may change them itself, as a momentum encoder, and an exchange leaves them alone.
        """
        return {name for name in self._frozen.intersection(names) if not self.parameters[name].requires_grad}

    @property
    def weights(self) -> Mapping[int, Tensor]:
        """The weights that all ranks agreed on last, by the id of the parameter."""
        return {id(param): self._weights[name] for name, param in self.parameters.items()}

    def has(self, param: Tensor) -> bool:
        """Return whether a parameter is among those exchanged."""
        return id(param) in self._ids

    @property
    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    @property
    def note(self) -> str:
        """One sentence about what is exchanged."""
        method, size = self._reducer.method, self._reducer.comm.size
        return self._rule.note({*self._optimizer_of.values()}, method.density if method.is_sparse else None, size)

    @torch.no_grad()
    def exchange(self, optimizer: Optimizer, ready: Callable[[Segment], None] = lambda _: None) -> None:
        """Exchange what an optimizer has changed since `begin`. Then its weights are equal on all ranks.

        If it fails, they are again those before the step.

        Args:
            optimizer: whose changes.
            ready: called with each segment, in the layout's order; returns when its parameters have been stepped.

        Raises:
            NonFiniteGradient: an update is not finite on some rank.
            RankFailure: another rank has failed, or is out of step.
            RuntimeError: `begin` was not called before the step.
        """
        segments, group_of = self._segments_of(optimizer)
        to_come = iter(segments)

        def prepare(segment: Segment) -> None:
            ready(segment)
            if frozen := self._frozen_of(segment.names):
                self._take_weights([*frozen], None)

        try:
            for segment in to_come:
                prepare(segment)
                self._exchange_segment(segment, optimizer, group_of)
            self._share_new(optimizer)
        except BaseException:  # some weights are updates, some are those of this rank, and some of all
            with contextlib.suppress(Exception):  # backward may have failed, too
                for segment in to_come:
                    prepare(segment)  # backward needs its weights as they are
            for name in (name for segment in segments for name in segment.names):
                self.parameters[name].detach().copy_(self._weights[name])
            raise
        self._reducer.finish_step()

    def wait(self) -> None:
        """Wait for an exchange that goes on, on CUDA in the current stream; raise what it has raised."""

    def land(self, write: bool = True) -> None:
        """End an exchange that goes on."""

    def ends_soon(self) -> bool:
        """Return whether an exchange that goes on ends soon, and without an error."""
        return True

    def _segments_of(self, optimizer: Optimizer) -> tuple[list[Segment], dict[int, Any]]:
        """Return the segments of an optimizer whose step has begun, and its groups by the id of the parameter."""
        assert self._reducer.layout is not None
        if optimizer not in self._begun:
            raise RuntimeError(f"Updates.begin(optimizer) comes before {type(optimizer).__name__}.step().")
        self._begun.remove(optimizer)
        group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        return [x for x in self._reducer.layout.segments if self._optimizer_of[x.names[0]] is optimizer], group_of

    def _share_new(self, optimizer: Optimizer) -> None:
        """Broadcast layers from rank 0 that were created or unfrozen during training: ranks may differ in them.

        After their first exchange: that is where ranks whose parameters differ are told so.
        """
        new = [name for name in self._new if self._optimizer_of[name] is optimizer]
        if new:
            tensors = [self.parameters[name].detach() for name in new]
            broadcast(self._reducer.comm, tensors, tensors[0].device)
        self._new = [name for name in self._new if name not in new]

    def _exchange_segment(self, segment: Segment, optimizer: Optimizer, group_of: Mapping[int, Any]) -> None:
        stepped = [self.parameters[name].detach() for name in segment.names]
        weights = [self._weights[name] for name in segment.names]
        reducer = self._reducer
        residual = reducer.states[segment.index].get("residual")
        alone = reducer.comm.size == 1 and not self._rule.has_outer_step
        # Lossless on one rank: no round trip, as x - (x - w) may differ from w by rounding.
        leaves_weights = (
            alone and reducer.method.compressor.is_exact(reducer.density) and (residual is None or not residual.any())
        )
        frozen, rescaling, payout, emptied = self._of_optimizer(segment, optimizer, group_of)
        flat, flat_weights = [[x.reshape(-1) for x in tensors] for tensors in (stepped, weights)]
        in_place = not leaves_weights and all(w.dtype == torch.float32 and w.is_contiguous() for w in stepped)
        if in_place:  # saves as much memory as the segment has, and a pass over it
            changes = flat
        else:
            changes = segment.views(torch.empty(segment.numel, dtype=torch.float32, device=stepped[0].device))
        changes_(changes, flat_weights, flat, segment.bounds, rescaling)
        del flat  # copies, where weights are not contiguous
        applied = reducer.reduce_segment_(segment, changes, frozen, payout)
        if emptied is not None and isinstance(applied, Entries):  # a dense segment has no second delay
            emptied.take_out(applied)
        if leaves_weights:
            return
        self._rule.outer_step_(changes, segment, reducer.states[segment.index], frozen)
        changes_(changes, flat_weights, changes, segment.bounds)
        if in_place:
            return
        torch._foreach_copy_(stepped, [x.view(w.shape) for w, x in zip(weights, changes, strict=True)])
        if residual is not None:  # it keeps what rounding has added to the weights
            changes_(changes, [x.reshape(-1) for x in stepped], changes, segment.bounds)
            torch._foreach_add_(segment.views(residual), changes)

    def _of_optimizer(
        self, segment: Segment, optimizer: Optimizer, group_of: Mapping[int, Any]
    ) -> tuple[set[str], tuple[Tensor, Tensor] | None, FindPayout | None, SegmentMoments | None]:
        """Return what a segment's optimizer says about its step.

        Returns:
            The frozen parameters; the factors of `SegmentMoments.rescaling`; the payout, see `Reducer.reduce_segment_`;
            and the moments, if they are to be emptied where entries are sent. None where nothing is to be done.
        """
        size, density = self._reducer.comm.size, self._reducer.density
        rescales, empties = self._rule.rescales(optimizer, size), self._empties_momentum(optimizer, density)
        frozen = self._frozen_of(segment.names)
        if not rescales and not empties:
            return frozen, None, None, None
        moments, rescaling = self._moments(segment, optimizer, group_of, frozen), None
        if rescales:
            before = [self._steps_before.get(name, 0) for name in segment.names]
            rescaling = moments.rescaling(before, size)
        pays = empties and self._rule.momentum == "pay_out"
        return frozen, rescaling, moments.payout if pays else None, moments if empties else None

    def _moments(
        self, segment: Segment, optimizer: Optimizer, group_of: Mapping[int, Any], frozen: Collection[str]
    ) -> SegmentMoments:
        params, kind = [self.parameters[name] for name in segment.names], moments_of(optimizer)
        assert kind is not None
        groups = [group_of[id(param)] for param in params]
        # A frozen parameter's momentum is neither paid out nor emptied, nor one that only the change would tell.
        keeps = [
            name in frozen or (kind is OTHERS and param.grad is None)
            for name, param in zip(segment.names, params, strict=True)
        ]
        states = [{} if keep else optimizer.state.get(param, {}) for keep, param in zip(keeps, params, strict=True)]
        return SegmentMoments(segment, kind, groups, states, params[0].device)

    def _empties_momentum(self, optimizer: Optimizer, density: float | None) -> bool:
        return self._rule.empties_momentum(optimizer, density if self._reducer.method.is_sparse else None)
