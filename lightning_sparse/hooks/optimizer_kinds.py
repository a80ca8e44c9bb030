"""Kinds of optimizers, most judged by their names: whether their updates can be exchanged, and trained well."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_sparse._compat import has_step_hooks
from lightning_sparse.methods import UPDATE_DENSITY, Method
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
