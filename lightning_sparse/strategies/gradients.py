"""The part of the strategy that exchanges gradients: DDP's hook, backward passes, and loss scales."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._compat import ddp_options
from lightning_sparse.hooks import GradientExchanger, exchange_gradients
from lightning_sparse.methods import Method
from lightning_sparse.strategies.checkpointing import Checkpointing
from lightning_sparse.strategies.fit_checks import several_evaluations


class GradientExchange(Checkpointing):
    """Exchanges gradients in each synchronised backward pass. The model is wrapped in DistributedDataParallel."""

    _method: Method
    _compresses: bool
    _options: dict[str, Any]
    _syncs = True  # whether weights become rank 0's as training starts

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._own_scaler: torch.amp.GradScaler | None = None  # of the LightningModule, once it has scaled a loss
        self._reductions = 0  # steps reduced before the present backward

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        options = ddp_options(self)
        self._syncs = options.get("init_sync", True)
        try:
            options["init_sync"] = False  # DDP would send all weights; we send those that differ
            return super()._setup_model(model)  # type: ignore[no-any-return]
        finally:
            options["init_sync"] = self._syncs

    def _from_rank_0(self) -> dict[str, Tensor]:
        """Return what DDP would make rank 0's as it is made, by name."""
        ddp, options = self.model, ddp_options(self)
        assert isinstance(ddp, DistributedDataParallel)
        if not self._syncs:
            return {}
        states: dict[str, Tensor] = {name: param.detach() for name, param in ddp.module.named_parameters()}
        if options.get("broadcast_buffers") is not False or options.get("forward_sync_buffers") is not None:
            states.update(ddp.module.named_buffers())
        return {name: x for name, x in states.items() if name not in ddp.parameters_to_ignore}

    def _register_ddp_hooks(self) -> None:
        scaler = self._lightnings_scaler
        self._own_scaler = None
        # Not super(): it registers hooks on CUDA only, and silently nothing on CPU.
        self._exchange = exchange_gradients(
            self.model,  # type: ignore[arg-type]
            self._method,
            timeout=self._timeout,
            loss_scale=scaler and scaler.get_scale,
            from_rank_0=self._from_rank_0(),
            optimizers=self.optimizers,
            **self._options,
        )

    @property
    def _comm_thread(self) -> GradientExchanger | None:
        """The communication thread, where gradients are exchanged."""
        return self._exchange if isinstance(self._exchange, GradientExchanger) else None

    @property
    def _lightnings_scaler(self) -> Any:
        """Lightning's gradient scaler; one that is switched off leaves no step out, so it is none."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _scaled_loss(self, scale: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled() and torch.is_grad_enabled():
            self._on_scaled_loss(scaler)
        return scale(scaler, outputs)

    def _on_scaled_loss(self, scaler: torch.amp.GradScaler) -> None:
        """Have the reducer use the loss scale of a GradScaler that is not Lightning's."""
        if self._comm_thread is None or scaler in (self._lightnings_scaler, self._own_scaler):
            return
        if self._lightnings_scaler is not None or self._own_scaler is not None:
            where = "besides Lightning's" if self._own_scaler is None else "besides another one"
            raise self._failed(
                f"{type(self.lightning_module).__name__} scales its loss by a GradScaler of its own {where}, but "
                f"residuals are kept in units of one loss scale. Use one GradScaler for all losses, or precision="
                f"'16-mixed' and none."
            )
        self._own_scaler = scaler
        # Between two backward passes: the communication thread, which reads it, has nothing to do.
        self._comm_thread.reducer.gradient_check.get_scale = scaler.get_scale
        if self.global_rank == 0:
            self._inform(
                f"{type(self.lightning_module).__name__} scales its loss by a GradScaler of its own: residuals are "
                f"kept unscaled, and where a gradient overflows on any rank, all ranks leave the step out."
            )

    def _failed(self, text: str) -> RuntimeError:
        """Report to the other ranks what has failed on this one, and return it as an error to raise."""
        error = RuntimeError(text)
        if self._exchange is not None:
            self._exchange.fail(error)
        return error

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._comm_thread is not None:
            self._reductions = self._comm_thread.reductions

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._comm_thread is None or not self.model.require_backward_grad_sync:  # type: ignore[union-attr]
            super().post_backward(closure_loss)
            return
        # With static_graph and manual optimization, Lightning makes DDP reduce the first gradients here.
        with self._comm_thread.after_backward():
            super().post_backward(closure_loss)
        # DDP would report gradients that it has not exchanged in the next forward, after the optimizer has used them.
        self._comm_thread.check_reduced(self._reductions)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        thread = self._comm_thread
        before = 0 if thread is None else thread.reductions

        def once() -> Any:
            if self._compresses and thread is not None and thread.reductions > before:
                raise self._failed(several_evaluations(optimizer, self._method))
            return closure()

        safe: Callable[[], Any] = once
        if self._options["on_nonfinite"] == "skip" and not self._lightnings_scaler and not self._own_scaler:
            safe = functools.partial(_without_nonfinite, optimizer, once)
        return super().optimizer_step(optimizer, safe, model, **kwargs)


def _without_nonfinite(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    """Call the closure, and leave an optimizer without gradients, so that it does nothing, where they are all NaN."""
    result = closure()
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    firsts = [grad[(0,) * grad.dim()] for grad in grads if grad is not None and grad.numel()]
    if firsts and torch.stack([first.float() for first in firsts]).isnan().any():
        optimizer.zero_grad()
    return result
