"""A client of the process group's store whose calls time out if the process that hosts it is frozen."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")


class StoreTimeout(Exception):
    """The store does not respond."""


class BoundedStore:
    """A store client with a time limit for each call. Calls of torch's client never time out.

    Args:
        store: torch's client.
        seconds: time limit of a call. After a timeout, further calls fail at once until the late response arrives.
            After a `DistError`, further calls raise it at once: torch would print a stack trace for each.

    Raises:
        StoreTimeout: the store did not respond in time.
        torch.distributed.DistError: the store no longer exists.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._late: Future[Any] | None = None
        self._gone: tuple[type[dist.DistError], str] | None = None

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._in_time(lambda: self._store.check(keys)))

    def get(self, key: str) -> bytes:
        """Return the value of a key, which must be set."""
        value: bytes = self._in_time(lambda: self._store.get(key))
        return value

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._in_time(lambda: self._store.set(key, value))

    def has_within(self, seconds: float, keys: list[str]) -> bool:
        """Wait until all keys are set, at most for the given seconds, and return whether they are."""
        # `store.wait` is not used because torch prints a warning when it times out.
        deadline, pause = time.monotonic() + seconds, 0.002
        while not (found := self.check(keys)) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return found

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Set a key if it has the expected value, or if `expected` is "" and the key is not set."""
        self._in_time(lambda: self._store.compare_set(key, expected, value))

    def _in_time(self, call: Callable[[], Any]) -> Any:
        if self._gone is not None:
            kind, text = self._gone
            raise kind(text)
        if self._late is not None and not self._late.done():
            raise StoreTimeout
        answer = in_thread(call, "lightning_sparse store")
        try:
            return answer.result(self._seconds)
        except FutureTimeout as error:  # Python's own TimeoutError since 3.11
            if answer.done():  # the store raised this TimeoutError itself
                raise
            self._late = answer
            raise StoreTimeout from error
        except dist.DistError as error:
            self._gone = type(error), str(error)
            raise


def meet(store: BoundedStore, key: str, rank: int, size: int, text: str, seconds: float) -> list[str] | None:
    """Wait for all ranks; return their texts by rank, or None if one is late. The result is equal on all ranks.

    Args:
        key: start of the keys of this meeting. No other meeting uses it.
        seconds: time to wait for the other ranks.
    """
    with contextlib.suppress(StoreTimeout, dist.DistError):
        store.set(f"{key}/{rank}", text)
        keys = [f"{key}/{each}" for each in range(size)]
        here = store.has_within(seconds, keys)
        # The first rank decides for all, because a rank may arrive just when another stops waiting.
        store.compare_set(f"{key}/decision", "", "together" if here else "alone")
        if store.get(f"{key}/decision") == b"together":
            return [store.get(each).decode() for each in keys]
    return None


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run `call` in a daemon thread; return a future for its result or error.

    Python 3.12 starts no thread while the interpreter exits. Then `call` runs in this thread, without a time limit.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return result
