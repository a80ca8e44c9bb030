"""Finds out whether something needs all gradients before a step, so that updates are exchanged after backward."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden

from lightning_sparse._compat import has_backward_hooks, hooks_before_steps
from lightning_sparse.hooks import has_collectives
from lightning_sparse.methods import Method

if TYPE_CHECKING:
    from lightning_sparse.strategies.base import SparseStrategy

HOOKS = ("on_after_backward", "on_before_optimizer_step")
"""Lightning's hooks of modules and callbacks between backward and an optimizer's step."""
OF_MODULES = ("configure_gradient_clipping", "clip_gradients", "optimizer_step", "backward")
"""Further methods of a LightningModule that have access to gradients before the step."""
OF_STRATEGIES = ("backward", "post_backward", "optimizer_step")
"""Methods of a strategy that have access to gradients before the step."""


def overlap_blocker(strategy: SparseStrategy, method: Method) -> str:
    """Return why an exchange by a method starts after backward; "" if it may start during backward."""
    module, options = strategy.lightning_module, strategy._options.reducer
    trainer = module.trainer
    blockers = [
        (strategy._options.overlap == "none", "overlap='none'"),
        (method.local_steps > 1, "there are several steps before"),
        (method.delayed, "overlap='next_step'"),
        (method.aggregator.ranks_per_link > 1, "the ranks of a node average gradients first"),
        (not module.automatic_optimization, "optimization is manual"),
        (strategy.scaler is not None, "the gradient scaler looks at all gradients"),
        (trainer.gradient_clip_val, "gradient_clip_val needs all gradients"),
        (options.clip_norm is not None, "clip_norm needs all gradients"),
        (options.on_nonfinite == "skip", "on_nonfinite='skip' needs all gradients"),
        (strategy.root_device.type == "cuda" and has_collectives(module), "backward has collectives of its own"),
    ]
    blockers += [(True, f"{name} comes first") for name in gradient_hooks(strategy, OF_MODULES)]
    blockers.append((any(map(has_backward_hooks, module.modules())), "a module has backward hooks"))
    for part in (strategy.precision_plugin, *strategy.optimizers):
        known = type(part).__module__.startswith(("torch.optim.", "pytorch_lightning.", "lightning."))
        blockers.append((not known, f"{type(part).__name__} may look at all gradients"))
    own = [(f"{type(strategy).__name__}.{name}", getattr(type(strategy), name)) for name in OF_STRATEGIES]
    # Schedules replace an optimizer's `step`, too.
    own += [(f"{type(each).__name__}.step", vars(each)["step"]) for each in strategy.optimizers if "step" in vars(each)]
    own += [("a hook before the step", hook) for each in strategy.optimizers for hook in hooks_before_steps(each)]
    blockers += [(_is_foreign(function), f"{name} is a function of yours") for name, function in own]
    return next((text for applies, text in blockers if applies), "")


def gradient_hooks(strategy: Any, of_module: Sequence[str]) -> list[str]:
    """Return the methods of the module and of callbacks that Lightning calls between backward and a step.

    Args:
        of_module: methods of a LightningModule to look for, besides `HOOKS`.
    """
    lightning, module = import_module(strategy._namespace), strategy.lightning_module
    owners = [(module, lightning.LightningModule, (*HOOKS, *of_module))]
    owners += [(callback, lightning.Callback, HOOKS) for callback in module.trainer.callbacks]
    each = ((owner, base, name) for owner, base, names in owners for name in names)
    return [f"{type(owner).__name__}.{name}" for owner, base, name in each if _overrides(owner, base, name)]


def _is_foreign(function: Any) -> bool:
    """Return whether a function, or one that it wraps, is from another package than torch, Lightning and this one."""
    while function is not None:
        function = getattr(function, "__func__", function)
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if not module.startswith(("torch.", "pytorch_lightning.", "lightning.", "lightning_sparse.")):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _overrides(owner: Any, base: Any, name: str) -> bool:
    """Return whether an object has its own method in place of its base's."""
    try:
        return bool(is_overridden(name, owner, base))
    except AttributeError:  # a callable object, such as one that LambdaCallback got, has no code
        return True
