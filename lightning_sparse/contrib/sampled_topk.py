"""SampledTopK: the entries above a threshold that is estimated from a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.encoding import IndexFormat, ValueFormat
from lightning_sparse.compressors.sparsifier import Sparsifier, selection_bound
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.candidates import indices_reaching, kth_magnitude, sampled
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.kernels.select import block_maxima, block_size, ensure_stats, magnitude_bits, topk_indices

SAMPLED = 100
"""Entries of the sample above the threshold. The relative error of the number of entries is then about 1 / √100."""

LOWERED = 0.8
"""Factor on a threshold that leaves too few entries. It is applied at most `TIMES` times."""
TIMES = 10


@dataclass(frozen=True)
class SampledTopK(Sparsifier):
    """Sends the entries whose magnitude reaches a threshold, about k of them: the selection of DGC.

    Lin et al. 2018, arXiv 1712.01887. The sample is every k/100-th magnitude from a random start, n in all. The
    threshold is the ⌈ρn⌉-th largest of the sample. If fewer than 0.8k entries reach it, it is multiplied by 0.8, at
    most ten times. If more than 1.3k entries reach it, or still too few, the k largest entries are sent. The same holds
    for k below 300, because the sample would be most of the data. (The paper samples 0.1 % to 1 %. Its authors' code
    samples down to 2/ρ elements, which gives 0.8k to 1.3k entries in one case of four. With 100/ρ elements it is 24 of
    25.)

        >>> import torch
        >>> u = torch.linspace(-1, 1, 1_000_000)
        >>> 800 <= len(SampledTopK(density=0.001).select(u)) <= 1300
        True

    Attributes:
        density: fraction ρ of entries to send, in (0, 1]; at least one is sent.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.
    """

    density: float = 0.001
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    exposes_nonfinite = True  # the largest entries are sent, and NaN counts as larger than infinity

    def capacity(self, numel: int, density: float | None = None) -> int:
        return min(numel, selection_bound(self.count(numel, density)))

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        return block_maxima(numel, self.count(numel, density))

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        numel = u.numel()
        if k < 3 * SAMPLED or k == numel:
            return topk_indices(u, k, ctx.stats)
        bits = magnitude_bits("SampledTopK", u)
        sample = sampled(bits, SAMPLED * numel // k, ctx.key(shared=False))
        threshold = kth_magnitude(sample, math.ceil(sample.numel() * k / numel))
        factors = torch.tensor([LOWERED**times for times in range(TIMES + 1)], dtype=torch.float32, device="cpu")
        thresholds = (threshold.view(torch.float32) * to_device(factors, u.device)).view(torch.int32)
        stats = ensure_stats(ctx.stats, u, block_size(numel, k))
        return indices_reaching(bits, k, thresholds, math.ceil(0.8 * k), math.floor(1.3 * k), stats)
