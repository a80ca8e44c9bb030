"""A small Transformer decoder for bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with pre-normalisation and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (batch, length, width) like `x`."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A GPT for bytes with the architecture of GPT-2 (Radford et al. 2019). Embedding and output share their weights.

    GPT-2 small is `GPT(context=1024, width=768, layers=12, heads=12, vocabulary=50257)`.

    >>> sum(p.numel() for p in GPT().parameters())
    842496

    Args:
        context: length of the longest sequence in tokens.
        width: width of the residual stream.
        layers: number of layers.
        heads: number of attention heads per layer; it must divide the width.
        vocabulary: number of different tokens; 256 for bytes.
    """

    def __init__(
        self, context: int = 128, width: int = 128, layers: int = 4, heads: int = 4, vocabulary: int = 256
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"GPT(width={width}, heads={heads}): heads must divide the width.")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Initialise additions to the residual stream with smaller weights, because they are summed over layers.
                added = name.endswith(("merge.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token: int64 (batch, length) becomes (batch, length, vocabulary)."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"GPT(context={self.context}) got sequences of {length} tokens; give it a longer context.")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return functional.linear(self.norm(self.layers(x)), self.tokens.weight)
