"""The mean of gradients over the ranks of a node, before their optimizers step. Then a node is one worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparse.comm import Comm
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.shards import like, local

CHUNK = 1 << 23
"""Number of elements above which gradients are averaged apart from the next ones. So fewer are copied at a time."""


def average_gradients_(node: Comm, params: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over the ranks of a node. All its ranks call it, with equal parameters.

    A missing gradient counts as zero, unless all ranks lack it. Only a rank that lacks a gradient waits for its device.

    Args:
        node: this rank's connection to the ranks of its node.
        params: the parameters, at least one.

    Raises:
        ValueError: a gradient is sparse.
    """
    weights, grads = [local(param) for param in params], [_gradient(param) for param in params]
    found = torch.tensor([grad is not None for grad in grads], dtype=torch.float32, device="cpu")
    shares = to_device(found, weights[0].device)  # of the ranks that have each gradient
    missing: list[tuple[int, Tensor]] = []
    for first, end in _chunks(weights):
        pairs = zip(weights[first:end], grads[first:end], strict=True)
        parts = [x.new_zeros(x.numel()) if grad is None else grad.reshape(-1) for x, grad in pairs]
        means = _means(node, parts if first else [shares, *parts])
        shares = shares if first else means.pop(0)
        own = [(grad, mean) for grad, mean in zip(grads[first:end], means, strict=True) if grad is not None]
        if own:
            torch._foreach_copy_([grad for grad, _ in own], [mean.view(grad.shape) for grad, mean in own])
        missing += [(i, mean) for i, mean in enumerate(means, first) if grads[i] is None]
    of_ranks = shares.tolist() if missing else []
    for i, mean in missing:
        if of_ranks[i] > 0:
            params[i].grad = like(params[i], torch.empty_like(weights[i]).copy_(mean.view(weights[i].shape)))


def _gradient(param: Tensor) -> Tensor | None:
    """Return a parameter's gradient, if it has one."""
    if param.grad is None:
        return None
    grad = local(param.grad)
    if grad.layout is not torch.strided:
        raise ValueError(
            f"A parameter of shape {[*param.shape]} has a sparse gradient, and the ranks of a node average dense "
            f"gradients. Set sparse=False of the embedding; or leave hierarchical=True out, so that ranks step alone."
        )
    if 0 in grad.stride():  # an expanded tensor, such as autograd.grad returns
        param.grad = like(param, grad.clone(memory_format=torch.contiguous_format))
        grad = local(param.grad)
    return grad


def _chunks(weights: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the index of the first tensor of each chunk, and of the tensor after its last one."""
    first = numel = 0
    for end, x in enumerate(weights, 1):
        numel += x.numel()
        if numel >= CHUNK or end == len(weights):
            yield first, end
            first, numel = end, 0


def _means(node: Comm, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the means of 1-D tensors over the ranks of a node: equal bits on all of them, fp32 at least."""
    sizes = [x.numel() for x in parts]
    padding = parts[0].new_zeros(-sum(sizes) % node.size, dtype=torch.float32)  # fp32 also decides the dtype
    mean = node.all_gather(node.reduce_scatter_mean(torch.cat([*parts, padding]))).view(-1)
    return list(mean[: sum(sizes)].split(sizes))
