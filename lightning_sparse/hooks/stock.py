"""Leaves gradients to the dense averages of DDP or FSDP2, in a session with other ranks that explains failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.comm.broadcast import broadcast_differing
from lightning_sparse.comm.worker import Worker
from lightning_sparse.gradients import REDUCIBLE
from lightning_sparse.hooks.base import Exchanger
from lightning_sparse.hooks.ddp import reduced_parameters
from lightning_sparse.hooks.session import Session
from lightning_sparse.memory import NoMemory
from lightning_sparse.methods import method
from lightning_sparse.options import ReducerOptions
from lightning_sparse.shards import average_gradients, groups_of, local
from lightning_sparse.updates.parameters import described


@dataclass(frozen=True)
class _Unused(NoMemory):
    """Memory of a reducer that gets no gradients."""

    state = ()  # type: ignore[assignment]


COUNTING = replace(method("dense"), memory=_Unused())
"""Only counts bytes."""


class StockExchanger(Exchanger):
    """Counts the steps and the bytes of dense averages of gradients, which other code computes in backward.

    Args:
        params: this rank's part of the trained parameters, by name.
        options: options of the reducer, which has no work.
        note: one sentence for the summary of a run.
        share: share of the bytes of dense all-reduce in fp32 that ranks send in each step; 0 if other code counts them.
        **session: further arguments of the `Session`.
    """

    is_consistent, note = True, ""

    def __init__(
        self, params: Mapping[str, Tensor], options: ReducerOptions, note: str, share: float = 1.0, **session: Any
    ) -> None:
        self.note, self._share = note, share
        device = next(iter(params.values())).device
        # The reducer only counts bytes, as fp32. It refuses other dtypes, which dense averages support.
        counted = {
            name: x if x.dtype in REDUCIBLE else torch.empty((), device=device).expand(x.nbytes // 4)
            for name, x in params.items()
        }
        self.session = Session(lambda: counted, COUNTING, options, device=device, **session)
        self._responder = Worker(look=self.session.look)
        self._responder.start()

    def count_step(self) -> None:
        """Count a step, and the bytes that each step sends."""
        self.reducer.finish_step()
        dense = self.reducer.routing.dense_nbytes
        self.comm.dense_bytes += dense
        self.count_bytes(round(dense * self._share))

    def count_bytes(self, nbytes: int) -> None:
        """Count bytes that this rank sends."""
        self.comm.sent_bytes += nbytes

    def close(self) -> None:
        """Leave the group. It may be called twice, and after a failure."""
        self._responder.end()
        self.session.mark_done()
        self.session.finish(failed=False)


def count_ddp(
    ddp: DistributedDataParallel,
    options: ReducerOptions,
    timeout: timedelta | None,
    *,
    from_rank_0: Mapping[str, Tensor],
    in_bfloat16: bool = False,
) -> StockExchanger:
    """Return a counter of DDP's all-reduce.

    Args:
        ddp: the wrapped model, without a communication hook.
        options: options of the reducer, which has no work.
        timeout: time to wait for other ranks; None takes the group's.
        from_rank_0: tensors to broadcast from rank 0, by name, because `ddp` was made with init_sync=False.
        in_bfloat16: whether the sums are computed and sent in bfloat16, by torch's `bf16_compress_hook`.
    """
    note, share = "DDP's all-reduce averages gradients.", 1.0
    if in_bfloat16:
        note, share = "DDP's all-reduce averages gradients in bfloat16.", 0.5
    counter = StockExchanger(
        reduced_parameters(ddp),
        options,
        note,
        share,
        group=ddp.process_group,
        timeout=timeout,
        settings=lambda: {"parameters and buffers": described(from_rank_0)},
    )
    try:
        broadcast_differing(counter.comm, list(from_rank_0.values()), ddp.device)
    except BaseException as error:
        counter.session.fail(error)
        counter.close()
        raise
    if in_bfloat16:
        ddp.register_comm_hook(None, _in_bfloat16)
    return counter


def _in_bfloat16(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Call torch's hook. Without NCCL, DDP refuses it by its name, but gloo can add bfloat16."""
    return bf16_compress_hook(state, bucket)


def average_shards(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: ReducerOptions,
    group: dist.ProcessGroup,
    timeout: timedelta | None,
) -> StockExchanger:
    """Let replicas of a sharded model average gradients, and return a counter. All ranks of the default group call it.

    FSDP2 averages in each backward pass, and a step may have several.

    Args:
        model: the model, see `average_gradients`.
        options: options of the reducer, which has no work.
        group: the ranks that hold the same part of the model.
        timeout: time to wait for other ranks; None takes the group's.
    """
    params = {name: local(param).detach() for name, param in model.named_parameters() if param.requires_grad}
    note, groups = "Replicas average gradients in backward.", lambda: groups_of(optimizers)
    counter = StockExchanger(
        params, options, note, 0.0, group=dist.group.WORLD, part=group, timeout=timeout, groups=groups
    )
    average_gradients(model, group, counter.count_bytes)
    return counter
