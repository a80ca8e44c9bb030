"""Wraps a method of every `GradScaler` in this process, because a user may make a scaler anywhere.

wrap("step", around)    # scaler.step(optimizer) now calls around(step, scaler, optimizer)
unwrap("step", around)  # without wrappers the method is torch's again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter

from lightning_sparse.hooks.misuse import tensors_in

Around = Callable[..., Any]
"""A wrapper: it gets the wrapped function, the scaler and further arguments, and returns the function's result."""

_of_torch: dict[str, Callable[..., Any]] = {name: getattr(GradScaler, name) for name in ("scale", "step", "unscale_")}
_around: dict[str, list[Around]] = {name: [] for name in _of_torch}


def wrap(name: str, around: Around) -> None:
    """Call `around` in place of a method of all scalers. Further calls with the same wrapper have no effect.

    Args:
        name: "scale", "step" or "unscale_".
        around: see `Around`.
    """
    if around not in _around[name]:
        _around[name].append(around)

    def method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        call = _of_torch[name]
        for each in tuple(_around[name]):
            call = partial(each, call)
        return call(self, *args, **kwargs)

    setattr(GradScaler, name, method)


def may_depend(outputs: Any, params: Mapping[str, Tensor]) -> bool:
    """Return whether one of these losses may depend on one of these parameters.

    False is certain: the graphs contain only other parameters.

    The graph may be hidden: by reentrant checkpointing, or if a caller computes gradients of a detached output first.
    """
    ids, seen, nodes = {*map(id, params.values())}, set[Any](), [x.grad_fn for x in tensors_in(outputs)]
    leaves: list[Any] = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        nodes += [each for each, _ in node.next_functions]
    return not leaves or any(id(each) in ids or not isinstance(each, Parameter) for each in leaves)


def unwrap(name: str, around: Around) -> None:
    """Undo `wrap`, if it was called."""
    if around not in _around[name]:
        return
    _around[name].remove(around)
    if not _around[name]:
        setattr(GradScaler, name, _of_torch[name])
