"""TwoLevel: dense exchange within a node, compressed exchange between nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.mean import Mean
from lightning_sparse.compressors.base import Compressor, Entries, Update, add_
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.pack import check_indices, gather
from lightning_sparse.kernels.write_back import coalesce, drop_empty, lookup
from lightning_sparse.layout import Segment, cut


@dataclass(frozen=True)
class TwoLevel(Aggregator[Compressor]):
    """Hierarchical exchange for ranks that share a network card (Shi et al. 2021, arXiv 2010.10458, "HiTopKComm").

    1. The ranks of a node average densely; each rank averages one part of the segment (reduce-scatter).
    2. Ranks with the same part, one on each node, exchange it in compressed form with the aggregator `inter_node`. For
       this aggregator a node is one worker: it has one vote, and one Byzantine rank makes the whole node Byzantine.
    3. The ranks of a node gather the results of all parts.

    So a node sends one payload instead of one for each of its ranks. Each rank has its own residual. If an entry is in
    the result, each rank subtracts its own value. If `inter_node` omits a part of the node's sum, it stays in the
    residual of the rank that owns this part of the segment.

    Attributes:
        inter_node: the aggregator between nodes.
        ranks_per_node: number of ranks on each node; ranks are numbered node by node, as torchrun and Lightning do.
    """

    inter_node: Aggregator[Any] = Mean()  # noqa: RUF009
    ranks_per_node: int = 1

    shards_segment = True

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"TwoLevel(ranks_per_node={self.ranks_per_node!r}): at least one rank on each node.")
        if isinstance(self.inter_node, TwoLevel):
            raise ValueError("TwoLevel(inter_node=TwoLevel(...)): there are two levels, nodes and their ranks.")

    @property
    def state(self) -> tuple[StateSpec, ...]:  # type: ignore[override]
        """State of `inter_node`."""
        return self.inter_node.state

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """Value of `inter_node`."""
        return self.inter_node.averages

    @property
    def ranks_per_link(self) -> int:  # type: ignore[override]
        """Number of ranks of a node."""
        return self.ranks_per_node

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        segment, count = ctx.segment, self.ranks_per_node
        exchange.check_finite(u)  # check before summing, so that the error names the rank
        exchange.agree()
        intra = exchange.sub(self.node_of(exchange.rank), counted=False)
        parts = cut(segment, count)
        part = parts[intra.rank]
        members = range(exchange.rank % count, exchange.size, count)
        inner = replace(ctx, segment=part, rank=members.index(exchange.rank), stats=None)
        inter = exchange.sub(members, ctx=inner)

        mean = intra.reduce_scatter_mean(u)
        update, applied = self.inter_node(mean, compressor, inter, inner)
        if isinstance(update, Tensor):
            return _dense(u, mean, update, applied, intra, segment)
        assert isinstance(applied, Entries)  # like the result
        update = Entries(*coalesce(update.lists, part.numel))

        # An update has at most one entry per element, and the first parts are the longest.
        longest = parts[0].numel
        capacity = min(longest, self.inter_node.capacity(compressor, longest, ctx.density, inter.size))

        def to_segment_indices(indices: Tensor) -> Tensor:
            """Convert indices of the part to int32 indices of the segment, padded to the capacity."""
            moved = torch.where(indices < part.numel, indices + (part.start - segment.start), segment.numel)
            return _resized(moved.int(), capacity, segment.numel)

        own = to_segment_indices(applied.indices)
        rows = intra.all_gather((to_segment_indices(update.indices), _resized(update.values, capacity, 0), own))
        indices, values, taken = (row.reshape(-1) for row in rows)
        indices, values = drop_empty((indices, values), segment.numel)
        taken, _ = drop_empty((taken, taken != segment.numel), segment.numel)
        # Indices are ascending, because parts follow each other.
        indices, taken = check_indices(indices, segment.numel), check_indices(taken, segment.numel)
        # Rounding errors of the node's sum, and the part that was not applied.
        rest = (applied.values - gather(mean, applied.indices)) * count
        return Entries(indices, values), Entries(
            taken, gather(u, taken) + lookup(taken, (own.long(), _resized(rest, capacity, 0)))
        )

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        part = cut(segment, self.ranks_per_node)[0]
        return self.inter_node.nbytes(compressor, part, density, size // self.ranks_per_node)

    def messages(self, size: int) -> int:
        return self.inter_node.messages(size // self.ranks_per_node)  # messages within a node take negligible time

    def supports(self, compressor: Compressor) -> bool:
        # LowRank needs whole matrices, but a part of a segment may cut them.
        return self.inter_node.supports(compressor) and not isinstance(compressor, LowRank)

    def check_size(self, size: int) -> None:
        if size % self.ranks_per_node:
            raise ValueError(
                f"{self!r} among {size} ranks: they have to be a multiple of ranks_per_node, with as many on each node."
            )
        self.inter_node.check_size(size // self.ranks_per_node)


def _dense(
    u: Tensor, mean: Tensor, update: Tensor, applied: Update, intra: Exchange, segment: Segment
) -> tuple[Tensor, Tensor]:
    """Return the result and the applied part of `u` for the segment, from those of this rank's part.

    Args:
        u: this rank's `u` of the segment.
        mean: mean over the node's ranks for this rank's part.
        update: result for the part.
        applied: the part of `mean` that went into the result.
        intra: exchange between the ranks of the node.
    """
    parts = cut(segment, intra.size)
    part = parts[intra.rank]
    (rows,) = intra.all_gather((_resized(update, parts[0].numel, 0),))
    result = torch.cat([row[: each.numel] for row, each in zip(rows, parts, strict=True)])
    taken = u.clone()
    taken[part.start - segment.start :][: part.numel].sub_(add_(mean, applied, -1), alpha=intra.size)
    return result, taken


def _resized(x: Tensor, size: int, value: float) -> Tensor:
    """Cut `x` (1-D) to `size` elements, or pad it with a value."""
    return torch.nn.functional.pad(x, (0, size - x.numel()), value=value)
