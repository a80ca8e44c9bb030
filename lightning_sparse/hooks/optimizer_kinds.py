"""Kinds of optimizers, most judged by their names: whether their updates can be exchanged, and trained well."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sparse._compat import has_step_hooks
from lightning_sparse.methods import UPDATE_DENSITY, Method
from lightning_sparse.shards import parameters_of
from lightning_sparse.trained import ABOVE_DENSE

log = logging.getLogger(__name__)
SIGNS = ("lion", "sign", "tiger", "rprop")
"""Parts of the names of optimizers whose steps have the same size for all elements: Lion, SignSGD, DAdaptLion, ..."""
DUAL_AVERAGING = ("madgrad", "ftrl", "dualaveraging", "dadaptadagrad")
"""Parts of the names of optimizers whose steps do not start from the present weights."""
LAZY = "steps only rows that have a gradient, and by their own moments"
"""The reason of SparseAdam."""
RECOMPUTES = "computes weights from the first ones and the sum of all gradients"
"""The reason of dual averaging."""
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


def is_named(optimizer: Optimizer, names: Iterable[str]) -> bool:
    """Return whether the name of an optimizer's class, or of a base of it, contains one of these names, in any case."""
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(name.lower() in kind for kind in kinds for name in names)


def scales_gradient(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's steps are linear in its gradients, as with torch's SGD."""
    return isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD)


def evaluates_other_weights(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has an `eval` that makes weights for evaluation, as schedule-free ones do."""
    return callable(getattr(optimizer, "eval", None))


def shares_steps(optimizer: Optimizer) -> bool:
    """Return whether each rank steps its part of the parameters for all ranks, and then gathers the other parts.

    The name of a class or the code of its step says so. The second is a guess, as for Jordan's Muon.
    """
    steps = (inspect.unwrap(vars(kind)["step"]) for kind in type(optimizer).__mro__ if "step" in vars(kind))
    called = {name for step in steps for name in getattr(getattr(step, "__code__", None), "co_names", ())}
    return is_zero(optimizer) or not called.isdisjoint({"all_gather", "all_gather_into_tensor"})


def is_zero(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is that of torch or of fairscale for ZeRO, judged by its name."""
    return bool({kind.__name__ for kind in type(optimizer).__mro__} & {"ZeroRedundancyOptimizer", "OSS"})


def inner_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a wrapper steps, such as one of ZeRO; the optimizer itself if there is none."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in a wrapper that calls no hooks, such as accelerate's; else the optimizer itself."""
    return optimizer if has_step_hooks(optimizer) else getattr(optimizer, "optimizer", optimizer)


def closure_called_twice_message(optimizer: Optimizer, method: Method) -> str:
    """Return the error message for an optimizer that has called its closure twice in a step."""
    instead = "Use an optimizer"
    if method.aggregator.averages:  # otherwise it does not support updates
        instead = (
            "Set exchange='update' of the strategy, or in plain torch call attach_updates, which take such optimizers "
            "but for LBFGS; or use one"
        )
    return (
        f"{type(optimizer).__name__} evaluates its closure several times a step, each with an exchange of gradients. "
        f"That does not work with {method}: each exchange sends another part of the gradient, so their results cannot "
        f"be compared. {instead} that needs one gradient a step, or train with strategy='ddp' or without attach."
    )


def signs_message(optimizer: Optimizer) -> str:
    """Return a warning of an optimizer that steps by signs and a sparse method."""
    return (
        f"{type(optimizer).__name__} takes signs, so no entry of its steps is larger than others, and a sparse method "
        f"cannot choose: a GPT with Lion ended 0.3 above dense training. Take a method that sends every element, such "
        f"as 'int4'."
    )


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


def share_parameters(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a parameter belongs to several optimizers; then their updates cannot be exchanged."""
    owned = [{*map(id, parameters_of([optimizer]))} for optimizer in optimizers]
    return sum(map(len, owned)) > len(set().union(*owned))


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
        remedy = "Let ranks exchange updates, which needed no more: exchange='update', in plain torch attach_updates"
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


def warn_at_first_steps(params: Collection[int], known: Sequence[Optimizer]) -> RemovableHandle:
    """Warn of other optimizers at their first step, if they train badly with sparse gradients; return torch's handle.

    Args:
        params: ids of the parameters whose gradients are exchanged.
        known: optimizers that have been checked; some may be added later.
    """
    seen = weakref.WeakSet[Optimizer]()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in known or optimizer in seen:
            return
        others = {*params} - {*map(id, parameters_of([*known, *seen]))}  # an optimizer may step another one
        seen.add(optimizer)
        if any(id(param) in others for param in parameters_of([optimizer])):
            warn_of_sparse_gradients([optimizer])

    return register_optimizer_step_pre_hook(look)


def warn_of_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Warn on rank 0 of optimizers whose sparse updates trained worse than dense averages of gradients."""
    if dist.get_rank() > 0:
        return
    if (signs := next((each for each in optimizers if is_named(each, SIGNS)), None)) is not None:
        log.warning(signs_message(signs))
    for kind in {type(optimizer) for optimizer in optimizers if is_named(optimizer, ABOVE_DENSE)}:
        log.warning(
            f"The loss of a GPT with {kind.__name__} was higher with sparse updates than with dense averages of "
            f"gradients. Compare losses with strategy='ddp'; or take a method that sends every element, such as 'int4'."
        )


def warn_of_density(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Warn on rank 0 of a density that is too small for the updates of optimizers such as AdamW."""
    other = next((each for each in optimizers if not scales_gradient(each)), None)
    if method.is_sparse and (method.density or 1) < UPDATE_DENSITY and other is not None and dist.get_rank() == 0:
        log.warning(
            f"density={method.density:g} is small for updates of {type(other).__name__}: at 0.001 a GPT with AdamW "
            f"needed 1.24 times the steps of dense training, and at {UPDATE_DENSITY:g} no more. Leave density out, or "
            f"give a larger one, unless your link asks for it."
        )


def warn_of_evaluation(optimizers: Sequence[Optimizer]) -> None:
    """Warn on rank 0 of optimizers whose weights for evaluation come from state that differs among ranks."""
    for optimizer in optimizers:
        if evaluates_other_weights(optimizer) and dist.get_rank() == 0:
            log.warning(
                f"{type(optimizer).__name__}.eval() makes weights of its own state, in which ranks differ if they "
                f"exchange updates: each evaluates, and saves, other weights. Exchange gradients, or train with an "
                f"optimizer that has no eval()."
            )
