"""The algorithm, once: compensate, aggregate, hand out, keep the rest, count.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.aggregators import Aggregator
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors.base import add_
from lightning_sparse.context import Context, State
from lightning_sparse.exchange import Exchange
from lightning_sparse.gradients import check_tensor, write_
from lightning_sparse.layout import Granularity, Layout, Segment
from lightning_sparse.methods import Method
from lightning_sparse.methods import method as make_method
from lightning_sparse.observer import Observer
from lightning_sparse.options import OnNonFinite as OnNonFinite
from lightning_sparse.options import check_partition, check_seed, check_warmup
from lightning_sparse.overflow import GradientCheck
from lightning_sparse.routing import Routing
from lightning_sparse.state import SegmentStates

log = logging.getLogger(__name__)
VERSION = 2
"""The format of `Reducer.state_dict`."""


class Reducer:
    """One rank's side of compressed gradient averaging: a method, a wire and the state.

    Args:
        method: a `Method`, or the name of one.
        comm: this rank's wire.
        seed: of all random choices; equal on all ranks.
        granularity: what is compressed together: "layer", "bucket" or "model" (see `Layout.of`).
        bucket_cap_mb: size of a "bucket" in MiB.
        warmup: densities to use in turn before the method's own, from dense to sparse.
        warmup_steps: number of steps for each density of `warmup`; None: one epoch each, counted by `epoch`.
        lr: learning rate, or a function that returns the present one, for methods that need it.
        loss_scale: a function that returns what the loss is multiplied with, as `GradScaler.get_scale` does. Residuals
            are unscaled; if a gradient overflows, all ranks get NaN and no residual changes.
        on_nonfinite: what a gradient with a NaN or an infinity means without a loss scale: "raise" NonFiniteGradient on
            all ranks, or "skip": all ranks get NaN, and the step is left out.
        clip_norm: largest 2-norm of this rank's own gradient, all parameters together; a longer one is shortened
            before anything is added. None leaves it as it is.

    Attributes:
        step: reductions done so far.
        skipped: steps that were left out because a gradient was not finite.
        epoch: the present epoch, set from outside; it matters only for a warm-up by epochs.
        seconds: time spent so far per phase, "compensate", "aggregate" (selection and exchange; `comm.seconds` is the
            exchange alone), "write" and "keep"; "exposed" is how long training has waited for these after backward, if
            a communication thread does them.
        observers: called for every segment; empty on most steps.
    """

    def __init__(
        self,
        method: Method | str,
        comm: Comm,
        *,
        seed: int = 0,
        granularity: Granularity = "bucket",
        bucket_cap_mb: float = 25,
        warmup: Sequence[float] = (),
        warmup_steps: int | None = None,
        lr: float | Callable[[], float] | None = None,
        loss_scale: Callable[[], float] | None = None,
        on_nonfinite: OnNonFinite = "raise",
        clip_norm: float | None = None,
    ) -> None:
        self.method = make_method(method) if isinstance(method, str) else method
        if not isinstance(self.method, Method):
            raise TypeError(f"Reducer(method={method!r}): method must be a Method or the name of one.")
        seed = check_seed(seed)
        warmup, warmup_steps = check_warmup(self.method, warmup, warmup_steps)
        bucket_cap_mb = check_partition(granularity, bucket_cap_mb)
        self._check = GradientCheck(loss_scale, on_nonfinite, clip_norm)
        if self.method.memory.needs_lr and lr is None:
            raise ValueError(f"{self.method!r} needs the learning rate: pass lr, a number or a function.")
        self.method.aggregator.check_size(comm.size)
        self.comm = comm
        self.seed = seed
        self.granularity = granularity
        self.bucket_cap_mb = bucket_cap_mb
        self.warmup = tuple(warmup)
        self.warmup_steps = warmup_steps
        self.lr = lr
        self.step = 0
        self.skipped = 0
        self.epoch = 0
        self.seconds = dict.fromkeys(("compensate", "aggregate", "write", "keep", "exposed"), 0.0)
        self.observers: list[Observer] = []
        self.layout: Layout | None = None
        self._states = SegmentStates(self.method)
        self._in_sync: dict[int, Aggregator[Any]] = {}  # segment to the aggregator of its last exchange
        self._saved: Mapping[str, Any] | None = None
        self._routing = Routing(self.method, comm)
        self._deferred: list[tuple[int, Callable[[], None]]] = []  # step, and a check that raises its error

    @property
    def density(self) -> float | None:
        """The density of the present step; None where the method has none."""
        phase = self.epoch if self.warmup_steps is None else self.step // self.warmup_steps
        return self.warmup[phase] if phase < len(self.warmup) else self.method.density

    @property
    def states(self) -> list[State]:
        """The state of each segment."""
        return self._states.by_segment

    @property
    def loss_scale(self) -> Callable[[], float] | None:
        """The function that returns the loss scale; may be replaced between two steps."""
        return self._check.get_scale

    @loss_scale.setter
    def loss_scale(self, get_scale: Callable[[], float] | None) -> None:
        self._check.get_scale = get_scale

    @property
    def needs_all_gradients(self) -> bool:
        """Whether a step needs all gradients before the first is added, so that nothing overlaps with backward."""
        return self._check.needs_all_gradients

    def setup(self, params: Mapping[str, Tensor]) -> None:
        """Lay out the state for these parameters (or gradients), given in registration order.

        Raises:
            ValueError: there are none, or a segment is too long.
            TypeError: a parameter is not a dense fp32, fp16 or bf16 tensor.
        """
        for name, param in params.items():
            check_tensor(name, param)
        self.layout = Layout.of(
            {name: tuple(param.shape) for name, param in params.items()},
            self.granularity,
            self.bucket_cap_mb,
            dtypes={name: param.dtype for name, param in params.items()},
        )
        self._digest = self.layout.digest
        self._states.allocate(self.layout, next(iter(params.values())).device)
        self._in_sync.clear()
        if self._saved is not None:
            self._states.load(self._saved)
            self._saved = None

    def reduce_(self, grads: dict[str, Tensor]) -> None:
        """Replace this rank's gradients by the agreed result, in place, all segments in turn.

        The first call fixes the layout; later ones must bring the same names and shapes. All ranks call together.

        Args:
            grads: parameter name to gradient, in registration order.
        """
        if self.layout is None:
            self.setup(grads)
        assert self.layout is not None
        if set(grads) != set(self.layout.names):
            missing, new = set(self.layout.names) - set(grads), set(grads) - set(self.layout.names)
            raise ValueError(
                f"reduce_ got other gradients than at first: missing {sorted(missing)}, new {sorted(new)}. Pass the "
                f"same parameters in every step."
            )
        for segment in self.layout.segments:
            for name, shape in zip(segment.names, segment.shapes, strict=True):
                check_tensor(name, grads[name])
                if tuple(grads[name].shape) != shape:
                    raise ValueError(f"The gradient of {name!r} has shape {tuple(grads[name].shape)}, before {shape}.")
        try:
            if self.needs_all_gradients and not self.check_gradients(grads):
                return
            for segment in self.layout.segments:
                flat = [grads[name].contiguous().view(-1) for name in segment.names]
                self.reduce_segment_(segment, flat)
                for name, result in zip(segment.names, flat, strict=True):
                    if result.data_ptr() != grads[name].data_ptr():
                        grads[name].copy_(result.view_as(grads[name]))
        except Exception as error:
            self.comm.mark_failed(self.error_message(error))
            raise
        self.finish_step()

    def error_message(self, error: BaseException) -> str:
        """Return the text that other ranks raise for an error on this one."""
        if isinstance(error, RankFailure):
            return str(error)  # another rank's error, or one of all ranks
        return f"Rank {self.comm.ranks[self.comm.rank]} failed at step {self.step}: {type(error).__name__}: {error}"

    def check_gradients(self, grads: Mapping[str, Tensor], unused: Collection[str] = ()) -> bool:
        """Agree on whether a step is taken, before anything is added. To be called first if `needs_all_gradients`.

        Args:
            grads: parameter name to gradient, all of them. If the step is skipped they are filled with NaN, as a
                GradScaler expects.
            unused: parameters that took no part in this backward pass.

        Returns:
            Whether the step is taken. Equal on all ranks.

        Raises:
            NonFiniteGradient: a gradient is not finite on some rank, there is no loss scale, and `on_nonfinite` is
                "raise".
        """
        assert self.layout is not None
        taken = self._check.passes(grads, unused, self.layout, self.comm, self.step, self.skipped)
        self.skipped += not taken
        return taken

    def reduce_segment_(self, segment: Segment, grads: list[Tensor], unused: Collection[str] = ()) -> None:
        """Replace one segment's gradients by the agreed result, in place. All ranks go through segments in one order.

        Args:
            segment: one of the layout's.
            grads: one 1-D gradient per parameter, in the segment's order.
            unused: parameters that took no part in this backward pass: their gradients count as zero, and their
                residuals stay for a step in which they do.
        """
        if self._deferred and self._deferred[0][0] < self.step:
            self.raise_deferred()
        memory, density = self.method.memory, self.density
        assert self.layout is not None
        compressor, aggregator = self._routing.parts(segment, density, self.layout.segments)
        lr = None
        if memory.needs_lr:
            lr = self.lr() if callable(self.lr) else self.lr
        ctx = Context(
            segment,
            step=self.step,
            density=density,
            lr=lr,
            scale=self._check.scale,
            state=self.states[segment.index],
            seed=self.seed,
            rank=self.comm.rank,
            # If ranks divide a segment among them, it is their sum that is selected from.
            stats=compressor.block_stats(segment.numel, density) if aggregator.ranks_per_link == 1 else None,
        )
        gain = memory.gain(ctx)
        if gain == 0:
            # Learning rate 0 with an lr-scaled residual: nothing to send; leave the state unchanged.
            torch._foreach_zero_(grads)
            return
        masked = []
        if unused:
            masked = self._states.mask_unused(segment, unused)
            torch._foreach_zero_([grad for name, grad in zip(segment.names, grads, strict=True) if name in unused])
        for observer in self.observers:
            observer.gradients(grads, ctx)
        with self._timed("compensate"):
            u = memory.compensate(grads, ctx)
        for observer in self.observers:
            observer.compensated(u, ctx)
        with self._timed("aggregate"):
            exchange = self._exchange(ctx, aggregator, u.device)
            update, applied = aggregator(u, compressor, exchange, ctx)
            exchange.finish()
        self._in_sync[segment.index] = aggregator
        for observer in self.observers:
            observer.aggregated(u, applied, ctx)
        with self._timed("write"):
            factor = self._check.loss_scale / gain
            rounding_error = write_(grads, segment, update, factor, memory.error_feedback, exchange.step_ok)
        with self._timed("keep"):
            if memory.error_feedback:
                add_(u, applied, -1)
                if rounding_error is not None:
                    add_(u, rounding_error)
            memory.update(u, applied, ctx)
            for view, value in masked:
                view.add_(value)
        if exchange.deferred is not None:
            self._deferred.append((self.step, exchange.deferred))

    def _exchange(self, ctx: Context, aggregator: Aggregator[Any], device: torch.device) -> Exchange:
        in_sync = self._in_sync.get(ctx.segment.index) is aggregator
        equal = (self.method, self.seed, ctx.step, ctx.density, ctx.lr, ctx.segment.index, in_sync)
        fingerprint = zlib.crc32(repr(equal).encode()) ^ self._digest
        return Exchange(self.comm, ctx, fingerprint, device=device, in_sync=in_sync)

    def raise_deferred(self) -> None:
        """Raise an error of the last step, whose status the host did not wait for, on CUDA.

        Raises:
            NonFiniteGradient, RankFailure, ValueError: as `reduce_segment_` on the CPU.
        """
        while self._deferred:
            self._deferred[0][1]()  # a failed check stays queued, so that every later call raises again
            del self._deferred[0]

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def reset(self) -> None:
        """Return to the state after `setup`."""
        self.step = self.skipped = 0
        self._saved = None
        self._forget_exchanges()
        self._states.clear()

    def _forget_exchanges(self) -> None:
        self._deferred.clear()
        self._in_sync.clear()

    def finish_step(self) -> None:
        """Count a step; to be called after all segments have been reduced."""
        self.step += 1

    @property
    def dense_nbytes(self) -> float:
        """Bytes that a rank sends in a step of ring all-reduce in fp32; its share of the node's with two levels."""
        assert self.layout is not None
        return sum(map(self._routing.dense_nbytes, self.layout.segments))

    def dense_segments(self, density: float | None) -> list[Segment]:
        """Return the segments that go dense, as the method would send no less at this density."""
        assert self.layout is not None
        return [segment for segment in self.layout.segments if not self._routing.pays(segment, density)]

    def nbytes(self, density: float | None) -> float:
        """Return the bytes that a rank sends in a step at a density, without counts and headers."""
        assert self.layout is not None
        return sum(self._routing.nbytes(segment, density) for segment in self.layout.segments)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must keep to go on, as copies, on the host.

        Returns:
            Tensors and primitives only: "step"; "elements", state name to parameter name to a tensor of the parameter's
            shape; "segments", names of a segment's parameters to state name to tensor; "owners", the part that keeps a
            state, and "resize", what a change of the number of ranks does to it (see `state.resized`); and the format's
            version, method, rank and number of ranks.

        Raises:
            NonFiniteGradient, RankFailure: see `raise_deferred`.
        """
        self.raise_deferred()
        if self._saved is not None:
            return dict(self._saved)  # loaded, but the parameters are not known yet
        return {
            "version": VERSION,
            "method": repr(self.method),
            "rank": self.comm.rank,
            "size": self.comm.size,
            "step": self.step,
            "skipped": self.skipped,
            **self._states.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on the same rank; another granularity is fine, another density, too.

        State of a part of another kind is dropped, with a warning.

        Raises:
            ValueError: it belongs to another rank, number of ranks (see `resized`) or set of parameters.
        """
        for key, mine in (("version", VERSION), ("rank", self.comm.rank), ("size", self.comm.size)):
            if state.get(key) != mine:
                raise ValueError(f"Reducer state is of {key} {state.get(key)!r}, here it is {mine!r}: cannot load it.")
        if self.layout is None:
            self._saved = state  # until the parameters are known
        else:
            self._states.load(state)
            self._forget_exchanges()
        self.step, self.skipped = int(state["step"]), int(state["skipped"])
