"""Scikit-learn's handwritten digits. Programs without them do not need scikit-learn."""

from __future__ import annotations

from typing import NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

FOLDS = 5


class Split(NamedTuple):
    """Images, fp32 (n, 1, 8, 8) with values from 0 to 1, and labels, int64 (n)."""

    images: Tensor
    labels: Tensor


def digits(seed: int | None = 0) -> tuple[Split, Split]:
    """Return 1,500 handwritten digits for training and 297 for testing, shuffled unless the seed is None."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    if seed is not None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        images, labels = images[order], labels[order]
    return Split(images[:1500], labels[:1500]), Split(images[1500:], labels[1500:])


class Digits(pl.LightningDataModule):
    """The 1,797 digits of `sklearn.datasets.load_digits`. One of five folds is held out.

    The split is stratified and always the same. Fold 0 has 360 digits, which two, three, four or five workers share
    without a remainder. So no digit counts twice in the accuracy. Lightning adds the distributed sampler.

    Args:
        batch_size: number of images per worker and step.
        fold: number of the fold for validation, 0 to 4.
    """

    def __init__(self, batch_size: int = 32, fold: int = 0) -> None:
        super().__init__()
        if fold not in range(FOLDS):
            raise ValueError(f"Digits(fold={fold}): fold must be in 0 to {FOLDS - 1}.")
        self.batch_size = batch_size
        self.fold = fold

    def setup(self, stage: str | None = None) -> None:
        """Split the digits, and standardise both parts with the training part's mean and standard deviation."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import StratifiedKFold

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
        labels = torch.tensor(digits.target)
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(digits.data, digits.target)
        self.train_indices, self.val_indices = [(torch.tensor(a), torch.tensor(b)) for a, b in folds][self.fold]
        mean, std = images[self.train_indices].mean(), images[self.train_indices].std()
        images = (images - mean) / std
        self.train_set = TensorDataset(images[self.train_indices], labels[self.train_indices])
        self.val_set = TensorDataset(images[self.val_indices], labels[self.val_indices])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return shuffled batches, without a smaller last one, because one image has no batch statistics."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the held-out digits in fixed order."""
        return DataLoader(self.val_set, 180)
