"""The exchange of a segment in one step, and what it leaves for the next: whether ranks are in sync, late errors."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.aggregators import Aggregator
from lightning_sparse.comm import Comm
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange, Exchanged
from lightning_sparse.gradients import write_
from lightning_sparse.memory import Memory
from lightning_sparse.observer import Observer


class Begun(NamedTuple):
    """A segment whose exchange has begun: see `Reducer.begin_segment`.

    Attributes:
        u: this rank's compensated gradient.
        grads: to be overwritten by the result.
        ctx, compressor, aggregator, exchange: of this exchange.
        masked: parts of the state to be given back in the end, and their values.
        observers: those that have seen the gradients.
    """

    u: Tensor
    grads: list[Tensor]
    ctx: Context
    compressor: Compressor
    aggregator: Aggregator[Any]
    exchange: Exchange
    masked: list[tuple[Tensor, Tensor]]
    observers: list[Observer]

    @property
    def tensors(self) -> list[Tensor]:
        """What completing it reads and writes, but for the state."""
        payload, update = self.exchange.ahead or ((), self.u)
        sent = update if isinstance(update, Entries) else (update,)
        return [self.u, *self.grads, self.exchange.worst, *payload, *sent, *(value for _, value in self.masked)]


class SegmentExchanges:
    """Begins and completes the exchange of each segment and step."""

    def __init__(self, comm: Comm, exchanged: Exchanged) -> None:
        self._comm, self._exchanged = comm, exchanged
        self._last: dict[int, Aggregator[Any]] = {}  # segment to the aggregator of its last exchange
        self._deferred: list[tuple[int, Callable[[], None]]] = []  # step, and a check that raises its error

    def begin(self, ctx: Context, aggregator: Aggregator[Any], device: torch.device, settings: str) -> Exchange:
        """Return a new exchange; ranks are in sync if the segment's last one was by the same aggregator.

        `settings` is part of the fingerprint: it must be equal on all ranks.
        """
        in_sync = self._last.get(ctx.segment.index) is aggregator
        equal = (settings, ctx.seed, ctx.step, ctx.density, ctx.segment.index, in_sync)
        fingerprint = zlib.crc32(repr(equal).encode())
        return Exchange(self._comm, ctx, fingerprint, device=device, in_sync=in_sync, exchanged=self._exchanged)

    def complete_(self, begun: Begun, memory: Memory, scale: float, seconds: dict[str, float]) -> Update:
        """Exchange, write `scale` times the agreed result into the gradients, and keep the rest in the memory.

        Returns:
            The part of this rank's u that went into the result.

        Raises:
            NonFiniteGradient, RankFailure: the error that any rank has reported; on CUDA see `raise_deferred`.
        """
        u, grads, ctx, compressor, aggregator, exchange, masked, observers = begun
        with timed(seconds, "aggregate"):
            update, applied = aggregator(u, compressor, exchange, ctx)
            exchange.finish()
        self._last[ctx.segment.index] = aggregator
        if exchange.deferred is not None:
            self._deferred.append((ctx.step, exchange.deferred))
        for observer in observers:
            observer.aggregated(u, applied, ctx)
        with timed(seconds, "write"):
            rounding_error = write_(grads, ctx.segment, update, scale, memory.error_feedback, exchange.step_ok)
        for observer in observers:
            observer.written(grads, ctx)
        with timed(seconds, "keep"):
            memory.update(u, applied, rounding_error, ctx)
            for view, value in masked:
                view.add_(value)
        return applied

    def raise_deferred(self, before: int | None = None) -> None:
        """Raise the error of an exchange whose status the host did not wait for; only of steps before `before`."""
        while self._deferred and (before is None or self._deferred[0][0] < before):
            self._deferred[0][1]()  # a failed check stays queued, so that every later call raises again
            del self._deferred[0]

    def forget(self) -> None:
        """Drop all checks; ranks are not known to be in sync."""
        self._deferred.clear()
        self._last.clear()


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time that the block takes to `seconds[phase]`."""
    started = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - started
