"""Aggregators."""

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.aggregators.gtopk import GlobalTopK
from lightning_sparse.aggregators.mean import AllReduceMean, Mean
from lightning_sparse.aggregators.oktopk import OkTopK
from lightning_sparse.aggregators.powersgd import PowerSGD
from lightning_sparse.aggregators.two_level import TwoLevel
from lightning_sparse.aggregators.two_pass import TwoPass

__all__ = [
    "Aggregator",
    "AllReduceMean",
    "GlobalTopK",
    "Mean",
    "OkTopK",
    "PowerSGD",
    "TwoLevel",
    "TwoPass",
]
