"""ScaleCom: one rank selects for all, so that the values can be summed up on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator, check_headers, header, out_of_step
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class ScaleCom(Aggregator):
    """Cyclic local selection (Chen et al. 2020, NeurIPS, "ScaleCom"): at most 3k words, whatever P.

    1. The ranks lead in turn: the leader selects from its own u, and broadcasts the indices.
    2. All ranks take their own values there, which are averaged by all-reduce.

    What accumulates in the residuals of all ranks is alike enough for the leader's choice to suit the others.
    """

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        assert isinstance(compressor, Sparsifier)
        leader = (ctx.step + segment.index) % comm.size
        # fingerprint, in two halves, and count go ahead of the indices, in one broadcast
        words = torch.zeros(3 + compressor.capacity(segment.numel, ctx.density), dtype=torch.int32, device=u.device)
        stamp = torch.tensor([ctx.fingerprint & 0x7FFFFFFF, ctx.fingerprint >> 31], dtype=torch.int32, device=u.device)
        if comm.rank == leader:
            chosen = compressor.select(u, segment, ctx)
            words[:2], words[2] = stamp, chosen.numel()
            words[3 : 3 + chosen.numel()] = chosen
        comm.broadcast(words, leader)
        if not torch.equal(words[:2], stamp):
            raise out_of_step(comm.rank, leader, segment, ctx)
        indices = words[3 : 3 + int(words[2])].long()
        values = u.index_select(0, indices)
        total = values / comm.size
        if total.numel():
            if not u.sum().isfinite() and not u.isfinite().all():
                total[0] = torch.nan  # wherever it is, it must show; a finite sum may overflow
            comm.all_reduce(total)
            if not total.isfinite().all():
                # Only now, as it costs a message: who is it?
                check_headers(comm.all_gather(header((u,), u, segment, ctx)), segment, ctx)
        return (Entries(indices, total),), Entries(indices, values)

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        assert isinstance(compressor, Sparsifier)
        capacity = compressor.capacity(segment.numel, density)
        # Every rank leads once in P steps.
        return 4 * capacity / size + 8 * capacity * (size - 1) / size

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sparsifier) and not compressor.summable
