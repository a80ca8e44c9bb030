"""Clocks, quantiles, and the load that other programs put on the machine."""

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
EVICTION = {"cpu": 32_000_000, "cuda": 64_000_000}  # elements of 4 bytes: more than the caches of a device hold
FOREIGN_LOAD = 0.05  # share of the processors that other programs may use during a measurement


def spread(ms: Sequence[float], name: str = "ms") -> dict[str, float]:
    """Return median and 20th and 80th percentiles as columns of a table."""
    return dict(zip((name, f"{name}_p20", f"{name}_p80"), np.percentile(ms, [50, 20, 80]).tolist(), strict=True))


def step_columns(ms: Sequence[float], divisor: float = 1) -> dict[str, float]:
    """Return number and quantiles of steps as columns of a table, rounded, each time divided."""
    median, p20, p80 = (round(value / divisor, 1) for value in spread(ms).values())
    return {"steps": len(ms), "median_ms": median, "p20_ms": p20, "p80_ms": p80}


def elapsed_ms(run: Callable[[], object], device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> float:
    """Run once; return milliseconds, on CUDA between two events. The clock `time.process_time` is of this program."""
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
    """Time all contestants in turn, each twice: "cold", after the caches were filled, and "warm", again.

    Returns the milliseconds of all repetitions by contestant and cache; options are those of `elapsed_ms`.
    """
    other, times = torch.ones(EVICTION[device], device=device), collections.defaultdict(list)
    for _ in range(1 + repetitions):
        for name, run in contestants.items():
            other.sum()
            for cache in ("cold", "warm"):
                times[name, cache].append(elapsed_ms(run, device, **options))
    return {case: ms[1:] for case, ms in times.items()}  # the first round compiles and warms up


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture `run` in a CUDA graph. Return the graph, and the result that each replay writes anew.

    The capture has a stream of its own, in which `run` runs once before: so the constant tensors that it keeps for this
    stream exist, and no replay copies them to the device. Before torch 2.10 such a copy within a capture is an error.
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
    """Return what was spent so far: seconds, processor seconds of this rank and of the machine, transmitted bytes."""
    stat = Path("/proc/stat")  # user, nice, system, and what other machines stole; 0 if the system does not count
    machine = sum(int(stat.read_text().split()[column]) for column in (1, 2, 3, 8)) if stat.exists() else 0
    seconds = machine / os.sysconf("SC_CLK_TCK")
    return np.array([time.perf_counter(), time.process_time(), seconds, interface_bytes()])


def interface_bytes() -> int:
    """Return the bytes that this rank's interface has transmitted so far; 0 if the ranks share one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name.startswith("lo"):
        return 0
    # Not in /sys, which shows the interfaces of the namespace in which it was mounted.
    lines = (line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines())
    return next(int(line[9]) for line in lines if line[0] == name)


def reset_peak() -> None:
    """Count the peak of this process's memory anew, after what was freed has gone back to the system; Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most memory that this process has had since `reset_peak`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])
