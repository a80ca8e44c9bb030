"""Real data: digits and the standard library, which every machine has, and CIFAR-10 and plain text from a folder.

    Digits(batch_size=32)                       # images of 8x8 pixels, (batch, 1, 8, 8), about N(0, 1)
    CIFAR10("data", batch_size=64)              # images of 32x32 pixels, (batch, 3, 32, 32), about N(0, 1)
    StandardLibrary(length=128, batch_size=16)  # bytes and the bytes after them, both int64 (batch, 128)
    TextFolder("my_texts")                      # the same from your own text files

Lightning adds the distributed sampler, which shuffles with the run's seed and the epoch. So a resumed run continues in
the same order.
"""

from examples.data.cifar10 import CIFAR10
from examples.data.digits import Digits
from examples.data.text import StandardLibrary, TextFolder

__all__ = ["CIFAR10", "Digits", "StandardLibrary", "TextFolder"]
