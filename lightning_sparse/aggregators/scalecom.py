"""ScaleCom: one rank selects for all, so that the values can be summed up on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.checks import check_headers, doubt, header, heed, intact
from lightning_sparse.aggregators.messages import packed, unpacked
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.compressors.formats import received_indices
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.pack import gather
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
        headers = torch.stack(comm.all_gather(header((u,), u, segment, ctx)))
        check_headers(headers, segment, comm, ctx, at_once=not ctx.settled)
        leader = (ctx.step + segment.index) % comm.size
        capacity = compressor.capacity(segment.numel, ctx.density)
        words = torch.full((capacity,), segment.numel, dtype=torch.int32, device=u.device)
        if comm.rank == leader:
            chosen = compressor.choose(u, segment, ctx)
            words[: chosen.numel()] = chosen
        messages = intact(comm.broadcast(packed((words,)), leader)[None], comm, ctx, leader)
        (words,) = unpacked(messages[0], (words,))
        indices = received_indices(words, segment.numel)
        if not uses_triton(u):
            indices = indices[indices < segment.numel]
        values = gather(u, indices)
        # Whoever was sent something damaged has not added up what the others have.
        total = comm.all_reduce(torch.cat([values / comm.size, doubt(ctx, u.device)]))
        heed(total[-1:], ctx)
        return (Entries(indices, total[:-1]),), Entries(indices, values)

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
