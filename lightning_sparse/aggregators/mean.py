"""The mean: by all-gather of payloads, or by all-reduce where values can be summed on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class Mean(Aggregator[Compressor]):
    """Mean by all-gather: every rank receives all payloads and adds them up in rank order."""

    applies_all_sent = True

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        payload, applied = exchange.compress(u, compressor)
        return compressor.mean(exchange.all_gather(payload), ctx), applied

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * (size - 1)

    def messages(self, size: int) -> int:
        return size - 1


@dataclass(frozen=True)
class AllReduceMean(Aggregator[Compressor]):
    """Mean by all-reduce of the values, for compressors whose ranks all send the same indices, or everything."""

    applies_all_sent = True

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        _, applied = exchange.compress(u, compressor)
        exchange.agree()
        values = applied.values if isinstance(applied, Entries) else applied
        # In place where the values are u itself: a dense segment must not cost a second buffer.
        total = values if values is u else values.clone()
        # Divided before the sum, as DDP does: equal to the last bit at two ranks, and sums stay in range.
        exchange.all_reduce(total.div_(exchange.size))
        return Entries(applied.indices, total) if isinstance(applied, Entries) else total, applied

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return 2 * compressor.nbytes(segment, density) * (size - 1) / size

    def messages(self, size: int) -> int:
        return 3 * (size - 1)

    def supports(self, compressor: Compressor) -> bool:
        return compressor.summable
