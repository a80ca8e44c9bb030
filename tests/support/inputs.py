"""Inputs for tests of several compressors, and a recorder of calls."""

from types import ModuleType
from typing import Any

import pytest
import torch

HOSTILE = {
    "normal": lambda g: torch.randn(1000, generator=g),
    "heavy": lambda g: torch.randn(1000, generator=g) / torch.rand(1000, generator=g).clamp(min=1e-4),
    "equal": lambda g: torch.full((1000,), -2.5),
    "zeros": lambda g: torch.zeros(1000),
    "one": lambda g: torch.nn.functional.one_hot(torch.tensor(500), 1000).float() * -3,
}
"""Functions from a generator to 1000 fp32 values."""


def calls_of(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list to which each further call of a module's function appends its arguments."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(module, name)

    def watched(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(module, name, watched)
    return calls
