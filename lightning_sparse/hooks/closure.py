"""The closure that an optimizer's step may get: a training step, in Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def begin_step(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
    begin: Callable[[Tensor | None], None],
    changed: Callable[[], Tensor | None],
) -> Any:
    """Begin a step, or begin it once its closure has been evaluated.

    What a closure changes of the weights, on all ranks alike, is no update of the optimizer's. Optimizers of torch
    change nothing before they evaluate it. Others may, as SAM does, and then their step has begun before.

    Args:
        optimizer: whose step it is.
        args: of the step: the optimizer, and then perhaps the closure.
        kwargs: of the step, perhaps with the closure.
        begin: takes the present weights for those of all ranks, unless the flag that it gets is set.
        changed: returns a flag: whether weights have changed since.

    Returns:
        The step's new arguments, as a step pre-hook of torch returns them; None leaves them as they are.
    """
    of_torch, evaluated = type(optimizer).__module__.startswith("torch.optim"), False

    def evaluate(closure: Callable[[], Any]) -> Any:
        nonlocal evaluated
        if evaluated:
            return closure()
        evaluated = True
        unless = None if of_torch else changed()
        result = closure()
        begin(unless)
        return result

    replaced = replace_closure(args, kwargs, evaluate)
    if replaced is None or not of_torch:
        begin(None)
    return replaced


def replace_closure(args: Any, kwargs: Any, evaluate: Callable[[Callable[[], Any]], Any]) -> Any:
    """Return a step's arguments with `evaluate` called in place of its closure; None if it has no closure.

    Args:
        args: of the step: the optimizer, and then perhaps the closure.
        kwargs: of the step, perhaps with the closure.
        evaluate: gets the closure, and returns what the step gets of it.
    """
    closure = kwargs["closure"] if "closure" in kwargs else [*args, None][1]
    if not callable(closure):
        return None
    replaced = partial(evaluate, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": replaced}
    return (args[0], replaced, *args[2:]), kwargs
