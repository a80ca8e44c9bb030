"""TopK: selects the entries of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors.encoding import IndexFormat, ValueFormat
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.select import block_maxima, topk_indices


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends exactly the k = density * d entries of largest magnitude; of equal ones the lowest index comes first.

    Aji and Heafield 2017, arXiv 1704.05021.

        >>> import torch
        >>> TopK(density=0.4).select(torch.tensor([1.0, -3.0, 0.0, 2.0, -0.5]))
        tensor([1, 3])

    Attributes:
        density: fraction of entries to send, in (0, 1]; at least one is sent.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16", "int8", "int4" or "int2"; the rounding error stays in the residual.
    """

    density: float = 0.001
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    exposes_nonfinite = True  # NaN counts as larger than infinity, and infinity as larger than any number
    depends_on_step = False

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        return topk_indices(u, k, ctx.stats)

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        return block_maxima(numel, self.count(numel, density))
