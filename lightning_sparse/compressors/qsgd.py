"""QSGD: values rounded at random to a few levels of their bucket's norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class QSGD(Compressor):
    """Q(v) = ‖v‖ · sgn(v) · ξ / s for each bucket v of consecutive elements; unbiased.

    Alistarh et al. 2017, arXiv 1610.02132. ξ is s|v|/‖v‖ rounded up or down at random. Levels travel as one byte each,
    and a norm in fp32 for each bucket. A bucket of zeros decodes to zeros.

    Attributes:
        levels: s, 1 to 127.
        bucket: elements that share a norm.
    """

    levels: int = 15
    bucket: int = 512

    def __post_init__(self) -> None:
        if isinstance(self.levels, bool) or not isinstance(self.levels, int) or not 1 <= self.levels <= 127:
            raise ValueError(f"QSGD(levels={self.levels!r}): an integer from 1 to 127, the number of levels above 0.")
        if isinstance(self.bucket, bool) or not isinstance(self.bucket, int) or self.bucket < 1:
            raise ValueError(f"QSGD(bucket={self.bucket!r}): an integer of at least 1, the elements that share a norm.")

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        rows = torch.nn.functional.pad(u, (0, -u.numel() % self.bucket)).view(-1, self.bucket)
        # The squares of large values overflow, so values are divided by the largest before.
        largest = rows.abs().amax(1, keepdim=True)
        scaled = torch.where(largest > 0, rows / largest, 0)
        norms = scaled.norm(dim=1, keepdim=True)  # of a bucket, in units of its largest value: 1 to √bucket
        position = torch.where(norms > 0, scaled.abs() * (self.levels / norms), 0)
        uniform = torch.rand(position.shape, dtype=torch.float32, generator=ctx.generator(shared=False))
        codes = (
            (position + to_device(uniform, u.device))
            .floor_()
            .clamp_(max=self.levels)
            .mul_(scaled.sign())
            .to(torch.int8)
        )
        payload = ((norms * largest).view(-1), codes.view(-1))
        return payload, self.decode(payload, ctx)

    def decode(self, payload: Payload, ctx: Context) -> Update:
        norms, codes = payload
        values = codes.view(-1, self.bucket).to(torch.float32).div_(self.levels).mul_(norms[:, None])
        return values.view(-1)[: ctx.segment.numel]

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return -(-segment.numel // self.bucket) * (4 + self.bucket)
