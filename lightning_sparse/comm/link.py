"""Measures the link between ranks by a few short collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.comm.base import Comm

ENOUGH_SECONDS = 0.15
"""A message that takes this long shows the bandwidth: shapers let the first bytes pass at once."""
MOST_ELEMENTS = 1 << 22


def measure_link(comm: Comm, device: torch.device, everyone: Comm | None = None) -> tuple[float, float]:
    """Measure the link of the slowest rank; all ranks call it. It takes a second at most, over 1 Mbit/s four.

    Args:
        device: device of the messages.
        everyone: connection to the ranks of all groups that measure at the same time, because they share the link.
            None: there is one group.

    Returns:
        The bandwidth in bytes per second in each direction, and the seconds of a message without its bytes. Equal on
        all ranks.
    """
    everyone = everyone or comm
    short = _slowest(everyone, device, statistics.median([_timed(comm.all_reduce, device, 2) for _ in range(6)][1:]))
    numel, seconds = 1 << 14, 0.0
    while True:
        seconds = _slowest(everyone, device, _timed(comm.all_reduce, device, numel))
        if seconds > ENOUGH_SECONDS + short or numel >= MOST_ELEMENTS:
            break
        numel *= 4
    bandwidth = _element_bytes(comm) * numel / max(seconds - short, 1e-2 * seconds)
    return bandwidth, short / _messages(comm)


def speed_up(
    comm: Comm,
    device: torch.device,
    bandwidth: float,
    latency: float,
    seconds: float,
    everyone: Comm | None = None,
) -> float:
    """Measure the factor by which the link is faster than before, by one all-reduce. All ranks call it.

    Args:
        device: device of the message.
        bandwidth: bandwidth in bytes per second, as it was measured before.
        latency: seconds of a message without its bytes, as they were measured before.
        seconds: about the time for the all-reduce, if nothing has changed.
        everyone: see `measure_link`.

    Returns:
        The factor, equal on all ranks.
    """
    numel = min(max(1 << 10, int(seconds * bandwidth / _element_bytes(comm))), MOST_ELEMENTS)
    expected = _element_bytes(comm) * numel / bandwidth + _messages(comm) * latency
    return expected / _slowest(everyone or comm, device, _timed(comm.all_reduce, device, numel))


def shortest_gather(comm: Comm, device: torch.device) -> float:
    """Return the seconds of an all-gather of one element, the least of three. All ranks call it."""
    return min(_timed(comm.all_gather, device, 1) for _ in range(3))


def _messages(comm: Comm) -> int:
    """Return the number of messages that a rank sends, one after the other, in a ring all-reduce."""
    return 2 * (comm.size - 1)


def _element_bytes(comm: Comm) -> float:
    """Return the bytes that a rank sends for each fp32 element in a ring all-reduce."""
    return 4 * _messages(comm) / comm.size


def _timed(collective: Callable[[Tensor], Any], device: torch.device, numel: int) -> float:
    x = torch.zeros(numel, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    collective(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _slowest(comm: Comm, device: torch.device, seconds: float) -> float:
    return float(comm.all_reduce(torch.tensor([seconds], device=device), "max"))
