"""All ranks end after the same batch when one of them is told to end (SIGTERM).

    termination = Termination(store, group, rank, ranks)
    termination.tell()           # in the signal's handler
    last = termination.begin()   # before each batch: whether it is the last one
    told = termination.finish()  # after the last of all: whether to end by an error nevertheless
    termination.end()
    termination.leave()          # before the process may end: rank 0's, which hosts the store, goes last

Ranks agree through the store, and only when one was told:

1. A rank that is told says so in the store, and in which batch it is.
2. A thread of each other rank finds that within POLL, and says in which batch its rank is.
3. From then on no rank begins a batch before it knows where all are. The first one that none has begun is the last.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_sparse.comm.peers import ANSWER_SECONDS, Responder, terminating_key
from lightning_sparse.comm.store import BoundedStore, StoreTimeout

AGREE_SECONDS = 10.0
"""Seconds to wait for what the other ranks' threads say: longer than they take, unless their processes have ended."""
FINISH_SECONDS = 5.0
"""Seconds to wait after the last batch for ranks that are still in it, and at the end for those that need the store."""


class Termination:
    """One rank's part in ending together.

    Args:
        store: a client that nobody else waits with, see `default_store`.
        group: the process group's name, which the keys in the store contain.
        rank: this rank within the group.
        ranks: global rank numbers of the group's members.

    Attributes:
        told: whether this rank was told to end.
        reason: which rank was told to end, as far as this one knows; "" where none was.
    """

    def __init__(self, store: Store, group: str, rank: int, ranks: Sequence[int]) -> None:
        self._store = BoundedStore(store, ANSWER_SECONDS)
        self._key = terminating_key(group)
        self._keys = [f"{self._key}/{member}" for member in range(len(ranks))]
        self._own_key, self._own_rank = self._keys[rank], ranks[rank]
        self._begun = (0, 0)  # batches of training, and since then of validation
        self._frozen_at: tuple[int, int] | None = None
        self._last_begun: tuple[int, int] | None = None  # by any rank, when it heard of it
        self._lock = threading.RLock()  # not a Lock: a signal may interrupt the thread that holds it
        self._published = self._ended = self._store_is_gone = self._all_finished = False
        self._finished = 0  # trainings: a learning rate finder has one before the other
        self.requested, self.reason = False, ""
        self._watcher = Responder(self._watch)

    def request(self) -> None:
        """Tell this rank to end, and the others through the store. For the handler of a signal."""
        self.requested, self.reason = True, f"Rank {self._own_rank} was told to end (SIGTERM)."
        self._look()

    def begin(self, *, validation: bool = False) -> bool:
        """Return whether the batch that begins is the last one.

        Args:
            validation: whether it is one of validation, of which ranks should have equal numbers.
        """
        with self._lock:
            training, validations = self._begun
            self._begun = (training, validations + 1) if validation else (training + 1, 0)
            self._all_finished = False
            if self._frozen_at is None:
                return False
        if self._last_begun is None:
            self._last_begun = self._agree(self._frozen_at)
        return self._begun > self._last_begun

    def finish(self) -> bool:
        """Return, after the last batch, whether a rank was told to end; the same on all ranks that come in time.

        One that does not come has more batches, or longer to do: it misses this one if this one goes.
        """
        self._finished += 1
        end = f"/finished/{self._finished}"
        keys = [key + end for key in self._keys]
        with contextlib.suppress(StoreTimeout, dist.DistError):
            self._store.set(self._own_key + end, self.reason if self.requested else "")
            if self._store.has_within(FINISH_SECONDS, keys):
                reasons = [self._store.get(key).decode() for key in keys]
                self.reason, self._all_finished = next(filter(None, reasons), ""), True
                return bool(self.reason)
        return self.requested

    def end(self) -> None:
        """End the thread, and say nothing to other ranks from now on. May be called twice."""
        self._ended = True
        self._watcher.end()

    def wait_for_peers(self) -> None:
        """After a training that all ranks have finished: have rank 0, whose process hosts the store, end last.

        For those that still ask a store that has gone torch prints a trace of its calls.
        """
        if not self._all_finished:
            return
        with contextlib.suppress(StoreTimeout, dist.DistError):
            if self._own_rank == 0:
                self._store.has_within(FINISH_SECONDS, [key + "/left" for key in self._keys if key != self._own_key])
            else:
                self._store.set(self._own_key + "/left", "")

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the thread goes on: other ranks wait for what it says
            self._look()

    def _look(self) -> None:
        """Once a rank was told to end, say where this one is. If the store does not answer, the next call does it."""
        try:
            if self._published or self._ended or self._store_is_gone:
                pass
            elif self.requested:
                self._store.compare_set(self._key, "", self.reason)
                self._publish()
            elif self._store.check([self._key]):
                self.reason = self._store.get(self._key).decode()
                self._publish()
        except StoreTimeout:
            pass
        except dist.DistError:
            self._store_is_gone = True  # torch prints a trace of its calls for each try
        if self._store_is_gone and self.requested:
            self._freeze()  # and end alone: so do the others, who have lost the process that hosts it

    def _publish(self) -> None:
        self._store.set(self._own_key, "{} {}".format(*self._freeze()))
        self._published = True

    def _freeze(self) -> tuple[int, int]:
        """Let this rank begin no batch any more before it knows where all are, and return where it is."""
        with self._lock:
            self._frozen_at = self._frozen_at or self._begun
            return self._frozen_at

    def _agree(self, own: tuple[int, int]) -> tuple[int, int]:
        """Return the last batch that any rank had begun when it heard; this rank's own if others do not say."""
        deadline = time.monotonic() + AGREE_SECONDS
        while time.monotonic() < deadline:
            try:
                if self._store.check(self._keys):
                    begun = (self._store.get(key).split() for key in self._keys)
                    return max((int(training), int(validations)) for training, validations in begun)
            except StoreTimeout:
                pass
            except dist.DistError:
                break
            time.sleep(0.02)
        return own
