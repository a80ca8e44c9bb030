"""Where gradients are taken over: DDP's communication hook, its communication thread, and the session below it."""

from lightning_sparse.hooks.comm_thread import CommThread
from lightning_sparse.hooks.ddp import attach, resolve_method, start_comm_thread

__all__ = ["CommThread", "attach", "resolve_method", "start_comm_thread"]
