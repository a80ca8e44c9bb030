"""Gradient scalers of a LightningModule's own: noticed when one of them scales a loss.

Residuals are kept in units of the unscaled gradient, so the reducer has to know the loss scale. Lightning's own scaler
is at hand; one that a LightningModule brings may be an attribute, in a list, or a variable of its training step. What
all of these have in common is the call of `GradScaler.scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler

Watcher = Callable[[GradScaler], None]

_watchers: list[Watcher] = []
_scale = GradScaler.scale


def watch(watcher: Watcher) -> None:
    """Call `watcher` with every enabled GradScaler that scales a loss in this process, until `unwatch`."""
    if watcher not in _watchers:
        _watchers.append(watcher)
    GradScaler.scale = _watched_scale  # type: ignore[method-assign]


def unwatch(watcher: Watcher) -> None:
    """Stop calling `watcher`; with the last one `GradScaler.scale` is torch's again."""
    if watcher in _watchers:
        _watchers.remove(watcher)
    if not _watchers:
        GradScaler.scale = _scale  # type: ignore[method-assign]


def _watched_scale(self: GradScaler, outputs: Any) -> Any:
    if self.is_enabled() and torch.is_grad_enabled():
        for watcher in _watchers:
            watcher(self)
    return _scale(self, outputs)
