"""MajorityVote: the majority of the ranks' signs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Update
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes, in_regions, region_codes, unpack_codes
from lightning_sparse.contrib.kernels.signs import count_votes
from lightning_sparse.contrib.rows import row_count, rows_of
from lightning_sparse.contrib.sign import Sign, signed
from lightning_sparse.exchange import Exchange
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class MajorityVote(Aggregator[Sign]):
    """sign(Σ sign(u)) over the ranks (Bernstein et al. 2019, arXiv 1810.05291), with one bit per element both ways.

    1. Each rank sends its signs of region r of the segment to rank r. It also sends all ranks a list of its rows of
       zeros.
    2. The owner of a region counts the votes. A rank does not vote in a row of zeros. In a tie one rank's vote decides:
       the rank whose turn it is, or the next rank that votes. So every element moves in a direction that a rank voted
       for.
    3. All ranks gather the results. If no rank votes in a row, the result is 0.

    A rank sends 2d(P − 1)/P bits. An all-gather of the signs would take d(P − 1) bits, which is more with at least
    three ranks.
    """

    averages, rounds = False, 2
    shards_segment = True

    def __call__(self, u: Tensor, compressor: Sign, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        rank, size, segment = exchange.rank, exchange.size, ctx.segment
        (used, signs), applied = exchange.compress(u, compressor)
        used_by, votes = exchange.all_to_all((used.expand(size, -1), in_regions(signs, 1, size)))

        # All bits of their bytes; rows of zeros fill these up.
        used_rows = unpack_codes(used_by.reshape(-1), 1, 8 * used_by.numel()).view(size, 8 * used_by.shape[1])
        start, turn = rank * region_codes(segment.numel, size), ctx.turn(size)
        won = count_votes(votes, used_rows, rows_of(segment), start, turn)
        (results,) = exchange.all_gather((won,))

        return signed(results.reshape(-1), used_rows.amax(0)[: row_count(segment)], segment), applied

    def nbytes(self, compressor: Sign, segment: Segment, density: float | None, size: int) -> float:
        region = code_bytes(region_codes(segment.numel, size), 1)
        return (size - 1) * (2 * region + code_bytes(row_count(segment), 1))

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sign)
