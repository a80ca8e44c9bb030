"""Word of failed ranks while the training thread may be waiting for the device, which waits for one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lightning_sparse.comm.peers import Responder
from lightning_sparse.hooks.session import Session, done_in_time
from lightning_sparse.reducer import error_message

log = logging.getLogger(__name__)


class DeviceWatch:
    """Replies to failed ranks; and if this rank's device waits for one, frees the device. A thread looks every POLL.

    Attributes:
        error: what has failed, on this rank or on another; None if nothing has.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.error: BaseException | None = None
        self._done: Callable[[], bool] = _nothing_to_wait_for  # whether the device waits for no other rank any more
        self._seen_done = self._done
        self._responder = Responder(self._look)

    def launching(self) -> None:
        """Say that collectives are to be launched on the device; raise what has failed before."""
        if self.error is not None:
            raise self.error
        if self._session.over_nccl:
            self._done = _launching

    def launched(self, stream: torch.cuda.Stream | None = None) -> None:
        """Say that they have been launched, in a stream; None is the current one."""
        if self._session.over_nccl:
            self._done = (stream or torch.cuda.current_stream(self._session.device)).record_event().query

    def ends_soon(self) -> bool:
        """Wait until the device is done, `JOIN_SECONDS` at most; return whether it is."""
        return done_in_time(self._done)

    def _look(self) -> None:
        self._session.comm.respond()
        done = self._done
        # Querying an event invalidates a CUDA graph that another thread captures: no query once our work is done.
        if done is self._seen_done or self.error is not None:
            return
        try:
            if done():
                self._seen_done = done
            else:
                self._session.comm.raise_if_peer_failed()
        except Exception as error:  # raised again in the next exchange
            self.fail(error)
            log.error(error_message(error, self._session.comm, self._session.reducer.step))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed on this one, and free the device."""
        self.error = error
        self._session.fail(error)
        self._session.free_device()

    def end(self) -> None:
        """Look no more."""
        self._responder.end()

    def close(self, *, failed: bool) -> None:
        """Leave the process group, once the device is done; `failed`: whether training has failed here."""
        error = self._session.finish(self._done, failed=self.error is not None or failed)
        self.error = self.error or error


def _nothing_to_wait_for() -> bool:
    return True


def _launching() -> bool:
    return False
