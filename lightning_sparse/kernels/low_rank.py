"""Products of a segment's matrices with thin ones, for PowerSGD; on the CPU one call in C computes all of them.

    left_products(u, matrices, right, rank)          # M Qᵀ
    right_products(u, matrices, left, rank)          # Pᵀ M
    write_products_(u, matrices, left, right, rank)  # M = P Q

`matrices` holds start and stop in the segment, rows and columns of each M. `left` concatenates the P, (rows, rank), of
all matrices, and `right` the Q, (rank, columns). All are 1-D, fp32. An element of P Q is summed in the order of P's
columns, without fused operations. So plain torch can compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kept

Matrices = Sequence[tuple[int, int, int, int]]

KINDS = ("left", "right", "product")
"""Kinds of results. cpu/low_rank.c relies on this order."""


ROWS = 64
"""Number of rows of a matrix that plain torch multiplies at a time on the CPU, so that they stay in a cache."""


@operation
def left_products(u: Tensor, matrices: Matrices, right: Tensor, rank: int) -> Tensor:
    """Return M Qᵀ of each matrix in `u`."""
    pairs = zip(_matrices(u, matrices), _factors(right, matrices, rank, 3), strict=True)
    return torch.cat([u[:0], *((matrix @ factor.view(rank, -1).mT).view(-1) for matrix, factor in pairs)])


@left_products.by("native")
def _left_in_c(u: Tensor, matrices: Matrices, right: Tensor, rank: int) -> Tensor:
    left = u.new_empty(rank * sum(rows for _, _, rows, _ in matrices))
    _run("left", u, matrices, left, right, rank)
    return left


@operation
def right_products(u: Tensor, matrices: Matrices, left: Tensor, rank: int) -> Tensor:
    """Return Pᵀ M of each matrix in `u`."""
    pairs = zip(_factors(left, matrices, rank, 2), _matrices(u, matrices), strict=True)
    # On the CPU this is 2× faster than a product with Mᵀ, or with a Pᵀ that is not contiguous.
    return torch.cat([u[:0], *((factor.view(-1, rank).mT.contiguous() @ matrix).view(-1) for factor, matrix in pairs)])


@right_products.by("native")
def _right_in_c(u: Tensor, matrices: Matrices, left: Tensor, rank: int) -> Tensor:
    right = u.new_empty(rank * sum(columns for *_, columns in matrices))
    _run("right", u, matrices, left, right, rank)
    return right


@operation
def write_products_(u: Tensor, matrices: Matrices, left: Tensor, right: Tensor, rank: int) -> None:
    """Write P Q of each matrix to its place in `u`. On CPUs the bits do not depend on a rank's libraries."""
    factors = zip(_factors(left, matrices, rank, 2), _factors(right, matrices, rank, 3), strict=True)
    for matrix, (p, q) in zip(_matrices(u, matrices), factors, strict=True):
        basis, coefficients = p.view(-1, rank), q.view(rank, -1)
        if u.device.type != "cpu":
            torch.mm(basis, coefficients, out=matrix)
            continue
        for rows, own in zip(matrix.split(ROWS), basis.split(ROWS), strict=True):
            torch.mul(own[:, :1], coefficients[0], out=rows)
            for number in range(1, rank):
                rows += own[:, number, None] * coefficients[number]


@write_products_.by("native")
def _write_in_c_(u: Tensor, matrices: Matrices, left: Tensor, right: Tensor, rank: int) -> None:
    _run("product", u, matrices, left.contiguous(), right.contiguous(), rank)


def _matrices(u: Tensor, matrices: Matrices) -> list[Tensor]:
    """Return the matrices as views."""
    return [u[start:stop].view(rows, columns) for start, stop, rows, columns in matrices]


def _factors(flat: Tensor, matrices: Matrices, rank: int, side: int) -> tuple[Tensor, ...]:
    """Return the left (side 2) or right (side 3) factor of each matrix, 1-D."""
    return flat.split([rank * matrix[side] for matrix in matrices]) if matrices else ()


def _run(kind: str, u: Tensor, matrices: Matrices, left: Tensor, right: Tensor, rank: int) -> None:
    def table() -> Tensor:
        rows = [(start, rows, columns) for start, _, rows, columns in matrices]
        return torch.tensor(rows, dtype=torch.int64, device=u.device)

    args = KINDS.index(kind), rank, len(matrices)
    native.run("low_rank", u, kept((_run, tuple(matrices)), u, table), left, right, *args)
