"""An exchange of updates in each `GradScaler.step`, also where that leaves the optimizer's step out.

    with_scalers(optimizer, exchange.one_step)    # from now on around every GradScaler.step(optimizer)
    without_scalers(optimizer)

A scaler leaves a step out where a gradient of its rank is not finite; the other ranks step, and wait for this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

_around: dict[int, Callable[[Optimizer], AbstractContextManager[None]]] = {}
_step = GradScaler.step


def with_scalers(optimizer: Optimizer, around: Callable[[Optimizer], AbstractContextManager[None]]) -> None:
    """Have every GradScaler of this process enter `around(optimizer)` for its step of the optimizer."""
    _around[id(optimizer)] = around
    GradScaler.step = _step_within  # type: ignore[method-assign]


def without_scalers(optimizer: Optimizer) -> None:
    """Undo `with_scalers`; after the last one `GradScaler.step` is torch's again."""
    _around.pop(id(optimizer), None)
    if not _around:
        GradScaler.step = _step  # type: ignore[method-assign]


def _step_within(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    stepped = getattr(optimizer, "optimizer", optimizer)  # in Lightning's or accelerate's wrapper
    around = _around.get(id(stepped))
    if around is None:
        return _step(self, optimizer, *args, **kwargs)
    with around(stepped):
        return _step(self, optimizer, *args, **kwargs)
