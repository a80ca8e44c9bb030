"""The thread that exchanges beside the training thread.

It runs work in the order of `submit`. Between two pieces of work it looks after the other ranks every POLL: it replies
to failed ones, and frees this rank's device if that waits for one of them. On CUDA it works in a stream of its own,
which waits for the event of each piece of work, so the host does not wait for the device.

After an error it runs no more work, and nobody is left waiting: futures get the error.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.comm.base import POLL
from lightning_sparse.comm.peers import JOIN_SECONDS
from lightning_sparse.comm.store import inherit_thread_settings

_started: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for work that is under way, `JOIN_SECONDS` each: other ranks need this one, and C++ may abort."""
    for worker in list(_started):
        worker.end()


def _nothing(*_: Any) -> None:
    pass


class _Work(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]
    ready: torch.cuda.Event | None
    otherwise: Callable[[], None]


class Worker:
    """One thread, started by its first work, or by `start`.

    Args:
        stream: on CUDA, the stream to work in.
        over_nccl: whether collectives are kernels on the device.
        look: called every POLL while there is no work; None ends the thread when there is none.
        failed: called in the thread with the first error of the work, before its future gets the error.
        free: called in the thread after that, to end kernels that wait for other ranks; it may take long.

    Attributes:
        stream: as given.
        error: the first error of the work; None if there was none.
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
        self._queue: queue.Queue[_Work | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._is_dropping = self._has_ended = False
        self._last: Callable[[bool], None] = _nothing

    def start(self) -> None:
        """Start the thread, in the process that trains: a thread does not survive fork, nor can it be pickled."""
        with self._lock:
            if self._thread is None and not self._has_ended:
                _started.add(self)
                args = (inherit_thread_settings(self.stream),)
                self._thread = threading.Thread(target=self._run, args=args, name="lightning_sparse", daemon=True)
                self._thread.start()

    def submit(
        self,
        call: Callable[[], Any],
        ready: torch.cuda.Event | None = None,
        otherwise: Callable[[], None] = _nothing,
    ) -> Future[Any]:
        """Return a future of what `call` returns or raises in the thread.

        Args:
            call: the work.
            ready: on CUDA, the event that it waits for on the device.
            otherwise: called if the work fails, or is left out.
        """
        work = _Work(Future(), call, ready, otherwise)
        with self._lock:
            has_ended = self._has_ended
            if not has_ended:
                self._queue.put(work)
        if has_ended:
            otherwise()
            work.future.set_exception(RuntimeError("The exchange was closed."))
        else:
            self.start()
        return work.future

    def launch(self, call: Callable[[], Any], uses: Iterable[Tensor] = ()) -> Future[Any]:
        """Return a future of what `call` returns or raises beside the training thread.

        NCCL needs one order of all collectives, so over NCCL the caller's thread launches them, in the worker's stream.

        Args:
            call: the work; on CUDA behind everything that the caller's stream has been given so far.
            uses: tensors of the caller's stream that the work reads or writes.
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
        """Wait for work, on CUDA in the current stream; raise what it has raised."""
        try:
            for future in futures:
                future.result()
        finally:
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def drop(self, futures: Sequence[Future[Any]]) -> None:
        """Leave out work that has not begun, and wait for the present one, `JOIN_SECONDS` at most."""
        self._is_dropping = True
        if not wait(futures, JOIN_SECONDS).not_done:
            self._is_dropping = False
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def join(self) -> None:
        """Wait until there is no work."""
        self._queue.join()

    def end(self, last: Callable[[bool], None] = _nothing) -> None:
        """End the thread, once it has done its work. May be called twice, and by the thread itself.

        Args:
            last: called at the end, with whether the thread still works after `JOIN_SECONDS`; by the thread itself, if
                that has called `end`, as the garbage collector may.
        """
        if os.getpid() != self._pid:  # a forked child has no thread
            return
        with self._lock:
            self._has_ended, thread = True, self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is threading.current_thread():
            self._last = last
            return
        if thread is not None:
            thread.join(JOIN_SECONDS)
        last(thread is not None and thread.is_alive())

    # In the thread:

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (work := self._next()) is not None:
            had_failed = self.error is not None
            self._do(work)
            del work  # and the tensors that it holds
            self._queue.task_done()
            if self.error is not None and not had_failed:
                self._free()
        self._last(False)

    def _do(self, work: _Work) -> None:
        future, call, ready, otherwise = work
        try:
            if self.error is not None:
                raise self.error
            if self._is_dropping:
                raise RuntimeError("Backward has failed.")  # the training thread has raised why
            if ready is not None:
                ready.wait()
            future.set_result(call())
        except BaseException as error:  # raised again in the training thread
            if self.error is None and not self._is_dropping:
                self.error = error
                self._failed(error)
            otherwise()
            future.set_exception(error)

    def _next(self) -> _Work | None:
        while True:
            try:
                return self._queue.get(timeout=POLL.total_seconds())
            except queue.Empty:
                if self._look is not None:
                    self._look()
                    continue
            with self._lock:
                if self._queue.empty():
                    self._thread = None
                    return None
