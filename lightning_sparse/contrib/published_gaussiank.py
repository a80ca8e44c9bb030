"""GaussianK with the published search for a threshold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors import GaussianK
from lightning_sparse.context import Context
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.select import magnitude_bits, topk_indices


@dataclass(frozen=True)
class PublishedGaussianK(GaussianK):
    """Tests at most three thresholds, as published (Shi et al. 2019, arXiv 1911.08772); for reproduction.

    Below 2k/3 entries the threshold is halved, and above 4k/3 it is multiplied by 1.5. The loop does not use earlier
    tests: on Laplace input at density 0.005 it finds 3.78k, then 0.52k, then 10.19k entries, and sends the last.
    Therefore a payload has room for 12k entries. If the loop finds more, the largest 12k are sent; if it finds none,
    the largest k.
    """

    depends_on_step = True  # the host waits for the device

    def capacity(self, numel: int, density: float | None = None) -> int:
        return min(numel, 12 * self.count(numel, density))

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        return None

    def find(self, u: Tensor, k: int, z: float, ctx: Context) -> Tensor:
        magnitude_bits("GaussianK", u)  # raises an error unless `u` is 1-D fp32
        t, magnitudes = u.mean() + z * u.std(), u.abs()
        for _ in range(3):
            indices = (magnitudes > t).nonzero().squeeze(1)
            if indices.numel() < 2 * k / 3:
                t = 0.5 * t
            elif indices.numel() > 4 * k / 3:
                t = 1.5 * t
            else:
                break
        capacity = self.capacity(u.numel(), ctx.density)
        if 0 < indices.numel() <= capacity:
            return indices
        # If `u` has a NaN or an infinity, its moments are NaN, and no entry exceeds the threshold.
        return topk_indices(u, capacity if indices.numel() else k)
