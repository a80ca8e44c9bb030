"""The closure that an optimizer's step may get: a training step, in Lightning."""

from __future__ import annotations

from collections.abc import Callable
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
    closure = kwargs["closure"] if "closure" in kwargs else [*args, None][1]
    if not callable(closure):
        begin(None)
        return None
    of_torch, evaluated = type(optimizer).__module__.startswith("torch.optim"), False
    if not of_torch:
        begin(None)

    def evaluate() -> Any:
        nonlocal evaluated
        if evaluated:
            return closure()
        evaluated = True
        unless = None if of_torch else changed()
        result = closure()
        begin(unless)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs
