"""Common code of tests of failures: a step, and the error that it ends with."""

import atexit
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Reducer, attach, attach_updates

of_both = pytest.mark.parametrize("exchange", ["gradient", "update"])
EVENTS: dict[str, Callable[[Any], Any]] = {
    "killed": lambda loss: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda loss: time.sleep(20),
    "fails": lambda loss: exec("raise ValueError('an error of the loop')"),
    "told": lambda loss: (os.kill(os.getpid(), signal.SIGTERM), loss)[1],
}
"""Events in a training step, which gets their result instead of its loss."""
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


def note(folder: Path, rank: int, error: Exception, started: float) -> None:
    """Write a rank's error, and the seconds until it came, into a file in a folder of all ranks."""
    text = f"{type(error).__name__}: {error}"
    (folder / str(rank)).write_text(json.dumps([text, time.monotonic() - started]))


def end_like_a_script(folder: Path, rank: int, pause: float = 0) -> NoReturn:
    """End this process after a failure. Rank 0 hosts the store, and waits for the files of four ranks.

    No connection breaks during the pause.
    """
    if rank == 0:
        deadline = time.monotonic() + 3
        while len([*folder.iterdir()]) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
    time.sleep(pause)
    atexit._run_exitfuncs()
    os._exit(1)
