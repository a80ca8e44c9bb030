"""Adds sparse terms to the residual, and writes a segment's result into its gradients.

Terms are added in the order given, one after the other. The indices of a term are distinct. So results do not depend on
the order of threads, and kernels need no atomic additions.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.gradient_table import TILE as TABLE_TILE
from lightning_sparse.kernels.gradient_table import _address, bisections, gradient_table
from lightning_sparse.kernels.launch import kernel, launch, same_dtype, tl
from lightning_sparse.kernels.native import run, table, takes

TILE = 1024
"""Number of entries that one program of the kernels adds."""


@operation
def add_entries_(x: Tensor, indices: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    """Add `scale` times the values to `x` (1-D, fp32), in place.

    Args:
        x: overwritten at the indices.
        indices: int64, distinct; may be padded, see `kernels/pack.py`.
        values: fp32, one per index.
        scale: factor on the values.
    """
    if indices.numel() and int(indices[-1]) >= x.numel():
        valid = indices < x.numel()
        indices, values = indices[valid], values[valid]
    return x.index_add_(0, indices, values, alpha=scale)


@add_entries_.by("triton")
def _add_entries_by_triton(x, indices, values, scale=1.0):
    if count := indices.numel():
        launch(_add_entries, -(-count // TILE), x, indices, values, float(scale), count, x.numel(), TILE=TILE)
    return x


@kernel("scale", "count", "numel")
def _add_entries(x, indices, values, scale, count, numel, TILE: tl.constexpr):
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + positions, mask=positions < count, other=numel)
    valid = index < numel
    value = tl.load(values + positions, mask=valid, other=0.0)
    tl.store(x + index, tl.fma(value, scale, tl.load(x + index, mask=valid, other=0.0)), mask=valid)


@operation
def write_entries_(
    grads: Sequence[Tensor],
    bounds: Sequence[int],
    terms: Sequence[tuple[Tensor, Tensor]],
    step_ok: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Overwrite gradients with a sum of sparse terms, without a dense temporary.

    Args:
        grads: one 1-D gradient per parameter; overwritten.
        bounds: offsets of the parameters in the segment, and its length as the last one.
        terms: (int64 indices into the segment, ascending; fp32 values), added in this order, so that the result is
            the same on all ranks. They may be padded, see `kernels/pack.py`.
        step_ok: a bool scalar on the device; if it is false, zeros are written. None means true.

    Returns:
        The rounding error of 16-bit gradients, as (indices, values); None if all gradients are fp32.
    """
    rounded = any(grad.dtype != torch.float32 for grad in grads)
    torch._foreach_zero_(list(grads))
    terms = _unless_failed(terms, step_ok)
    if rounded:
        terms = [coalesce(terms, bounds[-1])]  # round each element only once
    edges = torch.tensor(bounds, device=grads[0].device)
    errors = []
    for indices, values in terms:
        cuts = torch.searchsorted(indices, edges).tolist()
        for grad, start, (first, last) in zip(grads, bounds, pairwise(cuts), strict=False):
            if first < last:
                where, what = indices[first:last] - start, values[first:last]
                fitting = cast_saturating(what, grad.dtype)
                grad.index_add_(0, where, fitting)
                if rounded:
                    errors.append(what - fitting.float())
    # Leave out the padding, whose values are 0.
    return (indices[: cuts[-1]], torch.cat([*errors, edges.new_empty(0, dtype=torch.float32)])) if rounded else None


@write_entries_.by("native", when=lambda grads, *_, **__: takes(grads))
def _write_entries_in_c(grads, bounds, terms, step_ok=None):
    torch._foreach_zero_(list(grads))
    _run_loop(grads, bounds, _unless_failed(terms, step_ok))


def _fit_kernel(grads, *_, **__):
    return same_dtype(grads) and all(grad.is_contiguous() for grad in grads)


@write_entries_.by("triton", when=_fit_kernel)
def _write_entries_by_triton(grads, bounds, terms, step_ok=None):
    rounded = grads[0].dtype != torch.float32
    if programs := -(-bounds[-1] // TABLE_TILE):
        args = gradient_table(grads, bounds), grads[0], bounds[-1], len(grads)
        launch(_zero_all, programs, *args, TILE=TABLE_TILE, PART=256, STEPS=bisections(len(grads)))
    if rounded and len(terms) > 1:
        terms = [coalesce(terms, bounds[-1])]
    cast = [(indices, cast_saturating(values, grads[0].dtype)) for indices, values in terms]
    _add_to_all(grads, bounds, cast, step_ok)
    if not rounded:
        return None
    rest = terms[0][1] - cast[0][1].float()
    return terms[0][0], rest if step_ok is None else torch.where(step_ok, rest, 0)


def _unless_failed(terms: Sequence[tuple[Tensor, Tensor]], step_ok: Tensor | None) -> Sequence[tuple[Tensor, Tensor]]:
    if step_ok is None:
        return terms
    return [(indices, torch.where(step_ok, values, 0)) for indices, values in terms]


@operation
def clear_entries_(tensors: Sequence[Tensor | None], bounds: Sequence[int], indices: Tensor) -> None:
    """Set tensors to zero at some indices, in place.

    Args:
        tensors: one per parameter, 1-D, contiguous; None if the parameter has none.
        bounds: offsets of the parameters in the segment, and its length as the last one.
        indices: int64, into the segment, ascending; may be padded, see `kernels/pack.py`.
    """
    cuts = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
    for x, start, (first, last) in zip(tensors, bounds, pairwise(cuts), strict=False):
        if x is not None and first < last:
            x.index_fill_(0, indices[first:last] - start, 0)


@clear_entries_.by("native", when=lambda tensors, *_: takes(tensors))
def _clear_entries_in_c(tensors, bounds, indices):
    _run_loop(tensors, bounds, [(indices, None)])


@clear_entries_.by("triton")
def _clear_entries_by_triton(tensors, bounds, indices):
    for dtype in {x.dtype for x in tensors if x is not None} if indices.numel() else ():
        same = [x if x is not None and x.dtype == dtype else None for x in tensors]
        some = next(x for x in same if x is not None)
        args = (gradient_table(same, bounds), some, indices, indices.numel(), bounds[-1], len(same))
        launch(_clear, -(-indices.numel() // TILE), *args, TILE=TILE, STEPS=bisections(len(same)))


def _run_loop(
    tensors: Sequence[Tensor | None], bounds: Sequence[int], terms: Sequence[tuple[Tensor, Tensor | None]]
) -> None:
    """Add terms in C; if a term has no values, set the tensors to zero at its indices."""
    places = table(tensors, bounds)
    for indices, values in terms:
        assert values is None or len(values) == len(indices)
        entries = indices.long().contiguous(), None if values is None else values.contiguous()
        run("write_entries", places, *entries, len(indices), len(tensors), bounds[-1])


@kernel("count", "numel", "many")
def _clear(table, typed, indices, count, numel, many, TILE: tl.constexpr, STEPS: tl.constexpr):
    """`table` comes from `gradient_table`; `typed` only gives the tensors' dtype."""
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + positions, mask=positions < count, other=numel)
    addresses, starts = _address(table, index, many, STEPS)
    places = addresses.to(tl.pointer_type(typed.dtype.element_ty)) + (index - starts)
    tl.store(places, tl.zeros((TILE,), typed.dtype.element_ty), mask=(index < numel) & (addresses != 0))


def _add_to_all(
    grads: Sequence[Tensor], bounds: Sequence[int], terms: Sequence[tuple[Tensor, Tensor]], step_ok: Tensor | None
) -> None:
    """Add terms, by Triton, to gradients of the values' dtype at any addresses, with one launch for each term."""
    table, steps = gradient_table(grads, bounds), bisections(len(grads))
    for indices, values in terms:
        if count := indices.numel():
            args = (table, grads[0], indices, values, table if step_ok is None else step_ok)
            constants = {"TILE": TILE, "STEPS": steps, "WHEN": step_ok is not None}
            launch(_add_to_many, -(-count // TILE), *args, count, bounds[-1], len(grads), **constants)


@kernel("count", "numel", "many")
def _add_to_many(
    table,
    typed,
    indices,
    values,
    step_ok,
    count,
    numel,
    many,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,  # Triton 3.6's interpreter takes no tensor as a range, with NumPy 2.5
    WHEN: tl.constexpr,
):
    """`table` comes from `gradient_table`; `typed` only gives the gradients' dtype."""
    positions = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + positions, mask=positions < count, other=numel)
    if WHEN:
        # If not ok, no index is valid. (Triton 3.9's interpreter makes an integer of a mask & a scalar, and fails.)
        numel = tl.where(tl.load(step_ok), numel, 0)
    valid = index < numel
    value = tl.load(values + positions, mask=valid, other=0.0)
    addresses, starts = _address(table, index, many, STEPS)
    address = addresses.to(tl.pointer_type(typed.dtype.element_ty)) + (index - starts)
    tl.store(address, tl.load(address, mask=valid, other=0.0) + value, mask=valid)


@operation
def _write_to_all(grads: Sequence[Tensor], bounds: Sequence[int], out: Tensor, step_ok: Tensor | None) -> None:
    """Write a dense result to all gradients."""
    for grad, (start, stop) in zip(grads, pairwise(bounds), strict=True):
        fitting = cast_saturating(out[start:stop], grad.dtype)
        grad.copy_(fitting if step_ok is None else torch.where(step_ok, fitting, 0))


@_write_to_all.by("triton", when=_fit_kernel)
def _write_to_all_by_triton(grads, bounds, out, step_ok):
    out = cast_saturating(out, grads[0].dtype)
    if programs := -(-bounds[-1] // TABLE_TILE):
        table = gradient_table(grads, bounds)
        args = (table, out, table if step_ok is None else step_ok, bounds[-1], len(grads))
        constants = {"TILE": TABLE_TILE, "PART": 256, "STEPS": bisections(len(grads)), "WHEN": step_ok is not None}
        launch(_write_to_many, programs, *args, **constants)


@kernel("numel", "many")
def _write_to_many(
    table,
    out,
    step_ok,
    numel,
    many,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    STEPS: tl.constexpr,
    WHEN: tl.constexpr,
):
    """`table` comes from `gradient_table`."""
    tile = tl.program_id(0).to(tl.int64)
    ok = True
    if WHEN:
        ok = tl.load(step_ok)
    address = tl.load(table + 2 * many + tile)
    if address != 0:
        within = tl.arange(0, TILE)
        value = tl.load(out + tile * TILE + within)
        tl.store(address.to(tl.pointer_type(out.dtype.element_ty)) + within, tl.where(ok, value, 0.0))
    else:
        for part in range(TILE // PART):
            index = tile * TILE + part * PART + tl.arange(0, PART)
            valid = index < numel
            value = tl.load(out + index, mask=valid, other=0.0)
            addresses, starts = _address(table, index, many, STEPS)
            places = addresses.to(tl.pointer_type(out.dtype.element_ty)) + (index - starts)
            tl.store(places, tl.where(ok, value, 0.0), mask=valid)


@kernel("numel", "many")
def _zero_all(table, typed, numel, many, TILE: tl.constexpr, PART: tl.constexpr, STEPS: tl.constexpr):
    """`table` comes from `gradient_table`; `typed` only gives the gradients' dtype."""
    tile = tl.program_id(0).to(tl.int64)
    address = tl.load(table + 2 * many + tile)
    zeros = tl.zeros((TILE,), typed.dtype.element_ty)
    if address != 0:
        # Stores to aligned memory are 16 bytes wide. Each branch has its own pointer, because the hint changes it.
        if address % 16 == 0:
            wide = tl.multiple_of(address.to(tl.pointer_type(typed.dtype.element_ty)), 16)
            tl.store(wide + tl.arange(0, TILE), zeros)
        else:
            tl.store(address.to(tl.pointer_type(typed.dtype.element_ty)) + tl.arange(0, TILE), zeros)
    else:
        for part in range(TILE // PART):
            index = tile * TILE + part * PART + tl.arange(0, PART)
            addresses, starts = _address(table, index, many, STEPS)
            places = addresses.to(tl.pointer_type(typed.dtype.element_ty)) + (index - starts)
            tl.store(places, tl.zeros((PART,), typed.dtype.element_ty), mask=index < numel)


def cast_saturating(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round finite values to a dtype; values out of its range become its largest number, not infinity."""
    if dtype == values.dtype:
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


@operation
def coalesce(terms: Sequence[tuple[Tensor, Tensor]], numel: int) -> tuple[Tensor, Tensor]:
    """Sum sparse terms of `numel` elements in the order given; return each index once, ascending, with its fp32 sum.

    If the terms are padded, so is the result. Triton always pads the result to the total length of all terms.
    """
    return _summed(torch.unique(torch.cat([term[0] for term in terms])), terms)


@coalesce.by("triton")
def _coalesce_by_triton(terms, numel):
    indices = torch.cat([term[0] for term in terms]).sort().values
    again = torch.zeros_like(indices, dtype=torch.bool)
    torch.eq(indices[1:], indices[:-1], out=again[1:])
    # Padding has the value zero, and follows all indices.
    return _summed(torch.where(again, numel, indices).sort().values, terms)


def _summed(indices: Tensor, terms: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    values = torch.zeros(len(indices), dtype=torch.float32, device=indices.device)
    for where, what in terms:
        add_entries_(values, torch.searchsorted(indices, where), what)
    return indices, values


def lookup(positions: Tensor, entries: tuple[Tensor, Tensor]) -> Tensor:
    """Return the entries' values at the positions, 0 at other positions; both ascend and may be padded."""
    indices, values = entries
    if not indices.numel():
        return values.new_zeros(positions.shape)
    position = torch.searchsorted(indices, positions).clamp_(max=indices.numel() - 1)
    return torch.where(indices[position] == positions, values[position], 0)


@operation
def drop_empty(entries: tuple[Tensor, Tensor], numel: int) -> tuple[Tensor, Tensor]:
    """Drop padding, at any position, and entries of value 0; Triton turns them into padding at the end.

    The indices of the other entries ascend. Corrupt indices, which are above `numel`, are not dropped.
    """
    indices, values = entries
    valid = (indices != numel) & (values != 0)
    return indices[valid], values[valid]


@drop_empty.by("triton")
def _drop_empty_by_triton(entries, numel):
    indices, values = entries
    valid = (indices != numel) & (values != 0)
    indices, order = torch.where(valid, indices, numel).sort()
    return indices, torch.where(valid, values, 0)[order]


def write_dense_(
    grads: Sequence[Tensor], bounds: Sequence[int], out: Tensor, error_feedback: bool, step_ok: Tensor | None = None
) -> Tensor | None:
    """Overwrite gradients with a dense result (1-D fp32, of the segment's length), or with zeros, see `write_entries_`.

    Returns:
        The rounding error of 16-bit gradients, of the segment's length; None if all gradients are fp32, or there is no
        error feedback.
    """
    _write_to_all(grads, bounds, out, step_ok)
    if not error_feedback or all(grad.dtype == torch.float32 for grad in grads):
        return None
    return torch.cat([out[start:stop] - grad for grad, (start, stop) in zip(grads, pairwise(bounds), strict=True)])
