"""u with a payout: residual, gradients and what momentum would still change, added up in one pass.

    payout = Payout(first, second, coefficients)      # references: nothing is computed yet
    u = add_with_payout_(residual, bounds, changes, 1.0, payout, stats)

On CUDA one launch reads the changes, both moments and the residual, and writes the residual, u and the block maxima.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import BlockStats, _store_stats, for_kernel, overlaps
from lightning_sparse.kernels.gradient_table import TILE, _bisect, bisections, gradient_table
from lightning_sparse.kernels.launch import at_a_time, kernel, launch, same_dtype, uses_triton
from lightning_sparse.kernels.native import run, table, takes

if TYPE_CHECKING:
    import triton.language as tl


AT_A_TIME = 1 << 23
"""Most elements that plain torch works on at a time on CUDA, a multiple of 64: temporaries have 32 MB."""


@dataclass(frozen=True)
class Payout:
    """What momentum would still change of a segment's weights: a·m / (b·√v + c).

    Attributes:
        first: m of each parameter, 1-D, contiguous; None of one that has no momentum, whose payout is zero. At least
            one is not None.
        second: v of each parameter, in the same way; None where nothing is divided, and then b is 0 and c is 1.
        coefficients: a, b and c of each parameter, (3, parameters) fp32, on their device.
        root: whether v has to be rooted; a·m / (b·v + c) otherwise.
    """

    first: Sequence[Tensor | None]
    second: Sequence[Tensor | None] | None
    coefficients: Tensor
    root: bool = True

    @functools.cached_property
    def _each(self) -> list[Any]:
        """The coefficients parameter by parameter: numbers on the CPU, scalars on CUDA."""
        columns = self.coefficients.T
        return columns.tolist() if columns.device.type == "cpu" else [column.unbind() for column in columns.unbind()]

    def add(self, index: int, part: slice, term: Tensor, out: Tensor) -> None:
        """Write the sum of a term and of the payout of a part of a parameter.

        Args:
            index: of the parameter.
            part: of its elements.
            term: fp32, of the part's length.
            out: overwritten with the sum; not `term`.
        """
        moment = self.first[index]
        if moment is None:
            out.copy_(term)
            return
        m, (a, b, c) = moment[part].float(), self._each[index]
        if self.second is None or (not isinstance(b, Tensor) and b == 0):
            torch.add(term, m * (a / c), out=out)
            return
        second = self.second[index]
        assert second is not None
        v = second[part].float()
        torch.sqrt(v, out=out) if self.root else out.copy_(v)
        if isinstance(a, Tensor):
            divisor = torch.where(b == 0, 0, out * b).add_(c)  # v may be infinite
            torch.addcmul(term, m / divisor, a, out=out)
        else:
            torch.addcdiv(term, m, out.add_(c / b), value=a / b, out=out)


FindPayout = Callable[[list[Tensor]], Payout | None]
"""Returns a segment's payout, given what its parameters change by, 1-D fp32 each; None if there is no momentum yet."""


def add_with_payout_(
    residual: Tensor,
    bounds: Sequence[int],
    grads: Sequence[Tensor],
    scale: float | Tensor,
    payout: Payout,
    stats: BlockStats | None,
) -> Tensor:
    """Add `scale` times the gradients to the residual, in place; return that plus the payout, a new tensor.

    Args:
        residual: 1-D fp32, of the segment's length; overwritten.
        bounds: where each gradient starts in it, and its length as the last one.
        grads: 1-D, of any floating dtype; left as they are.
        scale: factor on the gradients: a number, or an fp32 scalar on their device.
        payout: what is added.
        stats: of the result, filled; None adds only.
    """
    u = torch.empty_like(residual)
    first, second = payout.first, payout.second
    moments = [x for x in (*first, *(second or ())) if x is not None]
    if uses_triton(u) and same_dtype(grads) and same_dtype(moments):
        _by_triton(u, residual, bounds, grads, scale, payout, stats)
        return u

    def by_torch(start: int, stop: int) -> None:
        for index, left, right in overlaps(bounds, start, stop):
            part, term = slice(left - bounds[index], right - bounds[index]), residual[left:right]
            grad = grads[index][part]
            if isinstance(scale, Tensor):
                term.add_(grad.float() * scale)
            else:
                term.add_(grad, alpha=scale)
            payout.add(index, part, term, u[left:right])

    in_c = takes((u, residual, *grads, *moments))
    form = _by_loop(u, residual, bounds, grads, scale, payout) if in_c else by_torch
    each = min(at_a_time(u), AT_A_TIME)
    if stats is not None and not uses_triton(u):
        stats.over(u, form, each)
        return u
    for start in range(0, u.numel(), each):
        form(start, min(start + each, u.numel()))
    if stats is not None:
        stats.read(u)
    return u


def _by_loop(
    u: Tensor, residual: Tensor, bounds: Sequence[int], grads: Sequence[Tensor], scale: float | Tensor, payout: Payout
) -> Callable[[int, int], None]:
    """Return what forms a part of u in C."""
    tables = [None if each is None else table(each, bounds) for each in (grads, payout.first, payout.second)]
    args = u, residual, *tables, payout.coefficients, float(scale), len(grads), len(u), payout.root
    return functools.partial(run, "add_with_payout", *args)


def _by_triton(
    u: Tensor,
    residual: Tensor,
    bounds: Sequence[int],
    grads: Sequence[Tensor],
    scale: float | Tensor,
    payout: Payout,
    stats: BlockStats | None,
) -> None:
    tiles, some = -(-u.numel() // TILE), next(x for x in payout.first if x is not None)
    outputs, constants = for_kernel(stats, u, tiles)
    grads = [x.contiguous() for x in grads]  # the kernel reads them
    tables = [
        gradient_table(grads, bounds),
        gradient_table(payout.first, bounds),
        gradient_table(payout.second or payout.first, bounds),
    ]
    launch(
        _add_with_payout,
        tiles,
        u,
        residual,
        *tables,
        grads[0],
        some,
        payout.coefficients,
        scale,
        *outputs,
        len(grads),
        u.numel(),
        DIVIDE=payout.second is not None,
        ROOT=payout.root,
        STEPS=bisections(len(grads)),
        LOAD=isinstance(scale, Tensor),
        **constants,
    )


@kernel("scale", "many", "numel")
def _add_with_payout(
    u,
    residual,
    grads,
    firsts,
    seconds,
    typed,
    moment,
    coefficients,
    scale,
    maxima,
    partial,
    many,
    numel,
    DIVIDE: tl.constexpr,
    ROOT: tl.constexpr,
    STEPS: tl.constexpr,
    LOAD: tl.constexpr,
    MAXIMA: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """Three tables are of `gradient_table`; `typed` and `moment` only say dtypes of gradients and of moments."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, TILE // BLOCK)
    within = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    offsets = tile * TILE + within
    factor = scale
    if LOAD:
        factor = tl.load(scale)
    at_grad = tl.load(grads + 2 * many + tile)
    at_first = tl.load(firsts + 2 * many + tile)
    if at_grad != 0 and at_first != 0:
        at_second = tl.load(seconds + 2 * many + tile)
        # Loads without a mask are 16 bytes wide whatever the length is, from memory that is aligned.
        if (at_grad | at_first | at_second) % 16 == 0:
            grad = tl.load(tl.multiple_of(at_grad.to(tl.pointer_type(typed.dtype.element_ty)), 16) + within)
            m = tl.load(tl.multiple_of(at_first.to(tl.pointer_type(moment.dtype.element_ty)), 16) + within)
            v = m
            if DIVIDE:
                v = tl.load(tl.multiple_of(at_second.to(tl.pointer_type(moment.dtype.element_ty)), 16) + within)
        else:
            grad = tl.load(at_grad.to(tl.pointer_type(typed.dtype.element_ty)) + within)
            m = tl.load(at_first.to(tl.pointer_type(moment.dtype.element_ty)) + within)
            v = m
            if DIVIDE:
                v = tl.load(at_second.to(tl.pointer_type(moment.dtype.element_ty)) + within)
        kept = tl.fma(grad.to(tl.float32), factor, tl.load(residual + offsets))
        tl.store(residual + offsets, kept)
        number = _bisect(grads, tile * TILE, many, STEPS)
        x = kept + _paid(m.to(tl.float32), v.to(tl.float32), coefficients + number, many, DIVIDE, ROOT)
        tl.store(u + offsets, x)
    else:
        # Seldom: little at a time, so that this does not take the registers that the other way needs.
        for part in range(TILE // PART):
            index = tile * TILE + part * PART + tl.arange(0, PART)
            valid = index < numel
            number = _bisect(grads, index, many, STEPS)
            start = index - tl.load(grads + number)
            places = tl.load(grads + many + number).to(tl.pointer_type(typed.dtype.element_ty)) + start
            grad = tl.load(places, mask=valid, other=0.0).to(tl.float32)
            kept = tl.fma(grad, factor, tl.load(residual + index, mask=valid, other=0.0))
            tl.store(residual + index, kept, mask=valid)
            address = tl.load(firsts + many + number)
            has = valid & (address != 0)
            m = tl.load(address.to(tl.pointer_type(moment.dtype.element_ty)) + start, mask=has, other=0.0)
            v = m
            if DIVIDE:
                address = tl.load(seconds + many + number)
                v = tl.load(address.to(tl.pointer_type(moment.dtype.element_ty)) + start, mask=has, other=1.0)
            paid = _paid(m.to(tl.float32), v.to(tl.float32), coefficients + number, many, DIVIDE, ROOT)
            tl.store(u + index, kept + tl.where(has, paid, 0.0), mask=valid)
        tl.debug_barrier()
        x = tl.load(u + offsets, mask=offsets < numel, other=0.0)
    _store_stats(x, tile, maxima, partial, numel, MAXIMA, MOMENTS, BLOCK, TILE)


@kernel()
def _paid(m, v, coefficients, many, DIVIDE: tl.constexpr, ROOT: tl.constexpr):
    """Return a·m / (b·√v + c)."""
    paid = tl.load(coefficients) * m
    if DIVIDE:
        b = tl.load(coefficients + many)
        v = tl.where(b == 0, 0.0, v)  # it may be infinite
        if ROOT:
            v = tl.sqrt(v)
        paid = paid / (b * v + tl.load(coefficients + 2 * many))
    return paid
