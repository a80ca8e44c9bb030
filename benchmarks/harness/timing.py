"""Clocks, quantiles, and the load that other programs put on the machine."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

EVICTION = 32_000_000
"""Elements, 128 MB: more than the caches of a CPU hold. A GPU gets twice as many."""
FOREIGN_LOAD = 0.05
"""Share of the processors that other programs may use during a measurement."""


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median and 20th and 80th percentiles."""
    p20, median, p80 = np.percentile(values, [20, 50, 80]).tolist()
    return median, p20, p80


def spread(ms: Sequence[float], name: str = "ms") -> dict[str, float]:
    """Return the quantiles as columns of a table."""
    return dict(zip((name, f"{name}_p20", f"{name}_p80"), quantiles(ms), strict=True))


def step_columns(ms: Sequence[float], divisor: float = 1) -> dict[str, float]:
    """Return number and quantiles of steps as columns of a table, rounded, each time divided."""
    median, p20, p80 = (round(value / divisor, 1) for value in quantiles(ms))
    return {"steps": len(ms), "median_ms": median, "p20_ms": p20, "p80_ms": p80}


def elapsed_ms(run: Callable[[], object], device: str = "cpu") -> float:
    """Run once; return milliseconds, on CUDA between two events."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def eviction(device: str = "cpu") -> Tensor:
    """Return data that, read or overwritten, pushes everything else out of the caches."""
    return torch.ones(EVICTION if device == "cpu" else 2 * EVICTION, device=device)


def cold(run: Callable[[], object], repetitions: int, other: Tensor) -> dict[str, float]:
    """Time repeated runs on the device of `other`, whose caches are filled with `other` before each."""
    times = []
    for repetition in range(repetitions + 2):
        other.zero_()
        ms = elapsed_ms(run, other.device.type)
        if repetition >= 2:  # the first ones compile and warm up
            times.append(ms)
    return spread(times)


def in_turns(contestants: Mapping[str, Callable[[], object]], repetitions: int) -> list[dict[str, Any]]:
    """Time all contestants in turn on the CPU, each twice: "cold", after the caches were filled, and "warm", again.

    Returns:
        A row for each contestant and cache.
    """
    other = eviction()
    times = collections.defaultdict(list)
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            other.sum()
            for cache in ("cold", "warm"):
                ms = elapsed_ms(run)
                if repetition:  # the first round is to warm up
                    times[name, cache].append(ms)
    return [{"contestant": name, "cache": cache, **spread(ms)} for (name, cache), ms in times.items()]


class Meter:
    """Measures, while it is entered: seconds, `own` and the machine's processor seconds, and transmitted bytes."""

    def __enter__(self) -> Meter:
        self._before = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self.own, self.machine, self.transmitted = (
            after - before for before, after in zip(self._before, self._now(), strict=True)
        )

    def foreign_load(self, own: Sequence[float]) -> float:
        """Return the share of the processors that other programs used, given `own` of every rank."""
        return max(0.0, self.machine - sum(own)) / (self.seconds * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float, int]:
        return time.perf_counter(), time.process_time(), machine_seconds(), interface_bytes()


def machine_seconds() -> float:
    """Return the processor seconds that all programs have used so far; 0 if the system does not count them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, _, _, steal = stat.read_text().split()[1:9]
    return (int(user) + int(nice) + int(system) + int(steal)) / os.sysconf("SC_CLK_TCK")


def interface_bytes() -> int:
    """Return the bytes that this rank's interface has transmitted so far; 0 if the ranks share one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name.startswith("lo"):
        return 0
    # Not in /sys, which shows the interfaces of the namespace in which it was mounted.
    lines = (line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines())
    return next(int(line[9]) for line in lines if line[0] == name)
