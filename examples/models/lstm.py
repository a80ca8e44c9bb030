"""A recurrent network for bytes."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """A byte embedding, an LSTM that starts each sequence from zero, and a linear output.

    >>> sum(p.numel() for p in LSTM().parameters())
    1020160

    Args:
        embedding: width of the byte embedding.
        width: of each LSTM layer.
        layers: number of LSTM layers.
    """

    def __init__(self, embedding: int = 128, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte; int64 (batch, length) becomes (batch, length, 256)."""
        hidden, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(hidden)
        return logits
