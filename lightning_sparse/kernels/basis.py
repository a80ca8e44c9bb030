"""Orthonormal bases on the CPU whose bits do not depend on a rank's processor, threads and libraries.

    basis = bases(products, rows, rank, dependent)    # of concatenated matrices, (rows, rank) each

LAPACK's bases depend on the processor and on the number of threads, so the ranks' weights would drift apart. Here each
column is made orthogonal to all earlier columns, twice, in fp64. Only sums could depend on the processor. Their terms
are rounded to multiples of a number so large that all sums are exact (Demmel and Nguyen 2013, "Fast reproducible
floating-point summation").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.launch import kept


@operation
def bases(products: Tensor, rows: Sequence[int], rank: int, dependent: float) -> Tensor:
    """Return an orthonormal basis of the columns of each matrix, 1-D fp32, in the same order.

    A column becomes zero if its part that is orthogonal to earlier columns has at most `dependent` times its norm.

    Args:
        products: concatenated matrices, (rows, rank) each, 1-D fp32.
        rows: number of rows of each matrix.
        rank: number of columns of every matrix.
    """
    out = torch.empty_like(products)
    sizes = [rank * count for count in rows]
    for given, basis in zip(products.split(sizes), out.split(sizes), strict=True):
        _write_basis_(given.view(-1, rank), basis.view(-1, rank), dependent)
    return out


@bases.by("native")
def _bases_in_c(products: Tensor, rows: Sequence[int], rank: int, dependent: float) -> Tensor:
    out = torch.empty_like(products)
    counts = kept((bases, *rows), products, lambda: torch.tensor(rows, dtype=torch.int64, device="cpu"))
    scratch = torch.empty(rank * max(rows, default=0), dtype=torch.int64, device="cpu")  # bits of fp64 numbers
    native.run("bases", products, counts, out, scratch, dependent, rank, len(rows))
    return out


def _write_basis_(given: Tensor, basis: Tensor, dependent: float) -> None:
    columns: list[Tensor] = []
    for number, column in enumerate(given.double().T.contiguous()):
        before = _dot(column, column)
        for other in columns * 2:
            column -= other * _dot(other, column)
        after = _dot(column, column)
        is_zero = after <= before * dependent * dependent < math.inf  # NaN and infinities stay visible
        columns.append(torch.zeros_like(column) if is_zero else column / math.sqrt(after))
        basis[:, number] = columns[-1]


def _dot(x: Tensor, y: Tensor) -> float:
    """Return the dot product of two vectors; its sums are exact unless they are NaN or infinite."""
    terms = x * y
    bound = len(terms) * float(terms.abs().amax())
    large = math.ldexp(3, math.frexp(bound)[1]) if 0 < bound <= 1e300 else 0.0
    return float(((terms + large) - large).sum())
