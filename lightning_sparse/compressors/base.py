"""Compressors encode one rank's `u` as a payload and decode payloads. They do not communicate and hide no state.

    payload, update = compressor.compress(u, ctx)   # the payload to send, and the part of u that it represents
    compressor.decode(payload, ctx)                 # the same update, on any rank

A payload is a tuple of tensors whose shapes follow from the segment's length and the density. The update is exact: it
holds the values after rounding, so the residual keeps exactly u - update.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.context import Context, Replayable, StateSpec
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.write_back import add_entries_
from lightning_sparse.layout import Segment

Payload = tuple[Tensor, ...]


class Entries(NamedTuple):
    """Some elements of a segment: int64 `indices`, ascending, and fp32 `values`, both of shape (..., n).

    Each row is a list of entries, and the lists are added in order. A row may be padded at its end with the index
    `numel`, the segment's length, and the value 0. With padding the host need not know the number of entries, for
    which it would have to wait on CUDA.
    """

    indices: Tensor
    values: Tensor

    @property
    def lists(self) -> list[tuple[Tensor, Tensor]]:
        """The rows as a list of (indices, values)."""
        return [(self.indices, self.values)] if self.indices.dim() == 1 else list(zip(*self, strict=True))


Update = Tensor | Entries
"""A change of a segment: dense (1-D, fp32, of the segment's length), or entries."""


def parts_of(update: Update) -> tuple[Tensor, ...]:
    """Return the tensors of an update."""
    return (update,) if isinstance(update, Tensor) else tuple(update)


def check_length(u: Tensor, ctx: Context) -> None:
    """Raise ValueError unless `u` has the length of its segment, on which the kernels rely."""
    numel = ctx.segment.numel
    if u.shape != (numel,):
        raise ValueError(
            f"u has the shape {tuple(u.shape)}, but its segment has {numel} elements: give a 1-D u of {numel}, or the "
            f"context of its own segment."
        )


def add_(x: Tensor, update: Update, scale: float = 1.0) -> Tensor:
    """Add `scale` times an update to `x` (1-D, fp32), in place."""
    if isinstance(update, Tensor):
        # x - x is not 0 for an infinity.
        return x.zero_() if update is x and scale == -1 else x.add_(update, alpha=scale)
    for indices, values in update.lists:
        add_entries_(x, indices, values, scale)
    return x


def exact_values(u: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """Return the elements of `u` from each start to its stop, concatenated, as a new tensor."""
    return torch.cat([u[:0], *(u[start:stop] for start, stop in places)])


def write_exact_(update: Tensor, places: Sequence[tuple[int, int]], values: Tensor) -> None:
    """Write the values that `exact_values` returned to the same ranges of `update`."""
    if places:
        parts = [update[start:stop] for start, stop in places]
        torch._foreach_copy_(parts, list(values.split([len(part) for part in parts])))


def drop_padding(entries: Entries, numel: int) -> Entries:
    """Return a list of entries without its padding; on CUDA the host waits for their number."""
    valid = entries.indices < numel
    return Entries(entries.indices[valid], entries.values[valid])


class Compressor(Replayable, abc.ABC):
    """Encodes and decodes one segment's `u` (1-D, fp32) on one rank."""

    state: tuple[StateSpec, ...] = ()
    """The tensors that the compressor keeps in the segment's state."""

    summable: bool = False
    """Whether the ranks' updates have the same indices, so that their values can be summed during the exchange."""

    exposes_nonfinite: bool = False
    """Whether a NaN or an infinity in u always appears among the update's values. If not, all of u is scanned."""

    by_parameter: bool = False
    """Whether each parameter is encoded by itself: joining two segments joins their payloads, part by part."""

    @property
    def contracts(self) -> bool:
        """Whether ‖u − update‖ is below ‖u‖ in expectation. Otherwise a residual would grow without bound."""
        return True

    @abc.abstractmethod
    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        """Return the payload for `u`, and the update that the payload represents. `u` is not changed.

        Raises:
            TypeError: `u` is not fp32, and the kernels need fp32.
            ValueError: `u` does not have its segment's length, and the kernels rely on it.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, ctx: Context) -> Update:
        """Return the update that a payload represents.

        Raises:
            ValueError: `compress` never returns such a payload. Triton kernels do not check, as the host would wait.
        """

    @abc.abstractmethod
    def nbytes(self, segment: Segment, density: float | None) -> int:
        """Return the size of a segment's payload in bytes, without its count and header."""

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        """Return the block statistics to compute while a `u` of `numel` elements is formed, or None."""
        return None

    def is_exact(self, density: float | None) -> bool:
        """Return whether the update equals u to the last bit. `density` is None if the compressor has none."""
        return False

    def mean(self, payloads: Payload, ctx: Context) -> Update:
        """Decode the gathered payloads, one row of each part per rank, and average them in rank order."""
        size = len(payloads[0])
        # Each update is scaled by a power of two: sums stay in range, and the mean has the same bits.
        scale = 0.5 ** (size - 1).bit_length()
        total = torch.zeros(ctx.segment.numel, dtype=torch.float32, device=payloads[0].device)
        for row in range(size):
            add_(total, self.decode(tuple(part[row] for part in payloads), ctx), scale)
        return total if size * scale == 1 else total.div_(size * scale)


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends everything. With the `AllReduceMean` aggregator it is equivalent to DDP."""

    summable = True

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        return (u,), u

    def decode(self, payload: Payload, ctx: Context) -> Update:
        return payload[0]

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * segment.numel

    def is_exact(self, density: float | None) -> bool:
        return True
