"""Training that exchanges gradients, with the model in DistributedDataParallel: backward passes and loss scales."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sparse._compat import ddp_options, has_step_hooks
from lightning_sparse.hooks import GradientExchanger, exchange_gradients
from lightning_sparse.hooks.closure import with_gradients
from lightning_sparse.hooks.optimizer_kinds import warn_of_sparse_gradients
from lightning_sparse.hooks.scalers import may_depend, unwrap, wrap
from lightning_sparse.hooks.update_exchange import When
from lightning_sparse.methods import Method
from lightning_sparse.shards import parameters_of
from lightning_sparse.strategies.fit_checks import (
    check_optimizers,
    warn_of_two_momenta,
    warn_of_unstepped,
)
from lightning_sparse.strategies.training import Training

if TYPE_CHECKING:
    from lightning_sparse.strategies.base import SparseStrategy


class AfterForward:
    """A hook that is called after each forward pass of DistributedDataParallel.

    It names the cause if the pass fails because another rank has ended. DistributedDataParallel broadcasts buffers in
    the pass, and torch's error does not say why it broke off.

    Attributes:
        expects_gradients: whether a backward pass that exchanges gradients should follow.
    """

    def __init__(self, exchanger: GradientExchanger) -> None:
        self._exchanger: GradientExchanger | None = exchanger  # copies of the model have none
        self.expects_gradients = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, ddp: DistributedDataParallel, *_: Any) -> None:
        """Look at the error of the forward pass, if there is one."""
        if self._exchanger is not None and (error := sys.exc_info()[1]) is not None:
            self._exchanger.session.fail(error, in_model=True)
        self.expects_gradients |= torch.is_grad_enabled() and ddp.require_backward_grad_sync


class GradientTraining(Training):
    """Exchanges gradients in each synchronised backward pass.

    Args:
        strategy: the strategy. The loss scale is taken from its precision plugin.
        ddp: the wrapped model. This object keeps no reference to it.

    Attributes:
        forward: a hook for forward passes of `ddp`, which `check_complete` needs.
    """

    exchanger: GradientExchanger

    def __init__(
        self,
        strategy: SparseStrategy,
        ddp: DistributedDataParallel,
        optimizers: list[Optimizer],
        method: Method,
    ) -> None:
        self._strategy, self._method = strategy, method
        self.optimizers: list[Optimizer] = optimizers
        self._own_scaler: torch.amp.GradScaler | None = None  # the model's, after its first scaled loss
        self._has_stepped = False
        self._reductions = 0  # reduced steps before the present backward pass, or before the last step of Fabric
        self._model_name = type(ddp.module).__name__
        scaler = strategy.scaler
        self.exchanger = exchange_gradients(
            ddp,
            method,
            replace(strategy._options.reducer, loss_scale=scaler and scaler.get_scale),
            timeout=strategy._timeout,
            from_rank_0=initial_states(ddp, ddp_options(strategy)),
            optimizers=optimizers,
        )
        self.forward = AfterForward(self.exchanger)
        self._step_hook = register_optimizer_step_pre_hook(self._before_any_step)

    def begin(self) -> None:
        wrap("scale", self._scaled_loss)
        self._warn_of_optimizers()

    def _before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._skips:
            return None
        return with_gradients(args, kwargs, functools.partial(self._drop_nonfinite, optimizer))

    @property
    def _skips(self) -> bool:
        """Whether a step is left out if a gradient is not finite, without a gradient scaler that does so."""
        options = self._strategy._options.reducer
        return options.on_nonfinite == "skip" and not self._strategy.scaler and not self._own_scaler

    def _drop_nonfinite(self, optimizer: Optimizer) -> None:
        """Remove the gradients of a step that all ranks skip, so that the optimizer does nothing: all are NaN."""
        exchanged = {*map(id, self.exchanger.params.values())}
        params = [param for param in parameters_of([optimizer]) if id(param) in exchanged and param.grad is not None]
        firsts = [param.grad[(0,) * param.dim()].float() for param in params if param.numel()]  # type: ignore[index]
        if firsts and torch.stack(firsts).isnan().any():
            for param in parameters_of([optimizer]):
                param.grad = None

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps a parameter of the model."""
        return not {*map(id, self.exchanger.params.values())}.isdisjoint(map(id, parameters_of([optimizer])))

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer of the model; ValueError if it is not supported."""
        if self._method.compresses:
            check_optimizers([optimizer], self._method)
        self.optimizers.append(optimizer)
        self._warn_of_optimizers()

    def _warn_of_optimizers(self) -> None:
        """Warn on rank 0 of optimizers that do not go with the method."""
        if self._strategy.global_rank == 0:
            optimizers = [each for each in self.optimizers if each.param_groups]  # Lightning's stand-in has none
            if self._method.sends_few:
                warn_of_sparse_gradients(optimizers)
            warn_of_two_momenta(optimizers, self._method)

    def close(self) -> None:
        unwrap("scale", self._scaled_loss)
        self._step_hook.remove()
        super().close()

    def _scaled_loss(self, scale: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled() and torch.is_grad_enabled():
            self._on_scaled_loss(scaler, outputs)
        return scale(scaler, outputs)

    def _on_scaled_loss(self, scaler: torch.amp.GradScaler, outputs: Any) -> None:
        """Let the reducer use the loss scale of a GradScaler that is not Lightning's, if it scales the model's loss."""
        if scaler in (self._strategy.scaler, self._own_scaler) or not may_depend(outputs, self.exchanger.params):
            return
        module = self._model_name
        if len(getattr(self._strategy, "_trainings", ())) > 1:
            raise self.failed(
                "A GradScaler of your own is not supported while several models train: it is not known whose loss it "
                "scales. Set precision='16-mixed' of Fabric in its place, or exchange='update' of the strategy."
            )
        if self._strategy.scaler is not None or self._own_scaler is not None:
            where = "besides Lightning's" if self._own_scaler is None else "besides another one"
            raise self.failed(
                f"{module} scales its loss by a GradScaler of its own {where}, but residuals are kept in units of one "
                f"loss scale. Use one GradScaler for all losses, or precision='16-mixed' and none."
            )
        self._own_scaler = scaler
        # No backward pass is running, so the worker thread does not read it now.
        self.exchanger.reducer.gradient_check.get_scale = scaler.get_scale
        if self._strategy.global_rank == 0:
            self._strategy.inform(
                f"{module} scales its loss by a GradScaler of its own: residuals are kept unscaled, and where a "
                f"gradient overflows on any rank, all ranks leave the step out."
            )

    def before_backward(self) -> None:
        self._reductions = self.exchanger.reductions

    def after_backward(self, post_backward: Callable[[], None]) -> None:
        model: Any = self._strategy.model  # type: ignore[attr-defined]  # of a Trainer's strategy
        if not model.require_backward_grad_sync:
            post_backward()
            return
        # With static_graph and manual optimization, Lightning lets DDP reduce the first gradients here.
        with self.exchanger.after_backward():
            post_backward()
        # DDP reports gradients that it has not exchanged in the next forward pass. The optimizer has used them by then.
        self.exchanger.check_reduced(self._reductions)

    def check_complete(self) -> None:
        """Raise RuntimeError, on all ranks, if backward passes since the last step left gradients without exchange."""
        is_complete, before = self.exchanger.drain(), self._reductions
        self._reductions = self.exchanger.reductions
        expects, self.forward.expects_gradients = self.forward.expects_gradients, False
        if is_complete and expects and self._reductions == before:  # no backward may have followed, as in a log
            gradients = [param.grad for param in self.exchanger.params.values() if param.grad is not None]
            is_complete = not any(map(torch.any, gradients))
        if not is_complete:
            self.exchanger.check_reduced(self._reductions)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        before = self.exchanger.reductions

        def once() -> Any:
            loss = self.exchanger.evaluate_once(optimizer, before, closure)
            if not has_step_hooks(optimizer) and self._skips:
                self._drop_nonfinite(optimizer)
            return loss

        result = step(once)
        if not self._has_stepped:  # by now, Fabric has set up all optimizers, and there are gradients
            self._has_stepped = True
            if self._strategy.global_rank == 0 and self._method.sends_few:
                warn_of_unstepped(self.exchanger.params, self.optimizers)
        return result


def initial_states(ddp: DistributedDataParallel, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by name that DDP's constructor, with these options, would broadcast from rank 0."""
    if not options.get("init_sync", True):
        return {}
    states: dict[str, Tensor] = {name: param.detach() for name, param in ddp.module.named_parameters()}
    if when_to_broadcast(options) != "never":
        states.update(ddp.module.named_buffers())
    return {name: x for name, x in states.items() if name not in ddp.parameters_to_ignore}


def when_to_broadcast(options: dict[str, Any]) -> When:
    """Return when DDP, with these options of its constructor, broadcasts buffers from rank 0."""
    # None, torch's default, means True. A configuration file passes all defaults explicitly.
    at_start, forward = options.get("broadcast_buffers") is not False, options.get("forward_sync_buffers")
    if at_start if forward is None else forward:
        return "always"
    return "never" if forward is None else "start"
