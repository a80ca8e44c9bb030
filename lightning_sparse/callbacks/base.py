"""Base class of the callbacks: observes rank 0's reductions on logging steps, and logs the cost of observing.

On a logging step, a callback adds an observer to the reducer before the backward pass and removes it after the step.
All other steps cost one comparison. If ranks take several steps between exchanges, or in manual optimization, the
callback observes the next exchange. If a batch has several exchanges, for example of several optimizers, it observes
the last one.
All logged values describe rank 0: its gradient, its residual, its payload. So logging needs no collective.
Rank 0 represents the others, because the data of all ranks have the same distribution.
"""

from __future__ import annotations

import abc
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparse._compat import accumulates, logs_next_step, steps_taken
from lightning_sparse._lightning import INSTALLED
from lightning_sparse.compressors.base import Update
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
from lightning_sparse.observer import Observer
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.summary import summary_writers
from lightning_sparse.strategies.trainer import TrainerCalls

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning import Callback
else:
    # A Trainer accepts only callbacks of its own namespace, so this package's callbacks derive from both.
    _bases = tuple(import_module(name).Callback for name in INSTALLED)
    Callback = type("Callback", _bases, {"__doc__": "A callback for every Lightning that is installed."})

Trainer = Any
"""The Trainer of either namespace. It does not declare several of the attributes that this module reads."""

Charts = dict[str, list[str]]
"""Maps the title of a custom-scalars chart to the tags in that chart."""


class StepCallback(Callback, abc.ABC):
    """Observes the reductions of logging steps, and logs scalars and histograms about them."""

    needs_logger = True
    """Whether the callback has no effect without a logger."""

    category = "lightning_sparse"
    """Heading of its charts under TensorBoard's custom scalars."""

    counts = False
    """Whether the callback also reports steps whose gradients DDP averages, as `auto_ddp` may choose. It then gets no
    observer."""

    has_bar = True
    """Whether `pl_module.log` may be called. After training has ended, it may not."""

    _timed_observer: _TimedObserver | None = None

    @abc.abstractmethod
    def observer(self, reducer: Reducer) -> Observer:
        """Return a new observer for one reduction."""

    @abc.abstractmethod
    def report(self, seen: Any, trainer: Trainer, step: int) -> dict[str, float]:
        """Write histograms to TensorBoard, and return the scalars to log.

        Args:
            seen: observer of the step's last reduction; None if other code averaged the gradients.
            step: step number under which Lightning logs.
        """

    def charts(self, reducer: Reducer) -> Charts:
        """Return the charts for TensorBoard's "Custom scalars"."""
        return {}

    def setup(self, trainer: Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, TrainerCalls):
            raise TypeError(
                f"{type(self).__name__} observes the reductions of lightning_sparse, but the Trainer's strategy is "
                f"{type(trainer.strategy).__name__}. Use a strategy of lightning_sparse, such as 'topk_ddp', or "
                f"'dense_ddp' for uncompressed gradients; or remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self._timed_observer, self.has_bar = None, True
        reducer = trainer.strategy.reducer  # on all ranks, because it may raise
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if message := self._why_nothing_logs(trainer):
            warnings.warn(f"{type(self).__name__}: {message}", stacklevel=2)
        mine = [callback for callback in trainer.callbacks if isinstance(callback, StepCallback)]
        if mine[:1] == [self]:
            # TensorBoard keeps one layout of custom scalars per run, so the first callback writes it for all callbacks.
            layout: dict[str, dict[str, list[Any]]] = {}
            for callback in mine:
                for title, tags in callback.charts(reducer).items():
                    patterns = [f"^(.*-)?{re.escape(tag)}$" for tag in tags]  # with the logger's prefix, if it has one
                    layout.setdefault(callback.category, {})[title] = ["Multiline", patterns]
            for writer in summary_writers(trainer.loggers):
                writer.add_custom_scalars(layout)

    def _why_nothing_logs(self, trainer: Trainer) -> str | None:
        every, done = trainer.log_every_n_steps, steps_taken(trainer)
        if not trainer.loggers and self.needs_logger:
            return "the Trainer has no logger, so it does nothing. Set one: Trainer(logger=TensorBoardLogger(...))."
        last = trainer.max_steps if trainer.max_steps >= 0 else math.inf
        if trainer.max_epochs is not None and trainer.max_epochs >= 0 and trainer.num_training_batches != math.inf:
            per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            last = min(last, per_epoch * trainer.max_epochs)
        if every == 0 or last // every == done // every:
            return (
                f"none of the steps {done + 1} to {last} logs, since log_every_n_steps={every}, so it does nothing. "
                f"Lower Trainer(log_every_n_steps=...)."
            )
        return None

    def on_train_batch_start(self, trainer: Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._waits_for_an_exchange(trainer):
            return
        if self._timed_observer is not None:
            if _may_wait(trainer):
                self._report_observed(trainer)  # validation or a checkpoint caused the exchange
            else:
                self._detach(trainer.strategy.reducer)  # the last batch ended early, by an exception or a skip
        # This is Lightning's own condition for logging; it is known before the batch runs.
        if not (logs_next_step(trainer) or trainer.fast_dev_run):
            return
        if accumulates(trainer) or not trainer.is_global_zero:
            return
        if trainer.loggers or not self.needs_logger:
            reducer: Reducer = trainer.strategy.reducer
            self._timed_observer = _TimedObserver(lambda: self.observer(reducer), reducer.step)
            reducer.observers.append(self._timed_observer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timed_observer is not None and not self._waits_for_an_exchange(trainer):
            self._report_observed(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self.has_bar = False
        if self._timed_observer is not None:
            self._report_observed(trainer)  # the last exchange comes after the last batch

    def _report_observed(self, trainer: Trainer) -> None:
        watch, started = self._timed_observer, time.perf_counter()
        assert watch is not None
        succeeded = trainer.strategy.wait_for_exchange()  # the exchange calls the observers in its thread
        self._detach(trainer.strategy.reducer)
        if not succeeded or (watch.observer is None and not self.counts):
            return  # the next exchange raises the error; or there was no backward pass, or a skipped step
        step = steps_taken(trainer)
        scalars = self.report(watch.observer, trainer, step)
        if not scalars:
            return
        cost = watch.seconds + time.perf_counter() - started
        scalars[f"monitoring_cost/{type(self).__name__}_ms"] = 1000 * cost
        finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
        for logger in trainer.loggers:
            logger.log_metrics(finite, step)

    def _waits_for_an_exchange(self, trainer: Trainer) -> bool:
        """Return whether a logging step had no exchange. The callback then reports the next exchange."""
        watch = self._timed_observer
        if watch is None or watch.observer is not None or not _may_wait(trainer):
            return False
        return bool(trainer.strategy.reducer.step == watch.began)  # False also if `auto_ddp` has averaged gradients

    def _detach(self, reducer: Reducer) -> None:
        if self._timed_observer in reducer.observers:
            reducer.observers.remove(self._timed_observer)
        self._timed_observer = None


def _may_wait(trainer: Trainer) -> bool:
    """Return whether a batch may have no exchange although Lightning accumulates none."""
    return trainer.strategy.reducer.method.local_steps > 1 or not trainer.lightning_module.automatic_optimization


class _TimedObserver(Observer):
    """Times an observer. It creates a new one for each reduction of a batch, so that the last reduction is reported.

    Args:
        make: creates an observer.
        began: the reducer's number of steps before the first batch that is observed.
    """

    def __init__(self, make: Callable[[], Any], began: int) -> None:
        self.make, self.began = make, began
        self.observer: Any = None
        self.step = -1
        self.seconds = 0.0

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        if ctx.step != self.step:
            self.observer, self.step = self.make(), ctx.step
        self._timed(self.observer.gradients, grads, ctx)

    def compensated(self, u: Tensor, ctx: Context) -> None:
        self._timed(self.observer.compensated, u, ctx)

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        self._timed(self.observer.aggregated, u, applied, ctx)

    def written(self, grads: list[Tensor], ctx: Context) -> None:
        self._timed(self.observer.written, grads, ctx)

    def _timed(self, look: Callable[..., None], *args: Any) -> None:
        started = time.perf_counter()
        look(*args)
        self.seconds += time.perf_counter() - started


def by_parameter(x: Tensor, indices: Tensor, segment: Segment) -> tuple[Tensor, ...]:
    """Cut values of a segment's entries, of shape (k,), into one tensor for each parameter; `indices` ascend."""
    stops = torch.tensor(segment.bounds[1:-1], device=indices.device)
    return x.tensor_split(torch.searchsorted(indices, stops).tolist())


def chunks(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield pieces of 1-D tensors that fit a CPU's cache or fill a GPU.

    Short tensors are concatenated, because every piece costs kernel launches and a model has many short parameters.
    """
    size = 1 << 24 if parts[0].is_cuda else 1 << 17
    short: list[Tensor] = []
    waiting = 0
    for part in parts:
        for piece in part.split(size):
            if piece.numel() == size:
                yield piece
                continue
            short.append(piece)
            waiting += piece.numel()
            if waiting >= size:
                yield torch.cat(short)
                short, waiting = [], 0
    if short:
        yield torch.cat(short)


def sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Return Σx² over 1-D tensors as an fp64 scalar, without a temporary tensor of their length."""
    total = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    for chunk in chunks(parts):
        wide = chunk.double()
        total += wide.dot(wide)
    return total
