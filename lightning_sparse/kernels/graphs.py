"""Replays a function's kernels as a CUDA graph: the host launches the graph, not each kernel.

    graphs, double = captures.of(0), lambda: 2 * x
    with captures.allowed():
        for _ in range(2):
            graphs.run(("double",), double, [x])
    y = graphs.run(("double",), double, [x])

The first run compiles kernels, and copies constants to the device. The second one is captured. A replay returns the
same tensor y each time, with the present x doubled.

The host takes longer to launch a kernel than the device takes for many of them.

A graph contains addresses, dtypes and shapes. So it is replayed only if the inputs have the same ones, and else the
function runs. Its results are at fixed addresses, too: a replay overwrites them.

While a thread captures, no other thread may draw random numbers on the device: torch's generator would raise an error.
So capture before training, or while the training thread waits: an exchange within backward waits until no captures
`are_due`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_sparse._compat import abandon_capture
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.dispatch import backend_of
from lightning_sparse.kernels.gradient_table import Placed, gradient_table
from lightning_sparse.kernels.launch import constants_of, same_dtype

log = logging.getLogger(__name__)
R = TypeVar("R")
Inputs = list[tuple[Any, ...]]
"""Address, dtype and shape of each input of a function."""
MOST = 8
"""Most runs of a function without a replay, of which every second one may be captured. If its inputs move more often,
it runs, unless they move back."""


class Captures:
    """The graphs of all segments.

    Segments are exchanged one after the other. So all graphs share a memory pool: a graph's temporaries may be at the
    addresses of other segments' results. Copies and pickles have no graphs.

    Attributes:
        are_allowed: whether functions may be captured now.
        are_due: whether a function has run that may be captured the next time. `allowed` resets it.
        pool: the memory pool.
        stream: the stream in which functions are captured. A pool shares memory only within a stream.
        buffer: see `Graphs.buffer_like`.
        longest: number of elements of the longest segment.
    """

    def __init__(self, longest: int = 0) -> None:
        self.are_allowed = self.are_due = self._has_failed = False
        self.clear(longest)

    def __reduce__(self) -> tuple[type[Captures], tuple[int]]:
        """Leave out the graphs, which belong to this process."""
        return Captures, (self.longest,)

    def clear(self, longest: int) -> None:
        """Drop all graphs. From now on, the longest segment has `longest` elements."""
        self.longest = longest
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.buffer: Tensor | None = None
        self._of: dict[int, Graphs] = {}

    def of(self, segment: int) -> Graphs:
        """Return the graphs of a segment, by its number."""
        if segment not in self._of:
            self._of[segment] = Graphs(self)
        return self._of[segment]

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow captures in this block, unless one has failed."""
        self.are_allowed, self.are_due = not self._has_failed, False
        try:
            yield
        finally:
            self.are_allowed = False

    def attempt(self, name: Hashable, function: Callable[[], Any], inputs: Sequence[Tensor]) -> Captured | None:
        """Return a function that is captured; None if it cannot be captured. Then nothing is captured any more."""
        try:
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
                # Kernels of a graph keep the priority of its capture, and replays are in streams of high priority.
                self.stream = torch.cuda.Stream(inputs[0].device, priority=-1)
            return capture(function, inputs, self.pool, self.stream)
        except Exception as error:
            self.are_allowed, self.are_due, self._has_failed = False, False, True
            log.warning(
                f"CUDA could not capture {name!r}, so the host launches each kernel, which takes longer: {error}. If "
                f"the compressor reads values on the host, set depends_on_step = True in its class."
            )
            return None

    def note_run(self) -> None:
        """Note that a function has run that may be captured the next time."""
        self.are_due = not self._has_failed


class Captured(NamedTuple):
    """A captured function.

    Attributes:
        replay: launches the graph in the current stream.
        result: of the function.
        constants: tensors that the graph reads, too.
    """

    replay: Callable[[], None]
    result: Any
    constants: list[Tensor]


class Graphs:
    """The graphs of one segment. Copies and pickles have none.

    Args:
        captures: the graphs of all segments; None captures nothing.

    Attributes:
        stats: block statistics at fixed addresses, for captured functions; None if nothing was captured.
    """

    def __init__(self, captures: Captures | None = None) -> None:
        self._captures = captures
        self.stats: BlockStats | None = None
        self._captured: dict[tuple[Hashable, ...], tuple[Inputs, Captured]] = {}
        self._seen: dict[tuple[Hashable, ...], Inputs] = {}  # of the last run
        self._counts: Counter[tuple[Hashable, ...]] = Counter()  # of runs without a replay
        self._fixed: dict[str, Tensor] = {}
        self._table: Tensor | None = None
        self._placed: list[int] = []  # element size and addresses in the table

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        """Leave out the graphs, which belong to this process."""
        return Graphs, ()

    @property
    def _may_capture(self) -> bool:
        return self._captures is not None and self._captures.are_allowed

    def is_active(self, *tensors: Tensor) -> bool:
        """Return whether functions of tensors like these may be captured, or are replayed. Some may be empty."""
        return (self._may_capture or bool(self._captured)) and any(map(can_capture, tensors))

    def run(self, name: tuple[Hashable, ...], function: Callable[[], R], inputs: Sequence[Tensor]) -> R:
        """Return `function()`, perhaps by a replay. Then the result is valid until the next replay of any segment.

        Args:
            name: name of the function, and other values on which its kernels depend. Functions of different names run
                in the same order in each exchange.
            function: launches kernels, and does not wait for the device.
            inputs: the tensors that it reads or writes, except constants of `kept`, and tensors whose addresses never
                change.
        """
        given = [(x.data_ptr(), x.dtype, *x.shape) for x in inputs]
        captured_with, known = self._captured.get(name, (None, None))
        if known is not None and captured_with == given:
            known.replay()
            return known.result  # type: ignore[no-any-return]
        captures = self._captures
        if captures is None or not can_capture(inputs[0]) or self._counts[name] == MOST:
            return function()
        captures.note_run()
        self._counts[name] += 1
        if not captures.are_allowed:
            return function()
        before, self._seen[name] = self._seen.get(name), given
        known = captures.attempt(name, function, inputs) if before == given else None
        if known is None:
            return function()
        # Its results may be in the temporary memory of graphs of later stages, so drop these.
        stages = list(dict.fromkeys(stage for stage, *_ in self._counts))
        for other in list(self._captured):
            if other == name or stages.index(other[0]) > stages.index(name[0]):
                del self._captured[other]
        self._captured[name] = given, known
        known.replay()
        return known.result  # type: ignore[no-any-return]

    def fixed(self, name: str, x: Tensor) -> Tensor:
        """Return a copy of `x` at a fixed address, as input of a function; `x` itself if nothing is captured."""
        if name not in self._fixed and self._may_capture and can_capture(x):
            self._fixed[name] = torch.empty_like(x)
        return self._fixed[name].copy_(x) if name in self._fixed else x

    def buffer_like(self, x: Tensor) -> Tensor:
        """Return an empty tensor like `x`, 1-D: a new one, or if functions are captured, one at a fixed address.

        All segments share the latter, because they are exchanged one after the other.
        """
        captures = self._captures
        if captures is None or not self.is_active(x):
            return torch.empty_like(x)
        if captures.buffer is None and captures.are_allowed:
            captures.buffer = x.new_empty(captures.longest)
        return torch.empty_like(x) if captures.buffer is None else captures.buffer[: len(x)]

    def placed(self, grads: list[Tensor], bounds: Sequence[int]) -> list[Tensor]:
        """Return gradients as input of a function that reads only their addresses; unchanged if nothing is captured."""
        fit = self.is_active(*grads) and same_dtype(grads) and all(x.is_contiguous() for x in grads)
        if not fit:
            return grads
        places = [grads[0].element_size(), *(x.data_ptr() for x in grads)]
        if self._table is None:
            self._table = gradient_table(grads, bounds).clone()
        elif places != self._placed:
            self._table.copy_(gradient_table(grads, bounds))
        self._placed = places
        return Placed(grads, self._table)


NO_GRAPHS = Graphs()
"""Captures nothing, and calls all functions."""


def can_capture(x: Tensor) -> bool:
    """Return whether kernels for `x` can be captured: Triton's, on a GPU, for at least one element."""
    is_real = type(x) is Tensor and x.is_cuda and torch.cuda.is_available()  # not one of torch's fake tensors
    return is_real and x.numel() > 0 and backend_of(x) == "triton"


def capture(
    function: Callable[[], Any], inputs: Sequence[Tensor], pool: Any, stream: torch.cuda.Stream | None
) -> Captured:
    """Capture a function in a stream; its kernels do not run yet.

    It is not the current stream, because other threads may order work after that one meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    with constants_of(torch.cuda.current_stream(inputs[0].device)) as constants, torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is invalid
                _end(graph, pool, inputs[0].device)
            raise
        _end(graph, pool, inputs[0].device)
    return Captured(graph.replay, result, constants)


def _end(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """End a capture. Raises RuntimeError if it is invalid; training without graphs remains possible."""
    try:
        graph.capture_end()
    except RuntimeError:
        abandon_capture(pool, device)
        raise
