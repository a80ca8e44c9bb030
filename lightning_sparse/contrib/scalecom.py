"""ScaleCom: one rank selects for all, so that the values can be summed up on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator, sends_entries
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.pack import check_indices, gather
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class ScaleCom(Aggregator[Sparsifier]):
    """Cyclic local selection (Chen et al. 2020, NeurIPS, "ScaleCom"): at most 3k words, whatever P.

    1. The ranks lead in turn: the leader selects from its own u, and broadcasts the indices, as int32.
    2. All ranks take their own values there, which are averaged by all-reduce.

    The residuals of all ranks are alike enough for the leader's choice to suit the others.
    """

    def __call__(self, u: Tensor, compressor: Sparsifier, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        exchange.check_finite(u)
        exchange.agree(strict=True)  # the leader follows from the step
        leader = ctx.turn(exchange.size)
        capacity = compressor.capacity(u.numel(), ctx.density)
        indices = torch.full((capacity,), u.numel(), dtype=torch.int32, device=u.device)
        # In the first exchange all choose: the kernels for that must not be loaded while others wait for the leader.
        if exchange.rank == leader or not exchange.in_sync:
            chosen = compressor.choose(u, compressor.count(u.numel(), ctx.density), ctx)
            indices[: chosen.numel()] = chosen
        (received,) = exchange.broadcast((indices,), leader)
        shared = check_indices(received, u.numel())
        values = gather(u, shared)
        return Entries(shared, exchange.all_reduce_with_status(values / exchange.size)), Entries(shared, values)

    def nbytes(self, compressor: Sparsifier, segment: Segment, density: float | None, size: int) -> float:
        capacity = compressor.capacity(segment.numel, density)
        # Every rank leads once in P steps.
        return 4 * capacity / size + 8 * capacity * (size - 1) / size

    def messages(self, size: int) -> int:
        return 3 * (size - 1) + (size - 1).bit_length()

    def supports(self, compressor: Compressor) -> bool:
        # Sums of rounded values would have to be rounded again on the way.
        return sends_entries(compressor) and compressor.value_format == "float32"
