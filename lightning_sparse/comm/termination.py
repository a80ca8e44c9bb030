"""Ends training on all ranks after the same batch when one rank is asked to end (SIGTERM).

    termination = Termination(store, peers)
    termination.request()             # in the signal handler
    last = termination.begin()        # before each batch: whether it is the last one
    requested = termination.finish()  # after the last batch of training: whether to end with an error nevertheless
    termination.end()
    termination.wait_for_peers()      # before the process ends: rank 0's process hosts the store and ends last

Ranks agree through the store, and only after a request:

1. A rank that is asked to end writes this request and its current batch to the store.
2. A thread of each other rank finds the request within POLL and writes that rank's current batch.
3. From then on, no rank begins a batch before it knows the current batch of all ranks. The last batch is the first one
   that no rank had begun.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_sparse.comm.peers import ANSWER_SECONDS, Peers
from lightning_sparse.comm.store import BoundedStore, StoreTimeout, meet
from lightning_sparse.comm.worker import Worker

AGREE_SECONDS = 10.0
"""Seconds to wait for the other ranks' current batches. Their threads respond sooner unless their processes ended."""
FINISH_SECONDS = 5.0
"""Seconds to wait after the last batch for slower ranks, and at the end for ranks that still need the store."""


class Termination:
    """One rank's side of the agreement on a last batch.

    Args:
        store: a client that no other code waits with; see `default_store`.
        peers: this rank and the others. `Peers.terminating` is the key of a request, and the start of all keys.

    Attributes:
        requested: whether this rank was asked to end.
        reason: sentence that names the first rank that was asked to end, and the signal; "" if this rank knows of none.
    """

    def __init__(self, store: Store, peers: Peers) -> None:
        self._store, self._peers = BoundedStore(store, ANSWER_SECONDS), peers
        self._trainings = 0  # a learning rate finder runs one before the main training
        self._all_finished = False  # whether all ranks have finished the present training
        self._begun = (0, 0)  # batches of training, and batches of validation since then
        self._frozen_at: tuple[int, int] | None = None  # `_begun` when this rank learned of the request
        self._last_begun: tuple[int, int] | None = None  # the maximum of `_frozen_at` over all ranks
        self._lock = threading.RLock()  # a signal may interrupt the thread that holds it
        self._silent = False  # whether this rank writes nothing more to the store
        self.requested, self.reason = False, ""
        self._watcher = Worker(look=self._watch)
        self._watcher.start()

    @property
    def _keys(self) -> list[str]:
        """The key of each rank of the group."""
        return [f"{self._peers.terminating}/{rank}" for rank in range(len(self._peers.ranks))]

    @property
    def _rank(self) -> int:
        """This rank's global number."""
        return self._peers.ranks[self._peers.rank]

    def request(self, name: str = "SIGTERM") -> None:
        """Ask this rank to end, and the others through the store. Call it from a signal handler."""
        self.requested, self.reason = True, self.reason or f"Rank {self._rank} was told to end ({name})."
        self._look()

    def begin(self, *, validation: bool = False) -> bool:
        """Return whether the batch that begins is the last one.

        Args:
            validation: whether it is a validation batch. Ranks should have equal numbers of these.
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
        """Return, after the last batch, whether a rank was asked to end; equal on all ranks if all call it in time."""
        self._trainings += 1
        own, peers = self.reason if self.requested else "", self._peers
        key = f"{peers.terminating}/finished/{self._trainings}"
        reasons = meet(self._store, key, peers.rank, len(peers.ranks), own, FINISH_SECONDS)
        if reasons is None:
            return bool(self.reason)
        self._all_finished = True
        self.reason = next(filter(None, reasons), "")
        return bool(self.reason)

    def end(self) -> None:
        """End the thread and write nothing more to the store. It may be called twice."""
        self._silent = True
        self._watcher.end()

    def wait_for_peers(self) -> None:
        """If all ranks have finished training, wait on rank 0, whose process hosts the store, for the other ranks.

        If the store were gone while a rank still calls it, torch would print a stack trace there.
        """
        if not self._all_finished:
            return
        with contextlib.suppress(StoreTimeout, dist.DistError):
            left = [key + "/left" for key in self._keys]
            own = left.pop(self._peers.rank)
            if self._rank == 0:
                self._store.has_within(FINISH_SECONDS, left)
            else:
                self._store.set(own, "")

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # keep the thread alive, because other ranks wait for its entry
            self._look()

    def _look(self) -> None:
        """After a request, publish this rank's current batch. If the store does not respond, the next call retries."""
        try:
            if self._silent:
                pass
            elif self.requested or self._store.check([self._peers.terminating]):
                if self.requested:
                    self._store.compare_set(self._peers.terminating, "", self.reason)
                self.reason = self._store.get(self._peers.terminating).decode()  # equal on all ranks
                self._store.set(self._keys[self._peers.rank], "{} {}".format(*self._freeze()))
                self._silent = True
        except StoreTimeout:
            pass
        except dist.DistError:
            if self.requested:
                self._freeze()  # and end alone; the other ranks end too, because they lost the store's host

    def _freeze(self) -> tuple[int, int]:
        """Stop this rank from beginning a batch before it knows the others' batches; return its current batch."""
        with self._lock:
            self._frozen_at = self._frozen_at or self._begun
            return self._frozen_at

    def _agree(self, own: tuple[int, int]) -> tuple[int, int]:
        """Return the latest batch that any rank had begun when it froze; `own` if the others do not respond."""
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
