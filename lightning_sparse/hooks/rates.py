"""Checks during training: learning rates are equal on all ranks and not 0, and all ranks have the same gradients."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_sparse.comm import Comm
from lightning_sparse.kernels.launch import to_device

log = logging.getLogger(__name__)

PERIOD = 100
"""Number of steps between comparisons. Each sends 16 bytes, for updates 8 more per parameter, and costs the latency of
the link."""


class Rates:
    """Warns once, on rank 0, if learning rates differ among ranks. Those of a `ReduceLROnPlateau` may differ.

    It also warns once if a parameter has a gradient on some ranks only.

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
        self._names = list[str]()  # parameters of the last comparison
        self._warns_of_missing = True
        self._answer: Callable[[], list[Any]] | None = None  # result of the last comparison, fetched without waiting

    def are_due(self, steps: int) -> bool:
        """Count steps, warn if the last comparison found a difference, and return whether to call `compare`."""
        if self._answer is not None:
            digests, rates, *used = zip(*self._answer(), strict=True)
            self._answer = None
            if len({*digests}) > 1:
                self._optimizers = ()
                self._warn(rates)
            if used:
                self._look_for_missing(used)
        self._steps += steps
        return self._steps >= PERIOD

    def compare(self, has_gradient: Mapping[str, bool] | None = None) -> None:
        """Begin a comparison. All ranks call it together, the first time before training.

        Args:
            has_gradient: for parameters whose updates are not linear in gradients, whether they have a gradient; the
                same names in the same order on all ranks.
        """
        self._steps = 0
        if not self._optimizers:
            return
        given = [group.get("lr") for each in self._optimizers for group in each.param_groups]
        rates = [math.nan if rate is None else float(rate) for rate in given]  # Adafactor may have None
        if self._warns_of_zero and any(rates) and any(was and not now for was, now in zip(self._earlier, rates)):  # noqa: B905
            self._warns_of_zero = False
            self._warn_of_zero()
        self._earlier = rates
        flags = has_gradient if has_gradient and self._warns_of_missing else {}
        self._names = [*flags]
        own = [float(zlib.crc32(repr(rates).encode())), rates[0] if rates else math.nan, *map(float, flags.values())]
        with self._comm.uncounted():
            every = self._comm.all_gather(to_device(torch.tensor(own, dtype=torch.float64, device="cpu"), self._device))
        self._answer = self._comm.to_host_async(every)

    def _look_for_missing(self, used: Sequence[Sequence[float]]) -> None:
        """Warn if a parameter has a gradient on some ranks only.

        Args:
            used: for each parameter of the last comparison, 1 or 0 by rank: whether it had a gradient.
        """
        # A rank without any gradient has left its batch out, as by a training_step that returns None.
        ranks = [rank for rank in range(self._comm.size) if any(flags[rank] for flags in used)]
        odd = [i for i, flags in enumerate(used) if len({flags[rank] for rank in ranks}) > 1]
        self._warns_of_missing = not odd
        if odd and self._comm.is_first:
            lacking = next(rank for rank in ranks if not used[odd[0]][rank])
            log.warning(
                f"Rank {self._comm.ranks[lacking]} has no gradient of {self._names[odd[0]]!r} in a step, and other "
                f"ranks have one. The mean of updates counts it as no change. So such parameters learn more slowly "
                f"than with ddp; {len(odd)} of {len(used)} had gradients on some ranks only. Exchange gradients: by "
                f"strategy='int4_ddp_find_unused_parameters_true', for a sharded model by 'dense_hsdp', and in plain "
                f"torch by attach with method='int4'."
            )

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
                f"metric that is equal on all ranks: self.log(..., sync_dist=True), or an all-reduced one. A schedule "
                f"that waits if a gradient scaler skips a step lags on one rank: step it always."
            )
