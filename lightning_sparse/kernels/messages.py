"""The layout of messages, for kernels that write parts into them directly; see `framing.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HEADER_BYTES = 16
"""Number of bytes of fingerprint and status at the start of a message."""
CHECKSUM_BYTES = 8
"""Number of bytes of the checksum at the end of a message."""


def aligned(nbytes: int) -> int:
    """Return the number of bytes of a part in a message, a multiple of 8."""
    return (nbytes + 7) // 8 * 8


class Parts(tuple[Tensor, ...]):
    """Payload tensors, zeros at first, that are views of a message, so that `framing.seal` need not copy them.

    Attributes:
        messages: messages with room for header and checksum; None once they are sealed.
        starts: offset of each part in a message, in bytes.
    """

    messages: Tensor | None
    starts: list[int]

    @staticmethod
    def of(lead: Sequence[int], lengths: Sequence[tuple[int, torch.dtype]], device: torch.device) -> Parts:
        """Return zeros of the shapes (*lead, length). They share one message, or, with `lead`, one for each row."""
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
        """Return a part and the rest of the message as words of 4 bytes; zeros pad parts to a multiple of 8 bytes."""
        assert self.messages is not None
        return self.messages.view(torch.int32)[..., self.starts[index] // 4 :]
