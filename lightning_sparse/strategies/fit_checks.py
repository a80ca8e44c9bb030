"""What the strategy checks when fit starts: optimizers, gradient clipping and the placement of ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.hooks.update_exchange import evaluates_other_weights
from lightning_sparse.memory import Momentum
from lightning_sparse.methods import METHODS, Method, option_hint

log = logging.getLogger(__name__)

KIN = {
    "divides by past gradients": ("ada", "rmsprop", "lamb"),
    "orthogonalises its steps": ("muon",),
}
"""What optimizers do that want updates, and what is in their names: AdamW, Adagrad, FusedAdam, AdamW8bit, ..."""


def why_updates(optimizer: Optimizer) -> str | None:
    """Return what an optimizer does that makes updates better to exchange than gradients; None for others."""
    if evaluates_other_weights(optimizer):
        return None
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    for does, kin in KIN.items():
        if any(each in name for name in names for each in kin):
            return does
    return None


def method_options(strategy: type, method: str | Method, options: Mapping[str, Any]) -> list[str]:
    """Return the names of those options that a method, given by name, has itself.

    Lightning's DDPStrategy and DistributedDataParallel look at theirs when the model is wrapped, or never: where
    updates are exchanged it is not wrapped.

    Raises:
        TypeError: an option that neither the method nor they have.
    """
    makers = [DistributedDataParallel, *(cls for cls in strategy.__mro__ if "__init__" in vars(cls))]
    known = {name for cls in makers for name in inspect.signature(cls.__init__).parameters}  # type: ignore[misc]
    own = METHODS[method].options if isinstance(method, str) and method in METHODS else []
    for option in options:
        if option not in known and option not in own:
            by_name = isinstance(method, str)
            nor = f", nor has method {method!r}" if by_name else ", and options of a Method are set in its parts"
            nor += f", which has {', '.join(own)}" if own else ""
            raise TypeError(f"{strategy.__name__} has no option {option!r}{nor}.{option_hint(option, [*known, *own])}")
    return [option for option in options if option in own]


def check_optimizers(optimizers: Sequence[Optimizer], method: Method) -> None:
    """Raise ValueError for an optimizer that evaluates the gradient several times a step."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            f"LBFGS does not work with {method}: it evaluates the gradient several times a step and compares the "
            f"results, but each exchange sends another part of the gradient. Use an optimizer that needs one gradient "
            f"a step, such as torch.optim.SGD, or train with strategy='ddp'."
        )


def several_evaluations(optimizer: Optimizer, method: Method) -> str:
    """Return the error message for an optimizer that has evaluated its closure twice in a step."""
    instead = "Use an optimizer"
    if method.aggregator.averages:  # else it cannot exchange updates
        instead = "Set exchange='update' of the strategy, which takes such optimizers but for LBFGS; or use one"
    return (
        f"{type(optimizer).__name__} evaluates its closure several times a step, each with an exchange of gradients. "
        f"That does not work with {method}: each exchange sends another part of the gradient, so their results cannot "
        f"be compared. {instead} that needs one gradient a step, or train with strategy='ddp'."
    )


def warn_of_adaptive_optimizers(optimizers: Sequence[Optimizer], *, chosen: bool) -> None:
    """Warn if an optimizer divides by the size of past gradients, which are sparse here, or may do so.

    Args:
        optimizers: of all that is trained.
        chosen: whether the user has chosen to exchange gradients.
    """
    adaptive = next(filter(why_updates, optimizers), None)
    unknown = next((x for x in optimizers if not isinstance(x, torch.optim.SGD | torch.optim.ASGD)), None)
    if adaptive is not None:
        log.warning(
            f"{type(adaptive).__name__} takes too large steps with gradients that arrive seldom: with AdamW a GPT "
            f"needed 4 to 6 times as many steps with them as with dense ones. Let ranks exchange updates, "
            f"exchange='update', which needed no more; see docs/optimizers.md."
        )
    elif unknown is not None and not chosen:
        log.warning(
            f"{type(unknown).__name__} is not known, so ranks exchange gradients. If it divides by past gradients, it "
            f"wants updates: set exchange='update'. If it takes signs, as Lion does, it wants every element: take "
            f"'int4'. See docs/optimizers.md."
        )


def warn_of_two_momenta(optimizers: Sequence[Optimizer], method: Method) -> None:
    """Warn if a method keeps a momentum, and an optimizer another one of that."""
    with_momentum = [
        x for x in optimizers if any(each.get("momentum") or each.get("betas", (0,))[0] for each in x.param_groups)
    ]
    if with_momentum and isinstance(method.memory, Momentum):
        log.warning(
            f"{type(with_momentum[0]).__name__} has a momentum, and {method} keeps another one: a GPT ended 0.5 above "
            f"dense training beside AdamW. Give the optimizer none, as SGD with momentum=0; see docs/comparison.md."
        )


def check_placement(nodes: Sequence[int], ranks_per_node: int) -> None:
    """Raise ValueError unless each `ranks_per_node` consecutive ranks are on one node.

    Args:
        nodes: the node of each rank.
        ranks_per_node: number of ranks that add up their gradients densely.
    """
    for first in range(0, len(nodes), ranks_per_node):
        together = nodes[first : first + ranks_per_node]
        if len(set(together)) > 1:
            placed = ", ".join(f"rank {first + place} on node {node}" for place, node in enumerate(together))
            raise ValueError(
                f"TwoLevel(ranks_per_node={ranks_per_node}): the ranks {first} to {first + len(together) - 1} are to "
                f"add up their gradients inside one node, but they are on several ({placed}). Start the ranks node by "
                f"node, as torchrun does, and SLURM with --distribution=block; or leave two_level out."
            )
