"""Sign: one bit per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class Sign(Compressor):
    """Sends the signs of `u`, one bit each; 0 counts as positive.

    Bernstein et al. 2018, arXiv 1802.04434. The update is +1 or -1.

        >>> from lightning_sparse.context import Context
        >>> Sign().compress(torch.tensor([0.5, -2.0, 0.0]), Context.of(3))
        ((tensor([5], dtype=torch.uint8),), tensor([ 1., -1.,  1.]))
    """

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        positive = u >= 0
        bits = torch.nn.functional.pad(positive.to(torch.uint8), (0, -u.numel() % 8)).view(-1, 8)
        packed = (bits << torch.arange(8, dtype=torch.uint8, device=u.device)).sum(1, dtype=torch.uint8)
        return (packed,), torch.where(positive, 1.0, -1.0).to(u.dtype)

    def decode(self, payload: Payload, ctx: Context) -> Update:
        (packed,) = payload
        bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
        return bits.view(-1)[: ctx.segment.numel].to(torch.float32).mul_(2).sub_(1)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return -(-segment.numel // 8)
