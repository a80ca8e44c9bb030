"""Attaches a reducer to DDP's gradients or to optimizers' steps, and holds the session that both share."""

from lightning_sparse.hooks.comm_thread import CommThread, has_collectives
from lightning_sparse.hooks.ddp import attach, start_comm_thread
from lightning_sparse.hooks.session import tell_or_ask
from lightning_sparse.hooks.update_exchange import UpdateExchange
from lightning_sparse.hooks.updates import attach_updates, exchange_pending

__all__ = [
    "CommThread",
    "UpdateExchange",
    "attach",
    "attach_updates",
    "exchange_pending",
    "has_collectives",
    "start_comm_thread",
    "tell_or_ask",
]
