"""Networks of papers on compression: ResNet-20 and VGG-16 for small images, and an LSTM for text."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Stages of VGG-16: channels and number of convolutions. After each stage, a pooling layer halves the image."""


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut that has no parameters."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.extra_channels = channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (batch, in_channels, h, w) becomes (batch, channels, h / stride, w / stride)."""
        out = functional.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        # Option A of He et al.: if the shape changes, drop every other pixel and add channels of zeros.
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))
        return functional.relu(out + shortcut)


class ResNet20(nn.Module):
    """ResNet-20 for small images (He et al. 2015, arXiv 1512.03385, section 4.2) with 0.27 M parameters.

    It has three stages of three blocks. The second and the third stage halve the image and double the channels. A
    global average at the end allows images of any size from 4x4.

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
        """Return the logits: (batch, in_channels, h, w) becomes (batch, num_classes)."""
        features = self.blocks(self.stem(x)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


class VGG16(nn.Module):
    """VGG-16 (Simonyan and Zisserman 2014, arXiv 1409.1556) in its form for CIFAR-10, with 14.7 M parameters.

    It has thirteen convolutions with batch normalisation, which the original lacks. It has one linear layer instead of
    three, because five pooling layers leave one pixel.

    >>> sum(p.numel() for p in VGG16().parameters())
    14724042

    Args:
        in_channels: channels of the images, 1 for grey and 3 for colour.
        num_classes: number of outputs.
        width: channels of the first convolution.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for stage, count in VGG_STAGES:
            for _ in range(count):
                wide = stage * width // 64
                # A bias is unnecessary, because the normalisation subtracts the mean.
                conv = nn.Conv2d(channels, wide, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(conv.weight)
                layers += [conv, nn.BatchNorm2d(wide), nn.ReLU()]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits: (batch, in_channels, 32, 32) becomes (batch, num_classes)."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


class LSTM(nn.Module):
    """A byte embedding, an LSTM that starts each sequence from zero, and a linear output.

    >>> sum(p.numel() for p in LSTM().parameters())
    1020160

    Args:
        embedding: width of the byte embedding.
        width: width of each LSTM layer.
        layers: number of LSTM layers.
    """

    def __init__(self, embedding: int = 128, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte: int64 (batch, length) becomes (batch, length, 256)."""
        hidden, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(hidden)
        return logits
