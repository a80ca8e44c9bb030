"""What tests of failures share: a step, and the error that it ends with."""

import time
from typing import Any

import torch
from torch import nn

SOON = 10  # seconds; the groups' timeout is 30


def step(ddp: nn.Module, scale: float = 1.0) -> None:
    (ddp(torch.ones(2, 50)) * scale).pow(2).sum().backward()


def caught(fn: Any) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "no error", "", time.monotonic() - started
