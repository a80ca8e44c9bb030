"""Sign: one bit per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.contrib.kernels.row_numbers import used_rows
from lightning_sparse.contrib.kernels.signs import read_signs, write_signs
from lightning_sparse.contrib.rows import row_count, rows_of
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class Sign(Compressor):
    """Sends the signs of `u`, one bit each: 0 as positive, NaN as negative. A row of zeros has no signs.

    Bernstein et al. 2018, arXiv 1802.04434. The update is +1 or -1, and 0 in a row whose elements are all 0. One bit
    has no code for 0, so unused rows of an embedding would count as positive. Therefore another bit for each row,
    `weight[i]`, or for each vector, marks whether it is used.

        >>> from lightning_sparse.context import Context
        >>> Sign().compress(torch.tensor([0.5, -2.0, 0.0]), Context.of(3))
        ((tensor([1], dtype=torch.uint8), tensor([5], dtype=torch.uint8)), tensor([ 1., -1.,  1.]))
    """

    @property
    def contracts(self) -> bool:
        """Whether ‖u − C(u)‖ ≤ ‖u‖: no, as signs have no scale."""
        return False

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        check_length(u, ctx)
        rows = rows_of(ctx.segment)
        used = used_rows(u, rows)
        packed, update = write_signs(u, rows, *_values(used))
        return (pack_codes(used, 1), packed), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        used, packed = payload
        return signed(packed, unpack_codes(used, 1, row_count(ctx.segment)), ctx.segment)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return code_bytes(row_count(segment), 1) + code_bytes(segment.numel, 1)


def signed(packed: Tensor, used: Tensor, segment: Segment) -> Tensor:
    """Return +1 and -1 (fp32) for packed codes 1 and 0, one for each element, and 0 in rows whose `used` is 0."""
    return read_signs(packed, rows_of(segment), *_values(used))


def _values(used: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of positive and negative signs in rows that are used (1) or not (0)."""
    upper = used.to(torch.float32)
    return upper, -upper
