"""A small convolutional network for the digits."""

from __future__ import annotations

from torch import nn


def convnet() -> nn.Module:
    """Return a model for 8 × 8 digits with 2.1 million parameters, nearly all in one layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 64, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
