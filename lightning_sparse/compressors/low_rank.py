"""LowRank: each matrix as a product of two thin ones. The aggregator `PowerSGD` sums both factors over the ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Payload, Update, check_length, exact_values, write_exact_
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.kernels import low_rank
from lightning_sparse.kernels.basis import bases
from lightning_sparse.kernels.native import check_part
from lightning_sparse.kernels.uniform import add_uniform_
from lightning_sparse.layout import Segment
from lightning_sparse.options import check

DEPENDENT = 1e-6
"""A column of P counts as linearly dependent if the share of its norm that is orthogonal to the columns before it is at
most this: about ten roundings of fp32."""


@dataclass(frozen=True)
class LowRank(Compressor):
    """M ≈ P̂ Qᵀ with P = M Q₀, P̂ an orthonormal basis of P's columns, and Q = Mᵀ P̂: one step of subspace iteration.

    Vogels et al. 2019, arXiv 1905.13727. M (n, m) is a parameter of two or more dimensions, all but the first
    flattened; P̂ is (n, rank), Q (m, rank). Q₀ is the Q of the step before, its columns scaled to length 1, so that over
    the steps P̂ turns to the largest singular vectors. At first, and where a column was zero, because M had a lower
    rank, it is drawn at random, the same on all ranks.

    M travels as it is, exactly, where (n + m) · rank < n · m / 2 does not hold, and so do parameters of less than two
    dimensions. What P̂ Qᵀ = P̂ P̂ᵀ M leaves out is the residual's. A matrix of a rank up to `rank` comes back exactly, up
    to rounding: its columns are all in the span of P.

    Payload: P̂ of all matrices, Qᵀ of all matrices, and what travels exactly; each 1-D, fp32.

    Attributes:
        rank: number of columns of P̂ and Q, 1 or more.
    """

    rank: int = 4

    state = (StateSpec("right", per="segment", resize="replicate"),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check("rank", self.rank, "LowRank"))

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        products, exact = self.left_products(u, ctx)
        left = self.orthonormal(products, ctx)
        right = self.right_products(u, left, ctx)
        ctx.state["right"] = right
        payload = (left, right, exact)
        return payload, self.decode(payload, ctx)

    def left_products(self, u: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return M Q₀ of all matrices, and what travels exactly. Both hold a NaN or an infinity if `u` does."""
        check_length(u, ctx)
        parts = _parts(ctx.segment, self.rank)
        exact, starts = exact_values(u, parts.exact), self._starts(parts, u.device, ctx)
        right = torch.cat([u[:0], *(start.view(-1) for start in starts)])
        return low_rank.left_products(u, parts.matrices, right, self.rank), exact

    def _starts(self, parts: _Parts, device: torch.device, ctx: Context) -> list[Tensor]:
        """Return Q₀ of all matrices, each (rank, columns), with rows of length 1."""
        known = ctx.state.get("right")
        # With another rank, or in another partition, it starts anew.
        units = [_unit(x) for x in parts.right_views(known)] if known is not None and len(known) == parts.right else []
        # NaN is a row that was zero. On CUDA the host does not know of any: there numbers are drawn in every step.
        if units and device.type == "cpu" and not any(bool(unit[:, 0].isnan().any()) for unit in units):
            return units
        drawn = torch.zeros(parts.right, dtype=torch.float32, device=device)
        add_uniform_(drawn, ctx.key(shared=True)).mul_(math.sqrt(12))  # of variance 1
        starts = [start / math.sqrt(start.shape[1]) for start in parts.right_views(drawn)]
        return [torch.where(x.isnan(), start, x) for x, start in zip(units, starts, strict=True)] if units else starts

    def orthonormal(self, products: Tensor, ctx: Context) -> Tensor:
        """Return an orthonormal basis of the columns of each P; a column that depends on those before becomes zero."""
        parts = _parts(ctx.segment, self.rank)
        if products.device.type == "cpu":
            return bases(products, [rows for _, _, rows, _ in parts.matrices], self.rank, DEPENDENT)
        made = []
        for product in parts.left_views(products):
            basis, triangle = torch.linalg.qr(product)
            # NaN for a column of zeros, which gets any direction; and for what is too large, so that it shows.
            across = triangle.diagonal().abs() / triangle.abs().amax(0)
            made.append(torch.where(across < DEPENDENT, 0, basis).reshape(-1))
        return torch.cat([products[:0], *made])

    def right_products(self, u: Tensor, left: Tensor, ctx: Context) -> Tensor:
        """Return P̂ᵀ M of all matrices, one after the other."""
        return low_rank.right_products(u, _parts(ctx.segment, self.rank).matrices, left, self.rank)

    def decode(self, payload: Payload, ctx: Context) -> Update:
        left, right, exact = payload
        parts = _parts(ctx.segment, self.rank)
        check_part("left factors", left, parts.left)
        check_part("right factors", right, parts.right)
        update = torch.empty(ctx.segment.numel, dtype=torch.float32, device=left.device)
        low_rank.write_products_(update, parts.matrices, left, right, self.rank)
        write_exact_(update, parts.exact, exact)
        return update

    def nbytes(self, segment: Segment, density: float | None) -> int:
        parts = _parts(segment, self.rank)
        return 4 * (parts.left + parts.right + sum(stop - start for start, stop in parts.exact))


def _unit(rows: Tensor) -> Tensor:
    """Return rows of length 1, (rank, m); NaN for those that are zero."""
    # In fp64: the squares of large numbers overflow, those of small ones vanish.
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return (rows / lengths).float()


class _Parts(NamedTuple):
    """Which elements of a segment travel as matrices of low rank, and which exactly.

    Attributes:
        rank: of the matrices.
        matrices: start and stop in the segment, rows and columns of each.
        exact: start and stop of the others.
    """

    rank: int
    matrices: tuple[tuple[int, int, int, int], ...]
    exact: tuple[tuple[int, int], ...]

    @property
    def left(self) -> int:
        """Elements of the left factors."""
        return self.rank * sum(rows for _, _, rows, _ in self.matrices)

    @property
    def right(self) -> int:
        """Elements of the right factors."""
        return self.rank * sum(columns for *_, columns in self.matrices)

    def left_views(self, flat: Tensor) -> list[Tensor]:
        """Cut left factors, one after the other, into views, (rows, rank)."""
        return [x.view(-1, self.rank) for x in flat.split([self.rank * rows for _, _, rows, _ in self.matrices])]

    def right_views(self, flat: Tensor) -> list[Tensor]:
        """Cut right factors, one after the other, into views, (rank, columns)."""
        return [x.view(self.rank, -1) for x in flat.split([self.rank * columns for *_, columns in self.matrices])]


@functools.lru_cache(maxsize=4096)
def _parts(segment: Segment, rank: int) -> _Parts:
    matrices, exact = [], []
    for shape, (start, stop) in zip(segment.shapes, pairwise(segment.bounds), strict=True):
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        if 2 * (rows + columns) * rank < rows * columns:
            matrices.append((start, stop, rows, columns))
        else:
            exact.append((start, stop))
    return _Parts(rank, tuple(matrices), tuple(exact))
