"""Compressors: one rank's `u` to a payload and back. No communication, no hidden state.

    payload, update = compressor.compress(u, ctx)   # what goes on the wire, and the part of u that it stands for
    compressor.decode(payload, ctx)                 # the same update, on any rank

A payload is a tuple of tensors whose shapes follow from the segment's length and the density. The update is exact: it
holds the values after rounding, so that u - update is what the residual has to keep.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.context import Context, StateSpec
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.write_back import add_entries_
from lightning_sparse.layout import Segment

Payload = tuple[Tensor, ...]


class Entries(NamedTuple):
    """Some elements of a segment: int64 `indices`, ascending, and fp32 `values`, both of shape (..., n).

    Rows are several lists, to be added in order. A row may be padded at its end with the index `numel`, the segment's
    length, and the value 0: so the host need not know how many entries there are, which on CUDA it would have to wait
    for.
    """

    indices: Tensor
    values: Tensor

    @property
    def lists(self) -> list[tuple[Tensor, Tensor]]:
        """The rows, one after the other."""
        return [(self.indices, self.values)] if self.indices.dim() == 1 else list(zip(*self, strict=True))


Update = Tensor | Entries
"""A change of a segment: dense (1-D, fp32, of the segment's length), or entries."""


def check_length(u: Tensor, ctx: Context) -> None:
    """Raise ValueError unless `u` is as long as its segment: kernels go by the segment."""
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
    """Return what `u` has from each start to its stop, one after the other, as a new tensor."""
    return torch.cat([u[:0], *(u[start:stop] for start, stop in places)])


def write_exact_(update: Tensor, places: Sequence[tuple[int, int]], values: Tensor) -> None:
    """Write what `exact_values` returned to its places in `update`."""
    if places:
        parts = [update[start:stop] for start, stop in places]
        torch._foreach_copy_(parts, list(values.split([len(part) for part in parts])))


def drop_padding(entries: Entries, numel: int) -> Entries:
    """Return a list of entries without its padding; on CUDA the host waits for their number."""
    valid = entries.indices < numel
    return Entries(entries.indices[valid], entries.values[valid])


class Compressor(abc.ABC):
    """A local, stateless code for one segment's `u` (1-D, fp32)."""

    state: tuple[StateSpec, ...] = ()
    """What it keeps in the segment's state."""

    summable: bool = False
    """Whether the updates of different ranks are at the same indices, so that their values can be summed on the way."""

    exposes_nonfinite: bool = False
    """Whether a NaN or an infinity in u always is among the update's values; if not, all of u is scanned."""

    by_parameter: bool = False
    """Whether a payload is made parameter by parameter: that of two segments joined is both payloads, part by part."""

    approximates: bool = True
    """Whether the update approximates u, so that the mean of the ranks' updates can be compressed again."""

    @property
    def contracts(self) -> bool:
        """Whether ‖u − update‖ is below ‖u‖ in expectation: else a residual would grow without bound."""
        return True

    @abc.abstractmethod
    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        """Return the payload for `u`, which is left as it is, and the update that the payload stands for.

        Raises:
            TypeError: `u` is not fp32, where kernels need it so.
            ValueError: `u` is not as long as its segment, where they go by that.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, ctx: Context) -> Update:
        """Return the update that a payload stands for.

        Raises:
            ValueError: no `compress` makes such a payload. Not where Triton works: the host does not look.
        """

    @abc.abstractmethod
    def nbytes(self, segment: Segment, density: float | None) -> int:
        """Return the size of a segment's payload in bytes, without its count and header."""

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        """Return the block statistics to compute while a `u` of `numel` elements is formed, or None."""
        return None

    def is_exact(self, density: float | None) -> bool:
        """Return whether the update is u, to the last bit, at a density; None where the compressor has none."""
        return False

    def mean(self, payloads: Payload, ctx: Context) -> Update:
        """Decode the gathered payloads, one row of each part per rank, and average them in rank order."""
        size = len(payloads[0])
        # Scaled by a power of two as they are added: sums stay in range, and the mean has the same bits.
        scale = 0.5 ** (size - 1).bit_length()
        total = torch.zeros(ctx.segment.numel, dtype=torch.float32, device=payloads[0].device)
        for row in range(size):
            add_(total, self.decode(tuple(part[row] for part in payloads), ctx), scale)
        return total if size * scale == 1 else total.div_(size * scale)


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends everything. With the `AllReduceMean` aggregator this is what DDP does."""

    summable = True

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        return (u,), u

    def decode(self, payload: Payload, ctx: Context) -> Update:
        return payload[0]

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * segment.numel

    def is_exact(self, density: float | None) -> bool:
        return True
