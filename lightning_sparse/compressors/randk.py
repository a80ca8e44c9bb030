"""RandK: entries drawn at random, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Agreed, Entries, Payload, Sparsifier, first_broken_parameter
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import to_device, uses_triton
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class RandK(Sparsifier):
    """Sends k = density * d entries, drawn uniformly without replacement, as they are.

    Stich et al. 2018, arXiv 1809.07599. All ranks draw the same indices, a function of (seed, step, segment). So the
    payload is the values alone, half of what TopK sends, and can be added up on the way. Values are not scaled by
    d / k: E‖u - C(u)‖² = (1 - k/d)‖u‖², a contraction, which is what error feedback asks for.

    Attributes:
        density: fraction of entries to send, in (0, 1]; at least one is sent.
    """

    density: float = 0.001
    summable = True

    def select(self, u: Tensor, segment: Segment | None = None, ctx: Context | None = None) -> Tensor:
        """Draw k indices, int64, ascending; of `u` (1-D) only length and device matter."""
        return self._draw(u.numel(), u.device, ctx or Context())

    def _draw(self, numel: int, device: torch.device, ctx: Context) -> Tensor:
        if "drawn" not in ctx.cache:
            drawn = draw(numel, self.target(numel, ctx.density), ctx.generator(shared=True))
            ctx.cache["drawn"] = to_device(drawn, device)
        return ctx.cache["drawn"]

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * self.target(segment.numel, density)

    def compress(self, u: Tensor, segment: Segment, ctx: Context) -> Payload:
        values = u.index_select(0, self.select(u, segment, ctx))
        if uses_triton(u):
            ctx.broken = first_broken_parameter(u, segment)
            values[:1] = torch.where(ctx.broken > 0, torch.nan, values[:1])
            return (values,)
        # What is broken must show even where it was not drawn. The sum of finite values may overflow, so it only
        # raises the suspicion; `isfinite` of everything costs ten times as much.
        if values.numel() and not torch.isfinite(u.sum()) and not torch.isfinite(u).all():
            values[0] = torch.nan
        return (values,)

    def unpack(self, payload: Payload, segment: Segment, ctx: Context, capacity: int | None = None) -> Entries:
        if isinstance(payload, Entries):
            return payload
        return Entries(self._draw(segment.numel, payload[0].device, ctx), payload[0])

    def mean(self, payloads: Payload, segment: Segment, ctx: Context) -> Agreed:
        total = payloads[0][0].clone()
        for values in payloads[0][1:]:
            total += values
        return (self.unpack((total.div_(len(payloads[0])),), segment, ctx),)


def draw(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k distinct indices below `numel`, int64, ascending, every choice as likely as any other.

    On the host, whatever the device: how many draws it takes is data, and the host would have to wait for them.
    """
    if 4 * k > numel:
        drawn = torch.zeros(numel, dtype=torch.bool)
        drawn[torch.randperm(numel, generator=generator)[:k]] = True
        return drawn.nonzero().squeeze(1)
    # O(k): draw with replacement until k are distinct. No index is preferred, so whatever their number, the distinct
    # ones are a uniform choice, and so is what is left after leaving out as many as are too many.
    distinct = torch.empty(0, dtype=torch.int64)
    while distinct.numel() < k:
        draws = math.ceil(-numel * math.log1p(-k / numel) + 2 * math.sqrt(k))
        distinct = torch.unique(torch.cat([distinct, torch.randint(numel, (draws,), generator=generator)]))
    chosen = torch.randperm(distinct.numel(), generator=generator)[:k]
    return distinct.index_select(0, chosen.sort().values)
