"""SIGTERM while Lightning trains: all ranks end after the same batch, wherever each is when the signal comes.

Lightning 2.6 broadcasts in each batch whether rank 0 was told, and all ranks wait for it: a round trip, and on CUDA for
the device. Its handler of the signal is a collective, too, which may meet another one of other ranks: gloo then aborts
their processes. Here nothing is sent until a rank is told, and then through the store.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from lightning_sparse._compat import handlers_beside_lightnings, receive_sigterm, without_sigterm_broadcast
from lightning_sparse.comm import ProcessGroupComm, Termination


class EndTogether:
    """Takes the place of what Lightning does about SIGTERM, from the start of training until `close`.

    Args:
        trainer: Lightning's.
        comm: the exchange's.
    """

    def __init__(self, trainer: Any, comm: ProcessGroupComm) -> None:
        self._trainer, self._pid, self._ends = trainer, os.getpid(), False
        self._termination = Termination(comm.store, comm.group.group_name, comm.rank, comm.ranks)
        self._broadcast_again = without_sigterm_broadcast(trainer)
        self._lightnings: Any = None
        if threading.current_thread() is threading.main_thread():  # in others Lightning has no handler
            handler = signal.getsignal(signal.SIGTERM)
            others = handlers_beside_lightnings(handler)
            if others is not None:
                self._lightnings, self._others = handler, others
                signal.signal(signal.SIGTERM, self._on_sigterm)

    def begin(self, *, validation: bool = False) -> None:
        """Have Lightning end training after the batch that begins, if that is the one that ranks have agreed on."""
        if not self._ends and self._termination.begin(validation=validation):
            self._ends = True
            receive_sigterm(self._trainer)

    def ends_by(self, error: BaseException | None) -> bool:
        """Return whether it is by this error that Lightning ends training, on all ranks after the same batch."""
        return self._ends and type(error).__name__ == "SIGTERMException"

    def explain(self, error: BaseException) -> None:
        """Give that error a text, and this process exit status 1, if it was another rank that was told to end."""
        if isinstance(error, SystemExit) and self.ends_by(error) and not self._termination.told:
            error.code = f"{self._termination.reason} So all ranks end after the same batch."
            error.args = (error.code,)

    def close(self) -> None:
        """Leave SIGTERM to Lightning again."""
        self._termination.end()
        self._broadcast_again()
        if self._lightnings is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._lightnings)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child, which is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        launcher = self._trainer.strategy.launcher
        if not self._termination.told and launcher is not None:
            launcher.kill(number)  # the ranks that this one has launched
        self._termination.tell()
        for handler in self._others:
            handler(number, frame)
