"""Compressors: one rank's `u` to a payload and back. No communication, no hidden state.

A payload is the tuple of tensors that goes on the wire, of a length that is fixed by the segment's length and the
density. Two rules hold for every compressor:

- *Additive.* `accumulate_` adds what a payload stands for, `remove_` subtracts it; so values may be rounded or used in
  part, and what is lost stays in the residual.
- *Nothing hides.* The payload of a `u` with a NaN or an infinity holds a NaN or an infinity.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from lightning_sparse.compressors import formats
from lightning_sparse.compressors.formats import IndexFormat, ValueFormat
from lightning_sparse.context import Context, Entry
from lightning_sparse.kernels.launch import to_device, uses_triton
from lightning_sparse.kernels.pack import gather
from lightning_sparse.kernels.scan import Scan
from lightning_sparse.kernels.write_back import add_entries_
from lightning_sparse.layout import Segment
from lightning_sparse.options import check_density

Payload = tuple[Tensor, ...]


class Entries(NamedTuple):
    """Some elements of a segment: `indices` int64, ascending, and as many `values` fp32.

    They may be padded, on CUDA because the host must not wait for their number, and where several lists are rows. At
    the end the index is then the segment's length, which is none, and the value zero.
    """

    indices: Tensor
    values: Tensor


Agreed = Tensor | tuple[Entries, ...]
"""The result for a segment: dense, or entries to be added up in this order."""


def target_count(density: float, numel: int) -> int:
    """Return k: how many of `numel` entries a density asks for, at least one where there is one."""
    return min(numel, max(1, round(density * numel)))


def unpadded(entries: Entries, segment: Segment) -> Entries:
    """Return the entries without the padding; on CUDA the host waits for their number."""
    there = entries.indices < segment.numel
    return Entries(entries.indices[there], entries.values[there])


def first_broken(values: Tensor, places: Tensor, numel: int) -> Tensor:
    """Return 1 + the place, below `numel`, of the first value that is not finite, 0 where all are; an int64 scalar."""
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    return (torch.where(values.abs() < math.inf, numel, places).amin() + 1) % (numel + 1)


def first_broken_parameter(u: Tensor, segment: Segment) -> Tensor:
    """Return 1 + where the first parameter starts that is not finite in `u`, 0 where all are, as an int64 scalar."""
    parts = [(start, part) for start, part in zip(segment.bounds, segment.views(u), strict=False) if part.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.int64, device=u.device)
    norms = torch.stack(torch._foreach_norm([part for _, part in parts], math.inf))  # no other overflows
    return first_broken(norms, to_device(torch.tensor([start for start, _ in parts]), u.device), segment.numel)


class Compressor(abc.ABC):
    """A local, stateless code for one segment's `u` (1-D, fp32)."""

    entries: tuple[Entry, ...] = ()
    """What it keeps in the segment's state."""

    summable: bool = False
    """Whether payloads of different ranks may be added up element by element, and stand for the sum."""

    @abc.abstractmethod
    def compress(self, u: Tensor, segment: Segment, ctx: Context) -> Payload:
        """Return the payload for `u`, which is left as it is."""

    @abc.abstractmethod
    def accumulate_(self, out: Tensor, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        """Add what `payload` stands for to `out` (1-D, fp32), in place."""

    @abc.abstractmethod
    def nbytes(self, segment: Segment, density: float | None) -> int:
        """Return the size in bytes of what a segment's payload says, without its count and header."""

    def scan(self, numel: int, density: float | None = None) -> Scan | None:
        """Return what this wants to find out about a `u` of `numel` elements in the pass that makes it, if anything.

        A memory that makes u in one pass fills it in and leaves it in `Context.scan`.
        """
        return None

    def decompress(self, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        """Return what `payload` stands for, as a new fp32 tensor of the segment's length."""
        out = torch.zeros(segment.numel, dtype=torch.float32, device=payload[0].device)
        return self.accumulate_(out, payload, segment, ctx)

    def remove_(self, u: Tensor, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        """Subtract what `payload` stands for from `u`, in place."""
        return u.sub_(self.decompress(payload, segment, ctx))

    def mean(self, payloads: Payload, segment: Segment, ctx: Context) -> Agreed:
        """Return the mean of what the payloads of all ranks, the rows of each part, stand for, added up in order."""
        out = torch.zeros(segment.numel, dtype=torch.float32, device=payloads[0].device)
        for payload in zip(*payloads, strict=True):
            self.accumulate_(out, payload, segment, ctx)
        return out.div_(len(payloads[0]))


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends everything. With the `AllReduceMean` aggregator this is what DDP does."""

    summable = True

    def compress(self, u: Tensor, segment: Segment, ctx: Context) -> Payload:
        return (u,)

    def accumulate_(self, out: Tensor, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        return out.add_(payload[0])

    def remove_(self, u: Tensor, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        return u.zero_() if payload[0] is u else u.sub_(payload[0])

    def mean(self, payloads: Payload, segment: Segment, ctx: Context) -> Agreed:
        # One payload, the sum that all-reduce made, needs no pass of its own.
        return payloads[0][0] if len(payloads[0]) == 1 else super().mean(payloads, segment, ctx)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return 4 * segment.numel


class Sparsifier(Compressor):
    """Sends some entries of `u`: their count, indices and values. O(k) after the selection.

    A subclass is a frozen dataclass with a field `density` and a `select`, and with the two formats as fields where
    they are to be chosen (see `compressors/formats.py`).
    """

    density: float
    index_format: IndexFormat = "compact"
    value_format: ValueFormat = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density(type(self).__name__, self.density))
        for name, known in (("index_format", IndexFormat), ("value_format", ValueFormat)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}): choose from {', '.join(get_args(known))}."
                )

    @abc.abstractmethod
    def select(self, u: Tensor, segment: Segment | None = None, ctx: Context | None = None) -> Tensor:
        """Choose the entries of `u` (1-D, fp32) to send.

        Returns:
            int64 indices, ascending, without repetition, at most `capacity` of them. NaN and infinities first.
        """

    def target(self, numel: int, density: float | None = None) -> int:
        """Return k for a segment of `numel` elements."""
        return target_count(self.density if density is None else density, numel)

    def capacity(self, numel: int, density: float | None = None) -> int:
        """Return how many entries a payload has room for; k, unless the selection may overshoot."""
        return self.target(numel, density)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        return self.entry_bytes(segment.numel, self.capacity(segment.numel, density))

    def entry_bytes(self, numel: int, capacity: int) -> int:
        """Return the size in bytes of a payload with room for `capacity` entries of `numel` elements."""
        return formats.index_bytes(numel, capacity, self.index_format) + formats.value_bytes(
            capacity, self.value_format
        )

    def choose(self, u: Tensor, segment: Segment, ctx: Context) -> Tensor:
        """Return what `select` does; on CUDA, where its number is not fixed, padded, so that the host need not wait."""
        return self.select(u, segment, ctx)

    def compress(self, u: Tensor, segment: Segment, ctx: Context) -> Payload:
        chosen = self.choose(u, segment, ctx)
        entries = Entries(chosen, gather(u, chosen))
        if uses_triton(u):
            ctx.broken = first_broken(entries.values, chosen, segment.numel)
        payload = self.pack(entries, segment, ctx)
        ctx.sent = payload, Entries(chosen, self.values(payload)[: chosen.numel()])
        return payload

    def pack(self, entries: Entries, segment: Segment, ctx: Context, capacity: int | None = None) -> Payload:
        """Return a payload that holds these entries, at most `capacity` of them; None is the compressor's own.

        Several lists, the rows of `entries`, become several payloads, the rows of each part.
        """
        indices, values = entries
        if capacity is None:
            capacity = self.capacity(segment.numel, ctx.density)
        return (
            (indices < segment.numel).sum(-1, keepdim=True, dtype=torch.int32),
            *formats.encode_values(values, capacity, self.value_format),
            *formats.encode_indices(indices, segment.numel, capacity, self.index_format),
        )

    def unpack(self, payload: Payload, segment: Segment, ctx: Context, capacity: int | None = None) -> Entries:
        """Return the entries that the payload holds; entries are a payload, too, that need not be sent.

        Padded by Triton, for the host does not wait for their number, and where there are several rows.

        Raises:
            ValueError: no `pack` makes such a payload: it was damaged on its way. Not by Triton.
        """
        if isinstance(payload, Entries):
            return payload
        if ctx.sent is not None and payload is ctx.sent[0]:
            return Entries(*ctx.sent[1])  # what `compress` has just packed need not be decoded
        if capacity is None:
            capacity = self.capacity(segment.numel, ctx.density)
        count, packed = payload[0], payload[self._behind_values :]
        entries = Entries(
            formats.decode_indices(packed, count, segment.numel, capacity, self.index_format), self.values(payload)
        )
        if count.dim() > 1 or uses_triton(count):
            return entries
        return Entries(*(part[: int(count)] for part in entries))

    @property
    def _behind_values(self) -> int:
        """Where in a payload, after the count and what holds the values, the indices are."""
        return 3 if self.value_format == "int8" else 2

    def values(self, payload: Payload) -> Tensor:
        """Return the fp32 values that come out of a payload, (..., capacity): those of `pack`, rounded, then zeros."""
        return formats.decode_values(payload[1 : self._behind_values], self.value_format)

    def indices(self, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        """Return the int64 indices that the payload holds, ascending; on CUDA the host waits for their number."""
        return unpadded(self.unpack(payload, segment, ctx), segment).indices

    def accumulate_(self, out: Tensor, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        return add_entries_(out, *self.unpack(payload, segment, ctx))

    def remove_(self, u: Tensor, payload: Payload, segment: Segment, ctx: Context) -> Tensor:
        return add_entries_(u, *self.unpack(payload, segment, ctx), -1.0)

    def mean(self, payloads: Payload, segment: Segment, ctx: Context) -> Agreed:
        indices, values = self.unpack(payloads, segment, ctx)
        return tuple(map(Entries, indices, values / len(values)))


def selection_bound(target: int) -> int:
    """Return ⌈4k/3⌉: how many entries a threshold method may send before it falls back to exact selection."""
    return math.ceil(4 * target / 3)
