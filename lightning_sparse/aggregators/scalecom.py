"""ScaleCom: one rank selects for all, so that the values can be summed up on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator, check_headers, header, intact, packed, unpacked
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.compressors.formats import check_indices
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class ScaleCom(Aggregator):
    """Cyclic local selection (Chen et al. 2020, NeurIPS, "ScaleCom"): at most 3k words, whatever P.

    1. The ranks lead in turn: the leader selects from its own u, and broadcasts the indices, as int32.
    2. All ranks take their own values there, which are averaged by all-reduce.

    What accumulates in the residuals of all ranks is alike enough for the leader's choice to suit the others.
    """

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        assert isinstance(compressor, Sparsifier)
        # First of all: who leads follows from the step, which has to be the same everywhere.
        check_headers(comm.all_gather(header((u,), u, segment, ctx)), segment, comm, ctx, at_once=True)
        leader = (ctx.step + segment.index) % comm.size
        words = torch.zeros(1 + compressor.capacity(segment.numel, ctx.density), dtype=torch.int32, device=u.device)
        if comm.rank == leader:
            chosen = compressor.select(u, segment, ctx)
            words[0] = chosen.numel()
            words[1 : 1 + chosen.numel()] = chosen
        (words,) = unpacked(intact(comm.broadcast(packed((words,)), leader), comm), (words,))
        count = int(words[0])
        if not 0 <= count < words.numel():
            raise ValueError(f"A payload for at most {words.numel() - 1} entries says it holds {count}: it is corrupt.")
        indices = words[1 : 1 + count].long()
        check_indices(indices, segment.numel)
        values = u.index_select(0, indices)
        total = values / comm.size
        if total.numel():
            comm.all_reduce(total)
        return (Entries(indices, total),), Entries(indices, values)

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        assert isinstance(compressor, Sparsifier)
        capacity = compressor.capacity(segment.numel, density)
        # Every rank leads once in P steps.
        return 4 * capacity / size + 8 * capacity * (size - 1) / size

    def rounds(self, size: int) -> int:
        return 3 * (size - 1) + (size - 1).bit_length()

    def supports(self, compressor: Compressor) -> bool:
        # Sums of rounded values would have to be rounded again on the way.
        return isinstance(compressor, Sparsifier) and not compressor.summable and compressor.value_format == "float32"
