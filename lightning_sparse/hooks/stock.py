"""Leaves gradients to DDP's own all-reduce, in a session with the other ranks that explains failures."""

from __future__ import annotations

from datetime import timedelta

from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.comm.peers import Responder
from lightning_sparse.hooks.base import Exchanger
from lightning_sparse.hooks.ddp import trainable_parameters
from lightning_sparse.hooks.session import Session
from lightning_sparse.methods import method
from lightning_sparse.options import ReducerOptions


class StockExchanger(Exchanger):
    """Counts the steps and the bytes of stock all-reduce, which DDP runs.

    Args:
        ddp: the wrapped model, without a communication hook. This object keeps no reference to it.
        options: options of the reducer, which has no work.
        timeout: time to wait for other ranks; None takes the group's.
    """

    note = "DDP's own all-reduce averages gradients."
    """One sentence for the summary of a run."""
    is_consistent = True

    def __init__(self, ddp: DistributedDataParallel, options: ReducerOptions, timeout: timedelta | None) -> None:
        params = trainable_parameters(ddp)
        self._session = Session(
            lambda: params,
            method("dense"),
            options,
            group=ddp.process_group,
            device=ddp.device,
            timeout=timeout,
        )
        self._responder = Responder(self._session.comm.respond)

    def count_step(self) -> None:
        """Count a step and its bytes."""
        self.reducer.finish_step()
        self.comm.sent_bytes += round(self.reducer.routing.dense_nbytes)

    def drain(self) -> bool:
        """Return True: there are no residuals."""
        return True

    def close(self) -> None:
        """Leave the group. It may be called twice, and after a failure."""
        self._responder.end()
        self._session.mark_done()
        self._session.finish(failed=False)
