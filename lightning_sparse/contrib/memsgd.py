"""Mem-SGD as in its paper: in one process, or in several processes that share one parameter vector without locks.

Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599. For training over a network use the method `memsgd`; this module
sends nothing.

    worker = MemSGD(x, k=10)
    for t in range(steps):
        worker.step_(gradient(x), lr=8 / (mu * (shift + t)))

`MemSGDLR` is this learning rate schedule for any optimizer. `QuadraticAverage` is the paper's weight average, for
torch's `AveragedModel` and Lightning's `WeightAveraging`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
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

CHOICE = 0x9E3779B97F4A7C15
"""Bits by which the random choice changes its seed, so that it is independent of examples with the same seed."""


class MemSGDLR(LRScheduler):
    """Sets every group's learning rate to η_t = γ / (μ(a + t)) before step t, counted from 0.

    Theorem 2.4 of the paper uses γ = 8 and a > 1, of the order of d/k. Its experiments use γ = 2.

        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = MemSGDLR(optimizer, mu=0.5, shift=4)
        >>> optimizer.step(), scheduler.step()
        (None, None)
        >>> optimizer.param_groups[0]["lr"]  # 8 / (0.5 · 5)
        3.2

    Args:
        optimizer: the optimizer; its previous learning rates are overwritten.
        mu: μ, the strong convexity; for a loss with L2 regularisation, the factor λ of λ/2·‖x‖². Above 0.
        shift: a, above 0.
        gamma: γ, above 0.
        last_epoch: t − 1 at which to resume, as in all of torch's schedulers.

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
    step. Lightning's `WeightAveraging` averages after each step, so x_1 … x_T: pass a + 1 as `shift`. Buffers of whole
    numbers, such as counts of batches, are not averaged: the last one counts.

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
        """Return the average of `averaged` models, updated with `x`; `x` itself if it has whole numbers."""
        if not (x.is_floating_point() or x.is_complex()):
            return x
        # Floats, because t³ overflows integers; not of torch's default dtype, in which t³ may overflow, too.
        a, t = self.shift, averaged.double() if isinstance(averaged, Tensor) else float(averaged)
        total = (t + 1) * (a * a + a * t + t * (2 * t + 1) / 6)
        return torch.lerp(average, x, torch.as_tensor((a + t) ** 2 / total, dtype=x.dtype, device=x.device))


class MemSGD:
    """One worker of Mem-SGD: x ← x − C(v), m ← v − C(v) with v = m + η∇f(x).

    Algorithm 1 of the paper. The memory receives every gradient times the learning rate of its step, so nothing is
    lost: x_0 − x_t = Σ η_s ∇f_s − m_t, up to rounding.

    With `l2` the gradient of λ/2·‖x‖² is added to each given gradient. If k entries are chosen at random, a gradient of
    a few entries needs no pass over x. An entry of λx is then added when the entry is chosen, for all steps since its
    last choice, during which it was constant. Choosing the largest entries needs a pass over m.

        >>> x = torch.tensor([1.0, 1.0, 1.0])
        >>> worker = MemSGD(x, k=1)
        >>> worker.step_(torch.tensor([3.0, -4.0, 0.0]), lr=0.5)
        Entries(indices=tensor([1]), values=tensor([-2.]))
        >>> x, worker.memory
        (tensor([1., 3., 1.]), tensor([1.5000, 0.0000, 0.0000]))

    Args:
        x: weights, 1-D fp32 or fp64, on the CPU; `step_` changes them in place.
        k: number of entries that a step applies, 1 to d.
        choice: "top" selects the entries of largest magnitude; "random" draws k entries without replacement.
        l2: λ ≥ 0.
        error_feedback: False discards the entries that are not applied, for comparison.
        seed: seed of the random choice, which is independent of a `torch.Generator` with the same seed.

    Attributes:
        memory: m, with x's shape and dtype, without the pending part of λx (see `apply_lazy_l2_`).

    Raises:
        ValueError: an option is out of range.
        TypeError: `x` has another type, shape, dtype or device.
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
        self.generator = torch.Generator().manual_seed((check("seed", seed, "MemSGD") ^ CHOICE) % 2**64)
        # Σ η so far; and for each entry, the Σ η up to which the memory contains λx.
        self._rates = 0.0
        self._l2_applied = torch.zeros(
            x.numel() if self.l2 and choice == "random" else 0, dtype=torch.float64, device="cpu"
        )

    def step_(self, gradient: Update, lr: float) -> Entries:
        """Take a step; `x` and `memory` change in place.

        Args:
            gradient: gradient of the loss without `l2`, dense (1-D) or `Entries` with indices in any order.
            lr: η.

        Returns:
            The entries that were subtracted from x.

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
            indices = m.abs().topk(self.k).indices.sort().values
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
        """Add the pending part of λx to the memory (lazy regularisation).

        With the choice "top" there is none, because each step adds λx.

        Args:
            indices: entries to update; None selects all entries.
        """
        if not self._l2_applied.numel():
            return
        if indices is None:
            indices = torch.arange(self.x.numel(), device="cpu")
        lacking = (self._rates - self._l2_applied[indices]).to(self.x.dtype)
        self.memory.index_add_(0, indices, lacking.mul_(self.x[indices]), alpha=self.l2)
        self._l2_applied.index_fill_(0, indices, self._rates)


class ParallelRun(NamedTuple):
    """Result of `train_parallel`.

    Attributes:
        memories: memory of each process, with x's shape.
        seconds: time from the start, when all processes are ready, to the end of the last process.
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

    Each process has its own memory, reads x while others write, and writes k entries per step. If two processes add to
    one entry at the same time, one of the two additions may be lost. This is rarer if a step writes fewer entries. With
    one process the algorithm is `MemSGD`. With several processes, results differ from run to run.

    If processes are spawned, call this function below `if __name__ == "__main__":`. The functions must be picklable,
    such as functions of a module or an object with `__call__`. Tensors in them are shared, not copied. If one process
    fails, all end.

    Args:
        x: weights, 1-D fp32 or fp64, on the CPU. They are moved to shared memory and changed in place.
        gradient: function that takes x and a generator, and returns a stochastic gradient without `l2`, dense or
            `Entries`.
        lr: function that takes t and returns η_t. If processes took turns, t would be their total number of steps.
        steps: number of steps of each process.
        k: see `MemSGD`, as for `choice`, `l2` and `seed`. Each process derives its own seed.
        processes: number of processes.
        start_method: "spawn" or "fork". "fork" starts faster, but it is safe only in a process that has not used
            several threads, for example after `torch.set_num_threads(1)`.

    Raises:
        ValueError, TypeError: an option is out of range.
        torch.multiprocessing.ProcessRaisedException: a process failed; the text contains its traceback.
    """
    check_weights("train_parallel", x)
    MemSGD(x, k, choice, l2=l2, seed=seed)  # checks its options before a process starts
    steps, processes = check("steps", steps, "train_parallel"), check("processes", processes, "train_parallel")
    if start_method not in ("spawn", "fork"):
        raise ValueError(f"train_parallel(start_method={start_method!r}): choose from spawn, fork.")
    gc.collect()  # a forked process must not collect a process group, which would wait for threads of this process
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
    """Raise TypeError unless `x` is a contiguous 1-D fp32 or fp64 tensor on the CPU without requires_grad."""
    if not (isinstance(x, Tensor) and x.dim() == 1 and x.dtype in (torch.float32, torch.float64)):
        what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{owner}(x={what}): give a 1-D tensor of fp32 or fp64, such as parameters_to_vector returns.")
    if x.device.type != "cpu" or x.requires_grad or not x.is_contiguous():
        raise TypeError(f"{owner}: x must be contiguous, on the CPU and without requires_grad: it is changed in place.")


def check_k(owner: str, k: int, numel: int) -> int:
    """Return k, or raise ValueError unless it is a whole number from 1 to `numel`."""
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= numel:
        raise ValueError(f"{owner}(k={k!r}): k must be a whole number from 1 to {numel}, the number of weights.")
    return int(k)
