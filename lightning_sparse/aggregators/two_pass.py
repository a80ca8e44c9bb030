"""TwoPass: owners sum regions of the gradient, and compress the mean a second time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Entries, Payload, Update, add_
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.framing import join_rows, joined_bytes, unframe
from lightning_sparse.kernels.pack import gather
from lightning_sparse.kernels.write_back import coalesce, drop_empty, lookup
from lightning_sparse.layout import Segment, cut, joined
from lightning_sparse.options import check


@dataclass(frozen=True)
class TwoPass(Aggregator[Compressor]):
    """Compressed reduce-scatter and all-gather for contracting compressors without a state.

    The bytes do not grow with P.

    It compresses in two passes with error feedback in both (Tang et al. 2019, arXiv 1905.05957, "DoubleSqueeze"). Here
    each rank is the server of one of P regions of equal length.

    1. Each rank compresses its u in every region of another rank, and sends the payload to the region's owner.
    2. The owner decodes the payloads, adds them to its own uncompressed u of the region, and divides by P: the mean M.
    3. The owner compresses M. All ranks gather the payloads and decode the result, C(M).

    The owner keeps the part of the sum that the second compression omits, P·(M − C(M)). In its region, applied =
    u − P·(M − C(M)), so this part becomes its residual. So Σ u = P·result + Σ residuals, and the aggregator needs no
    state. After a resume with another number of ranks, the residuals contain everything, because their mean is kept.

    Attributes:
        second: density of the second pass divided by that of the first; only for compressors with a density. The mean
            of P ranks has up to P times the entries of each rank. With eight ranks, 3 is better than 1 at equal bytes,
            see docs/research-updates.md. The paper uses 1.
    """

    second: float = 1.0

    rounds = 2
    shards_segment = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "second", check("second", self.second, "TwoPass"))

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        rank, size = exchange.rank, exchange.size
        regions = [replace(ctx, segment=region, stats=None) for region in cut(ctx.segment, size)]
        own, parts = regions[rank], u.split([region.segment.numel for region in regions])
        likes = [_payload_like(compressor, region.segment, ctx.density, u.device) for region in regions]
        # Regions contain different parameters, so their payloads may differ in length. Messages have equal lengths.
        nbytes = max(map(joined_bytes, likes))

        before, after = (_at_once(compressor, each) for each in (regions[:rank], regions[rank + 1 :]))
        shapes = iter([*likes[:rank], *likes[rank + 1 :]])
        payloads: list[Payload] = []
        sent: list[Update] = []
        for group, count in (*before, *after):
            start = group.segment.start - ctx.segment.start
            payload, update = exchange.compress(u[start : start + group.segment.numel], compressor, group)
            payloads += _split(payload, [next(shapes) for _ in range(count)])
            sent.append(update)
        payloads.insert(rank, ())
        (received,) = exchange.all_to_all((join_rows(payloads, nbytes, u.device),))

        mean = parts[rank] / size
        entries: list[tuple[Tensor, Tensor]] = []
        rows = [*received[:rank], *received[rank + 1 :]]
        for update in _decode(compressor, rows, [likes[rank]] * len(rows), [own] * len(rows)):
            # Divide before adding, so that sums stay in range.
            add_(mean, update, 1 / size)
            entries += update.lists if isinstance(update, Entries) else []

        denser = [replace(region, density=self._second(ctx.density)) for region in regions]
        likes = [_payload_like(compressor, region.segment, region.density, u.device) for region in denser]
        payload, _ = exchange.compress(mean, compressor, denser[rank])
        (row,) = join_rows([payload], max(map(joined_bytes, likes)), u.device)
        (gathered,) = exchange.all_gather((row,))
        result = _decode(compressor, list(gathered), likes, denser)
        own_part = _applied(parts[rank], mean, entries, result[rank], size)
        applied = [*sent[: len(before)], own_part, *sent[len(before) :]]
        groups = [*(group for group, _ in before), own, *(group for group, _ in after)]
        return _of_segment(result, regions, ctx.segment), _of_segment(applied, groups, ctx.segment)

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        passes = (density, self._second(density))
        return (size - 1) * sum(_most_bytes(compressor, segment, each, size) for each in passes)

    def capacity(self, compressor: Compressor, numel: int, density: float | None, size: int) -> int:
        assert isinstance(compressor, Sparsifier)
        longest = -(-numel // size)
        # Sent entries for other regions, received entries for the own region; and C(M) for all or for the own region.
        first, second = (compressor.capacity(longest, each) for each in (density, self._second(density)))
        return size * (2 * first + second)

    def supports(self, compressor: Compressor) -> bool:
        # Owners keep residuals of the second pass. Regions cut matrices, and would share the state of a segment.
        fits = compressor.contracts and not compressor.state and not isinstance(compressor, LowRank)
        return fits and (self.second == 1 or hasattr(compressor, "density"))

    def _second(self, density: float | None) -> float | None:
        """Return the density of the second pass; None if the compressor has none."""
        return None if density is None else min(1.0, density * self.second)


def _at_once(compressor: Compressor, regions: Sequence[Context]) -> list[tuple[Context, int]]:
    """Return contexts of regions, and the number of regions in each: all regions together, or each alone."""
    if not compressor.by_parameter or not regions:
        return [(region, 1) for region in regions]
    return [(_together(regions), len(regions))]


def _together(regions: Sequence[Context]) -> Context:
    """Return the context of several regions as one segment."""
    return replace(regions[0], segment=joined(tuple(region.segment for region in regions)))


def _split(payload: Payload, likes: Sequence[Payload]) -> list[Payload]:
    """Split the payload of regions that were compressed together into payloads with the shapes of `likes`."""
    parts = (part.split([like[i].numel() for like in likes]) for i, part in enumerate(payload))
    return list(zip(*parts, strict=True))


def _decode(
    compressor: Compressor, rows: Sequence[Tensor], likes: Sequence[Payload], regions: Sequence[Context]
) -> list[Update]:
    """Decode joined payloads, given their shapes and their regions."""
    payloads = [unframe(row, like) for row, like in zip(rows, likes, strict=True)]
    if not compressor.by_parameter or len(regions) < 2:
        return [compressor.decode(payload, region) for payload, region in zip(payloads, regions, strict=True)]
    update = compressor.decode(tuple(map(torch.cat, zip(*payloads, strict=True))), _together(regions))
    assert isinstance(update, Tensor)
    return list(update.split([region.segment.numel for region in regions]))


@functools.cache  # no limit: segments are used in turn, so a smaller cache would never hit
def _part_shapes(
    compressor: Compressor, segment: Segment, density: float | None, device: torch.device
) -> tuple[tuple[int, torch.dtype], ...]:
    zeros = torch.zeros(segment.numel, dtype=torch.float32, device=device)
    payload, _ = compressor.compress(zeros, Context(segment, density=density))
    return tuple((part.numel(), part.dtype) for part in payload)


def _payload_like(compressor: Compressor, segment: Segment, density: float | None, device: torch.device) -> Payload:
    """Return meta tensors with the shapes and dtypes of a segment's payload."""
    shapes = _part_shapes(compressor, segment, density, device)
    return tuple(torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in shapes)


@functools.cache  # no limit: segments are used in turn, so a smaller cache would never hit
def _most_bytes(compressor: Compressor, segment: Segment, density: float | None, size: int) -> int:
    return max(compressor.nbytes(region, density) for region in cut(segment, size))


def _applied(u: Tensor, mean: Tensor, received: Sequence[tuple[Tensor, Tensor]], result: Update, size: int) -> Update:
    """Return the applied part of the owner's u (1-D, for its region): u − P·(M − C(M)).

    If no other rank has sent an entry, and C(M) does not contain it, the applied part is 0, because M is u / P.
    """
    if isinstance(result, Tensor):
        return u - (mean - result).mul_(size)
    indices, _ = coalesce([*received, *result.lists], u.numel())
    rest = (gather(mean, indices) - lookup(indices, result)) * size
    return Entries(indices, gather(u, indices) - rest)


def _of_segment(updates: Sequence[Update], regions: Sequence[Context], segment: Segment) -> Update:
    """Join the updates of all regions to one update of the segment."""
    if isinstance(updates[0], Tensor):
        return torch.cat([update for update in updates if isinstance(update, Tensor)])
    indices, values = [], []
    for update, region in zip(updates, regions, strict=True):
        assert isinstance(update, Entries)
        part = region.segment
        indices.append(
            torch.where(update.indices < part.numel, update.indices + (part.start - segment.start), segment.numel)
        )
        values.append(update.values)
    # Indices are ascending, because regions follow each other.
    return Entries(*drop_empty((torch.cat(indices), torch.cat(values)), segment.numel))
