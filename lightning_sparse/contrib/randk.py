"""RandK: random entries, the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Entries, Payload, Update
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class RandK(Sparsifier):
    """Sends k = density * d entries, drawn uniformly without replacement and not scaled.

    Stich et al. 2018, arXiv 1809.07599. All ranks draw the same indices, a function of (seed, step, segment). So the
    payload contains only values (half the bytes of TopK with int32 indices), and an all-reduce can sum them. Values are
    not scaled by d / k. Therefore E‖u - C(u)‖² = (1 - k/d)‖u‖², the contraction that error feedback needs.

    Attributes:
        density: fraction of entries to send, in (0, 1]; at least one is sent.
    """

    density: float = 0.001
    summable = True

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        """Draw k indices. Only the length and the device of `u` matter."""
        return to_device(draw(u.numel(), k, ctx.generator(shared=True)), u.device)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * self.count(segment.numel, density)

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        entries = self.entries(u, ctx)
        return (entries.values,), entries

    def decode(self, payload: Payload, ctx: Context) -> Entries:
        (values,) = payload
        drawn = draw(ctx.segment.numel, values.shape[-1], ctx.generator(shared=True))
        indices = to_device(drawn, values.device)
        return Entries(indices.expand(values.shape), values)


def draw(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k distinct indices below `numel`, int64, ascending. All choices have the same probability.

    It always runs on the host. The number of draws depends on the data, so the host would have to wait for a device.
    """
    if 4 * k > numel:
        drawn = torch.zeros(numel, dtype=torch.bool, device="cpu")
        drawn[torch.randperm(numel, generator=generator, device="cpu")[:k]] = True
        return drawn.nonzero().squeeze(1)
    # O(k): draw with replacement until k are distinct, and drop the surplus at random. No index is preferred in either
    # step, so the choice is uniform.
    distinct = torch.empty(0, dtype=torch.int64, device="cpu")
    while distinct.numel() < k:
        draws = math.ceil(-numel * math.log1p(-k / numel) + 2 * math.sqrt(k))
        distinct = torch.unique(
            torch.cat([distinct, torch.randint(numel, (draws,), generator=generator, device="cpu")])
        )
    chosen = torch.randperm(distinct.numel(), generator=generator, device="cpu")[:k]
    return distinct.index_select(0, chosen.sort().values)
