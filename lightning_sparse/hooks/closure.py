"""Replaces the closure that an optimizer's step may get. In Lightning it is the training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse._compat import initializes_state, step_depth


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return whether a step is part of another one, as of a base class, or only creates the optimizer's state.

    Call it in a hook of the step.
    """
    return step_depth(optimizer) > 1 or initializes_state()


def begin_step(
    optimizer: Optimizer,
    args: Any,
    kwargs: Any,
    begin: Callable[[Tensor | None], None],
    changed: Callable[[], Tensor | None],
) -> Any:
    """Begin a step; if it has a closure, begin it after the closure has been evaluated.

    A closure may change weights, in the same way on all ranks. Such a change is not an update of the optimizer.
    Optimizers of torch change no weights before they evaluate the closure. Other optimizers may, as SAM does. Their
    step then begins before the evaluation.

    Args:
        args: positional arguments of the step: the optimizer, and perhaps the closure.
        kwargs: keyword arguments of the step, perhaps with the closure.
        begin: takes the present weights as the agreed ones, unless the flag that it gets is set.
        changed: returns a flag that says whether weights have changed since `begin`.

    Returns:
        The step's new arguments, as a step pre-hook of torch returns them. None leaves them unchanged.
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


def with_gradients(args: Any, kwargs: Any, check: Callable[[], object]) -> Any:
    """Call `check` when the gradients of a step are complete: now, or after each evaluation of its closure.

    Args:
        args, kwargs: see `begin_step`.
        check: may change the gradients.

    Returns:
        As of `begin_step`.
    """

    def evaluate(closure: Callable[[], Any]) -> Any:
        result = closure()
        check()
        return result

    replaced = replace_closure(args, kwargs, evaluate)
    if replaced is None:
        check()
    return replaced


def replace_closure(args: Any, kwargs: Any, evaluate: Callable[[Callable[[], Any]], Any]) -> Any:
    """Return a step's arguments with `evaluate` called in place of its closure; None if it has no closure.

    Args:
        args: positional arguments of the step: the optimizer, and perhaps the closure.
        kwargs: keyword arguments of the step, perhaps with the closure.
        evaluate: gets the closure, and returns the result that the step gets.
    """
    closure = kwargs["closure"] if "closure" in kwargs else [*args, None][1]
    if not callable(closure):
        return None

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return evaluate(partial(closure, *args, **kwargs))

    if "closure" in kwargs:
        return args, {**kwargs, "closure": replaced}
    return (args[0], replaced, *args[2:]), kwargs
