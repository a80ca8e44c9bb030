"""QSGD: values rounded at random to a few levels of their bucket's norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import code_bytes, unpack_codes
from lightning_sparse.contrib.kernels.levels import level_values, round_to_levels
from lightning_sparse.contrib.options import check
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class QSGD(Compressor):
    """Q(v) = ‖v‖ · sgn(v) · ξ / s for each bucket v of consecutive elements; unbiased.

    Alistarh et al. 2017, arXiv 1610.02132. ξ is s|v|/‖v‖ rounded up or down at random. So E Q(v) = v, and E‖Q(v) − v‖²
    ≤ min(n/s², √n/s)‖v‖² for a bucket of n. The random numbers have 16 bits, so values below 2⁻¹⁶ of a level ‖v‖/s
    become 0. A bucket of zeros decodes to zeros.

    On the wire: the codes sgn(v)·ξ + s in ⌈log₂(2s + 1)⌉ bits each, and a norm in fp32 for each bucket. `elias_bits`
    returns the length of the paper's Elias code, which depends on the data.

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

    def elias_bits(self, payload: Payload, ctx: Context) -> int:
        """Return the number of bits of a payload's Elias code (the paper's Code_s). The host waits for it.

        A bucket has 32 bits for the norm. Each ξ > 0 takes 1 bit for the sign. It also takes two of Elias' omega
        codes: of ξ, and of the distance from the previous ξ > 0. The expected number of ξ > 0 is at most s(s + √n) in
        a bucket of n.
        """
        norms, packed = payload
        levels = unpack_codes(packed, self.bits, ctx.segment.numel).short() - self.levels
        places = levels.nonzero().squeeze(1)
        buckets = places // self.bucket
        distances = places.diff(prepend=places.new_full((1,), -1))
        # The first of a bucket counts from the bucket's start.
        new = buckets.diff(prepend=buckets.new_full((1,), -1)) != 0
        distances = torch.where(new, places % self.bucket + 1, distances)
        coded = omega_bits(distances) + 1 + omega_bits(levels[places].abs().long())
        return 32 * norms.numel() + int(coded.sum())


def omega_bits(numbers: Tensor) -> Tensor:
    """Return the length in bits of Elias' omega code (Elias 1975) of numbers from 1 on, int64.

    A number N > 1 is written in binary, preceded by the code of its number of digits minus one. A 0 ends the code.
    """
    total, left = torch.ones_like(numbers), numbers.clone()
    while bool((left > 1).any()):
        digits = torch.frexp(left.double()).exponent.long()
        total += torch.where(left > 1, digits, 0)
        left = torch.where(left > 1, digits - 1, left)
    return total
