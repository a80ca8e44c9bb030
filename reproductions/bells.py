"""Tests whether a distribution is bell-shaped.

Theorem 1 of Shi et al. 2019, arXiv 1911.08772, requires one peak at zero and a decrease on both sides. Then the sorted
magnitudes form a convex curve. A layer of at least 1,000 entries has "one peak" if

- the histogram would rise to one peak and then fall if at most 3 % of the entries changed their bin. A bin is a quarter
  of a standard deviation. By chance, up to 2 % of 1,000 normal numbers need to change,
- the peak is within half a standard deviation of zero, and u is nearly symmetric, |skewness| < 1.

A narrow spike with wide tails meets these criteria too. So "bell-shaped" has two more requirements. The
Kolmogorov-Smirnov distance to the normal distribution of the same mean and standard deviation must be at most 0.1. (A
Laplace distribution has 0.06.) The excess kurtosis must be above −1, which excludes a uniform distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from sklearn.isotonic import isotonic_regression
from torch import Tensor

from benchmarks.harness.table import Row

REACH, BINS = 10.0, 80
MIDDLES = (np.arange(BINS) + 0.5) * 2 * REACH / BINS - REACH
LEAST = 1000
"""Least number of entries of a layer whose shape is tested."""


def summarize(x: Tensor) -> dict[str, float]:
    """Return statistics of a 1-D tensor in fp64.

    "ks_distance" is the Kolmogorov-Smirnov distance to the normal distribution of this mean and standard deviation. If
    all elements are equal, all statistics except "mean" and "std" are NaN.
    """
    values = x.double().numpy()
    mean, std = float(values.mean()), float(values.std())
    if not math.isfinite(std):
        raise RuntimeError("The recorded numbers are not all finite.")
    shape = dict.fromkeys(("skewness", "excess_kurtosis", "ks_distance"), math.nan)
    if std > 0:
        distance = stats.ks_1samp((values - mean) / std, special.ndtr, method="asymp").statistic
        shape = {"skewness": float(stats.skew(values)), "excess_kurtosis": float(stats.kurtosis(values))}
        shape["ks_distance"] = float(distance)
    return {"mean": mean, "std": std, **shape}


def judge(x: Tensor, summary: Mapping[str, float]) -> Row:
    """Return a histogram of a 1-D tensor that is not constant, as text, and whether it meets the criteria above.

    "histogram" is the share of entries in each bin, from −REACH to REACH standard deviations around the mean. "moved"
    is the share of entries that would have to change their bin for one peak. "peak" is the position of this peak, in
    standard deviations.
    """
    mean, std = summary["mean"], summary["std"]
    share = torch.histc((x.double() - mean) / std, BINS, -REACH, REACH).numpy() / x.numel()
    best = min((unimodal(share, peak) for peak in range(1, BINS)), key=lambda fit: float(np.abs(fit - share).sum()))
    moved, peak = float(np.abs(best - share).sum()) / 2, float(MIDDLES[best.argmax()]) + mean / std
    one_peak = moved <= 0.03 and abs(peak) <= 0.5 and abs(summary["skewness"]) < 1
    bell = one_peak and summary["ks_distance"] <= 0.1 and summary["excess_kurtosis"] > -1
    histogram = " ".join(f"{part:.4g}" for part in share)
    return {"moved": moved, "peak": peak, "one_peak": one_peak, "bell_shaped": bell, "histogram": histogram}


def unimodal(share: NDArray[np.float64], peak: int) -> NDArray[np.float64]:
    """Return the least-squares fit of the shares that rises up to bin `peak` (at least 1) and falls from there."""
    parts = [isotonic_regression(part, increasing=up) for part, up in ((share[:peak], True), (share[peak:], False))]
    return np.concatenate(parts)
