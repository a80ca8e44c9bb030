"""Closures that are given to an optimizer's step: training steps, in Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def then(args: Any, kwargs: Any, call: Callable[[], None]) -> Any:
    """Return the arguments of an optimizer's step with a closure that makes a call when it has first been evaluated.

    Args:
        args: the optimizer, and then perhaps the closure.
        kwargs: perhaps with the closure.
        call: what to call; not where there is no closure.

    Returns:
        The new arguments, as a step pre-hook of torch returns them; None leaves them as they are.
    """
    closure = kwargs["closure"] if "closure" in kwargs else [*args, None][1]
    if not callable(closure):
        return None
    calls = [call]

    def evaluate() -> Any:
        result = closure()
        if calls:
            calls.pop()()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs
