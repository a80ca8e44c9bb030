"""One function for each operation, whatever its tensors are: Triton on CUDA, C on the CPU, else plain torch.

    @operation
    def double(x: Tensor) -> Tensor:    # the reference: plain torch, as simple as it can be
        return 2 * x

    @double.by("triton")
    def _double_by_triton(x: Tensor) -> Tensor: ...

    @double.by("native", when=lambda x: x.is_contiguous())
    def _double_in_c(x: Tensor) -> Tensor: ...

    double(x)                           # the implementation for x
    double.reference(x)                 # plain torch, for x on any device

Callers do not ask which backend works on their tensors. An operation without an implementation for that backend, or
whose implementation does not take the arguments, runs its reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from torch import Tensor

from lightning_sparse.kernels.launch import uses_triton
from lightning_sparse.kernels.native import uses_native

P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["triton", "native"]


def backend_of(x: Tensor) -> Backend | None:
    """Return which kernels work on `x`: Triton's, those in C, or None."""
    if uses_triton(x):
        return "triton"
    return "native" if uses_native(x) else None


class Operation(Generic[P, R]):
    """A function with one implementation for each backend, which the first tensor among the arguments chooses.

    Attributes:
        reference: the implementation in plain torch, which takes all devices.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._by: dict[str, tuple[Callable[P, R], Callable[..., bool] | None]] = {}

    def by(
        self, *backends: Backend, when: Callable[..., bool] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate the implementation for some backends.

        Args:
            backends: "triton", or "native", which is C.
            when: whether the implementation takes these arguments; None takes all.
        """

        def add(implementation: Callable[P, R]) -> Callable[P, R]:
            self._by |= dict.fromkeys(backends, (implementation, when))
            return implementation

        return add

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x = _first_tensor(args)
        backend = None if x is None else backend_of(x)
        implementation, when = self._by.get(backend or "", (self.reference, None))
        return (implementation if when is None or when(*args, **kwargs) else self.reference)(*args, **kwargs)


operation = Operation
"""Decorator of a reference."""


def _first_tensor(args: Any) -> Tensor | None:
    for x in args:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, list | tuple) and (found := _first_tensor(x)) is not None:
            return found
    return None
