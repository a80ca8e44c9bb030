"""Common code of tests of failures: a step, and the error that it ends with."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Reducer, attach, attach_updates

of_both = pytest.mark.parametrize("exchange", ["gradient", "update"])
SOON = 25  # seconds; the groups' timeout is 30, and on a busy machine each new connection may take 5


def step(ddp: nn.Module, scale: float = 1.0) -> None:
    (ddp(torch.ones(2, 50)) * scale).pow(2).sum().backward()


def training(exchange: str, net: nn.Module | None = None, **options: Any) -> tuple[Callable[..., Reducer], Any]:
    """Make a model, exchanging gradients in DDP or AdamW's updates; return how to attach to it, and how to step.

    Args:
        exchange: "gradient" or "update".
        net: the model; None makes one layer.
        options: of DDP.
    """
    net = net or nn.Linear(50, 50)
    if exchange == "gradient":
        ddp = DistributedDataParallel(net, **options)
        return partial(attach, ddp), partial(step, ddp)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)

    def step_with_exchange(scale: float = 1.0) -> None:
        optimizer.zero_grad()
        step(net, scale)
        optimizer.step()

    return partial(attach_updates, net, optimizer), step_with_exchange


def caught(fn: Any) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "no error", "", time.monotonic() - started
