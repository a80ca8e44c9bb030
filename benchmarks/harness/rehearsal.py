"""Mocks of CUDA's clocks, streams and graphs, to rehearse a GPU benchmark on a CPU.

    with rehearsal():
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

The benchmark then runs the same code as on a GPU, except for the tensors' device. Times are CPU times.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


class Event:
    """Mock of an event that holds a time of the host."""

    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        """Store the current time."""
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once, because no work is pending."""

    def query(self) -> bool:
        """Return False: the mocked device does not sleep, so pretend that its work is pending."""
        return False

    def elapsed_time(self, other: "Event") -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (other.seconds - self.seconds)


class Stream:
    """Mock of a stream without pending work."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None:
        """Return at once."""


class Graph:
    """Mock of a graph. It records nothing, because the mocked `torch.cuda.graph` only runs its block."""

    def replay(self) -> None:
        """Do nothing."""


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


STAND_INS: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "current_stream": lambda *_: Stream(),
    "CUDAGraph": Graph,
    "graph": lambda graph, **_: contextlib.nullcontext(),
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    **dict.fromkeys(("synchronize", "_sleep", "reset_peak_memory_stats", "empty_cache"), nothing),
}


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Replace parts of `torch.cuda` within the block."""
    with contextlib.ExitStack() as stack:
        for name, stand_in in STAND_INS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        yield


def device_of_run(rehearse: bool) -> tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return the device and the context manager for a CUDA benchmark; exit without a GPU.

    Args:
        rehearse: whether to use the CPU instead of a GPU.
    """
    if rehearse:
        return "cpu", rehearsal
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here. Rehearse on the CPU with --rehearse.")
    return "cuda", contextlib.nullcontext
