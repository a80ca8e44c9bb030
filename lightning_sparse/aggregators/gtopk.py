"""GlobalTopK: the k largest entries of the sum over all ranks, in O(k log P)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.checks import damaged, header, look, not_finite, out_of_step
from lightning_sparse.aggregators.messages import checksum, packed, unpacked
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors import Compressor, Sparsifier
from lightning_sparse.compressors.base import Agreed, Entries, Payload
from lightning_sparse.context import Context
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.write_back import at, coalesce, compacted
from lightning_sparse.layout import Segment

NOBODY = (1 << 63) - 1
"""The blame where all is well."""
DAMAGED = -2
"""What a rank is blamed for that was sent something damaged, or of another step; what else, see `header`."""


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
        rank, half, step = comm.rank, 1 << comm.size.bit_length() - 1, ctx.step
        k = compressor.target(segment.numel, ctx.density)
        payload = compressor.compress(u, segment, ctx)
        mine = compressor.unpack(payload, segment, ctx)
        fingerprint, wrong = header(payload, u, segment, ctx)
        # One number says who is to blame for what; the least of all is told, which the lowest rank has.
        mark = (comm.ranks[rank] + 1) << 32
        blame = torch.where(wrong == 0, NOBODY, mark + wrong)
        # Divided before they are added, so that sums stay in range.
        result, returned = Entries(mine.indices, mine.values / comm.size), []

        def swapped(peer: int, owner: bool) -> Entries:
            nonlocal blame, result
            payload = compressor.pack(result, segment, ctx)
            rounded = Entries(result.indices, compressor.values(payload)[: result.indices.numel()])
            if owner:
                returned.append(Entries(result.indices, result.values - rounded.values))
            result = rounded
            parts = (torch.stack([fingerprint, blame]), *payload)
            message = comm.sendrecv(packed(parts), peer)
            (theirs, their_blame), *their_payload = unpacked(message, parts)

            def judge(heard: list[int]) -> None:
                different, broken = heard
                if broken:
                    raise damaged(f"of rank {comm.ranks[peer]} at step {step}")
                if different:
                    raise out_of_step(comm.ranks[peer], comm.ranks[rank], segment, step)

            heard = torch.stack([theirs - fingerprint, checksum(message)])
            look(heard, judge, comm, ctx)
            # Where that is known only later, those that I swap with from now on must not take the step either.
            blame = torch.minimum(blame, torch.where(heard.any(), mark + DAMAGED, their_blame))
            return compressor.unpack(tuple(their_payload), segment, ctx)

        def merge(lower: Entries, upper: Entries) -> Entries:
            indices, values = coalesce([lower, upper], segment.numel)
            kept = topk_indices(values, k)
            returned.append(Entries(indices, values.index_fill(0, kept, 0)))  # what was dropped
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

        def judge_blame(difference: int) -> None:
            if not difference:
                return
            blamed = difference + NOBODY
            who = ((blamed - DAMAGED) >> 32) - 1
            what = blamed - ((who + 1) << 32)
            if what != DAMAGED:
                raise not_finite(what, who, segment, step)
            raise RankFailure(f"Rank {who} was sent something at step {step} that is corrupt, or of another step.")

        look(blame - NOBODY, judge_blame, comm, ctx)
        used = at(result.indices, mine)
        for indices, values in returned:
            used += at(result.indices, Entries(indices, values * -comm.size))
        return (result,), Entries(*compacted(Entries(result.indices, used), segment.numel))

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * self.rounds(size)

    def rounds(self, size: int) -> int:
        half = 1 << size.bit_length() - 1
        return half.bit_length() - 1 + 2 * (half < size)

    def supports(self, compressor: Compressor) -> bool:
        return isinstance(compressor, Sparsifier) and not compressor.summable
