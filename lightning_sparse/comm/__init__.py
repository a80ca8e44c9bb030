"""Communication between ranks: `ProcessGroupComm` uses torch.distributed, `simulate` uses threads."""

from lightning_sparse.comm.base import POLL, Comm, RankFailure
from lightning_sparse.comm.process_group import ProcessGroupComm
from lightning_sparse.comm.simulate import simulate
from lightning_sparse.comm.termination import Termination

__all__ = ["POLL", "Comm", "ProcessGroupComm", "RankFailure", "Termination", "simulate"]
