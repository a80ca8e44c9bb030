"""The part of the strategy that exchanges optimizers' updates."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer

from lightning_sparse._compat import ddp_options, has_backward_hooks
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import RankFailure
from lightning_sparse.hooks import UpdateExchanger, has_collectives
from lightning_sparse.methods import Method, resolve_updates
from lightning_sparse.options import Overlap
from lightning_sparse.strategies.gradients import GradientExchange

log = logging.getLogger(__name__)


class UpdateOrGradientExchange(GradientExchange):
    """Exchanges either updates, with a model that is not wrapped, or gradients, through DistributedDataParallel."""

    _local_steps: int | None
    _method: Method
    _given: tuple[str | Method, float | None, dict[str, Any]]
    _first_callback: Any = None
    _overlap: Overlap
    _obstacle = _note = ""

    def _begin_updates(self) -> None:
        clip_norm = self._options["clip_norm"]
        if clip_norm is not None and self._lightnings_scaler is not None:
            raise ValueError(
                f"clip_norm={clip_norm:g} with updates and precision='16-mixed': set gradient_clip_val of the Trainer "
                f"instead, which clips each rank's own gradient after it was unscaled."
            )
        assert isinstance(self.model, torch.nn.Module)
        ddp = ddp_options(self)
        options = {key: value for key, value in self._options.items() if key not in ("on_nonfinite", "clip_norm")}
        (given, density, own), two_level = self._given, self._method.aggregator
        senders = self.world_size // two_level.ranks_per_node if isinstance(two_level, TwoLevel) else self.world_size
        method, options["density_warmup"], options["density_warmup_steps"] = resolve_updates(
            given, density, options["density_warmup"], options["density_warmup_steps"], ranks=senders, **own
        )
        if isinstance(two_level, TwoLevel):
            method = replace(method, aggregator=two_level)
        self._exchange = UpdateExchanger(
            self.model,
            self.optimizers,
            method,
            local_steps=self._local_steps,
            overlap=self._overlap,
            # None, torch's own default, is True; from a configuration file all defaults come by name.
            broadcast_buffers=ddp.get("broadcast_buffers") is not False,
            forward_sync_buffers=ddp.get("forward_sync_buffers"),
            timeout=self._timeout,
            bucket_cap_mb=ddp["bucket_cap_mb"],
            **options,
        )
        self._obstacle = self._find_obstacle(self._exchange)
        when = f"after backward: {self._obstacle}" if self._obstacle else "within backward"
        self._note = "" if self._exchange.reducer.method.delayed else f" They are exchanged {when}."

    def _find_obstacle(self, exchange: UpdateExchanger) -> str:
        """Return why an exchange waits for the end of backward; "" where segments may be stepped before."""
        pl, module = import_module(self._namespace), self.lightning_module
        assert module is not None
        trainer: Any = module.trainer
        hooks = ["on_after_backward", "on_before_optimizer_step"]
        own = [*hooks, "configure_gradient_clipping", "clip_gradients", "optimizer_step", "backward"]
        owners = [(module, pl.LightningModule, own)]
        owners += [(callback, pl.Callback, hooks) for callback in trainer.callbacks]
        obstacles = [
            (self._overlap == "none", "overlap='none'"),
            (exchange.reducer.method.local_steps > 1, "there are several steps before"),
            (exchange.reducer.method.delayed, "overlap='next_step'"),
            (not module.automatic_optimization, "optimization is manual"),
            (self._lightnings_scaler is not None, "the gradient scaler looks at all gradients"),
            (trainer.gradient_clip_val, "gradient_clip_val needs all gradients"),
            (self._options["clip_norm"] is not None, "clip_norm needs all gradients"),
            (self._options["on_nonfinite"] == "skip", "on_nonfinite='skip' needs all gradients"),
            (self.root_device.type == "cuda" and has_collectives(module), "backward has collectives of its own"),
        ]
        for owner, base, names in owners:
            obstacles += [
                (is_overridden(name, owner, base), f"{type(owner).__name__}.{name} comes first") for name in names
            ]
        hooked = any(map(has_backward_hooks, module.modules()))
        obstacles.append((hooked, "a module has backward hooks"))
        for part in (self.precision_plugin, *self.optimizers):
            known = type(part).__module__.startswith(("torch.optim.", "pytorch_lightning.", "lightning."))
            obstacles.append((not known, f"{type(part).__name__} may look at all gradients"))
        return next((text for applies, text in obstacles if applies), "")

    @property
    def _update_exchange(self) -> UpdateExchanger | None:
        return self._exchange if isinstance(self._exchange, UpdateExchanger) else None

    def _exchange_before_callbacks(self, trainer: Any) -> None:
        """Have pending updates exchanged before callbacks swap or average weights: Lightning calls strategies last."""
        method = self.reducer.method
        if (method.local_steps > 1 or method.delayed) and self._first_callback not in trainer.callbacks:
            self._first_callback = import_module(self._namespace).Callback()
            self._first_callback.on_validation_start = self._exchange_pending
            self._first_callback.on_train_end = self._exchange_pending
            self._first_callback.on_train_batch_end = self._check_averages
            self._first_callback.on_train_epoch_end = self._exchange_for_averages
            trainer.callbacks.insert(0, self._first_callback)

    def _check_averages(self, trainer: Any, *_: Any) -> None:
        """Raise RuntimeError if a callback such as WeightAveraging averages weights that differ among ranks."""
        if self._update_exchange is None or not self._update_exchange.is_pending:
            return
        for callback in trainer.callbacks:
            if _averages(callback, step_idx=trainer.global_step - 1):
                method = self.reducer.method
                option = f"local_steps={method.local_steps}"
                remedy = "or only steps with an exchange; or set local_steps=1"
                if method.delayed:
                    option, remedy = "overlap='next_step'", "or leave overlap out"
                raise self._failed(
                    f"{type(callback).__name__} averages the weights after step {trainer.global_step}, but with "
                    f"{option} they are each rank's own until the next exchange, so averages would differ among ranks. "
                    f"Let its should_update take the ends of epochs, {remedy}."
                )

    def _exchange_for_averages(self, trainer: Any, *_: Any) -> None:
        """Have pending updates exchanged at the end of an epoch, if a callback averages weights then."""
        by_epoch = import_module(self._namespace).callbacks.StochasticWeightAveraging
        for callback in trainer.callbacks:
            if isinstance(callback, by_epoch) or _averages(callback, epoch_idx=trainer.current_epoch):
                self._exchange_pending()

    def _exchange_pending(self, *_: Any) -> None:
        if self._update_exchange is not None:
            self._update_exchange.exchange_pending()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._update_exchange is not None:
            # Callbacks such as BaseFinetuning give optimizers parameters as fit starts.
            self._update_exchange.updates.refresh_parameters()
        super().load_optimizer_state_dict(checkpoint)

    def wait_for_exchange(self) -> None:
        """Wait for an exchange that goes on, so that its observers have seen all of it; the next raises its errors."""
        if self._update_exchange is not None:
            with contextlib.suppress(Exception):
                self._update_exchange.updates.wait()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._exchange_pending()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._exchange_pending()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        # A checkpoint has the weights of all ranks, unless one rank writes it as an error ends its training.
        exchange = self._update_exchange if self._update_exchange and not self._update_exchange.in_step else None
        if exchange is not None and self._may_be_alone:
            exchange.end_if_soon()
        elif exchange is not None:
            # A signal's handler may save in the middle of a batch, whose backward needs the weights that there are.
            write = not _within_batch(self.lightning_module.trainer)
            with contextlib.suppress(RankFailure) if self._interrupted else contextlib.nullcontext():
                exchange.exchange_pending(write)
        state = super().lightning_module_state_dict()
        # An error's handler may, too, and in the middle of a step.
        before = {} if self._update_exchange is None else self._update_exchange.agreed_weights()
        for name, param in self.lightning_module.named_parameters(remove_duplicate=False):
            if id(param) in before and name in state:
                state[name] = before[id(param)].clone()
        return state

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._update_exchange is not None:
            self._update_exchange.before_backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._update_exchange is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # Once more: a callback may have come, or gradient_clip_val have been set, since training began.
        if not self._obstacle and not self._find_obstacle(self._update_exchange):
            closure = self._update_exchange.overlapped(optimizer, closure)
        with self._update_exchange.one_step(optimizer):
            return super().optimizer_step(optimizer, self._checked(optimizer, closure), model, **kwargs)

    def _checked(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which this rank's own gradient is clipped, or left out if it is not finite."""
        clip_norm, skips = self._options["clip_norm"], self._options["on_nonfinite"] == "skip"
        if clip_norm is None and (not skips or self._lightnings_scaler):
            return closure

        def checked() -> Any:
            result = closure()
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [_values(param) for param in params if param.grad is not None]
            norm = _total_norm(grads)
            if skips and not math.isfinite(norm) and not all(grad.isfinite().all() for grad in grads):
                # This rank sends what is in its residual, and the others go on.
                log.warning(f"A gradient is not finite on rank {self.global_rank}: its optimizer leaves the step out.")
                optimizer.zero_grad()
            elif clip_norm is not None and clip_norm < norm < math.inf:
                torch._foreach_mul_(grads, clip_norm / norm)
            return result

        return checked


def _values(param: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient; of a sparse one, such as an embedding's, the values, one for each place."""
    assert param.grad is not None
    if not param.grad.is_sparse:
        return param.grad
    param.grad = param.grad.coalesce()
    return param.grad.values()


def _total_norm(grads: list[torch.Tensor]) -> float:
    """Return the 2-norm of all gradients together, in fp32 at least, and in fp64 where that is out of range."""
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
    """Return whether a batch is being trained on."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(trainer.training and progress.started > progress.processed)


def _averages(callback: Any, **when: int) -> bool:
    """Return whether a callback such as WeightAveraging averages weights then; others may mean something else by it."""
    try:
        return bool(callback.should_update(**when))
    except (AttributeError, TypeError):
        return False
