"""The interface of `GradientExchanger` and `UpdateExchanger`."""

from __future__ import annotations

from typing import Protocol

from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.reducer import Reducer


class Exchanger(Protocol):
    """Exchanges the gradients of one model, or the updates of its optimizers, on one rank."""

    @property
    def reducer(self) -> Reducer:
        """The reducer, which compresses and exchanges. A checkpoint needs its state."""

    @property
    def comm(self) -> ProcessGroupComm:
        """The reducer's connection to the other ranks."""

    @property
    def note(self) -> str:
        """One sentence for the summary of a run."""

    @property
    def is_consistent(self) -> bool:
        """Whether the reducer's state belongs to a complete step."""

    def drain(self) -> bool:
        """Wait until the exchange has no work left; return `is_consistent`."""

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that training has failed on this rank."""

    def close(self) -> None:
        """End the exchange. May be called twice, and after a failure."""
