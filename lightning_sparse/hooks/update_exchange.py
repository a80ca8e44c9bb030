"""The exchange of what optimizers change, on one rank: the process group, the hooks and the failures around it.

What is exchanged is in `lightning_sparse.updates`.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse._compat import have_hooks_called, register_first, step_depth, step_hooks
from lightning_sparse.comm.broadcast import broadcast, broadcast_differing
from lightning_sparse.delayed import DelayedUpdates
from lightning_sparse.hooks.closure import begin_step
from lightning_sparse.hooks.device_watch import DeviceWatch
from lightning_sparse.hooks.misuse import ChangesByHand, OtherSteps
from lightning_sparse.hooks.rates import Rates
from lightning_sparse.hooks.scalers import unwrap, wrap
from lightning_sparse.hooks.session import Session, told_to_others
from lightning_sparse.hooks.within_backward import WithinBackward
from lightning_sparse.methods import UPDATE_DENSITY, Method
from lightning_sparse.options import Overlap
from lightning_sparse.parameters import exchanged_parameters, others_settings
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates import Updates

log = logging.getLogger(__name__)


class UpdateExchange:
    """The exchange of what all optimizers of a model change, on one rank.

    Args:
        model: the model; its weights become rank 0's.
        optimizers: the optimizers; each parameter belongs to one of them at most.
        method: the compression method.
        local_steps: number of steps of an optimizer before each exchange; None keeps the method's own.
        overlap: with "next_step" an exchange ends with the next one, see `UpdateRule`.
        broadcast_buffers: whether buffers become rank 0's, now and after each exchange, as DistributedDataParallel
            does it.
        forward_sync_buffers: unless None, buffers become rank 0's now, and this says whether after each exchange too.
        group: the process group whose ranks take part; None is the default one.
        timeout: time to wait for other ranks; None takes the group's.
        options: of the `Reducer`.

    Attributes:
        reducer: compresses and exchanges.
        comm: the reducer's wire.
        note: what the summary of a run says about it.
        updates: what is exchanged.
        in_step: whether an optimizer's step is under way, its exchange included, or was interrupted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        method: Method,
        *,
        local_steps: int | None = None,
        overlap: Overlap = "none",
        broadcast_buffers: bool = True,
        forward_sync_buffers: bool | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        with told_to_others(group):
            is_default_rule = method.update_rule is None
            rule = (method.update_rule or UpdateRule()).changed(local_steps, overlap)
            method = replace(method, update_rule=rule)
        self.optimizers, self._local_steps = optimizers, rule.local_steps
        self._steps = [0] * len(optimizers)
        equal_at_start = broadcast_buffers or forward_sync_buffers is not None
        # Looked up each time: a module may put another tensor in a buffer's place.
        synced = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self._model = weakref.ref(model) if synced else lambda: None
        self._delayed = rule.delayed
        self._device = next(model.parameters()).device

        def parameters() -> Mapping[str, Tensor]:
            check_updates(method, optimizers)
            warn_of_evaluation(optimizers)
            if is_default_rule:  # others have the densities of their papers
                warn_of_density(method, optimizers)
            return exchanged_parameters(model, optimizers)[0]

        self._session = Session(
            parameters,
            method,
            group=dist.group.WORLD if group is None else group,  # type: ignore[arg-type]
            device=self._device,
            timeout=timeout,
            group_of=lambda: exchanged_parameters(model, optimizers)[2],
            settings=lambda: others_settings(model, optimizers, model.named_buffers() if equal_at_start else ()),
            exchanged="update",
            **options,
        )
        self.reducer, self.comm = self._session.reducer, self._session.comm
        self._all = [param.detach() for param in model.parameters()]
        self._all += model.buffers() if equal_at_start else []
        self._rates = Rates(self.comm, optimizers, self._device)
        try:
            broadcast_differing(self.comm, self._all, self._device)
            self._rates.compare()
            stream, over_nccl = self._session.stream, self._session.over_nccl
            later = partial(DelayedUpdates, buffers=self._buffers, stream=stream, over_nccl=over_nccl)
            self.updates: Updates = (later if rule.delayed else Updates)(self.reducer, model, optimizers)
        except BaseException as error:  # such as too little memory for a copy of the weights
            self._session.fail(error)
            self._session.close(pending=self._session.over_nccl)
            raise
        self.note = self.updates.note
        for optimizer in optimizers:
            have_hooks_called(optimizer)
        self._hooks = [
            *(optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers),
            *(register_first(optimizer, self._on_step) for optimizer in optimizers),  # others see equal weights
        ]
        wrap("step", self._scaled_step)
        self._others = OtherSteps(optimizers, model)
        others = {name: param for name, param in model.named_parameters() if not self.updates.has(param)}
        self._by_hand = ChangesByHand(others, self.updates.has)
        self._within: WithinBackward | None = None
        self._stepped = self._under_way = self.in_step = self._unshared = False
        self._watch = DeviceWatch(self._session)

    @property
    def is_consistent(self) -> bool:
        """Whether no step is under way, and no exchange, so that residuals and weights belong together."""
        return not self._under_way and not self.updates.in_flight and self._watch.error is None

    def begin(self) -> None:
        """Start from rank 0's weights, whatever has happened to them since the exchange was made."""
        broadcast_differing(self.comm, self._all, self._device)
        for optimizer in self.optimizers:
            self.updates.begin(optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if step_depth(optimizer) > 1:  # `step` of a class from which the optimizer's derives
            return None
        begin, changed = partial(self._begin_step, optimizer), partial(self.updates.changed, optimizer)
        return begin_step(optimizer, args, kwargs, begin, changed)

    def _begin_step(self, optimizer: Optimizer, unless: Tensor | None = None) -> None:
        if self._within is not None and self._within.begun:
            return
        self.in_step = True
        if self._steps[self.optimizers.index(optimizer)] % self._local_steps == 0:
            self.updates.begin(optimizer, unless)
        elif not self.updates.in_flight:  # which could not end in the middle of a period
            self.updates.adopt()

    def within_backward(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of a step; the exchange goes on while backward does, as far as `WithinBackward` can.

        Args:
            optimizer: of torch, the only one, with an exchange after each step; its step gets the closure.
            closure: forward and backward; after it nobody looks at the gradients before the step or changes them.
        """
        parts = self.updates, self.reducer, optimizer, self._prepare_exchange, self._session.stream
        self._within = self._within or WithinBackward(*parts)
        return partial(self._within.evaluate, closure, self._watch.fail)

    def before_backward(self) -> None:
        """Called right before backward: a training step may have backward passes of its own before."""
        if self._within is not None and self._within.in_step:
            self._within.watch()

    def _scaled_step(self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = getattr(optimizer, "optimizer", optimizer)  # in Lightning's or accelerate's wrapper
        with self.one_step(stepped) if stepped in self.optimizers else contextlib.nullcontext():
            return step(scaler, optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def one_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Exchange at the end of the block if the optimizer has not stepped in it.

        A gradient scaler may leave a step out on one rank, and the others exchange.
        """
        self._stepped = False
        yield
        if not self._stepped:
            self._begin_step(optimizer)  # a rank that leaves the step out starts from the same weights as the others
            self._stepped = True
            self._count(optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if step_depth(optimizer) > 1:
            return
        self._stepped = self._under_way = True  # until the exchange, weights differ among ranks
        self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        index = self.optimizers.index(optimizer)
        self._steps[index] += 1
        self._unshared = self._local_steps > 1 or self._delayed
        if self._steps[index] % self._local_steps == 0:
            self._exchange(optimizer)
        self.in_step = False

    @property
    def is_pending(self) -> bool:
        """Whether there are steps whose exchange is still to come or to end, so that weights differ among ranks."""
        return self.updates.in_flight or any(steps % self._local_steps for steps in self._steps)

    @torch.inference_mode(False)  # other threads and later steps update what it makes
    @torch.no_grad()
    def exchange_pending(self, write: bool = True) -> None:
        """Exchange what optimizers have changed in steps whose exchange is still to come. All ranks call it.

        Without `write` an exchange that goes on ends, and the model gets its weights before the next step only.
        """
        if self.in_step:
            raise RuntimeError(
                "Pending updates cannot be exchanged in the middle of a step, as by a signal's handler, or after one "
                "that was interrupted. Call exchange_pending between steps; after an interrupt start from a checkpoint."
            )
        for index, optimizer in enumerate(self.optimizers):
            if self._steps[index] % self._local_steps:
                self._steps[index] = 0
                self._exchange(optimizer)
        if self.updates.in_flight or self.updates.is_unwritten:
            self._during(partial(self.updates.land, write))
        if write and self._unshared:
            self._unshared = False
            self._share_others()

    def _share_others(self) -> None:
        """Make parameters equal that no update changes, as those of a momentum encoder: the module may change them.

        They become rank 0's, as buffers do: a mean of unit vectors is no unit vector, and a checkpoint has rank 0's.
        """
        model = self._others.model
        if model is None:
            return
        others = [x.detach() for x in model.parameters() if not (x.requires_grad and self.updates.has(x))]
        if others:
            self._during(partial(broadcast_differing, self.comm, others, self._device))

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that become rank 0's with each exchange."""
        model = self._model()
        return {} if model is None else dict(model.named_buffers())

    def end_if_soon(self) -> None:
        """End an exchange that goes on, if that needs no other rank to go on."""
        if self.updates.in_flight and self.updates.ends_soon() and self._watch.ends_soon():
            self.updates.land()
        elif self.updates.in_flight:
            log.warning("An exchange of updates has not ended in time: what other ranks have sent in it is lost.")

    def agreed_weights(self) -> Mapping[int, Tensor]:
        """Return the weights that all ranks agreed on last, by the id of the parameter, where the model has others."""
        under_way = not self.is_consistent and (self._within is not None or self.updates.in_flight)
        return self.updates.weights if under_way or self.updates.is_unwritten else {}

    def _prepare_exchange(self) -> None:
        self._under_way = True
        self._watch.launching()

    def _exchange(self, optimizer: Optimizer) -> None:
        within = self._within if self._within is not None and self._within.begun else None

        def exchange() -> None:
            within.finish() if within else self.updates.exchange(optimizer)
            if not self._delayed and (buffers := self._buffers()):
                broadcast(self.comm, [*buffers.values()], self._device)
            if self._rates.are_due(self._local_steps):
                self.updates.wait()
                self._rates.compare()

        self._during(exchange)

    def _during(self, exchange: Callable[[], None]) -> None:
        """Call what exchanges; note whether it has failed, and for how long training has waited."""
        self._prepare_exchange()
        self._by_hand.look()
        started = time.perf_counter()
        try:
            exchange()
        except Exception as error:
            if self._watch.error is not None:  # it has freed the device, and knows why
                raise self._watch.error from error
            self._watch.fail(error)
            raise
        self._watch.launched(self._session.stream if self.updates.in_flight else None)
        self.reducer.seconds["exposed"] += time.perf_counter() - started  # what does not hide behind backward
        self._under_way = False

    def drain(self) -> bool:
        """Return whether the residuals belong to the weights."""
        return self.is_consistent

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed on this one."""
        self._session.fail(error)

    def close(self) -> None:
        """Leave the group. May be called twice, and after a failure."""
        for hook in self._hooks:
            hook.remove()
        unwrap("step", self._scaled_step)
        self._others.close()
        self._watch.end()
        ended = self.updates.ends_soon() and (self._within is None or self._within.close())
        self._session.mark_done()
        self._watch.close(failed=not ended)


def check_updates(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError unless the updates of these optimizers can be exchanged by a method."""
    if not method.aggregator.averages:
        raise ValueError(
            f"{method} makes no mean of what ranks send, so it cannot exchange updates. Exchange gradients, by "
            f"exchange='gradient' of the strategy or by attach; or take another method, such as 'topk'."
        )
    for optimizer in optimizers:
        if exchange_of(optimizer) is not None:
            raise ValueError(
                f"The updates of this {type(optimizer).__name__} are exchanged already: attach_updates was called with "
                f"it before. Once is enough; for other settings make a new optimizer."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS keeps differences of gradients from step to step, and weights that other ranks change as well "
                "make them wrong. Use an optimizer that needs one gradient a step, or train with strategy='ddp'."
            )


def warn_of_evaluation(optimizers: Sequence[Optimizer]) -> None:
    """Warn on rank 0 of optimizers that evaluate other weights than they train: those are of each rank's own state."""
    for optimizer in optimizers:
        if evaluates_other_weights(optimizer) and dist.get_rank() == 0:
            log.warning(
                f"{type(optimizer).__name__}.eval() makes weights of its own state, in which ranks differ where they "
                f"exchange updates: each evaluates, and saves, other weights. Exchange gradients, or train with an "
                f"optimizer that has no eval()."
            )


def warn_of_density(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Warn on rank 0 of a density that is too small for the updates of optimizers such as AdamW."""
    other = next((each for each in optimizers if not scales_gradient(each)), None)
    if method.is_sparse and (method.density or 1) < UPDATE_DENSITY and other is not None and dist.get_rank() == 0:
        log.warning(
            f"density={method.density:g} is small for updates of {type(other).__name__}: at 0.001 a GPT with AdamW "
            f"needed 1.27 times the steps of dense training, and at {UPDATE_DENSITY:g} no more. Leave density out, or "
            f"give a larger one, unless your link asks for it."
        )


def scales_gradient(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's steps are linear in its gradients, as those of torch's SGD."""
    return isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD)


def evaluates_other_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has an `eval`, as schedule-free ones do, which makes weights for evaluation."""
    return callable(getattr(optimizer, "eval", None))


def exchange_of(optimizer: Optimizer) -> UpdateExchange | None:
    """Return what exchanges an optimizer's updates, if anything does."""
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer))
    return next((owner for owner in owners if isinstance(owner, UpdateExchange)), None)
