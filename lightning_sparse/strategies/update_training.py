"""A fit that exchanges the updates of optimizers. The model is not wrapped."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_sparse._compat import ddp_options
from lightning_sparse.comm import RankFailure
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.methods import Method
from lightning_sparse.strategies.overlap_rules import overlap_blocker
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.training import Training, enabled_scaler

if TYPE_CHECKING:
    from lightning_sparse.strategies.sparse_ddp import SparseDDP

log = logging.getLogger(__name__)


class UpdateTraining(Training):
    """Exchanges the updates of the strategy's optimizers.

    Args:
        strategy: the strategy.
        options: its options.
        method: the compression method of this fit, see `StrategyOptions.with_nodes`.
        timeout: see `attach_updates`.
    """

    exchanger: UpdateExchanger

    def __init__(
        self, strategy: SparseDDP, options: StrategyOptions, method: Method, timeout: timedelta | None
    ) -> None:
        self._strategy, self._options = strategy, options
        clip_norm = options.reducer.clip_norm
        if clip_norm is not None and self._scaler is not None:
            raise ValueError(
                f"clip_norm={clip_norm:g} with updates and precision='16-mixed': set gradient_clip_val of the Trainer "
                f"instead, which clips each rank's own gradient after it was unscaled."
            )
        assert isinstance(strategy.model, torch.nn.Module)
        ddp = ddp_options(strategy)
        self.exchanger = UpdateExchanger(
            strategy.model,
            strategy.optimizers,
            *options.for_updates(method, strategy.world_size),
            local_steps=options.local_steps,
            overlap=options.overlap,
            # None, torch's default, means True. A configuration file passes all defaults explicitly.
            broadcast_buffers=ddp.get("broadcast_buffers") is not False,
            forward_sync_buffers=ddp.get("forward_sync_buffers"),
            timeout=timeout,
        )
        self._overlap_blocker = self._why_not_overlapped()
        when = f"after backward: {self._overlap_blocker}" if self._overlap_blocker else "within backward"
        found = self.exchanger.reducer.method
        self.note = "" if found.delayed else f" They are exchanged {when}."
        self._first_callback = self._call_before_callbacks() if found.local_steps > 1 or found.delayed else None

    @property
    def _scaler(self) -> Any:
        return enabled_scaler(self._strategy.precision_plugin)

    @property
    def _module(self) -> Any:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    def _why_not_overlapped(self) -> str:
        module, method, options = self._module, self.exchanger.reducer.method, self._options
        namespace = self._strategy._namespace
        return overlap_blocker(self._trainer, module, namespace, method, options.overlap, options.reducer)

    def begin(self) -> None:
        self.exchanger.begin()

    def before_backward(self) -> None:
        self.exchanger.before_backward()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        # Checked again: a callback may have been added, or gradient_clip_val set, since training began.
        if not self._overlap_blocker and not self._why_not_overlapped():
            closure = self.exchanger.overlapped(optimizer, closure)
        with self.exchanger.one_step(optimizer):
            return step(self._checked(optimizer, closure))

    def _checked(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that also clips this rank's gradient, or removes it if it is not finite."""
        clip_norm, skips = self._options.reducer.clip_norm, self._options.reducer.on_nonfinite == "skip"
        if clip_norm is None and (not skips or self._scaler):
            return closure

        def checked() -> Any:
            result = closure()
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [_values(param) for param in params if param.grad is not None]
            norm = _total_norm(grads)
            if skips and not math.isfinite(norm) and not all(grad.isfinite().all() for grad in grads):
                # This rank sends a part of its residual, and the other ranks take the step.
                rank = self._strategy.global_rank
                log.warning(f"A gradient is not finite on rank {rank}: its optimizer leaves the step out.")
                optimizer.zero_grad()
            elif clip_norm is not None and clip_norm < norm < math.inf:
                torch._foreach_mul_(grads, clip_norm / norm)
            return result

        return checked

    def _call_before_callbacks(self) -> Any:
        """Add a callback that exchanges pending updates before other callbacks swap or average weights.

        Lightning calls strategies after callbacks.
        """
        first = import_module(self._strategy._namespace).Callback()
        first.on_validation_start = first.on_train_end = self.exchange_pending
        first.on_train_batch_end, first.on_train_epoch_end = self._check_averages, self._exchange_for_averages
        self._trainer.callbacks.insert(0, first)
        return first

    def close(self) -> None:
        super().close()
        if self._first_callback is not None and self._first_callback in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._first_callback)

    def exchange_pending(self, *_: Any) -> None:
        self.exchanger.exchange_pending()

    def wait(self) -> None:
        with contextlib.suppress(Exception):
            self.exchanger.updates.wait()

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

    def _exchange_for_averages(self, trainer: Any, *_: Any) -> None:
        """Exchange pending updates at the end of an epoch if a callback averages weights then."""
        by_epoch = import_module(self._strategy._namespace).callbacks.StochasticWeightAveraging
        for callback in trainer.callbacks:
            if isinstance(callback, by_epoch) or _averages(callback, epoch_idx=trainer.current_epoch):
                self.exchange_pending()

    def refresh_parameters(self) -> None:
        # Callbacks such as BaseFinetuning add parameters to optimizers when fit starts.
        self.exchanger.updates.refresh_parameters()

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
        for name, param in self._module.named_parameters(remove_duplicate=False):
            if id(param) in before and name in state:
                state[name] = before[id(param)].clone()
        return state


def _values(param: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient. For a sparse gradient, such as an embedding's, return its coalesced values."""
    assert param.grad is not None
    if not param.grad.is_sparse:
        return param.grad
    param.grad = param.grad.coalesce()
    return param.grad.values()


def _total_norm(grads: list[torch.Tensor]) -> float:
    """Return the 2-norm of all gradients together, in fp32 at least, and in fp64 if fp32 overflows."""
    halves, others = [[grad for grad in grads if (grad.dtype.itemsize == 2) is half] for half in (True, False)]
    norms = [*torch._foreach_norm(halves, 2, torch.float32)] if halves else []
    norms += torch._foreach_norm(others, 2) if others else []
    norm = math.hypot(*torch.stack([norm.double() for norm in norms]).tolist()) if norms else 0.0
    if math.isfinite(norm):
        return norm
    return math.hypot(
        *(float(torch.linalg.vector_norm(grad.to(torch.promote_types(grad.dtype, torch.double)))) for grad in grads)
    )


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
