"""The options of `contrib` and their allowed values."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lightning_sparse import options
from lightning_sparse.options import Option

OPTIONS = {
    "seed": options.OPTIONS["seed"],
    "levels": Option(
        Integral, lambda x: 1 <= x <= 127, "must be a whole number from 1 to 127, the number of levels above 0."
    ),
    "bucket": Option(Integral, lambda x: x >= 1, "must be a whole number, 1 or more, the elements that share a norm."),
    "rounds": Option(Integral, lambda x: 1 <= x <= 50, "must be a whole number from 1 to 50, how often to halve."),
    "trim": Option(Real, lambda x: 0 <= x < 0.5, "must be in [0, 0.5), the share of the ranks left out at either end."),
    "share": Option(Real, lambda x: 0 <= x < 0.5, "must be in [0, 0.5), the share of the ranks that attack."),
    "workers": Option(Integral, lambda x: x >= 1 and x % 2 == 1, "must be odd: an even number of votes may be a tie."),
    "byzantine": Option(Integral, lambda x: x >= 0, "must be a whole number of workers, 0 or more."),
    "probability": Option(Real, lambda x: 0 < x <= 1, "must be in (0, 1], the probability that a worker gets a part."),
    "part_size": Option(Integral, lambda x: x >= 1, "must be a whole number of examples, 1 or more."),
    "mu": Option(Real, lambda x: 0 < x < math.inf, "must be a number above 0, the strong convexity of the loss."),
    "shift": Option(Real, lambda x: 0 < x < math.inf, "must be a number above 0, of the order of d/k."),
    "gamma": Option(Real, lambda x: 0 < x < math.inf, "must be a number above 0."),
    "l2": Option(Real, lambda x: 0 <= x < math.inf, "must be a number, 0 or more."),
    "steps": Option(Integral, lambda x: x >= 1, "must be a whole number of steps, 1 or more."),
    "processes": Option(Integral, lambda x: x >= 1, "must be a whole number of processes, 1 or more."),
}


def check(name: str, value: Any, owner: str) -> Any:
    """Return the value of an option of `owner`, or raise ValueError if the value is not allowed."""
    return options.check(name, value, owner, OPTIONS)
