"""The mean of gradients over the ranks of a node, before their optimizers step. Then a node is one worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_sparse.comm import Comm
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.shards import like, local

CHUNK = 1 << 23
"""Number of elements above which parameters are averaged apart from the next ones, so that buffers stay small."""


def average_gradients_(node: Comm, params: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over the ranks of a node. All its ranks call it, with equal parameters.

    A missing gradient counts as zero, unless all ranks lack it. Only a rank that lacks a gradient waits for its device.

    Args:
        node: this rank's connection to the ranks of its node.
        params: the parameters, at least one.

    Raises:
        ValueError: a gradient is sparse.
    """
    for param in params:
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise ValueError(
                f"A parameter of shape {[*param.shape]} has a sparse gradient, and the ranks of a node average dense "
                f"gradients. Set sparse=False of the embedding; or leave hierarchical=True out, so that ranks step "
                f"alone."
            )
    has_grad = [param.grad is not None for param in params]
    head = to_device(torch.tensor(has_grad, dtype=torch.float32, device="cpu"), local(params[0]).device)
    shares: Iterator[float] | None = None
    for chunk in _chunks(params):
        parts = [head, *(_flat_gradient(param) for param in chunk)]
        head, *means = _mean(node, torch.cat(parts)).split([x.numel() for x in parts])
        if shares is None:  # of the ranks that have each gradient
            shares = iter([1.0] * len(has_grad) if all(has_grad) else head.tolist())
        head = head[:0]  # only before the first chunk
        pairs = [
            (_gradient(param), mean) for param, mean, share in zip(chunk, means, shares, strict=False) if share > 0
        ]
        if pairs:
            torch._foreach_copy_([grad for grad, _ in pairs], [mean.view(grad.shape) for grad, mean in pairs])


def _chunks(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk, numel = list[Tensor](), 0
    for param in params:
        chunk.append(param)
        numel += local(param).numel()
        if numel >= CHUNK:
            yield chunk
            chunk, numel = [], 0
    if chunk:
        yield chunk


def _mean(node: Comm, x: Tensor) -> Tensor:
    """Return the mean of `x`, 1-D, over the ranks of a node: equal bits on all of them."""
    part = node.reduce_scatter_mean(pad(x, (0, -len(x) % node.size)))
    return node.all_gather(part).view(-1)[: len(x)]


def _flat_gradient(param: Tensor) -> Tensor:
    x = local(param)
    return x.new_zeros(x.numel()) if param.grad is None else local(param.grad).reshape(-1)


def _gradient(param: Tensor) -> Tensor:
    """Return a parameter's gradient; make one if it is missing."""
    if param.grad is None:
        param.grad = like(param, torch.empty_like(local(param)))
    return local(param.grad)
