"""The row of a method in `METHODS`: how to make it, who published it, and its properties."""

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
    """What holds for a method, read by the common tests, `advise` and the documentation.

    Attributes:
        conserves: whether nothing is lost: Σ u over the ranks is P times the result plus Σ of the residuals.
        exact: options with which the result is the mean of the gradients; None if there are none.
        test_options: options that the common tests use, chosen for small tensors.
    """

    conserves: bool
    exact: Mapping[str, Any] | None
    test_options: Mapping[str, Any] = MappingProxyType({})


SPARSE = Traits(conserves=True, exact={"density": 1.0}, test_options={"density": 0.05})


class MethodSpec(NamedTuple):
    """How to make a method, who published it, and what holds for it."""

    make: Callable[..., Compressor]
    memory: Memory
    aggregator: Aggregator[Any]
    citation: str
    traits: Traits = SPARSE
    update_rule: UpdateRule | None = None

    @property
    def options(self) -> list[str]:
        """Names of the options of its parts, in which parts do not overlap."""
        parts: list[Any] = [part for part in (self.memory, self.aggregator, self.update_rule) if part is not None]
        return [*inspect.signature(self.make).parameters, *(field.name for part in parts for field in fields(part))]
