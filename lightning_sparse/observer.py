"""Looking at gradients on their way: local ones and residuals exist only while a segment is being reduced."""

from __future__ import annotations

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment


class Observer:
    """Is shown every segment while it stands in `Reducer.observers`, and must leave all it sees as it is.

    The calls come in the thread that reduces, in this order for each segment. Work that is not elementary belongs
    elsewhere: training waits for it.
    """

    def gradients(self, segment: Segment, grads: list[Tensor], ctx: Context) -> None:
        """See this rank's raw gradients, 1-D, one per parameter, and in `ctx.state` what was kept so far."""

    def compensated(self, segment: Segment, u: Tensor, ctx: Context) -> None:
        """See u, 1-D fp32: what the compressor gets."""

    def aggregated(self, segment: Segment, u: Tensor, used: Payload, compressor: Compressor, ctx: Context) -> None:
        """See what of u went into the result, as a payload of `compressor`.

        Where everything is sent, u has been summed up in place by now, and `used` is u.
        """
