"""Compressed averaging for DistributedDataParallel.

ddp = DistributedDataParallel(model)
attach(ddp, "gaussiank", density=0.001)
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and refuses strings.
import gc
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._compat import (
    ddp_parameters,
    delayed_parameters,
    hook_name,
    hook_states,
    parameters_by_name,
    reduced_count,
    steps_in_backward,
)
from lightning_sparse.comm.broadcast import broadcast_differing
from lightning_sparse.hooks.gradient_exchange import GradientExchanger
from lightning_sparse.hooks.handshakes import report_errors_to_peers
from lightning_sparse.hooks.misuse import attached, detach, keep_checked, replaced
from lightning_sparse.hooks.rates import Rates
from lightning_sparse.hooks.session import Session
from lightning_sparse.layout import Granularity
from lightning_sparse.methods import Method, method_options, resolve_method
from lightning_sparse.options import OnNonFinite, ReducerOptions
from lightning_sparse.reducer import Reducer
from lightning_sparse.updates.parameters import described


@torch.inference_mode(False)  # its state is updated in training
@torch.no_grad()
def attach(
    ddp: DistributedDataParallel,
    method: str | Method = "topk",
    *,
    density: float | None = None,
    granularity: Granularity = "bucket",
    seed: int = 0,
    density_warmup: Sequence[float] | None = None,
    density_warmup_steps: int | None = None,
    loss_scale: Callable[[], float] | None = None,
    on_nonfinite: OnNonFinite = "raise",
    clip_norm: float | None = None,
    timeout: timedelta | None = None,
    **options: Any,
) -> Reducer:
    """Replace the gradient all-reduce of `ddp` by a compressed exchange. All ranks call it, before the first backward.

    Args:
        ddp: the wrapped model; `attach` sets its communication hook.
        method: a name in `METHODS`, or a custom `Method`.
        density: fraction of entries to send, in (0, 1]; None takes the method's default. Only with a name.
        granularity: the unit of compression: "layer", "bucket" (of the size of DDP's buckets) or "model".
        seed: the seed of all random choices; equal on all ranks.
        density_warmup: densities to use in turn before `density`, `density_warmup_steps` steps each.
        density_warmup_steps: number of steps for each density of `density_warmup`.
        loss_scale: the `get_scale` of a GradScaler, if you use one. If a gradient overflows on any rank, all ranks get
            NaN. Then all scalers skip the step, and no residual changes. If you accumulate gradients, call all backward
            passes before a step but the last one within `no_sync()`, because a skipped step loses exchanged gradients.
        on_nonfinite: reaction to a NaN or an infinity in a gradient, without a loss scale. "raise": all ranks raise
            NonFiniteGradient. "skip": all ranks get NaN gradients, and no residual changes; skip the optimizer step
            then.
        clip_norm: largest 2-norm of a rank's local gradient, before compression. Clip here and not after the exchange:
            that would destroy entries that have already left the residuals.
        timeout: time to wait for other ranks; None takes the default process group's.
        **options: further options of a method that is given by name, such as `rank=2` of "powersgd".

    Returns:
        The reducer. Its `comm` counts bytes, and its `state_dict` returns the state for a checkpoint.

    Raises:
        TypeError, ValueError: an option, a parameter or a feature of DDP is not supported; the message names it.
        RankFailure: other ranks have different settings, or do not attach.
    """
    ddp = getattr(ddp, "_orig_mod", ddp)  # of torch.compile
    with report_errors_to_peers(getattr(ddp, "process_group", None)):
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"attach got a {type(ddp).__name__}: wrap the model in DistributedDataParallel first and pass that."
            )
        method_options("attach", inspect.signature(attach).parameters, method, options)
        method = resolve_method(method, density, **options)
        if method.update_rule is not None:
            raise ValueError(
                f"attach exchanges gradients, and {method} is made to exchange updates. Use attach_updates(model, "
                f"optimizer, ...), or another method, such as 'topk'."
            )
        if isinstance(scaler := getattr(loss_scale, "__self__", None), GradScaler) and not scaler.is_enabled():
            loss_scale = None  # such a scaler skips no step
        reducer_options = ReducerOptions.of(locals())
        reducer_options.check_method(method, counts_epochs=False)
    return exchange_gradients(ddp, method, reducer_options, timeout=timeout).reducer


def exchange_gradients(
    ddp: DistributedDataParallel,
    method: Method,
    options: ReducerOptions = ReducerOptions(),
    *,
    timeout: timedelta | None = None,
    from_rank_0: Mapping[str, Tensor] | None = None,
    optimizers: Sequence[Optimizer] = (),
) -> GradientExchanger:
    """Attach as `attach` does, and return the exchanger.

    Args:
        ddp, method, timeout: see `attach`.
        options: options of the reducer. The size of a bucket is taken from DDP.
        from_rank_0: tensors to broadcast from rank 0, by name, if `ddp` was made with init_sync=False.
        optimizers: the optimizers whose learning rates are compared among ranks.
    """
    states = from_rank_0 or {}

    def parameters() -> dict[str, Tensor]:
        check_no_hook(ddp)
        return trainable_parameters(ddp)

    gc.collect()  # a model that is gone on some ranks only would be an earlier one on the others
    earlier = {each: attached(each) for each in earlier_models(ddp)}
    exchanges = [each for each in earlier.values() if each is not None and not each.session.is_closed]
    session = Session(
        parameters,
        method,
        replace(options, bucket_cap_mb=max(1, ddp.bucket_bytes_cap) / 2**20),
        group=ddp.process_group,  # need not be all the ranks
        device=ddp.device,
        timeout=timeout,
        settings=lambda: {
            "parameters and buffers": described(states),
            "exchanges of updates to replace": [str(each.reducer.method) for each in exchanges],
        },
    )
    params = parameters()
    session.reducer.segment_states.take_memory_order(params)
    rates = Rates(session.comm, optimizers, ddp.device)
    exchanger = GradientExchanger(session, ddp, params, rates, optimizers)
    try:
        broadcast_differing(session.comm, list(states.values()), ddp.device)
        with session.comm.uncounted():
            for each in exchanges:
                each.equalize(session.comm)  # ranks that average gradients need equal states
        session.open_connections()  # connecting within backward may wait for the device, which waits for this rank
        rates.compare()
        if session.stream is not None:
            session.dry_run(params)
        ddp.register_comm_hook(exchanger, on_bucket)
    except BaseException as error:
        exchanger.session.fail(error)
        exchanger.close()
        raise
    detach(earlier, {*map(id, params.values())}, by_updates=False)
    keep_checked(exchanger)
    ddp.register_forward_pre_hook(_raise_known)
    weakref.finalize(ddp, exchanger.close)  # when the model is collected, or the interpreter exits
    return exchanger


def earlier_models(ddp: DistributedDataParallel) -> list[torch.nn.Module]:
    """Return the models of `attach_updates` that a DDP model replaces: they share trained parameters with it."""
    ids = {*map(id, reduced_parameters(ddp).values())}
    parts = [each for each in ddp.module.modules() if not ids.isdisjoint(map(id, each.parameters()))]
    return [*dict.fromkeys([*replaced(ids), *(each for each in parts if attached(each) is not None)])]


def _raise_known(ddp: DistributedDataParallel, *_: Any) -> None:
    """Raise the error that has ended training, before a backward pass. There, DDP's error does not name it."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        for state in hook_states(ddp):
            if isinstance(state, GradientExchanger):
                state.session.raise_known_failure()


def on_bucket(state: GradientExchanger, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP's communication hook."""
    future: torch.futures.Future[torch.Tensor] = state.enqueue(bucket)
    return future


def check_no_hook(ddp: DistributedDataParallel) -> None:
    """Raise ValueError if the model has a communication hook: DDP takes one, and only once."""
    if any(isinstance(state, GradientExchanger) for state in hook_states(ddp)):
        raise ValueError(
            "attach was called on this DistributedDataParallel before, and DDP takes one communication hook in its "
            "life: wrap the model in a new DistributedDataParallel to attach with other settings."
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) sets a communication hook of its own, and DDP takes one. "
            "Leave mixed_precision out, and call the model under torch.autocast; or do not attach."
        )
    if steps_in_backward(ddp):
        raise ValueError(
            "_apply_optimizer_in_backward steps a parameter of this DistributedDataParallel, which sets a "
            "communication hook of its own for that, and takes one. Step an optimizer after backward; or leave "
            "DistributedDataParallel out and call attach_updates(model, _get_in_backward_optimizers(model))."
        )
    if hook := hook_name(ddp):
        raise ValueError(
            f"This DistributedDataParallel has the communication hook {hook} already, and takes only one: leave its "
            f"register_comm_hook out, or do not attach."
        )


def trainable_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, see `reduced_parameters`.

    Raises:
        TypeError, ValueError: the model or DDP uses a feature that compression does not support.
    """
    for option, given in (
        ("skip_all_reduce_unused_params", getattr(ddp, "skip_all_reduce_unused_params", False)),
        ("delay_all_reduce_named_params", delayed_parameters(ddp)),
    ):
        if given:
            raise ValueError(f"DistributedDataParallel({option}=...) bypasses the exchange of gradients: leave it out.")
    if (name := sparse_embedding(ddp.module)) is not None:
        raise TypeError(
            f"{name or 'The model'!r} is an embedding with sparse=True: sparse gradients cannot be compressed. Set "
            f"sparse=False, or train with strategy='ddp'."
        )
    params, reduced = reduced_parameters(ddp), reduced_count(ddp)
    if len(params) != reduced:
        raise ValueError(
            f"{len(params)} parameters of the model require gradients now, but DistributedDataParallel reduces "
            f"{reduced}, which required gradients when it wrapped the model. Freeze and unfreeze parameters before. "
            f"Parameters that DDP is to ignore must belong to a submodule: it does not ignore the model's own ones."
        )
    return params


def sparse_embedding(model: torch.nn.Module) -> str | None:
    """Return the name of a module whose gradients are sparse; None if there is none."""
    embeddings = torch.nn.Embedding | torch.nn.EmbeddingBag
    return next((name for name, each in model.named_modules() if isinstance(each, embeddings) and each.sparse), None)


def reduced_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by name, in registration order."""
    reduced = {id(param) for param in ddp_parameters(ddp)}
    return {
        name: param
        for name, param in parameters_by_name(ddp.module).items()
        if param.requires_grad and id(param) in reduced
    }
