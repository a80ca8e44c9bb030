"""SIDCo: the entries above a quantile of a distribution that is fitted to |u| in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sparse.compressors.encoding import IndexFormat, ValueFormat
from lightning_sparse.compressors.sparsifier import Sparsifier, selection_bound
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.contrib.kernels.candidates import blocks_reaching, indices_reaching, narrowed, sampled
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.kernels.select import block_maxima, block_size, ensure_stats, magnitude_bits, topk_indices

Fit = Literal["exponential", "gamma", "pareto"]

SAMPLE = 1 << 16
"""Number of magnitudes for the fit."""

FIRST = 0.25
"""Density after the first of several stages."""

STAGES = 5
"""Largest number of stages."""

START = 3
"""Number of stages of the first selection: the middle of the range."""

PERIOD = 5
"""Selections after which the number of stages may change."""

LOW, HIGH = 0.8, 1.2
"""Range of the mean number of entries, divided by k, in which the number of stages does not change."""

NEWTON = 12
"""Newton steps to a quantile of the gamma distribution. The relative error is below 1e-6 (tests/test_sidco.py)."""


@dataclass(frozen=True)
class SIDCo(Sparsifier):
    """Sends the entries whose magnitude reaches a quantile of a distribution fitted to |u|, in several stages.

    Abdelmoniem et al. 2021, arXiv 2101.10761. The first of s stages leaves a quarter of the entries. Each further stage
    fits the exceedances of the previous threshold, and leaves the fraction (ρ/0.25)^(1/(s − 1)) of them. A single stage
    leaves ρ at once. Let a be the smallest exceedance, and m and v the mean and variance of exceedances minus a. In the
    first stage a = 0, and all of |u| are exceedances. A stage that leaves the fraction δ has the threshold

    - exponential: a − m ln δ
    - generalised Pareto: a + λ(1 − δ^κ)/κ with κ = (m²/v − 1)/2, λ = m(m²/v + 1)/2; for κ → 0, a − λ ln δ
    - gamma in the first stage, generalised Pareto later. The threshold of gamma is m/α times the upper quantile δ of
      Γ(α). Here α = (3 − s + √((s − 3)² + 24s))/12s with s = ln m − mean(ln |u|).

    Moments are computed from 65,536 to 196,607 evenly spaced elements, or all if there are fewer. Exact moments of each
    stage would need another pass, which takes longer than exact selection. Zeros have no logarithm, so the first stage
    fits the other magnitudes, and takes the share of zeros into account. If there is no fit, for example for equal
    magnitudes, the k largest entries are sent. They are also sent if fewer than 2k/3 or more than 4k/3 entries reach
    the threshold.

    The number of stages adapts in each segment. It changes by one if, in 5 steps, the mean number of entries above the
    thresholds is above 1.2k or below 0.8k. (The number is counted in blocks with one or more such entries.) The paper
    adds a stage to select more, but with heavy tails this selects less. So the direction depends on the effect of the
    last change. It reverses at 1 and 5 stages.

    Attributes:
        density: fraction ρ of entries to send, in (0, 1]; at least one is sent.
        fit: "exponential", "gamma" or "pareto".
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.

    Raises:
        ValueError: a value out of range, or an unknown fit.
    """

    density: float = 0.001
    fit: Fit = "exponential"
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    state = (StateSpec("stages", per="segment", resize="drop"),)
    exposes_nonfinite = True  # the largest entries are sent, and NaN counts as larger than infinity

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit not in get_args(Fit):
            raise ValueError(f"SIDCo(fit={self.fit!r}): choose from {', '.join(get_args(Fit))}.")

    def capacity(self, numel: int, density: float | None = None) -> int:
        return min(numel, selection_bound(self.count(numel, density)))

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        return block_maxima(numel, self.count(numel, density))

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        """Choose the entries. If `ctx.state` has the segment's stages, replace them by those of the next step."""
        numel = u.numel()
        if k == numel:
            return topk_indices(u, k)
        bits = magnitude_bits("SIDCo", u)
        state = ctx.state.get("stages")
        if state is None:
            state = to_device(torch.tensor([START, 0, 0, 0, 0, 1], dtype=torch.float64, device="cpu"), u.device)
        magnitudes = sampled(bits, SAMPLE, ctx.key(shared=False)).view(torch.float32).double()
        limit = fitted_threshold(magnitudes, k / numel, state[0], self.fit)
        threshold = limit.nan_to_num(torch.inf).float().view(1).view(torch.int32)
        stats = ensure_stats(ctx.stats, u, block_size(numel, k))
        # Without a fit, the number of stages has no effect to learn from.
        ratio = torch.where(limit < torch.inf, blocks_reaching(bits, threshold, stats) / k, 1)
        ctx.state["stages"] = adapted(state, ratio)
        return indices_reaching(bits, k, threshold, -(-2 * k // 3), 4 * k // 3, stats)


def fitted_threshold(magnitudes: Tensor, density: float, stages: Tensor, fit: Fit) -> Tensor:
    """Return the threshold that leaves about a fraction `density` of the magnitudes.

    Args:
        magnitudes: 1-D, fp64.
        density: in (0, 1).
        stages: 1 to `STAGES`, an fp64 scalar on the same device.
        fit: the distribution.

    Returns:
        An fp64 scalar on the same device; NaN or infinity if there is no fit.
    """
    above = magnitudes > 0
    share = above.double().mean()
    first = torch.where(stages > 1, share.clamp(max=FIRST).clamp(min=density), density)
    later = (density / first) ** (1 / (stages - 1).clamp(min=1))
    limit = torch.full_like(share, torch.nan)
    for stage in range(STAGES):
        if stage == 0:
            fraction, least = (first / share).clamp(max=1), torch.zeros_like(share)
        else:
            fraction, least = later, torch.where(above, magnitudes, torch.inf).amin()
        count = above.sum()
        mean = torch.where(above, magnitudes, 0).sum() / count
        if fit == "gamma" and stage == 0:
            logs = torch.where(above, magnitudes.log(), 0).sum() / count
            beyond = gamma_threshold(mean, logs, fraction)
        elif fit == "exponential":
            beyond = least - (mean - least) * fraction.log()
        else:
            variance = torch.where(above, (magnitudes - mean).square(), 0).sum() / count
            beyond = least + pareto_threshold(mean - least, variance, fraction)
        # A threshold above all magnitudes stays. It is too high, so the number of entries will be too low.
        limit = torch.where((stage < stages) & (count > 0), beyond, limit)
        above = magnitudes > limit
        magnitudes, above = narrowed(magnitudes, above)  # each stage reads fewer entries
        if not magnitudes.numel():
            break
    return limit


def pareto_threshold(mean: Tensor, variance: Tensor, fraction: Tensor) -> Tensor:
    """Return the upper quantile of a generalised Pareto distribution that begins at 0; scalars."""
    square = mean.square() / variance
    shape, scale = (square - 1) / 2, mean * (square + 1) / 2
    log = fraction.log()
    return torch.where(shape.abs() < 1e-6, -scale * log, -scale * torch.expm1(shape * log) / shape)


def gamma_threshold(mean: Tensor, mean_of_logs: Tensor, fraction: Tensor) -> Tensor:
    """Return the upper quantile of a gamma distribution with this mean and mean logarithm; scalars."""
    s = mean.log() - mean_of_logs
    shape = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
    log = fraction.log()
    # Newton's steps start at an upper bound (Boucheron et al. 2013, section 2.4) and never pass the root. The reason is
    # that log Q, for the upper tail Q, is a falling and concave function of log y.
    y = shape + (-2 * shape * log).sqrt() - log
    for _ in range(NEWTON):
        tail = torch.special.gammaincc(shape, y)
        slope = (shape * y.log() - y - torch.lgamma(shape)).exp() / tail  # −d ln Q / d ln y
        y = y * ((tail.log() - log) / slope).exp()
    return torch.where(fraction < 1, mean / shape * y, 0)


def adapted(state: Tensor, ratio: Tensor) -> Tensor:
    """Return the state after a selection.

    Args:
        state: fp64, 6: the number of stages, the sum and the number of ratios in this period, the mean ratio of the
            last period, the change of stages after it, and its effect: 1 if one stage more selects more, else -1.
        ratio: number of selected entries divided by k, a scalar.
    """
    stages, total, count, last, change, effect = state.unbind()
    total, count = total + ratio, count + 1
    ends, mean = count == PERIOD, total / PERIOD
    seen = (change * (mean - last)).sign()
    effect = torch.where(ends & (seen != 0), seen, effect)
    wanted = torch.where(mean > HIGH, -effect, torch.where(mean < LOW, effect, 0)) * ends
    wanted = torch.where((stages + wanted < 1) | (stages + wanted > STAGES), -wanted, wanted)
    return torch.stack(
        [
            stages + wanted,
            torch.where(ends, 0, total),
            torch.where(ends, 0, count),
            torch.where(ends, mean, last),
            torch.where(ends, wanted, change),
            effect,
        ]
    )
