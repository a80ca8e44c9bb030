"""ScaleCom: one rank selects for all, so that values can be summed in transit."""

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
    """Cyclic local selection (Chen et al. 2020, NeurIPS, "ScaleCom"): at most 3k words for any P.

    1. The ranks lead in turn: the leader selects from its own u, and broadcasts the indices as int32.
    2. All ranks take their own values at these indices, and average them by all-reduce.

    The method relies on similar residuals, so that the leader's selection also suits the other ranks.
    """

    def __call__(self, u: Tensor, compressor: Sparsifier, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        exchange.check_finite(u)
        exchange.agree(strict=True)  # the leader depends on the step
        leader = ctx.turn(exchange.size)
        capacity = compressor.capacity(u.numel(), ctx.density)
        indices = torch.full((capacity,), u.numel(), dtype=torch.int32, device=u.device)
        # In the first exchange all ranks select, so that they need not load kernels while others wait for the leader.
        if exchange.rank == leader or not exchange.in_sync:
            chosen = compressor.choose(u, compressor.count(u.numel(), ctx.density), ctx)
            indices[: chosen.numel()] = chosen
        (received,) = exchange.broadcast((indices,), leader)
        shared = check_indices(received, u.numel())
        values = gather(u, shared)
        return Entries(shared, exchange.all_reduce_with_status(values / exchange.size)), Entries(shared, values)

    def nbytes(self, compressor: Sparsifier, segment: Segment, density: float | None, size: int) -> float:
        capacity = compressor.capacity(segment.numel, density)
        # Each rank leads once in P steps.
        return 4 * capacity / size + 8 * capacity * (size - 1) / size

    def messages(self, size: int) -> int:
        return 3 * (size - 1) + (size - 1).bit_length()

    def supports(self, compressor: Compressor) -> bool:
        # Sums of rounded values would have to be rounded again in transit.
        return sends_entries(compressor) and compressor.value_format == "float32"
