"""Election coding: each worker votes for several parts of the data, so that the overall vote tolerates wrong workers.

Sohn et al. 2020, arXiv 1910.06093. There are n workers, and the data of each step are divided into n parts. An
allocation is a bool matrix of shape (n, n): `allocation[i, j]` is True if worker i computes the gradient of part j. For
each coordinate, a worker votes for the majority sign of its parts' gradients. All workers then step by the majority
sign of the workers' votes, as in the method `signsgd`. With `deterministic_allocation(n, b)` the result is always the
majority sign of the n parts, regardless of the votes of b workers.

    allocation = deterministic_allocation(9, byzantine=2)
    sampler = PartSampler(dataset, allocation, part_size=16)              # on each worker
    loader = DataLoader(dataset, batch_size=sampler.batch_size, sampler=sampler)
    for x, y in loader:
        losses = (criterion(model(a), b) for a, b in zip(x.split(16), y.split(16)))
        local_vote(losses, model.parameters()).backward()                 # gradients are now +1 and -1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_sparse.contrib.options import check
from lightning_sparse.options import check_seed


def deterministic_allocation(workers: int, byzantine: int) -> Tensor:
    """Return an allocation for which the vote is exact even if some workers vote arbitrarily.

    Let L = ⌊(n − 2b − 1) / (2b + 2)⌋ and s = (n − 1)/2 − b − L. Each worker i of the first s has only part i. The next
    L workers have 2b + 1 consecutive parts each. The first of them starts at part s, and each next worker starts b + 1
    parts later. All other workers have all parts.

        >>> deterministic_allocation(5, 1).long()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1]])

    Args:
        workers: n, odd.
        byzantine: b, number of workers that may vote arbitrarily, less than half of them. The allocation tolerates no
            more: b + 1 workers can change the vote.

    Returns:
        Bool matrix of shape (n, n). All rows have an odd number of parts, so no local vote is a tie.

    Raises:
        ValueError: n is even, or no allocation tolerates b.
    """
    n = check("workers", workers, "deterministic_allocation")
    b = check("byzantine", byzantine, "deterministic_allocation")
    if 2 * b >= n:
        raise ValueError(
            f"deterministic_allocation(workers={n}, byzantine={b}): no vote tolerates so many; at most {(n - 1) // 2}."
        )
    overlapping = (n - 2 * b - 1) // (2 * b + 2)
    alone = (n - 1) // 2 - b - overlapping
    allocation = torch.ones(n, n, dtype=torch.bool, device="cpu")
    allocation[:alone] = torch.eye(n, dtype=torch.bool, device="cpu")[:alone]
    for number in range(overlapping):
        first = alone + number * (b + 1)
        allocation[alone + number] = False
        allocation[alone + number, first : first + 2 * b + 1] = True
    return allocation


def bernoulli_allocation(workers: int, probability: float, seed: int = 0) -> Tensor:
    """Return a random allocation: each worker has each part with probability p, independently.

    Each worker has about np parts. The paper chooses p of the order of √(log n / n). The vote is exact only with high
    probability. If worker i has no part, or part i has no worker, worker i gets part i.

    Args:
        workers: n, odd.
        probability: p, in (0, 1].
        seed: seed of the allocation, equal on all ranks.

    Returns:
        Bool matrix of shape (n, n).

    Raises:
        ValueError: n is even, or the probability is out of range.
    """
    n = check("workers", workers, "bernoulli_allocation")
    p = check("probability", probability, "bernoulli_allocation")
    generator = torch.Generator().manual_seed(check_seed(seed))
    allocation: Tensor = torch.rand(n, n, generator=generator, device="cpu") < p
    allocation.diagonal().logical_or_(~allocation.any(1) | ~allocation.any(0))
    return allocation


class PartSampler(DistributedSampler[Any]):
    """Yields the examples of a worker's parts, part by part, for each step.

    Each epoch shuffles the data in the same order on all workers. Each step uses n parts of `part_size` examples. The
    rest of the data, which does not fill a step, is skipped. Lightning accepts the sampler because it is a
    `DistributedSampler`, and calls `set_epoch`; call it yourself in your own loop. A batch has `batch_size` examples,
    which differs between workers. `batch.split(part_size)` returns the parts.

    Args:
        dataset: dataset with a length, equal on all workers.
        allocation: bool matrix of shape (n, n) of the workers' parts.
        part_size: number of examples of a part.
        rank: this worker; None uses torch.distributed, which must have n ranks.
        seed: seed of the order, equal on all workers.

    Attributes:
        batch_size: total number of examples of this worker's parts.

    Raises:
        ValueError: the allocation has another shape, is for another number of workers, or has a worker without parts;
            or a part would have no data.
    """

    def __init__(
        self, dataset: Dataset[Any], allocation: Tensor, part_size: int, *, rank: int | None = None, seed: int = 0
    ) -> None:
        n = len(allocation)
        if allocation.shape != (n, n) or allocation.dtype != torch.bool or not allocation.any(1).all():
            raise ValueError(
                f"PartSampler(allocation of shape {tuple(allocation.shape)}, {allocation.dtype}): it must be a square "
                f"matrix of bool, with a part for each worker, such as deterministic_allocation(9, 2)."
            )
        super().__init__(dataset, None if rank is None else n, rank, seed=check_seed(seed))
        if self.num_replicas != n:
            raise ValueError(f"PartSampler(allocation for {n} workers): there are {self.num_replicas} ranks.")
        self.part_size: int = check("part_size", part_size, "PartSampler")
        self.parts = allocation[self.rank]
        self.steps = len(dataset) // (n * self.part_size)  # type: ignore[arg-type]
        if not self.steps:
            raise ValueError(
                f"PartSampler(part_size={part_size}): {len(dataset)} examples are too few for {n} parts of that size, "  # type: ignore[arg-type]
                f"so a part would be without data. Make parts smaller."
            )
        self.batch_size = self.part_size * int(self.parts.sum())

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator, device="cpu")  # type: ignore[arg-type]
        used = order[: self.steps * self.num_replicas * self.part_size]
        yield from used.view(self.steps, self.num_replicas, self.part_size)[:, self.parts].reshape(-1).tolist()

    def __len__(self) -> int:
        return int(self.steps * self.batch_size)


def local_vote(losses: Iterable[Tensor], params: Iterable[Tensor]) -> Tensor:
    """Return the mean of losses. Its gradient is, for each coordinate, the majority sign of the losses' gradients.

    Call `local_vote(...).backward()`, or return the mean from a LightningModule's `training_step`. Then DDP or the
    optimizer receives the worker's vote instead of the gradient. In a tie, the first loss with a nonzero gradient in
    that coordinate decides. If all gradients are 0, the vote is 0; if one is NaN, the vote is NaN.

    Args:
        losses: one scalar per part, each with its own graph. If you pass a generator, only one graph is in memory at a
            time.
        params: parameters to differentiate by; frozen parameters are skipped.

    Raises:
        ValueError: there is no loss, or no parameter that requires a gradient.
    """
    trained = [param for param in params if param.requires_grad]
    totals, firsts = ([torch.zeros_like(param, dtype=torch.float32) for param in trained] for _ in range(2))
    values: list[Tensor] = []
    for loss in losses if trained else ():
        values.append(loss.detach())
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        for total, first, grad in zip(totals, firsts, grads, strict=True):
            if grad is not None:
                sign = grad.sign() + 0 * grad  # torch's sign of NaN is 0
                total.add_(sign)
                first.add_(sign * (first == 0))
    if not values:
        raise ValueError(
            f"local_vote of {len(values)} losses and {len(trained)} trained parameters: there is no gradient."
        )
    votes = [total.mul_(2).add_(first).clamp_(-1, 1) for total, first in zip(totals, firsts, strict=True)]
    mean: Tensor = _Vote.apply(torch.stack(values).mean(), votes, *trained)  # type: ignore[no-untyped-call]
    return mean


class _Vote(torch.autograd.Function):
    """Returns a value and assigns given gradients to it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, votes: list[Tensor], *params: Tensor) -> Tensor:
        ctx.votes = [vote.to(param.dtype) for vote, param in zip(votes, params, strict=True)]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *(vote * grad.to(vote.dtype) for vote in ctx.votes)
