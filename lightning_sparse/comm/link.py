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
"""A message whose bytes take this long shows the bandwidth: shapers let the first bytes pass at once."""
FEW_ELEMENTS, MOST_ELEMENTS = 64, 1 << 22
"""Gloo's all-reduce of two elements takes half of the messages."""


def measure_link(comm: Comm, device: torch.device, everyone: Comm | None = None) -> tuple[float, float]:
    """Measure the link of the slowest rank; all ranks call it.

    It takes about a second; three seconds over 1 Mbit/s, or among four ranks with a round trip of 50 ms.

    Args:
        device: device of the messages.
        everyone: connection to the ranks of all groups that measure at the same time, because they share the link.
            None: there is one group.

    Returns:
        The bandwidth in bytes per second in each direction, and the seconds of a message without its bytes. Equal on
        all ranks.
    """
    everyone = everyone or comm
    times = [_timed(comm.all_reduce, device, FEW_ELEMENTS) for _ in range(4)][1:]
    latency = _slowest(everyone, device, statistics.median(times)) / _messages(comm, device, FEW_ELEMENTS)
    numel = 1 << 14
    while True:
        seconds = _slowest(everyone, device, _timed(comm.all_reduce, device, numel))
        trips = _messages(comm, device, numel) * latency
        of_bytes = seconds - trips
        if of_bytes > ENOUGH_SECONDS or numel >= MOST_ELEMENTS:
            break
        numel = min(8 * numel, MOST_ELEMENTS)
    if trips > 0.1 * of_bytes:  # TCP doubles its rate in each round trip
        seconds = _slowest(everyone, device, _timed(comm.all_reduce, device, numel))
        of_bytes = seconds - trips
    return _element_bytes(comm) * numel / max(of_bytes, 1e-2 * seconds), latency


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
    expected = _element_bytes(comm) * numel / bandwidth + _messages(comm, device, numel) * latency
    return expected / _slowest(everyone or comm, device, _timed(comm.all_reduce, device, numel))


def shortest_gather(comm: Comm, device: torch.device) -> float:
    """Return the seconds of an all-gather of one element, the least of three. All ranks call it."""
    return min(_timed(comm.all_gather, device, 1) for _ in range(3))


def _messages(comm: Comm, device: torch.device, numel: int) -> int:
    """Return the number of messages of an all-reduce of fp32 elements that a rank sends one after the other."""
    return 2 if 4 * numel <= comm.direct_bytes(device) else 2 * (comm.size - 1)


def _element_bytes(comm: Comm) -> float:
    """Return the bytes that a rank sends for each fp32 element of an all-reduce."""
    return 8 * (comm.size - 1) / comm.size


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
