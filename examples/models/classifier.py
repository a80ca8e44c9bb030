"""LightningModules that train networks for images."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy


class Classifier(pl.LightningModule):
    """Trains a classification network with cross-entropy, and logs loss and accuracy.

    Set the optimizer on the command line or in a subclass.

    Args:
        network: network that maps images, (batch, channels, h, w), to logits, (batch, num_classes).
        num_classes: number of logits.
    """

    def __init__(self, network: nn.Module, num_classes: int = 10) -> None:
        super().__init__()
        self.network = network
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (batch, num_classes)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of this worker's part of the batch."""
        images, labels = batch
        logits = self(images)
        loss = functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Compute loss and accuracy. The metrics are combined over all workers before they are logged."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val/loss", functional.cross_entropy(logits, labels), on_epoch=True, sync_dist=True)
        self.log("val/accuracy", self.val_accuracy, on_epoch=True, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Compute the accuracy on the test images."""
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test/accuracy", self.test_accuracy, on_epoch=True)


class OneCycleClassifier(Classifier):
    """A classifier with SGD, Nesterov momentum and one cycle of the learning rate, which changes in each step.

    Args:
        network: network that maps images to logits.
        num_classes: number of logits.
        max_lr: highest learning rate of the cycle, for the mean gradient of all workers.
        momentum: momentum of the optimizer.
        weight_decay: weight decay of the optimizer, for all parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int = 10,
        max_lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__(network, num_classes)
        self.max_lr = max_lr
        self.momentum = momentum
        self.weight_decay = weight_decay

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule with one cycle over the whole training."""
        optimizer = torch.optim.SGD(
            self.parameters(),
            self.max_lr,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        # The momentum is constant, because a changing momentum would change the weight of a delayed gradient.
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.max_lr, steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
