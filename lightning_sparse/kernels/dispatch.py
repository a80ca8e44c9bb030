"""One function for each operation chooses its implementation: Triton on CUDA, C on the CPU, else plain torch.

    @operation
    def double(x: Tensor) -> Tensor:    # the reference: the simplest plain torch
        return 2 * x

    @double.by("triton")
    def _double_by_triton(x: Tensor) -> Tensor: ...

    @double.by("native", when=lambda x: x.is_contiguous())
    def _double_in_c(x: Tensor) -> Tensor: ...

    double(x)                           # the implementation for x's backend
    double.reference(x)                 # plain torch, for x on any device

Callers need not know the backend of their tensors. If an operation has no implementation for that backend, or the
implementation does not support the arguments, the reference runs.
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
    """Return the backend of the kernels for `x`: "triton", "native" (C), or None."""
    if uses_triton(x):
        return "triton"
    return "native" if uses_native(x) else None


class Operation(Generic[P, R]):
    """A function with one implementation for each backend; the first tensor among the arguments decides the backend.

    Attributes:
        reference: the implementation in plain torch, for all devices.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._by: dict[str, tuple[Callable[P, R], Callable[..., bool] | None]] = {}

    def by(
        self, *backends: Backend, when: Callable[..., bool] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated implementation for some backends.

        Args:
            backends: "triton", or "native", which is C.
            when: returns whether the implementation supports the arguments; None supports all.
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
"""Decorator that makes an operation of its reference."""


def _first_tensor(args: Any) -> Tensor | None:
    for x in args:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, list | tuple) and (found := _first_tensor(x)) is not None:
            return found
    return None
