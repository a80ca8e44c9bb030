"""QSGD: values rounded at random to a few levels of their bucket's norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes
from lightning_sparse.contrib.kernels.levels import level_values, round_to_levels
from lightning_sparse.contrib.options import check
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class QSGD(Compressor):
    """Q(v) = ‖v‖ · sgn(v) · ξ / s for each bucket v of consecutive elements; unbiased.

    Alistarh et al. 2017, arXiv 1610.02132. ξ is s|v|/‖v‖ rounded up or down at random. So E Q(v) = v, and E‖Q(v) − v‖²
    ≤ min(n/s², √n/s)‖v‖² for a bucket of n. The random numbers have 16 bits, so values below 2⁻¹⁶ of a level ‖v‖/s
    become 0. A bucket of zeros decodes to zeros.

    On the wire: the codes sgn(v)·ξ + s in ⌈log₂(2s + 1)⌉ bits each, and a norm in fp32 for each bucket. The
    paper's Elias code has a length that depends on the data.

    Attributes:
        levels: s, 1 to 127: 2 bits for 1, 3 for 3, 4 for 7, 5 for 15, 8 for 127.
        bucket: elements that share a norm.
    """

    levels: int = 15
    bucket: int = 512

    exposes_nonfinite = True  # the norm of a bucket with a NaN or an infinity is not finite

    def __post_init__(self) -> None:
        for name in ("levels", "bucket"):
            object.__setattr__(self, name, check(name, getattr(self, name), "QSGD"))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (2 * self.levels).bit_length()

    @property
    def contracts(self) -> bool:
        return self.levels**2 > self.bucket

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        check_length(u, ctx)
        norms, packed, update = round_to_levels(u, self.levels, self.bits, self.bucket, ctx.key(shared=False))
        return (norms, packed), update

    def decode(self, payload: Payload, ctx: Context) -> Update:
        norms, packed = payload
        return level_values(norms, packed, self.levels, self.bits, self.bucket, ctx.segment.numel)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * -(-segment.numel // self.bucket) + code_bytes(segment.numel, self.bits)
