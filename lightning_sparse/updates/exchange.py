"""The exchange of optimizer updates for all segments of one rank.

Each rank steps its own optimizer on its local gradient; with `TwoLevel`, on the mean gradient of its node. The
optimizer's change of the weights is the delta. The rank sends a compressed part of the delta, and all ranks apply the
mean:

    updates = DeltaExchange(reducer, model, [optimizer])
    updates.begin(optimizer)        # present weights are the agreed ones
    optimizer.step()
    updates.exchange(optimizer)     # weights are equal on all ranks again

The arithmetic is in `lightning_sparse.updates.segment`. Overlap changes only when a segment is exchanged. Within
backward a thread exchanges each segment as soon as it has been stepped (`start`). With overlap="next_step" the exchange
is awaited at the next exchange of the same optimizer, or by `complete`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse._compat import parameters_by_name
from lightning_sparse.comm.broadcast import broadcast_differing
from lightning_sparse.comm.peers import JOIN_SECONDS
from lightning_sparse.comm.worker import Worker
from lightning_sparse.options import listed
from lightning_sparse.reducer import PendingExchange, Reducer
from lightning_sparse.shards import check_all_sharded, is_frozen, like, local, locals_of, reshard
from lightning_sparse.state import renamed
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.node import average_gradients_
from lightning_sparse.updates.parameters import exchanged_parameters, owners_of_exchanged
from lightning_sparse.updates.segment import UpdateSegment
from lightning_sparse.updates.windows import Windows


class DeltaExchange:
    """The segments of a model's parameters, and the exchange of their deltas.

    Args:
        reducer: a reducer with `exchanged="update"`. It is set up here, unless it has been for the same parameters.
        model: the model; its weights are equal on all ranks.
        worker: the thread that exchanges in parallel with the training thread; None makes one.

    Attributes:
        parameters: the exchanged parameters by name, in registration order.
        segments: the segments in the order of the reducer's layout.

    Raises:
        ValueError: a parameter belongs to two optimizers or not to the model, or `Reducer.setup` raises it.
    """

    segment_kind: type[UpdateSegment] = UpdateSegment
    """The class of the segments. Benchmarks replace it."""

    def __init__(
        self,
        reducer: Reducer,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        worker: Worker | None = None,
    ) -> None:
        self._reducer, self._model, self._optimizers = reducer, weakref.ref(model), optimizers
        self._worker = worker or Worker()
        self.parameters, optimizer_of, numbers = exchanged_parameters(model, optimizers)
        weights = locals_of(self.parameters)
        if reducer.layout is None:
            reducer.setup(weights, numbers)
        self._expect_later(model)
        self._lay_out(weights, optimizer_of)
        self._begun: set[Optimizer] = set()
        self._new: list[str] = []  # parameters to broadcast from rank 0 after their first exchange
        self._futures: list[Future[Any]] = []  # of the exchange that the worker runs
        self._windows = Windows(optimizers)

    def _expect_later(self, model: nn.Module) -> None:
        self._by_name = parameters_by_name(model)
        self._reducer.segment_states.later = self._by_name.keys() - self.parameters.keys()

    def _lay_out(self, weights: Mapping[str, Tensor], optimizer_of: Mapping[str, Optimizer]) -> None:
        assert self._reducer.layout is not None
        self.segments = [
            self.segment_kind(each, self.parameters, weights, optimizer_of[each.names[0]], self._reducer)
            for each in self._reducer.layout.segments
        ]

    @property
    def _rule(self) -> UpdateRule:
        return self._reducer.method.rule

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """On CUDA, the stream of the worker that exchanges."""
        return self._worker.stream

    @property
    def is_pending(self) -> bool:
        """Whether an exchange with overlap="next_step" has begun, but is not complete."""
        return any(each.ahead is not None for each in self.segments)

    @property
    def is_stale(self) -> bool:
        """Whether the model lacks the weights of a completed exchange."""
        return any(each.is_stale for each in self.segments)

    @property
    def weights(self) -> dict[int, Tensor]:
        """The last agreed weights, by the id of the parameter."""
        return self._agreed(self.segments)

    @property
    def stale_weights(self) -> dict[int, Tensor]:
        """The agreed weights that the model lacks, by the id of the parameter."""
        return self._agreed([each for each in self.segments if each.is_stale])

    def _agreed(self, segments: Sequence[UpdateSegment]) -> dict[int, Tensor]:
        agreed = ((self.parameters[name], w) for each in segments for name, w in each.agreed.items())
        return {id(param): like(param, w) for param, w in agreed}

    @property
    def captures_are_due(self) -> bool:
        """Whether the next `exchange` may capture CUDA graphs, so that the host needs less time for later ones."""
        return self._reducer.captures.are_due and not self._reducer.observers

    @property
    def ids(self) -> set[int]:
        """The ids of the exchanged parameters."""
        return {*map(id, self.parameters.values())}

    def of(self, optimizer: Optimizer) -> list[UpdateSegment]:
        """Return the segments of an optimizer."""
        return [each for each in self.segments if each.optimizer is optimizer]

    def begins_anew(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's next exchange is the first one, or the first one since states were loaded."""
        indices = {each.segment.index for each in self.of(optimizer)}
        return bool(indices) and indices.isdisjoint(self._reducer.routing.last)

    @property
    def note(self) -> str:
        """One sentence about the exchange."""
        method, workers = self._reducer.method, self._reducer.workers
        optimizers = {each.optimizer for each in self.segments}
        density, is_node = method.density if method.is_sparse else None, workers < self._reducer.comm.size
        text = self._rule.note(optimizers, density, workers, "node" if is_node else "rank")
        return f"The ranks of a node average gradients. {text}" if is_node else text

    # Before a step:

    @torch.no_grad()
    def average_gradients(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's gradients by their means over the ranks of a node. All ranks call it.

        Raises:
            ValueError: a gradient is sparse.
            RankFailure: another rank is at another step, or has other parameters.
        """
        self.refresh_parameters(stepping=True)
        params = [self.parameters[name] for each in self.of(optimizer) for name in each.segment.names]
        if not params:  # all are frozen
            return
        number, numel = self._optimizers.index(optimizer), sum(local(param).numel() for param in params)
        purpose, is_first = f"gradients of optimizer {number}, {numel} elements", self.begins_anew(optimizer)
        self._reducer.agree(purpose, local(params[0]).device, in_sync=not is_first)
        average_gradients_(self._reducer.node, params)

    @torch.no_grad()
    def begin(self, optimizer: Optimizer, unless: Tensor | None = None, stepping: bool = True) -> None:
        """Take an optimizer's present weights as the agreed ones; call it before the optimizer steps.

        Weights are equal on all ranks after an exchange. They stay equal if every rank makes the same change, such as
        clipping weights or loading a checkpoint. Parameters that the optimizer was given since then are added.

        Args:
            optimizer: the optimizer that steps next.
            unless: a flag on the device. If it is set, the weights of the last call stay.
            stepping: whether the step comes next, see `exchanged_parameters`.
        """
        self.refresh_parameters(stepping=stepping)
        self._begun.add(optimizer)
        for each in self.of(optimizer):
            frozen = {name for name in each.segment.names if is_frozen(self.parameters[name])}
            if frozen != each.frozen:
                self._check_trained()
                self.complete()  # a pending exchange has no update of a frozen parameter
                if self._rule.local_steps > 1 or self._rule.delayed:  # ranks may have changed it differently
                    self._new += sorted(each.frozen - frozen)  # the order of a set differs among processes
            each.frozen = frozen
        self._write_stale()
        for each in self.of(optimizer):
            each.take_weights(unless=unless)
        if stepping and self._rule.rescales(optimizer, self._reducer.workers):
            self._windows.lengthen(optimizer, self._reducer.workers)

    @torch.no_grad()
    def begin_last_step(self, optimizer: Optimizer) -> None:
        """Record the weights before the last of several local steps, whose change gives the unspent momentum."""
        groups = _groups_of(optimizer)
        for each in self.of(optimizer):
            each.note_last_step(groups)

    @torch.no_grad()
    def changed(self, optimizer: Optimizer) -> Tensor | None:
        """Return a flag on the device: whether weights of an optimizer have changed since `begin`; None without any."""
        different = [flag for each in self.of(optimizer) for flag in each.differs]
        return torch.stack(different).any() if different else None

    def changes(self, optimizer: Optimizer) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return an optimizer's weights of the last `begin`, its present ones, and gradients, by name."""
        found = {}
        for each in self.of(optimizer):
            for name, w in each.weights.items():
                param, grad = self.parameters[name], self.parameters[name].grad
                found[name] = w, local(param).detach(), torch.zeros_like(w) if grad is None else local(grad)
        return found

    def lacks_parameters(self) -> bool:
        """Return whether optimizers step parameters in the next step that have not joined the exchange."""
        model = self._model()
        return model is not None and not owners_of_exchanged(model, self._optimizers, (), True).keys() <= self.ids

    def refresh_parameters(self, names: bool = False, stepping: bool = False) -> None:
        """Add parameters that were unfrozen or given to optimizers since the last step; call it before each step.

        Args:
            names: whether to look for new names, too. This takes a pass over all modules.
            stepping: whether a step comes next, see `exchanged_parameters`.
        """
        model = self._model()
        if model is None:
            return
        present = owners_of_exchanged(model, self._optimizers, self.ids, stepping)
        by_name = parameters_by_name(model) if names else self.parameters
        number = {id(optimizer): number for number, optimizer in enumerate(self._optimizers)}
        if present == {
            id(by_name.get(name)): {number[id(each.optimizer)]} for each in self.segments for name in each.segment.names
        }:
            return
        self._check_trained()
        if self.is_pending:
            self.complete()
        if lost := [name for name, param in self.parameters.items() if id(param) not in present]:
            owner = next(each.optimizer for each in self.segments if lost[0] in each.segment.names)
            raise ValueError(
                f"{type(owner).__name__} no longer steps {listed([*map(repr, lost)])}, which it "
                f"stepped when exchanging began. Make a new optimizer of the model's parameters and exchange its "
                f"updates, by attach_updates or by a new fit; or freeze them by requires_grad_(False)."
            )
        owner_of = {name: each.optimizer for each in self.segments for name in each.segment.names}
        name_of = {id(param): name for name, param in parameters_by_name(model).items()}
        # PEFT and pruning rename parameters.
        now = {name: name_of[id(param)] for name, param in self._by_name.items() if id(param) in name_of}
        self.parameters, optimizer_of, numbers = exchanged_parameters(model, self._optimizers, self.ids, stepping)
        moved = [now[name] for name, owner in owner_of.items() if optimizer_of[now[name]] is not owner]
        weights = {now[name]: w for each in self.segments for name, w in each.weights.items()}
        frozen = {now[name] for each in self.segments for name in each.frozen}
        self._new = [now.get(name, name) for name in self._new]
        params = locals_of(self.parameters)
        new = {name: param.detach() for name, param in params.items() if name not in weights}
        state = renamed(self._reducer.state_dict(), now)
        self._reducer.setup(params, numbers)
        self._expect_later(model)
        self._reducer.load_state_dict(state)
        self._new += [*new, *(moved if self._rule.local_steps > 1 else ())]  # ranks may differ in them
        self._lay_out({**weights, **new}, optimizer_of)
        for each in self.segments:
            each.frozen = frozen.intersection(each.segment.names)

    def _check_trained(self) -> None:
        """Raise ValueError if a parameter was added or unfrozen whose copies within a replica would differ."""
        if (model := self._model()) is not None:
            reshard(model)
            check_all_sharded(model)

    # After a step:

    @torch.no_grad()
    def exchange(self, optimizer: Optimizer, *, stepped: bool | None = True, write: bool = True) -> None:
        """Exchange an optimizer's deltas since `begin`. Afterwards its weights are equal on all ranks.

        With overlap="next_step", complete the previous exchange and begin this one. After a failure the model has the
        last agreed weights.

        Args:
            optimizer: the optimizer of the deltas.
            stepped: whether the optimizer has just taken its step. False: it skipped the step. None: it took its steps
                earlier.
            write: see `complete`; without overlap within backward.

        Raises:
            NonFiniteGradient: a delta is not finite on some rank. With overlap="next_step" the next exchange raises it.
            RankFailure: another rank has failed, or is at another step.
            RuntimeError: `begin` was not called before the step.
        """
        if self._rule.delayed:
            self._wait_or_restore()
        segments, groups = self._start(optimizer), _groups_of(optimizer)
        try:
            skipped = not stepped or all(
                self.parameters[x].grad is None for each in segments for x in each.segment.names
            )
            for each in segments if stepped is not None else ():
                each.note_step(groups, skipped=skipped)
            self._write_stale()
            if self._rule.delayed:
                begun = [each.begin_(groups, write) for each in segments]  # no graphs: all begin before one ends
                self._exchange_later(segments, begun)
            else:
                with self._reducer.captures.allowed():
                    for each in segments:
                        each.exchange_(groups, write)
                if write:
                    self._share_new(optimizer)
        except BaseException as error:  # some segments hold deltas, some this rank's weights, and some agreed ones
            self._restore(segments)
            if self._rule.delayed and not isinstance(error, Exception):
                self._futures = [Future()]
                self._futures[0].set_exception(RuntimeError("An exchange of updates was interrupted as it began."))
            raise
        self._windows.restore(optimizer)
        self._reducer.finish_step()
        if self._rule.delayed and self._new and write:
            self.complete()  # not while another thread exchanges
            self._share_new(optimizer)

    def start(self, optimizer: Optimizer) -> Callable[[UpdateSegment], None]:
        """Begin an exchange whose segments are submitted one by one, in any order; `finish` ends it.

        Returns:
            A function that submits a segment to the worker after its step. Segments are exchanged in the layout's
            order.
        """
        order, groups = self._start(optimizer), _groups_of(optimizer)
        waiting: dict[int, Callable[[], Future[Any]]] = {}
        futures = self._futures = list[Future[Any]]()

        def submit(segment: UpdateSegment) -> None:
            segment.note_step(groups)
            ready = None if self.stream is None else torch.cuda.current_stream(self.stream.device).record_event()
            waiting[id(segment)] = partial(self._worker.submit, partial(segment.exchange_, groups), ready)
            while len(futures) < len(order) and (send := waiting.pop(id(order[len(futures)]), None)):
                futures.append(send())

        return submit

    @torch.no_grad()
    def finish(self, optimizer: Optimizer) -> None:
        """Wait until all submitted segments have been exchanged. It raises the same errors as `exchange`."""
        futures, self._futures = self._futures, []
        try:
            self._worker.wait(futures)
            self._share_new(optimizer)
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: the worker still writes to the weights
                self._worker.drop(futures)
            self._restore(self.of(optimizer))
            raise
        self._windows.restore(optimizer)
        self._reducer.finish_step()

    @torch.no_grad()
    def abandon(self, optimizer: Optimizer) -> None:
        """Abandon an exchange after a failed backward: skip the remaining segments, and restore the agreed weights."""
        self._worker.drop(self._futures)
        self._futures = []
        self._restore(self.of(optimizer))

    def _start(self, optimizer: Optimizer) -> list[UpdateSegment]:
        """Return the segments of an optimizer whose step has begun."""
        if optimizer not in self._begun:
            raise RuntimeError(f"DeltaExchange.begin(optimizer) comes before {type(optimizer).__name__}.step().")
        self._begun.remove(optimizer)
        return self.of(optimizer)

    def _share_new(self, optimizer: Optimizer) -> None:
        """Broadcast layers from rank 0 that were created or unfrozen during training, because ranks may differ in them.

        Do so after their first exchange, because that exchange reports ranks with different parameters.
        """
        ours = {name for each in self.of(optimizer) for name in each.segment.names}
        if new := [name for name in self._new if name in ours]:
            tensors = [local(self.parameters[name]).detach() for name in new]
            broadcast_differing(self._reducer.comm, tensors, tensors[0].device)
        self._new = [name for name in self._new if name not in ours]

    # A pending exchange.

    def _exchange_later(self, segments: Sequence[UpdateSegment], pending: Sequence[PendingExchange]) -> None:
        if not pending:  # all parameters of the optimizer are frozen
            return
        reducer = self._reducer
        reducer.in_flight = True

        def finish() -> None:
            for segment, each in zip(segments, pending, strict=True):
                reducer.finish(each)
                segment.signal.compare()

        samples = [each.signal.sample for each in segments if each.signal.sample is not None]
        self._futures = [self._worker.launch(finish, [*samples, *(x for each in pending for x in each.tensors)])]

    def wait(self) -> None:
        """Wait for the pending exchange, on CUDA in the current stream; raise its error."""
        self._worker.wait(self._futures)

    def ends_soon(self) -> bool:
        """Return whether the exchange in the worker ends within `JOIN_SECONDS`, without an error."""
        return not wait(self._futures, JOIN_SECONDS).not_done and not any(each.exception() for each in self._futures)

    def _wait_or_restore(self) -> None:
        """Wait for the pending exchange. If it has failed, restore weights. An interrupt does not stop it."""
        try:
            self.wait()
        except Exception:
            self._restore()
            raise

    @torch.no_grad()
    def complete(self, write: bool = True) -> None:
        """Complete the pending exchange, if any, so that weights are equal on all ranks.

        Other ranks need not call it. Changes since the exchange began go into the residual. Without a residual they
        stay in the weights.

        Args:
            write: if False, the model gets its new weights only before the next step, because backward may need the
                present ones.
        """
        if not self._rule.delayed:
            if write:
                self._write_stale()
            return
        self._wait_or_restore()
        kept = [pair for each in self.segments if each.ahead is not None for pair in each.complete_()]
        self._reducer.in_flight = False
        if write:
            self._write_stale()
            for weights, change in kept:
                weights.sub_(change)
        self._reducer.raise_deferred()

    def close(self) -> bool:
        """End the worker; return whether its exchange has ended without an error."""
        ended = self.ends_soon()
        self._windows.close()
        self._worker.end()
        return ended

    def _write_stale(self) -> None:
        for each in self.segments:
            if each.is_stale:
                each.write()

    def _restore(self, segments: Sequence[UpdateSegment] = ()) -> None:
        """Write the last agreed weights of the pending segments, and of the given ones, into the model.

        Optimizers get their betas back.
        """
        self._windows.restore(*self._optimizers)
        pending = [each for each in self.segments if each.ahead is not None]
        for each in (*segments, *(each for each in pending if each not in segments)):
            each.restore_()
        if self._rule.delayed:
            self._reducer.in_flight = True  # its state belongs to no complete step


def _groups_of(optimizer: Optimizer) -> dict[int, Any]:
    """Return parameter groups by id of the parameter."""
    return {id(param): group for group in optimizer.param_groups for param in group["params"]}
