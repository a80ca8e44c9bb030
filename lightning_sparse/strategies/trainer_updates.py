"""A Trainer's fit that exchanges the updates of optimizers: overlap with backward, callbacks and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_sparse._compat import plain_name
from lightning_sparse.comm import RankFailure
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.shards import is_sharded
from lightning_sparse.strategies.overlap_rules import overlap_blocker
from lightning_sparse.strategies.update_training import UpdateTraining

if TYPE_CHECKING:
    from lightning_sparse.strategies.base import SparseStrategy


class TrainerUpdates(UpdateTraining):
    """Exchanges the updates of the optimizers of a Trainer's strategy."""

    _strategy: SparseStrategy

    def __init__(self, strategy: SparseStrategy, exchanger: UpdateExchanger) -> None:
        super().__init__(strategy, exchanger)
        self._overlap_blocker = overlap_blocker(strategy, exchanger.reducer.method)
        when = f"after backward: {self._overlap_blocker}" if self._overlap_blocker else "within backward"
        found = exchanger.reducer.method
        self.note = "" if found.delayed else f" They are exchanged {when}."
        self._precision = strategy.precision_plugin
        self._clip_before = vars(self._precision).get("clip_gradients")
        self._precision.clip_gradients = partial(self.clip, self._precision.clip_gradients)
        self._first_callback = self._call_before_callbacks() if found.local_steps > 1 or found.delayed else None

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    def before_backward(self) -> None:
        self.exchanger.before_backward()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        closure = partial(self._evaluate, optimizer, closure)
        # Checked again: a callback may have been added, or gradient_clip_val set, since training began. Residuals of
        # gradients are added to whole gradients, after a switch of auto_ddp.
        waits = any(param.requires_grad for param in getattr(self._strategy, "_residuals", ()))
        if not (self._overlap_blocker or waits or overlap_blocker(self._strategy, self.exchanger.reducer.method)):
            closure = self.exchanger.overlapped(optimizer, closure)
        return super().step(optimizer, closure, step)

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Evaluate a step's closure; then let the ranks of a node average gradients, before Lightning clips them."""
        result = closure()
        if self._strategy.scaler is None:  # otherwise they average as the scaler unscales gradients
            self.exchanger.average_gradients(optimizer)
        return result

    def _call_before_callbacks(self) -> Any:
        """Add a callback that exchanges pending updates before other callbacks swap, average or prune weights.

        Lightning calls strategies after callbacks.
        """
        first = import_module(self._strategy._namespace).Callback()
        first.on_validation_start, first.on_train_end = self.exchange_pending, lambda *_: self.exchanger.end()
        first.on_train_batch_end, first.on_train_epoch_end = self._check_averages, self._end_epoch
        self._trainer.callbacks.insert(0, first)
        return first

    def close(self) -> None:
        if self._clip_before is None:
            self._precision.__dict__.pop("clip_gradients", None)
        else:
            self._precision.clip_gradients = self._clip_before
        super().close()
        if self._first_callback is not None and self._first_callback in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._first_callback)

    def _check_averages(self, trainer: Any, *_: Any) -> None:
        """Raise RuntimeError if a callback such as WeightAveraging averages weights that differ among ranks."""
        if not self.exchanger.is_pending:
            return
        for callback in trainer.callbacks:
            if _averages(callback, step_idx=trainer.global_step - 1):
                method = self.exchanger.reducer.method
                option = f"local_steps={method.local_steps}"
                remedy = "or only steps with an exchange; or set local_steps=1"
                if method.delayed:
                    option, remedy = "overlap='next_step'", "or leave overlap out"
                raise self.failed(
                    f"{type(callback).__name__} averages the weights after step {trainer.global_step}, but with "
                    f"{option} they are each rank's own until the next exchange, so averages would differ among ranks. "
                    f"Let its should_update take the ends of epochs, {remedy}."
                )

    def _end_epoch(self, trainer: Any, *_: Any) -> None:
        """Exchange pending updates at the end of an epoch, if weights may be read then.

        With local steps, this takes a further exchange, and only a callback that averages weights needs it.
        """
        by_epoch = import_module(self._strategy._namespace).callbacks.StochasticWeightAveraging
        if self.exchanger.reducer.method.delayed or any(
            isinstance(callback, by_epoch) or _averages(callback, epoch_idx=trainer.current_epoch)
            for callback in trainer.callbacks
        ):
            self.exchange_pending()

    def state_dict(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        exchanger = self.exchanger
        # A checkpoint has weights of all ranks, unless one rank writes it because an error ends its training.
        if exchanger.in_step:
            pass
        elif self._strategy.may_be_alone:
            exchanger.end_if_soon()
        else:
            # A signal handler may save in the middle of a batch. Its backward pass needs the present weights.
            write = not _within_batch(self._trainer)
            with contextlib.suppress(RankFailure) if self._strategy.interrupted else contextlib.nullcontext():
                exchanger.exchange_pending(write)
        state = state_dict()
        # An error handler may save in the middle of a step. Then the model does not have the agreed weights.
        before = exchanger.agreed_weights()
        is_whole = not any(map(is_sharded, state.values()))  # then ranks other than 0 may have an empty one
        for name, param in self._strategy.lightning_module.named_parameters(remove_duplicate=False):
            if id(param) in before:
                agreed: Any = before[id(param)]  # all ranks gather its shards
                agreed = agreed.full_tensor().cpu() if is_whole and is_sharded(agreed) else agreed.clone()
                state.update(dict.fromkeys({name, plain_name(name)} & state.keys(), agreed))
        return state


def _within_batch(trainer: Any) -> bool:
    """Return whether training is in the middle of a batch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(trainer.training and progress.started > progress.processed)


def _averages(callback: Any, **when: int) -> bool:
    """Return whether a callback such as WeightAveraging averages weights then.

    Other callbacks may have a `should_update` with another meaning.
    """
    try:
        return bool(callback.should_update(**when))
    except (AttributeError, TypeError):
        return False
