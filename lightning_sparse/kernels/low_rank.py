"""Products of a segment's matrices with thin ones, all in one call in C: for PowerSGD on the CPU.

    left_products(u, matrices, right, rank)          # M Qᵀ
    right_products(u, matrices, left, rank)          # Pᵀ M
    write_products_(u, matrices, left, right, rank)  # M = P Q

Only for where `uses_native`. `matrices` has start and stop in the segment, rows and columns of each M. The P, (rows,
rank), of all matrices lie one after the other in `left`, and the Q, (rank, columns), in `right`. All are 1-D, fp32. An
element of P Q is summed up in the order of P's columns, without fusing, so plain torch can do it with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.launch import kept

Matrices = Sequence[tuple[int, int, int, int]]

KINDS = ("left", "right", "product")
"""What is written. cpu/low_rank.c goes by this order."""


def left_products(u: Tensor, matrices: Matrices, right: Tensor, rank: int) -> Tensor:
    """Return M Qᵀ of each matrix in `u`."""
    left = u.new_empty(rank * sum(rows for _, _, rows, _ in matrices))
    _run("left", u, matrices, left, right, rank)
    return left


def right_products(u: Tensor, matrices: Matrices, left: Tensor, rank: int) -> Tensor:
    """Return Pᵀ M of each matrix in `u`."""
    right = u.new_empty(rank * sum(columns for *_, columns in matrices))
    _run("right", u, matrices, left, right, rank)
    return right


def write_products_(u: Tensor, matrices: Matrices, left: Tensor, right: Tensor, rank: int) -> None:
    """Write P Q of each matrix to where it is in `u`."""
    _run("product", u, matrices, left, right, rank)


def _run(kind: str, u: Tensor, matrices: Matrices, left: Tensor, right: Tensor, rank: int) -> None:
    def table() -> Tensor:
        rows = [(start, rows, columns) for start, _, rows, columns in matrices]
        return torch.tensor(rows, dtype=torch.int64, device=u.device)

    args = KINDS.index(kind), rank, len(matrices)
    native.run("low_rank", u, kept((_run, tuple(matrices)), u, table), left, right, *args)
