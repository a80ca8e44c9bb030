"""The dense fallback: a segment goes dense if the method would send no less than dense gradients do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_sparse.aggregators import Aggregator, AllReduceMean
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Identity
from lightning_sparse.layout import Segment
from lightning_sparse.methods import Method

log = logging.getLogger(__name__)
Parts = tuple[Compressor, Aggregator[Any]]
DENSE: Parts = (Identity(), AllReduceMean())


class Routing:
    """Chooses the parts of a method, or dense ones, for each segment; the choice is equal on all ranks."""

    def __init__(self, method: Method, comm: Comm) -> None:
        self._method, self._comm = method, comm
        self._logged: set[float | None] = set()

    def parts(self, segment: Segment, density: float | None, segments: Sequence[Segment]) -> Parts:
        """Return the compressor and the aggregator of a segment, one of `segments`, which are looked at for the log."""
        if self.pays(segment, density):
            return self._method.compressor, self._method.aggregator
        if density not in self._logged:
            self._logged.add(density)
            dense = [other for other in segments if not self.pays(other, density)]
            if self._comm.rank == 0 and self._method.density is not None:
                log.info(
                    f"{self._method.compressor!r} at density {density:g} would send no less than dense gradients do "
                    f"among {self._comm.size} ranks: {sum(s.numel for s in dense):,} of "
                    f"{sum(s.numel for s in segments):,} elements go dense ({len(dense)} of {len(segments)} segments)."
                )
        return DENSE

    def pays(self, segment: Segment, density: float | None) -> bool:
        """Return whether the method's own parts are used: they send less, or their result is no mean."""
        size, method = self._comm.size, self._method
        if size == 1 or segment.numel == 0 or not method.aggregator.averages:
            return True
        return method.aggregator.nbytes(method.compressor, segment, density, size) < self.dense_nbytes(segment)

    def nbytes(self, segment: Segment, density: float | None) -> float:
        """Return the bytes that a rank sends for a segment, without counts and headers."""
        pays = self.pays(segment, density)
        compressor, aggregator = (self._method.compressor, self._method.aggregator) if pays else DENSE
        return aggregator.nbytes(compressor, segment, density, self._comm.size)

    def dense_nbytes(self, segment: Segment) -> float:
        """Return the bytes of a ring all-reduce in fp32; with two levels, a rank's share of its node's."""
        compressor, aggregator = DENSE
        return aggregator.nbytes(compressor, segment, None, self._comm.size) / self._method.aggregator.ranks_per_link
