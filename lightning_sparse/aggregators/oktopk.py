"""OkTopK: regions of the gradient are summed by their owners, in volume that does not grow with P."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import (
    Aggregator,
    first_to_blame,
    header,
    not_finite,
    out_of_step,
    packed,
    unpacked,
)
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import at, coalesce
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class OkTopK(Aggregator):
    """Near-optimal sparse all-reduce (Li & Hoefler 2022, arXiv 2201.07598): at most 6k(P - 1)/P words.

    1. Every `refresh` steps the ranks agree on P regions with about equally many entries: the boundaries are the mean
       of the quantiles of all ranks' indices.
    2. Each rank sends its entries to the owners of their regions, 2k/P to each at most, the largest.
    3. The owner adds up, and keeps the k/P largest sums.
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
        fingerprint, wrong = header(payload, u, segment, ctx).tolist()
        cuts = torch.searchsorted(mine.indices, self._boundaries(mine, segment, comm, ctx)).tolist()

        sent, chunks = [], []
        for first, last in zip([0, *cuts], [*cuts, mine.indices.numel()], strict=True):
            region = Entries(mine.indices[first:last], mine.values[first:last])
            largest = topk_indices(region.values, room)
            # Divided before they are added, so that sums stay in range.
            region = Entries(region.indices[largest], region.values[largest] / comm.size)
            region_payload = compressor.pack(region, segment, ctx, room)
            sent.append(compressor.unpack(region_payload, segment, ctx, room))
            chunks.append((torch.tensor([fingerprint, comm.rank, wrong], device=u.device), *region_payload))

        received, blame = [], (comm.rank, wrong)
        for rank, chunk in enumerate(comm.all_to_all([packed(chunk) for chunk in chunks])):
            words, *parts = unpacked(chunk, chunks[0])
            their_fingerprint, *their_blame = words.tolist()
            if their_fingerprint != fingerprint:
                raise out_of_step(rank, comm.rank, segment, ctx)
            blame = first_to_blame(blame, tuple(their_blame))
            received.append(compressor.unpack(tuple(parts), segment, ctx, room))
        indices, values = coalesce(received)
        largest = topk_indices(values, share)
        kept = Entries(indices[largest], values[largest])

        told = (torch.tensor(blame, device=u.device), *compressor.pack(kept, segment, ctx, share))
        regions = []
        for row in comm.all_gather(packed(told)):
            words, *parts = unpacked(row, told)
            blame = first_to_blame(blame, tuple(words.tolist()))
            regions.append(compressor.unpack(tuple(parts), segment, ctx, share))
        if blame[1]:
            raise not_finite(blame[1], blame[0], segment, ctx)
        # The regions follow one another.
        result = Entries(torch.cat([r.indices for r in regions]), torch.cat([r.values for r in regions]))
        used = at(result.indices, Entries(torch.cat([s.indices for s in sent]), torch.cat([s.values for s in sent])))
        # What rounding took from the sums stays with their owner.
        used -= at(result.indices, Entries(kept.indices, kept.values - regions[comm.rank].values))
        return (result,), Entries(result.indices, used * comm.size)

    def _boundaries(self, mine: Entries, segment: Segment, comm: Comm, ctx: Context) -> Tensor:
        """Return where regions 1 to P - 1 start."""
        known = ctx.state.get("boundaries")
        if known is None or known.numel() != comm.size - 1 or ctx.step % self.refresh == 0:
            quantiles = torch.arange(1, comm.size, device=mine.indices.device) * mine.indices.numel() // comm.size
            starts = mine.indices[quantiles].double() if mine.indices.numel() else quantiles.double()
            comm.all_reduce(starts)
            ctx.state["boundaries"] = starts / comm.size
        return ctx.state["boundaries"]

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        assert isinstance(compressor, Sparsifier)
        rooms = _rooms(compressor.target(segment.numel, density), size)
        return (size - 1) * sum(compressor.entry_bytes(segment.numel, room) for room in rooms)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sparsifier) and not compressor.summable


def _rooms(k: int, size: int) -> tuple[int, int]:
    """Return how many entries a rank may send to an owner, and how many an owner keeps."""
    return -(-2 * k // size), -(-k // size)
