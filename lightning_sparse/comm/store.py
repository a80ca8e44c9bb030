"""The process group's store, with calls that end although the process that hosts it may be frozen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")


class StoreTimeout(Exception):
    """The store does not answer."""


class BoundedStore:
    """A client of a store that waits for an answer for some seconds only; torch's waits for ever.

    Args:
        store: torch's client.
        seconds: to wait. After a call without an answer all further ones fail at once, until it comes.

    Raises:
        StoreTimeout: no answer in time.
        torch.distributed.DistError: there is no store any more.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._late: Future[Any] | None = None

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._in_time(lambda: self._store.check(keys)))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        value: bytes = self._in_time(lambda: self._store.get(key))
        return value

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._in_time(lambda: self._store.set(key, value))

    def has_within(self, seconds: float, keys: list[str]) -> bool:
        """Return whether all keys are set, or come to be within so many seconds."""
        deadline = time.monotonic() + seconds
        while not (found := self.check(keys)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Set a key if it has the expected value, or "" is expected and it is not set."""
        self._in_time(lambda: self._store.compare_set(key, expected, value))

    def _in_time(self, call: Callable[[], Any]) -> Any:
        if self._late is not None and not self._late.done():
            raise StoreTimeout
        answer = in_thread(call, "lightning_sparse store")
        try:
            return answer.result(self._seconds)
        except TimeoutError as error:
            if answer.done():  # the store's own
                raise
            self._late = answer
            raise StoreTimeout from error


def inherit_thread_settings(stream: torch.cuda.Stream | None) -> Callable[[], None]:
    """Return a function that prepares a new thread to compute as this one does, on CUDA in a stream of its own.

    Nothing that a thread of ours computes is part of a graph, whatever backward does, as with create_graph=True.
    """
    threads = torch.get_num_threads()

    def apply() -> None:
        torch.set_grad_enabled(False)  # kept per thread
        torch.set_num_threads(threads)  # OpenMP keeps this number per thread
        if stream is not None:
            torch.cuda.set_device(stream.device)  # and CUDA the current device and stream
            torch.cuda.set_stream(stream)

    return apply


def in_thread(call: Callable[[], T], name: str, prepare: Callable[[], None] = lambda: None) -> Future[T]:
    """Return a future of what `call`, after `prepare`, returns or raises in a daemon thread of this name."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            prepare()
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
