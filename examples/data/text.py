"""Text as bytes: the source of the standard library, or the user's text files."""

from __future__ import annotations

import abc
import os
import sysconfig
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Third-party packages and tests.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive sequences of a text without overlap, each with its following bytes.

    Args:
        text: 1-D uint8.
        length: number of bytes per sequence.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        # The last byte of the text is only a target.
        return max(0, self.text.numel() - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the sequence and its following bytes, both int64 (length,)."""
        start = index * self.length
        part = self.text[start : start + self.length + 1].long()
        return part[:-1], part[1:]


class Text(pl.LightningDataModule, abc.ABC):
    """The concatenated bytes of several files. The end of the text is held out for validation.

    Args:
        length: number of bytes per sequence.
        batch_size: number of sequences per worker and step.
        val_fraction: fraction of the text for validation, in (0, 1).
        max_bytes: number of bytes after which reading stops; None reads all files.
    """

    def __init__(
        self, length: int = 128, batch_size: int = 16, val_fraction: float = 0.05, max_bytes: int | None = None
    ) -> None:
        super().__init__()
        if not 0 < val_fraction < 1:
            raise ValueError(f"{type(self).__name__}(val_fraction={val_fraction}): val_fraction must be in (0, 1).")
        self.length = length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes

    @abc.abstractmethod
    def files(self) -> list[Path]:
        """Return the files to read, in the same order on all ranks."""

    def setup(self, stage: str | None = None) -> None:
        """Read the files and split the text."""
        text = bytearray()
        for file in self.files():
            text += file.read_bytes()
            if self.max_bytes is not None and len(text) >= self.max_bytes:
                del text[self.max_bytes :]
                break
        held_out = int(self.val_fraction * len(text))
        data = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        self.train_set = Sequences(data[: len(text) - held_out], self.length)
        self.val_set = Sequences(data[len(text) - held_out :], self.length)
        if not len(self.train_set) or not len(self.val_set):
            raise ValueError(
                f"{type(self).__name__} found {len(text):,} bytes, of which {held_out:,} are held out: too few for "
                f"sequences of {self.length} in both parts. Give it more text, or a smaller length."
            )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled batches of sequences and following bytes, both int64 (batch, length)."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the held-out sequences in fixed order."""
        return DataLoader(self.val_set, self.batch_size)


class StandardLibrary(Text):
    """The Python source of the running interpreter's standard library, without its tests: about 12 million bytes.

    All machines need the same Python version, or their ranks train on different texts.

    Args:
        length: number of bytes per sequence.
        batch_size: number of sequences per worker and step.
        val_fraction: fraction of the text for validation, in (0, 1).
        max_bytes: number of bytes after which reading stops; None reads all files.
    """

    def files(self) -> list[Path]:
        """Return the source files, sorted by their path within the library."""
        library = Path(sysconfig.get_paths()["stdlib"])
        files: list[Path] = []
        for folder, subfolders, names in os.walk(library):
            subfolders[:] = set(subfolders) - EXCLUDED  # skip these subfolders, which hold many files
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(files, key=lambda file: file.relative_to(library).as_posix())


class TextFolder(Text):
    """The text files of a folder and its subfolders, sorted by path.

    Args:
        path: the folder.
        pattern: pattern of the files to read, as for `Path.rglob`.
        length: number of bytes per sequence.
        batch_size: number of sequences per worker and step.
        val_fraction: fraction of the text for validation, in (0, 1).
        max_bytes: number of bytes after which reading stops; None reads all files.
    """

    def __init__(
        self,
        path: str,
        pattern: str = "*.txt",
        length: int = 128,
        batch_size: int = 16,
        val_fraction: float = 0.05,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(length, batch_size, val_fraction, max_bytes)
        self.path = Path(path)
        self.pattern = pattern
        # Find the files here, not in `setup`, so that a wrong path is reported before processes start.
        if not self.files():
            raise FileNotFoundError(
                f"TextFolder({path!r}): {self.path.absolute()} has no files {pattern!r}. Put text files there, or give "
                f"another path or pattern."
            )

    def files(self) -> list[Path]:
        """Return the matching files, sorted by their path within the folder."""
        files = [file for file in self.path.rglob(self.pattern) if file.is_file()]
        return sorted(files, key=lambda file: file.relative_to(self.path).as_posix())
