"""A small residual network, and how Lightning trains it.

network = ResNet20(in_channels=1, num_classes=10, width=16)
module = Classifier(network, max_lr=0.1)
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.extra_channels = channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; (batch, in_channels, h, w) becomes (batch, channels, h / stride, w / stride)."""
        out = functional.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        # He et al.'s option A: where the shape changes, drop every other pixel and add channels of zeros.
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))
        return functional.relu(out + shortcut)


class ResNet20(nn.Module):
    """The ResNet-20 for small images of He et al. (2015, arXiv 1512.03385, section 4.2): 0.27 M parameters.

    Three stages of three blocks; the second and the third halve the image and double the channels. A global average
    at the end makes it fit images of any size from 4x4 on.

    >>> sum(p.numel() for p in ResNet20(in_channels=3).parameters())
    269722

    Args:
        in_channels: channels of the images, 1 for grey and 3 for colour.
        num_classes: number of outputs.
        width: channels of the first stage.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        blocks = [Block(width, width, 1) for _ in range(3)]
        for channels in (2 * width, 4 * width):
            blocks += [Block(channels // 2, channels, 2), Block(channels, channels, 1), Block(channels, channels, 1)]
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; (batch, in_channels, h, w) becomes (batch, num_classes)."""
        features = self.blocks(self.stem(x)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


class Classifier(pl.LightningModule):
    """Trains a network for classification with SGD and Nesterov momentum, one cycle of the learning rate.

    Args:
        network: maps images to logits.
        num_classes: number of logits.
        max_lr: top of the cycle, for the mean gradient of all workers.
        momentum: of the optimizer.
        weight_decay: of the optimizer, on every parameter.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int = 10,
        max_lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        self.network = network
        self.max_lr = max_lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")

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
        """Count right answers; the metric adds up over all workers before it is logged."""
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val/loss", functional.cross_entropy(logits, labels), on_epoch=True, sync_dist=True)
        self.log("val/accuracy", self.val_accuracy, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule of one cycle over the whole training, stepped with the optimizer."""
        optimizer = torch.optim.SGD(
            self.parameters(),
            self.max_lr,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        # The momentum stays where it is: cycling it would change what a delayed gradient is worth.
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.max_lr, steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
