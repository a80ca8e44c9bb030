"""TwoLevel: dense inside a host, sparse between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator, Mean, check_headers, header, intact, packed, unpacked
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload, unpadded
from lightning_sparse.compressors.formats import check_indices
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.write_back import coalesce
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
        check_headers(comm.all_gather(header((u,), u, segment, ctx)), segment, comm, ctx, at_once=True)
        count = self.ranks_per_node
        first = comm.rank // count * count
        node = comm.sub(range(first, first + count), counted=False)
        across = comm.sub(range(comm.rank % count, comm.size, count))

        mean = node.reduce_scatter(u).div_(count)
        part = self._part(segment, node.rank)
        inner = replace(ctx, rank=across.rank, scan=None, cache={})
        agreed, payload = self.between(mean, part, compressor, across, inner)
        assert not isinstance(agreed, Tensor)  # sparsifiers hand out entries
        ctx.sound = inner.sound
        result, used = unpadded(Entries(*coalesce(agreed)), part), compressor.unpack(payload, part, inner)

        starts = [self._part(segment, rank).start - segment.start for rank in range(count)]
        most = self._part(segment, 0).numel  # the first parts are the longest
        parts = _all_gather_ragged(node, (result.indices, result.values, used.indices), most)
        for rank, (theirs, values, used_there) in enumerate(parts):
            for received in (theirs, used_there):
                check_indices(received, self._part(segment, rank).numel)
            if theirs.numel() != values.numel():
                raise ValueError(f"{theirs.numel()} indices came with {values.numel()} values: a payload is corrupt.")
        indices = torch.cat([start + row[0] for start, row in zip(starts, parts, strict=True)])
        taken = torch.cat([start + row[2] for start, row in zip(starts, parts, strict=True)])
        mine = u[taken]
        # What was rounded, or not used, of the sum.
        here = sum(row[2].numel() for row in parts[: node.rank])
        mine[here : here + used.indices.numel()] += (used.values - mean[used.indices]) * count
        return (Entries(indices, torch.cat([row[1] for row in parts])),), Entries(taken, mine)

    def _part(self, segment: Segment, rank: int) -> Segment:
        """Return the part of a segment that a rank of the host adds up, as one parameter: `tensor_split`'s cut."""
        each, more = divmod(segment.numel, self.ranks_per_node)
        start = segment.start + rank * each + min(rank, more)
        return Segment(segment.index, segment.names[:1], ((each + (rank < more),),), start)

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


def _all_gather_ragged(comm: Comm, parts: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """Return every rank's tensors, 1-D, whose lengths may differ from rank to rank, `most` elements at most."""
    mine = torch.tensor([part.numel() for part in parts], device=parts[0].device)
    lengths = torch.stack(comm.all_gather(mine))
    if not bool(((lengths >= 0) & (lengths <= most)).all()) or not torch.equal(lengths[comm.rank], mine):
        raise ValueError(f"Payloads for at most {most} entries say they hold {lengths.tolist()}: one is corrupt.")
    rooms = [
        torch.nn.functional.pad(part, (0, int(longest) - part.numel()))
        for part, longest in zip(parts, lengths.amax(0), strict=True)
    ]
    return [
        [part[:length] for part, length in zip(unpacked(intact(row, comm), rooms), own, strict=True)]
        for row, own in zip(comm.all_gather(packed(rooms)), lengths.tolist(), strict=True)
    ]
