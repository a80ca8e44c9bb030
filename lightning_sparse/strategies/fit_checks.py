"""Checks and warnings at the start of a fit: optimizers, momenta and the placement of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse._compat import has_step_hooks
from lightning_sparse.hooks.optimizer_kinds import (
    DUAL_AVERAGING,
    LAZY,
    RECOMPUTES,
    SIGNS,
    evaluates_other_weights,
    inner_of,
    is_named,
    scales_gradient,
    shares_steps,
    signs_message,
)
from lightning_sparse.memory import Momentum
from lightning_sparse.methods import Method
from lightning_sparse.momentum import moments_of
from lightning_sparse.options import listed
from lightning_sparse.shards import is_sharded, parameters_of
from lightning_sparse.trained import ABOVE_DENSE, WITH_UPDATES

log = logging.getLogger(__name__)


SHARED = "shares its steps among ranks"
"""The reason of optimizers that step each parameter on one rank, for all ranks."""
UNHOOKED = "calls no hooks of torch"
"""The reason of objects that only resemble an optimizer, and of subclasses that do not call torch's constructor."""
REMEDIES = {
    SHARED: "use an optimizer for one rank",
    UNHOOKED: "let its constructor call torch's",
    RECOMPUTES: "use another one, such as AdamW",
    LAZY: "use AdamW, with sparse=False of the embedding",
}


def reason_against_updates(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimizer's updates cannot be exchanged; None if there is none."""
    if not has_step_hooks(optimizer):
        return UNHOOKED
    if shares_steps(optimizer):
        return SHARED
    if isinstance(optimizer, torch.optim.SparseAdam):
        return LAZY
    return RECOMPUTES if is_named(optimizer, DUAL_AVERAGING) else None


def reason_for_gradients(optimizer: Optimizer) -> str | None:
    """Return the reason to exchange gradients with this optimizer; None if updates are better.

    Updates are better for every optimizer that does not merely scale the gradient. So only the exceptions are listed.
    """
    if reason := reason_against_updates(optimizer):
        return reason
    if evaluates_other_weights(optimizer):
        return "evaluates other weights than it trains"
    if scales_gradient(optimizer):
        return "scales the gradient"
    if is_named(optimizer, SIGNS):
        return "takes signs"
    return None


def trains_with_updates(optimizer: Optimizer) -> bool:
    """Return whether exchanged updates of this kind of optimizer trained as well as dense averages of gradients."""
    if reason_for_gradients(optimizer) or is_named(optimizer, ABOVE_DENSE):
        return False
    return moments_of(optimizer) is not None or is_named(optimizer, WITH_UPDATES)


def share_parameters(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a parameter belongs to several optimizers; then their updates cannot be exchanged."""
    owned = [{*map(id, parameters_of([optimizer]))} for optimizer in optimizers]
    return sum(map(len, owned)) > len(set().union(*owned))


def check_optimizers(optimizers: Sequence[Optimizer], method: Method) -> None:
    """Raise ValueError for an optimizer that evaluates the gradient several times per step."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            f"LBFGS does not work with {method}: it evaluates the gradient several times a step and compares the "
            f"results, but each exchange sends another part of the gradient. Use an optimizer that needs one gradient "
            f"a step, such as torch.optim.SGD, or train with strategy='ddp'."
        )


WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Classes whose models average or shard their parameters themselves."""


def check_not_wrapped(model: torch.nn.Module, but: str = "") -> None:
    """Raise TypeError for a model that another library for parallel training has wrapped or sharded.

    Args:
        but: "FSDPModule" if FSDP2 may shard the model.
    """
    for name, module in model.named_modules():
        if found := (WRAPPERS - {but}).intersection(kind.__name__ for kind in type(module).__mro__):
            raise TypeError(
                f"fabric.setup got a {type(model).__name__} with a {found.pop()} ({name or 'the model itself'}), which "
                f"averages or shards parameters itself. Give the model without it; or, to shard it by FSDP2, train "
                f"with strategy='topk_hsdp'."
            )
    for name, param in model.named_parameters():
        if not but and is_sharded(param):
            raise TypeError(
                f"fabric.setup got a {type(model).__name__} with {name!r} as a {type(param).__name__}, which is "
                f"sharded. Train sharded models with strategy='topk_hsdp'."
            )


def warn_of_sparse_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Warn if sparse gradients are exchanged for an optimizer that trains badly with them."""
    adaptive = next((each for each in optimizers if reason_for_gradients(each) is None), None)
    barred = (each for each in optimizers if reason_against_updates(each) and not scales_gradient(inner_of(each)))
    signs = next((each for each in optimizers if is_named(each, SIGNS)), None)
    evaluating = next(filter(evaluates_other_weights, optimizers), None)
    if (other := next(barred, None)) is not None:
        inner, reason = inner_of(other), reason_against_updates(other) or ""
        remedy = REMEDIES[reason] if inner is other else f"use {type(inner).__name__} itself"
        log.warning(
            f"{type(other).__name__} {reason}, so ranks exchange gradients. It takes too large steps with gradients "
            f"that arrive seldom. Take a method that sends every element, such as 'int4'; or {remedy}, and ranks "
            f"exchange updates."
        )
    elif adaptive is not None:
        remedy = "Let ranks exchange updates, exchange='update', which needed no more"
        if share_parameters(optimizers):
            remedy = "Take a method that sends every element, such as 'int4', as optimizers share parameters here"
        log.warning(
            f"{type(adaptive).__name__} takes too large steps with gradients that arrive seldom: with AdamW a GPT "
            f"needed 3.5 to 6 times as many steps with them as with dense ones. {remedy}."
        )
    elif signs is not None:
        log.warning(signs_message(signs))
    elif evaluating is not None:
        log.warning(
            f"{type(evaluating).__name__} evaluates other weights than it trains, so ranks exchange gradients. If it "
            f"divides by past gradients, sparse ones make its steps too large: take a method that sends every element, "
            f"such as 'int4'."
        )


def warn_of_two_momenta(optimizers: Sequence[Optimizer], method: Method) -> None:
    """Warn if the method and an optimizer both keep a momentum."""
    with_momentum = [
        x for x in optimizers if any(each.get("momentum") or each.get("betas", (0,))[0] for each in x.param_groups)
    ]
    if with_momentum and isinstance(method.memory, Momentum):
        log.warning(
            f"{type(with_momentum[0]).__name__} has a momentum, and {method} keeps another one: a GPT ended 0.5 above "
            f"dense training beside AdamW. Give the optimizer none, as SGD with momentum=0."
        )


def warn_of_unstepped(params: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Warn if optimizers step some parameters with sparse gradients, but not the others. Call it after a step.

    Args:
        params: the parameters whose gradients are exchanged, by name.
        optimizers: their optimizers. If these step copies of the parameters, there is no warning.
    """
    stepped = {*map(id, parameters_of(optimizers))}
    trained = {name: param for name, param in params.items() if param.requires_grad and param.grad is not None}
    alone = [repr(name) for name, param in trained.items() if id(param) not in stepped]
    if 0 < len(alone) < len(params):
        log.warning(
            f"{listed(alone)} require gradients but are in no optimizer: their gradients take the place of others "
            f"among the sent entries, so training is slower. Freeze them by requires_grad_(False) before fit or "
            f"fabric.setup; or give them to an optimizer."
        )


def check_placement(nodes: Sequence[int], ranks_per_node: int) -> None:
    """Raise ValueError unless each `ranks_per_node` consecutive ranks are on one node.

    Args:
        nodes: the node of each rank.
        ranks_per_node: number of consecutive ranks that add up their gradients densely.
    """
    for first in range(0, len(nodes), ranks_per_node):
        together = nodes[first : first + ranks_per_node]
        if len(set(together)) > 1:
            placed = ", ".join(f"rank {first + place} on node {node}" for place, node in enumerate(together))
            raise ValueError(
                f"TwoLevel(ranks_per_node={ranks_per_node}): the ranks {first} to {first + len(together) - 1} are to "
                f"add up their gradients inside one node, but they are on several ({placed}). Start the ranks node by "
                f"node, as torchrun does, and SLURM with --distribution=block; or leave hierarchical out."
            )
