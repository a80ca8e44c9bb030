"""Communication-efficient data-parallel training for PyTorch Lightning.

import lightning_sparse  # registers the strategy names
Trainer(strategy="gaussiank_ddp")  # or Fabric
"""

from lightning_sparse.comm import Comm, ProcessGroupComm, RankFailure, simulate
from lightning_sparse.exchange import NonFiniteGradient
from lightning_sparse.hooks import attach, attach_updates, exchange_pending
from lightning_sparse.methods import METHODS, Method, method
from lightning_sparse.reducer import Reducer
from lightning_sparse.replica_checkpoint import load_replica, save_replica
from lightning_sparse.strategies import (
    AutoDDPStrategy,
    AutoHSDPStrategy,
    FabricSparseDDPStrategy,
    FabricSparseHSDPStrategy,
    SparseDDPStrategy,
    SparseHSDPStrategy,
)
from lightning_sparse.update_rule import UpdateRule

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "AutoDDPStrategy",
    "AutoHSDPStrategy",
    "Comm",
    "FabricSparseDDPStrategy",
    "FabricSparseHSDPStrategy",
    "Method",
    "NonFiniteGradient",
    "ProcessGroupComm",
    "RankFailure",
    "Reducer",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "UpdateRule",
    "attach",
    "attach_updates",
    "exchange_pending",
    "load_replica",
    "method",
    "save_replica",
    "simulate",
]
