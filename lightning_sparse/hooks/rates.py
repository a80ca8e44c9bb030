"""Checks of learning rates during training: they are equal on all ranks, and none becomes 0 to freeze parameters."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_sparse.comm import Comm
from lightning_sparse.kernels.launch import to_device

log = logging.getLogger(__name__)

PERIOD = 100
"""Number of steps between comparisons. Each comparison sends 16 bytes and costs the latency of the link."""


class Rates:
    """Warns once, on rank 0, if learning rates differ among ranks. Those of a `ReduceLROnPlateau` may differ.

    Args:
        comm: the connection to the other ranks, which must be idle when `compare` is called.
        optimizers: the optimizers; all ranks have the same number of them.
        device: the device of the exchange.
        have_residuals: whether residuals of updates change weights, too. Then rank 0 also warns once if the rate of
            some parameters becomes 0.
    """

    def __init__(
        self, comm: Comm, optimizers: Sequence[Optimizer], device: torch.device, *, have_residuals: bool = False
    ) -> None:
        self._comm, self._optimizers, self._device = comm, optimizers, device
        self._warns_of_zero, self._earlier = have_residuals, list[float]()
        self._steps = 0  # since the last comparison
        self._answer: Callable[[], list[Any]] | None = None  # result of the last comparison, fetched without waiting

    def are_due(self, steps: int) -> bool:
        """Count steps, warn if the last comparison found a difference, and return whether to call `compare`."""
        if self._answer is not None:
            digests, rates = zip(*self._answer(), strict=True)
            self._answer = None
            if len({*digests}) > 1:
                self._optimizers = ()
                self._warn(rates)
        self._steps += steps
        return self._steps >= PERIOD

    def compare(self) -> None:
        """Begin a comparison. All ranks call it together, the first time before training."""
        self._steps = 0
        if not self._optimizers:
            return
        given = [group.get("lr") for each in self._optimizers for group in each.param_groups]
        rates = [math.nan if rate is None else float(rate) for rate in given]  # Adafactor may have None
        if self._warns_of_zero and any(rates) and any(was and not now for was, now in zip(self._earlier, rates)):  # noqa: B905
            self._warns_of_zero = False
            self._warn_of_zero()
        self._earlier = rates
        own = [float(zlib.crc32(repr(rates).encode())), rates[0] if rates else math.nan]
        with self._comm.uncounted():
            every = self._comm.all_gather(to_device(torch.tensor(own, dtype=torch.float64, device="cpu"), self._device))
        self._answer = self._comm.to_host_async(every)

    def _warn_of_zero(self) -> None:
        if self._comm.rank == 0:
            log.warning(
                "The learning rate of a parameter group has become 0. Its weights still change by the entries that "
                "wait in the residuals. To freeze them, call requires_grad_(False)."
            )

    def _warn(self, rates: Sequence[float]) -> None:
        if self._comm.rank == 0:
            of = ", ".join(f"{rate:g} on rank {rank}" for rank, rate in zip(self._comm.ranks, rates, strict=True))
            log.warning(
                f"Learning rates differ among ranks; that of the first parameter group is {of}. Each rank takes steps "
                f"of another size: if ranks exchange gradients, their weights drift apart. A ReduceLROnPlateau needs a "
                f"metric that is equal on all ranks: self.log(..., sync_dist=True), or an all-reduced one."
            )
