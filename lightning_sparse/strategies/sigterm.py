"""SIGTERM while Lightning trains: all ranks end after the same batch, wherever each is when the signal comes.

Lightning 2.6 broadcasts in each batch whether rank 0 was told, and all ranks wait for it: a round trip, and on CUDA for
the device. Its handler of the signal is a collective, too, which may meet another one of other ranks: gloo then aborts
their processes. Here no rank waits until one is told or training ends: a thread of each looks into the store.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from lightning_sparse._compat import receive_sigterm, replace_sigterm_notifier, sigterm_exception
from lightning_sparse.comm import ProcessGroupComm, Termination

log = logging.getLogger(__name__)


class EndTogether:
    """Takes the place of what Lightning does about SIGTERM, from before it sets its handlers until `close`.

    Args:
        trainer: Lightning's.
        comm: the exchange's.
        launched: whether another process has launched the ranks, by fork or spawn. It waits for their result, for ever
            if they end with exit status 0; and callbacks do not hear of exceptions.
    """

    def __init__(self, trainer: Any, comm: ProcessGroupComm, *, launched: bool) -> None:
        self._trainer, self._pid, self._launched, self._ends = trainer, os.getpid(), launched, False
        self._termination = Termination(comm.store, comm.group.group_name, comm.rank, comm.ranks)
        self._undo = replace_sigterm_notifier(trainer, self._on_sigterm)

    def begin(self, *, validation: bool = False) -> None:
        """Have Lightning end training after the batch that begins, if that is the one that ranks have agreed on."""
        if not self._ends and self._termination.begin(validation=validation):
            self._end()

    def finish(self) -> None:
        """End on all ranks if one was told in the last batch, after which none begins."""
        if self._termination.finish():
            self._end()
            raise sigterm_exception(self._trainer)

    def ends_by(self, error: BaseException | None) -> bool:
        """Return whether it is by this error that Lightning ends training, on all ranks after the same batch."""
        return self._ends and isinstance(error, sigterm_exception(self._trainer))

    def explain(self, error: BaseException) -> None:
        """Give that error a text, and this process exit status 1, if it was another rank that was told to end."""
        if isinstance(error, SystemExit) and self.ends_by(error) and not self._termination.requested:
            error.code = self._reason()
            error.args = (error.code,)

    def close(self) -> None:
        """Say no more to other ranks. The handler stays until Lightning removes it, after the strategy's teardown."""
        self._termination.end()
        self._undo()

    def leave(self) -> None:
        """Keep rank 0's process, which hosts the store, until no rank needs it any more, if training ended in order."""
        if os.getpid() == self._pid:  # no forked child
            self._termination.wait_for_peers()

    def _end(self) -> None:
        self._ends = True
        if self._launched:
            raise sigterm_exception(self._trainer)(self._reason())
        if self._termination.requested:  # the other ranks end with this text
            log.warning(self._reason())
        receive_sigterm(self._trainer)

    def _reason(self) -> str:
        return f"{self._termination.reason} So all ranks end after the same batch."

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child, which is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        launcher = self._trainer.strategy.launcher
        if not self._termination.requested and launcher is not None:
            launcher.kill(number)  # the ranks that this one has launched
        self._termination.request()
