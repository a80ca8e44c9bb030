"""Election coding: each worker votes for several parts of the data, so that the vote of all withstands wrong workers.

Sohn et al. 2020, arXiv 1910.06093. Of n workers and as many parts of each step's data, an allocation, a bool matrix of
shape (n, n), says who works on what: `allocation[i, j]` is whether worker i computes the gradient of part j. A worker
votes, for each coordinate, the sign that most of its parts' gradients have; then all step by the sign that most workers
vote for, as the method `signsgd` does. With `deterministic_allocation(n, b)` that is the sign of most of the n parts
for all inputs, whatever b of the workers vote instead.

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


def deterministic_allocation(workers: int, byzantine: int) -> Tensor:
    """Return an allocation with which the vote is exact although some workers vote as they like.

    With L = ⌊(n − 2b − 1) / (2b + 2)⌋ and s = (n − 1)/2 − b − L: worker i of the first s has part i alone; the next L
    have 2b + 1 consecutive parts each, from part s on, each b + 1 further; all others have all parts.

        >>> deterministic_allocation(5, 1).long()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1]])

    Args:
        workers: n, odd.
        byzantine: b, how many workers may vote as they like, less than half of them. The most that this allocation
            withstands: b + 1 can change the vote.

    Returns:
        bool, (n, n). All rows have an odd number of parts, so no local vote is a tie.

    Raises:
        ValueError: an even n, or a b that no allocation withstands.
    """
    n = check("workers", workers, "deterministic_allocation")
    b = check("byzantine", byzantine, "deterministic_allocation")
    if 2 * b >= n:
        raise ValueError(
            f"deterministic_allocation(workers={n}, byzantine={b}): no vote withstands so many; at most {(n - 1) // 2}."
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
    """Return an allocation drawn at random: each worker has each part with a probability p, independently.

    About np parts for each worker; the paper takes p of the order of √(log n / n). The vote is exact with high
    probability only. A worker that got no part, and a part that got no worker, are given each other's of the same
    number.

    Args:
        workers: n, odd.
        probability: p, in (0, 1].
        seed: equal on all ranks.

    Returns:
        bool, (n, n).

    Raises:
        ValueError: an even n, or a probability out of range.
    """
    n = check("workers", workers, "bernoulli_allocation")
    p = check("probability", probability, "bernoulli_allocation")
    generator = torch.Generator().manual_seed(check("seed", seed, ""))
    allocation: Tensor = torch.rand(n, n, generator=generator, device="cpu") < p
    allocation.diagonal().logical_or_(~allocation.any(1) | ~allocation.any(0))
    return allocation


class PartSampler(DistributedSampler[Any]):
    """The examples of a worker's parts, part by part, in each step.

    The data are shuffled anew in each epoch, alike on all workers; each step takes n parts of `part_size` examples of
    them, and what does not fill a step is left out. Lightning takes it as it is, as a `DistributedSampler`, and calls
    `set_epoch`; so does a loop of one's own. Batches are of `batch_size` examples, which differs between workers;
    `batch.split(part_size)` are the parts.

    Args:
        dataset: with a length, equal on all workers.
        allocation: which parts each worker has, bool, (n, n).
        part_size: examples of a part.
        rank: this worker; None asks torch.distributed, and checks that it has n ranks.
        seed: of the order; equal on all workers.

    Attributes:
        batch_size: examples of this worker's parts together.

    Raises:
        ValueError: an allocation of another shape, for another number of workers, or with a worker without parts; a
            part without data.
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
        super().__init__(dataset, None if rank is None else n, rank, seed=check("seed", seed, ""))
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
    """Return the mean of some losses; its gradient is, for each coordinate, the sign that most of their gradients have.

    So `local_vote(...).backward()`, or returning it from a LightningModule's `training_step`, hands the worker's vote
    to DDP or to an optimizer as if it were the gradient. On a tie the first loss whose gradient is not 0 there decides;
    where all are 0, or NaN, the vote is.

    Args:
        losses: a scalar for each part, each of its own graph. A generator computes them one by one, so that only one
            graph is in memory at a time.
        params: those to differentiate by; frozen ones are left out.

    Raises:
        ValueError: no loss, or no parameter that requires a gradient.
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
    """A value with given gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, votes: list[Tensor], *params: Tensor) -> Tensor:
        ctx.votes = [vote.to(param.dtype) for vote, param in zip(votes, params, strict=True)]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *(vote * grad.to(vote.dtype) for vote in ctx.votes)
