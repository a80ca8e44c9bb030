"""SharedScale: exact sums of integers, times a scale that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Update
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes, in_regions, pack_codes, region_codes, unpack_codes
from lightning_sparse.contrib.kernels.ternary import sum_of_ternary
from lightning_sparse.contrib.rows import row_count
from lightning_sparse.contrib.terngrad import TernGrad
from lightning_sparse.exchange import Exchange
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class SharedScale(Aggregator[TernGrad]):
    """Mean of TernGrad's codes with one scale per parameter, the maximum over the ranks (Wen et al. 2017).

    1. All ranks gather the scales of all ranks, and take the largest scale of each parameter.
    2. Each rank rounds its u to -1, 0 and 1 times these scales, and sends the codes of region r to rank r.
    3. The owner of a region sums the codes exactly. All ranks gather the sums, 0 to 2P, in ⌈log₂(2P + 1)⌉ bits each.

    No step uses an all-reduce, which could not include a checksum. Scales are all-gathered, and every rank takes the
    same maximum. For each element, a rank sends (2 + ⌈log₂(2P + 1)⌉)(P − 1)/P bits.
    """

    rounds = 3
    shards_segment = True

    def __call__(self, u: Tensor, compressor: TernGrad, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        size, numel = exchange.size, ctx.segment.numel
        exchange.check_finite(u)
        own = compressor.scales(u, ctx)
        (gathered,) = exchange.all_gather((own,))
        scales = gathered.amax(0)

        packed, applied = compressor.quantize(u, own, scales, ctx)
        (received,) = exchange.all_to_all((in_regions(packed, 2, size),))

        width = region_codes(numel, size)
        total = sum_of_ternary(received, width)
        bits = (2 * size).bit_length()
        (sums,) = exchange.all_gather((pack_codes(total, bits),))
        codes = torch.cat([unpack_codes(row, bits, width) for row in sums])[:numel]
        return compressor.values(codes, scales, ctx, size), applied

    def nbytes(self, compressor: TernGrad, segment: Segment, density: float | None, size: int) -> float:
        bits = 2 + (2 * size).bit_length()
        codes = code_bytes(region_codes(segment.numel, size), bits)
        return (size - 1) * (4 * row_count(segment, whole=True) + codes)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, TernGrad)
