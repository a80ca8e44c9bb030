"""OkTopK: regions of the gradient are summed by their owners, in volume that does not grow with P."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.checks import check_headers, doubt, header, heed, intact, look_by_rank
from lightning_sparse.aggregators.messages import packed, unpacked
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.compressors.formats import received_indices
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import at, coalesce, compacted
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
        boundaries = self._boundaries(payload, mine, u, segment, comm, ctx)
        rows, row_of = _by_region(mine, boundaries, room, segment.numel)
        # Divided before they are added, so that sums stay in range.
        rows = Entries(rows.indices, rows.values / comm.size)
        chunks = compressor.pack(rows, segment, ctx, room)
        # What comes out of them; nothing of what was cut off.
        came = torch.nn.functional.pad(compressor.values(chunks).reshape(-1), (0, mine.indices.numel()))
        sent = Entries(mine.indices, came[row_of])

        messages = intact(torch.stack(comm.all_to_all(list(packed(chunks)))), comm, ctx)
        received = compressor.unpack(unpacked(messages, chunks), segment, ctx, room)
        indices, values = coalesce(list(zip(*received, strict=True)), segment.numel)
        largest = topk_indices(values, share)
        kept = Entries(indices[largest], values[largest])

        # With them goes what shows that all have cut the same regions.
        words = torch.cat([doubt(ctx, u.device), boundaries.sum(0, keepdim=True)])
        payload = compressor.pack(kept, segment, ctx, share)
        told = (words, *payload)
        messages = intact(torch.stack(comm.all_gather(packed(told))), comm, ctx)
        all_words, *payloads = unpacked(messages, told)
        heed(all_words[:, 0], ctx)
        of_this = f"At step {ctx.step} rank {comm.ranks[comm.rank]}"
        look_by_rank(
            all_words[:, 1] - words[1],
            lambda rank: RankFailure(
                f"{of_this} and rank {rank} have cut the gradient into different regions: a message about them is "
                f"corrupt."
            ),
            comm.ranks,
            comm,
            ctx,
        )
        regions = compressor.unpack(tuple(payloads), segment, ctx, share)
        indices, values = compacted((regions.indices.reshape(-1), regions.values.reshape(-1)), segment.numel)
        result = Entries(received_indices(indices, segment.numel), values)  # one region after the other
        used = at(result.indices, sent)
        # What rounding took from the sums stays with their owner.
        used -= at(
            result.indices, Entries(kept.indices, kept.values - compressor.values(payload)[: kept.values.numel()])
        )
        return (result,), Entries(*compacted((result.indices, used * comm.size), segment.numel))

    def _boundaries(
        self, payload: Payload, mine: Entries, u: Tensor, segment: Segment, comm: Comm, ctx: Context
    ) -> Tensor:
        """Compare headers, and return where regions 1 to P - 1 start, int64."""
        known, mark = ctx.state.get("boundaries"), 0
        if not ctx.settled:
            # They may come from a checkpoint. A rank may have none, or others', for want of its side file.
            known = None if known is None or known.numel() != comm.size - 1 else known
            mark = -1 if known is None else zlib.crc32(repr(comm.to_host_async(known)()).encode())
        words = torch.cat([header(payload, u, segment, ctx), torch.full((1,), mark, device=u.device)])
        rows = torch.stack(comm.all_gather(words))
        check_headers(rows[:, :2], segment, comm, ctx, at_once=not ctx.settled)
        anew = ctx.step % self.refresh == 0
        if anew or not ctx.settled:
            count = (mine.indices < segment.numel).sum()
            quantiles = torch.arange(1, comm.size, device=u.device) * count // comm.size
            starts = torch.nn.functional.pad(mine.indices, (0, 1), value=segment.numel)[quantiles]
            # Also where they may not be needed: within TwoLevel other groups of ranks, whose files are all there, make
            # the same calls.
            comm.all_reduce(starts)
            if anew or mark == -1 or bool((rows[:, 2] != mark).any()):
                ctx.state["boundaries"] = starts // comm.size
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


def _by_region(entries: Entries, boundaries: Tensor, room: int, numel: int) -> tuple[Entries, Tensor]:
    """Return the largest entries of each region, `room` at most, padded.

    Returns:
        Entries of shape (regions, room), and for each of the given entries where in these it is, counted through; past
        their end for one that is not there.
    """
    indices, values = entries
    regions, count = boundaries.numel() + 1, indices.numel()
    region = torch.searchsorted(boundaries, indices, right=True).masked_fill_(indices >= numel, regions)
    start = torch.searchsorted(region, torch.arange(regions + 1, device=indices.device))[region]
    places = torch.arange(count, device=indices.device)
    # Region by region, the largest first, of equal ones the first.
    order = values.abs().argsort(descending=True, stable=True)
    order = order[region[order].argsort(stable=True)]
    chosen = torch.empty_like(region).index_copy_(0, order, places - start) < room
    chosen &= region < regions
    before = chosen.cumsum(0) - chosen.long()
    where = torch.where(chosen, region * room + before - before[start], regions * room + places)
    rows = Entries(indices.new_full((regions * room + count,), numel), values.new_zeros(regions * room + count))
    for part, given in zip(rows, entries, strict=True):
        part.index_copy_(0, where, given)
    return Entries(*(part[: regions * room].view(regions, room) for part in rows)), where
