"""After an error and at the end of training: finds out whether all ranks will join the next collective."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch.distributed as dist

from lightning_sparse.comm import RankFailure
from lightning_sparse.comm.peers import ANSWER_SECONDS
from lightning_sparse.comm.process_group import default_store
from lightning_sparse.comm.store import BoundedStore, meet
from lightning_sparse.hooks.handshakes import number_handshakes

MEET_SECONDS = 5.0
"""Seconds to wait for the other ranks. Ranks that are in a step learn of an error sooner."""


class Rendezvous:
    """Finds out through the process group's store whether all ranks will join a collective.

    All ranks call the same methods in the same order. Once a rank is alone, it stays alone until the next fit.
    """

    _runs: ClassVar = 0  # of all strategies in this process, because the store keeps the entries of each
    _fits = 0  # torn down in this run
    _calls = 0
    _alone = False

    def begin_run(self) -> None:
        """Begin a run of a Trainer, such as a fit or a test.

        All ranks count equal numbers of runs. Within a run their counts may differ: an error of one rank after its fit
        adds a handshake and a teardown.
        """
        Rendezvous._runs += 1
        self._fits = 0
        if dist.is_initialized():  # by an earlier run
            self.number_handshakes()

    def number_handshakes(self) -> None:
        """Number this run's handshakes. The process group exists."""
        number_handshakes(self._runs)

    def end_fit(self) -> None:
        """Reset the state after a fit, with or without an error."""
        self._fits += 1
        self._calls, self._alone = 0, False

    def all_ranks_present(self, place: str = "after an error", left_collective: bool = False) -> bool:
        """Return whether all ranks will join the collective that this rank is about to call; equal on all ranks.

        Args:
            place: the place of the collective in a fit. Ranks in other places do not meet.
            left_collective: whether this rank has left an earlier collective of the same group. Then the next one would
                not match on all ranks, and each rank counts as alone.
        """
        if dist.get_world_size() == 1:
            return True
        if not self._alone:
            self._calls += 1
            key = f"lightning_sparse/meeting/{self._runs}/{self._fits}/{place}/{self._calls}"
            self._alone = not self._meet(key, "left" if left_collective else "")
        return not self._alone

    @staticmethod
    def _meet(key: str, text: str) -> bool:
        with contextlib.suppress(RankFailure):
            store = BoundedStore(default_store(), ANSWER_SECONDS)
            texts = meet(store, key, dist.get_rank(), dist.get_world_size(), text, MEET_SECONDS)
            return texts is not None and not any(texts)
        return False
