"""Communication-efficient data-parallel training for PyTorch Lightning.

import lightning_sparse  # makes the strategy names known
Trainer(strategy="gaussiank_ddp")
"""

import logging

from lightning_sparse.aggregators import NonFiniteGradient
from lightning_sparse.comm import Comm, ProcessGroupComm, RankFailure, simulate
from lightning_sparse.hooks import attach
from lightning_sparse.methods import METHODS, Method, method
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies import SparseDDPStrategy

# As Lightning does with its own logger: what it has to say shows, unless the program has set up logging itself.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.INFO)
if not logging.root.hasHandlers():
    _logger.addHandler(logging.StreamHandler())
    _logger.propagate = False

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "Comm",
    "Method",
    "NonFiniteGradient",
    "ProcessGroupComm",
    "RankFailure",
    "Reducer",
    "SparseDDPStrategy",
    "attach",
    "method",
    "simulate",
]
