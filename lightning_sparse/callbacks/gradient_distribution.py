"""Logs histograms and moments of the gradient g, the residual e and u = g + e."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_sparse.callbacks.base import Charts, StepCallback, Trainer, by_parameter
from lightning_sparse.callbacks.histogram import Distribution, Summary
from lightning_sparse.compressors.base import Entries, Update, drop_padding
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
from lightning_sparse.observer import Observer
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.summary import summary_writers

if TYPE_CHECKING:
    import pytorch_lightning as pl

QUANTITIES = {"g": "gradient g", "e": "residual e", "u": "u = g + e"}
"""Maps the letter used in the papers to the name in TensorBoard."""


class GradientDistribution(StepCallback):
    """Logs the distributions of the gradient g, the residual e and their sum u = g + e on logging steps.

    g is taken as it is added to u: without a loss scale, and after the strategy's own clipping. If updates are
    exchanged, g is the update. All values describe rank 0 before an exchange. If a batch has several backward passes,
    they describe the last one.

    A histogram covers four standard deviations on either side of the mean, or less if all values lie closer. Its
    outermost bins count the values beyond; otherwise a gradient's long tails would squeeze the rest into one bar. The
    histograms of the whole model are also written in standard deviations from the mean. TensorBoard uses one axis for
    all steps, on which shrinking gradients become a needle. TensorBoard's loggers receive the histograms, and all
    loggers receive the scalars:

    - mean, standard deviation, skewness and excess kurtosis of all elements, in fp64;
    - the Kolmogorov-Smirnov distance, 0 to 1, of all elements to the normal distribution of equal mean and standard
      deviation. It is computed at the edges of bins with a relative width of 1/128, so it is within 0.003 of the exact
      distance;
    - `threshold_sent`: the smallest |u| that was sent, if ranks send the entries that they choose, and all of them go
      into the result;
    - `threshold_if_normal`: the threshold that would select the same number of entries from a normal u. It is
      |mean| + z · std with z = Φ⁻¹(1 − k/2d) for k of d entries sent.

    A logging step costs three passes over the parameters and no temporary tensor of their size. Its time is logged as
    `monitoring_cost/GradientDistribution_ms`. Other steps cost nothing.

    Args:
        per_layer: whether to log each parameter's histograms and the scalars of its u too.
    """

    category = "Distribution of u = g + e"

    def __init__(self, per_layer: bool = False) -> None:
        self.per_layer = per_layer

    def charts(self, reducer: Reducer) -> Charts:
        threshold = "Threshold: smallest |u| sent, and the threshold of a normal u at equal density"
        tags = ["distribution/threshold_sent", "distribution/threshold_if_normal"]
        return {
            **({threshold: tags} if reducer.method.aggregator.applies_all_sent else {}),
            "Excess kurtosis of g, e, u: 0 if normal, more for heavier tails": [
                f"distribution/{letter}_excess_kurtosis" for letter in QUANTITIES
            ],
            "Kolmogorov-Smirnov distance of g, e, u to a normal distribution": [
                f"distribution/{letter}_ks_distance" for letter in QUANTITIES
            ],
        }

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if (
            trainer.is_global_zero
            and trainer.loggers
            and not (summary_writers(trainer.loggers) or trainer.fast_dev_run)
        ):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers)
            warnings.warn(
                f"GradientDistribution: {names} does not support histograms, so only scalars are logged. Add a "
                f"TensorBoardLogger to Trainer(logger=[...]) to see histograms.",
                stacklevel=2,
            )

    def observer(self, reducer: Reducer) -> Observer:
        return _Distributions(self.per_layer, reducer.exchanged, reducer.method.aggregator.applies_all_sent)

    def report(self, seen: _Distributions, trainer: Trainer, step: int) -> dict[str, float]:
        scalars: dict[str, float] = {}
        writers = summary_writers(trainer.loggers)
        quantities = QUANTITIES | {"g": f"{seen.exchanged} g"}
        wholes = {letter: distribution.summary() for letter, distribution in seen.wholes.items()}
        summaries: dict[tuple[str | None, str], Summary | None] = {(None, key): whole for key, whole in wholes.items()}
        for (name, letter), summary in (summaries | seen.layers).items():
            if summary is None:
                continue
            prefix = "distribution" if name is None else f"layers/{name}"
            for writer in writers:
                summary.write(writer, f"{prefix}/{quantities[letter]}", step)
                if name is None and summary.std > 0:
                    summary.standardised().write(writer, f"{prefix}_in_stds/{quantities[letter]}", step)
            if name is None or letter == "u":
                scalars |= summary.scalars(f"{prefix}/{letter}")
        for name, (threshold, count) in seen.thresholds.items():
            u = wholes["u"] if name is None else seen.layers[name, "u"]
            if u is not None and count:
                prefix = "distribution" if name is None else f"layers/{name}"
                scalars[f"{prefix}/threshold_sent"] = threshold
                scalars[f"{prefix}/threshold_if_normal"] = u.normal_threshold(count)
        return scalars


class _Distributions(Observer):
    """Observes one reduction.

    Attributes:
        wholes: distribution over all parameters, by letter.
        layers: summary by parameter name and letter.
        thresholds: (smallest |u| sent, number of entries sent) by parameter name, or by None for the model.
    """

    def __init__(self, per_layer: bool, exchanged: str, has_thresholds: bool) -> None:
        self.per_layer, self.exchanged, self._has_thresholds = per_layer, exchanged, has_thresholds
        self.wholes: dict[str, Distribution] = {}
        self.layers: dict[tuple[str | None, str], Summary | None] = {}
        self.thresholds: dict[str | None, tuple[float, int]] = {}

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        self._add("g", ctx.segment, grads, ctx.scale)
        if "residual" in ctx.state:
            self._add_segment("e", ctx.segment, ctx.state["residual"])

    def compensated(self, u: Tensor, ctx: Context) -> None:
        self._add_segment("u", ctx.segment, u)

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        if not (self._has_thresholds and isinstance(applied, Entries)):
            return
        segment = ctx.segment
        indices = drop_padding(applied, segment.numel).indices
        magnitudes = u[indices].abs()
        self._sent(None, magnitudes)
        if self.per_layer:
            for name, part in zip(segment.names, by_parameter(magnitudes, indices, segment), strict=True):
                self._sent(name, part)

    def _add_segment(self, letter: str, segment: Segment, x: Tensor) -> None:
        self._add(letter, segment, segment.views(x) if self.per_layer else [x])

    def _add(self, letter: str, segment: Segment, parts: list[Tensor], scale: float = 1.0) -> None:
        whole = self.wholes.setdefault(letter, Distribution())
        if not self.per_layer:
            whole.add(parts, scale)
            return
        for name, part in zip(segment.names, parts, strict=True):
            # Summarise at once, because the counts need more memory than a small layer.
            layer = Distribution()
            layer.add([part], scale)
            self.layers[name, letter] = layer.summary()
            whole.merge(layer)

    def _sent(self, name: str | None, magnitudes: Tensor) -> None:
        least, count = self.thresholds.get(name, (math.inf, 0))
        if magnitudes.numel():
            self.thresholds[name] = (min(least, float(magnitudes.min())), count + magnitudes.numel())
