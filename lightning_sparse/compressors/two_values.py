"""TwoValues: one bit for each value, and for each row what its two signs stand for."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update
from lightning_sparse.compressors.rows import (
    Rows,
    Tile,
    choose_,
    groups,
    negative_masks_,
    row_count,
    rows_of,
    scratch_for,
    tiles,
)
from lightning_sparse.context import Context
from lightning_sparse.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.signs import read_signs, write_signs
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
    def sums(self, x: Tensor, masks: Tensor, scale: float, scratch: Tensor) -> list[Tensor]:
        """Return sums over the rows of `x` (rows, n), of values times `scale`.

        Args:
            x: fp32.
            masks: int32, -1 where x is negative, and 0 elsewhere.
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
        """Return the numbers to send, (numbers, rows), where Triton works."""

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        if uses_triton(u):
            found = rows_of(ctx.segment, whole=self.whole)
            sent = self.sent_at_once(u, found)
            packed, update = write_signs(u, found, *self.pair(sent))
            return (sent.view(-1), packed), update
        scratch, update = scratch_for(u), torch.empty_like(u)
        codes = torch.empty(u.numel(), dtype=torch.int8, device=u.device)
        sent = torch.empty(self.numbers, row_count(ctx.segment, whole=self.whole), dtype=torch.float32, device=u.device)
        for rows in rows_of(ctx.segment, whole=self.whole):
            for group in groups(rows, u):
                for tile in group:
                    # While x is in the cache, into memory that is not: as fast as a copy.
                    tile.of(codes).copy_(negative_masks_(tile.of(update), tile.of(u))).add_(1)
                own = sent[:, group[0].first : group[-1].last].copy_(self._sent(u, update, group, rows.length, scratch))
                self._choose(update, own, group)
        return (sent.view(-1), pack_codes(codes.view(torch.uint8), 1)), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        sent, packed = payload
        sent = sent.view(self.numbers, row_count(ctx.segment, whole=self.whole))
        if uses_triton(packed):
            return read_signs(packed, rows_of(ctx.segment, whole=self.whole), *self.pair(sent))
        codes = unpack_codes(packed, 1, ctx.segment.numel)
        update = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
        for rows in rows_of(ctx.segment, whole=self.whole):
            for tile in tiles(rows, update):
                tile.of(update).view(torch.int32).copy_(tile.of(codes)).sub_(1)
                self._choose(update, sent[:, tile.first : tile.last], [tile])
        return update

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * self.numbers * row_count(segment, whole=self.whole) + code_bytes(segment.numel, 1)

    def _sent(self, u: Tensor, update: Tensor, group: list[Tile], length: int, scratch: Tensor) -> Tensor:
        """Return the numbers to send, (numbers, rows), for the rows of a group; `update` has their masks."""
        exponents = [(length - 1).bit_length()]
        if u.device.type == "cpu":  # first without scaling, a pass less; but then the host has to look at the sums
            exponents.insert(0, 0)
        for exponent in exponents:
            parts = []
            for tile in group:
                x, masks = tile.of(u), tile.of(update).view(torch.int32)
                parts.append(torch.stack(self.sums(x, masks, 2.0**-exponent, scratch[: x.numel()].view(x.shape))))
            sums = functools.reduce(Tensor.add_, parts)
            if not exponent and bool(sums.isfinite().all()):
                break
        sent = self.sent(sums, length)
        return sent.mul_(2.0**exponent) if exponent else sent

    def _choose(self, update: Tensor, sent: Tensor, group: list[Tile]) -> None:
        """Write the values of a group's rows where their masks are, given the numbers sent, (numbers, rows)."""
        upper, lower = self.pair(sent)
        for tile in group:
            choose_(tile.of(update).view(torch.int32), upper.unsqueeze(1), lower.unsqueeze(1))


def row_sums(y: Tensor, scale: float) -> Tensor:
    """Return the sums of `y`'s rows, each value times `scale`; `y` may be overwritten."""
    return (y if scale == 1 else y.mul_(scale)).sum(1)
