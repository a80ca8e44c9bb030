"""Logs the share of u that a step leaves in the residual, next to its theoretical bounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.callbacks.base import Charts, StepCallback, Trainer, by_parameter, sum_of_squares
from lightning_sparse.compressors.base import Entries, Update, drop_padding
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
from lightning_sparse.observer import Observer
from lightning_sparse.reducer import Reducer

SERIES = ("measured", "bound_any_u", "bound_bell_shaped_u")


class ContractionRatio(StepCallback):
    """Logs ‖u − C(u)‖² / ‖u‖² on logging steps: the share of u = g + e that a step leaves in the residual.

    C(u) is the part of rank 0's u that went into the result. If ranks send the k entries that they choose, and all of
    them go into the result, the callback also logs two bounds:

    - `bound_any_u`, 1 − k/d: the largest possible share if the k largest entries are sent, and the mean share if k
      random entries are sent;
    - `bound_bell_shaped_u`, (1 − k/d)²: the largest possible share for a bell-shaped u if the k largest entries are
      sent. It holds if the sorted magnitudes of u form a convex curve (Shi et al. 2019, arXiv 1911.08772, theorem 1).

    A chart under TensorBoard's "Custom scalars" shows the three series together. A method that does not choose entries
    has only the measured share. A logging step costs one pass over the parameters, logged as
    `monitoring_cost/ContractionRatio_ms`. Other steps cost nothing.

    Args:
        per_layer: whether to log the three series for each parameter too.
    """

    category = "What a step leaves behind: ‖u − C(u)‖² / ‖u‖²"

    def __init__(self, per_layer: bool = False) -> None:
        self.per_layer = per_layer

    def charts(self, reducer: Reducer) -> Charts:
        has_bounds = reducer.method.aggregator.applies_all_sent
        bounds = ": measured ≤ (1 − k/d)² if u is bell-shaped, ≤ 1 − k/d always" * has_bounds
        charts = {f"Whole model{bounds}": _tags("contraction", has_bounds)}
        if self.per_layer and reducer.layout is not None:
            names = reversed(reducer.layout.names)
            charts |= {name: _tags(f"layers/{name}/contraction", has_bounds) for name in names}
        return charts

    def observer(self, reducer: Reducer) -> Observer:
        return _Losses(self.per_layer, reducer.method.aggregator.applies_all_sent)

    def report(self, seen: _Losses, trainer: Trainer, step: int) -> dict[str, float]:
        scalars: dict[str, float] = {}
        for name, (lost, total, sent, numel) in seen.sums.items():
            tags = _tags("contraction" if name is None else f"layers/{name}/contraction")
            kept = 1 - sent / max(numel, 1)
            # `lost` is a difference of sums, which rounding may make slightly negative.
            ratio = max(0.0, lost) / total if total > 0 else math.nan
            scalars |= dict(zip(tags, (ratio, kept, kept**2), strict=True))
        return scalars


def _tags(prefix: str, has_bounds: bool = True) -> list[str]:
    return [f"{prefix}/{series}" for series in (SERIES if has_bounds else SERIES[:1])]


class _Losses(Observer):
    """Observes one reduction.

    Attributes:
        sums: (Σ(u − C(u))², Σu², number of entries sent, number of elements) by parameter name, or by None for the
            model. The number of entries is NaN if ranks do not send entries, or if not all of them go into the result.
    """

    def __init__(self, per_layer: bool, has_bounds: bool) -> None:
        self.per_layer, self._has_bounds = per_layer, has_bounds
        self.sums: dict[str | None, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
        self._squares: dict[int, list[Tensor]] = {}  # by segment: several may wait for their exchange

    def compensated(self, u: Tensor, ctx: Context) -> None:
        # Compute the squares now, because the exchange may overwrite u.
        self._squares[ctx.segment.index] = [sum_of_squares([part]) for part in self._parts(ctx.segment, u)]

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        segment = ctx.segment
        parts, squares = self._parts(segment, u), self._squares.pop(segment.index)
        lost: Sequence[float | Tensor]
        sent = [math.nan] * len(parts)
        if applied is u:
            lost, sent = [0.0] * len(parts), [part.numel() for part in parts]
        elif isinstance(applied, Entries):
            indices, values = drop_padding(applied, segment.numel)
            before = u[indices].double()
            gone = before.square() - (before - values).square()
            pieces = by_parameter(gone, indices, segment) if self.per_layer else [gone]
            lost = [total - some.sum() for total, some in zip(squares, pieces, strict=True)]
            sent = [some.numel() for some in pieces] if self._has_bounds else sent
        else:
            left = u - applied
            lost = [sum_of_squares([part]) for part in self._parts(segment, left)]
        names = segment.names if self.per_layer else (None,)
        for name, part, total, rest, count in zip(names, parts, squares, lost, sent, strict=True):
            for key in {None, name}:
                self.sums[key] += (float(rest), float(total), count, part.numel())

    def _parts(self, segment: Segment, x: Tensor) -> list[Tensor]:
        return segment.views(x) if self.per_layer else [x]
