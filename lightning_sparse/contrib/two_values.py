"""TwoValues: one bit for each value, and two decoded values for each row."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes
from lightning_sparse.contrib.kernels.signs import read_signs, write_signs
from lightning_sparse.contrib.rows import Rows, row_count, rows_of
from lightning_sparse.kernels.native import check_part
from lightning_sparse.layout import Segment


class TwoValues(Compressor):
    """Sends the sign of each value in one bit (0 is positive), and numbers that determine two values for each row.

    A subclass defines the numbers to send for each row, and computes the two values from them.
    """

    exposes_nonfinite = True  # the values of a row with a NaN or an infinity are not finite

    whole: bool
    """Whether a parameter of any shape is one row."""
    numbers: int
    """Number of fp32 values sent for each row."""

    @abc.abstractmethod
    def row_scales(self, u: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Return the numbers to send for each row of `u`, fp32 (numbers, rows)."""

    @abc.abstractmethod
    def levels(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoded values of the two signs, the positive first, given the sent numbers, (numbers, rows)."""

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        check_length(u, ctx)
        rows = rows_of(ctx.segment, whole=self.whole)
        scales = self.row_scales(u, rows)
        packed, update = write_signs(u, rows, *self.levels(scales))
        return (scales.view(-1), packed), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        scales, packed = payload
        rows = row_count(ctx.segment, whole=self.whole)
        check_part("scales", scales, self.numbers * rows, torch.float32)
        upper, lower = self.levels(scales.view(self.numbers, rows))
        return read_signs(packed, rows_of(ctx.segment, whole=self.whole), upper, lower)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * self.numbers * row_count(segment, whole=self.whole) + code_bytes(segment.numel, 1)
