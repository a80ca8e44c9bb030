"""CIFAR-10 (Krizhevsky 2009) from a local folder, in either of its published layouts."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# Folder, files of the training set, file of the test set.
LAYOUTS = (
    ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], "test_batch"),
    ("cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"),
)
PIXELS = 3 * 32 * 32
# Statistics of the training images per channel, in [0, 1].
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PADDING = 4


class CIFAR10(pl.LightningDataModule):
    """The 60,000 colour images of CIFAR-10 in ten classes. The last tenth of the training set is for validation.

    Training images are padded by 4 pixels, cropped at random, and flipped at random, on the device.

    Args:
        path: folder that contains `cifar-10-batches-py` (the Python version) or `cifar-10-batches-bin` (the binary
            version), or one of these folders.
        batch_size: number of images per worker and step.
        augment: whether training images are cropped and flipped.

    Raises:
        FileNotFoundError: the images do not exist.
    """

    def __init__(self, path: str = "data", batch_size: int = 64, augment: bool = True) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.augment = augment
        # Find the files here, not in `setup`, so that a wrong path is reported before processes start.
        self.train_files, self.test_file = find(Path(path))

    def setup(self, stage: str | None = None) -> None:
        """Read the images, uint8 (count, 3, 32, 32), and the labels, int64 (count,)."""
        if stage != "test":
            parts = [read(file) for file in self.train_files]
            images, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            held_out = len(images) // 10
            self.train_set = TensorDataset(images[:-held_out], labels[:-held_out])
            self.val_set = TensorDataset(images[-held_out:], labels[-held_out:])
        if stage in ("test", None):
            self.test_set = TensorDataset(*read(self.test_file))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches, without a smaller last one."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the held-out training images in fixed order."""
        return DataLoader(self.val_set, 250)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the test images in fixed order."""
        return DataLoader(self.test_set, 250)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Return fp32 images with values of about N(0, 1), and the labels."""
        images, labels = batch
        images = images / 255
        images = (images - images.new_tensor(MEAN).view(3, 1, 1)) / images.new_tensor(STD).view(3, 1, 1)
        if self.augment and self.trainer is not None and self.trainer.training:
            images = crop_and_flip(images)
        return images, labels


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image, (batch, channels, h, w), by up to 4 pixels with zero padding, and mirror it at random."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (PADDING,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (batch, channels, 9, 9, h, w), a view
    down, right = torch.randint(2 * PADDING + 1, (2, count), device=images.device)
    moved = windows[torch.arange(count, device=images.device), :, down, right]
    mirrored = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, moved.flip(3), moved)


def find(path: Path) -> tuple[list[Path], Path]:
    """Return the training files and the test file."""
    looked = []
    for folder, train, test in LAYOUTS:
        for place in (path / folder, path):
            if all((place / name).is_file() for name in (*train, test)):
                return [place / name for name in train], place / test
        looked.append(f"{(path / folder).absolute()} for {train[0]} to {train[-1]} and {test}")
    raise FileNotFoundError(
        f"CIFAR10(path={str(path)!r}): no images. Looked in {', and in '.join(looked)}. Get the Python or the binary "
        f"version from {SOURCE}, unpack it, and give the folder that it was unpacked in."
    )


def read(file: Path) -> tuple[Tensor, Tensor]:
    """Return the images of one file, uint8 (count, 3, 32, 32), and their labels, int64 (count,)."""
    images, labels = _read_binary(file) if file.suffix == ".bin" else _read_pickle(file)
    if len(images) == 0 or len(images) != len(labels) or images.shape[1:] != (PIXELS,) or labels.max() > 9:
        raise ValueError(
            f"{file} is not a file of CIFAR-10: it has images of shape {images.shape} and {len(labels)} labels. Get it "
            f"again from {SOURCE}."
        )
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(labels)


def _read_binary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a binary file. A record has one byte for the label and 3,072 bytes for the pixels: red, green, blue."""
    data = np.fromfile(file, dtype=np.uint8)
    if data.size % (1 + PIXELS):
        raise ValueError(
            f"{file} has {data.size} bytes, not a multiple of {1 + PIXELS}: it is incomplete. Get it again from "
            f"{SOURCE}."
        )
    records = data.reshape(-1, 1 + PIXELS)
    return records[:, 1:].copy(), records[:, 0].astype(np.int64)


def _read_pickle(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with file.open("rb") as stream:
        content = _Unpickler(stream, encoding="bytes").load()
    return content[b"data"], np.array(content[b"labels"], dtype=np.int64)


def _uint8(code: bytes | str, align: bool = False, copy: bool = False) -> np.dtype[Any]:
    # NumPy's own function accepts other types too, and warns about flags that Python 2 wrote.
    if code not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"an array of {code!r} instead of bytes")
    return np.dtype(np.uint8)


# All names in the published files.
NEEDED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _uint8,
}


class _Unpickler(pickle.Unpickler):
    """Loads only arrays of bytes. A pickle can name any function, and these files come from an untrusted source."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NEEDED:
            raise pickle.UnpicklingError(
                f"The file contains {module}.{name}, which files of CIFAR-10 do not: it was not read. Get it again "
                f"from {SOURCE}."
            )
        return NEEDED[module, name]
