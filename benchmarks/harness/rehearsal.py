"""Stand-ins for CUDA's clocks, streams and graphs, to rehearse a benchmark of a GPU on a CPU.

    with rehearsal():
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

The code of the benchmark then is the code that runs on a GPU, but for the tensors' device. Times are those of the CPU.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


class Event:
    """A time of the host."""

    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        """Note the time."""
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is launched that could be late."""

    def query(self) -> bool:
        """Return whether the device has come this far. Here it never sleeps, so it is told to be late."""
        return False

    def elapsed_time(self, other: "Event") -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (other.seconds - self.seconds)


class Stream:
    """A stream that is always done."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""


class Graph:
    """Keeps nothing: `torch.cuda.graph` runs its block."""

    def replay(self) -> None:
        """There is nothing to run again."""


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
    """Return the device that a benchmark of CUDA runs on, and the context in which it runs; exit without a GPU.

    Args:
        rehearse: whether the CPU shall stand in for a GPU.
    """
    if rehearse:
        return "cpu", rehearsal
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here. Rehearse on the CPU with --rehearse.")
    return "cuda", contextlib.nullcontext
