"""Sign: one bit per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update
from lightning_sparse.compressors.rows import row_count, rows_of, scratch_for, sign_codes_, tiles
from lightning_sparse.context import Context
from lightning_sparse.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class Sign(Compressor):
    """Sends the signs of `u`, one bit each, 0 as positive; but a row of zeros has no signs.

    Bernstein et al. 2018, arXiv 1802.04434. The update is +1 or -1, and 0 in a row whose elements are all 0: in one bit
    0 has no code, and rows of an embedding that no example of this rank has used would be counted as positive. So
    another bit for each row, `weight[i]`, or for each vector, says whether it is used.

        >>> from lightning_sparse.context import Context
        >>> Sign().compress(torch.tensor([0.5, -2.0, 0.0]), Context.of(3))
        ((tensor([1], dtype=torch.uint8), tensor([5], dtype=torch.uint8)), tensor([ 1., -1.,  1.]))
    """

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        scratch = scratch_for(u)
        codes = torch.empty(u.numel(), dtype=torch.int8, device=u.device)
        largest = torch.zeros(row_count(ctx.segment), dtype=torch.float32, device=u.device)
        for rows in rows_of(ctx.segment):
            for tile in tiles(rows, u):
                x = tile.of(u)
                sign_codes_(tile.of(codes), x, scratch)
                magnitudes = torch.abs(x, out=scratch[: x.numel()].view(x.shape))
                place = largest[tile.first : tile.last]
                torch.maximum(place, magnitudes.amax(1), out=place)
        codes, used = codes.view(torch.uint8), (largest > 0).to(torch.uint8)
        return (pack_codes(used, 1), pack_codes(codes, 1)), signed(codes, used, ctx.segment)

    def decode(self, payload: Payload, ctx: Context) -> Update:
        used, packed = payload
        segment = ctx.segment
        return signed(unpack_codes(packed, 1, segment.numel), unpack_codes(used, 1, row_count(segment)), segment)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return code_bytes(row_count(segment), 1) + code_bytes(segment.numel, 1)


def signed(codes: Tensor, used: Tensor, segment: Segment) -> Tensor:
    """Return +1 and -1 (fp32) for codes 1 and 0, one for each element, and 0 in rows whose `used` is 0."""
    update = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    factors = used.to(torch.float32).unsqueeze(1)
    for rows in rows_of(segment):
        for tile in tiles(rows, update):
            tile.of(update).copy_(tile.of(codes)).mul_(2).sub_(1).mul_(factors[tile.first : tile.last])
    return update
