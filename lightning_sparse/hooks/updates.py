"""Exchanges the updates of optimizers, instead of gradients, in plain torch training loops.

    reducer = attach_updates(model, optimizer, "topk", density=0.01)
    for batch in batches:                       # on every rank
        optimizer.zero_grad()
        loss(model, batch).backward()           # the rank's own gradient: no DistributedDataParallel
        optimizer.step()                        # and the exchange: afterwards weights are equal on all ranks

`lightning_sparse.updates` has the arithmetic, and `update_exchange.py` the hooks of the optimizers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.hooks.handshakes import report_errors_to_peers
from lightning_sparse.hooks.misuse import (
    RefuseDDP,
    attached,
    check_optimizers,
    explain_failures,
    keep_attached,
    replaced,
)
from lightning_sparse.hooks.update_exchange import UpdateExchanger, exchange_of
from lightning_sparse.layout import Granularity
from lightning_sparse.methods import Method, method_options, resolve_method, resolve_updates
from lightning_sparse.options import Overlap, ReducerOptions, check, listed
from lightning_sparse.reducer import Reducer
from lightning_sparse.shards import AFTER_SHARDING, is_any_sharded, keep_gradients, parameters_of, reshard

log = logging.getLogger(__name__)


@torch.inference_mode(False)  # its state is updated in training
@torch.no_grad()
def attach_updates(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    method: str | Method = "topk",
    *,
    density: float | None = None,
    granularity: Granularity = "bucket",
    bucket_cap_mb: float = 25,
    local_steps: int | None = None,
    overlap: Overlap = "none",
    seed: int = 0,
    density_warmup: Sequence[float] | None = None,
    density_warmup_steps: int | None = None,
    broadcast_buffers: bool = True,
    timeout: timedelta | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Reducer:
    """Exchange the optimizers' updates of `model` after their steps. All ranks call it, before the first step.

    The model is not wrapped: each rank steps on its local gradient; if the method has `TwoLevel`, on the mean gradient
    of its node. The call broadcasts weights and buffers from rank 0. A second call for the same model, with other
    optimizers, replaces the first one.

    A model may be sharded by FSDP2 or tensor parallelism. Then each rank exchanges the updates of its shards with the
    other replicas. FSDP2 averages gradients within a replica only:

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters())
        attach_updates(model, optimizer, "topk", group=mesh["replicate"].get_group())

    The call then broadcasts weights and buffers from the first rank of each group. Later, buffers stay as they are on
    each rank, as with FSDP2.

    Args:
        model: the model, on its device.
        optimizer: its optimizer, or several of them.
        method: a name in `METHODS`, or a custom `Method`.
        density: fraction of entries to send, in (0, 1]; only with a name. None is 0.003 with two-bit values, after a
            density warm-up, and more with more than four ranks. A method with an `UpdateRule` has its own default.
        granularity: the unit of compression: "layer", "bucket" or "model".
        bucket_cap_mb: size of a "bucket" in MiB.
        local_steps: number of steps of an optimizer before each exchange; None takes the method's, mostly 1. With
            more than one, call `exchange_pending` before weights are evaluated or saved, and at the end.
        overlap: "next_step" exchanges during the next step, for links of high latency; see `UpdateRule`. Call
            `exchange_pending` in the same places. Only optimizers may change weights then.
        seed: the seed of all random choices; equal on all ranks.
        density_warmup: densities to use in turn before `density`, `density_warmup_steps` exchanges each; () is none.
            None is 8, 4 and 2 times the density, 15 exchanges each, if no density is given; otherwise it is none.
        density_warmup_steps: number of exchanges for each density of `density_warmup`.
        broadcast_buffers: whether rank 0 broadcasts its buffers at the start and after each exchange, as with
            DistributedDataParallel. Buffers of a sharded model are broadcast at the start only.
        timeout: time to wait for other ranks; None takes the process group's.
        group: the ranks that hold the same part of the model in other replicas, and exchange with this rank; None is
            all ranks. All ranks of the default process group call this function, each with its group.
        **options: further options of a method that is given by name, such as `value_format="int8"` of "topk".

    Returns:
        The reducer. Its `comm` counts bytes, and its `state_dict` returns the residuals.

    Raises:
        TypeError, ValueError: an option, a parameter or an optimizer is not supported; the message names it.
        RuntimeError: there is no process group.
        RankFailure: other ranks have different settings, or do not attach.
    """
    with report_errors_to_peers():
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"attach_updates(model={type(model).__name__}(...)): give the model itself, and then its optimizer. "
                f"DistributedDataParallel would send all gradients as well."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):  # a member of another group has no object
            raise TypeError(
                f"attach_updates(group={group!r:.80}): give a ProcessGroup that contains this rank, such as "
                f"mesh['replicate'].get_group(), or leave it out."
            )
        model = getattr(model, "_orig_mod", model)  # torch.compile returns a wrapper, which the caller may drop
        optimizers = check_optimizers(optimizer)
        reshard(model)
        check_all_stepped(model, optimizers)
        if check("overlap", overlap) == "backward":
            raise ValueError(
                "attach_updates(overlap='backward'): only SparseDDPStrategy exchanges updates during backward. Leave "
                "overlap out, set overlap='next_step', or train with SparseDDPStrategy."
            )
        if "clip_norm" in options:
            raise TypeError(
                "attach_updates has no option 'clip_norm': call torch.nn.utils.clip_grad_norm_ before "
                "optimizer.step(), at √P times the threshold for the mean of P ranks."
            )
        method_options("attach_updates", inspect.signature(attach_updates).parameters, method, options)
        reducer_options = ReducerOptions.of(locals())
        reducer_options.check_method(resolve_method(method, density, **options), counts_epochs=False)
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        method, reducer_options = resolve_updates(method, density, reducer_options, ranks=ranks, **options)
    if not dist.is_initialized():
        raise RuntimeError("attach_updates needs a process group: call torch.distributed.init_process_group before.")
    keep_gradients(model)  # replicas may have averaged them before
    exchange = exchange_updates(
        model,
        optimizers,
        method,
        reducer_options,
        local_steps=local_steps,
        overlap=overlap,
        buffers="start" if is_any_sharded(model) else "always" if broadcast_buffers else "never",
        group=group,
        timeout=timeout,
    )
    if exchange.comm.is_first:
        log.info(f"{exchange.reducer.method} on {exchange.comm.size} ranks. {exchange.note}")
        if group is not None and exchange.comm.size == 1 and exchange.reducer.method.compresses:
            log.warning(
                "attach_updates(group=...) with one replica sends nothing, but entries still wait in the residual. "
                "With one replica, train without attach_updates."
            )
    return exchange.reducer


def unstepped(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of a model's trained parameters that belong to none of the optimizers."""
    stepped = {*map(id, parameters_of(optimizers))}
    named = model.named_parameters()
    return [name for name, param in named if param.requires_grad and id(param) not in stepped]


def check_all_stepped(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError if a parameter of the model requires gradients and belongs to none of its optimizers."""
    if alone := [*map(repr, unstepped(model, optimizers))]:
        raise ValueError(
            f"{listed(alone)} require gradients but are in no optimizer whose updates are exchanged, so ranks would "
            f"drift apart in them. Pass all optimizers, attach_updates(model, [first, second], ...) or "
            f"fabric.setup(model, first, second), or freeze them by requires_grad_(False)."
            f"{AFTER_SHARDING * is_any_sharded(model)}"
        )


def exchange_updates(
    model: nn.Module, optimizers: Sequence[Optimizer], method: Method, options: ReducerOptions, **settings: Any
) -> UpdateExchanger:
    """Attach as `attach_updates` does, and return the exchanger.

    The exchange ends when the model is deleted, when it or a part of it is attached again, or when the interpreter
    exits.

    Args:
        model, optimizers: see `attach_updates`.
        method, options, **settings: see `UpdateExchanger`.
    """
    trained = {id(param) for param in parameters_of(optimizers) if param.requires_grad}
    for each in replaced(trained, model):
        if (earlier := attached(each)) is not None:
            earlier.end_if_soon()  # before weights are broadcast from rank 0
    exchanger = UpdateExchanger(model, optimizers, method, options, **settings)
    RefuseDDP(model)
    keep_attached(model, exchanger, exchanger.optimizers)
    if exchanger.comm.peers.has_parts:
        explain_failures(model)
    return exchanger


def exchange_pending(optimizer: Optimizer) -> None:
    """Exchange the delta of an optimizer of `attach_updates` since its last exchange, or complete a pending exchange.

    Afterwards weights are equal on all ranks. Call it on all ranks before weights are evaluated or saved, and at the
    end. Without a pending exchange or delta it does nothing.

    Raises:
        ValueError: the optimizer's updates are not exchanged.
        NonFiniteGradient, RankFailure: as in a step.
    """
    if isinstance(optimizer, Sequence):
        raise TypeError(
            f"exchange_pending got a {type(optimizer).__name__}: give one optimizer of attach_updates. It exchanges "
            f"the updates of all optimizers of the model."
        )
    exchange = exchange_of(optimizer)
    if exchange is None:
        raise ValueError(
            f"exchange_pending got a {type(optimizer).__name__} whose updates are not exchanged: call attach_updates "
            f"with it before."
        )
    exchange.exchange_pending()
