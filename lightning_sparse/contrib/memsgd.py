"""Mem-SGD as its paper has it: in one process, and in several that share one parameter vector without locks.

Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599. Over a network it is the method `memsgd`; here nothing is sent.

    worker = MemSGD(x, k=10)
    for t in range(steps):
        worker.step_(gradient(x), lr=8 / (mu * (shift + t)))

`MemSGDLR` is that learning rate for any optimizer, and `QuadraticAverage` the paper's average of the weights, for
torch's `AveragedModel` and Lightning's `WeightAveraging`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sparse.compressors.base import Entries, Update
from lightning_sparse.contrib.options import check
from lightning_sparse.contrib.randk import draw
from lightning_sparse.exchange import NonFiniteGradient

Choice = Literal["top", "random"]


class MemSGDLR(LRScheduler):
    """Sets every group's learning rate to η_t = γ / (μ(a + t)) before step t, counted from 0.

    Theorem 2.4 of the paper has γ = 8 and a > 1, of the order of d/k; its experiments γ = 2.

        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = MemSGDLR(optimizer, mu=0.5, shift=4)
        >>> optimizer.step(), scheduler.step()
        (None, None)
        >>> optimizer.param_groups[0]["lr"]  # 8 / (0.5 · 5)
        3.2

    Args:
        optimizer: whose rates it sets; their values before do not matter.
        mu: μ, strong convexity: for a loss with L2 the factor λ of λ/2·‖x‖². Above 0.
        shift: a, above 0.
        gamma: γ, above 0.
        last_epoch: t − 1 to go on from, as for all of torch's schedulers.

    Raises:
        ValueError: a number is not above 0.
    """

    def __init__(self, optimizer: Optimizer, mu: float, shift: float, gamma: float = 8.0, last_epoch: int = -1) -> None:
        self.mu = check("mu", mu, "MemSGDLR")
        self.shift = check("shift", shift, "MemSGDLR")
        self.gamma = check("gamma", gamma, "MemSGDLR")
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        rate = self.gamma / (self.mu * (self.shift + self.last_epoch))
        return [rate for _ in self.optimizer.param_groups]


@dataclass(frozen=True)
class QuadraticAverage:
    """An `avg_fn` for `torch.optim.swa_utils.AveragedModel`: x̄ = Σ w_t x_t / Σ w_t with w_t = (a + t)².

    x_t is the model at the (t + 1)-th call of `update_parameters`. The paper averages x_0 … x_{T−1}, each before its
    step. `WeightAveraging` of Lightning looks after each step, at x_1 … x_T: give it a + 1.

        >>> from torch.optim.swa_utils import AveragedModel
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> average = AveragedModel(model, avg_fn=QuadraticAverage(1))
        >>> for weight in (5.0, 10.0):
        ...     _ = model.weight.data.fill_(weight)
        ...     average.update_parameters(model)
        >>> average.module.weight.item()  # (1 · 5 + 4 · 10) / (1 + 4)
        9.0

    Attributes:
        shift: a, above 0.
    """

    shift: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "shift", check("shift", self.shift, "QuadraticAverage"))

    def __call__(self, average: Tensor, x: Tensor, averaged: Tensor | int) -> Tensor:
        """Return the average with `x` in it, a new tensor; `averaged` models were in it before."""
        a, t = self.shift, averaged * 1.0  # in floats: t³ leaves the integers' range
        total = (t + 1) * (a * a + a * t + t * (2 * t + 1) / 6)
        return torch.lerp(average, x, torch.as_tensor((a + t) ** 2 / total, dtype=x.dtype, device=x.device))


class MemSGD:
    """One worker of Mem-SGD: x ← x − C(m + η∇f(x)), m ← what is left of m + η∇f(x).

    Algorithm 1 of the paper. Every gradient goes into the memory times its own rate, so nothing is lost:
    x_0 − x_t = Σ η_s ∇f_s − m_t, up to rounding.

    With `l2` the gradient of λ/2·‖x‖² is added to each that is given. A gradient of a few entries costs no pass over x
    if k entries are chosen at random: of λx each entry is added when it is chosen, for all steps since, over which it
    has not changed. Choosing the largest needs a pass over m.

        >>> x = torch.tensor([1.0, 1.0, 1.0])
        >>> worker = MemSGD(x, k=1)
        >>> worker.step_(torch.tensor([3.0, -4.0, 0.0]), lr=0.5)
        Entries(indices=tensor([1]), values=tensor([-2.]))
        >>> x, worker.memory
        (tensor([1., 3., 1.]), tensor([1.5000, 0.0000, 0.0000]))

    Args:
        x: the weights, 1-D fp32 or fp64, on the CPU; `step_` changes them in place.
        k: entries that a step applies, 1 to d.
        choice: the entries of largest magnitude ("top") or k drawn without replacement ("random").
        l2: λ ≥ 0.
        error_feedback: False forgets what is not applied, for comparison.
        seed: of the random choice.

    Attributes:
        memory: m, of x's shape and dtype; without what is still to come of λx (see `apply_lazy_l2_`).

    Raises:
        ValueError: an option out of range.
        TypeError: `x` is no such tensor.
    """

    def __init__(
        self,
        x: Tensor,
        k: int,
        choice: Choice = "top",
        *,
        l2: float = 0.0,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        check_weights("MemSGD", x)
        self.x, self.memory = x, torch.zeros_like(x)
        self.k = check_k("MemSGD", k, x.numel())
        if choice not in get_args(Choice):
            raise ValueError(f"MemSGD(choice={choice!r}): choose from {', '.join(get_args(Choice))}.")
        self.choice, self.error_feedback = choice, error_feedback
        self.l2 = check("l2", l2, "MemSGD")
        self.generator = torch.Generator().manual_seed(check("seed", seed, "MemSGD"))
        # Σ η so far, and Σ η up to which λx is in the memory, for each entry.
        self._rates = 0.0
        self._l2_applied = torch.zeros(
            x.numel() if self.l2 and choice == "random" else 0, dtype=torch.float64, device="cpu"
        )

    def step_(self, gradient: Update, lr: float) -> Entries:
        """Take a step; `x` and `memory` change in place.

        Args:
            gradient: of the loss without `l2`, dense (1-D) or `Entries`, whose indices may come in any order.
            lr: η.

        Returns:
            What was subtracted from x.

        Raises:
            NonFiniteGradient: the gradient holds a NaN or an infinity; nothing has changed.
        """
        given = gradient if isinstance(gradient, Tensor) else gradient.values
        if not bool(given.isfinite().all()):
            raise NonFiniteGradient("MemSGD was given a gradient with a NaN or an infinity.")
        x, m = self.x, self.memory
        if isinstance(gradient, Tensor):
            m.add_(gradient, alpha=lr)
        else:
            m.index_add_(0, gradient.indices, gradient.values, alpha=lr)
        self._rates += lr
        if self.choice == "top":
            if self.l2:
                m.add_(x, alpha=self.l2 * lr)
            indices = m.abs().topk(self.k).indices
        else:
            indices = draw(m.numel(), self.k, self.generator)
            self.apply_lazy_l2_(indices)
        values = m[indices]
        x.index_add_(0, indices, values, alpha=-1)
        if self.error_feedback:
            m.index_fill_(0, indices, 0.0)
        else:
            m.zero_()
            self._l2_applied.fill_(self._rates)
        return Entries(indices, values)

    def apply_lazy_l2_(self, indices: Tensor | None = None) -> None:
        """Add λx of the steps since an entry's last one to the memory at `indices`, None for all (lazy regularisation).

        If the k largest are chosen, it has been added in each step.
        """
        if not self._l2_applied.numel():
            return
        if indices is None:
            indices = torch.arange(self.x.numel(), device="cpu")
        lacking = (self._rates - self._l2_applied[indices]).to(self.x.dtype)
        self.memory.index_add_(0, indices, lacking.mul_(self.x[indices]), alpha=self.l2)
        self._l2_applied.index_fill_(0, indices, self._rates)


class ParallelRun(NamedTuple):
    """What `train_parallel` returns.

    Attributes:
        memories: of each process, of x's shape.
        seconds: from when all processes were ready until the last one was done.
    """

    memories: list[Tensor]
    seconds: float


def train_parallel(
    x: Tensor,
    gradient: Callable[[Tensor, torch.Generator], Update],
    lr: Callable[[int], float],
    steps: int,
    k: int,
    choice: Choice = "top",
    *,
    processes: int = 2,
    l2: float = 0.0,
    seed: int = 0,
    start_method: Literal["spawn", "fork"] = "spawn",
) -> ParallelRun:
    """Train with PARALLEL-Mem-SGD, Algorithm 2 of the paper: several processes on one vector, without locks.

    Each process has a memory of its own, reads x while others write, and writes k entries in a step. If two add to one
    entry at once, one of the two may be lost; the fewer entries a step writes, the rarer that is. With one process it
    is `MemSGD`. With several, runs differ.

    If processes are spawned, call it below `if __name__ == "__main__":`, with functions that can be pickled, such as
    those of a module or an object with `__call__`; tensors in them are shared, not copied. One that fails ends all.

    Args:
        x: the weights, 1-D fp32 or fp64, on the CPU. They are moved to shared memory and changed in place.
        gradient: x and a generator to a stochastic gradient without `l2`, dense or `Entries`.
        lr: t to η_t, t the number of steps that all have taken if they take turns.
        steps: of each process.
        k: see `MemSGD`, as for `choice`, `l2` and `seed`, which each process turns into one of its own.
        processes: how many.
        start_method: "spawn", or "fork", which starts sooner, and is safe only in a process that has not used several
            threads, so after `torch.set_num_threads(1)`.

    Raises:
        ValueError, TypeError: an option out of range.
        torch.multiprocessing.ProcessRaisedException: with the traceback of a process that failed.
    """
    check_weights("train_parallel", x)
    MemSGD(x, k, choice, l2=l2, seed=seed)  # refuses what it refuses, before a process is started
    steps, processes = check("steps", steps, "train_parallel"), check("processes", processes, "train_parallel")
    if start_method not in ("spawn", "fork"):
        raise ValueError(f"train_parallel(start_method={start_method!r}): choose from spawn, fork.")
    gc.collect()  # or a forked process may collect what only this one can: a process group waits for its threads
    x.share_memory_()
    memories = [torch.zeros_like(x).share_memory_() for _ in range(processes)]
    spans = torch.zeros(processes, 2, dtype=torch.float64, device="cpu").share_memory_()
    barrier = torch.multiprocessing.get_context(start_method).Barrier(processes)
    job = (x, gradient, lr, steps, {"k": k, "choice": choice, "l2": l2}, seed, memories, spans, barrier)
    start_processes(_work, job, nprocs=processes, daemon=True, start_method=start_method)  # type: ignore[no-untyped-call]
    return ParallelRun(memories, float(spans[:, 1].max() - spans[:, 0].min()))


def _work(
    process: int,
    x: Tensor,
    gradient: Callable[[Tensor, torch.Generator], Update],
    lr: Callable[[int], float],
    steps: int,
    options: dict[str, Any],
    seed: int,
    memories: list[Tensor],
    spans: Tensor,
    barrier: Any,
) -> None:
    torch.set_num_threads(1)
    processes = len(memories)
    worker = MemSGD(x, **options, seed=seed * processes + process)
    worker.memory = memories[process]
    generator = torch.Generator().manual_seed(seed * processes + process)
    barrier.wait()
    spans[process, 0] = time.monotonic()
    for step in range(steps):
        worker.step_(gradient(x, generator), lr(step * processes + process))
    worker.apply_lazy_l2_()
    spans[process, 1] = time.monotonic()


def check_weights(owner: str, x: Tensor) -> None:
    """Raise a TypeError unless `x` is a 1-D fp32 or fp64 tensor on the CPU, contiguous and without gradient."""
    if not (isinstance(x, Tensor) and x.dim() == 1 and x.dtype in (torch.float32, torch.float64)):
        what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{owner}(x={what}): give a 1-D tensor of fp32 or fp64, such as parameters_to_vector returns.")
    if x.device.type != "cpu" or x.requires_grad or not x.is_contiguous():
        raise TypeError(f"{owner}: x must be contiguous, on the CPU and without requires_grad: it is changed in place.")


def check_k(owner: str, k: int, numel: int) -> int:
    """Return k if it is a whole number from 1 to `numel`."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= numel:
        raise ValueError(f"{owner}(k={k!r}): k must be a whole number from 1 to {numel}, the number of weights.")
    return k
