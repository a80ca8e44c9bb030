"""OneBit: one bit for each value, decoded to a mean of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.contrib.kernels.row_numbers import signed_means
from lightning_sparse.contrib.rows import Rows
from lightning_sparse.contrib.two_values import TwoValues


@dataclass(frozen=True)
class OneBit(TwoValues):
    """Replaces each element by the mean of the non-negative, or of the negative, elements of its column.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech. A column of the paper's weight matrix W, in Wᵀv, belongs to one output. Torch stores the
    transpose, so a column is the row `weight[i]` here, with all further dimensions. A vector is one column. These two
    values minimize the error for threshold 0.

        >>> import torch
        >>> from lightning_sparse.context import Context
        >>> OneBit().compress(torch.tensor([1.0, -2.0, 3.0, -5.0]), Context.of(4))[1]
        tensor([ 2.0000, -3.5000,  2.0000, -3.5000])

    On the wire: 1 bit for each element, 8 bytes for each column. If the aggregator divides a segment among ranks, a
    column in two regions has two means in each region.
    """

    whole = False
    numbers = 2

    def row_scales(self, u: Tensor, rows: Sequence[Rows]) -> Tensor:
        return signed_means(u, rows)

    def levels(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        upper, lower = scales
        return upper, lower
