"""SIGTERM during training: all ranks end after the same batch, wherever each rank is when the signal arrives.

Lightning 2.6 broadcasts in each batch whether rank 0 has received SIGTERM. All ranks wait for this round trip, and on
CUDA for the device. Lightning's signal handler calls a collective, too. If other ranks call another collective at that
time, gloo aborts their processes. Here a thread of each rank polls the store. No rank waits before a rank has received
the signal or training ends.

torchrun and SLURM signal the workers of a DataLoader, too. They survive it, because they load the last batch.

SLURM's requeue signal, which Lightning handles by default, ends training in the same way. Lightning's handler saves the
checkpoint wherever each rank is. Here it runs after the last batch.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_sparse._compat import (
    receive_sigterm,
    replace_signal_functions,
    save_and_requeue,
    seed_workers,
    sigterm_exception,
)
from lightning_sparse.comm import ProcessGroupComm, Termination

log = logging.getLogger(__name__)
WORKER_SECONDS = 60
"""Seconds that a DataLoader's worker lives after SIGTERM, unless the rank ends it."""


class CoordinatedShutdown:
    """Replaces Lightning's handling of SIGTERM, from before Lightning sets its handlers until `close`.

    Args:
        trainer: the Trainer, also an attribute.
        comm: the connection of the exchange.
        launched: whether another process has started the ranks, by fork or spawn. That process waits for their result,
            and for ever if they end with exit status 0. Callbacks do not get the exception then.
    """

    def __init__(self, trainer: Any, comm: ProcessGroupComm, *, launched: bool) -> None:
        self.trainer, self._pid, self._launched, self._ends = trainer, os.getpid(), launched, False
        self._termination = Termination(comm.store, comm.peers)
        self._undo = replace_signal_functions(trainer, self._on_sigterm, self._on_requeue)
        self._inits = weakref.WeakKeyDictionary[Any, Any]()  # the `worker_init_fn` of each loader before

    def protect_workers(self, loader: Any) -> None:
        """Let the workers of a DataLoader survive SIGTERM."""
        if getattr(loader, "num_workers", 0) and hasattr(loader, "worker_init_fn") and hasattr(signal, "alarm"):
            seed_workers(self.trainer, loader)
            if getattr(loader.worker_init_fn, "func", None) is not survive_sigterm:  # of the same fit
                self._inits[loader] = loader.worker_init_fn
                loader.worker_init_fn = partial(survive_sigterm, loader.worker_init_fn)

    def begin(self, *, validation: bool = False) -> None:
        """Let Lightning end training after the batch that begins now, if the ranks have agreed on this batch."""
        if not self._ends and self._termination.begin(validation=validation):
            self._end()

    def finish(self) -> None:
        """End on all ranks if a rank has received the signal in the last batch of training."""
        if self._termination.finish():
            self._end()
            raise sigterm_exception(self.trainer)

    def ends_by(self, error: BaseException | None) -> bool:
        """Return whether Lightning ends training by this error, on all ranks after the same batch."""
        return self._ends and isinstance(error, sigterm_exception(self.trainer))

    def explain(self, error: BaseException) -> None:
        """If another rank received SIGTERM, set the error's message and this process's exit status 1.

        After SLURM's requeue signal, save Lightning's checkpoint for the next run and requeue the job instead.
        """
        if not isinstance(error, SystemExit) or not self.ends_by(error):
            return
        if "(SIGTERM)" not in self._termination.reason:
            save_and_requeue(self.trainer)
        elif not self._termination.requested:
            error.code = self._reason()
            error.args = (error.code,)

    def close(self) -> None:
        """Report nothing more to other ranks. Lightning removes the handler after the strategy's teardown."""
        self._termination.end()
        self._undo()
        for loader, init in self._inits.items():
            loader.worker_init_fn = init

    def leave(self) -> None:
        """After a regular end of training, keep rank 0's process, which hosts the store, until no rank needs it."""
        if os.getpid() == self._pid:  # not in a forked child
            self._termination.wait_for_peers()

    def _end(self) -> None:
        self._ends = True
        if self._launched:
            raise sigterm_exception(self.trainer)(self._reason())
        if self._termination.requested:  # the other ranks end with this message
            log.warning(self._reason())
        receive_sigterm(self.trainer)

    def _reason(self) -> str:
        return f"{self._termination.reason} So all ranks end after the same batch."

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        launcher = self.trainer.strategy.launcher
        if not self._termination.requested and launcher is not None:
            launcher.kill(number)  # the ranks that this process has started
        self._termination.request()

    def _on_requeue(self, number: int, frame: Any) -> None:
        if os.getpid() == self._pid:  # a forked child is no rank
            self._termination.request(signal.Signals(number).name)


def survive_sigterm(init: Callable[[int], None] | None, worker: int) -> None:
    """Let a DataLoader's worker survive SIGTERM for `WORKER_SECONDS`, and SIGUSR1. Call the loader's `worker_init_fn`.

    Args:
        init: the `worker_init_fn`.
        worker: the worker's number.
    """
    if threading.current_thread() is threading.main_thread():  # the workers of some loaders are threads
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_SECONDS))
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # SLURM's requeue signal would end a spawned worker
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if init is not None:
        init(worker)
