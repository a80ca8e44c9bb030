"""A thread that exchanges in parallel with the training thread.

It runs work items in the order of `submit`. Between items it checks the other ranks every POLL. It replies to failed
ranks, and frees this rank's device if the device waits for one of them. On CUDA it works in a separate stream, which
waits for the event of each item. So the host does not wait for the device.

After an error it runs no more items, and all pending futures get the error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.comm.base import POLL
from lightning_sparse.comm.peers import JOIN_SECONDS

_started: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for running work, `JOIN_SECONDS` per worker. Other ranks need this rank, and otherwise C++ may abort."""
    for worker in list(_started):
        worker.end()


def _nothing(*_: Any) -> None:
    pass


class _Work(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]
    ready: torch.cuda.Event | None


class Worker:
    """One thread, started by its first work item or by `start`.

    Args:
        stream: on CUDA, the stream to work in.
        over_nccl: whether collectives are kernels on the device.
        look: function that the thread calls every POLL while it is idle; None ends the thread when it is idle.
        failed: function that the thread calls with the first error, before the item's future gets the error.
        free: function that the thread calls after that, to end kernels that wait for other ranks; it may take long.

    Attributes:
        stream: the stream to work in; None without CUDA.
        error: the first error of a work item; None if there was none.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None = None,
        over_nccl: bool = False,
        look: Callable[[], None] | None = None,
        failed: Callable[[BaseException], None] = _nothing,
        free: Callable[[], None] = _nothing,
    ) -> None:
        self.stream, self._over_nccl = stream, over_nccl
        self._look, self._failed, self._free = look, failed, free
        self.error: BaseException | None = None
        self._queue: queue.Queue[_Work | None] = queue.Queue()  # None ends the thread
        self._thread: threading.Thread | None = None
        self._pid, self._lock = os.getpid(), threading.RLock()  # the garbage collector may call `end` anywhere
        self._is_dropping = False
        self._last: Callable[[], None] | None = None  # the thread calls it at its end; set by `end`

    def start(self) -> None:
        """Start the thread. Call it in the training process, because a thread does not survive fork or pickling."""
        with self._lock:
            if self._thread is None and self._last is None:
                _started.add(self)
                args = (torch.get_num_threads(),)
                self._thread = threading.Thread(target=self._run, args=args, name="lightning_sparse", daemon=True)
                self._thread.start()

    def submit(self, call: Callable[[], Any], ready: torch.cuda.Event | None = None) -> Future[Any]:
        """Run `call` in the thread, and return a future for its result or error. A skipped item has an error, too.

        Args:
            ready: on CUDA, the event that the item waits for on the device.
        """
        work = _Work(Future(), call, ready)
        with self._lock:
            has_ended = self._last is not None
            if not has_ended:
                self._queue.put(work)
        if has_ended:
            work.future.set_exception(RuntimeError("The exchange was closed."))
        else:
            self.start()
        return work.future

    def launch(self, call: Callable[[], Any], uses: Iterable[Tensor] = ()) -> Future[Any]:
        """Run `call` in parallel with the training thread, and return a future for its result or error.

        NCCL requires one order of all collectives. So over NCCL the caller's thread launches `call`, in the worker's
        stream.

        Args:
            call: the work item; on CUDA it runs after all work so far in the caller's stream.
            uses: tensors of the caller's stream that the item reads or writes.
        """
        if self.stream is None:
            return self.submit(call)
        for tensor in uses:
            tensor.record_stream(self.stream)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        if not self._over_nccl:
            return self.submit(call)
        future: Future[Any] = Future()
        with torch.cuda.stream(self.stream):
            future.set_result(call())
        return future

    def wait(self, futures: Iterable[Future[Any]]) -> None:
        """Wait for work items, on CUDA in the current stream; raise their first error."""
        try:
            for future in futures:
                future.result()
        finally:
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def drop(self, futures: Sequence[Future[Any]]) -> None:
        """Skip items that have not begun, and wait for the running item, at most for `JOIN_SECONDS`."""
        self._is_dropping = True
        if not wait(futures, JOIN_SECONDS).not_done:
            self._is_dropping = False
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def join(self) -> None:
        """Wait until all work items are done."""
        self._queue.join()

    def end(self, last: Callable[[bool], None] = _nothing) -> None:
        """End the thread after its pending items. It may be called twice, and by the thread itself.

        Args:
            last: function that is called at the end, with True if the thread still runs after `JOIN_SECONDS`. If the
                thread itself has called `end`, as the garbage collector may, the thread calls `last`.
        """
        if os.getpid() != self._pid:  # a forked child has no thread
            return
        if self._thread is threading.current_thread():  # it may hold the queue's lock, so use no lock
            self._last = partial(last, False)
            return
        with self._lock:
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
            self._last = self._last or _nothing
        if thread is not None:
            thread.join(JOIN_SECONDS)
        last(thread is not None and thread.is_alive())

    # The following methods run in the thread.

    def _run(self, threads: int) -> None:
        # Each thread has these settings. No autograd graph is recorded, even if backward runs with create_graph=True.
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads)
        if self.stream is not None:
            torch.cuda.set_device(self.stream.device)
            torch.cuda.set_stream(self.stream)
        while (work := self._next()) is not None:
            had_failed = self.error is not None
            self._do(work)
            del work  # release its tensors
            self._queue.task_done()
            if self.error is not None and not had_failed:
                self._free()
        if self._last is not None:
            self._last()

    def _do(self, work: _Work) -> None:
        future, call, ready = work
        try:
            if self.error is not None:
                raise self.error
            if self._is_dropping:
                raise RuntimeError("Backward has failed.")  # the training thread has raised the cause
            if ready is not None:
                ready.wait()
            future.set_result(call())
        except BaseException as error:  # raised again in the training thread
            if self.error is None and not self._is_dropping:
                self.error = error
                with contextlib.suppress(Exception):  # the training thread waits for the first error
                    self._failed(error)
            future.set_exception(error)

    def _next(self) -> _Work | None:
        while self._last is None or not self._queue.empty():
            try:
                work = self._queue.get(timeout=POLL.total_seconds())
            except queue.Empty:
                if self._look is not None:
                    self._look()
                    continue
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return None
                continue
            if work is None:
                self._queue.task_done()
            return work
        return None
