"""ScaledSign: one bit for each value, times the mean magnitude of its parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.contrib.kernels.row_numbers import mean_magnitudes
from lightning_sparse.contrib.rows import Rows
from lightning_sparse.contrib.two_values import TwoValues


@dataclass(frozen=True)
class ScaledSign(TwoValues):
    """C(p) = (‖p‖₁ / d) · sign(p) for each parameter p of d elements; 0 counts as positive.

    Karimireddy et al. 2019, arXiv 1901.09847: with error feedback it is "EF-signSGD". It is the
    multiple of the sign nearest to p: ‖p − C(p)‖² = (1 − δ)‖p‖² with δ = ‖p‖₁² / (d‖p‖²). Each parameter has its own
    scale. So the error is at most that of one scale for a whole segment, and does not depend on the segments.

        >>> import torch
        >>> from lightning_sparse.context import Context
        >>> ScaledSign().compress(torch.tensor([1.0, -2.0, 0.0]), Context.of(3))
        ((tensor([1.]), tensor([5], dtype=torch.uint8)), tensor([ 1., -1.,  1.]))

    On the wire: 1 bit for each element, 4 bytes for each parameter.
    """

    whole = True
    numbers = 1

    def row_scales(self, u: Tensor, rows: Sequence[Rows]) -> Tensor:
        return mean_magnitudes(u, rows)

    def levels(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        (scale,) = scales
        return scale, -scale
