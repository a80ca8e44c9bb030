"""The options of `SparseDDPStrategy`, `attach` and `Reducer`: what each may be, with one error for what it may not.

Each check returns the value to go on with: numbers of numpy become Python's, so that the ranks' settings, compared as
text, are equal, and so that a seed draws the same numbers whatever its type.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

Granularity = Literal["layer", "bucket", "model"]
OnNonFinite = Literal["raise", "skip"]
Overlap = Literal["none", "backward", "next_step"]


class Option(NamedTuple):
    """What an option may be.

    Attributes:
        kind: its type; a bool is no number.
        allows: whether a value of that type is in range.
        must: the rest of the sentence that begins with option and value.
        choices: all values, if they are names.
    """

    kind: type | tuple[type, ...]
    allows: Callable[[Any], bool]
    must: str
    choices: Sequence[str] = ()


def _choice(allowed: Any) -> Option:
    choices = get_args(allowed)
    return Option(str, lambda value: value in choices, f"is not known; choose from {', '.join(choices)}.", choices)


What = Literal["auto", "gradient", "update"]
OPTIONS = {
    "density": Option(Real, lambda x: 0 < x <= 1, "must be in (0, 1], the fraction of entries to send."),
    "granularity": _choice(Granularity),
    "bucket_cap_mb": Option(Real, lambda x: 0 < x < math.inf, "must be a positive number of MiB."),
    "density_warmup_steps": Option(Integral, lambda x: x >= 1, "must be a whole number of steps, 1 or more, or None."),
    "seed": Option(Integral, lambda x: True, "must be a whole number."),
    "on_nonfinite": _choice(OnNonFinite),
    "clip_norm": Option(
        Real, lambda x: 0 < x < math.inf, "must be the largest 2-norm of a rank's gradient, a number above 0, or None."
    ),
    "loss_scale": Option(
        object,
        callable,
        "must be a function that returns the present loss scale, such as GradScaler.get_scale, or None.",
    ),
    "timeout": Option(
        timedelta,
        lambda x: x > timedelta(0),
        "must be a datetime.timedelta above 0, such as timedelta(minutes=5), or None.",
    ),
    "exchange": _choice(What),
    "local_steps": Option(Integral, lambda x: x >= 1, "must be a whole number of steps, 1 or more."),
    "momentum": _choice(Literal["pay_out", "mask", "keep"]),
    "rescale": Option(bool, lambda x: True, "must be True or False."),
    "outer_lr": Option(Real, lambda x: 0 < x < math.inf, "must be a number above 0."),
    "outer_momentum": Option(Real, lambda x: 0 <= x < 1, "must be in [0, 1)."),
    "second": Option(
        Real, lambda x: 0 < x < math.inf, "must be a number above 0, the second pass's density over the first's."
    ),
    "decay": Option(Real, lambda x: 0 < x <= 1, "must be in (0, 1], what remains of the residual in each step."),
    "block": Option(
        Integral, lambda x: x >= 2 and x % 2 == 0, "must be an even number, 2 or more, the elements of a scale."
    ),
    "rank": Option(Integral, lambda x: x >= 1, "must be a whole number of columns, 1 or more."),
    "beta": Option(Real, lambda x: 0 <= x < 1, "must be in [0, 1), what remains of the momentum in each step."),
    "hierarchical": Option(bool, lambda x: True, "must be True or False."),
    "overlap": _choice(Overlap),
}


def check(name: str, value: Any, owner: str = "", options: Mapping[str, Option] = OPTIONS) -> Any:
    """Return the value of an option, a number as Python's `int` or `float`.

    Args:
        name: a key of `options`.
        value: what the user gave.
        owner: the class whose option it is, if there are several.
        options: what each option may be.

    Raises:
        ValueError: a value of another type, or out of range.
    """
    option = options[name]
    number = option.kind in (Real, Integral)
    if not isinstance(value, option.kind) or (number and isinstance(value, bool)) or not option.allows(value):
        given = f"{owner}({name}={value!r}): {name}" if owner else f"{name}={value!r}"
        raise ValueError(f"{given} {option.must}{suggestion(value, option.choices)}")
    if not number or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(cast(Real, value))


def suggestion(given: Any, known: Iterable[str]) -> str:
    """Return what ends an error about an unknown name: a question for the nearest known one, or nothing."""
    near = difflib.get_close_matches(str(given), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names of some, for an error that should not grow with their number."""
    return ", ".join(names[:most]) + " and others" * (len(names) > most)


def check_density(owner: str, density: Any) -> float:
    """Return the density of a compressor, or of a warm-up."""
    value: float = check("density", density, owner)
    return value


def check_partition(granularity: Any, bucket_cap_mb: Any) -> float:
    """Return the size of a bucket in MiB, if these options make a partition."""
    check("granularity", granularity)
    value: float = check("bucket_cap_mb", bucket_cap_mb)
    return value


def check_overflow_options(on_nonfinite: Any, clip_norm: Any, loss_scale: Any = None) -> float | None:
    """Return the largest norm of a gradient, if the options about gradients that are too large make sense."""
    check("on_nonfinite", on_nonfinite)
    if loss_scale is not None:
        check("loss_scale", loss_scale)
    return None if clip_norm is None else check("clip_norm", clip_norm)


def check_seed(seed: Any) -> int:
    """Return the seed of a method's random choices."""
    value: int = check("seed", seed)
    return value


def check_timeout(timeout: Any) -> timedelta | None:
    """Return how long to wait for other ranks, None for what the process group has."""
    return None if timeout is None else check("timeout", timeout)


class _HasDensity(Protocol):
    @property
    def density(self) -> float | None: ...


def check_warmup(
    method: _HasDensity, density_warmup: Any, density_warmup_steps: Any, counts_epochs: bool = True
) -> tuple[tuple[float, ...] | None, int | None]:
    """Return the densities of a warm-up, None if none is given, and how many steps each lasts, if they make sense.

    Args:
        method: whose density comes after the warm-up.
        density_warmup: what the user gave.
        density_warmup_steps: what the user gave; None is an epoch.
        counts_epochs: whether there is somebody who counts epochs; outside of Lightning nobody does.

    Raises:
        ValueError: a density or a number of steps out of range, one without the other, or a method without density.
    """
    try:
        if isinstance(density_warmup, str):
            raise TypeError
        given = None if density_warmup is None else tuple(density_warmup)
    except TypeError:
        raise ValueError(
            f"density_warmup={density_warmup!r} must be a list of densities to use in turn, such as [0.25, 0.0625, "
            f"0.015]."
        ) from None
    densities = None if given is None else tuple(check_density("density_warmup", density) for density in given)
    if densities and method.density is None:
        raise ValueError(f"density_warmup={densities!r}: {method!r} has no density to warm up.")
    if density_warmup_steps is None:
        if densities and not counts_epochs:
            raise ValueError(
                f"density_warmup={densities!r} without epochs: say how many steps each density lasts, "
                f"density_warmup_steps."
            )
        return densities, None
    if not densities:
        raise ValueError(
            f"density_warmup_steps={density_warmup_steps!r} is the number of steps for each density of "
            f"density_warmup={densities!r}: give at least one density, or leave density_warmup_steps out."
        )
    return densities, check("density_warmup_steps", density_warmup_steps)
