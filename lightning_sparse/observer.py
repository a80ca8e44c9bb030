"""Observers of a reduction. Local gradients and residuals exist only while a segment is being reduced."""

from __future__ import annotations

from torch import Tensor

from lightning_sparse.compressors.base import Update
from lightning_sparse.context import Context


class Observer:
    """Receives calls for every segment while it is in `Reducer.observers`. It must not modify its arguments.

    The thread that reduces makes the calls, in this order for each segment. Training waits for them.
    """

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        """Observe this rank's raw gradients, 1-D, one per parameter. `ctx.state` holds the residual before the step."""

    def compensated(self, u: Tensor, ctx: Context) -> None:
        """Observe u, 1-D fp32: the input of the compressor."""

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        """Observe the part of u that went into the result.

        If all of u was sent, `applied` is u itself, which now holds the sum over the ranks.
        """

    def written(self, grads: list[Tensor], ctx: Context) -> None:
        """Observe the gradients after they were overwritten with the result of all ranks."""
