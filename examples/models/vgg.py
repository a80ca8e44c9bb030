"""The VGG network for images of 32x32 pixels."""

from __future__ import annotations

from torch import Tensor, nn

# Channels of the convolutions; "pool" halves the image.
LAYERS = (64, 64, "pool", 128, 128, "pool", *(256,) * 3, "pool", *(512,) * 3, "pool", *(512,) * 3, "pool")


class VGG16(nn.Module):
    """The VGG-16 of Simonyan and Zisserman (2014, arXiv 1409.1556) as CIFAR-10 has it: 14.7 M parameters.

    Thirteen convolutions, each with batch normalisation, which the original lacks; one linear layer instead of three,
    since five poolings leave one pixel.

    >>> sum(p.numel() for p in VGG16().parameters())
    14724042

    Args:
        in_channels: channels of the images, 1 for grey and 3 for colour.
        num_classes: number of outputs.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for layer in LAYERS:
            if isinstance(layer, int):
                # Without bias: the normalisation takes the mean out.
                conv = nn.Conv2d(channels, layer, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(conv.weight)
                layers += [conv, nn.BatchNorm2d(layer), nn.ReLU()]
                channels = layer
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; (batch, in_channels, 32, 32) becomes (batch, num_classes)."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits
