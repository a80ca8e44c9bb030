"""The bits that indices would need if their places were predicted."""

import math

import numpy as np
import pytest
import torch

from benchmarks.index_bits import History, index_bits, number_bits, subset_bits
from lightning_sparse.layout import Segment


def test_by_hand():
    segment = Segment(0, ("w", "b"), ((2, 4), (8,)), 0)
    found = index_bits(torch.tensor([0, 2]), segment, History())
    assert (found["numel"], found["entries"]) == (16, 2)
    assert found["uniform"] == pytest.approx(math.log2(16 * 15 / 2) / 2)
    assert found["tensors"] == pytest.approx(math.log2(8 * 7 / 2) / 2)
    # Of w's two rows, one has two entries and the other none: a bit each. Two of four elements are 6 choices.
    assert found["rows"] == pytest.approx((2 + math.log2(6)) / 2)
    # Two of w's four columns have one entry: a bit each, and a bit for the row of each entry. b has no entry.
    assert found["columns"] == pytest.approx((4 + 2) / 2)
    assert found["best"] == pytest.approx(min(found[key] for key in ("tensors", "rows", "columns")))


def test_a_history_of_one_row_predicts_it():
    segment, history = Segment(0, ("w",), ((10, 100),), 0), History()
    first = index_bits(torch.arange(0, 100, 10), segment, history)
    for _ in range(50):
        later = index_bits(torch.arange(5, 100, 10), segment, history)
    assert later["history"] < first["history"] - 2
    assert later["uniform"] == first["uniform"]


def test_numbers_and_subsets():
    assert subset_bits(np.array([4, 4]), np.array([2, 4])) == pytest.approx(math.log2(6))
    assert number_bits(np.array([0, 0, 0, 5])) == pytest.approx(3 * math.log2(4 / 3) + 2)
