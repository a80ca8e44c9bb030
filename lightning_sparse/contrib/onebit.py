"""OneBit: one bit for each value, decoded to a mean of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.rows import Rows
from lightning_sparse.contrib.kernels.row_numbers import signed_means
from lightning_sparse.contrib.two_values import TwoValues, row_sums


@dataclass(frozen=True)
class OneBit(TwoValues):
    """C(u) is the mean of the non-negatives where u ≥ 0, and the mean of the negatives elsewhere, column by column.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech. A column of the paper's weight matrix W, in Wᵀv, belongs to one output; torch keeps the
    transpose, so here it is a row, `weight[i]`, of all further dimensions together. A vector is one column. These two
    values leave the smallest error that the threshold 0 allows.

        >>> import torch
        >>> from lightning_sparse.context import Context
        >>> OneBit().compress(torch.tensor([1.0, -2.0, 3.0, -5.0]), Context.of(4))[1]
        tensor([ 2.0000, -3.5000,  2.0000, -3.5000])

    On the wire: 1 bit for each element, 8 bytes for each column. Where the aggregator divides a segment among ranks, a
    column that lies in two regions has two means in each.
    """

    whole = False
    numbers = 2

    def sums(self, x: Tensor, positive: Tensor, scale: float, scratch: Tensor) -> list[Tensor]:
        return [
            positive.sum(1, dtype=torch.int32).to(torch.float32),
            row_sums(torch.clamp(x, min=0, out=scratch), scale),
            row_sums(torch.clamp(x, max=0, out=scratch), scale),
        ]

    def sent(self, sums: Tensor, length: int) -> Tensor:
        positive = sums[0]
        # Where there is none, the sum is 0 as well.
        return torch.stack([sums[1] / positive.clamp(min=1), sums[2] / (length - positive).clamp(min=1)])

    def sent_at_once(self, u: Tensor, rows: Sequence[Rows]) -> Tensor:
        return signed_means(u, rows)

    def pair(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        upper, lower = sent
        return upper, lower
