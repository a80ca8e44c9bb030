"""Attaches a reducer to DDP's gradients or to optimizers' steps, and holds the session that both share."""

from lightning_sparse.hooks.base import Exchanger
from lightning_sparse.hooks.ddp import attach, exchange_gradients
from lightning_sparse.hooks.gradient_exchange import GradientExchanger, has_collectives
from lightning_sparse.hooks.handshakes import agree, report_errors_to_peers, report_or_diagnose
from lightning_sparse.hooks.update_exchange import UpdateExchanger
from lightning_sparse.hooks.updates import attach_updates, exchange_pending, exchange_updates

__all__ = [
    "Exchanger",
    "GradientExchanger",
    "UpdateExchanger",
    "agree",
    "attach",
    "attach_updates",
    "exchange_gradients",
    "exchange_pending",
    "exchange_updates",
    "has_collectives",
    "report_errors_to_peers",
    "report_or_diagnose",
]
