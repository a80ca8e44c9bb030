"""Looking at gradients on their way: local gradients and residuals exist only while a segment is being reduced."""

from __future__ import annotations

from torch import Tensor

from lightning_sparse.compressors.base import Update
from lightning_sparse.context import Context


class Observer:
    """Is called for every segment while it is in `Reducer.observers`, and must not change what it is given.

    The calls come in the thread that reduces, in this order for each segment. Training waits for them.
    """

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        """See this rank's raw gradients, 1-D, one per parameter, and in `ctx.state` the residual before the step."""

    def compensated(self, u: Tensor, ctx: Context) -> None:
        """See u, 1-D fp32: the input of the compressor."""

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        """See the part of u that went into the result.

        If everything was sent, `applied` is u itself, and holds the sum over the ranks by now.
        """

    def written(self, grads: list[Tensor], ctx: Context) -> None:
        """See what has taken the place of this rank's raw gradients: the result of all ranks."""
