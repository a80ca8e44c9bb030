"""The share of signal in squared gradients, from a comparison of gradients among ranks.

The gradients of the ranks have their signal in common. Their noise differs. So each rank takes u = g/√v, its gradient
as Adam scales it, at a few elements of a segment, the same on all ranks. Let q be the share of signal in v. Of the mean
of u over P ranks, the sum of squares is q + (1 − q)/P times the mean sum of squares of u.

Signal also lasts, and noise does not, so the two moments of one rank give an estimate without communication. It is
wrong at high learning rates: gradients oscillate over time, and yet agree among ranks (`docs/research-updates.md`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.layout import Segment
from lightning_sparse.momentum import SegmentMoments
from lightning_sparse.reducer import Reducer
from lightning_sparse.shards import local, local_gradient
from lightning_sparse.update_rule import SIGNAL

SAMPLES = 512
"""Number of elements of a segment at which ranks compare their gradients."""
INTERVAL = 128
"""In every so many steps ranks compare gradients once, after more frequent comparisons in the beginning."""
WEIGHT = 0.25
"""Weight of a comparison in q. So q is a mean over about the last four comparisons."""


class SignalShare:
    """The share of signal q of one segment, on one rank.

    The segment's state has four numbers, 1-D fp32 and equal on all ranks. They are q, the number of comparisons, the
    step of the last one, and the number of ranks that average a gradient. While q is unknown it is NaN.

    Attributes:
        sample: this rank's u, after the first comparison. It stays at its address: otherwise later tensors would move,
            and CUDA graphs could not be replayed.
    """

    def __init__(self, segment: Segment, reducer: Reducer, device: torch.device) -> None:
        self._segment, self._reducer, self._device = segment, reducer, device
        self.sample: Tensor | None = None
        self._due: int | None = None  # the step of a sample that is not compared yet
        self._excess: Tensor | None = None

    @property
    def excess(self) -> Tensor:
        """The excess f − 1, an fp32 scalar on the device; 0 while q is unknown. Updates are multiplied by f."""
        if self._excess is None:
            state = self._reducer.states[self._segment.index]
            q = state[SIGNAL][0] if SIGNAL in state else torch.ones((), dtype=torch.float32, device=self._device)
            self._excess = excess_of(q, self._reducer.workers)
        return self._excess

    @torch.no_grad()
    def take_sample(self, moments: Callable[[], SegmentMoments], params: Sequence[Tensor], skipped: bool) -> None:
        """After a step, take a sample of this rank's gradients, if a comparison is due.

        Args:
            moments: returns the moments after the step.
            params: the segment's parameters in order.
            skipped: whether the optimizer skipped the step on this rank. Then the comparison does not count.
        """
        step, seed = self._reducer.step, self._reducer.options.seed
        self._due = step if is_due(step, *self._comparisons()) and self._segment.numel else None
        if self._due is not None:
            # Ranks with copies of the segment may have shards of other lengths before it.
            key = Context(replace(self._segment, start=0), step, seed=seed).key(shared=True)
            chosen = random.Random(key).choices(range(self._segment.numel), k=SAMPLES)
            sample = moments().sample([*map(local_gradient, params)], [*map(local, params)], sorted(chosen))
            sample = sample.fill_(math.nan) if skipped else sample
            self.sample = sample if self.sample is None else self.sample.copy_(sample)

    def _comparisons(self) -> tuple[int, int]:
        """Return the number of comparisons and the step of the last one, or −1. After a load they are in the state."""
        index, reducer = self._segment.index, self._reducer
        state, compared = reducer.states[index], reducer.routing.compared
        if index not in compared:
            self._excess = None
            ranks = float(reducer.method.aggregator.ranks_per_link)
            _, count, last, of = state[SIGNAL].tolist() if SIGNAL in state else (0, 0, -1, math.nan)
            if of != ranks:  # the mean of several gradients has more signal than one
                count, last = 0, -1
                new = torch.tensor([math.nan, count, last, ranks], dtype=torch.float32, device="cpu")
                state[SIGNAL] = to_device(new, self._device)
            compared[index] = int(count), int(last)
        return compared[index]

    def compare(self) -> None:
        """After an exchange, compare samples with the other ranks, if that is due. All ranks call it."""
        step, self._due = self._due, None
        if step is not None:
            assert self.sample is not None
            reducer, index = self._reducer, self._segment.index
            every = reducer.comm.all_gather(self.sample)[:: reducer.method.aggregator.ranks_per_link]
            q, count, last, _ = reducer.states[index][SIGNAL]
            q.copy_(signal_of(every, q))
            self.excess.copy_(excess_of(q, reducer.workers))
            # Count here: if a step fails on all ranks, some ranks may have taken a sample, and others not.
            reducer.routing.compared[index] = reducer.routing.compared[index][0] + 1, step
            count.add_(1)
            last.fill_(step)


def excess_of(q: Tensor, size: int) -> Tensor:
    """Return f − 1 with f = 1/√(q + (1 − q)/P), as a new scalar; 0 if q is NaN.

    Args:
        q: the share of signal, an fp32 scalar. It is a mean of estimates, so it may be outside of 0 and 1.
        size: P, the number of ranks, or of nodes.
    """
    q = q.nan_to_num(nan=1.0).clamp(0, 1)
    return torch.rsqrt(q + (1 - q) / size) - 1


def is_due(step: int, count: int, last: int) -> bool:
    """Return whether ranks compare gradients in this step.

    They compare four times while the number of steps doubles, because q changes fast in the beginning. Later they
    compare once in `INTERVAL` steps.

    Args:
        count: the number of comparisons so far.
        last: the step of the last one; −1 before the first.
    """
    return step - last >= min(1 << max(0, min(count, 64) // 4 - 1), INTERVAL)


def signal_of(samples: Tensor, before: Tensor) -> Tensor:
    """Return q after a comparison, as a new fp32 scalar.

    Args:
        samples: u at the same elements of all P ranks, (P, elements). A comparison with an infinity or a NaN, or with
            zeros only, does not count.
        before: q before the comparison; NaN if it is unknown.
    """
    x, size = samples.float(), len(samples)
    agreed = x.mean(0).square().sum() / x.square().mean(0).sum()
    q = (size * agreed - 1) / (size - 1)
    return torch.where(q.isfinite(), torch.where(before.isnan(), q, torch.lerp(before, q, WEIGHT)), before)
