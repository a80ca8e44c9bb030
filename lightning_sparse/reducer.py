"""The whole algorithm: add the residual, aggregate, write the gradients, update the residual, count the step.

def rank(comm: Comm) -> Tensor:
    reducer = Reducer(method("topk", density=0.25), comm)
    grads = {"w": torch.tensor([1.0, 0.0, 0.0, -3.0])}
    reducer.reduce_(grads)
    return grads["w"]

simulate(2, rank)  # both ranks: tensor([0., 0., 0., -3.]); the 1.0 waits in each rank's residual
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.aggregators import Aggregator
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors.base import Compressor, Entries, Update, parts_of
from lightning_sparse.context import Context, State
from lightning_sparse.exchange import Exchange
from lightning_sparse.exchange import Exchanged as Exchanged
from lightning_sparse.exchange import NonFiniteGradient as NonFiniteGradient
from lightning_sparse.gradients import check_distinct, check_fits, check_one_device, check_tensor, write_
from lightning_sparse.kernels.gradient_table import Placed
from lightning_sparse.kernels.graphs import NO_GRAPHS, Captures, Graphs
from lightning_sparse.kernels.payout import FindPayout
from lightning_sparse.layout import Layout, Segment
from lightning_sparse.methods import Method, method_options, resolve_method
from lightning_sparse.observer import Observer
from lightning_sparse.options import ReducerOptions
from lightning_sparse.overflow import GradientCheck
from lightning_sparse.routing import DENSE, Routing
from lightning_sparse.state import SegmentStates, check_header

log = logging.getLogger(__name__)


class PendingExchange(NamedTuple):
    """A segment whose exchange has begun: `Reducer.begin` returns it, and `Reducer.finish` completes it.

    Attributes:
        u: this rank's compensated gradient.
        grads: the gradients; the result overwrites them.
        compressor: the compressor of this segment in this step.
        aggregator: the aggregator of this segment in this step.
        exchange: the exchange among the ranks.
        masked: masked parts of the state, and the values to add back at the end.
        observers: the observers of this exchange.
    """

    u: Tensor
    grads: list[Tensor]
    compressor: Compressor
    aggregator: Aggregator[Any]
    exchange: Exchange
    masked: list[tuple[Tensor, Tensor]]
    observers: list[Observer]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `finish` reads and writes, except the state."""
        payload, update = self.exchange.precompressed or ((), self.u)
        masked = (value for _, value in self.masked)
        return [self.u, *self.grads, self.exchange.worst, *payload, *parts_of(update), *masked]


class Reducer:
    """One rank's side of compressed gradient averaging: a method, a connection to the other ranks, and the state.

    Args:
        method: a `Method`, or the name of one.
        comm: this rank's connection to the other ranks.
        exchanged: the quantity that `reduce_` gets: each rank's "gradient", or the "update" of its optimizer. Errors
            name it, and residuals of one are invalid for the other.
        **options: see `ReducerOptions`; and options of a method that is given by name, such as `density`.

    Attributes:
        options: the checked options.
        step: number of reductions so far.
        routing: the segments that fall back to dense, and the bytes of a step; exists after `setup`.
        gradient_check: loss scale, clipping and skipped steps.
        epoch: the present epoch, set from outside. Only a warm-up by epochs uses it.
        in_flight: whether an exchange of updates is pending, so that the state cannot be saved.
        seconds: seconds per phase so far. "compensate", "select" (with packing and summing) and "write" (gradients and
            residual) are phases; `comm.seconds` is the time of collectives. "exposed" is the time that training waited
            for the exchange.
        observers: the observers, which are called for every segment; empty in most steps.
        segment_states: the state of all segments.
    """

    def __init__(
        self,
        method: Method | str,
        comm: Comm,
        *,
        exchanged: Exchanged = "gradient",
        **options: Any,
    ) -> None:
        known = [field.name for field in fields(ReducerOptions)]
        own = {name: options.pop(name) for name in method_options("Reducer", known, method, options)}
        self.method = resolve_method(method, own.pop("density", None), **own)
        self.options = ReducerOptions(**options)
        self.options.check_method(self.method)
        self.gradient_check = GradientCheck(self.options)
        self.method.aggregator.check_size(comm.size)
        self.comm = comm
        self.step = self.epoch = 0
        self.in_flight = False
        self.seconds = dict.fromkeys(("compensate", "select", "write", "exposed"), 0.0)
        self.observers: list[Observer] = []
        self.routing: Routing
        self.segment_states = SegmentStates(self.method, exchanged)
        self._deferred: list[tuple[int, Callable[[], None]]] = []  # step, and a check that raises its error

    @property
    def workers(self) -> int:
        """The number of ranks, or with `TwoLevel` of nodes. The ranks of a node exchange as one worker."""
        return self.comm.size // self.method.aggregator.ranks_per_link

    @property
    def node(self) -> Comm:
        """This rank's connection to the ranks of its node, if the aggregator is `TwoLevel`; otherwise to itself."""
        return self.comm.sub(self.method.aggregator.node_of(self.comm.rank), counted=False)

    @property
    def captures(self) -> Captures:
        """The CUDA graphs of all segments."""
        return self.segment_states.captures

    @property
    def exchanged(self) -> Exchanged:
        """The quantity that `reduce_` gets."""
        return self.segment_states.exchanged

    @property
    def layout(self) -> Layout | None:
        """The partition of the parameters; None before `setup`."""
        return self.segment_states.layout

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped because a gradient was not finite."""
        return self.gradient_check.skipped

    @property
    def density(self) -> float | None:
        """The density of the present step; None if the method has none."""
        densities, steps = self.options.density_warmup or (), self.options.density_warmup_steps
        phase = self.epoch if steps is None else self.step // steps
        return densities[phase] if phase < len(densities) else self.method.density

    @property
    def states(self) -> list[State]:
        """The state of each segment."""
        return self.segment_states.by_segment

    def setup(self, params: Mapping[str, Tensor], group_of: Mapping[str, int] | None = None) -> None:
        """Lay out the state for these parameters (or gradients), given in registration order; see `Layout.of`.

        Raises:
            ValueError: there are none, a segment is too long, or they are on several devices.
            TypeError: a parameter is not a dense fp32, fp16 or bf16 tensor.
        """
        for name, param in params.items():
            check_tensor(name, param)
        check_one_device(params)
        layout = Layout.of(
            {name: tuple(param.shape) for name, param in params.items()},
            self.options.granularity,
            self.options.bucket_cap_mb,
            dtypes={name: param.dtype for name, param in params.items()},
            group_of=group_of or {},
        )
        self.routing = Routing(self.method, self.comm, layout, [param.dtype for param in params.values()])
        self._deferred.clear()
        self.segment_states.allocate(layout, next(iter(params.values())).device)

    @torch.no_grad()
    def reduce_(self, grads: dict[str, Tensor]) -> None:
        """Replace this rank's gradients by the agreed result, in place, all segments in turn.

        The first call fixes the layout. Later calls must have the same names and shapes. All ranks call it together.

        Args:
            grads: parameter name to gradient, in registration order.
        """
        try:
            if self.layout is None:
                check_distinct(grads)
                self.setup(grads)
            assert self.layout is not None
            check_fits(self.layout, grads)
            if self.gradient_check.needs_all_gradients and not self.check_gradients(grads):
                return
            for segment in self.layout.segments:
                flat = [grads[name].contiguous().view(-1) for name in segment.names]
                self.reduce_segment_(segment, flat)
                for name, result in zip(segment.names, flat, strict=True):
                    if result.data_ptr() != grads[name].data_ptr():
                        grads[name].copy_(result.view_as(grads[name]))
        except NonFiniteGradient:  # all ranks raise it, and a later reducer may use the same connection
            raise
        except Exception as error:
            self.comm.mark_failed(error_message(error, self.comm, self.step))
            raise
        self.finish_step()

    def check_gradients(self, grads: Mapping[str, Tensor], unused: Collection[str] = ()) -> bool:
        """Return whether all ranks take the step, see `GradientCheck.agree_to_step`.

        If `gradient_check.needs_all_gradients`, call it before the first segment is reduced.
        """
        assert self.layout is not None
        return self.gradient_check.agree_to_step(grads, unused, self.layout, self.comm, self.step)

    def reduce_segment_(self, segment: Segment, grads: list[Tensor], unused: Collection[str] = ()) -> Update:
        """Replace one segment's gradients by the agreed result, in place. The order of segments is equal on all ranks.

        Args:
            segment: a segment of the layout.
            grads: one 1-D gradient per parameter, in the segment's order.
            unused: parameters that took no part in this backward pass. Their gradients count as zero, and their
                residuals stay unchanged.

        Returns:
            The part of this rank's gradients and residual that went into the result.
        """
        return self.finish(self.begin(segment, grads, unused))

    def begin(
        self,
        segment: Segment,
        grads: list[Tensor],
        unused: Collection[str] = (),
        payout: FindPayout | None = None,
    ) -> PendingExchange:
        """Run the part of `reduce_segment_` that needs no other rank. `finish` runs the rest, perhaps in a thread.

        Args:
            segment, grads, unused: see `reduce_segment_`.
            payout: returns the unspent momentum of the optimizer in terms of `grads`, see `Context`.
        """
        # With overlap="next_step" one exchange may still be running; only the device waits for it.
        self.raise_deferred(before=self.step - self.method.delayed)
        density = self.density
        self.routing.log_dense(density)
        compressor, aggregator = parts = self.routing.parts(segment, density)
        observers = list(self.observers)
        graphs, stats = self._graphs_of(segment, compressor, density), None
        if not aggregator.shards_segment:
            is_active = graphs.is_active(*grads)
            if is_active and (stats := graphs.stats) is not None:
                stats.done = False
            else:
                stats = compressor.block_stats(segment.numel, density)
            graphs.stats = stats if is_active else None
        ctx = Context(
            segment,
            step=self.step,
            density=density,
            scale=self.gradient_check.scale,
            state=self.states[segment.index],
            seed=self.options.seed,
            rank=self.comm.rank,
            stats=stats,
            payout=None if payout is None or parts is DENSE else payout(),
            graphs=graphs,
        )
        if grads[0].is_cuda:  # a state may be from another stream, as a loaded one is, and the exchange may replace it
            for x in ctx.state.values():
                x.record_stream(torch.cuda.current_stream(x.device))
        masked = []
        if unused:
            masked = self.segment_states.mask_unused(segment, unused)
            torch._foreach_zero_([grad for name, grad in zip(segment.names, grads, strict=True) if name in unused])
        for observer in observers:
            observer.gradients(grads, ctx)
        with timed(self.seconds, "compensate"):
            u = self.method.memory.compensate(grads, ctx)
        for observer in observers:
            observer.compensated(u, ctx)
        in_sync, kind = self.routing.last.get(segment.index) is aggregator, self.exchanged
        fingerprint = self.routing.fingerprint(ctx, in_sync)
        exchange = Exchange(self.comm, ctx, fingerprint, device=u.device, in_sync=in_sync, exchanged=kind)
        return PendingExchange(u, grads, compressor, aggregator, exchange, masked, observers)

    def _graphs_of(self, segment: Segment, compressor: Compressor, density: float | None) -> Graphs:
        """Return the CUDA graphs of a segment, for methods whose kernels are the same in every step."""
        changes = compressor.depends_on_step or self.method.memory.depends_on_step
        # An observer may keep tensors, which a replay would overwrite. Densities of a warm-up are soon over.
        if changes or self.observers or density != self.method.density:
            return NO_GRAPHS
        return self.captures.of(segment.index)

    def compress(self, pending: PendingExchange) -> Update:
        """Compress before `finish`, and return the part of u that this rank sends."""
        exchange = pending.exchange
        with full_precision(pending.u), timed(self.seconds, "select"):
            exchange.precompressed = exchange.compress(pending.u, pending.compressor)
        return exchange.precompressed[1]

    def finish(self, pending: PendingExchange) -> Update:
        """Exchange, write the agreed result into the gradients, and keep the rest, see `reduce_segment_`."""
        u, grads, compressor, aggregator, exchange, masked, observers = pending
        ctx, memory = exchange.ctx, self.method.memory
        communicated = self.comm.seconds
        with full_precision(u), timed(self.seconds, "select"):
            update, applied = aggregator(u, compressor, exchange, ctx)
            exchange.finish()
        self.seconds["select"] -= self.comm.seconds - communicated
        self.routing.note_exchange(ctx.segment, aggregator)
        if exchange.deferred is not None:
            self._deferred.append((ctx.step, exchange.deferred))
        for observer in observers:
            observer.aggregated(u, applied, ctx)
        scale, step_ok = self.gradient_check.loss_scale, exchange.step_ok
        written = ctx.graphs.placed(grads, ctx.segment.bounds)

        def write() -> None:
            rounding_error = write_(written, ctx.segment, update, scale, memory.error_feedback, step_ok)
            for observer in observers:
                observer.written(grads, ctx)
            memory.update(u, applied, rounding_error, ctx)

        with timed(self.seconds, "write"):
            if isinstance(written, Placed) and isinstance(update, Entries):
                given = (u, update, applied, step_ok, *ctx.state.values())
                name = "write", scale, grads[0].dtype
                ctx.graphs.run(name, write, [x for each in given if each is not None for x in parts_of(each)])
            else:
                write()
            for view, value in masked:
                view.add_(value)
        return applied

    def agree(self, purpose: str, device: torch.device, in_sync: bool) -> None:
        """Check that all ranks are at the same step, before a collective that cannot check it. All ranks call it.

        Args:
            purpose: the purpose of the collective; equal on all ranks.
            device: the device of its tensors.
            in_sync: whether ranks are known to count steps alike; equal on all ranks.

        Raises:
            RankFailure: ranks differ. On CUDA a later step raises it if ranks are `in_sync`.
        """
        assert self.layout is not None
        self.raise_deferred(before=self.step)
        ctx = Context(self.layout.segments[0], step=self.step, seed=self.options.seed, rank=self.comm.rank)
        fingerprint = zlib.crc32(purpose.encode(), self.routing.fingerprint(ctx, in_sync))
        exchange = Exchange(self.comm, ctx, fingerprint, device=device, in_sync=in_sync, exchanged=self.exchanged)
        exchange.agree(strict=True)
        exchange.finish()
        if exchange.deferred is not None:
            self._deferred.append((self.step, exchange.deferred))

    def raise_deferred(self, before: int | None = None) -> None:
        """On CUDA, raise errors of earlier steps, whose status was copied to the host asynchronously.

        Args:
            before: raise only errors of steps before this one; None: of all steps.
        """
        while self._deferred and (before is None or self._deferred[0][0] < before):
            self._deferred[0][1]()  # a failed check stays queued, so that every later call raises its error
            del self._deferred[0]

    def _forget_exchanges(self) -> None:
        """Drop all deferred checks. Ranks are no longer known to be in sync."""
        self._deferred.clear()
        if self.layout is not None:
            self.routing.forget()

    def reset(self) -> None:
        """Return to the state after `setup`."""
        self.step = self.gradient_check.skipped = 0
        self._forget_exchanges()
        self.segment_states.clear()

    def forget_residuals(self) -> None:
        """Drop all state of compression, such as residuals. All ranks call it, between two steps.

        Call it after your program has loaded or initialised weights anew: residuals of the earlier ones would move
        these. With several local steps or overlap="next_step", call `exchange_pending` before the weights change.

        Raises:
            RuntimeError: an exchange of updates with overlap="next_step" is pending.
            NonFiniteGradient, RankFailure: see `raise_deferred`.
        """
        self._check_idle("forget_residuals")
        self.raise_deferred()
        self._forget_exchanges()
        self.segment_states.clear()

    def finish_step(self) -> None:
        """Count a step. Call it after all segments have been reduced."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, as copies on the host.

        Returns:
            A dictionary of tensors and primitives, with these keys and the format's version, method, rank, and number
            of ranks and skipped steps:

            - "step": the number of reductions;
            - "elements": state name to parameter name to a tensor of the parameter's shape;
            - "segments": names of a segment's parameters to state name to tensor;
            - "owners": the component that keeps each state;
            - "resize": the treatment of each state if the number of ranks changes, see `state.resized`.

        Raises:
            RuntimeError: an exchange of updates is pending.
            NonFiniteGradient, RankFailure: see `raise_deferred`.
        """
        self._check_idle("state_dict")
        self.raise_deferred()
        own = self.segment_states.state_dict()
        return {"rank": self.comm.rank, "size": self.comm.size, "step": self.step, "skipped": self.skipped, **own}

    def _check_idle(self, caller: str) -> None:
        if self.in_flight:
            raise RuntimeError(
                f"Reducer.{caller} while an exchange goes on, as it does after each step with overlap='next_step': "
                f"call exchange_pending(optimizer) before, on all ranks, and save or load the weights after it."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same rank. Granularity and density may differ.

        State of a different component, or of a run that exchanged the other quantity, is dropped, and rank 0 warns.

        Raises:
            ValueError: the state belongs to another rank, number of ranks (see `resized`) or set of parameters.
            RuntimeError: an exchange of updates is pending.
        """
        self._check_idle("load_state_dict")
        check_header(state, self.comm.rank, self.comm.size)
        self.segment_states.load(state)
        self._forget_exchanges()
        self.step, self.gradient_check.skipped = int(state["step"]), int(state["skipped"])


def error_message(error: BaseException, comm: Comm, step: int) -> str:
    """Return the text of the error that other ranks raise for an error on this rank."""
    if isinstance(error, RankFailure):
        return str(error)  # an error of another rank, or of all ranks
    return f"Rank {comm.ranks[comm.rank]} failed at step {step}: {type(error).__name__}: {error}"


def full_precision(u: Tensor) -> contextlib.AbstractContextManager[None]:
    """Turn off the autocast of the caller, which rounds matrix products to 16 bits.

    If autocast is off, do nothing: after the outermost autocast of a thread, torch clears the casts of all threads.
    """
    kind = u.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time of the block to `seconds[phase]`."""
    started = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - started
