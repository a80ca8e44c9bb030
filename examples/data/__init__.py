"""Real data: on every machine the digits and the standard library, from a folder CIFAR-10 and plain text.

    Digits(batch_size=32)                       # images of 8x8 pixels, (batch, 1, 8, 8), about N(0, 1)
    CIFAR10("data", batch_size=64)              # images of 32x32 pixels, (batch, 3, 32, 32), about N(0, 1)
    StandardLibrary(length=128, batch_size=16)  # bytes and the bytes after them, int64 (batch, 128) both
    TextFolder("my_texts")                      # the same from text of yours

Lightning adds the distributed sampler, which shuffles by the run's seed and the epoch, so a run that resumes goes on in
the same order.
"""

from examples.data.cifar10 import CIFAR10
from examples.data.digits import Digits
from examples.data.text import StandardLibrary, TextFolder

__all__ = ["CIFAR10", "Digits", "StandardLibrary", "TextFolder"]
