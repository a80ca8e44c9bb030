"""Sign: one bit per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update
from lightning_sparse.compressors.rows import choose_, negative_masks_, row_count, rows_of, tiles
from lightning_sparse.context import Context
from lightning_sparse.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.row_numbers import used_rows
from lightning_sparse.kernels.signs import read_signs, write_signs
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
        if uses_triton(u):
            used = used_rows(u, rows_of(ctx.segment))
            packed, update = write_signs(u, rows_of(ctx.segment), *_values(used))
            return (pack_codes(used, 1), packed), update
        update = torch.empty_like(u)
        codes = torch.empty(u.numel(), dtype=torch.int8, device=u.device)
        used = torch.empty(row_count(ctx.segment), dtype=torch.uint8, device=u.device)
        for rows in rows_of(ctx.segment):
            used[rows.first : rows.last] = _used(u[rows.start : rows.stop].view(-1, rows.length))
        upper, lower = (values.unsqueeze(1) for values in _values(used))
        for rows in rows_of(ctx.segment):
            for tile in tiles(rows, u):
                masks = negative_masks_(tile.of(update), tile.of(u))
                tile.of(codes).copy_(masks).add_(1)
                choose_(masks, upper[tile.first : tile.last], lower[tile.first : tile.last])
        return (pack_codes(used, 1), pack_codes(codes.view(torch.uint8), 1)), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        used, packed = payload
        return signed(packed, unpack_codes(used, 1, row_count(ctx.segment)), ctx.segment)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return code_bytes(row_count(segment), 1) + code_bytes(segment.numel, 1)


def signed(packed: Tensor, used: Tensor, segment: Segment) -> Tensor:
    """Return +1 and -1 (fp32) for packed codes 1 and 0, one for each element, and 0 in rows whose `used` is 0."""
    if uses_triton(packed):
        return read_signs(packed, rows_of(segment), *_values(used))
    codes = unpack_codes(packed, 1, segment.numel)
    update = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    upper, lower = (values.unsqueeze(1) for values in _values(used))
    for rows in rows_of(segment):
        for tile in tiles(rows, update):
            masks = tile.of(update).view(torch.int32).copy_(tile.of(codes)).sub_(1)
            choose_(masks, upper[tile.first : tile.last], lower[tile.first : tile.last])
    return update


def _values(used: Tensor) -> tuple[Tensor, Tensor]:
    """Return what positive and negative signs stand for in rows that are used (1) or not (0)."""
    upper = used.to(torch.float32)
    return upper, -upper


def _used(x: Tensor) -> Tensor:
    """Return which rows of `x`, (rows, n), have elements that are not 0."""
    if x.device.type != "cpu":
        return x.abs().amax(1) != 0
    used = x[:, 0] != 0
    # On the CPU only where the first element is 0: nearly always that saves a pass over x.
    if not bool(used.all()):
        used[~used] = x[~used].abs().amax(1) != 0
    return used
