"""Exchanges the updates of all optimizers of a model on one rank: optimizer hooks, the process group and failures.

The arithmetic is in `lightning_sparse.updates`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse._compat import (
    backend_name,
    has_step_hooks,
    have_hooks_called,
    register_first,
    step_hooks,
)
from lightning_sparse.comm import ProcessGroupComm, RankFailure
from lightning_sparse.comm.broadcast import broadcast, broadcast_differing
from lightning_sparse.comm.worker import Worker
from lightning_sparse.hooks.base import Exchanger
from lightning_sparse.hooks.closure import begin_step, is_inner_step, with_gradients
from lightning_sparse.hooks.equal_states import (
    average_states,
    average_waiting_gradients,
    share_states,
    take_rank_0s,
)
from lightning_sparse.hooks.handshakes import report_errors_to_peers
from lightning_sparse.hooks.misuse import ExchangeChecks, UnattachedOptimizerCheck
from lightning_sparse.hooks.optimizer_kinds import (
    DUAL_AVERAGING,
    LAZY,
    RECOMPUTES,
    inner_of,
    is_named,
    is_zero,
    scales_gradient,
    unwrapped,
    warn_of_density,
    warn_of_evaluation,
    warn_of_optimizers,
)
from lightning_sparse.hooks.overlap import BackwardOverlap
from lightning_sparse.hooks.rates import Rates
from lightning_sparse.hooks.scalers import unwrap, wrap
from lightning_sparse.hooks.session import Session
from lightning_sparse.methods import Method
from lightning_sparse.options import Overlap, ReducerOptions, listed
from lightning_sparse.reducer import NonFiniteGradient, timed
from lightning_sparse.shards import check_group, groups_of, is_any_sharded, is_sharded, local, locals_of, reshard
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.parameters import exchanged_parameters, not_ignored, others_settings

log = logging.getLogger(__name__)
When = Literal["never", "start", "always"]
OF_NODE = "The ranks of a node average gradients, so another rank of this rank's node may have made the value."


class Phase(enum.Enum):
    """The phase of a rank within its training."""

    IDLE = "between steps"
    STEPPING = "an optimizer's step has begun"
    EXCHANGING = "weights differ among ranks until the exchange has ended"
    FAILED = "an exchange has failed"


@dataclass
class _Steps:
    """The steps of one optimizer: the number of all of them, and of those since its last exchange; whether one runs."""

    taken: int = 0
    waiting: int = 0
    has_begun: bool = False
    averaged: bool = False  # whether the ranks of a node have averaged the gradients of the next step
    scaler: Any = None  # the gradient scaler that steps it


class _Buffers:
    """The buffers of a model that are broadcast from rank 0, as with DistributedDataParallel.

    Args:
        model: the model; this object keeps no reference to it.
        when: see `UpdateExchanger`.

    Attributes:
        at_start: the buffers to broadcast at the start, by name.
    """

    def __init__(self, model: nn.Module, when: When) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model) if when == "always" else lambda: None
        self.at_start = {} if when == "never" else not_ignored(model, model.named_buffers())
        self._kinds = self._now = _kinds(self())  # at the start, and in the last exchange

    def __call__(self) -> dict[str, Tensor]:
        """Return the buffers to broadcast after each exchange, by name."""
        # Look them up each time, because a module may replace the tensor of a buffer.
        model = self._model()
        return {} if model is None else not_ignored(model, model.named_buffers())

    def digest(self) -> int:
        """Return a number that depends on the shapes and dtypes of the buffers; a broadcast needs equal ones."""
        self._now = _kinds(self())
        return zlib.crc32(repr([*self._now.values()]).encode())

    def explain(self, error: BaseException) -> None:
        """Add to the error of ranks that are out of step which buffers have changed their shapes."""
        now, start = self._now, self._kinds
        changed = [repr(name) for name in {**start, **now} if now.get(name) != start.get(name)]
        is_of_shapes = isinstance(error, RankFailure) and "shapes of buffers" in str(error)
        if changed and is_of_shapes and "On this rank" not in str(error):
            error.args = (
                f"{error} On this rank, the buffers {listed(changed)} are new, gone or of another shape since the "
                f"start. Make buffers before training, with equal shapes on all ranks, and keep a cache in a plain "
                f"attribute.",
            )


def _kinds(buffers: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (*x.shape, x.dtype) for name, x in buffers.items()}


class UpdateExchanger(Exchanger):
    """The exchange of the updates of all optimizers of a model, on one rank.

    Args:
        model: the model; its weights are broadcast from rank 0.
        optimizers: the optimizers; each parameter belongs to at most one of them.
        local_steps: number of steps of an optimizer before each exchange; None takes the method's.
        overlap: with "next_step" an exchange completes in the next one, see `UpdateRule`.
        buffers: when buffers are broadcast from rank 0: "never", at the "start" only, or "always", which is also after
            each exchange.
        group: the ranks that exchange with this one, which hold the same part of the model; None is all ranks. All
            ranks of the default group make an exchanger, each with its group, and learn of a failure in any of them.
        timeout: time to wait for other ranks; None takes the group's.
        compare_numbers: whether the options of optimizers, such as rates and betas, must be equal on all ranks.

    Attributes:
        optimizers: the given optimizers.
        updates: the weights, and the exchange of the optimizers' deltas.
        phase: the phase of this rank within its training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        method: Method,
        options: ReducerOptions = ReducerOptions(),
        *,
        local_steps: int | None = None,
        overlap: Overlap = "none",
        buffers: When = "always",
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        compare_numbers: bool = True,
    ) -> None:
        optimizers = [*optimizers]  # the user may change the list
        with report_errors_to_peers():
            if next(model.parameters(), None) is None:
                raise ValueError(
                    f"The {type(model).__name__} has no parameters, so it has no updates to exchange. Give the module "
                    f"that has the parameters."
                )
            is_default_rule = method.update_rule is None
            method = replace(method, update_rule=method.rule.changed(local_steps, overlap))
        self.optimizers, self.phase = optimizers, Phase.IDLE
        self._steps = {optimizer: _Steps() for optimizer in optimizers}
        self._buffers = of_model = _Buffers(model, buffers)
        everyone: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        device = local(next(model.parameters())).device

        def parameters() -> Mapping[str, Tensor]:
            reshard(model)
            check_group(model, group)
            check_values(model, of_model.at_start)
            check_updates(method, optimizers)
            if method.delayed and is_any_sharded(model) and backend_name(group or everyone, device) == "nccl":
                raise ValueError(
                    "overlap='next_step' for a sharded model over NCCL: the exchange would run beside the collectives "
                    "of FSDP2, and two communicators at once may deadlock. Leave overlap out."
                )
            warn_of_evaluation(optimizers)
            if method.is_sparse:
                warn_of_optimizers(optimizers)
            if is_default_rule:  # methods with a rule have the densities of their papers
                warn_of_density(method, optimizers)
            return locals_of(exchanged_parameters(model, optimizers)[0])

        self.session = session = Session(
            parameters,
            method,
            options,
            group=everyone,
            part=group,
            device=device,
            timeout=timeout,
            group_of=lambda: exchanged_parameters(model, optimizers)[2],
            settings=lambda: others_settings(model, optimizers, of_model.at_start.items(), compare_numbers),
            groups=lambda: groups_of(optimizers),
            exchanged="update",
        )
        self._rates = Rates(session.comm, optimizers, session.device, have_residuals=method.memory.error_feedback)
        self._unattached = UnattachedOptimizerCheck(optimizers, model, self._before_step)
        try:
            self._broadcast_weights()
            session.open_connections()
            self._rates.compare()
            worker = Worker(session.stream, session.over_nccl, session.look, self._end_by, session.free_device)
            self.updates = DeltaExchange(session.reducer, model, optimizers, worker)
            session.warn_of_round_trips(max(len(self.updates.of(optimizer)) for optimizer in optimizers))
        except BaseException as error:  # for example, too little memory for a copy of the weights
            session.fail(error)
            self._unattached.close()
            session.close(pending=session.over_nccl)
            raise
        for optimizer in optimizers:
            have_hooks_called(optimizer)
        self._hooks = [
            *(optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers),
            *(register_first(optimizer, self._on_step) for optimizer in optimizers),  # later hooks see equal weights
        ]
        wrap("step", self._scaled_step)
        wrap("unscale_", self._unscale)
        ids = self.updates.ids
        others = {name: x for name, x in not_ignored(model, model.named_parameters()).items() if id(x) not in ids}
        self._checks = ExchangeChecks(others, warns=self.comm.rank == 0)
        self._overlap: BackwardOverlap | None = None
        self._unshared = False  # whether buffers, and parameters without updates, may differ among ranks
        if not method.delayed:
            session.warn_of_buffers(of_model(), "after each exchange")
        worker.start()

    @property
    def note(self) -> str:
        """One sentence for the summary of a run."""
        return self.updates.note

    @property
    def _rule(self) -> UpdateRule:
        return self.reducer.method.rule

    @property
    def in_step(self) -> bool:
        """Whether an optimizer's step or its exchange is running, was interrupted, or has failed."""
        return self.phase is not Phase.IDLE

    @property
    def is_pending(self) -> bool:
        """Whether steps wait for the start or the end of their exchange, so that weights differ among ranks."""
        return self.updates.is_pending or any(steps.waiting for steps in self._steps.values())

    @property
    def is_consistent(self) -> bool:
        """Whether residuals and weights belong together: no exchange is running, pending or failed."""
        return self.phase in (Phase.IDLE, Phase.STEPPING) and not self.is_pending and self.session.error is None

    def begin(self) -> None:
        """Start from rank 0's weights, which may have changed since this object was made."""
        self._broadcast_weights()
        for optimizer in self.optimizers:
            self.updates.begin(optimizer, stepping=False)

    def _broadcast_weights(self) -> None:
        if (model := self._unattached.model) is not None:
            reshard(model)
            named = {**not_ignored(model, model.named_parameters()), **self._buffers.at_start}
            tensors = [local(x).detach() for x in named.values()]
            broadcast_differing(self.comm, tensors, self.session.device)

    # Steps of an optimizer.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_inner_step(optimizer):
            return None
        self._warn_of_interrupted(optimizer)
        begin, changed = partial(self._begin_step, optimizer), partial(self.updates.changed, optimizer)
        args, kwargs = with_gradients(args, kwargs, partial(self._take_gradients, optimizer)) or (args, kwargs)
        return begin_step(optimizer, args, kwargs, begin, changed)

    def _begin_step(self, optimizer: Optimizer, unless: Tensor | None = None) -> None:
        if self._overlap is not None and self._overlap.has_begun:
            return
        self._check_uninterrupted()
        if any(map(is_sharded, self.updates.parameters.values())) and (model := self._unattached.model) is not None:
            reshard(model)  # after a forward pass without backward, the root would keep its whole weights
        if self._steps[optimizer].waiting and self.updates.is_pending and self.updates.lacks_parameters():
            self.exchange_pending()  # otherwise they would join with weights that local steps have made different
        self.phase, steps = Phase.STEPPING, self._rule.local_steps
        self._steps[optimizer].has_begun, waiting = True, self._steps[optimizer].waiting
        if waiting == 0:
            self.updates.begin(optimizer, unless)
        elif not self.updates.is_pending:  # an exchange cannot complete between local steps
            self.updates.refresh_parameters(stepping=True)
        if steps > 1 and waiting == steps - 1:
            self.updates.begin_last_step(optimizer)

    def _warn_of_interrupted(self, optimizer: Optimizer) -> None:
        """Warn if an error has ended an earlier step that had changed weights on this rank."""
        steps = self._steps[optimizer]
        if not steps.has_begun or steps.waiting or self.updates.is_pending:  # a later exchange includes that change
            return
        changed = self.updates.changed(optimizer)
        if changed is not None and bool(changed):
            log.warning(
                f"An error or an interrupt has ended a step on rank {self.comm.ranks[self.comm.rank]}, after weights "
                f"of its {type(optimizer).__name__} had changed. So ranks may have different weights. Load a "
                f"checkpoint on all ranks, unless you have done so since."
            )

    def _check_uninterrupted(self) -> None:
        if self.phase is Phase.EXCHANGING:
            error = self.session.error or RuntimeError(
                "An exchange of updates was interrupted on this rank, as by Ctrl-C: entries of its residual may be "
                "lost, and other ranks may have completed the exchange. Restart all ranks from a checkpoint."
            )
            self._failed(error)
            raise error

    # Gradients within a node.

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average an optimizer's gradients over the ranks of a node, unless this was done for the step that comes next.

        All ranks call it. Without this call they average as the step begins, when other code may have clipped them.
        """
        steps = self._steps[optimizer]
        if self.reducer.workers == self.comm.size or steps.averaged:
            return
        self._check_uninterrupted()

        def average() -> None:
            is_first = steps.waiting == 0 and self.updates.begins_anew(optimizer)
            self.updates.average_gradients(optimizer)
            if is_first:  # an exchange without nodes may have left each rank its own moments
                share_states(self.comm, self.reducer.node, optimizer)

        before, self.phase = self.phase, Phase.EXCHANGING
        self.session.launching()
        try:
            self._run(average)
        except BaseException:
            if before is Phase.STEPPING:  # an optimizer such as SAM may have changed weights
                self.updates.abandon(optimizer)
            raise
        self.phase, steps.averaged = before, True

    def number_of_gradients(self, optimizer: Any) -> int:
        """Return the number of ranks, or of nodes if the ranks of a node have averaged an optimizer's gradients."""
        steps = self._steps.get(self._attached(optimizer))
        return self.reducer.workers if steps is not None and steps.averaged else self.comm.size

    def _take_gradients(self, optimizer: Optimizer) -> None:
        """Average gradients as a step begins. The next evaluation of its closure makes others."""
        self.average_gradients(optimizer)
        self._steps[optimizer].averaged = False

    @property
    def steps_taken(self) -> int:
        """The number of steps of all optimizers."""
        return sum(steps.taken for steps in self._steps.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_inner_step(optimizer):
            self._after_step(optimizer, stepped=True)

    def _after_step(self, optimizer: Optimizer, stepped: bool) -> None:
        steps = self._steps[optimizer]
        steps.taken, steps.waiting = steps.taken + 1, (steps.waiting + 1) % self._rule.local_steps
        steps.has_begun = False
        self._unshared = self._rule.local_steps > 1 or self._rule.delayed
        if steps.waiting == 0:
            self._exchange(optimizer, stepped)
        self.phase = Phase.IDLE

    def _attached(self, optimizer: Any) -> Any:
        """Return the attached optimizer that a gradient scaler steps; None if it is another one."""
        # Lightning's or accelerate's wrapper has the attached optimizer; an attached Lookahead has an inner one.
        stepped = optimizer if optimizer in self._steps else getattr(optimizer, "optimizer", optimizer)
        return stepped if stepped in self._steps else None

    def _unscale(self, unscale: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if (stepped := self._attached(optimizer)) is not None:
            self._steps[stepped].averaged = False
            self.average_gradients(stepped)  # before it looks for an overflow, which all ranks of a node must see
        return unscale(scaler, optimizer, *args, **kwargs)

    def _scaled_step(self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if (stepped := self._attached(optimizer)) is None:
            return step(scaler, optimizer, *args, **kwargs)
        self._steps[stepped].scaler = scaler
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self.average_gradients(stepped)  # a fused optimizer unscales them itself
        with self.one_step(stepped):
            return step(scaler, optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def one_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Exchange at the end of the block, even if the optimizer has not stepped in it.

        A gradient scaler may skip a step on one rank, but the other ranks exchange.
        """
        steps = self._steps[optimizer]
        before = steps.taken
        yield
        if steps.taken == before:
            self._take_gradients(optimizer)
            self._begin_step(optimizer)  # a rank that skips the step starts from the same weights as the others
            self._after_step(optimizer, stepped=False)

    # Overlap with backward.

    def overlapped(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for a step whose exchange overlaps backward, if `BackwardOverlap` allows it.

        Args:
            optimizer: the only optimizer, one of torch, with an exchange after each step. Its step gets the closure.
            closure: runs forward and backward. Between the closure and the step, no code reads or changes gradients.
        """
        if self._overlap is None:
            speaks = self.comm.rank == 0
            self._overlap = BackwardOverlap(self.updates, optimizer, self._begin_exchange, speaks)
        return partial(self._overlap.run_closure, closure, self._failed)

    @property
    def gradients_in_parts(self) -> bool:
        """Whether a gradient has arrived in several parts, as with reentrant checkpointing; False without overlap."""
        return self._overlap is not None and self._overlap.in_parts

    def before_backward(self) -> None:
        """Watch the backward pass that begins now. Earlier backward passes in the training step are not watched."""
        if self._overlap is not None and self._overlap.in_closure:
            self._overlap.watch()

    # Exchanges.

    def _exchange(self, optimizer: Optimizer, stepped: bool | None, write: bool = True) -> None:
        overlap = self._overlap if self._overlap is not None and self._overlap.has_begun else None

        def exchange() -> None:
            changes = partial(self.updates.changes, optimizer)
            if _needs_agreed_weights(self.reducer.method):
                self._checks.look_for_copies(optimizer, changes, self.updates.parameters)
            is_rescaled = self._rule.rescales(optimizer, self.reducer.workers)
            compare = self._checks.look_for_equal_updates(optimizer, changes, is_rescaled)
            compare = compare if self.reducer.workers > 1 else None
            if overlap:
                overlap.finish()
                self.session.launching()  # raises an error that another thread has found meanwhile
            else:
                self.updates.exchange(optimizer, stepped=stepped, write=write)
            if compare is not None:
                self.updates.wait()
                compare(self.comm, self.session.device)
            if not self._rule.delayed and (buffers := self._buffers()):
                # All ranks take part, also one whose running backward pass needs its present buffers.
                given = [x if write else x.clone() for x in buffers.values()]
                broadcast(self.comm, given, self.session.device)
            if self._rates.are_due(self._rule.local_steps):
                self.updates.wait()
                self._rates.compare(self._have_gradients())

        self._during(exchange)

    def _have_gradients(self) -> dict[str, bool]:
        """Return whether parameters have gradients, by name, if a missing one makes the mean of updates too small."""
        segments = (each for each in self.updates.segments if not scales_gradient(each.optimizer))
        chosen = {name for each in segments for name in each.segment.names}
        return {name: x.grad is not None for name, x in self.updates.parameters.items() if name in chosen}

    def _begin_exchange(self) -> None:
        self.phase = Phase.EXCHANGING
        frozen: list[str] = []
        if self._rule.delayed or self._rule.local_steps > 1:  # all ranks must leave out the same ones
            frozen = sorted(name for each in self.updates.segments for name in each.frozen)
        self.reducer.routing.others = zlib.crc32(repr(frozen).encode(), self._buffers.digest())
        self.session.launching()

    def _during(self, exchange: Callable[[], None]) -> None:
        """Run `exchange`. If it fails or is interrupted, this rank cannot take another step."""
        if self._overlap is None or not self._overlap.has_begun:  # otherwise it began within backward
            self._begin_exchange()
        self._checks.look_for_untracked(self.updates.ids)
        self._checks.look_for_frozen(self.updates.parameters)
        self._run(exchange)
        self.phase = Phase.IDLE

    def _run(self, exchange: Callable[[], None]) -> None:
        """Run `exchange`, record its failure, and measure how long training waits."""
        with timed(self.reducer.seconds, "exposed"):  # time that does not overlap with backward
            try:
                exchange()
            except Exception as error:
                self._failed(error)
                if self.session.error is not error:  # that error has freed the device, and names the cause
                    raise self.session.error from error  # type: ignore[misc]
                raise
            self.session.launched(self.session.stream if self.updates.is_pending else None)

    def _failed(self, error: BaseException) -> None:
        self.phase = Phase.FAILED
        self._end_by(error)
        self.session.free_device()

    def _end_by(self, error: BaseException) -> None:
        """Record an error of this thread, or of the thread that exchanges."""
        self._buffers.explain(error)
        if isinstance(error, NonFiniteGradient) and self.reducer.workers < self.comm.size and OF_NODE not in str(error):
            error.args = (f"{error} {OF_NODE}",)
        self.session.end_by(error)

    @torch.inference_mode(False)  # other threads and later steps change its tensors
    @torch.no_grad()
    def exchange_pending(self, write: bool = True) -> None:
        """Exchange the deltas of steps that have not been exchanged yet. All ranks call it.

        Args:
            write: if False, the model gets the agreed weights only before the next step, and buffers stay: backward
                may need the present ones.
        """
        self.session.raise_known_failure()
        if self.in_step:
            raise RuntimeError(
                "Pending updates cannot be exchanged in the middle of a step, as by a signal's handler, or after one "
                "that was interrupted. Call exchange_pending between steps; after an interrupt start from a checkpoint."
            )
        if write and (model := self._unattached.model) is not None:
            reshard(model)  # otherwise the next forward pass may use the root's weights from before the exchange
        for optimizer, steps in self._steps.items():
            if steps.waiting:
                steps.waiting = 0
                self._exchange(optimizer, None, write)
        if self.updates.is_pending or self.updates.is_stale:
            self._during(partial(self.updates.complete, write))
        if write and self._unshared:
            self._unshared = False
            self._share_others()

    def end(self) -> None:
        """Exchange pending updates, and leave no difference among ranks in the model. All ranks call it."""
        self._unshared = self._rule.local_steps > 1 or self._rule.delayed
        self.exchange_pending()

    def share_scales(self, comm: ProcessGroupComm | None = None) -> None:
        """Let gradient scalers take the loss scale of rank 0. All ranks call it."""
        scalers = (steps.scaler for steps in self._steps.values() if steps.scaler is not None)
        take_rank_0s(comm or self.comm, dict.fromkeys(scalers), self.session.device)

    def equalize(self, comm: ProcessGroupComm) -> None:
        """Make the optimizers' states and the loss scales equal on all ranks, which then exchange gradients.

        Args:
            comm: this rank's connection to all ranks, which call it.
        """
        for optimizer in self.optimizers:
            average_states(comm, optimizer)
        self.share_scales(comm)

    @torch.no_grad()
    def settle(self, gradients: bool = True) -> None:
        """Leave no difference among ranks but in residuals, at the price of dense exchanges. Gradients may follow.

        All ranks call it between steps. Pending updates are exchanged, and each rank takes the means of the optimizers'
        states. Gradient scalers take the loss scale of rank 0.

        Args:
            gradients: whether each rank also takes the means of gradients that wait for a step.
        """
        self.exchange_pending()

        def settle() -> None:
            with self.comm.uncounted():
                self.equalize(self.comm)
                if gradients:
                    average_waiting_gradients(self.comm, self.optimizers)

        self._during(settle)

    def _share_others(self) -> None:
        """Broadcast buffers, and the parameters without updates, from rank 0, because the module may change them.

        A momentum encoder does so, for example, and a callback that prunes weights changes masks. The value of rank 0
        is used: a checkpoint contains this value, and a mean may be invalid. For example, a mean of unit vectors is not
        a unit vector.
        """
        model = self._unattached.model
        if model is None:
            return
        ids = self.updates.ids
        params = not_ignored(model, model.named_parameters()).values()
        others = [local(x).detach() for x in params if not (x.requires_grad and id(x) in ids)]
        others += [local(x).detach() for x in self._buffers().values()]
        if others:
            self._during(lambda: broadcast_differing(self.session.outside(), others, self.session.device))

    def end_if_soon(self) -> None:
        """Complete a pending exchange if it can complete without waiting for peers."""
        if self.updates.is_pending and self.updates.ends_soon() and self.session.device_is_done():
            self.updates.complete()
        elif self.updates.is_pending:
            log.warning("An exchange of updates has not ended in time: the entries of other ranks in it are lost.")

    def warn_of_pending(self) -> None:
        """Warn on rank 0 if the exchange is about to end with steps that have not been exchanged."""
        fails = self.in_step or self.session.error is not None or self.session.is_closed
        if self.comm.rank == 0 and self.is_pending and not fails:
            names = " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            log.warning(
                f"The last updates of {names} were not exchanged, so the weights differ among ranks. Call "
                f"exchange_pending(optimizer) on all ranks after the last step, before weights are used."
            )

    def agreed_weights(self) -> Mapping[int, Tensor]:
        """Return the last agreed weights by id of the parameter; empty if the model has these weights."""
        overlaps = self._overlap is not None and self.in_step
        under_way = not self.is_consistent and (overlaps or self.updates.is_pending)
        under_way |= self.phase is Phase.STEPPING and not self.is_pending  # an error or an interrupt within the step
        return self.updates.weights if under_way else self.updates.stale_weights

    def close(self) -> None:
        """Leave the group. It may be called twice, and after a failure."""
        for hook in self._hooks:
            hook.remove()
        unwrap("step", self._scaled_step)
        unwrap("unscale_", self._unscale)
        self._unattached.close()
        if self._overlap is not None:
            self._overlap.close()
        ended = self.updates.close()
        self.session.mark_done()
        self.session.finish(failed=not ended)


GRADIENTS = "exchange='gradient' of the strategy or by attach, and for a sharded model by strategy='dense_hsdp'"


def check_values(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter of a model, or one of these buffers, has no values that ranks can compare."""
    if name := next((name for name, x in {**dict(model.named_parameters()), **buffers}.items() if x.is_meta), ""):
        raise ValueError(
            f"{name!r} of the {type(model).__name__} is on 'meta', so ranks cannot agree on its values. Give it values "
            f"before, or leave its module out of the model."
        )


def check_updates(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError or TypeError unless a method can exchange the updates of these optimizers."""
    if not method.aggregator.averages:
        raise ValueError(
            f"{method} makes no mean of what ranks send, so it cannot exchange updates. Exchange gradients, by "
            f"exchange='gradient' of the strategy or by attach; or take another method, such as 'topk'."
        )
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not has_step_hooks(optimizer):  # such as accelerate's AcceleratedOptimizer
            raise TypeError(
                f"{name} calls no hooks of torch around its steps, so its updates cannot be exchanged. If it wraps an "
                f"optimizer, give that one instead, often {name}.optimizer. Otherwise let its constructor call "
                f"torch's; or exchange gradients, by {GRADIENTS}."
            )
        if is_named(optimizer, DUAL_AVERAGING) and _needs_agreed_weights(method):
            raise ValueError(
                f"{name} {RECOMPUTES}, so an exchange of updates does not change its weights for good. Exchange "
                f"gradients, by {GRADIENTS}; or use another optimizer, such as AdamW."
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                f"{name} {LAZY}, so a mean over ranks would make its steps too small. Set sparse=False of the "
                f"embedding and use AdamW, whose updates are exchanged; or train with strategy='ddp'."
            )
        if is_zero(optimizer):
            raise ValueError(
                f"{name} broadcasts each rank's part of the step to all ranks, so all ranks make "
                f"the same update, and the gradients of other ranks are lost. Exchange gradients, by "
                f"exchange='gradient' of the strategy or by attach; or use {type(inner_of(optimizer)).__name__} itself."
            )
        if exchange_of(optimizer) is not None:
            raise ValueError(
                f"The updates of this {name} are exchanged already: attach_updates was called with "
                f"it before. Once is enough; for other settings make a new optimizer."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS keeps differences of gradients from step to step, and weights that other ranks change as well "
                "make them wrong. Use an optimizer that needs one gradient a step, or train with strategy='ddp'."
            )


def _needs_agreed_weights(method: Method) -> bool:
    """Return whether optimizers must step from the agreed weights: else updates are lost, or undone again and again.

    It is so if entries wait, if an outer step changes the mean, or if several local steps follow an exchange.
    """
    return method.is_sparse or method.rule.has_outer_step or method.rule.local_steps > 1


def exchange_of(optimizer: Optimizer) -> UpdateExchanger | None:
    """Return the exchanger of an optimizer's updates, if there is one; also for a wrapper, see `unwrapped`."""
    if not has_step_hooks(optimizer := unwrapped(optimizer)):
        return None
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer))
    return next((owner for owner in owners if isinstance(owner, UpdateExchanger)), None)
