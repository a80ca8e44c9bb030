"""Finds out whether something needs all gradients before a step, so that updates are exchanged after backward."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_utilities.core.overrides import is_overridden

from lightning_sparse._compat import has_backward_hooks
from lightning_sparse.hooks import has_collectives
from lightning_sparse.methods import Method
from lightning_sparse.options import Overlap, ReducerOptions
from lightning_sparse.strategies.training import enabled_scaler

HOOKS = ("on_after_backward", "on_before_optimizer_step")
"""Lightning's hooks of modules and callbacks between backward and an optimizer's step."""
OF_MODULES = ("configure_gradient_clipping", "clip_gradients", "optimizer_step", "backward")
"""Further methods of a LightningModule that have access to gradients before the step."""


def overlap_blocker(
    trainer: Any, module: Any, namespace: str, method: Method, overlap: Overlap, options: ReducerOptions
) -> str:
    """Return why an exchange starts after backward; "" if it may start during backward.

    Args:
        trainer: Lightning's Trainer.
        module: the LightningModule.
        namespace: Lightning's name.
        method: the method of the reducer.
        overlap: the strategy's option.
        options: the options of the strategy's reducer.
    """
    lightning, strategy = import_module(namespace), trainer.strategy
    blockers = [
        (overlap == "none", "overlap='none'"),
        (method.local_steps > 1, "there are several steps before"),
        (method.delayed, "overlap='next_step'"),
        (not module.automatic_optimization, "optimization is manual"),
        (enabled_scaler(strategy.precision_plugin) is not None, "the gradient scaler looks at all gradients"),
        (trainer.gradient_clip_val, "gradient_clip_val needs all gradients"),
        (options.clip_norm is not None, "clip_norm needs all gradients"),
        (options.on_nonfinite == "skip", "on_nonfinite='skip' needs all gradients"),
        (strategy.root_device.type == "cuda" and has_collectives(module), "backward has collectives of its own"),
    ]
    owners: list[tuple[Any, Any, tuple[str, ...]]] = [(module, lightning.LightningModule, (*HOOKS, *OF_MODULES))]
    owners += [(callback, lightning.Callback, HOOKS) for callback in trainer.callbacks]
    blockers += [
        (overrides(owner, base, name), f"{type(owner).__name__}.{name} comes first")
        for owner, base, names in owners
        for name in names
    ]
    blockers.append((any(map(has_backward_hooks, module.modules())), "a module has backward hooks"))
    for part in (strategy.precision_plugin, *strategy.optimizers):
        known = type(part).__module__.startswith(("torch.optim.", "pytorch_lightning.", "lightning."))
        blockers.append((not known, f"{type(part).__name__} may look at all gradients"))
    return next((text for applies, text in blockers if applies), "")


def overrides(owner: Any, base: Any, name: str) -> bool:
    """Return whether an object has its own method in place of its base's."""
    try:
        return bool(is_overridden(name, owner, base))
    except AttributeError:  # a callable object, such as one that LambdaCallback got, has no code
        return True
