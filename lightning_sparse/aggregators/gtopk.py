"""GlobalTopK: the k largest entries of the sum over all ranks, in O(k log P)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator, sends_entries
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import coalesce, drop_empty, lookup
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class GlobalTopK(Aggregator[Sparsifier]):
    """Merges the ranks' selections pair by pair, and keeps the k largest each time (Shi et al. 2019, arXiv 1901.04359).

    Let Q be the largest power of two that is at most P:

    1. Rank Q + i sends its entries to rank i, which merges them with its own: it sums them and keeps the k largest.
    2. In round j of log₂ Q, ranks i and i xor 2ʲ swap their entries, and both merge them to the same result.
    3. Rank i sends the result to rank Q + i.

    An entry of this rank that is not in the result stays in its residual. A merge may drop a sum whose index is in the
    result nevertheless, because other ranks' part of the sum was kept. Then the lowest rank of the merge takes the
    dropped value back. So nothing is lost, which the published scheme does not guarantee.
    """

    def __call__(self, u: Tensor, compressor: Sparsifier, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        rank, size, numel = exchange.rank, exchange.size, ctx.segment.numel
        half = 1 << size.bit_length() - 1
        k, capacity = compressor.count(numel, ctx.density), compressor.capacity(numel, ctx.density)
        encoding = compressor.encoding  # encodes any entries, because sums are not a compressor's selection
        _, own = exchange.compress(u, compressor)
        assert isinstance(own, Entries)
        # Divide before adding, so that sums stay in range.
        result, returned = Entries(own.indices, own.values / size), []

        def swap(peer: int, owner: bool) -> Entries:
            """Exchange results with a peer; the owner keeps the rounding errors of the values that it sends."""
            nonlocal result
            payload, rounded = encoding.encode(result, numel, capacity)
            if owner:
                returned.append(Entries(result.indices, result.values - rounded.values))
            result = rounded
            return encoding.decode(exchange.sendrecv(payload, peer), numel, capacity)

        def merge(lower: Entries, upper: Entries) -> Entries:
            indices, values = coalesce([lower, upper], numel)
            kept = topk_indices(values, k)
            returned.append(Entries(indices, values.index_fill(0, kept, 0)))  # the dropped sums
            return Entries(indices[kept], values[kept])

        partner = next((other for other in (rank - half, rank + half) if 0 <= other < size), rank)
        if half < size:
            theirs = swap(partner, True)
            if rank < partner:
                result = merge(result, theirs)
        for bit in (1 << j for j in range(half.bit_length() - 1)):
            # Ranks with equal high bits have identical results. The lowest of them keeps the dropped entries.
            theirs = swap(rank ^ bit if rank < half else rank, rank < half and not rank & bit - 1)
            if rank < half:
                result = merge(theirs, result) if rank & bit else merge(result, theirs)
                if rank & (2 * bit - 1):
                    returned.pop()
        if half < size:
            theirs = swap(partner, rank == 0)
            result = theirs if rank >= half else result

        applied = lookup(result.indices, own)
        for indices, values in returned:
            applied += lookup(result.indices, (indices, values * -size))
        return result, Entries(*drop_empty((result.indices, applied), numel))

    def nbytes(self, compressor: Sparsifier, segment: Segment, density: float | None, size: int) -> float:
        numel = segment.numel
        return compressor.encoding.nbytes(numel, compressor.capacity(numel, density)) * self.messages(size)

    def messages(self, size: int) -> int:
        half = 1 << size.bit_length() - 1
        return half.bit_length() - 1 + 2 * (half < size)

    def supports(self, compressor: Compressor) -> bool:
        return sends_entries(compressor)
