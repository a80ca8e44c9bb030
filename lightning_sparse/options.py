"""The options of `SparseDDPStrategy`, `attach` and `Reducer`, and the check of their values.

Each check returns the checked value. NumPy numbers become Python numbers: ranks compare their settings as text, and
random numbers are drawn from the text of the seed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, cast, get_args

Granularity = Literal["layer", "bucket", "model"]
OnNonFinite = Literal["raise", "skip"]
Overlap = Literal["none", "backward", "next_step"]
ExchangeMode = Literal["auto", "gradient", "update"]


class Option(NamedTuple):
    """The valid values of an option.

    Attributes:
        kind: the type of the values; a bool is no number.
        is_valid: returns whether a value of this type is in range.
        requirement: the end of the error message, after the option and its value.
        choices: all valid values, if they are names.
    """

    kind: type | tuple[type, ...]
    is_valid: Callable[[Any], bool]
    requirement: str
    choices: Sequence[str] = ()


def _choice(allowed: Any) -> Option:
    choices = get_args(allowed)
    return Option(str, lambda value: value in choices, f"is not known; choose from {', '.join(choices)}.", choices)


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
    "exchange": _choice(ExchangeMode),
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
        value: the user's value.
        owner: the class that has the option, if several have an option of this name.
        options: the valid values of each option.

    Raises:
        ValueError: the value has another type, or is out of range.
    """
    option = options[name]
    number = option.kind in (Real, Integral)
    if not isinstance(value, option.kind) or (number and isinstance(value, bool)) or not option.is_valid(value):
        given = f"{owner}({name}={value!r}): {name}" if owner else f"{name}={value!r}"
        raise ValueError(f"{given} {option.requirement}{suggestion(value, option.choices)}")
    if not number or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(cast(Real, value))


def suggestion(given: Any, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: a question that names the most similar known one, or ""."""
    near = difflib.get_close_matches(str(given), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first of several names, so that an error message stays short."""
    return ", ".join(names[:most]) + " and others" * (len(names) > most)


def check_optional(name: str, value: Any) -> Any:
    """Return the checked value of an option that may be None."""
    return None if value is None else check(name, value)


@dataclass(frozen=True)
class ReducerOptions:
    """The options that `Reducer`, `attach`, `attach_updates` and `SparseDDPStrategy` share. They are checked here only.

    Attributes:
        granularity: the unit of compression: "layer", "bucket" or "model" (see `Layout.of`).
        bucket_cap_mb: size of a "bucket" in MiB.
        density_warmup: densities to use in turn before the method's density, from dense to sparse; None: the default.
        density_warmup_steps: number of steps for each density of `density_warmup`; None: one epoch each, counted by
            `Reducer.epoch`.
        seed: the seed of all random choices; equal on all ranks.
        loss_scale: a function that returns the factor on the loss, such as `GradScaler.get_scale`, or None. Residuals
            are unscaled. If a gradient overflows, all ranks get NaN, and no residual changes.
        on_nonfinite: reaction to a NaN or an infinity in a gradient, without a loss scale. "raise": all ranks raise
            NonFiniteGradient. "skip": all ranks get NaN, and the step is skipped.
        clip_norm: largest 2-norm of a rank's local gradient, all parameters together. A longer gradient is clipped
            before the residual is added. None: no clipping.

    Raises:
        ValueError: a value has another type or is out of range, or a warm-up has steps but no densities.
    """

    granularity: Granularity = "bucket"
    bucket_cap_mb: float = 25
    density_warmup: Sequence[float] | None = None
    density_warmup_steps: int | None = None
    seed: int = 0
    loss_scale: Callable[[], float] | None = None
    on_nonfinite: OnNonFinite = "raise"
    clip_norm: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ReducerOptions:
        """Return the options among given arguments."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def __post_init__(self) -> None:
        densities = _densities(self.density_warmup)
        object.__setattr__(self, "density_warmup", densities)
        if self.density_warmup_steps is not None and not densities:
            raise ValueError(
                f"density_warmup_steps={self.density_warmup_steps!r} is the number of steps for each density of "
                f"density_warmup={densities!r}: give at least one density, or leave density_warmup_steps out."
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in OPTIONS and value is not field.default:
                object.__setattr__(self, field.name, check(field.name, value))

    def check_method(self, method: Any, counts_epochs: bool = True) -> None:
        """Raise ValueError if the method supports no density warm-up, or if the warm-up needs epochs but gets none.

        Args:
            method: the method, whose density follows the warm-up.
            counts_epochs: whether epochs are counted; only Lightning counts them.
        """
        if self.density_warmup and method.density is None:
            raise ValueError(f"density_warmup={self.density_warmup!r}: {method!r} has no density to warm up.")
        if self.density_warmup and self.density_warmup_steps is None and not counts_epochs:
            raise ValueError(
                f"density_warmup={self.density_warmup!r} without epochs: say how many steps each density lasts, "
                f"density_warmup_steps."
            )

    def settings(self) -> dict[str, str]:
        """Return the options by name, as text that ranks compare."""
        return {name: "given" if callable(value) else repr(value) for name, value in vars(self).items()}


def _densities(given: Any) -> tuple[float, ...] | None:
    """Return the checked densities of a warm-up; None if none are given."""
    try:
        if isinstance(given, str):
            raise TypeError
        found = None if given is None else tuple(given)
    except TypeError:
        raise ValueError(
            f"density_warmup={given!r} must be a list of densities to use in turn, such as [0.25, 0.0625, 0.015]."
        ) from None
    return None if found is None else tuple(check("density", density, "density_warmup") for density in found)
