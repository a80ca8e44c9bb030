"""Checks that optimizers step with the gradients that ranks have exchanged.

Within backward an exchange has already changed the residuals: sent entries have left them, and the rest was added. If
the user then changes, zeroes or drops the gradient, the residuals do not follow. A spike that the user has zeroed comes
back in later steps.

To undo the exchange, each rank would need its local gradient, which the result has overwritten. A copy would have
the size of the residuals, and cost one more pass over all gradients in each step. So this module only detects such
changes, by the version counters that torch keeps for each tensor, and warns once. If ranks exchange updates instead,
nothing is sent before the optimizer's step, and a rank may drop any gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import unserializable_hook

from lightning_sparse._compat import has_step_hooks, have_hooks_called, version
from lightning_sparse.hooks.closure import with_gradients
from lightning_sparse.hooks.optimizer_kinds import warn_at_first_steps
from lightning_sparse.hooks.scalers import unwrap, wrap
from lightning_sparse.reducer import Reducer
from lightning_sparse.shards import parameters_of

log = logging.getLogger(__name__)

TAKE_TURNS = (
    " If a backward pass is for another optimizer, as in a GAN, call toggle_optimizer and untoggle_optimizer, with "
    "find_unused_parameters=True; in plain torch call the model within its no_sync()."
)
"""A further remedy if a gradient was thrown away."""
NO_SYNC = (
    "Call the model within no_sync(), in Lightning within trainer.strategy.block_backward_sync(), in all backward "
    "passes before a step but the last one."
)
"""The remedy if a later backward pass spoils the result of an earlier one."""


class ExchangedGradients:
    """Warns once if an exchanged gradient is changed or thrown away before its optimizer's step.

    Gradients may accumulate over several exchanges, and a GradScaler may unscale them. It also warns of a step with a
    gradient that ranks have not exchanged. If ranks vote, there is no residual, so gradients may be changed.

    Args:
        params: the parameters of a model, by name.
        reducer: the reducer of their gradients. Its method has a residual, or ranks vote.
        known: their optimizers, as far as these have been checked. Of others it warns if gradients are too sparse.
    """

    def __init__(self, params: Mapping[str, Tensor], reducer: Reducer, known: Sequence[Optimizer]) -> None:
        self._reducer, self._votes = reducer, not reducer.method.memory.error_feedback
        self._params = {id(param): (name, param) for name, param in params.items()}
        self._written: dict[int, tuple[int, int]] = {}  # exchanged gradients before their step: state after DDP
        self._thrown_away: set[int] = set()
        self._earlier: set[int] = set()  # exchanged gradients to which this backward pass adds
        self._local: set[int] = set()  # gradients of backward passes since DDP last delivered them
        self._left_out: set[int] = set()  # without a part in this backward pass, while an exchanged gradient waits
        self._looked = True  # whether this backward pass has compared gradients with `_written`
        self._may_move = True  # until the first look after the first backward pass
        self._step_hooks = [register_optimizer_step_pre_hook(self._before_step)]
        if reducer.method.sends_few:
            self._step_hooks.append(warn_at_first_steps([*self._params], known))
        # A copy of the model in another process needs no hooks, so torch need not warn that the copy lacks them.
        before = unserializable_hook(partial(self._before_accumulation))  # which marks it; a method takes no mark
        self._hooks = [param.register_hook(before) for param in params.values()]
        # torch.autograd.grad calls the first hook, too, but accumulates nothing.
        self._hooks += [param.register_post_accumulate_grad_hook(self._accumulated) for param in params.values()]
        wrap("step", self._scaled_step)
        wrap("unscale_", self._unscale)

    def close(self) -> None:
        """Stop checking."""
        self._end()
        for hook in self._step_hooks:
            hook.remove()
        self._params, self._written = {}, {}

    def _warn(self, text: str) -> None:
        """Warn, and only record from now on which gradients wait for a step."""
        self._end()
        log.warning(text)

    def _end(self) -> None:
        for hook in self._hooks:  # the step hooks stay, because torch may iterate over them now
            hook.remove()
        self._hooks = []
        unwrap("step", self._scaled_step)
        unwrap("unscale_", self._unscale)
        self._local, self._earlier, self._left_out = set(), set(), set()

    def on_delivery(self, params: Iterable[Tensor], unused: Container[str] = ()) -> None:
        """Note that DDP delivers the gradients of these parameters, for ranks to exchange.

        Args:
            unused: names of parameters that took no part in the backward pass.
        """
        if not self._hooks:
            return
        keys = [*map(id, params)]
        self._local.difference_update(keys)
        self._left_out |= {key for key in keys if key in self._written and self._params[key][0] in unused}
        if not self._votes and self._reducer.options.clip_norm is None:
            return
        cause, result = "clip_norm clips", "the clipped part of that gradient is lost"
        if self._votes:
            cause, result = "Ranks vote on", "the earlier result wins again"
        earlier = (self._params[key][0] for key in keys if key in self._earlier)
        if name := next((name for name in earlier if name not in unused), None):
            self._warn(
                f"{cause} the gradient of {name!r} together with the exchanged gradient of an earlier backward pass, "
                f"which waits for a step: {result}. {NO_SYNC}"
            )

    def on_exchange(self, names: Collection[str]) -> None:
        """Record gradients just after ranks have exchanged them.

        Args:
            names: names of their parameters; empty if ranks skip the step.
        """
        if self._earlier and not names:
            self._warn(
                f"Ranks skip a step because a gradient is not finite. The exchanged gradient of "
                f"{self._params[next(iter(self._earlier))][0]!r} of an earlier backward pass waited for this step, so "
                f"its entries are lost. {NO_SYNC}"
            )
        # If no rank used a parameter, DDP keeps its gradient.
        lost = [self._params[key][0] for key in self._left_out if key in self._written and self._has_changed(key)]
        self._left_out, self._earlier = set(), set()
        if lost:
            self._warn(
                f"{lost[0]!r} took no part in this backward pass, and its gradient of an earlier one, which waits for "
                f"a step, was overwritten. {NO_SYNC}"
            )
        chosen = set(names)
        self._note(key for key, (name, _) in self._params.items() if name in chosen)
        self._looked = False

    def gradients_wait(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether exchanged gradients wait for a step of these optimizers."""
        if self._votes:  # without a residual no entry is missing in a checkpoint
            return False
        hooked = filter(has_step_hooks, optimizers)  # steps of others are not noticed
        return any(id(param) in self._written and param.grad is not None for param in parameters_of(hooked))

    def _note(self, keys: Iterable[int]) -> None:
        for key in keys:
            if (grad := self._params[key][1].grad) is not None:
                self._written[key] = _state(grad)

    def _before_accumulation(self, _: Tensor) -> None:
        if not self._looked:  # the first gradient of this backward pass
            self._looked = True
            self._note_move()
            thrown_away = {key for key in self._written if self._has_changed(key)}
            self._earlier = self._written.keys() - thrown_away
            self._thrown_away |= thrown_away

    def _accumulated(self, param: Tensor) -> None:
        self._written.pop(id(param), None)
        self._local.add(id(param))

    def _has_changed(self, key: int) -> bool:
        grad = self._params[key][1].grad
        return grad is None or _state(grad) != self._written[key]

    def _note_move(self) -> None:
        """Record gradients again if DDP has moved them: once, in the forward pass after the first backward pass."""
        if self._may_move and self._written:
            self._may_move = False
            if all(map(self._has_moved, self._written)):
                self._note([*self._written])

    def _has_moved(self, key: int) -> bool:
        grad = self._params[key][1].grad
        return grad is not None and grad.data_ptr() != self._written[key][0]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return with_gradients(args, kwargs, partial(self._look, optimizer))

    def _scaled_step(self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_scale(scaler, optimizer)
        keys, steps = self._look(optimizer), list[Optimizer]()
        if not keys or self._votes or not has_step_hooks(optimizer):
            return step(scaler, optimizer, *args, **kwargs)
        have_hooks_called(optimizer)
        with optimizer.register_step_pre_hook(lambda optimizer, *_: steps.append(optimizer)):
            result = step(scaler, optimizer, *args, **kwargs)
        if not steps and self._hooks:  # if a gradient of this model had overflowed, nothing would have been exchanged
            self._warn(
                f"A GradScaler skips the step of {type(optimizer).__name__}, but the gradient of "
                f"{self._params[keys[0]][0]!r} was exchanged: its entries are lost. If the optimizer steps another "
                f"model, too, put both into one DistributedDataParallel, or call attach_updates."
            )
        return result

    def _unscale(self, unscale: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        self._check_scale(scaler, optimizer)
        keys = self._look(optimizer)
        unscale(scaler, optimizer)
        self._note(keys)

    def _look(self, optimizer: Optimizer) -> list[int]:
        """Warn if an optimizer's exchanged gradients have changed; return their keys."""
        own = [*map(id, parameters_of([optimizer]))]
        waiting = [key for key in own if key in self._written]
        if self._hooks:
            self._compare(optimizer, own, waiting)
        for key in waiting:
            del self._written[key]
        return waiting

    def _compare(self, optimizer: Optimizer, own: list[int], waiting: list[int]) -> None:
        self._note_move()
        thrown_away = [key for key in own if key in self._thrown_away] if self._thrown_away else []
        if local := [key for key in own if key in self._local and self._params[key][1].grad is not None]:
            self._warn_of_local(optimizer, local[0])
        elif self._votes:
            return
        elif changed := [key for key in waiting if self._has_changed(key)]:
            how = "was written before the step, as by clipping or by a hook of yours. If that changed it, the"
            self._warn_of_change(optimizer, changed[0], how)
        elif thrown_away:
            how = "was thrown away: zero_grad came, and no step before it. The"
            self._warn_of_change(optimizer, thrown_away[0], how, TAKE_TURNS)

    def _check_scale(self, scaler: Any, optimizer: Optimizer) -> None:
        """Raise ValueError if a scaler scales the loss of this model, and the exchange does not know the factor."""
        if self._votes or self._reducer.gradient_check.get_scale is not None or not scaler.is_enabled():
            return
        if any(id(param) in self._params for param in parameters_of([optimizer])):
            raise ValueError(
                "A GradScaler scales the loss, and attach got no loss_scale. Residuals would be in units of its "
                "factor, which changes. Call attach(ddp, ..., loss_scale=scaler.get_scale)."
            )

    def _warn_of_local(self, optimizer: Optimizer, key: int) -> None:
        name, _ = self._params[key]
        self._warn(
            f"{type(optimizer).__name__} steps with a gradient of {name!r} that ranks have not exchanged, so their "
            f"weights drift apart. With Lightning's manual optimization call self.manual_backward(loss) in place of "
            f"loss.backward(), and once for each step. In plain torch call the last backward pass before a step "
            f"outside of no_sync()."
        )

    def _warn_of_change(self, optimizer: Optimizer, key: int, how: str, remedy: str = "") -> None:
        name, _ = self._params[key]
        self._warn(
            f"A gradient of {name!r} that ranks exchanged for {type(optimizer).__name__} {how} "
            f"residuals do not take that back: the part that was not sent comes in later steps, and the part that was "
            f"sent is lost. Set exchange='update' of the strategy, or in plain torch call attach_updates: then each "
            f"rank may change or drop its own gradient. To shorten gradients, set clip_norm, which does so before the "
            f"exchange, in place of gradient_clip_val, fabric.clip_gradients or clip_grad_norm_.{remedy}"
        )


def _state(grad: Tensor) -> tuple[int, int]:
    """Return the address of a gradient and its number of in-place changes."""
    return grad.data_ptr(), version(grad)
