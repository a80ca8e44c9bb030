"""Computes u = residual + delta + unspent momentum in one pass.

    payout = Payout(coefficients, references)         # computes nothing yet
    u = add_with_payout_(residual, bounds, deltas, 1.0, payout, stats, torch.empty_like(residual))

On CUDA one launch reads the deltas, the references and the residual, and writes the residual, u and the block maxima.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import BlockStats, _store_stats, for_kernel, overlaps
from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.gradient_table import TILE, _bisect, bisections, gradient_table
from lightning_sparse.kernels.launch import at_a_time, kernel, launch, same_dtype, tl
from lightning_sparse.kernels.native import run, table, takes

AT_A_TIME = 1 << 23
"""Most elements that plain torch processes at a time on CUDA, a multiple of 64: temporaries take 32 MB."""


@dataclass(frozen=True)
class Payout:
    """The unspent momentum of a segment's parameters: (a·delta + b·reference) / f.

    Attributes:
        coefficients: a and b of each parameter, (2, parameters) fp32, on their device; both 0 without momentum.
        references: reference of each parameter, 1-D, contiguous, of one floating dtype; None if b is not used.
        factors: f of each parameter, the factor on its delta, 1-D fp32, on their device; None means 1.
    """

    coefficients: Tensor
    references: Sequence[Tensor] | None = None
    factors: Tensor | None = None


FindPayout = Callable[[], Payout | None]
"""Returns a segment's payout; None if there is no momentum yet."""


@operation
def add_with_payout_(
    residual: Tensor,
    bounds: Sequence[int],
    deltas: Sequence[Tensor],
    scale: float | Tensor,
    payout: Payout,
    stats: BlockStats | None,
    u: Tensor,
) -> Tensor:
    """Add `scale` times the deltas to the residual, in place; write the sum plus the payout to `u`, and return it.

    Args:
        residual: 1-D fp32, of the segment's length; overwritten.
        bounds: start of each delta in the residual, and the residual's length as the last one.
        deltas: 1-D, of any floating dtype; not changed.
        scale: factor on the deltas: a number, or an fp32 scalar on their device.
        payout: the unspent momentum.
        stats: statistics of the result, to fill; None if they are not wanted.
        u: 1-D fp32, of the segment's length; overwritten.
    """
    references = payout.references or ()

    def form(start: int, stop: int) -> None:
        for index, left, right in overlaps(bounds, start, stop):
            part, term, out = slice(left - bounds[index], right - bounds[index]), residual[left:right], u[left:right]
            delta, (a, b) = deltas[index][part].float(), payout.coefficients[:, index]
            term.add_(delta * scale)
            unspent = delta * a
            if references:
                unspent.add_(references[index][part].float() * b)
            if payout.factors is not None:
                unspent.div_(payout.factors[index])
            torch.add(term, unspent, out=out)

    _fill(u, form, stats)
    return u


def _fill(u: Tensor, form: Callable[[int, int], None], stats: BlockStats | None) -> None:
    """Form `u` part by part, and fill its statistics; `form` writes a part, given its bounds."""
    each = min(at_a_time(u), AT_A_TIME)
    if stats is not None and u.is_cpu:  # while the part is in cache
        stats.over(u, form, each)
        return
    for start in range(0, u.numel(), each):
        form(start, min(start + each, u.numel()))
    if stats is not None:
        stats.read(u)


@add_with_payout_.by(
    "native",
    when=lambda residual, bounds, deltas, scale, payout, *_: takes((residual, *deltas, *(payout.references or ()))),
)
def _add_with_payout_in_c(residual, bounds, deltas, scale, payout, stats, u):
    tables = [None if each is None else table(each, bounds) for each in (deltas, payout.references)]
    args = u, residual, *tables, payout.coefficients, payout.factors, float(scale), len(deltas), len(u)
    _fill(u, functools.partial(run, "add_delta_with_payout", *args), stats)
    return u


def _fit_kernel(residual, bounds, deltas, scale, payout, *_):
    return same_dtype(deltas) and same_dtype(payout.references or deltas)


@add_with_payout_.by("triton", when=_fit_kernel)
def _add_with_payout_by_triton(residual, bounds, deltas, scale, payout, stats, u):
    tiles = -(-u.numel() // TILE)
    outputs, constants = for_kernel(stats, u, tiles)
    deltas = [x.contiguous() for x in deltas]  # the kernel reads raw memory
    references = payout.references or deltas
    launch(
        _add_with_payout,
        tiles,
        u,
        residual,
        gradient_table(deltas, bounds),
        gradient_table(references, bounds),
        deltas[0],
        references[0],
        payout.coefficients,
        payout.coefficients if payout.factors is None else payout.factors,
        scale,
        *outputs,
        len(deltas),
        u.numel(),
        REFERENCE=payout.references is not None,
        RESCALED=payout.factors is not None,
        STEPS=bisections(len(deltas)),
        LOAD=isinstance(scale, Tensor),
        **constants,
    )
    return u


@kernel("scale", "many", "numel")
def _add_with_payout(
    u,
    residual,
    deltas,
    references,
    delta_dtype,
    reference_dtype,
    coefficients,
    factors,
    scale,
    maxima,
    partial,
    many,
    numel,
    REFERENCE: tl.constexpr,
    RESCALED: tl.constexpr,
    STEPS: tl.constexpr,
    LOAD: tl.constexpr,
    MAXIMA: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """`deltas` and `references` come from `gradient_table`; `delta_dtype` and `reference_dtype` only give dtypes."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, TILE // BLOCK)
    within = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    offsets = tile * TILE + within
    factor = scale
    if LOAD:
        factor = tl.load(scale)
    at_delta = tl.load(deltas + 2 * many + tile)
    at_reference = tl.load(references + 2 * many + tile)
    if at_delta != 0 and at_reference != 0:
        # Loads without a mask from aligned memory are 16 bytes wide, whatever the length is.
        if (at_delta | at_reference) % 16 == 0:
            delta = tl.load(tl.multiple_of(at_delta.to(tl.pointer_type(delta_dtype.dtype.element_ty)), 16) + within)
            w = delta
            if REFERENCE:
                pointer = at_reference.to(tl.pointer_type(reference_dtype.dtype.element_ty))
                w = tl.load(tl.multiple_of(pointer, 16) + within)
        else:
            delta = tl.load(at_delta.to(tl.pointer_type(delta_dtype.dtype.element_ty)) + within)
            w = delta
            if REFERENCE:
                w = tl.load(at_reference.to(tl.pointer_type(reference_dtype.dtype.element_ty)) + within)
        delta = delta.to(tl.float32)
        kept = tl.fma(delta, factor, tl.load(residual + offsets))
        tl.store(residual + offsets, kept)
        number = _bisect(deltas, tile * TILE, many, STEPS)
        unspent = tl.load(coefficients + number) * delta
        if REFERENCE:
            unspent += tl.load(coefficients + many + number) * w.to(tl.float32)
        if RESCALED:
            unspent = unspent / tl.load(factors + number)
        x = kept + unspent
        tl.store(u + offsets, x)
    else:
        # This rare case works on small parts, so that it takes no registers from the common case.
        for part in range(TILE // PART):
            index = tile * TILE + part * PART + tl.arange(0, PART)
            valid = index < numel
            number = _bisect(deltas, index, many, STEPS)
            start = index - tl.load(deltas + number)
            places = tl.load(deltas + many + number).to(tl.pointer_type(delta_dtype.dtype.element_ty)) + start
            delta = tl.load(places, mask=valid, other=0.0).to(tl.float32)
            kept = tl.fma(delta, factor, tl.load(residual + index, mask=valid, other=0.0))
            tl.store(residual + index, kept, mask=valid)
            unspent = tl.load(coefficients + number) * delta
            if REFERENCE:
                places = tl.load(references + many + number).to(tl.pointer_type(reference_dtype.dtype.element_ty))
                w = tl.load(places + start, mask=valid, other=0.0).to(tl.float32)
                unspent += tl.load(coefficients + many + number) * w
            if RESCALED:
                unspent = unspent / tl.load(factors + number)
            tl.store(u + index, kept + unspent, mask=valid)
        tl.debug_barrier()
        x = tl.load(u + offsets, mask=offsets < numel, other=0.0)
    _store_stats(x, tile, maxima, partial, numel, MAXIMA, MOMENTS, BLOCK, TILE)
