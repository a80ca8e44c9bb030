"""What one exchange of a segment leaves for the next: whether ranks are in sync, and errors that are not raised yet."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from lightning_sparse.aggregators import Aggregator
from lightning_sparse.comm import Comm
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange, Exchanged


class SegmentExchanges:
    """Begins and finishes the `Exchange` of each segment and step."""

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

    def finish(self, exchange: Exchange, aggregator: Aggregator[Any]) -> None:
        """Raise the error that any rank has reported; on CUDA keep the check for `raise_deferred`."""
        exchange.finish()
        self._last[exchange.ctx.segment.index] = aggregator
        if exchange.deferred is not None:
            self._deferred.append((exchange.ctx.step, exchange.deferred))

    def raise_deferred(self, before: int | None = None) -> None:
        """Raise the error of an exchange whose status the host did not wait for; only of steps before `before`."""
        while self._deferred and (before is None or self._deferred[0][0] < before):
            self._deferred[0][1]()  # a failed check stays queued, so that every later call raises again
            del self._deferred[0]

    def forget(self) -> None:
        """Drop all checks; ranks are not known to be in sync."""
        self._deferred.clear()
        self._last.clear()
