"""Writing a segment's result into its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def write_entries_(
    grads: Sequence[Tensor], bounds: Sequence[int], terms: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """Overwrite gradients with a sum of sparse terms, without a dense temporary.

    Args:
        grads: one 1-D gradient per parameter; overwritten.
        bounds: offsets of the parameters in the segment, and its length as the last one.
        terms: (int64 indices into the segment, ascending; fp32 values), added in this order, so that the result is
            the same on all ranks.

    Returns:
        What rounding to 16-bit gradients took away, as (indices, values); None where all gradients are fp32.
    """
    rounded = any(grad.dtype != torch.float32 for grad in grads)
    if rounded:
        # Each element has to be summed up in fp32 before it is rounded once.
        terms = [coalesce(terms)]
    torch._foreach_zero_(list(grads))
    edges = torch.tensor(bounds, device=grads[0].device)
    lost = []
    for indices, values in terms:
        cuts = torch.searchsorted(indices, edges).tolist()
        for grad, start, (first, last) in zip(grads, bounds, pairwise(cuts), strict=False):
            if first < last:
                where, what = indices[first:last] - start, values[first:last]
                fitting = fit(what, grad.dtype)
                grad.index_add_(0, where, fitting)
                if rounded:
                    lost.append(what - fitting.float())
    return (terms[0][0], torch.cat([*lost, edges.new_empty(0, dtype=torch.float32)])) if rounded else None


def fit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round finite values to a dtype; what is too large for it becomes its largest number, not infinity."""
    if dtype == values.dtype:
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def coalesce(terms: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Add up sparse terms in the order given; return each index once, ascending, with its fp32 sum."""
    indices = torch.unique(torch.cat([term[0] for term in terms]))
    values = torch.zeros(len(indices), device=indices.device)
    for where, what in terms:
        values.index_add_(0, torch.searchsorted(indices, where), what)
    return indices, values


def at(places: Tensor, entries: tuple[Tensor, Tensor]) -> Tensor:
    """Return the values that entries have at the places, zero where they have none; places and indices ascending."""
    indices, values = entries
    found = torch.zeros(places.numel(), dtype=values.dtype, device=values.device)
    if places.numel():
        position = torch.searchsorted(places, indices).clamp_(max=places.numel() - 1)
        alike = places[position] == indices
        found[position[alike]] = values[alike]
    return found


def write_dense_(grads: Sequence[Tensor], bounds: Sequence[int], out: Tensor, keeps: bool) -> Tensor | None:
    """Overwrite gradients with a dense result (1-D fp32, of the segment's length).

    Returns:
        What rounding to 16-bit gradients took away, of the segment's length; None where all gradients are fp32, or
        nobody `keeps` it.
    """
    parts = [out[start:stop] for start, stop in pairwise(bounds)]
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(fit(part, grad.dtype))
    if not keeps or all(grad.dtype == torch.float32 for grad in grads):
        return None
    return torch.cat([part - grad for grad, part in zip(grads, parts, strict=True)])
