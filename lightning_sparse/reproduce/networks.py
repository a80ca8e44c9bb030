"""The residual network for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


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
