"""TernGrad: values rounded at random to -1, 0 or 1 times a scale of their parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.compressors.rows import row_count, rows_of, scratch_for, tiles
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.row_numbers import clipped_maxima
from lightning_sparse.contrib.kernels.ternary import round_to_ternary, ternary_values
from lightning_sparse.kernels.codes import code_bytes, pack_codes, unpack_codes
from lightning_sparse.kernels.native import uses_kernels
from lightning_sparse.kernels.uniform import Uniform
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Q(g) = s · sgn(g) · b for each parameter, b = 1 with probability |g|/s, else 0; unbiased, but for the clipping.

    Wen et al. 2017, arXiv 1705.07878. Before, g is clipped to ±clip · σ, layer by layer; then s = max|g|. σ is taken
    about 0, the mean of the paper's model of gradients: so a parameter of one element, or of equal ones, is not clipped
    away. With the aggregator `SharedScale` s is the maximum over the ranks, and sums of codes are integers.
    What is below 2⁻¹⁶ s becomes 0, as the random numbers have 16 bits.

    On the wire: the codes sgn(g)·b + 1 in 2 bits each, and s in fp32 for each parameter.

    Attributes:
        clip: of σ, a number above 0; `math.inf` clips nothing.
    """

    clip: float = 2.5

    exposes_nonfinite = True  # the scale of a parameter with a NaN or an infinity is not finite

    def __post_init__(self) -> None:
        if isinstance(self.clip, bool) or not isinstance(self.clip, Real) or not self.clip > 0:
            raise ValueError(f"TernGrad(clip={self.clip!r}): a number above 0, by which σ is multiplied, or math.inf.")
        object.__setattr__(self, "clip", float(self.clip))

    @property
    def contracts(self) -> bool:
        return False

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        scales = self.scales(u, ctx)
        packed, update = self.quantize(u, scales, scales, ctx)
        return (scales, packed), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        scales, packed = payload
        return self.values(unpack_codes(packed, 2, ctx.segment.numel), scales, ctx)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * row_count(segment, whole=True) + code_bytes(segment.numel, 2)

    def scales(self, u: Tensor, ctx: Context) -> Tensor:
        """Return the largest magnitude of each parameter that has elements, once it is clipped; fp32."""
        check_length(u, ctx)
        if uses_kernels(u):
            return clipped_maxima(u, rows_of(ctx.segment, whole=True), self.clip)
        scales = torch.empty(row_count(ctx.segment, whole=True), dtype=torch.float32, device=u.device)
        scratch = scratch_for(u)
        for rows in rows_of(ctx.segment, whole=True):
            # Of each tile the largest value, and the norm in units of it, which is in range.
            found = [_largest_and_norm(tile.of(u), scratch) for tile in tiles(rows, u)]
            largest, norms = (torch.stack(part) for part in zip(*found, strict=True))
            most = largest.amax()
            total = torch.linalg.vector_norm(norms * (largest / torch.where(most > 0, most, 1)))
            # In units of the largest, so that nothing is out of range; no infinity, which times 0 is NaN.
            clip = min(self.clip / math.sqrt(rows.length), 1e30)
            scales[rows.first] = most * (total * clip).clamp(max=1)
        return scales

    def quantize(self, u: Tensor, own: Tensor, scales: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return packed codes for `u`, and the update that they stand for.

        Args:
            u: 1-D, fp32; left as it is.
            own: what `scales` returns for it: to ± this it is clipped.
            scales: the scale of each parameter, no less than `own`.
            ctx: of the segment.
        """
        check_length(u, ctx)
        if uses_kernels(u):
            return round_to_ternary(u, rows_of(ctx.segment, whole=True), own, scales, ctx.key(shared=False))
        codes, update = torch.empty(u.numel(), dtype=torch.int8, device=u.device), torch.empty_like(u)
        scratch = scratch_for(u)
        uniform = Uniform(ctx.key(shared=False), scratch.numel(), u.device)
        limits = torch.where(own > 0, own, 1)
        shares = torch.where(scales > 0, own / scales, 0)
        for rows in rows_of(ctx.segment, whole=True):
            for tile in tiles(rows, u):
                x = scratch[: tile.stop - tile.start]
                torch.div(u[tile.start : tile.stop], limits[rows.first], out=x).clamp_(-1, 1).mul_(shares[rows.first])
                uniform.add_(x, tile.start).round_()
                codes[tile.start : tile.stop].copy_(x).add_(1)
                torch.mul(x, scales[rows.first], out=update[tile.start : tile.stop])
        return pack_codes(codes.view(torch.uint8), 2), update

    def values(self, codes: Tensor, scales: Tensor, ctx: Context, size: int = 1) -> Tensor:
        """Return what codes stand for, or the mean that the sums of the codes of `size` ranks stand for."""
        if uses_kernels(codes):
            return ternary_values(codes, rows_of(ctx.segment, whole=True), scales, size)
        update = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
        for rows in rows_of(ctx.segment, whole=True):
            for tile in tiles(rows, update):
                out = update[tile.start : tile.stop].copy_(codes[tile.start : tile.stop]).sub_(size)
                (out if size == 1 else out.div_(size)).mul_(scales[rows.first])
        return update


def _largest_and_norm(x: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of `x`, and the 2-norm of `x` divided by it."""
    y = torch.abs(x, out=scratch[: x.numel()].view(x.shape))
    largest = y.amax()
    if x.device.type == "cpu" and 1e-15 < float(largest) < 1e15:
        return largest, torch.linalg.vector_norm(y) / largest  # no square is out of range
    return largest, torch.linalg.vector_norm(y.div_(torch.where(largest > 0, largest, 1)))
