"""OkTopK: regions of the gradient are summed by their owners, in volume that does not grow with P."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import (
    Aggregator,
    check_headers,
    header,
    intact,
    packed,
    unpacked,
    without_zeros,
)
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.compressors.formats import check_indices
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import at, coalesce
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class OkTopK(Aggregator):
    """Near-optimal sparse all-reduce (Li & Hoefler 2022, arXiv 2201.07598): about 6k(P - 1)/P words.

    1. Every `refresh` steps the ranks agree on P regions with about equally many entries: the boundaries are the mean
       of the quantiles of all ranks' indices.
    2. Each rank sends its entries to the owners of their regions, ⌈2k/P⌉ to each at most, the largest.
    3. The owner adds up, and keeps the ⌈k/P⌉ largest sums.
    4. All gather what the owners kept.

    What was cut off in 2, and what the owners did not keep in 3, stays with the ranks that had it. The paper reuses
    thresholds from step to step because exact selection is slow there; here it is not, so k/P entries are selected
    exactly in each region, and nothing has to be balanced afterwards.

    Attributes:
        refresh: number of steps for which the regions stay.
    """

    refresh: int = 64

    entries = (Entry("boundaries", per="segment", resize="replicate"),)

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"OkTopK(refresh={self.refresh!r}): at least one step.")

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        assert isinstance(compressor, Sparsifier)
        room, share = _rooms(compressor.target(segment.numel, ctx.density), comm.size)
        payload = compressor.compress(u, segment, ctx)
        mine = compressor.unpack(payload, segment, ctx)
        cuts = torch.searchsorted(mine.indices, self._boundaries(payload, mine, u, segment, comm, ctx)).tolist()

        if cuts != sorted(cuts):
            raise ValueError("The boundaries of the regions do not ascend: a payload was corrupt.")

        sent, chunks = [], []
        for first, last in zip([0, *cuts], [*cuts, mine.indices.numel()], strict=True):
            region = Entries(mine.indices[first:last], mine.values[first:last])
            largest = topk_indices(region.values, room)
            # Divided before they are added, so that sums stay in range.
            region = Entries(region.indices[largest], region.values[largest] / comm.size)
            chunks.append(compressor.pack(region, segment, ctx, room))
            # What comes out of it, unless that is the same.
            exact = compressor.value_format == "float32"
            sent.append(region if exact else compressor.unpack(chunks[-1], segment, ctx, room))

        messages = comm.all_to_all([packed(chunk) for chunk in chunks])
        intact(torch.cat(messages), comm)  # what adds up to zero in each does so in all
        received = [compressor.unpack(unpacked(message, chunks[0]), segment, ctx, room) for message in messages]
        indices, values = coalesce(received)
        largest = topk_indices(values, share)
        kept = Entries(indices[largest], values[largest])

        told = compressor.pack(kept, segment, ctx, share)
        messages = comm.all_gather(packed(told))
        intact(torch.cat(messages), comm)
        regions = [compressor.unpack(unpacked(message, told), segment, ctx, share) for message in messages]
        # The regions follow one another, or a rank has cut them differently.
        result = Entries(torch.cat([r.indices for r in regions]), torch.cat([r.values for r in regions]))
        check_indices(result.indices, segment.numel)
        used = at(result.indices, Entries(torch.cat([s.indices for s in sent]), torch.cat([s.values for s in sent])))
        # What rounding took from the sums stays with their owner.
        used -= at(result.indices, Entries(kept.indices, kept.values - regions[comm.rank].values))
        return (result,), without_zeros(Entries(result.indices, used * comm.size))

    def _boundaries(
        self, payload: Payload, mine: Entries, u: Tensor, segment: Segment, comm: Comm, ctx: Context
    ) -> Tensor:
        """Compare headers, and return where regions 1 to P - 1 start."""
        known = ctx.state.get("boundaries")
        checksum = -1 if known is None else zlib.crc32(repr(known.tolist()).encode())
        words = torch.cat([header(payload, u, segment, ctx), torch.tensor([checksum], device=u.device)])
        rows = comm.all_gather(words)
        check_headers([row[:2] for row in rows], segment, comm, ctx, at_once=True)
        alike, fits = all(int(row[2]) == checksum for row in rows), known is not None and known.numel() == comm.size - 1
        if ctx.step % self.refresh == 0 or (alike and not fits):
            quantiles = torch.arange(1, comm.size, device=mine.indices.device) * mine.indices.numel() // comm.size
            starts = mine.indices[quantiles].double() if mine.indices.numel() else quantiles.double()
            comm.all_reduce(starts)
            ctx.state["boundaries"] = starts / comm.size
        elif not alike:
            # A rank has none, or others', for want of its side file. No talk about it: within TwoLevel the other groups
            # of ranks, which know nothing of it, would be out of step. Equal regions do until the next time.
            places = torch.arange(1, comm.size, dtype=torch.float64, device=u.device)
            ctx.state["boundaries"] = places * segment.numel / comm.size
        return ctx.state["boundaries"]

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        assert isinstance(compressor, Sparsifier)
        rooms = _rooms(compressor.target(segment.numel, density), size)
        return (size - 1) * sum(compressor.entry_bytes(segment.numel, room) for room in rooms)

    def rounds(self, size: int) -> int:
        return 3 * (size - 1)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sparsifier) and not compressor.summable


def _rooms(k: int, size: int) -> tuple[int, int]:
    """Return how many entries a rank may send to an owner, and how many an owner keeps."""
    return -(-2 * k // size), -(-k // size)
