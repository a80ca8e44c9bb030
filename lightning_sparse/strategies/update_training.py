"""Training that exchanges the updates of optimizers. The model is not wrapped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.hooks.closure import is_inner_step, with_gradients
from lightning_sparse.reducer import timed
from lightning_sparse.shards import is_sharded, parameters_of
from lightning_sparse.strategies.training import Training

if TYPE_CHECKING:
    from lightning_sparse.strategies.base import SparseStrategy

log = logging.getLogger(__name__)


class UpdateTraining(Training):
    """Exchanges the updates of a model's optimizers."""

    exchanger: UpdateExchanger

    def __init__(self, strategy: SparseStrategy, exchanger: UpdateExchanger) -> None:
        self._strategy, self.exchanger, self.optimizers = strategy, exchanger, exchanger.optimizers
        options = strategy._options.reducer
        checks = options.clip_norm is not None or (options.on_nonfinite == "skip" and not strategy.scaler)
        self._says_threshold = strategy.is_global_zero
        # Hooks, because manual optimization may step raw optimizers.
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in self.optimizers if checks]

    def threshold(self, optimizer: Any, given: float) -> float:
        ranks = self.exchanger.number_of_gradients(optimizer)
        result = given * self.exchanger.reducer.method.rule.clip_factor(ranks)
        if result != given and self._says_threshold:
            self._says_threshold = False
            self._strategy.inform(
                f"Each rank clips its gradient at {result:g} in place of {given:g}, because it is longer than the mean "
                f"of the {ranks} gradients: by √{ranks} if noise dominates."
            )
        return result

    def begin(self) -> None:
        self.exchanger.begin()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        if optimizer not in self.optimizers:
            name = type(optimizer).__name__
            raise self.failed(
                f"This {name} is not one of the optimizers that fit began with, so its updates are not exchanged. "
                f"Return all optimizers from configure_optimizers, and keep trainer.optimizers as it is."
            )
        with self.exchanger.one_step(optimizer):
            return step(closure)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_inner_step(optimizer):
            return None
        return with_gradients(args, kwargs, partial(self._check_gradients, optimizer))

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Clip this worker's gradient, or remove it if it is not finite."""
        self.exchanger.average_gradients(optimizer)
        options = self._strategy._options.reducer
        grads = [_values(param) for param in parameters_of([optimizer]) if param.grad is not None]
        norm = _total_norm(grads)
        if options.on_nonfinite == "skip" and not math.isfinite(norm) and not all(map(_is_finite, grads)):
            # This worker sends a part of its residual, and the other ranks take the step.
            rank = self._strategy.global_rank
            log.warning(f"A gradient is not finite on rank {rank}: its optimizer leaves the step out.")
            optimizer.zero_grad()
        elif options.clip_norm is not None:
            scale = getattr(optimizer, "grad_scale", None)  # a GradScaler lets a fused optimizer unscale gradients
            largest = options.clip_norm * (1.0 if scale is None else float(scale))
            if largest < norm < math.inf:
                torch._foreach_mul_(grads, largest / norm)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def exchange_pending(self, *_: Any) -> None:
        self.exchanger.exchange_pending()

    def wait(self) -> bool:
        with timed(self.exchanger.reducer.seconds, "exposed"):
            try:
                self.exchanger.updates.wait()
            except Exception:
                return False
        return True

    def refresh_parameters(self) -> None:
        # Callbacks such as BaseFinetuning add parameters to optimizers when fit starts.
        self.exchanger.updates.refresh_parameters()


def _is_finite(grad: torch.Tensor) -> bool:
    """Return whether a gradient is finite. A sharded one is not: its norm over all shards is not finite."""
    return not is_sharded(grad) and bool(grad.isfinite().all())


def _values(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient. For a sparse gradient, such as an embedding's, return its coalesced values."""
    assert param.grad is not None
    if not param.grad.is_sparse:
        return param.grad
    param.grad = param.grad.coalesce()
    return param.grad.values()


def _total_norm(grads: list[torch.Tensor]) -> float:
    """Return the 2-norm of all gradients together, in fp32 at least, and in fp64 if fp32 overflows.

    For sharded gradients it is the norm of the whole replica's gradient, in their dtype, as `clip_grad_norm_` takes it.
    """
    if any(map(is_sharded, grads)):
        total: Any = torch.nn.utils.get_total_norm(grads)
        return float(total.full_tensor())
    halves, others = [[grad for grad in grads if (grad.dtype.itemsize == 2) is half] for half in (True, False)]
    norms = [*torch._foreach_norm(halves, 2, torch.float32)] if halves else []
    norms += torch._foreach_norm(others, 2) if others else []
    norm = math.hypot(*torch.stack([norm.double() for norm in norms]).tolist()) if norms else 0.0
    if math.isfinite(norm):
        return norm
    return math.hypot(
        *(float(torch.linalg.vector_norm(grad.to(torch.promote_types(grad.dtype, torch.double)))) for grad in grads)
    )
