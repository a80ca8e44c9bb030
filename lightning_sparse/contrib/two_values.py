"""TwoValues: one bit for each value, and for each row what its two signs stand for."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.compressors.rows import (
    Rows,
    groups,
    nonnegative,
    row_count,
    rows_of,
    scratch_for,
    values_of_signs,
)
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.signs import read_signs, write_signs
from lightning_sparse.kernels.codes import code_bytes, pack_codes
from lightning_sparse.kernels.native import uses_kernels
from lightning_sparse.layout import Segment


class TwoValues(Compressor):
    """Sends the sign of each value in a bit, 0 as positive, and for each row what its signs are decoded to.

    A subclass says which sums of a row it needs, and which values these make. Sums are of values scaled by a power of
    two that keeps them in range.
    """

    exposes_nonfinite = True  # the values of a row with a NaN or an infinity are not finite

    whole: bool
    """Whether a parameter is one row, whatever its shape."""
    numbers: int
    """How many fp32 numbers are sent for each row."""

    @abc.abstractmethod
    def sums(self, x: Tensor, positive: Tensor, scale: float, scratch: Tensor) -> list[Tensor]:
        """Return sums over the rows of `x` (rows, n), of values times `scale`.

        Args:
            x: fp32.
            positive: uint8, 1 where x is 0 or above, and 0 elsewhere.
            scale: a power of two.
            scratch: of x's shape and dtype; overwritten.
        """

    @abc.abstractmethod
    def sent(self, sums: Tensor, length: int) -> Tensor:
        """Return the numbers to send, (numbers, rows), for the sums of rows of a length, still scaled."""

    @abc.abstractmethod
    def pair(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the two signs are decoded to, the positive first, given the numbers sent, (numbers, rows)."""

    @abc.abstractmethod
    def sent_at_once(self, u: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Return the numbers to send, (numbers, rows), where kernels work."""

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        check_length(u, ctx)
        if uses_kernels(u):
            found = rows_of(ctx.segment, whole=self.whole)
            sent = self.sent_at_once(u, found)
            packed, update = write_signs(u, found, *self.pair(sent))
            return (sent.view(-1), packed), update
        codes, scratch = nonnegative(u), scratch_for(u)
        sent = torch.empty(self.numbers, row_count(ctx.segment, whole=self.whole), dtype=torch.float32, device=u.device)
        for rows in rows_of(ctx.segment, whole=self.whole):
            sent[:, rows.first : rows.last] = self._sent(u, codes, rows, scratch)
        payload = sent.view(-1), pack_codes(codes, 1)
        return payload, self.decode(payload, ctx)

    def decode(self, payload: Payload, ctx: Context) -> Update:
        sent, packed = payload
        rows = rows_of(ctx.segment, whole=self.whole)
        upper, lower = self.pair(sent.view(self.numbers, row_count(ctx.segment, whole=self.whole)))
        return (read_signs if uses_kernels(packed) else values_of_signs)(packed, rows, upper, lower)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * self.numbers * row_count(segment, whole=self.whole) + code_bytes(segment.numel, 1)

    def _sent(self, u: Tensor, codes: Tensor, rows: Rows, scratch: Tensor) -> Tensor:
        """Return the numbers to send, (numbers, rows), for the rows of a parameter."""
        exponents = [(rows.length - 1).bit_length()]
        if u.device.type == "cpu":  # first without scaling, a pass less; but then the host has to look at the sums
            exponents.insert(0, 0)
        for exponent in exponents:
            parts: list[list[Tensor]] = []
            for group in groups(rows, u):
                found = [self._sums(tile.of(u), tile.of(codes), 2.0**-exponent, scratch) for tile in group]
                parts.append([functools.reduce(Tensor.add_, part) for part in zip(*found, strict=True)])
            sums = torch.stack([torch.cat(part) for part in zip(*parts, strict=True)])
            if not exponent and bool(sums.isfinite().all()):
                break
        sent = self.sent(sums, rows.length)
        return sent.mul_(2.0**exponent) if exponent else sent

    def _sums(self, x: Tensor, positive: Tensor, scale: float, scratch: Tensor) -> list[Tensor]:
        return self.sums(x, positive, scale, scratch[: x.numel()].view(x.shape))


def row_sums(y: Tensor, scale: float) -> Tensor:
    """Return the sums of `y`'s rows, each value times `scale`; `y` may be overwritten."""
    return (y if scale == 1 else y.mul_(scale)).sum(1)
