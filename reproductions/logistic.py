"""Logistic regression with L2 regularisation on dense and sparse data, the task of the Mem-SGD paper."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import optimize, sparse, special
from sklearn.datasets import load_svmlight_file, make_classification
from torch import Tensor

from lightning_sparse.compressors.base import Entries, Update


class Logistic:
    """f(x) = mean log(1 + exp(−y_i a_iᵀx)) + λ/2·‖x‖² with λ = 1/n over n examples.

    A call with x and a generator returns the gradient of a random example's loss, without the L2 term. The gradient is
    `Entries` if the data are sparse.

    Attributes:
        rows: the a_i, fp32 (n, d), an array or a CSR matrix.
        labels: the y_i, ±1.
        l2: λ.
    """

    def __init__(self, rows: Any, labels: Any) -> None:
        self.rows, self.labels = rows, labels
        self.examples, self.numel = rows.shape
        self.l2 = 1 / self.examples
        self.sparse = sparse.issparse(rows)
        if self.sparse:
            self._starts = rows.indptr.tolist()
            self._indices, self._values = torch.from_numpy(rows.indices).long(), torch.from_numpy(rows.data)
        else:
            self._values = torch.from_numpy(rows)
        self._signs = labels.tolist()

    def __call__(self, x: Tensor, generator: torch.Generator) -> Update:
        return self.gradient(x, int(torch.randint(self.examples, (), generator=generator)))

    def gradient(self, x: Tensor, example: int) -> Update:
        """Return the gradient of one example's loss, without the L2 term."""
        sign = self._signs[example]
        if self.sparse:
            place = slice(self._starts[example], self._starts[example + 1])
            indices, row = self._indices[place], self._values[place]
            return Entries(indices, row * slope(sign * float(row @ x[indices]), sign))
        row = self._values[example]
        return row * slope(sign * float(row @ x), sign)

    def loss(self, x: Any) -> float:
        """Return f(x)."""
        return float(np.logaddexp(0, -self.labels * (self.rows @ x)).mean() + self.l2 / 2 * (x @ x))

    @cached_property
    def minimum(self) -> float:
        """The smallest f(x), found by L-BFGS."""

        def both(x: Any) -> tuple[float, Any]:
            slopes = -self.labels * special.expit(-self.labels * (self.rows @ x)) / self.examples
            return self.loss(x), self.rows.T @ slopes + self.l2 * x

        options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
        return float(optimize.minimize(both, np.zeros(self.numel), jac=True, method="L-BFGS-B", options=options).fun)


def slope(margin: float, sign: float) -> float:
    """Return the derivative of log(1 + exp(−y·s)) with respect to s, at the margin y·s."""
    # The exponent is negative in both branches, so no overflow is possible.
    return -sign / (1 + math.exp(margin)) if margin < 0 else -sign * math.exp(-margin) / (1 + math.exp(-margin))


def unit(rows: Any) -> Any:
    """Return the rows divided by their 2-norms, in fp32."""
    norms = np.sqrt(np.asarray((rows.multiply(rows) if sparse.issparse(rows) else rows**2).sum(1)).ravel())
    scales = 1 / np.where(norms > 0, norms, 1)
    scaled = sparse.diags(scales) @ rows if sparse.issparse(rows) else rows * scales[:, None]
    return scaled.astype(np.float32)


def dense_data(examples: int, numel: int, seed: int) -> Logistic:
    """Return data like "epsilon" from scikit-learn's `make_classification`: standardised, with rows of norm 1."""
    informative = max(2, numel // 10)
    rows, labels = make_classification(
        examples, numel, n_informative=informative, n_redundant=0, flip_y=0.05, random_state=seed
    )
    return Logistic(unit((rows - rows.mean(0)) / rows.std(0)), 2.0 * labels - 1)


def sparse_data(examples: int, numel: int, seed: int) -> Logistic:
    """Return data like "rcv1": texts of about 70 out of `numel` words, whose frequencies follow a power law.

    A word's weight is the logarithm of its rarity, as in tf-idf. Rows have norm 1. The labels come from a linear model
    with a normal coefficient for each word; 5 % of the labels are flipped.
    """
    random = np.random.default_rng(seed)
    shares = 1 / (np.arange(numel) + 10.0)
    shares /= shares.sum()
    lengths = np.clip(random.lognormal(math.log(60), 0.6, examples), 5, numel / 4).astype(int)
    rows = np.repeat(np.arange(examples), lengths)
    words = random.choice(numel, len(rows), p=shares)
    counts = sparse.csr_matrix((np.ones(len(rows)), (rows, words)), (examples, numel))  # sums duplicates
    counts.data = 1 + np.log(counts.data)
    matrix = sparse.csr_matrix(unit(counts @ sparse.diags(-np.log(shares))))
    margins = matrix @ random.standard_normal(numel)
    labels = np.where((margins > np.median(margins)) ^ (random.random(examples) < 0.05), 1.0, -1.0)
    return Logistic(matrix, labels)


def data_from(path: Path) -> Logistic:
    """Return the data of a file in svmlight format, with rows divided by their norms.

    Raises:
        ValueError: the file does not exist, is not in svmlight format, or does not have two classes.
    """
    if not path.is_file():
        raise ValueError(f"--data {path}: there is no such file; give one in svmlight format, or leave --data out.")
    try:
        rows, labels = load_svmlight_file(str(path), dtype=np.float32)
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--data {path}: not in svmlight format, `label index:value …` in each line ({error})."
        ) from None
    if not (np.isfinite(rows.data).all() and np.isfinite(labels).all()):
        raise ValueError(f"--data {path}: has numbers that are not finite.")
    classes = np.unique(labels)
    if len(classes) != 2:
        raise ValueError(f"--data {path}: has {len(classes)} different labels; logistic regression needs two.")
    signs = np.where(labels == classes[1], 1.0, -1.0)
    dense = rows.nnz > rows.shape[0] * rows.shape[1] / 4
    return Logistic(unit(rows.toarray() if dense else rows), signs)
