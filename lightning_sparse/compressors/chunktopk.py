"""ChunkTopK: selects the entries of largest magnitude in each chunk of 4,096 elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.compressors.base import Entries, Payload
from lightning_sparse.compressors.encoding import ValueFormat, decode_values, encode_values, value_bytes, value_parts
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.context import Context
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.chunks import CHUNK, check_ascending, chunktopk
from lightning_sparse.kernels.select import block_size
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class ChunkTopK(Sparsifier):
    """Sends the k = density · 4096 entries of largest magnitude of each chunk of 4,096 consecutive elements.

    DeMo (Peng et al. 2024, arXiv 2411.19870) and SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) select in this way.
    Every part of a model gets its share, even if the gradients of another part are larger. Chunks do not depend on each
    other. Each chunk sends at least one entry; a last chunk of n < 4,096 elements sends density · n, at least one. Of
    equal magnitudes the lowest index comes first. An index is sent as its 12-bit position in the chunk. The number of
    entries per chunk is known, so it is not sent.

        >>> import torch
        >>> u = torch.zeros(8192)
        >>> u[[5, 6, 7, 8000]] = torch.tensor([9.0, -8.0, 7.0, 0.1])
        >>> ChunkTopK(density=1 / 4096).select(u)
        tensor([   5, 8000])

    Attributes:
        density: fraction of entries to send, in (0, 1]; rounded to a multiple of 1/4096.
        value_format: "float32", "bfloat16", "int8", "int4", or "int2", which takes 2.5 bits as in SparseLoCo. The
            rounding error stays in the residual.
    """

    density: float = 0.001
    value_format: ValueFormat = "float32"

    exposes_nonfinite = True  # NaN counts as larger than infinity, and each chunk sends its largest entry
    depends_on_step = False

    def count(self, numel: int, density: float | None = None) -> int:
        full, rest = divmod(numel, CHUNK)
        return full * super().count(CHUNK, density) + super().count(rest, density)

    def block_stats(self, numel: int, density: float | None = None) -> BlockStats | None:
        block = block_size(CHUNK, self.count(CHUNK, density))
        return BlockStats(numel, block) if block > 1 and numel >= CHUNK else None

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        each, last = (self.count(numel, ctx.density) for numel in (CHUNK, u.numel() % CHUNK))
        return chunktopk(u, each, last, ctx.stats)

    def nbytes(self, segment: Segment, density: float | None) -> int:
        k = self.count(segment.numel, density)
        return 3 * -(-k // 2) + value_bytes(k, self.value_format)

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Entries]:
        indices, values = self.entries(u, ctx)
        encoded = encode_values(values, values.numel(), self.value_format)
        rounded = decode_values(encoded, values.numel(), self.value_format)
        return (*encoded, _pack_places(indices % CHUNK)), Entries(indices, rounded)

    def decode(self, payload: Payload, ctx: Context) -> Entries:
        numel = ctx.segment.numel
        each, k = self.count(CHUNK, ctx.density), self.count(numel, ctx.density)
        split = value_parts(k, self.value_format)
        places = _unpack_places(payload[split], k)
        indices = places + torch.arange(k, device=places.device) // each * CHUNK
        check_ascending(indices, numel)
        return Entries(indices, decode_values(payload[:split], k, self.value_format))


def _pack_places(places: Tensor) -> Tensor:
    """Pack int64 positions below 4096, 1-D, into bytes: two positions in three bytes."""
    first, other = torch.nn.functional.pad(places, (0, places.numel() % 2)).view(-1, 2).unbind(1)
    both = first | other << 12
    return torch.stack([both & 255, both >> 8 & 255, both >> 16], 1).to(torch.uint8).view(-1)


def _unpack_places(packed: Tensor, count: int) -> Tensor:
    """Return the int64 positions that `_pack_places` packed, (..., count)."""
    low, middle, high = packed.long().unflatten(-1, (-1, 3)).unbind(-1)
    both = low | middle << 8 | high << 16
    return torch.stack([both & 4095, both >> 12], -1).flatten(-2)[..., :count]
