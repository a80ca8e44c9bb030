"""The row of a method in `METHODS`: its parts, its citation, and its properties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_sparse.aggregators import Aggregator
from lightning_sparse.compressors import Compressor
from lightning_sparse.memory import Memory
from lightning_sparse.update_rule import UpdateRule


class Traits(NamedTuple):
    """Properties of a method for the common tests, `advise` and the documentation.

    Attributes:
        conserves: whether no entry is lost: Σ u over the ranks equals P times the result plus Σ of the residuals.
        exact: options for which the result is the mean of the gradients; None if no options achieve this.
        test_options: options for the common tests, suitable for small tensors.
    """

    conserves: bool
    exact: Mapping[str, Any] | None
    test_options: Mapping[str, Any] = MappingProxyType({})


SPARSE = Traits(conserves=True, exact={"density": 1.0}, test_options={"density": 0.05})


class MethodSpec(NamedTuple):
    """A row of `METHODS`: the method's parts, its citation, and its properties."""

    make: Callable[..., Compressor]
    memory: Memory
    aggregator: Aggregator[Any]
    citation: str
    traits: Traits = SPARSE
    update_rule: UpdateRule | None = None

    @property
    def options(self) -> list[str]:
        """Names of the options of its parts. No two parts have an option of the same name."""
        parts: list[Any] = [part for part in (self.memory, self.aggregator, self.update_rule) if part is not None]
        return [*inspect.signature(self.make).parameters, *(field.name for part in parts for field in fields(part))]
