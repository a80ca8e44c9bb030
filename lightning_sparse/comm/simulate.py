"""Runs ranks as threads of one process, without a network.

def rank(comm: Comm) -> float:
    return comm.all_reduce(torch.tensor([float(comm.rank)])).item()

simulate(3, rank)  # [3.0, 3.0, 3.0]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sparse.comm.base import Comm, Op, RankFailure

T = TypeVar("T")


def simulate(size: int, fn: Callable[[Comm], T]) -> list[T]:
    """Run `fn` once per rank, each in a thread of this process, and return the results in rank order.

    A single rank runs in the calling thread.

    Args:
        size: number of ranks.
        fn: called with the rank's `Comm`.

    Raises:
        Exception: the error of the first rank that failed; the other ranks end too.
        RankFailure: a rank waits for a rank that has ended, or ranks make different calls.
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"simulate(size={size!r}): the number of ranks is a whole number from 1.")
    meeting = _Meeting(size)
    if size == 1:
        return [fn(_ThreadComm(0, meeting))]
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            results[rank] = fn(_ThreadComm(rank, meeting))
        except BaseException as caught:  # raised again below, in the caller's thread
            error = caught
        meeting.end(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        meeting.await_end(size)
    except KeyboardInterrupt:
        # If a thread is still running torch code when the interpreter exits, it aborts the process.
        meeting.interrupt()
        meeting.await_end(sum(thread.ident is not None for thread in threads))
        raise
    if meeting.first_error is not None:
        raise meeting.first_error
    return results


class _ThreadComm(Comm):
    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _meet(self, what: str, item: Any) -> list[Any]:
        items = self._meeting.meet(self.rank, (what, item))
        for rank, (call, _) in enumerate(items):
            if call != items[0][0]:
                raise RankFailure(f"Ranks are out of step: rank 0 calls {items[0][0]}, rank {rank} calls {call}.")
        return [theirs for _, theirs in items]

    def _meet_alike(self, what: str, x: Tensor) -> list[Tensor]:
        # Copy the tensor: its owner may overwrite it while slower ranks still read it.
        return self._meet(f"{what} of {tuple(x.shape)} {x.dtype}", x.clone())

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        parts = self._meet_alike(f"all_reduce({op})", x)
        x.copy_(parts[0])
        for part in parts[1:]:
            if op == "sum":
                x.add_(part)
            else:
                torch.maximum(x, part, out=x)

    def _all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._meet_alike("all_gather", x))

    def _broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self._meet_alike(f"broadcast({src})", x)[src])

    def _all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = [part.clone() for part in x.split(list(send))]
        received = [theirs[self.rank] for theirs in self._meet(f"all_to_all of {x.dtype}", parts)]
        if [part.numel() for part in received] != list(receive):
            raise RankFailure(
                f"Ranks are out of step: rank {self.rank} waits for {list(receive)} elements and is sent "
                f"{[part.numel() for part in received]}."
            )
        return torch.cat(received)


class _Meeting:
    """Synchronises the threads of `simulate`: each rank passes one item and receives the items of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.items: dict[int, Any] = {}
        self.result: list[Any] = []
        self.number = 0
        self.ended: dict[int, BaseException | None] = {}
        self.first_error: BaseException | None = None
        self.interrupted = False

    def meet(self, rank: int, item: Any) -> list[Any]:
        with self.condition:
            if self.interrupted:
                raise RankFailure("Interrupted.")
            mine = self.number
            self.items[rank] = item
            if len(self.items) == self.size:
                # No rank can complete the next call before all have left this one, so one result is enough.
                self.result = [self.items[member] for member in range(self.size)]
                self.items = {}
                self.number += 1
                self.condition.notify_all()
            self.condition.wait_for(lambda: self.number != mine or self.ended or self.interrupted)
            if self.number == mine and self.interrupted:
                raise RankFailure("Interrupted.")
            if self.number == mine:
                other, error = next(iter(self.ended.items()))
                how = "ended" if error is None else f"failed with {error!r}"
                raise RankFailure(f"Rank {rank} waits in a collective for rank {other}, which has {how}.")
            return self.result

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.condition:
            self.ended[rank] = error
            self.first_error = self.first_error or error
            self.condition.notify_all()

    def await_end(self, count: int) -> None:
        """Wait until `count` ranks have ended."""
        # Do not use `join`: after an interrupted join, a thread counts as stopped (Python 3.11, _wait_for_tstate_lock).
        with self.condition:
            self.condition.wait_for(lambda: len(self.ended) >= count)

    def interrupt(self) -> None:
        """Make every rank fail in its next collective."""
        with self.condition:
            self.interrupted = True
            self.condition.notify_all()
