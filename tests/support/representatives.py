"""Representative methods for tests with Lightning, in which each method costs seconds.

Lightning, DDP and checkpoints depend only on a method's kind: how its ranks communicate, and the types of its payload
and of its memory. The first row of `METHODS` of each kind represents it. `gaussiank` differs from `topk` only in its
selection. A row of a new kind is added automatically. Every method is tested in tests/test_methods.py, test_random.py
and test_reducer.py, which need no processes.

`topk` is tested in every form of training, and the other kinds take turns. So every form is tested with `topk` and with
another kind.
"""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

from lightning_sparse import METHODS
from lightning_sparse.compressors import Sparsifier
from lightning_sparse.methods import MethodSpec


def kind(spec: MethodSpec) -> tuple[type, type, type]:
    """Return the types of a method's aggregator, payload and memory."""
    compressor = spec.make()
    payload = Sparsifier if isinstance(compressor, Sparsifier) else type(compressor)
    return type(spec.aggregator), payload, type(spec.memory)


GRADIENTS = {name: spec for name, spec in METHODS.items() if spec.update_rule is None}
"""Rows that exchange gradients. The other rows are tested in tests/integration/test_update_exchange.py."""
REPRESENTATIVES = list({kind(spec): name for name, spec in reversed(GRADIENTS.items())}.values())[::-1]
OTHERS = [name for name in REPRESENTATIVES if name != "topk"]


DISTINCT = list(
    {(spec.make, repr(spec.memory), repr(spec.aggregator)): name for name, spec in reversed(METHODS.items())}.values()
)[::-1]
"""The first row of each combination of parts. A Reducer does not depend on the update rule."""


def in_turn(cases: Iterable[Any], methods: Iterable[str] = OTHERS) -> dict[Any, str]:
    """Return the method that accompanies `topk` in each case."""
    return dict(zip(cases, cycle(methods), strict=False))


def small(name: str) -> dict[str, Any]:
    """Return a method's test options for small tensors, without the density, which tests choose."""
    return {key: value for key, value in METHODS[name].traits.test_options.items() if key != "density"}
