"""The mean, by all-gather of payloads, or by all-reduce if values can be summed in transit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class Mean(Aggregator[Compressor]):
    """Mean by all-gather: every rank receives all payloads and sums them in rank order."""

    applies_all_sent = True

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        payload, applied = exchange.compress(u, compressor)
        return exchange.all_gather_as(partial(compressor.mean, ctx=ctx), payload), applied

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * (size - 1)


@dataclass(frozen=True)
class AllReduceMean(Aggregator[Compressor]):
    """Mean by all-reduce of the values, if all ranks send the same indices, or all entries."""

    applies_all_sent, rounds = True, 3

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        _, applied = exchange.compress(u, compressor)
        exchange.agree()
        values = applied.values if isinstance(applied, Entries) else applied
        # Work in place if the values are u itself, so that a dense segment needs no second buffer.
        total = values if values is u else values.clone()
        # Divide before the sum, like DDP: sums stay in range, and with two ranks the result is bit-identical to DDP's.
        exchange.all_reduce(total.div_(exchange.size))
        return Entries(applied.indices, total) if isinstance(applied, Entries) else total, applied

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return 2 * compressor.nbytes(segment, density) * (size - 1) / size

    def supports(self, compressor: Compressor) -> bool:
        return compressor.summable
