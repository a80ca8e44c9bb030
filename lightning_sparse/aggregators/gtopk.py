"""GlobalTopK: the k largest entries of the sum over all ranks, in O(k log P)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import (
    Aggregator,
    first_to_blame,
    header,
    intact,
    not_finite,
    out_of_step,
    packed,
    unpacked,
    without_zeros,
)
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.context import Context
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import at, coalesce
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class GlobalTopK(Aggregator):
    """Merges the ranks' selections pair by pair, and keeps the k largest each time (Shi et al. 2019, arXiv 1901.04359).

    With Q the largest power of two that is no larger than P:

    1. Rank Q + i sends its entries to rank i, which merges them into its own: adds up, keeps the k largest.
    2. In round j of log₂ Q, ranks i and i xor 2ʲ swap what they have, and both merge it, to the same result.
    3. Rank i sends the result to rank Q + i.

    An entry of mine that is not in the result stays with me. One that is, but was dropped in a merge while other
    ranks' parts of it came through, is returned to the lowest rank of those that merged: so nothing is lost, which the
    published scheme does not ensure.
    """

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        assert isinstance(compressor, Sparsifier)
        rank, half = comm.rank, 1 << comm.size.bit_length() - 1
        k = compressor.target(segment.numel, ctx.density)
        payload = compressor.compress(u, segment, ctx)
        mine = compressor.unpack(payload, segment, ctx)
        fingerprint, wrong = header(payload, u, segment, ctx).tolist()
        blame = (rank, wrong)
        # Divided before they are added, so that sums stay in range.
        result, returned = Entries(mine.indices, mine.values / comm.size), []

        def swapped(peer: int, owner: bool) -> Entries:
            nonlocal blame, result
            parts = (
                torch.tensor([fingerprint, *blame], device=u.device),
                *compressor.pack(result, segment, ctx),
            )
            rounded = compressor.unpack(parts[1:], segment, ctx)
            if owner:
                returned.append(Entries(result.indices, result.values - rounded.values))
            result = rounded
            words, *theirs = unpacked(intact(comm.exchange(packed(parts), peer), comm), parts)
            their_fingerprint, *their_blame = words.tolist()
            if their_fingerprint != fingerprint:
                raise out_of_step(peer, rank, segment, ctx.step)
            blame = first_to_blame(blame, tuple(their_blame))
            return compressor.unpack(tuple(theirs), segment, ctx)

        def merge(lower: Entries, upper: Entries) -> Entries:
            indices, values = coalesce([lower, upper])
            kept = topk_indices(values, k)
            dropped = torch.ones(indices.numel(), dtype=torch.bool, device=u.device)
            dropped[kept] = False
            returned.append(Entries(indices[dropped], values[dropped]))
            return Entries(indices[kept], values[kept])

        partner = next((other for other in (rank - half, rank + half) if 0 <= other < comm.size), rank)
        if half < comm.size:
            theirs = swapped(partner, True)
            if rank < partner:
                result = merge(result, theirs)
        for bit in (1 << j for j in range(half.bit_length() - 1)):
            # Those that agree in all higher bits hold the same; the lowest of them owns what is lost of it.
            theirs = swapped(rank ^ bit if rank < half else rank, rank < half and not rank & bit - 1)
            if rank < half:
                result = merge(theirs, result) if rank & bit else merge(result, theirs)
                if rank & (2 * bit - 1):
                    returned.pop()  # the lowest of the group has it
        if half < comm.size:
            theirs = swapped(partner, rank == 0)
            result = theirs if rank >= half else result
        if blame[1]:
            raise not_finite(blame[1], blame[0], segment, ctx.step)
        used = at(result.indices, mine)
        for indices, values in returned:
            used += at(result.indices, Entries(indices, values * -comm.size))
        return (result,), without_zeros(Entries(result.indices, used))

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * self.rounds(size)

    def rounds(self, size: int) -> int:
        half = 1 << size.bit_length() - 1
        return half.bit_length() - 1 + 2 * (half < size)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sparsifier) and not compressor.summable
