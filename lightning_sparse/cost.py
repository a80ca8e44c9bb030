"""A model of the time of a training step. It runs nothing.

    work = Workload.even(params=25_600_000, forward=0.05, backward=0.10)
    step(method("gtopk"), work, workers=32, link=Link(125e6), costs=Costs(element=1.5e-9)).seconds

Assumptions of the model:

- Backward delivers the segments one after the other. For each segment, a rank selects entries, sends them, and sums the
  received entries.
- The link carries one segment at a time, in parallel with backward. Selecting and summing interrupt backward if one
  device does both (`Costs.shared`).
- A message takes the link's latency plus its bytes divided by the bandwidth.
- Optimizer updates are exchanged during backward too, but one segment after the other. Updates of several steps are
  exchanged after backward, and delayed updates during the next steps.
- The optimizer's own step is not included.
- If FSDP2 shards each worker's model (`Workload.shards`), the worker's ranks share its link. Each rank exchanges its
  part with the ranks that hold the same part in other workers. Dense gradients are exchanged during backward, as on
  GPUs, and updates after it. FSDP2's own collectives are part of forward and backward.

The model ignores slow workers, other traffic, weaknesses of the collectives, and features that delay updates until
backward ends, such as norm clipping. `benchmarks/scaling.py` fits the model to measured steps and reports its error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sparse.aggregators import AllReduceMean
from lightning_sparse.compressors import Compressor, Identity, Sparsifier
from lightning_sparse.exchange import Exchanged
from lightning_sparse.layout import Segment
from lightning_sparse.methods import Method

DENSE = Method(Identity(), aggregator=AllReduceMean())
MOST_PARAMS = 1e13
"""Most parameters of a workload: more would take a long time to divide into segments."""


@dataclass(frozen=True)
class Link:
    """The link between a worker and the others. Ranks of a node may share it (`Aggregator.ranks_per_link`).

    Attributes:
        bandwidth: bytes per second in each direction.
        latency: seconds per message, in addition to the time for its bytes.
        direct: largest number of bytes of an all-gather that a rank sends to all others at once, not in a ring.
    """

    bandwidth: float
    latency: float = 5e-5
    direct: int = 0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(f"{self!r}: the bandwidth must be above 0 bytes/s, the latency 0 s or more.")


@dataclass(frozen=True)
class Costs:
    """The compute time of a method on a rank.

    Attributes:
        element: seconds per gradient element for adding to the residual, selecting and writing back.
        entry: seconds per received entry for decoding and summing.
        dense_byte: seconds of processor time per byte that a dense all-reduce sends; 0 if the network card does the
            work.
        segment: seconds per segment, independent of its size.
        shared: whether this work interrupts backward, as on a single device; otherwise it runs in parallel.
    """

    element: float = 0.0
    entry: float = 0.0
    dense_byte: float = 0.0
    segment: float = 0.0
    shared: bool = True


@dataclass(frozen=True)
class Workload:
    """A model's gradients and compute time.

    Attributes:
        segments: number of elements of each segment of a rank, in the order in which backward delivers them.
        arrivals: time at which the gradients of each segment are complete, as a fraction of backward, ascending to 1.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        shards: number of ranks that share a worker's link, each with an equal part of the model; 1 without FSDP2.
    """

    segments: tuple[int, ...]
    arrivals: tuple[float, ...]
    forward: float
    backward: float
    shards: int = 1

    def __post_init__(self) -> None:
        if not len(self.segments) == len(self.arrivals) > 0:
            raise ValueError(
                f"Workload got {len(self.segments)} segments and {len(self.arrivals)} arrivals: give each segment the "
                f"time at which it arrives, and at least one segment."
            )

    @staticmethod
    def even(params: int, forward: float, backward: float, bucket_cap_mb: float = 25, *, shards: int = 1) -> Workload:
        """Return a workload of equal segments that arrive at equal intervals; `params` counts all shards."""
        if not 1 <= params <= MOST_PARAMS or not forward >= 0 or not backward >= 0 or shards < 1:
            raise ValueError(
                f"params={params!r}, forward={forward!r}, backward={backward!r}, shards={shards!r}: a model has at "
                f"least one parameter and one shard, at most {MOST_PARAMS:.0e} parameters, and times are 0 s or more."
            )
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: the size of a segment in MiB is above 0.")
        params = math.ceil(params / shards)
        count = math.ceil(4 * params / (bucket_cap_mb * 2**20))
        return Workload(
            tuple(params // count + (number < params % count) for number in range(count)),
            tuple((number + 1) / count for number in range(count)),
            forward,
            backward,
            shards,
        )


@dataclass(frozen=True)
class Step:
    """The modelled time of a step.

    Attributes:
        seconds: duration of the step.
        exposed: seconds of the step in addition to forward and backward.
        sent_bytes: bytes that a worker sends over its link.
    """

    seconds: float
    exposed: float
    sent_bytes: float


def step(
    method: Method,
    work: Workload,
    workers: int,
    link: Link,
    costs: Costs,
    *,
    dense_bytes: int = 4,
    exchanged: Exchanged = "gradient",
) -> Step:
    """Return the time of a step.

    Args:
        method: the method. As in `Reducer`, a segment falls back to dense if the method would send more.
        dense_bytes: bytes per element of dense gradients: 4, or 2 with a 16-bit hook.
        exchanged: "gradient" or "update". A method with an `UpdateRule` always exchanges updates, once in
            `UpdateRule.local_steps` steps. Times and bytes are those of one step.
    """
    if workers < 1:
        raise ValueError(f"workers={workers!r}: at least one.")
    in_turn = exchanged == "update" or method.update_rule is not None
    device = work.forward  # time at which the device is free again
    arrival, wire, sent = 0.0, 0.0, 0.0
    own, travel, added = 0.0, 0.0, 0.0  # seconds of selecting, on the link, and of summing, over all segments
    # Of each segment, the time at which its exchange ends, and the seconds of summing the received entries.
    done: list[tuple[float, float]] = []
    after_backward = method.local_steps > 1 or (in_turn and (work.shards > 1 or method.aggregator.ranks_per_link > 1))
    arrivals = (1.0,) * len(work.segments) if after_backward else work.arrivals
    # Many segments are equal.
    of = functools.cache(functools.partial(_segment, method, workers, costs, dense_bytes, link.direct))
    for numel, fraction in zip(work.segments, arrivals, strict=True):
        nbytes, messages, before, after = of(numel)
        nbytes *= work.shards
        arrives = work.forward + fraction * work.backward
        own, added = own + before, added + after
        travel += messages * link.latency + nbytes / link.bandwidth
        if costs.shared:
            # The work interrupts backward.
            device += (fraction - arrival) * work.backward + before
        else:
            device = max(device, arrives) + before
        arrival = fraction
        # In turn: a thread starts a segment when the previous one is written back.
        wire = max(wire + before * in_turn, device) + messages * link.latency + nbytes / link.bandwidth
        if in_turn:
            wire += after
            device += after * costs.shared
            after = 0.0
        done.append((wire, after))
        sent += nbytes
    end = max(device, work.forward + work.backward)
    for received, after in done:
        end = max(end, received) + after
    computing = work.forward + work.backward
    exposed = (end - computing) / method.local_steps
    if method.delayed:  # a thread waits for the link and sums entries until the next exchange
        busy = computing + (own + added * costs.shared) / method.local_steps
        exposed = max(busy, (travel + added) / method.local_steps) - computing
    return Step(computing + exposed, exposed, sent / method.local_steps)


def _segment(
    method: Method, workers: int, costs: Costs, dense_bytes: int, direct: int, numel: int
) -> tuple[float, int, float, float]:
    """Return the bytes on the link and the messages of a segment, and the seconds of compute before and after."""
    shapes, dense_messages = matrices(numel), 2 * (workers - 1)
    segment = Segment(0, ("",) * len(shapes), shapes, 0)  # equal ones, so that caches serve
    dense = dense_bytes * numel * dense_messages / workers
    chosen = method.aggregator.nbytes(method.compressor, segment, None, workers)
    sharing = method.aggregator.ranks_per_link
    # As in `Reducer`, only a method whose result is a mean may fall back to the dense mean.
    may_fall_back = workers > 1 and method.aggregator.averages
    compressed = not isinstance(method.compressor, Identity) or not isinstance(method.aggregator, AllReduceMean)
    if compressed and (not may_fall_back or sharing * chosen < 4 * dense / dense_bytes):
        before = costs.segment + numel * costs.element
        # In all exchanges of this package, a rank receives the same number of bytes that it sends.
        after = costs.entry * chosen * _entries_per_byte(method.compressor, segment)
        messages = method.aggregator.messages(workers)
        if 0 < chosen <= messages * direct:
            messages = method.aggregator.messages(2 * sharing)  # as with one other worker
        return sharing * chosen, messages, before, after
    # In a ring, only one rank of a node sends to another node.
    return dense, dense_messages, dense * costs.dense_byte, 0.0


def matrices(numel: int) -> tuple[tuple[int, int], ...]:
    """Return shapes of matrices with `numel` elements in total and at most 1000 rows, like those of a large layer.

    Methods that encode matrices, such as `LowRank`, encode vectors differently.
    """
    rows = max(1, min(1000, math.isqrt(numel)))
    columns, rest = divmod(numel, rows)
    return ((rows, columns), (1, rest)) if rest else ((rows, columns),)


def _entries_per_byte(compressor: Compressor, segment: Segment) -> float:
    """Return the number of entries per byte of a segment's payload."""
    entries = compressor.capacity(segment.numel, None) if isinstance(compressor, Sparsifier) else segment.numel
    return entries / max(1, compressor.nbytes(segment, None))


def break_even_bandwidth(
    method: Method,
    work: Workload,
    workers: int,
    link: Link,
    costs: Costs,
    baselines: Sequence[int],
    exchanged: Exchanged = "gradient",
) -> float:
    """Return the bandwidth, in bytes/s, above which a dense step is at least as fast.

    The result is 0 if a dense step is as fast at every bandwidth, and inf if it is slower at every bandwidth.

    Args:
        method: the method to compare with dense training.
        link: provides the latency; its bandwidth is ignored.
        baselines: bytes per element of the dense baselines.
        exchanged: as in `step`.
    """

    def gain(log_bandwidth: float) -> float:
        at = Link(math.exp(log_bandwidth), link.latency)
        dense = min(step(DENSE, work, workers, at, costs, dense_bytes=each).seconds for each in baselines)
        return dense - step(method, work, workers, at, costs, exchanged=exchanged).seconds

    from scipy.optimize import brentq  # the import takes a third of a second, and training does without

    low, high = math.log(1e3), math.log(1e14)
    if gain(low) <= 0:
        return 0.0
    if gain(high) > 0:
        return math.inf
    return math.exp(brentq(gain, low, high, xtol=1e-3))
