"""The fixed partition of a model's parameters into segments.

All state of a method belongs to this partition and is keyed by parameter name. DDP's buckets cannot serve as the
partition, because their number, grouping, order and index change after the first step and after a resume.

    layout = Layout.of({"w": (3, 4), "b": (4,)}, granularity="model")
    layout.segments[0].names      # ('b', 'w'): reverse registration order, as backward delivers gradients
    layout.segments[0].views(u)   # one 1-D view of u per parameter
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_sparse.options import Granularity as Granularity
from lightning_sparse.options import check

MAX_SEGMENT = 2**31 - 1  # indices are sent as int32


@dataclass(frozen=True)
class Segment:
    """Consecutive parameters of a layout that are compressed together.

    Attributes:
        index: position in the layout.
        names: parameter names in layout order.
        shapes: shapes of the parameters.
        start: offset of the segment in the layout, in elements.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    start: int
    bounds: tuple[int, ...] = field(init=False, repr=False)
    """Offsets of the parameters in the segment, in elements; the last number is the segment's length."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", (0, *accumulate(math.prod(shape) for shape in self.shapes)))

    @property
    def numel(self) -> int:
        """Length in elements."""
        return self.bounds[-1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a tensor of the segment's length into one 1-D view per parameter."""
        return list(flat.split([stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]))

    def owner(self, index: int) -> str:
        """Return the name of the parameter that holds the element `index` of the segment."""
        return next(name for name, stop in zip(self.names, self.bounds[1:], strict=True) if index < stop)


@functools.cache  # no limit: segments are used in turn, so a smaller cache would never hit
def cut(segment: Segment, count: int) -> tuple[Segment, ...]:
    """Cut a segment into consecutive regions like `tensor_split`: their lengths differ by at most one.

    A parameter is cut at the end of a region. A piece of a vector is a vector. A piece of any other parameter is cut
    along the first dimension into up to three parts: its whole rows, and an incomplete row at each end. An incomplete
    row becomes a matrix of one row.
    """
    each, more = divmod(segment.numel, count)
    edges = [region * each + min(region, more) for region in range(count + 1)]
    regions = []
    for first, last in pairwise(edges):
        names, shapes = [], []
        for name, shape, (start, stop) in zip(segment.names, segment.shapes, pairwise(segment.bounds), strict=True):
            pieces = _pieces(shape, max(first, start) - start, min(last, stop) - start)
            names += [name] * len(pieces)
            shapes += pieces
        regions.append(Segment(segment.index, tuple(names), tuple(shapes), segment.start + first))
    return tuple(regions)


@functools.cache  # no limit: segments are used in turn, so a smaller cache would never hit
def joined(segments: tuple[Segment, ...]) -> Segment:
    """Join several segments into one, with the index and the start of the first."""
    names, shapes = ([each for segment in segments for each in getattr(segment, x)] for x in ("names", "shapes"))
    return Segment(segments[0].index, tuple(names), tuple(shapes), segments[0].start)


def _pieces(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[int, ...]]:
    """Return the shapes of a parameter's parts from element `begin` to element `end`; see `cut`."""
    if begin >= end or end - begin == math.prod(shape):
        return [shape] * (begin < end)
    if len(shape) < 2:
        return [(end - begin,)]
    length = math.prod(shape[1:])
    first, last = -(-begin // length), end // length  # range of the whole rows
    if first > last:
        return [(1, end - begin)]
    head, body, tail = first * length - begin, last - first, end - last * length
    return [(1, head)] * (head > 0) + [(body, *shape[1:])] * (body > 0) + [(1, tail)] * (tail > 0)


@dataclass(frozen=True)
class Layout:
    """All segments of a model, without gaps.

    Attributes:
        segments: segments in the order in which backward delivers their gradients.
    """

    segments: tuple[Segment, ...]

    @staticmethod
    def of(
        shapes: Mapping[str, Sequence[int]],
        granularity: Granularity = "bucket",
        bucket_cap_mb: float = 25,
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        group_of: Mapping[str, int] | None = None,
    ) -> Layout:
        """Partition parameters, which are given in registration order.

        Args:
            shapes: shape by parameter name.
            granularity: "layer" creates one segment for each parameter. "bucket" closes a segment as soon as it holds
                `bucket_cap_mb`, like DDP's buckets. "model" creates one segment for all parameters of one dtype.
            bucket_cap_mb: size of a "bucket" segment in MiB, in the parameters' own dtype.
            dtypes: dtype by parameter name, fp32 if absent. As in DDP, a bucket holds one dtype.
            group_of: group number by parameter name, 0 if absent. A segment holds parameters of one group.

        Raises:
            ValueError: no parameters, an unknown granularity, or a segment too long for 32-bit indices.
        """
        check("granularity", granularity)
        check("bucket_cap_mb", bucket_cap_mb)
        if not shapes:
            raise ValueError(
                "No trainable parameters: there is no gradient to reduce. Set requires_grad on at least one parameter "
                "before training starts."
            )
        dtypes, group_of = dtypes or {}, group_of or {}
        names = list(shapes)
        groups: list[list[str]] = []
        if granularity == "model":
            together: dict[tuple[int, torch.dtype], list[str]] = {}
            for name in reversed(names):
                together.setdefault((group_of.get(name, 0), dtypes.get(name, torch.float32)), []).append(name)
            groups = [together[key] for key in sorted(together, key=lambda key: key[0])]
        elif granularity == "layer":
            groups = [[name] for name in reversed(names)]
        else:
            # Fill segments greedily, per dtype, over the reversed parameters. Then a segment holds the same parameters
            # as a DDP bucket, and no segment waits for a second bucket.
            open_groups: dict[tuple[torch.dtype, int], tuple[list[str], int]] = {}
            for name in reversed(names):
                dtype = dtypes.get(name, torch.float32)
                kind = dtype, group_of.get(name, 0)
                group, nbytes = open_groups.get(kind, ([], 0))
                if not group:
                    groups.append(group)
                group.append(name)
                nbytes += math.prod(shapes[name]) * dtype.itemsize
                open_groups[kind] = ([], 0) if nbytes >= bucket_cap_mb * 2**20 else (group, nbytes)
        segments: list[Segment] = []
        start = 0
        for index, group in enumerate(groups):
            segment = Segment(index, tuple(group), tuple(tuple(shapes[name]) for name in group), start)
            if segment.numel > MAX_SEGMENT:
                raise ValueError(
                    f"The segment of {len(group)} parameters from {group[0]!r} on has {segment.numel:,} elements, more "
                    f"than the {MAX_SEGMENT:,} that 32-bit indices reach. Use granularity='bucket' or 'layer'."
                )
            segments.append(segment)
            start += segment.numel
        return Layout(tuple(segments))

    @property
    def numel(self) -> int:
        """Number of elements of all segments."""
        return sum(segment.numel for segment in self.segments)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters in layout order."""
        return tuple(name for segment in self.segments for name in segment.names)

    @property
    def digest(self) -> int:
        """32-bit checksum that ranks compare to find out whether their layouts are equal."""
        return zlib.crc32(repr([(segment.names, segment.shapes) for segment in self.segments]).encode())
