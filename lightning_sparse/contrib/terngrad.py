"""TernGrad: values rounded at random to -1, 0 or 1 times a scale of their parameter."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes, unpack_codes
from lightning_sparse.contrib.kernels.row_numbers import clipped_maxima
from lightning_sparse.contrib.kernels.ternary import round_to_ternary, ternary_values
from lightning_sparse.contrib.rows import row_count, rows_of
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Q(g) = s · sgn(g) · b for each parameter, b = 1 with probability |g|/s, else 0. Unbiased without clipping.

    Wen et al. 2017, arXiv 1705.07878. First, g is clipped to ±clip · σ, layer by layer. Then s = max|g|. σ is the root
    mean square, because the mean is 0 in the paper's model of gradients. So parameters with one element, or with equal
    ones, are not clipped to 0. With the aggregator `SharedScale`, s is the maximum over the ranks, and sums of codes
    are integers. The random numbers have 16 bits, so values below 2⁻¹⁶ s become 0.

    On the wire: the codes sgn(g)·b + 1 in 2 bits each, and s in fp32 for each parameter.

    Attributes:
        clip: factor of σ, above 0; `math.inf` disables clipping.
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
        """Return the largest magnitude, after clipping, of each parameter that has elements; fp32."""
        check_length(u, ctx)
        return clipped_maxima(u, rows_of(ctx.segment, whole=True), self.clip)

    def quantize(self, u: Tensor, own: Tensor, scales: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return packed codes for `u`, and the update that they represent.

        Args:
            u: 1-D, fp32; unchanged.
            own: the result of `scales` for `u`, which is clipped to ± this.
            scales: the scale of each parameter, at least `own`.
            ctx: context of the segment.
        """
        check_length(u, ctx)
        return round_to_ternary(u, rows_of(ctx.segment, whole=True), own, scales, ctx.key(shared=False))

    def values(self, codes: Tensor, scales: Tensor, ctx: Context, size: int = 1) -> Tensor:
        """Return the values of codes, or the mean of `size` ranks, given the sums of their codes."""
        return ternary_values(codes, rows_of(ctx.segment, whole=True), scales, size)
