"""Checks the gradients that a reducer receives, and overwrites them with the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_sparse.compressors.base import Entries, Update
from lightning_sparse.kernels.write_back import write_dense_, write_entries_
from lightning_sparse.layout import Layout, Segment


def write_(
    grads: Sequence[Tensor],
    segment: Segment,
    update: Update,
    scale: float,
    error_feedback: bool,
    step_ok: Tensor | None = None,
) -> Update | None:
    """Overwrite a segment's gradients with `scale` times the update, or with zeros if `step_ok` is False.

    Returns:
        The rounding error of 16-bit gradients, in units of the update; None if nothing was rounded.
    """
    if isinstance(update, Tensor):
        dense = update if scale == 1 else update * scale
        error = write_dense_(grads, segment.bounds, dense, error_feedback, step_ok)
        return error if error is None or scale == 1 else error.div_(scale)
    terms = update.lists if scale == 1 else [(indices, values * scale) for indices, values in update.lists]
    entries = write_entries_(grads, segment.bounds, terms, step_ok)
    return None if entries is None else Entries(entries[0], entries[1] / scale)


REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16)
"""Supported dtypes of gradients."""


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless a parameter or gradient can be reduced."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"The gradient of {name!r} is {tensor!r:.80}: give a tensor, of zeros if the parameter took no part."
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"The gradient of {name!r} is sparse ({tensor.layout}). Set sparse=False on its embedding layer, or train "
            f"with strategy='ddp'."
        )
    if tensor.dtype not in REDUCIBLE:
        remedy = "Convert the parameter, freeze it with requires_grad_(False)"
        if tensor.is_complex():
            remedy = "Make it real, of shape [..., 2], and have forward take torch.view_as_complex of it"
        raise TypeError(
            f"{name!r} is {tensor.dtype}; gradients of torch.float32, torch.float16 and torch.bfloat16 can be reduced. "
            f"{remedy}, or train with strategy='ddp'."
        )


def check_one_device(params: Mapping[str, Tensor]) -> None:
    """Raise ValueError if parameters are on several devices. A segment and its residual need one device."""
    first, device = next(((name, param.device) for name, param in params.items()), ("", None))
    for name, param in params.items():
        if param.device != device:
            raise ValueError(
                f"{first!r} is on {device}, and {name!r} on {param.device}: the parameters that a rank trains must be "
                f"on one device. Move the model, by model.to(device); for a model in parts use strategy='ddp'."
            )


def check_no_overlap(params: Mapping[str, Tensor]) -> None:
    """Raise ValueError if two parameters share elements, because both would send the same change."""
    places = sorted(
        (StorageWeakRef(param.untyped_storage()).cdata, param.storage_offset(), name)
        for name, param in params.items()
        if param.numel()
    )
    for (storage, start, first), (other, begin, second) in pairwise(places):
        shape, strides = params[first].shape, params[first].stride()
        stop = start + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if storage == other and begin < stop:
            raise ValueError(
                f"{first!r} and {second!r} are two parameters that share memory, so each would send what both have "
                f"changed. Tie weights by using one parameter twice: second.weight = first.weight."
            )


def check_distinct(grads: Mapping[str, Tensor]) -> None:
    """Raise ValueError if gradients share elements, which would be sent and added twice."""
    names: dict[Any, str] = {}
    for name, grad in grads.items():
        check_tensor(name, grad)
        place = StorageWeakRef(grad.untyped_storage()).cdata, grad.storage_offset(), grad.shape, grad.stride()
        first = names.setdefault(place, name)
        if first != name and grad.numel():
            raise ValueError(
                f"{first!r} and {name!r} are the same gradient, so it would count twice. Give the gradient of a tied "
                f"parameter under one name."
            )
    # The memory of others may interleave, as that of columns of one matrix does.
    check_no_overlap({name: grad for name, grad in grads.items() if grad.is_contiguous()})


def check_fits(layout: Layout, grads: Mapping[str, Tensor]) -> None:
    """Raise ValueError or TypeError unless `grads` are the gradients of the layout's parameters, by name."""
    if set(grads) != set(layout.names):
        missing, new = set(layout.names) - set(grads), set(grads) - set(layout.names)
        raise ValueError(
            f"reduce_ got other gradients than at first: missing {sorted(missing)}, new {sorted(new)}. Pass the same "
            f"parameters in every step."
        )
    for segment in layout.segments:
        for name, shape in zip(segment.names, segment.shapes, strict=True):
            check_tensor(name, grads[name])
            if tuple(grads[name].shape) != shape:
                raise ValueError(f"The gradient of {name!r} has shape {tuple(grads[name].shape)}, before {shape}.")
            if any(size > 1 and not stride for size, stride in zip(shape, grads[name].stride(), strict=True)):
                raise TypeError(f"The gradient of {name!r} is expanded, so nothing can be written to it: clone it.")
