"""Where the parts of a message lie in it, for kernels that write them there; see `framing.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HEADER_BYTES = 16
"""Bytes of fingerprint and status at the start of a message."""
CHECKSUM_BYTES = 8
"""Bytes of the checksum at the end of a message."""


def aligned(nbytes: int) -> int:
    """Return how many bytes a part takes in a message: a multiple of 8."""
    return (nbytes + 7) // 8 * 8


class Parts(tuple[Tensor, ...]):
    """Zeros for what is sent, which lie in a message already, so that `framing.seal` need not copy them.

    Attributes:
        messages: with room for header and checksum; None once it is sealed.
        starts: of the parts, in bytes.
    """

    messages: Tensor | None
    starts: list[int]

    @staticmethod
    def of(lead: Sequence[int], lengths: Sequence[tuple[int, torch.dtype]], device: torch.device) -> Parts:
        """Return tensors of (*lead, length), with one message for all, or with `lead` for each row."""
        starts = [HEADER_BYTES]
        for length, dtype in lengths:
            starts.append(starts[-1] + aligned(length * dtype.itemsize))
        messages = torch.zeros(*lead, starts[-1] + CHECKSUM_BYTES, dtype=torch.uint8, device=device)
        parts = Parts(
            messages[..., start : start + length * dtype.itemsize].view(dtype)
            for start, (length, dtype) in zip(starts, lengths, strict=False)
        )
        parts.messages, parts.starts = messages, starts
        return parts

    def words(self, index: int) -> Tensor:
        """Return a part, and what lies behind it, as words of 4 bytes: parts are filled up with zeros to 8."""
        assert self.messages is not None
        return self.messages.view(torch.int32)[..., self.starts[index] // 4 :]
