"""Overlap with backward: each segment is stepped and exchanged as soon as its gradients are complete.

    overlap = BackwardOverlap(updates, optimizer)
    overlap.watch()
    ...                      # the backward pass of the next step
    overlap.end()
    if overlap.has_begun:    # the optimizer's own step does nothing
        overlap.finish()     # weights are equal now

`end` hides the gradients, so that the optimizer's own step changes nothing. If no segment was stepped within backward,
the exchange comes after the step as usual.

Weights, residuals, moments and messages are bit-identical to those of an exchange after the step, and the order of the
segments is the same. So each rank decides in each step, without the others, whether to overlap.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from lightning_sparse._compat import collectives_so_far, gradient_hooks, in_backward, step_without_hooks
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.segment import UpdateSegment

log = logging.getLogger(__name__)
_NEEDED_AGAIN = (
    "A weight may have been needed for another gradient after it had been stepped within backward, as it is where a "
    "detached one is used. Then set overlap='none' of the strategy: the exchange begins when backward has ended."
)


@dataclass
class _Part:
    """One segment, and the part of the optimizer that steps it.

    Attributes:
        segment: the segment.
        params: its parameters.
        optimizer: a copy of the optimizer, which shares the optimizer's state.
        groups: for each parameter group of the optimizer, its parameters in this segment.
    """

    segment: UpdateSegment
    params: list[Tensor]
    optimizer: Optimizer
    groups: list[list[Tensor]]


@dataclass
class _Plan:
    """The gradients that a backward pass is expected to compute.

    Attributes:
        parts: the segments in the layout's order.
        index: parameter to the index of its part.
        trained: the parameters, each with whether it requires a gradient.
        groups: the ids of the parameters in each parameter group of the optimizer.
        hooks: the hooks on their gradients.
        allowed: whether segments may be stepped within backward; None before the first pass has ended.
        in_parts: whether a gradient has arrived in several parts.
    """

    parts: list[_Part]
    index: dict[Tensor, int]
    trained: list[tuple[Tensor, bool]]
    groups: list[list[int]]
    hooks: list[Any] = field(default_factory=list)
    allowed: bool | None = None
    in_parts: bool = False


@dataclass
class _Pass:
    """One backward pass.

    Attributes:
        collectives: on CUDA, the number of collectives before the pass.
        arrived: parameters whose gradients have been computed.
        missing: number of missing gradients, by index of each part that has not been stepped.
        streams: on CUDA, the streams that have computed gradients.
    """

    collectives: int
    arrived: set[Tensor] = field(default_factory=set)
    missing: dict[int, int] = field(default_factory=dict)
    streams: set[torch.cuda.Stream] = field(default_factory=set)


class BackwardOverlap:
    """Steps one optimizer segment by segment, within the backward passes that it watches.

    The first pass is only observed. Segments are stepped after backward in any of these cases:

    - a gradient arrives in several parts, as with reentrant checkpointing;
    - backward recomputes parts of the model, because they may need weights of other parts;
    - on CUDA, backward calls collectives;
    - on CUDA, an exchange after the step can capture CUDA graphs, as in the first steps;
    - a parameter has a hook of the user on its gradient.

    Args:
        updates: exchanges the deltas of the optimizer.
        optimizer: the optimizer. It changes each parameter by that parameter's gradient and state alone. All optimizers
            of torch except LBFGS do so.
        prepare: called before the first segment of a step is stepped.
        speaks: whether this rank logs why nothing is stepped within backward.

    Attributes:
        has_begun: whether segments have been stepped. If so, `finish` has to be called.
        in_closure: whether a closure is being evaluated.
    """

    def __init__(
        self,
        updates: DeltaExchange,
        optimizer: Optimizer,
        prepare: Callable[[], None] = lambda: None,
        speaks: bool = True,
    ) -> None:
        self._updates, self._optimizer, self._prepare, self._speaks = updates, optimizer, prepare, speaks
        self._stream = updates.stream
        self.has_begun = self.in_closure = False
        self._plan = _Plan([], {}, [], [])
        self._pass: _Pass | None = None
        self._on_modules: Any = None
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._submit: Callable[[UpdateSegment], None]

    def run_closure(self, closure: Callable[[], Any], failed: Callable[[BaseException], None]) -> Any:
        """Run a step's closure and return its result. The closure calls `watch` before the step's backward pass.

        If the closure raises after segments have been stepped, `failed` gets the error. Then the agreed weights are
        restored.
        """
        self.in_closure = True
        try:
            result = closure()
            self.end()
        except BaseException as error:
            self._stop_watching()
            if self.has_begun:
                if "modified by an inplace operation" in str(error):
                    error.args = (f"{_NEEDED_AGAIN} ({error})",)
                failed(error)
                self._updates.abandon(self._optimizer)
            raise
        finally:
            self.in_closure = False
        return result

    def watch(self) -> None:
        """Step segments in the next backward pass, if it is like the previous one."""
        self._updates.refresh_parameters(stepping=True)
        if not self._is_as_planned():
            self._remove_hooks()
            self._plan = self._make_plan()
        self._pass = _Pass(0 if self._stream is None else collectives_so_far())
        if self._plan.allowed is None:
            self._on_modules = register_module_forward_pre_hook(self._on_forward)

    def end(self) -> None:
        """After the pass: if segments were stepped, step the remaining ones, and hide gradients until `finish`."""
        backward = self._stop_watching()
        if self.has_begun and backward is not None:
            for index in sorted(backward.missing):
                self._step(index, backward)
            self._gradients = [(param, param.grad) for param in self._plan.index]
            for param in self._plan.index:
                param.grad = None
        elif self._plan.allowed is None and backward is not None and backward.arrived:
            self._plan.allowed = self._stream is None or collectives_so_far() == backward.collectives
            if not self._plan.allowed:
                self._say("backward calls collectives")

    def finish(self) -> None:
        """Restore the gradients, and wait until weights are equal on all ranks.

        Raises:
            NonFiniteGradient, RankFailure: see `DeltaExchange.exchange`.
        """
        self.has_begun = False
        for param, gradient in self._gradients:
            param.grad = gradient
        self._gradients = []
        self._updates.finish(self._optimizer)

    @property
    def in_parts(self) -> bool:
        """Whether a gradient has arrived in several parts."""
        return self._plan.in_parts

    def close(self) -> None:
        """Stop watching."""
        self._stop_watching()
        self._remove_hooks()

    def _make_plan(self) -> _Plan:
        params, groups = self._updates.parameters, self._optimizer.param_groups
        parts = []
        for segment in self._updates.segments:
            own = [params[name] for name in segment.segment.names]
            ids = {*map(id, own)}
            split = [[param for param in group["params"] if id(param) in ids] for group in groups]
            parts.append(_Part(segment, own, copy.copy(self._optimizer), split))
        index = {param: number for number, part in enumerate(parts) for param in part.params}
        trained = [(param, param.requires_grad) for param in index]
        hooks = [param.register_post_accumulate_grad_hook(self._on_gradient) for param, used in trained if used]
        return _Plan(parts, index, trained, self._groups, hooks)

    def _is_as_planned(self) -> bool:
        """Return whether the plan has the same segments, the same frozen parameters and the same groups."""
        plan = self._plan
        same = [part.segment for part in plan.parts] == self._updates.segments and self._groups == plan.groups
        return same and all(param.requires_grad == trained for param, trained in plan.trained)

    @property
    def _groups(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups]

    def _stop_watching(self) -> _Pass | None:
        backward, self._pass = self._pass, None
        if self._on_modules is not None:
            self._on_modules.remove()
            self._on_modules = None
        return backward

    def _say(self, why: str) -> None:
        if self._speaks:
            log.info(f"Updates are exchanged after backward: {why}.")

    def _remove_hooks(self) -> None:
        for hook in self._plan.hooks:
            hook.remove()

    # The following methods run in the thread of backward.

    def _on_forward(self, *_: Any) -> None:
        if in_backward() and self._plan.allowed is not False:
            self._say("backward recomputes activations, by checkpointing")
            self._plan.allowed = False

    def _on_gradient(self, param: Tensor) -> None:
        backward, plan = self._pass, self._plan
        if backward is None:
            return
        index = plan.index[param]
        if param in backward.arrived:
            name = next(name for name, each in self._updates.parameters.items() if each is param)
            if plan.allowed is not False:
                self._say(f"the gradient of {name!r} arrives in several parts")
            plan.allowed, plan.in_parts = False, True
            if self.has_begun and index in backward.missing:
                backward.missing[index] += 1  # the segment is stepped at the end
            elif self.has_begun:
                raise RuntimeError(
                    f"The gradient of {name!r} came in two parts, though in the step before it came at once, so its "
                    f"update may be of one part only. Checkpoint activations with use_reentrant=False, or set "
                    f"overlap='none' of the strategy."
                )
        if self._stream is not None:
            backward.streams.add(torch.cuda.current_stream(self._stream.device))
        captures_are_due = self._updates.captures_are_due
        is_first = not backward.arrived and plan.allowed and not captures_are_due and self._is_as_planned()
        # Other hooks on gradients may run after ours and change gradients.
        if is_first and not any(len(gradient_hooks(each)) > 1 for each in plan.index):
            # Frozen parameters count as missing: backward may need their weights until it ends.
            backward.missing = {number: len(part.params) for number, part in enumerate(plan.parts)}
            self._updates.begin(self._optimizer)
            self._prepare()
            self._submit = self._updates.start(self._optimizer)
            self.has_begun = True
        backward.arrived.add(param)
        if self.has_begun:
            backward.missing[index] -= 1
            if not backward.missing[index]:
                self._step(index, backward)

    def _step(self, index: int, backward: _Pass) -> None:
        part = self._plan.parts[index]
        part.optimizer.state = self._optimizer.state
        chosen = zip(self._optimizer.param_groups, part.groups, strict=True)
        part.optimizer.param_groups = [{**group, "params": params} for group, params in chosen]
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            for stream in backward.streams - {current}:
                current.wait_stream(stream)
        step_without_hooks(part.optimizer)
        del backward.missing[index]
        self._submit(part.segment)
