"""The mean: by all-gather of payloads, or by all-reduce where they can be added up on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.checks import check_headers, header
from lightning_sparse.aggregators.messages import packed, unpacked
from lightning_sparse.comm import Comm
from lightning_sparse.compressors.base import Agreed, Compressor, Payload
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment


@dataclass(frozen=True)
class Mean(Aggregator):
    """Mean by all-gather: every rank receives all payloads and adds them up in rank order."""

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        payload = compressor.compress(u, segment, ctx)
        parts = (header(payload, u, segment, ctx), *payload)
        messages = torch.stack(comm.all_gather(packed(parts)))
        headers, *payloads = unpacked(messages, parts)
        check_headers(headers, segment, comm, ctx, messages=messages)
        return compressor.mean(tuple(payloads), segment, ctx), payload

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * (size - 1)

    def rounds(self, size: int) -> int:
        return size - 1


@dataclass(frozen=True)
class AllReduceMean(Aggregator):
    """Mean by all-reduce, for payloads that may be added up as they are: everything, or values at shared indices."""

    def __call__(
        self, u: Tensor, segment: Segment, compressor: Compressor, comm: Comm, ctx: Context
    ) -> tuple[Agreed, Payload]:
        payload = compressor.compress(u, segment, ctx)
        # Sums carry no header, so it goes ahead.
        check_headers(torch.stack(comm.all_gather(header(payload, u, segment, ctx))), segment, comm, ctx)
        # Summed in place where the payload is u itself: a dense segment must not cost a second buffer.
        total = tuple(part if part is u else part.clone() for part in payload)
        for part in total:
            # Divided before, as DDP does: equal to the last bit at two ranks, and sums stay in range.
            comm.all_reduce(part.div_(comm.size))
        return compressor.mean(tuple(part[None] for part in total), segment, ctx), payload

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return 2 * compressor.nbytes(segment, density) * (size - 1) / size

    def rounds(self, size: int) -> int:
        return 3 * (size - 1)

    def supports(self, compressor: Compressor) -> bool:
        return compressor.summable
