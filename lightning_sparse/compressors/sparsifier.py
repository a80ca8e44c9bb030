"""Sparsifiers: compressors that send some entries of `u`, in O(k) after the selection.

    @dataclass(frozen=True)
    class EveryNth(Sparsifier):
        density: float = 0.001

        def choose(self, u, k, ctx):
            return torch.arange(k, device=u.device) * u.numel() // max(k, 1)

This example is a complete sparsifier. The base class encodes and decodes the chosen entries.
"""

from __future__ import annotations

import abc
import math
from typing import get_args

from torch import Tensor

from lightning_sparse.compressors.base import Compressor, Entries, Payload, Update
from lightning_sparse.compressors.encoding import Encoding, IndexFormat, ValueFormat
from lightning_sparse.context import Context
from lightning_sparse.kernels.pack import gather
from lightning_sparse.layout import Segment
from lightning_sparse.options import check


def selection_bound(k: int) -> int:
    """Return ⌈4k/3⌉, the most entries that a threshold method sends before it falls back to exact selection."""
    return math.ceil(4 * k / 3)


class Sparsifier(Compressor):
    """Sends some entries of `u`: their count, indices and values.

    A subclass is a frozen dataclass with a field `density` and a method `choose`. If users may set the two formats,
    make them fields, too (see `compressors/encoding.py`).
    """

    density: float
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check("density", self.density, type(self).__name__))
        for name, known in (("index_format", IndexFormat), ("value_format", ValueFormat)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}): choose from {', '.join(get_args(known))}."
                )

    @abc.abstractmethod
    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        """Choose about k entries of `u` (1-D, fp32, k ≤ len(u)) to send.

        Returns:
            At most `capacity` int64 indices, ascending and distinct; they may be padded at the end with `len(u)`.
        """

    def select(self, u: Tensor, density: float | None = None) -> Tensor:
        """Return the indices of the entries of `u` (1-D, fp32) to send: int64, ascending, without padding."""
        chosen = self.choose(u, self.count(u.numel(), density), Context.of(u.numel(), density=density))
        return chosen[chosen < u.numel()]

    def count(self, numel: int, density: float | None = None) -> int:
        """Return k, the number of entries to send of `numel` elements: at least one unless `numel` is 0."""
        return min(numel, max(1, round((self.density if density is None else density) * numel)))

    def capacity(self, numel: int, density: float | None = None) -> int:
        """Return the most entries that a payload can hold: k, or more if the selection may exceed k."""
        return self.count(numel, density)

    @property
    def encoding(self) -> Encoding:
        """The format in which entries are sent."""
        return Encoding(self.index_format, self.value_format)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return self.encoding.nbytes(segment.numel, self.capacity(segment.numel, density))

    def is_exact(self, density: float | None) -> bool:
        return (self.density if density is None else density) == 1 and self.value_format == "float32"

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        numel = ctx.segment.numel
        return self.encoding.encode(self.entries(u, ctx), numel, self.capacity(numel, ctx.density))

    def entries(self, u: Tensor, ctx: Context) -> Entries:
        """Return the chosen entries of `u`, before rounding."""
        indices = self.choose(u, self.count(u.numel(), ctx.density), ctx)
        return Entries(indices, gather(u, indices))

    def decode(self, payload: Payload, ctx: Context) -> Entries:
        numel = ctx.segment.numel
        return self.encoding.decode(payload, numel, self.capacity(numel, ctx.density))

    def mean(self, payloads: Payload, ctx: Context) -> Entries:
        indices, values = self.decode(payloads, ctx)
        return Entries(indices, values / len(values))
