"""TwoLevel: dense inside a host, sparse between hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.checks import check_headers, doubt, header, heed, intact
from lightning_sparse.aggregators.mean import Mean
from lightning_sparse.aggregators.messages import packed, unpacked
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.compressors.formats import received_indices
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.pack import gather
from lightning_sparse.kernels.write_back import at, coalesce, compacted
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class TwoLevel(Aggregator):
    """For several ranks behind one network card (Shi et al. 2021, arXiv 2010.10458, "HiTopKComm").

    1. The ranks of a host add up densely, each one part of the segment (reduce-scatter).
    2. Ranks with the same part, one on each host, exchange it sparsely, by the aggregator `between`.
    3. The ranks of a host tell each other the results.

    So a host sends k entries, not k for each of its ranks. The residual stays with each rank: of an entry that went
    into the result, each rank's own part is used; what `between` did not use of their sum stays with the rank whose
    part it was.

    Attributes:
        between: the aggregator between hosts.
        ranks_per_node: number of ranks on each host; ranks are counted host by host, as torchrun and Lightning do.
    """

    between: Aggregator = Mean()  # noqa: RUF009
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"TwoLevel(ranks_per_node={self.ranks_per_node!r}): at least one rank on each host.")
        if isinstance(self.between, TwoLevel):
            raise ValueError("TwoLevel(between=TwoLevel(...)): there are two levels, hosts and their ranks.")

    @property
    def entries(self) -> tuple[Entry, ...]:  # type: ignore[override]
        """What `between` keeps."""
        return self.between.entries

    @property
    def sharing(self) -> int:  # type: ignore[override]
        """The ranks of a host."""
        return self.ranks_per_node

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        assert isinstance(compressor, Sparsifier)
        # Among all, so that all ranks learn of it, with the name of the parameter.
        check_headers(torch.stack(comm.all_gather(header((u,), u, segment, ctx))), segment, comm, ctx)
        count = self.ranks_per_node
        first = comm.rank // count * count
        node = comm.sub(range(first, first + count), counted=False)
        across = comm.sub(range(comm.rank % count, comm.size, count))

        mean = node.reduce_scatter(u).div_(count)
        part = self._part(segment, node.rank)
        inner = replace(ctx, rank=across.rank, scan=None, cache={})
        agreed, payload = self.between(mean, part, compressor, across, inner)
        assert not isinstance(agreed, Tensor)  # sparsifiers hand out entries
        result, used = Entries(*coalesce(agreed, part.numel)), compressor.unpack(payload, part, inner)

        # No result has more entries than have been selected, nor than there are; the first parts are the longest.
        longest = self._part(segment, 0).numel
        room = min(longest, across.size * compressor.capacity(longest, ctx.density))

        def told(indices: Tensor) -> Tensor:
            """Count the indices of a part within the segment, and pad them, as int32."""
            moved = torch.where(indices < part.numel, indices + (part.start - segment.start), segment.numel)
            return _resized(moved.int(), room, segment.numel)

        ctx.sound = inner.sound
        here = told(used.indices)
        parts = (doubt(ctx, u.device), told(result.indices), _resized(result.values, room, 0), here)
        messages = intact(torch.stack(node.all_gather(packed(parts))), node, ctx)
        doubts, *rows = unpacked(messages, parts)
        heed(doubts, ctx)
        indices, values, taken = (row.reshape(-1) for row in rows)
        indices, values = compacted((indices, values), segment.numel)
        taken, _ = compacted((taken, taken < segment.numel), segment.numel)
        # One part after the other.
        indices, taken = received_indices(indices, segment.numel), received_indices(taken, segment.numel)
        # What was rounded, or not used, of the sum.
        rest = (used.values - gather(mean, used.indices)) * count
        mine = gather(u, taken) + at(taken, (here.long(), _resized(rest, room, 0)))
        return (Entries(indices, values),), Entries(taken, mine)

    def _part(self, segment: Segment, rank: int) -> Segment:
        """Return the part of a segment that a rank of the host adds up, as one parameter: `tensor_split`'s cut."""
        each, more = divmod(segment.numel, self.ranks_per_node)
        start = segment.start + rank * each + min(rank, more)
        # What is wrong with it is so after adding up: before, all ranks look at their own.
        name = f"{segment.names[0]} and on, added up on a host"
        return Segment(segment.index, (name,), ((each + (rank < more),),), start)

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return self.between.nbytes(compressor, self._part(segment, 0), density, size // self.ranks_per_node)

    def rounds(self, size: int) -> int:
        return self.between.rounds(size // self.ranks_per_node)  # what goes on inside a host takes no time beside it

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sparsifier) and self.between.supports(compressor) and not compressor.summable

    def check_size(self, size: int) -> None:
        if size % self.ranks_per_node:
            raise ValueError(
                f"{self!r} among {size} ranks: they have to be a multiple of ranks_per_node, with as many on each host."
            )
        self.between.check_size(size // self.ranks_per_node)


def _resized(x: Tensor, size: int, value: float) -> Tensor:
    """Return `x` (1-D) with `size` elements: cut, or padded with a value."""
    return torch.nn.functional.pad(x, (0, size - x.numel()), value=value)
