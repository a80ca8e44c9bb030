"""Leaves gradients to DDP's all-reduce, in fp32 or bfloat16, in a session with other ranks that explains failures."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.comm.peers import Responder
from lightning_sparse.hooks.base import Exchanger
from lightning_sparse.hooks.ddp import trainable_parameters
from lightning_sparse.hooks.session import Session
from lightning_sparse.methods import method
from lightning_sparse.options import ReducerOptions


class StockExchanger(Exchanger):
    """Counts the steps and the bytes of stock all-reduce, which DDP runs.

    Args:
        ddp: the wrapped model, without a communication hook. This object keeps no reference to it.
        options: options of the reducer, which has no work.
        timeout: time to wait for other ranks; None takes the group's.
        in_bfloat16: whether the sums are computed and sent in bfloat16, by torch's `bf16_compress_hook`.
    """

    is_consistent = True

    def __init__(
        self,
        ddp: DistributedDataParallel,
        options: ReducerOptions,
        timeout: timedelta | None,
        *,
        in_bfloat16: bool = False,
    ) -> None:
        params = trainable_parameters(ddp)
        self._session = Session(
            lambda: params,
            method("dense"),
            options,
            group=ddp.process_group,
            device=ddp.device,
            timeout=timeout,
        )
        self._responder = Responder(self._session.comm.respond)
        self._in_bfloat16 = in_bfloat16
        if in_bfloat16:
            # Without NCCL, DDP refuses torch's function, but gloo can add bfloat16.
            ddp.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))

    @property
    def note(self) -> str:
        return f"DDP's all-reduce averages gradients{' in bfloat16' if self._in_bfloat16 else ''}."

    def count_step(self) -> None:
        """Count a step and its bytes."""
        self.reducer.finish_step()
        self.comm.sent_bytes += round(self.reducer.routing.dense_nbytes / (2 if self._in_bfloat16 else 1))

    def drain(self) -> bool:
        """Return True: there are no residuals."""
        return True

    def close(self) -> None:
        """Leave the group. It may be called twice, and after a failure."""
        self._responder.end()
        self._session.mark_done()
        self._session.finish(failed=False)
