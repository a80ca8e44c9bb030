"""Replays a function's kernels as a CUDA graph: the host launches the graph, not each kernel.

    captures = Captures()
    graphs = captures.of(0)
    with captures.allowed():
        for _ in range(2):                 # the first run compiles kernels, and copies constants to the device
            y = graphs.run(("double",), lambda: 2 * x, [x])
    graphs.run(("double",), ..., [x]) is y # replays: the same tensor, with the present contents of x doubled

The host takes longer to launch a kernel than the device takes for many of them.

A graph contains addresses. So it is replayed only if the inputs are at the same addresses, and else the function runs.
Its results are at fixed addresses, too: a replay overwrites them.

While a thread captures, no other thread may draw random numbers on the device: torch's generator would raise an error.
So capture before training, or while the training thread waits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.dispatch import backend_of
from lightning_sparse.kernels.gradient_table import Placed
from lightning_sparse.kernels.launch import constants_of, same_dtype

log = logging.getLogger(__name__)
R = TypeVar("R")


class Captures:
    """The graphs of all segments.

    Attributes:
        are_allowed: whether functions may be captured now.
        pools: memory pools by the name of a function. Functions of one name never run at the same time, so their
            temporaries share memory.
    """

    def __init__(self) -> None:
        self.are_allowed = False
        self.clear()

    def clear(self) -> None:
        """Drop all graphs."""
        self.pools: dict[Hashable, Any] = {}
        self._of: dict[int, Graphs] = {}

    def of(self, segment: int) -> Graphs:
        """Return the graphs of a segment, by its number."""
        if segment not in self._of:
            self._of[segment] = Graphs(self)
        return self._of[segment]

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow captures in this block."""
        self.are_allowed = True
        try:
            yield
        finally:
            self.are_allowed = False


class Captured(NamedTuple):
    """A captured function.

    Attributes:
        addresses: of its inputs.
        replay: launches the graph in the current stream.
        result: of the function.
        constants: tensors that the graph reads, too.
    """

    addresses: list[int]
    replay: Callable[[], None]
    result: Any
    constants: list[Tensor]


class Graphs:
    """The graphs of one segment.

    Args:
        captures: shared by all graphs; None captures nothing.

    Attributes:
        stats: block statistics at fixed addresses, for captured functions; None if nothing was captured.
    """

    def __init__(self, captures: Captures | None = None) -> None:
        self._captures = captures
        self.stats: BlockStats | None = None
        self._captured: dict[tuple[Hashable, ...], Captured | None] = {}  # None: it cannot be captured
        self._seen: dict[tuple[Hashable, ...], list[int]] = {}  # addresses of the last run
        self._fixed: dict[str, Tensor] = {}
        self._placed: Placed | None = None

    @property
    def _may_capture(self) -> bool:
        return self._captures is not None and self._captures.are_allowed

    @property
    def is_active(self) -> bool:
        """Whether functions may be captured, or are replayed."""
        return self._may_capture or bool(self._captured)

    def run(self, name: tuple[Hashable, ...], function: Callable[[], R], inputs: Sequence[Tensor]) -> R:
        """Return `function()`, perhaps by a replay.

        Args:
            name: name of the function, and other values on which its kernels depend.
            function: launches kernels, and does not wait for the device.
            inputs: the tensors that it reads or writes, except constants of `kept`, and tensors whose addresses never
                change.
        """
        addresses = [x.data_ptr() for x in inputs]
        known = self._captured.get(name)
        if known is not None and known.addresses == addresses:
            known.replay()
            return known.result  # type: ignore[no-any-return]
        if not self._may_capture or not can_capture(inputs[0]) or (name in self._captured and known is None):
            return function()
        before, self._seen[name] = self._seen.get(name), addresses
        if before != addresses:
            return function()
        known = self._captured[name] = self._capture(name, function, inputs, addresses)
        if known is None:
            return function()
        known.replay()
        return known.result  # type: ignore[no-any-return]

    def fixed(self, name: str, x: Tensor) -> Tensor:
        """Return a copy of `x` at a fixed address, as input of a function; `x` itself if nothing is captured."""
        if self._may_capture and name not in self._fixed and can_capture(x):
            self._fixed[name] = torch.empty_like(x)
        return self._fixed[name].copy_(x) if name in self._fixed else x

    def placed(self, grads: list[Tensor], bounds: Sequence[int]) -> list[Tensor]:
        """Return gradients as input of a function that reads only their addresses; unchanged if nothing is captured."""
        fit = self.is_active and can_capture(grads[0]) and same_dtype(grads) and all(x.is_contiguous() for x in grads)
        if not fit:
            return grads
        self._placed = Placed(grads, bounds, self._placed)
        return self._placed

    def _capture(
        self, name: tuple[Hashable, ...], function: Callable[[], R], inputs: Sequence[Tensor], addresses: list[int]
    ) -> Captured | None:
        assert self._captures is not None
        try:
            if name[0] not in self._captures.pools:
                self._captures.pools[name[0]] = torch.cuda.graph_pool_handle()
            return capture(function, inputs, addresses, self._captures.pools[name[0]])
        except Exception as error:
            log.info(f"CUDA cannot capture {name!r}, so the host launches each of its kernels: {error}")
            return None


def can_capture(x: Tensor) -> bool:
    """Return whether kernels for `x` can be captured: Triton's, on a GPU, for at least one element."""
    is_real = type(x) is Tensor and x.is_cuda and torch.cuda.is_available()  # not one of torch's fake tensors
    return is_real and x.numel() > 0 and backend_of(x) == "triton"


def capture(function: Callable[[], Any], inputs: Sequence[Tensor], addresses: list[int], pool: Any) -> Captured:
    """Capture a function; its kernels do not run yet."""
    device = inputs[0].device
    graph = torch.cuda.CUDAGraph()
    # Another stream, because other threads may order work after the current one meanwhile.
    with constants_of(torch.cuda.current_stream(device)) as constants, torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is invalid
                graph.capture_end()
            raise
        graph.capture_end()
    return Captured(addresses, graph.replay, result, constants)
