"""How gradients, residuals and their sums are distributed: what a threshold or a count of entries rests on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from lightning_sparse.callbacks.shared import Charts, StepCallback, Trainer, chunks
from lightning_sparse.compressors.base import Entries, Update, drop_padding
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
from lightning_sparse.observer import Observer
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.first_line import summary_writers

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from torch.utils.tensorboard import SummaryWriter

BINS = 60
"""Of the histograms that are written; TensorBoard draws 30."""

REACH = 4.0
"""Standard deviations that a written histogram reaches to either side of the mean."""

QUANTITIES = {"g": "gradient g", "e": "residual e", "u": "u = g + e"}
"""Letter in the papers, and name, of what is looked at."""


class GradientDistribution(StepCallback):
    """Logs how the gradient g, the residual e and their sum u = g + e are distributed, on the steps that log.

    g counts as it enters u: without a loss scale, after the strategy's own clipping, and times the learning rate where
    the residual holds that. All are rank 0's own, before any exchange, and with several backward passes in a batch
    those of the last one.

    A histogram reaches over four standard deviations to either side of the mean, or as far as there are values; its
    outermost bins hold what lies beyond, since a gradient's tails would leave one bar in the middle. The whole model's
    are also written in standard deviations from the mean: TensorBoard gives all steps one axis, on which gradients that
    shrink end as a needle. TensorBoard's loggers get the histograms, all loggers get the scalars:

    - mean, standard deviation, skewness and excess kurtosis, of all elements, in fp64;
    - the Kolmogorov-Smirnov distance to the normal distribution of that mean and standard deviation, 0 to 1, of all
      elements, known to the edges of bins with a relative width of 1/128: within 0.003 of the exact distance;
    - `threshold_sent`, the smallest |u| that was sent, and `threshold_if_normal`, what would cut off as many entries
      if u were normal: |mean| + z · std with z = Φ⁻¹(1 − k/2d) for k of d entries sent.

    A step that logs costs three passes over the parameters and no temporary of their size; what it took is logged as
    `monitoring_cost/GradientDistribution_ms`. Steps that do not log cost nothing.

    Args:
        per_layer: also log each parameter's histograms, and the scalars of its u.
    """

    category = "Distribution of u = g + e"

    def __init__(self, per_layer: bool = False) -> None:
        self.per_layer = per_layer

    def charts(self, reducer: Reducer) -> Charts:
        return {
            "Threshold: smallest |u| sent, and where as much of a normal u is cut off": [
                "distribution/threshold_sent",
                "distribution/threshold_if_normal",
            ],
            "Excess kurtosis of g, e, u: 0 if normal, more for heavier tails": [
                f"distribution/{letter}_excess_kurtosis" for letter in QUANTITIES
            ],
            "Kolmogorov-Smirnov distance of g, e, u to a normal distribution": [
                f"distribution/{letter}_ks_distance" for letter in QUANTITIES
            ],
        }

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero and trainer.loggers and not (summary_writers(trainer) or trainer.fast_dev_run):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers)
            warnings.warn(
                f"GradientDistribution: {names} takes no histograms, so there will be scalars only. Add a "
                f"TensorBoardLogger to Trainer(logger=[...]) to see them.",
                stacklevel=2,
            )

    def observer(self, reducer: Reducer) -> Observer:
        return _Distributions(self.per_layer, reducer)

    def report(
        self,
        seen: _Distributions,
        trainer: Trainer,
        pl_module: pl.LightningModule,
        writers: list[SummaryWriter],
        step: int,
    ) -> dict[str, float]:
        scalars: dict[str, float] = {}
        wholes = {letter: distribution.summary() for letter, distribution in seen.wholes.items()}
        summaries: dict[tuple[str | None, str], Summary | None] = {(None, key): whole for key, whole in wholes.items()}
        for (name, letter), summary in (summaries | seen.layers).items():
            if summary is None:
                continue
            prefix = "distribution" if name is None else f"layers/{name}"
            for writer in writers:
                summary.write(writer, f"{prefix}/{QUANTITIES[letter]}", step)
                if name is None and summary.std > 0:
                    summary.standardised().write(writer, f"{prefix}_in_stds/{QUANTITIES[letter]}", step)
            if name is None or letter == "u":
                scalars |= summary.scalars(f"{prefix}/{letter}")
        for name, (threshold, count) in seen.thresholds.items():
            u = wholes["u"] if name is None else seen.layers[name, "u"]
            if u is not None and count:
                prefix = "distribution" if name is None else f"layers/{name}"
                scalars[f"{prefix}/threshold_sent"] = threshold
                scalars[f"{prefix}/threshold_if_normal"] = u.normal_threshold(count)
        return scalars


@dataclass(frozen=True)
class Summary:
    """What is worth saying about many numbers.

    Attributes:
        numel: how many.
        sums: of their first and second powers.
        mean: arithmetic mean.
        std: standard deviation, of the numbers themselves (divided by their count).
        skewness: third standardised moment; NaN where all are equal.
        excess_kurtosis: fourth standardised moment, less 3; NaN where all are equal.
        ks_distance: to the normal distribution of this mean and standard deviation; NaN where all are equal.
        edges: of the histogram's bins, ascending.
        counts: of the histogram's bins; fractions, where a bin's edge cuts through a finer one.
    """

    numel: int
    sums: tuple[float, float]
    mean: float
    std: float
    skewness: float
    excess_kurtosis: float
    ks_distance: float
    edges: NDArray[np.float64]
    counts: NDArray[np.float64]

    def scalars(self, tag: str) -> dict[str, float]:
        """Return the statistics under their tags."""
        return {f"{tag}_{key}": getattr(self, key) for key in ("mean", "std", "skewness", "excess_kurtosis")} | {
            f"{tag}_ks_distance": self.ks_distance
        }

    def write(self, writer: SummaryWriter, tag: str, step: int) -> None:
        """Write the histogram to TensorBoard."""
        low, *limits = self.edges.tolist()
        total, squares = self.sums
        writer.add_histogram_raw(
            tag, low, limits[-1], self.numel, total, squares, limits, self.counts.tolist(), global_step=step
        )

    def standardised(self) -> Summary:
        """Return what could be said about the same numbers, less their mean, by their standard deviation."""
        edges = (self.edges - self.mean) / self.std
        return replace(self, sums=(0.0, float(self.numel)), mean=0.0, std=1.0, edges=edges)

    def normal_threshold(self, count: int) -> float:
        """Return the magnitude that `count` of the numbers would exceed if they were normal."""
        return abs(self.mean) + float(special.ndtri(1 - count / (2 * self.numel))) * self.std


class Distribution:
    """Counts of a fine histogram and sums of powers; both add up over parts.

    A bin is what the upper 16 bits of an fp32 number say: sign, exponent and seven bits of the mantissa. So no range
    has to be known beforehand, and from 9e-41 to 3e38 all bins have a relative width of 1/128 or less.
    """

    def __init__(self) -> None:
        self.numel = 0
        self.counts: Tensor | None = None
        self.sums: Tensor | None = None

    def add(self, parts: Sequence[Tensor], scale: float = 1.0) -> None:
        """Count `scale` times the elements of 1-D tensors of any floating dtype."""
        if self.counts is None or self.sums is None:
            self.counts = torch.zeros(1 << 16, dtype=torch.int64, device=parts[0].device)
            self.sums = torch.zeros(4, dtype=torch.float64, device=parts[0].device)
        for chunk in chunks(parts):
            part = chunk.float() if scale == 1 else chunk.float() * scale
            # Arithmetic shift: -32768 is minus zero, -1 the NaN of largest magnitude, 0 plus zero.
            self.counts += torch.bincount((part.view(torch.int32) >> 16).add_(1 << 15), minlength=1 << 16)
            first = part.double()
            second = first * first
            self.sums += torch.stack([first.sum(), second.sum(), first.dot(second), second.dot(second)])
            self.numel += chunk.numel()

    def merge(self, other: Distribution) -> None:
        """Count what another has counted."""
        if self.counts is None or self.sums is None:
            self.counts, self.sums = other.counts, other.sums
        elif other.counts is not None and other.sums is not None:
            self.counts += other.counts
            self.sums += other.sums
        self.numel += other.numel

    def summary(self) -> Summary | None:
        """Return what the counts and sums say; None for no numbers, or some that are not finite."""
        if self.counts is None or self.sums is None or self.numel == 0:
            return None
        sums = self.sums.tolist()
        if not all(map(math.isfinite, sums)):
            return None
        mean, second, third, fourth = (power / self.numel for power in sums)
        variance = second - mean**2
        # Below what rounding of fp64 leaves, all are equal.
        std = math.sqrt(variance) if variance > 1e-14 * second else 0.0
        counts = self.counts.cpu().numpy()
        # In ascending order the negative numbers come first, those of largest magnitude before all.
        counts = np.concatenate([counts[: 1 << 15][::-1], counts[1 << 15 :]])
        filled = counts.nonzero()[0]
        lefts, rights = _EDGES[filled], _EDGES[filled + 1]
        below = np.concatenate([[0], counts[filled].cumsum()]) / self.numel
        low, high = max(lefts[0], mean - REACH * std), min(rights[-1], mean + REACH * std)
        skewness = excess_kurtosis = distance = math.nan
        if std > 0:
            skewness = (third - 3 * mean * second + 2 * mean**3) / std**3
            excess_kurtosis = (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / std**4 - 3
            left, right = special.ndtr((lefts - mean) / std), special.ndtr((rights - mean) / std)
            # The largest difference lies at one side of a bin that holds something: left before it, right after it.
            distance = float(max(np.abs(left - below[:-1]).max(), np.abs(right - below[1:]).max()))
        else:
            low, high = lefts[0], rights[-1]
        edges = np.linspace(low, high, BINS + 1)
        # Within a fine bin values are taken as spread evenly.
        places = np.stack([lefts, rights], 1).reshape(-1)
        reached = np.interp(edges, places, np.stack([below[:-1], below[1:]], 1).reshape(-1))
        reached[0], reached[-1] = 0, 1
        return Summary(
            self.numel,
            (sums[0], sums[1]),
            mean,
            std,
            skewness,
            excess_kurtosis,
            distance,
            edges,
            np.diff(reached) * self.numel,
        )


def _edges() -> NDArray[np.float64]:
    infinity = 0x7F80  # upper half of its bits; above it are NaN, whose bins stay empty
    finite = (np.arange(infinity, dtype=np.int32) << 16).view(np.float32).astype(np.float64)
    magnitudes = np.append(finite, np.full((1 << 15) + 1 - infinity, 2.0**128))
    return np.concatenate([-magnitudes[:0:-1], magnitudes])


_EDGES = _edges()
"""Edges of the fine bins, ascending: 65,537 of them."""


class _Distributions(Observer):
    """Looks at one reduction.

    Attributes:
        wholes: letter to distribution over all parameters.
        layers: parameter and letter to summary.
        thresholds: parameter, or None for all, to the smallest |u| sent and how many entries were.
    """

    def __init__(self, per_layer: bool, reducer: Reducer) -> None:
        self.per_layer = per_layer
        self.memory = reducer.method.memory
        self.wholes: dict[str, Distribution] = {}
        self.layers: dict[tuple[str | None, str], Summary | None] = {}
        self.thresholds: dict[str | None, tuple[float, int]] = {}

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        self._add("g", ctx.segment, grads, ctx.scale * self.memory.gain(ctx))
        if "residual" in ctx.state:
            self._look("e", ctx.segment, ctx.state["residual"])

    def compensated(self, u: Tensor, ctx: Context) -> None:
        self._look("u", ctx.segment, u)

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        if not isinstance(applied, Entries):
            return
        segment = ctx.segment
        indices = drop_padding(applied, segment.numel).indices
        magnitudes = u[indices].abs()
        self._sent(None, magnitudes)
        if self.per_layer:
            stops = torch.tensor(segment.bounds[1:-1], device=indices.device)
            cuts = torch.searchsorted(indices, stops).tolist()
            for name, part in zip(segment.names, magnitudes.tensor_split(cuts), strict=True):
                self._sent(name, part)

    def _look(self, letter: str, segment: Segment, x: Tensor) -> None:
        self._add(letter, segment, segment.views(x) if self.per_layer else [x])

    def _add(self, letter: str, segment: Segment, parts: list[Tensor], scale: float = 1.0) -> None:
        whole = self.wholes.setdefault(letter, Distribution())
        if not self.per_layer:
            whole.add(parts, scale)
            return
        for name, part in zip(segment.names, parts, strict=True):
            # Summed up at once: the counts themselves would need more memory than a small layer.
            layer = Distribution()
            layer.add([part], scale)
            self.layers[name, letter] = layer.summary()
            whole.merge(layer)

    def _sent(self, name: str | None, magnitudes: Tensor) -> None:
        least, count = self.thresholds.get(name, (math.inf, 0))
        if magnitudes.numel():
            self.thresholds[name] = (min(least, float(magnitudes.min())), count + magnitudes.numel())
