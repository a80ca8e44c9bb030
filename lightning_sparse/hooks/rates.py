"""Whether optimizers have the same learning rates on all ranks while they train."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_sparse.comm import Comm

log = logging.getLogger(__name__)

PERIOD = 100
"""Steps from one comparison to the next: its message of 16 bytes costs a link's latency."""


class Rates:
    """Warns on rank 0, once, if learning rates differ among ranks, as those of a `ReduceLROnPlateau` may.

    Args:
        comm: the wire of an exchange; nothing else may go on over it meanwhile.
        optimizers: equal numbers of them on all ranks.
        device: of the exchange.
    """

    def __init__(self, comm: Comm, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._comm, self._optimizers, self._device = comm, optimizers, device
        self._steps = 0  # since the last comparison
        self._answer: Callable[[], list[Any]] | None = None  # of the last comparison: the host does not wait for it

    def are_due(self, steps: int) -> bool:
        """Count steps, say what the last comparison has found, and return whether it is time to `compare`."""
        if self._answer is not None:
            digests, rates = zip(*self._answer(), strict=True)
            self._answer = None
            if len({*digests}) > 1:
                self._optimizers = ()
                self._warn(rates)
        self._steps += steps
        return self._steps >= PERIOD

    def compare(self) -> None:
        """Begin to compare; all ranks call it together, the first time before training."""
        self._steps = 0
        if not self._optimizers:
            return
        given = [group.get("lr") for each in self._optimizers for group in each.param_groups]
        rates = [math.nan if rate is None else float(rate) for rate in given]  # Adafactor's may be None: it makes one
        sent, own = self._comm.sent_bytes, [float(zlib.crc32(repr(rates).encode())), *rates[:1]]
        every = self._comm.all_gather_rows(torch.tensor(own, dtype=torch.float64, device=self._device))
        self._comm.sent_bytes = sent  # it says what steps send
        self._answer = self._comm.to_host_async(every)

    def _warn(self, rates: Sequence[float]) -> None:
        if self._comm.rank == 0:
            of = ", ".join(f"{rate:g} on rank {rank}" for rank, rate in zip(self._comm.ranks, rates, strict=True))
            log.warning(
                f"Learning rates differ among ranks; that of the first parameter group is {of}. Each rank takes steps "
                f"of another size: if ranks exchange gradients, their weights drift apart. A ReduceLROnPlateau needs a "
                f"metric that is equal on all ranks: self.log(..., sync_dist=True), or an all-reduced one."
            )
