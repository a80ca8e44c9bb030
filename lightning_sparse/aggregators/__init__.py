"""Aggregators."""

from lightning_sparse.aggregators.base import Aggregator, AllReduceMean, Mean, NonFiniteGradient

__all__ = ["Aggregator", "AllReduceMean", "Mean", "NonFiniteGradient"]
