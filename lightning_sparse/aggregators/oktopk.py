"""OkTopK: owners sum regions of the gradient; the volume does not grow with P."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator, sends_entries
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.pack import check_indices
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import coalesce, drop_empty, lookup
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class OkTopK(Aggregator[Sparsifier]):
    """Near-optimal sparse all-reduce (Li & Hoefler 2022, arXiv 2201.07598): about 6k(P - 1)/P words.

    1. Once in `refresh` steps the ranks agree on P regions with about equal numbers of entries. The boundaries are the
       mean of the quantiles of all ranks' indices.
    2. Each rank sends its entries to the owners of their regions: to each owner the ⌈2k/P⌉ largest at most.
    3. The owner sums the entries and keeps the ⌈k/P⌉ largest sums.
    4. All ranks gather the owners' sums.

    Entries that exceed the capacity in 2, and entries that owners drop in 3, stay in the residuals of their senders.
    The paper reuses thresholds in several steps, because its exact selection is slow. Here exact selection is fast. So
    each region selects exactly k/P entries, and no balancing is needed afterwards.

    Attributes:
        refresh: number of steps between updates of the regions.
    """

    refresh: int = 64

    rounds = 3
    state = (StateSpec("boundaries", per="segment", resize="replicate"),)

    def __post_init__(self) -> None:
        if self.refresh < 1:
            raise ValueError(f"OkTopK(refresh={self.refresh!r}): at least one step.")

    def __call__(self, u: Tensor, compressor: Sparsifier, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        size, numel, encoding = exchange.size, ctx.segment.numel, compressor.encoding
        send_capacity, keep_capacity = _capacities(compressor.count(numel, ctx.density), size)
        _, own = exchange.compress(u, compressor)
        assert isinstance(own, Entries)
        boundaries = self._boundaries(own, exchange, ctx)
        exchange.pin(boundaries)
        rows, row_of = _by_region(own, boundaries, send_capacity, numel)
        # Divide before adding, so that sums stay in range.
        chunks, rounded = encoding.encode(Entries(rows.indices, rows.values / size), numel, send_capacity)
        # Values after encoding; 0 for entries that exceed the capacity.
        sent_values = torch.nn.functional.pad(rounded.values.reshape(-1), (0, own.indices.numel()))[row_of]

        received = encoding.decode(exchange.all_to_all(chunks), numel, send_capacity)
        indices, values = coalesce(received.lists, numel)
        largest = topk_indices(values, keep_capacity)
        kept = Entries(indices[largest], values[largest])

        payload, rounded = encoding.encode(kept, numel, keep_capacity)
        regions = encoding.decode(exchange.all_gather(payload), numel, keep_capacity)
        indices, values = drop_empty((regions.indices.reshape(-1), regions.values.reshape(-1)), numel)
        update = Entries(check_indices(indices, numel), values)  # ascending, because regions follow each other
        applied = lookup(update.indices, (own.indices, sent_values))
        # The owner keeps the rounding errors of its sums.
        applied -= lookup(update.indices, (kept.indices, kept.values - rounded.values))
        return update, Entries(*drop_empty((update.indices, applied * size), numel))

    def _boundaries(self, own: Entries, exchange: Exchange, ctx: Context) -> Tensor:
        """Return the first indices of regions 1 to P - 1, int64. The ranks agree on them once in `refresh` steps."""
        numel, size, device = ctx.segment.numel, exchange.size, own.indices.device
        kept = ctx.state.get("boundaries")
        digest = 0
        if not exchange.in_sync:
            # Boundaries may come from a checkpoint. If its sidecar file was missing, a rank has none, or others.
            valid = kept is not None and kept.numel() == size - 1
            digest = (
                zlib.crc32(repr(exchange.comm.to_host_async(kept)()).encode()) if kept is not None and valid else -1
            )
        (digests,) = exchange.agree((torch.full((1,), digest, device=device),), strict=True)
        refresh = ctx.turn(self.refresh) == 0
        if not exchange.in_sync:
            refresh = refresh or digest == -1 or bool((digests != digest).any())
        if refresh or not exchange.in_sync:
            count = (own.indices < numel).sum()
            quantiles = torch.arange(1, size, device=device) * count // size
            starts = torch.nn.functional.pad(own.indices, (0, 1), value=numel)[quantiles]
            # In an exchange that is not in sync, all ranks make this call. Within TwoLevel, other groups of ranks may
            # have valid boundaries, but they must make the same calls.
            exchange.all_reduce(starts)
            if refresh:
                ctx.state["boundaries"] = starts // size
        return ctx.state["boundaries"]

    def nbytes(self, compressor: Sparsifier, segment: Segment, density: float | None, size: int) -> float:
        capacities = _capacities(compressor.count(segment.numel, density), size)
        return (size - 1) * sum(compressor.encoding.nbytes(segment.numel, capacity) for capacity in capacities)

    def supports(self, compressor: Compressor) -> bool:
        return sends_entries(compressor)


def _capacities(k: int, size: int) -> tuple[int, int]:
    """Return the largest numbers of entries that a rank sends to an owner, and that an owner keeps."""
    return -(-2 * k // size), -(-k // size)


def _by_region(entries: Entries, boundaries: Tensor, capacity: int, numel: int) -> tuple[Entries, Tensor]:
    """Return the largest entries of each region, at most `capacity`, with padding.

    Returns:
        Entries of shape (regions, capacity), and the flat position of each given entry in them. The position is past
        their end for padding and for an entry that exceeds the capacity.
    """
    indices, values = entries
    regions, count = boundaries.numel() + 1, indices.numel()
    region = torch.searchsorted(boundaries, indices, right=True).masked_fill_(indices >= numel, regions)
    start = torch.searchsorted(region, torch.arange(regions + 1, device=indices.device))[region]
    positions = torch.arange(count, device=indices.device)
    # Sort by region, then by magnitude, and then by index.
    order = values.abs().argsort(descending=True, stable=True)
    order = order[region[order].argsort(stable=True)]
    chosen = torch.empty_like(region).index_copy_(0, order, positions - start) < capacity
    chosen &= region < regions
    before = chosen.cumsum(0) - chosen.long()
    target = torch.where(chosen, region * capacity + before - before[start], regions * capacity + positions)
    rows = Entries(indices.new_full((regions * capacity + count,), numel), values.new_zeros(regions * capacity + count))
    for part, given in zip(rows, entries, strict=True):
        part.index_copy_(0, target, given)
    return Entries(*(part[: regions * capacity].view(regions, capacity) for part in rows)), target
