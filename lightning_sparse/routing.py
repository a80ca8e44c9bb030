"""The parts that exchange each segment: the method's, or dense parts if these send no more bytes."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from lightning_sparse.aggregators import Aggregator, AllReduceMean
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Identity
from lightning_sparse.context import Context
from lightning_sparse.layout import Layout, Segment
from lightning_sparse.methods import Method

log = logging.getLogger(__name__)
Parts = tuple[Compressor, Aggregator[Any]]
DENSE: Parts = (Identity(), AllReduceMean())


class Routing:
    """Chooses the method's parts or the dense parts for each segment, and counts bytes. It is equal on all ranks.

    It counts the bytes that a rank sends, without counts and headers.

    Args:
        comm: this rank's connection to the other ranks.
        dtypes: their dtypes, which ranks compare.

    Attributes:
        others: a digest of further settings that must be equal on all ranks in each exchange.
        last: the aggregator of each segment's last exchange, by the segment's index. Ranks are in sync if it is that of
            the present exchange.
        compared: the number of comparisons of gradients and the step of the last one, by the segment's index.
    """

    def __init__(self, method: Method, comm: Comm, layout: Layout, dtypes: Sequence[torch.dtype] = ()) -> None:
        self._method, self._comm, self._segments = method, comm, layout.segments
        self._settings = hashlib.sha256(repr((method, layout.digest, dtypes)).encode()).hexdigest()  # short
        self.others = 0
        self._logged: set[float | None] = set()
        self.last: dict[int, Aggregator[Any]] = {}
        self.compared: dict[int, tuple[int, int]] = {}

    def parts(self, segment: Segment, density: float | None) -> Parts:
        """Return the compressor and the aggregator of a segment at the given density."""
        return (self._method.compressor, self._method.aggregator) if self._pays(segment, density) else DENSE

    def fingerprint(self, ctx: Context, in_sync: bool) -> int:
        """Return a checksum of settings and counters, which must be equal on all ranks in each exchange."""
        index = ctx.segment.index
        counters = (ctx.step, ctx.density, index, in_sync, self.compared.get(index))
        equal = (self._settings, self.others, ctx.seed, *counters)
        return zlib.crc32(repr(equal).encode())

    def forget(self) -> None:
        """Forget the exchanges so far: ranks are no longer known to be in sync."""
        self.last.clear()
        self.compared.clear()

    def note_exchange(self, segment: Segment, aggregator: Aggregator[Any]) -> None:
        """Record that the aggregator has exchanged the segment, and count the bytes of a dense average of it."""
        self.last[segment.index] = aggregator
        self._comm.dense_bytes += self._dense_nbytes(segment)

    def dense_segments(self, density: float | None) -> list[Segment]:
        """Return the segments that fall back to dense at the given density."""
        return [segment for segment in self._segments if not self._pays(segment, density)]

    def log_dense(self, density: float | None) -> None:
        """Log on the first rank, once for each density, how many segments fall back to dense.

        It is a warning if all segments do so at the method's own density, not only during density warm-up.
        """
        if not self._comm.is_first or density in self._logged or isinstance(self._method.compressor, Identity):
            return
        self._logged.add(density)
        if dense := self.dense_segments(density):
            at = "" if density is None else f" at density {density:g}"
            elements, of = (sum(s.numel for s in segments) for segments in (dense, self._segments))
            nothing = elements == of and density == self._method.density
            lower = "" if density is None else "lower the density, or "
            instead = f" Nothing is compressed: {lower}use strategy='ddp'." if nothing else ""
            log.log(
                logging.WARNING if nothing else logging.INFO,
                f"{self._method.compressor!r}{at} would send at least as many bytes as dense gradients with "
                f"{self._comm.size} ranks: {elements:,} of {of:,} elements fall back to dense ({len(dense)} of "
                f"{len(self._segments)} segments).{instead}",
            )

    def nbytes(self, density: float | None) -> float:
        """Return the bytes of a step at the given density."""
        total = 0.0
        for segment in self._segments:
            compressor, aggregator = self.parts(segment, density)
            total += aggregator.nbytes(compressor, segment, density, self._comm.size)
        return total

    @property
    def dense_nbytes(self) -> float:
        """Bytes of a step with ring all-reduce in fp32; if hierarchical, a rank's share of its node's bytes."""
        return sum(map(self._dense_nbytes, self._segments))

    def _pays(self, segment: Segment, density: float | None) -> bool:
        """Return whether to use the method's parts: they send fewer bytes, or their result is not a mean."""
        size, method = self._comm.size, self._method
        if size == 1 or segment.numel == 0 or not method.aggregator.averages:
            return True
        return method.aggregator.nbytes(method.compressor, segment, density, size) < self._dense_nbytes(segment)

    def _dense_nbytes(self, segment: Segment) -> float:
        compressor, aggregator = DENSE
        return aggregator.nbytes(compressor, segment, None, self._comm.size) / self._method.aggregator.ranks_per_link
