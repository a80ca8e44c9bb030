"""Where gradients are taken over: DDP's communication hook, its communication thread, and the session below it."""

from lightning_sparse.hooks.comm_thread import CommThread
from lightning_sparse.hooks.ddp import attach, start_comm_thread
from lightning_sparse.hooks.updates import UpdateExchange, attach_updates

__all__ = ["CommThread", "UpdateExchange", "attach", "attach_updates", "start_comm_thread"]
