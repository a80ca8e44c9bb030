"""Collects the buckets of one step, and reduces the segments that they complete."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.hooks.rates import Rates
from lightning_sparse.layout import Segment
from lightning_sparse.reducer import Reducer


@dataclass
class Bucket:
    """One of DDP's buckets.

    Attributes:
        future: the future that DDP waits for.
        buffer: the gradients; the result overwrites them.
        views: the gradients by parameter name.
        unused: parameters that took no part in this backward pass.
        ready: on CUDA, an event recorded after the last gradient.
        pending: number of segments in this bucket that have not been reduced.
    """

    future: Any
    buffer: Tensor
    views: dict[str, Tensor]
    unused: set[str]
    ready: torch.cuda.Event | None
    pending: int = 0

    def complete(self) -> None:
        """Complete the future with the present contents of the buffer."""
        # After a CUDA error this may fail, too. Then backward raises before DDP waits for the future.
        with contextlib.suppress(RuntimeError):
            if not self.future.done():
                self.future.set_result(self.buffer)


class Step:
    """The buckets of the current step. Reduces each segment when its last gradient has arrived.

    Attributes:
        exchanged: names of the parameters that took part in the last complete step; empty if ranks skipped it. None
            before the first one.
    """

    def __init__(self, reducer: Reducer, rates: Rates) -> None:
        assert reducer.layout is not None
        self._reducer, self._layout = reducer, reducer.layout
        self._segment_of = {name: segment for segment in reducer.layout.segments for name in segment.names}
        self.buckets: list[Bucket] = []
        self._rates = rates
        self.exchanged: list[str] | None = None
        self.arrived: dict[str, Bucket] = {}  # by parameter
        self._missing: dict[int, int] = {}  # number of parameters, by segment

    def add(self, bucket: Bucket) -> None:
        """Take a bucket, and reduce the segments that are complete now."""
        self.buckets.append(bucket)
        bucket.pending = len({self._segment_of[name].index for name in bucket.views})
        for name in bucket.views:
            if name in self.arrived:
                raise RuntimeError(
                    f"The gradient of {name!r} arrived twice in a step: an earlier backward pass was cut short."
                )
            self.arrived[name] = bucket
            segment = self._segment_of[name]
            missing = self._missing[segment.index] = self._missing.get(segment.index, len(segment.names)) - 1
            if missing == 0 and not self._reducer.gradient_check.needs_all_gradients:
                self._reduce(segment)
        if len(self.arrived) < len(self._segment_of):
            return
        self.exchanged = []
        if not self._reducer.gradient_check.needs_all_gradients or self._reduce_all():
            self._reducer.finish_step()
            self.exchanged = [name for name, each in self.arrived.items() if name not in each.unused]
            if self._rates.are_due(1):
                self._rates.compare()
        self.buckets, self.arrived, self._missing = [], {}, {}

    def _reduce(self, segment: Segment) -> None:
        bucket_of = {name: self.arrived[name] for name in segment.names}
        self._reducer.reduce_segment_(
            segment,
            [bucket.views[name] for name, bucket in bucket_of.items()],
            [name for name, bucket in bucket_of.items() if name in bucket.unused],
        )
        for bucket in {id(bucket): bucket for bucket in bucket_of.values()}.values():
            bucket.pending -= 1
            if bucket.pending == 0:
                bucket.future.set_result(bucket.buffer)

    def _reduce_all(self) -> bool:
        """Reduce all segments, unless the ranks agree to skip the step; return whether they took it."""
        grads = {name: self.arrived[name].views[name] for name in self._layout.names}
        if self._reducer.check_gradients(grads, set().union(*(bucket.unused for bucket in self.buckets))):
            for segment in self._layout.segments:
                self._reduce(segment)
            return True
        for bucket in self.buckets:
            bucket.future.set_result(bucket.buffer)
        return False
