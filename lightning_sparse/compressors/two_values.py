"""TwoValues: one bit for each value, and for each row what its two signs stand for."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update
from lightning_sparse.compressors.rows import Rows, row_count, rows_of, scratch_for, sign_codes_, tiles
from lightning_sparse.context import Context
from lightning_sparse.kernels.codes import code_bytes, pack_codes, unpack_codes
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
    def sums(self, x: Tensor, codes: Tensor, scale: float, scratch: Tensor) -> list[Tensor]:
        """Return sums over the rows of `x` (rows, n), scaled; `codes` are 1 where it is not negative."""

    @abc.abstractmethod
    def sent(self, sums: Tensor, length: int) -> Tensor:
        """Return the numbers to send, (numbers, rows), for the sums of rows of a length, still scaled."""

    @abc.abstractmethod
    def pair(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the two signs are decoded to, the positive first, given the numbers sent, (numbers, rows)."""

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        parameters, scratch = rows_of(ctx.segment, whole=self.whole), scratch_for(u)
        codes = torch.empty(u.numel(), dtype=torch.int8, device=u.device)
        sent = torch.empty(self.numbers, row_count(ctx.segment, whole=self.whole), dtype=torch.float32, device=u.device)
        for rows in parameters:
            exponent = (rows.length - 1).bit_length()
            sums: Tensor | None = None
            for tile in tiles(rows, u):
                x, code = tile.of(u), tile.of(codes)
                sign_codes_(code, x, scratch)
                y = scratch[: x.numel()].view(x.shape)
                found = torch.stack(self.sums(x, code, 2.0**-exponent, y))
                if sums is None:
                    sums = torch.zeros(len(found), rows.last - rows.first, dtype=torch.float32, device=u.device)
                sums[:, tile.first - rows.first : tile.last - rows.first].add_(found)
            assert sums is not None
            sent[:, rows.first : rows.last].copy_(self.sent(sums, rows.length).mul_(2.0**exponent))
        update = self._decoded(sent, codes, parameters)
        return (sent.view(-1), pack_codes(codes.view(torch.uint8), 1)), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        sent, packed = payload
        sent = sent.view(self.numbers, row_count(ctx.segment, whole=self.whole))
        codes = unpack_codes(packed, 1, ctx.segment.numel)
        return self._decoded(sent, codes, rows_of(ctx.segment, whole=self.whole))

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * self.numbers * row_count(segment, whole=self.whole) + code_bytes(segment.numel, 1)

    def _decoded(self, sent: Tensor, codes: Tensor, parameters: tuple[Rows, ...]) -> Tensor:
        update = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        scratch = scratch_for(update)
        upper, lower = (value.unsqueeze(1) for value in self.pair(sent))
        for rows in parameters:
            for tile in tiles(rows, update):
                out = tile.of(update)
                y = scratch[: out.numel()].view(out.shape).copy_(tile.of(codes))
                torch.mul(y, upper[tile.first : tile.last], out=out)
                # One of the two terms is 0.
                out.add_(y.sub_(1).mul_(-lower[tile.first : tile.last]))
        return update
