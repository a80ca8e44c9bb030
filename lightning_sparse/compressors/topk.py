"""TopK: the entries of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors.base import Sparsifier
from lightning_sparse.compressors.formats import IndexFormat, ValueFormat
from lightning_sparse.context import Context
from lightning_sparse.kernels.scan import Scan
from lightning_sparse.kernels.select import block_size, topk_indices
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends the k = density * d entries of largest magnitude, exactly; of equal ones the lowest index first.

    Aji and Heafield 2017, arXiv 1704.05021.

        >>> import torch
        >>> TopK(density=0.4).select(torch.tensor([1.0, -3.0, 0.0, 2.0, -0.5]))
        tensor([1, 3])

    Attributes:
        density: fraction of entries to send, in (0, 1]; at least one is sent.
        index_format: "compact" (about 13 bits at density 0.001) or "int32".
        value_format: "float32", "bfloat16" or "int8"; what rounding takes stays in the residual.
    """

    density: float = 0.001
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def select(self, u: Tensor, segment: Segment | None = None, ctx: Context | None = None) -> Tensor:
        """Return the int64 indices, ascending, of the k entries of `u` (1-D, fp32) with the largest magnitude."""
        k = self.target(u.numel(), None if ctx is None else ctx.density)
        return topk_indices(u, k, None if ctx is None else ctx.scan)

    def scan(self, numel: int, density: float | None = None) -> Scan | None:
        block = block_size(numel, self.target(numel, density))
        return Scan(numel, block) if block > 1 else None
