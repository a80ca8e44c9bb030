"""Clocks, quantiles, and the load of other programs on the machine."""

import collections
import ctypes
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
EVICTION = {"cpu": 32_000_000, "cuda": 64_000_000}  # number of 4-byte elements that exceeds a device's caches
FOREIGN_LOAD = 0.05  # largest share of the processors that other programs may use during a measurement


def spread(ms: Sequence[float], name: str = "ms") -> dict[str, float]:
    """Return the median and the 20th and 80th percentiles as columns of a table."""
    return dict(zip((name, f"{name}_p20", f"{name}_p80"), np.percentile(ms, [50, 20, 80]).tolist(), strict=True))


def step_columns(ms: Sequence[float], divisor: float = 1) -> dict[str, float]:
    """Return the number of steps, and rounded quantiles of their times divided by `divisor`, as columns of a table."""
    median, p20, p80 = (round(value / divisor, 1) for value in spread(ms).values())
    return {"steps": len(ms), "median_ms": median, "p20_ms": p20, "p80_ms": p80}


def elapsed_ms(run: Callable[[], object], device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> float:
    """Run once and return milliseconds; on CUDA, between two events. `time.process_time` counts this program only."""
    if device == "cpu":
        started = clock()
        run()
        return 1e3 * (clock() - started)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def in_turns(
    contestants: Mapping[str, Callable[[], object]], repetitions: int, device: str = "cpu", **options: Any
) -> dict[tuple[str, str], list[float]]:
    """Time all methods in turn, each twice: "cold", after other data filled the caches, and then "warm".

    Returns the milliseconds of all repetitions by method and cache. Options are passed to `elapsed_ms`.
    """
    other, times = torch.ones(EVICTION[device], device=device), collections.defaultdict(list)
    for _ in range(1 + repetitions):
        for name, run in contestants.items():
            other.sum()
            for cache in ("cold", "warm"):
                times[name, cache].append(elapsed_ms(run, device, **options))
    return {case: ms[1:] for case, ms in times.items()}  # the first round compiles and warms up


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture `run` in a CUDA graph. Return the graph, and the result that each replay overwrites.

    The capture uses a separate stream, on which `run` runs once before the capture. This creates the constant tensors
    that `run` caches for the stream, so no replay copies them to the device. Before torch 2.10 such a copy within a
    capture raises an error.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return graph, result


def spent() -> Any:
    """Return totals so far: seconds, processor seconds of this rank and of the machine, and transmitted bytes."""
    stat = Path("/proc/stat")  # user, nice, system and steal time; 0 if the system does not count
    machine = sum(int(stat.read_text().split()[column]) for column in (1, 2, 3, 8)) if stat.exists() else 0
    seconds = machine / os.sysconf("SC_CLK_TCK")
    return np.array([time.perf_counter(), time.process_time(), seconds, interface_bytes()])


def interface_bytes() -> int:
    """Return the bytes that this rank's interface has transmitted so far; 0 if the ranks share one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name.startswith("lo"):
        return 0
    # /sys is unsuitable: it shows the interfaces of the namespace in which it was mounted.
    lines = (line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines())
    return next(int(line[9]) for line in lines if line[0] == name)


def reset_peak() -> None:
    """Return freed memory to the system, and restart the count of this process's peak memory. Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return this process's peak memory in bytes since `reset_peak`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])
