"""Computes the changes that optimizers made to a segment's parameters, optionally rescaled, in one pass."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels.dispatch import operation
from lightning_sparse.kernels.gradient_table import TILE, _bisect, bisections, gradient_table
from lightning_sparse.kernels.launch import at_a_time, kernel, launch, same_dtype, tl
from lightning_sparse.kernels.native import run, table, takes


@operation
def changes_(
    out: Sequence[Tensor],
    weights: Sequence[Tensor],
    stepped: Sequence[Tensor],
    bounds: Sequence[int],
    rescaled: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write w − x for each parameter, with w its weights before a step and x after it, or f(w − x) + r·w.

    Args:
        out: 1-D fp32, one per parameter; overwritten. It may be `stepped`.
        weights: w of each parameter, 1-D, of any floating dtype.
        stepped: x of each parameter, 1-D, of any floating dtype.
        bounds: offsets of the parameters in the segment, and its length as the last one.
        rescaled: f and r of each parameter, each 1-D fp32, on their device.
    """
    on_host = out[0].device.type == "cpu"
    each = at_a_time(out[0])
    ones = [1.0] * len(out)
    terms = [x.tolist() if on_host else x.unbind() for x in rescaled] if rescaled else [ones, ones]
    for result, w, x, factor, rest in zip(out, weights, stepped, *terms, strict=True):
        for start in range(0, len(result), each):
            part, before = result[start : start + each], w[start : start + each].float()
            torch.sub(before, x[start : start + each].float(), out=part)
            if isinstance(factor, Tensor):
                part.mul_(factor).addcmul_(before, rest)
            elif factor != 1:
                part.mul_(factor).add_(before, alpha=rest)


@changes_.by("native", when=lambda out, weights, stepped, *_, **__: takes((*out, *weights, *stepped)))
def _changes_in_c(out, weights, stepped, bounds, rescaled=None):
    tables = [table(each, bounds) for each in (out, weights, stepped)]
    run("changes", *tables, *(rescaled or (None, None)), len(out), bounds[-1])


def _fit_kernel(out, weights, stepped, *_, **__):
    contiguous = all(x.is_contiguous() for x in (*out, *weights, *stepped))
    return contiguous and same_dtype(weights) and same_dtype(stepped)


@changes_.by("triton", when=_fit_kernel)
def _changes_by_triton(out, weights, stepped, bounds, rescaled=None):
    if programs := -(-bounds[-1] // TILE):
        tables = [gradient_table(tensors, bounds) for tensors in (out, weights, stepped)]
        constants = {"RESCALE": rescaled is not None, "STEPS": bisections(len(out)), "TILE": TILE, "PART": 256}
        args = (*tables, weights[0], stepped[0], *(rescaled or tables[:2]), bounds[-1], len(out))
        launch(_changes, programs, *args, num_warps=8, **constants)


@kernel("numel", "many")
def _changes(
    outs,
    weights,
    stepped,
    typed,
    typed_after,
    factors,
    rests,
    numel,
    many,
    RESCALE: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """The first three come from `gradient_table`; `typed` and `typed_after` only give the dtypes of w and x."""
    tile = tl.program_id(0).to(tl.int64)
    to = tl.load(outs + 2 * many + tile)
    if to != 0:
        before = tl.load(weights + 2 * many + tile)
        after = tl.load(stepped + 2 * many + tile)
        within = tl.arange(0, TILE)
        # Loads without a mask from aligned memory are 16 bytes wide.
        if (to | before | after) % 16 == 0:
            w = tl.load(tl.multiple_of(before.to(tl.pointer_type(typed.dtype.element_ty)), 16) + within).to(tl.float32)
            x = tl.load(tl.multiple_of(after.to(tl.pointer_type(typed_after.dtype.element_ty)), 16) + within).to(
                tl.float32
            )
        else:
            w = tl.load(before.to(tl.pointer_type(typed.dtype.element_ty)) + within).to(tl.float32)
            x = tl.load(after.to(tl.pointer_type(typed_after.dtype.element_ty)) + within).to(tl.float32)
        change = w - x
        if RESCALE:
            number = _bisect(outs, tile * TILE, many, STEPS)
            change = tl.load(factors + number) * change + tl.load(rests + number) * w
        tl.store(to.to(tl.pointer_type(tl.float32)) + within, change)
    else:
        for part in range(TILE // PART):
            index = tile * TILE + part * PART + tl.arange(0, PART)
            valid = index < numel
            number = _bisect(outs, index, many, STEPS)
            within = index - tl.load(outs + number)
            before = tl.load(weights + many + number).to(tl.pointer_type(typed.dtype.element_ty)) + within
            after = tl.load(stepped + many + number).to(tl.pointer_type(typed_after.dtype.element_ty)) + within
            w = tl.load(before, mask=valid, other=0.0).to(tl.float32)
            change = w - tl.load(after, mask=valid, other=0.0).to(tl.float32)
            if RESCALE:
                change = tl.load(factors + number) * change + tl.load(rests + number) * w
            places = tl.load(outs + many + number).to(tl.pointer_type(tl.float32)) + within
            tl.store(places, change, mask=valid)
