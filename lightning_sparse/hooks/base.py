"""The common part of the exchangers of gradients and updates, and of stock all-reduce."""

from __future__ import annotations

import abc
from collections.abc import Iterable

from torch.optim import Optimizer

from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.hooks.session import Session
from lightning_sparse.reducer import Reducer


class Exchanger(abc.ABC):
    """Exchanges the gradients of one model, or the updates of its optimizers, on one rank."""

    session: Session
    """This rank's connection to the others, which knows the error that has ended training."""

    @property
    def reducer(self) -> Reducer:
        """The reducer, which compresses and exchanges. A checkpoint needs its state."""
        return self.session.reducer

    @property
    def comm(self) -> ProcessGroupComm:
        """The reducer's connection to the other ranks."""
        return self.session.comm

    @property
    @abc.abstractmethod
    def note(self) -> str:
        """One sentence for the summary of a run."""

    @property
    @abc.abstractmethod
    def is_consistent(self) -> bool:
        """Whether the reducer's state belongs to a complete step."""

    @property
    def left_collective(self) -> bool:
        """Whether this rank has left a collective that others may still join, in a group that outlives the exchange."""
        return self.comm.peers.left_collective

    def drain(self) -> bool:
        """Wait until the exchange has no work left; return `is_consistent`."""
        return self.is_consistent

    def gradients_wait(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether exchanged gradients wait for a step of these optimizers. Only rank 0 knows."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """End the exchange. May be called twice, and after a failure."""
