"""TwoLevel: dense inside a node, compressed between nodes."""

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
    """For several ranks behind one network card (Shi et al. 2021, arXiv 2010.10458, "HiTopKComm").

    1. The ranks of a node average densely, each one part of the segment (reduce-scatter).
    2. Ranks with the same part, one on each node, exchange it compressed, by the aggregator `inter_node`, to which a
       node is one worker: it has one vote, and one Byzantine rank makes it Byzantine.
    3. The ranks of a node gather the results of all parts.

    So a node sends one payload, not one for each of its ranks. Residuals stay with each rank: where an entry is in the
    result, each rank subtracts its own value; what `inter_node` left out of the node's sum stays with the rank whose
    part of the segment it was.

    Attributes:
        inter_node: the aggregator between nodes.
        ranks_per_node: number of ranks on each node; ranks are numbered node by node, as torchrun and Lightning do.
    """

    inter_node: Aggregator[Any] = Mean()  # noqa: RUF009
    ranks_per_node: int = 1

    divides = True

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"TwoLevel(ranks_per_node={self.ranks_per_node!r}): at least one rank on each node.")
        if isinstance(self.inter_node, TwoLevel):
            raise ValueError("TwoLevel(inter_node=TwoLevel(...)): there are two levels, nodes and their ranks.")

    @property
    def state(self) -> tuple[StateSpec, ...]:  # type: ignore[override]
        """What `inter_node` keeps."""
        return self.inter_node.state

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """As `inter_node`."""
        return self.inter_node.averages

    @property
    def ranks_per_link(self) -> int:  # type: ignore[override]
        """The ranks of a node."""
        return self.ranks_per_node

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        segment, count = ctx.segment, self.ranks_per_node
        exchange.check_finite(u)  # before the sums, so that the error names the rank
        exchange.agree()
        first = exchange.rank // count * count
        intra = exchange.sub(range(first, first + count), counted=False)
        parts = cut(segment, count)
        part = parts[intra.rank]
        members = range(exchange.rank % count, exchange.size, count)
        inner = replace(ctx, segment=part, rank=members.index(exchange.rank), stats=None)
        inter = exchange.sub(members, ctx=inner)

        mean = intra.reduce_scatter_mean(u)
        update, applied = self.inter_node(mean, compressor, inter, inner)
        if isinstance(update, Tensor):
            return _dense(u, mean, update, applied, intra, segment)
        assert isinstance(applied, Entries)  # as those of the result are
        update = Entries(*coalesce(update.lists, part.numel))

        # No update has more entries than there are elements; the first parts are the longest.
        longest = parts[0].numel
        capacity = min(longest, self.inter_node.capacity(compressor, longest, ctx.density, inter.size))

        def to_segment_indices(indices: Tensor) -> Tensor:
            """Return int32 indices of the segment for those of the part, padded to the capacity."""
            moved = torch.where(indices < part.numel, indices + (part.start - segment.start), segment.numel)
            return _resized(moved.int(), capacity, segment.numel)

        own = to_segment_indices(applied.indices)
        rows = intra.all_gather((to_segment_indices(update.indices), _resized(update.values, capacity, 0), own))
        indices, values, taken = (row.reshape(-1) for row in rows)
        indices, values = drop_empty((indices, values), segment.numel)
        taken, _ = drop_empty((taken, taken != segment.numel), segment.numel)
        # One part after the other, so they ascend.
        indices, taken = check_indices(indices, segment.numel), check_indices(taken, segment.numel)
        # The part of the node's sum that was rounded or not applied.
        rest = (applied.values - gather(mean, applied.indices)) * count
        return Entries(indices, values), Entries(
            taken, gather(u, taken) + lookup(taken, (own.long(), _resized(rest, capacity, 0)))
        )

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        part = cut(segment, self.ranks_per_node)[0]
        return self.inter_node.nbytes(compressor, part, density, size // self.ranks_per_node)

    def messages(self, size: int) -> int:
        return self.inter_node.messages(size // self.ranks_per_node)  # those inside a node take no time beside them

    def supports(self, compressor: Compressor) -> bool:
        # A part of a segment cuts matrices.
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
    """Return the result and what is applied of `u`, from those of this rank's part of the segment.

    Args:
        u: this rank's, of the segment.
        mean: of the node's ranks, of this rank's part.
        update: the result, of the part.
        applied: the part of `mean` that went into it.
        intra: between the ranks of the node.
        segment: all of it.
    """
    parts = cut(segment, intra.size)
    part = parts[intra.rank]
    (rows,) = intra.all_gather((_resized(update, parts[0].numel, 0),))
    result = torch.cat([row[: each.numel] for row, each in zip(rows, parts, strict=True)])
    taken = u.clone()
    taken[part.start - segment.start :][: part.numel].sub_(add_(mean, applied, -1), alpha=intra.size)
    return result, taken


def _resized(x: Tensor, size: int, value: float) -> Tensor:
    """Return `x` (1-D) with `size` elements: cut, or padded with a value."""
    return torch.nn.functional.pad(x, (0, size - x.numel()), value=value)
