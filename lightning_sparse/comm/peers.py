"""Reads and writes the state of a group's ranks in the store: failed, finished, or not responding."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_sparse.comm.base import RankFailure
from lightning_sparse.comm.store import BoundedStore, StoreTimeout

ANSWER_SECONDS = 1.5
"""Seconds that a failed rank waits for replies; its peers check for the request every POLL."""
JOIN_SECONDS = 5.0
"""Seconds to wait for a thread of this package to end. If a thread returns from the store during the interpreter's
shutdown, it aborts the process. The limit is needed because the process that hosts the store may be frozen."""
LONGEST = 1 << 16
"""Characters of a reason that the store gets. torch's store takes 8 MiB at most."""


class Peers:
    """Reads and writes the state of a group's ranks in the store: failed, finished, or not responding.

    Only the process that created the object uses the store. A forked child, such as a DataLoader worker, has copies of
    the object and of the connection, and would otherwise report for the rank.

    Ranks that train together may exchange in several groups, such as the shards of a model: each is a part. A failure
    concerns all ranks. A rank that has finished concerns its part.

    Args:
        store: a client that no other code waits with; see `default_store`.
        group: name of the process group, part of the keys in the store. Groups of one mesh dimension may share a name.
        rank: this rank within the group.
        ranks: global rank numbers of the group, for error messages.
        part: global rank numbers of this rank's part; None is the whole group.

    Attributes:
        rank, ranks, part: as given.
        terminating: the key of the rank that was the first to be asked to end; see `Termination`.
        left_collective: whether this rank has left a collective that others may still join, in a group that outlives
            the exchange. Then no further collective of that group would match.
    """

    def __init__(
        self, store: Store, group: str, rank: int, ranks: Sequence[int], part: Sequence[int] | None = None
    ) -> None:
        self._store, self.rank, self.ranks = BoundedStore(store, ANSWER_SECONDS), rank, ranks
        self.part = ranks if part is None else part
        self._pid = os.getpid()
        self._failed, self._done, self._pause = (
            f"lightning_sparse/{group}/{key}"
            for key in (f"{ranks[0]}/failed", f"{self.part[0]}/done", f"{self.part[0]}/pause")
        )
        self._pauses, self.left_collective = 0, False
        self._reason = ""  # that a failed rank has recorded
        self.terminating = f"lightning_sparse/{group}/terminating"

    @property
    def _request(self) -> str:
        return f"{self._failed}/poll"

    @property
    def has_parts(self) -> bool:
        """Whether this rank exchanges with a part of the ranks only."""
        return len(self.part) < len(self.ranks)

    def mark_failed(self, reason: str) -> None:
        """Record that this rank has failed. Only the first reason is kept."""
        self._put(self._failed, reason)

    def mark_done(self, calls: int, reason: str) -> None:
        """Record that this rank stops after its first `calls` collective calls. Peers that make more will fail.

        The record of the rank with the fewest calls is kept, also if that rank is late.
        """

        def write() -> None:
            found = self._store.get(self._done).decode() if self._store.check([self._done]) else ""
            if not found or calls < int(found.split(" ", 1)[0]):
                self._store.compare_set(self._done, found, f"{calls} {reason}")

        self._write(write)

    def mark_pause(self, calls: int, reason: str) -> None:
        """Record that this rank waits after its first `calls` collective calls until all ranks have called this.

        Peers that make more calls before will fail.
        """
        self._pauses += 1
        self._write(lambda: self._store.set(self._pause, f"{self._pauses} {calls} {reason}"))

    def raise_if_failed(self, calls: int) -> None:
        """Raise RankFailure if a rank failed, finished or pauses with fewer calls than this rank has started."""
        try:
            if self._store.check([self._failed]):
                raise RankFailure(self._store.get(self._failed).decode())
            if self._store.check([self._done]):
                made, reason = self._store.get(self._done).decode().split(" ", 1)
                if int(made) < calls:
                    raise RankFailure(reason)
            pause_at, reason = self._pause_of_another()
            if pause_at < calls:
                raise RankFailure(reason)
        except dist.DistError as error:
            raise RankFailure(self._reason or lost_store(self.ranks[self.rank], error)) from error
        except StoreTimeout:
            return  # the collective itself will time out

    def _pause_of_another(self) -> tuple[float, str]:
        """Return the number of calls after which another rank waits for this one, and its reason; inf if none waits."""
        if self._store.check([self._pause]):
            pauses, made, reason = self._store.get(self._pause).decode().split(" ", 2)
            if int(pauses) > self._pauses:
                return int(made), reason
        return math.inf, ""

    def reported(self) -> str:
        """Return the reason that a failed rank has recorded; "" if this rank knows of none.

        This rank still knows it when the store is gone: the failed rank may have hosted it.
        """
        if os.getpid() == self._pid and not self._reason:
            with contextlib.suppress(dist.DistError, StoreTimeout):
                if self._store.check([self._failed]):
                    self._reason = self._store.get(self._failed).decode()
        return self._reason

    def diagnose(self, calls: int | None) -> str:
        """Return why a collective failed: the reason that a rank recorded, or the ranks that do not respond.

        Args:
            calls: number of collectives of the exchange that this rank has started. None: the failed collective was one
                of the model. Then "" says that the cause is unknown.
        """
        try:
            self.raise_if_failed(calls or 0)
            told = str(self._store.get(self.terminating).decode()) if self._store.check([self.terminating]) else ""
            silent, running = self._poll_peers()
            _, pause = self._pause_of_another()
        except RankFailure as failure:
            return str(failure)
        except dist.DistError:
            return self._reason or (
                "The store of the process group is gone, too: the process that hosts it, usually rank 0 or torchrun, "
                "has ended."
            )
        except StoreTimeout:
            return silent_store(self.ranks[self.rank])
        if silent:
            return (
                f"No answer from {rank_list(silent)}: killed, ended, or frozen, or still before the first backward "
                f"pass. Look at the end of the output there. {told}"
            ).rstrip()
        if told:  # if a rank is killed, torchrun tells the others to end: so silent ranks come first
            return told
        if calls is None:
            reported = self.reported()  # meanwhile
            if reported or len(running) in (0, len(self.ranks) - 1):
                return reported
            absent = running
        else:  # ranks of other parts may be busy elsewhere
            absent = [rank for rank in running if rank in self.part] or running
        if absent:
            return (
                f"Still running, but not taking part: {rank_list(absent)}. It hangs, or needs longer than the timeout; "
                f"or ranks have different numbers of batches, or save checkpoints at different steps."
            )
        if found := pause or self.reported():  # this rank may wait in a collective of DDP, before the exchange
            return found
        return (
            "All ranks have this error: look for an interruption of the network, or for ranks that wait for each other "
            "in different places, such as one that resumes and one that does not."
        )

    def respond(self) -> None:
        """Respond if a failed rank polls its peers."""
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # a reply must never raise an error
                if self._store.check([self._request]):
                    self._put(f"{self._request}/{self.rank}", "running")

    def _poll_peers(self) -> tuple[list[int], list[int]]:
        """Poll all ranks. Return the silent ranks, and the ranks that respond but have not failed in a collective."""
        keys = [f"{self._request}/{rank}" for rank in range(len(self.ranks))]
        self._store.set(self._request, "")
        self._store.set(keys[self.rank], "failed")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            silent, running = [], []
            for rank, key in zip(self.ranks, keys, strict=True):
                if not self._store.check([key]):
                    silent.append(rank)
                elif self._store.get(key) != b"failed":
                    running.append(rank)
            if not silent + running or time.monotonic() > deadline:
                return silent, running
            time.sleep(0.02)

    def _put(self, key: str, text: str) -> None:
        """Set a key if it is not set yet."""
        short = text[:LONGEST].encode(errors="backslashreplace").decode()
        self._write(lambda: self._store.compare_set(key, "", short))

    def _write(self, write: Callable[[], None]) -> None:
        """Call a function that writes to the store, but not in a forked child. Never raise an error."""
        if os.getpid() == self._pid:
            # If the store is gone, its host has ended, and the peers lose their connections anyway.
            with contextlib.suppress(Exception):
                write()


def lost_store(rank: int, error: BaseException) -> str:
    """Return the error message for a store whose host has ended."""
    return (
        f"Rank {rank} lost the store of the process group: the process that hosts it, usually rank 0 or torchrun, has "
        f"ended. ({first_line(error)})"
    )


def silent_store(rank: int) -> str:
    """Return the error message for a store that does not respond."""
    return (
        f"Rank {rank} gets no answer from the store of the process group: the process that hosts it, usually rank 0 "
        f"or torchrun, is frozen, or the network between them is interrupted."
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", for error messages."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class name if the text is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
