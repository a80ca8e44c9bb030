"""Mistakes around `attach_updates` by which ranks would drift apart unseen: each is an error that names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse._compat import has_step_hooks, in_ddp_forward


def check_optimizers(given: Any) -> Sequence[Optimizer]:
    """Return the optimizers that a user gave, one or several; TypeError if they are none."""
    optimizers = [given] if isinstance(given, Optimizer) else given
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(f"attach_updates(optimizer={type(given).__name__}(...)): give an optimizer, or a list of them.")
    for each in optimizers:
        if not has_step_hooks(each):  # such as accelerate's AcceleratedOptimizer
            raise TypeError(
                f"attach_updates got a {type(each).__name__}, which only wraps an optimizer. Give the optimizer that "
                f"is in it, often {type(each).__name__}.optimizer."
            )
    return optimizers


class OtherSteps:
    """Raises where an optimizer whose updates are not exchanged has stepped a parameter that others exchange.

    A wrapper that steps by way of one of `optimizers`, or is called by one, is no such optimizer.

    Args:
        optimizers: whose updates are exchanged.
        exchanged: returns whether a parameter is among those exchanged.
    """

    def __init__(self, optimizers: Sequence[Optimizer], exchanged: Callable[[Tensor], bool]) -> None:
        self._own, self._exchanged = optimizers, exchanged
        self._steps, self._inside = 0, False  # steps of `optimizers` so far, and whether one is under way
        self._steps_before: dict[int, int] = {}  # what it was when a step of another optimizer began
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._own:
            self._inside, self._steps = True, self._steps + 1
        else:
            self._steps_before[id(optimizer)] = self._steps

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._own:
            self._inside = False
            return
        unchanged = self._steps_before.pop(id(optimizer), None) == self._steps and not self._inside
        params = (param for group in optimizer.param_groups for param in group["params"])
        if unchanged and any(map(self._exchanged, params)):
            raise RuntimeError(
                f"A {type(optimizer).__name__} that attach_updates did not get has stepped parameters whose updates "
                f"are exchanged for other optimizers: ranks would drift apart. Call attach_updates again, with all "
                f"optimizers that step the model now; or give the parameters to an attached one, by add_param_group. "
                f"In Lightning return it from configure_optimizers."
            )


def refuse_ddp(model: nn.Module) -> None:
    """Have the first forward pass of a model raise if DistributedDataParallel is around it."""
    name = type(model).__name__  # the hook must not keep the model alive

    def look(*_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        hook.remove()
        if in_ddp_forward():
            raise RuntimeError(
                f"DistributedDataParallel is around the {name} that attach_updates got: all gradients "
                f"would be sent as well, and updates be rescaled as if they had not been averaged. Train with the "
                f"model itself; or call attach with the wrapped model, to exchange gradients."
            )

    hook = model.register_forward_pre_hook(look)


def abandon(close: Callable[[], None], optimizers: Sequence[Optimizer]) -> None:
    """End the exchange of optimizers' updates, as the model is gone. Further steps of theirs are refused."""
    close()

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        raise RuntimeError(
            f"{type(optimizer).__name__} steps, but the module that attach_updates got is gone, so its updates are "
            f"exchanged no more. Keep a reference to it as long as you train: modules = nn.ModuleList([first, "
            f"second]); attach_updates(modules, ...)."
        )

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(refuse)
