"""Methods that stand for all in tests with Lightning, where each method costs seconds.

Lightning, DDP and checkpoints see of a method only how its ranks communicate, what its payload consists of and what its
memory keeps: its kind. The first row of `METHODS` of each kind represents it. `gaussiank` selects otherwise than `topk`
and is `topk` in all else. A row of a new kind joins by itself. Every method goes through tests/test_methods.py,
test_random.py and test_reducer.py, which need no process.

`topk` goes through every form of training, and the others take turns: every form meets `topk` and another kind.
"""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

from lightning_sparse import METHODS
from lightning_sparse.compressors import Sparsifier
from lightning_sparse.methods import MethodSpec


def kind(spec: MethodSpec) -> tuple[type, type, type]:
    """Return how ranks communicate, what the payload consists of, and what is kept."""
    compressor = spec.make()
    payload = Sparsifier if isinstance(compressor, Sparsifier) else type(compressor)
    return type(spec.aggregator), payload, type(spec.memory)


GRADIENTS = {name: spec for name, spec in METHODS.items() if spec.update_rule is None}
"""Rows that exchange updates only go through tests/integration/test_update_exchange.py."""
REPRESENTATIVES = list({kind(spec): name for name, spec in reversed(GRADIENTS.items())}.values())[::-1]
OTHERS = [name for name in REPRESENTATIVES if name != "topk"]


DISTINCT = list(
    {(spec.make, repr(spec.memory), repr(spec.aggregator)): name for name, spec in reversed(METHODS.items())}.values()
)[::-1]
"""The first row of each combination of parts: a Reducer does not see how updates are exchanged."""


def in_turn(cases: Iterable[Any], methods: Iterable[str] = OTHERS) -> dict[Any, str]:
    """Return the method that accompanies `topk` in each case."""
    return dict(zip(cases, cycle(methods), strict=False))


def small(name: str) -> dict[str, Any]:
    """Return the options that a method's row gives for small tensors, without the density, which tests choose."""
    return {key: value for key, value in METHODS[name].traits.test_options.items() if key != "density"}
