"""A LightningModule that trains networks for text."""

from __future__ import annotations

import math

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class LanguageModel(pl.LightningModule):
    """Trains a network to predict the next byte, and logs loss (in nats), bits per byte and accuracy.

    Set the optimizer on the command line or in a subclass.

    Args:
        network: network that maps bytes, int64 (batch, length), to logits of the next bytes, (batch, length, 256).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.val_loss = MeanMetric()
        self.val_bits = MeanMetric()
        self.val_accuracy = MulticlassAccuracy(256, average="micro")

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, (batch, length, 256)."""
        logits: Tensor = self.network(tokens)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of this worker's part of the batch, in nats per byte."""
        tokens, following = batch
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Compute the metrics. They are combined over all workers before they are logged."""
        tokens, following = batch
        logits, following = self(tokens).flatten(0, 1), following.flatten()
        loss = functional.cross_entropy(logits, following)
        self.val_loss(loss, weight=following.numel())
        self.val_bits(loss / math.log(2), weight=following.numel())
        self.val_accuracy(logits, following)
        self.log("val/loss", self.val_loss)
        self.log("val/bits_per_byte", self.val_bits, prog_bar=True)
        self.log("val/accuracy", self.val_accuracy)
