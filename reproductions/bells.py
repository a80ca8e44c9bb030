"""Is a distribution bell-shaped?

Theorem 1 of Shi et al. 2019, arXiv 1911.08772, needs one peak, at zero, and a fall on both sides: then the sorted
magnitudes form a convex curve. A layer of at least 1,000 entries has "one peak" if

- at most 3 % of the entries would have to change their bin, of a quarter of a standard deviation, for the histogram to
  rise to one peak and fall after it (chance moves up to 2 % of 1,000 normal numbers),
- that peak lies within half a standard deviation of zero, and u leans to neither side much, |skewness| < 1.

A spike in a wide desert passes too. So "bell-shaped" asks in addition for a Kolmogorov-Smirnov distance of at most 0.1
to the normal distribution of the same mean and standard deviation (Laplace's has 0.06), and for an excess kurtosis
above −1, which a uniform distribution does not have.
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
"""Entries that a layer needs for its shape to be judged."""


def summarize(x: Tensor) -> dict[str, float]:
    """Return the statistics of a 1-D tensor, in fp64; all but "mean" and "std" are NaN if all elements are equal.

    "ks_distance" is the Kolmogorov-Smirnov distance to the normal distribution of this mean and standard deviation.
    """
    values = x.double().numpy()
    mean, std = float(values.mean()), float(values.std())
    if not math.isfinite(std):
        raise RuntimeError("Numbers that are not finite were recorded.")
    shape = dict.fromkeys(("skewness", "excess_kurtosis", "ks_distance"), math.nan)
    if std > 0:
        distance = stats.ks_1samp((values - mean) / std, special.ndtr, method="asymp").statistic
        shape = {"skewness": float(stats.skew(values)), "excess_kurtosis": float(stats.kurtosis(values))}
        shape["ks_distance"] = float(distance)
    return {"mean": mean, "std": std, **shape}


def judge(x: Tensor, summary: Mapping[str, float]) -> Row:
    """Return a histogram of a 1-D tensor that is not constant, as text, and whether it fulfils the criteria above.

    "histogram" is the part of all entries in each bin, from −REACH to REACH standard deviations about the mean, "moved"
    the part that would have to change its bin for one peak, and "peak" where that is then, in standard deviations.
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
    """Return the nearest shares, in squares, that rise before bin `peak`, not the first, and fall from there on."""
    parts = [isotonic_regression(part, increasing=up) for part, up in ((share[:peak], True), (share[peak:], False))]
    return np.concatenate(parts)
