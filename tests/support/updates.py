"""Updates as dense tensors."""

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Update, add_
from lightning_sparse.context import Context


def dense(update: Update, numel: int) -> Tensor:
    """Return an update as a new fp32 tensor."""
    return add_(torch.zeros(numel), update)


def remainder(compressor, u: Tensor, ctx: Context | None = None) -> Tensor:
    """Return u minus its compressed update."""
    return add_(u.clone(), compressor.compress(u, ctx or Context.of(u.numel()))[1], -1)


def decoded(compressor, u: Tensor, ctx: Context | None = None) -> Tensor:
    """Return the dense update that other ranks decode."""
    ctx = ctx or Context.of(u.numel())
    return dense(compressor.decode(compressor.compress(u, ctx)[0], ctx), u.numel())
