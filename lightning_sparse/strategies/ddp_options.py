"""The strategies that hold the whole model on each rank, with the options of DistributedDataParallel."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._compat import ddp_options
from lightning_sparse._lightning import Mixin
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.methods import METHODS, Method, method_options
from lightning_sparse.options import (
    ExchangeMode,
    Granularity,
    OnNonFinite,
    Overlap,
    ReducerOptions,
    check_optional,
)
from lightning_sparse.strategies.gradient_training import when_to_broadcast
from lightning_sparse.strategies.strategy_options import StrategyOptions

HOOK = "DDP takes one communication hook, and compression is it. Leave {option} out, or use strategy='ddp'."
BYPASS = "it bypasses the exchange of gradients. Leave {option} out, or use strategy='ddp'."
UNSUPPORTED = {
    **dict.fromkeys(("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"), HOOK),
    "mixed_precision": HOOK.replace(", or", " and set precision='bf16-mixed' of the Trainer, or"),
    "delay_all_reduce_named_params": BYPASS,
    "param_to_hook_all_reduce": BYPASS,
    "skip_all_reduce_unused_params": BYPASS,
    **dict.fromkeys(
        ("process_group", "device_mesh"),
        "a strategy trains on all ranks. Leave {option} out; or in plain torch, call attach with a "
        "DistributedDataParallel of the group, or attach_updates(group=...).",
    ),
}
"""Unsupported options of Lightning's DDPStrategy and torch's DistributedDataParallel, and the reasons."""

FIND_UNUSED = {
    f"_find_unused_parameters_{str(value).lower()}": {"find_unused_parameters": value} for value in (True, False)
}
"""Lightning's suffixes of a strategy's name, and the options that they set."""


class DDPOptions(Mixin):  # type: ignore[misc]
    """Data-parallel training that sends a small part of each gradient or update and keeps the rest for later steps.

    Args:
        method: a name in `lightning_sparse.METHODS`, or a custom `Method`.
        density: fraction of entries to send, in (0, 1]. None takes the method's default, 0.001 for most. If updates are
            exchanged, None is 0.003 with two-bit values, after a density warm-up, and more with more than four ranks.
            A method with an `UpdateRule` keeps its default.
        granularity: the unit of compression: each "layer", each "bucket" of `bucket_cap_mb`, or the whole "model".
        density_warmup: densities to use in turn before `density`, an epoch each, or `density_warmup_steps` steps each.
            None is no warm-up. If updates are exchanged and no density is given, None is 8, 4 and 2 times the density,
            15 exchanges each.
        density_warmup_steps: number of optimizer steps, or of exchanges of updates, for each density of
            `density_warmup`.
        seed: the seed of the method's random choices.
        on_nonfinite: reaction to a NaN or an infinity in a gradient, without a gradient scaler. "raise": an error on
            all ranks. "skip" with gradients: all ranks skip the step, and `reducer.skipped` counts it. "skip" with
            updates: this worker alone skips its optimizer step, and it sends a part of its residual.
        clip_norm: largest 2-norm of a worker's local gradient, before compression. Use it in place of Trainer's
            gradient_clip_val and `fabric.clip_gradients`, which destroy entries that have already left the residuals.
        hierarchical: average densely inside each node, and compress only between nodes. It is for several devices that
            share a network card. All nodes must have the same number of devices. With updates, the devices of a node
            average their gradients before each step, and so take the same steps.
        exchange: the exchanged quantity: the "gradient", or the "update" that each rank's optimizer makes of its local
            gradient. "auto" takes updates for a sparse method, unless the optimizer is torch's SGD, takes signs, shares
            its steps, or evaluates other weights.
        local_steps: number of optimizer steps before each exchange of updates; None takes the method's, mostly 1.
        overlap: the work during an exchange of updates. "backward": the rest of backward, unless something needs all
            gradients before a step. "next_step": the next step, for links of high latency; until the mean arrives, a
            rank applies the entries that it has sent. "none": no work. Fabric takes "backward" for "none", because
            its loop may change gradients after backward.
        **kwargs: further options of a method that is given by name, such as `levels=7` of "qsgd", and the options of
            Lightning's DDPStrategy and torch's DistributedDataParallel.
    """

    def __init__(
        self,
        method: str | Method = "topk",
        *,
        density: float | None = None,
        granularity: Granularity = "bucket",
        density_warmup: Sequence[float] | None = None,
        density_warmup_steps: int | None = None,
        seed: int = 0,
        on_nonfinite: OnNonFinite = "raise",
        clip_norm: float | None = None,
        hierarchical: bool = False,
        exchange: ExchangeMode = "auto",
        local_steps: int | None = None,
        overlap: Overlap = "backward",
        **kwargs: Any,
    ) -> None:
        given = {**locals(), **kwargs}
        self._arguments = {name: given[name] for name in given if name not in ("self", "kwargs", "__class__")}
        unsupported = {option: kwargs.pop(option) for option in UNSUPPORTED if option in kwargs}
        for option, why in UNSUPPORTED.items():
            if unsupported.get(option) not in (None, False):
                raise ValueError(f"{type(self).__name__}({option}=...): {why.format(option=option)}")
        # Lightning's DDPStrategy and DistributedDataParallel check their options when the model is wrapped, or never.
        makers = [DistributedDataParallel, *(cls for cls in type(self).__mro__[:-1] if "__init__" in vars(cls))]
        known = {name for cls in makers for name in inspect.signature(cls.__init__).parameters}  # type: ignore[misc]
        own = {name: kwargs.pop(name) for name in method_options(type(self).__name__, known, method, kwargs)}
        check_optional("timeout", kwargs.get("timeout"))
        # With an explicit size, DDP's buckets hold the same parameters as our segments, so no segment waits for two.
        if kwargs.get("bucket_cap_mb") is None:
            kwargs["bucket_cap_mb"] = 25
        reducer_options = ReducerOptions.of({**given, "bucket_cap_mb": kwargs["bucket_cap_mb"]})
        self._options = StrategyOptions(
            method, density, own, reducer_options, hierarchical, exchange, local_steps, overlap
        )
        # Unsupported options are passed by name, so that the command line does not offer them.
        super().__init__(  # type: ignore[call-arg]  # of Lightning's DDPStrategy
            ddp_comm_state=None,
            ddp_comm_hook=None,
            ddp_comm_wrapper=None,
            model_averaging_period=None,
            mixed_precision=None,
            delay_all_reduce_named_params=None,
            param_to_hook_all_reduce=None,
            skip_all_reduce_unused_params=False,
            process_group=None,
            device_mesh=None,
            **kwargs,
        )
        ours = ddp_options(self)
        for option in UNSUPPORTED:  # not every version of torch has them
            ours.pop(option, None)
        ours["bucket_cap_mb"] = reducer_options.bucket_cap_mb  # a Python number
        self._begin()

    @contextlib.contextmanager
    def _with_ddp_options(self, **changes: Any) -> Iterator[None]:
        """Give a DistributedDataParallel that is made in the block other options.

        With init_sync=False it does not send all weights: we send only tensors that differ.
        """
        options = ddp_options(self)
        before = {name: options[name] for name in changes if name in options}
        options.update(changes)
        try:
            yield
        finally:
            for name in changes:
                del options[name]
            options.update(before)

    def _exchange_updates(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer], method: Method
    ) -> UpdateExchanger:
        """Make the exchanger of optimizers' updates.

        Args:
            model, optimizers: see `UpdateExchanger`.
            method: the compression method, see `StrategyOptions.with_nodes`.
        """
        return self._make_exchanger(  # type: ignore[no-any-return]
            model,
            optimizers,
            *self._options.for_updates(method, self.world_size),
            local_steps=self._options.local_steps,
            overlap=self._options.overlap,
            buffers=when_to_broadcast(ddp_options(self)),
            timeout=self._timeout,
        )

    @classmethod
    def _registered(cls) -> dict[str, dict[str, Any]]:
        """Return the options of the registered names, by their beginning."""
        return {method: {"method": method} for method in METHODS}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add `<method>_ddp` of each method, with Lightning's suffixes and aliases `<method>` and `ddp_<method>`."""
        starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for method, options in cls._registered().items():
            for suffix, start_method in starts.items():
                for end, unused in {"": {}, **FIND_UNUSED}.items():
                    aliases = () if suffix or end else (*options.values(), f"ddp_{method}")
                    for name in (f"{method}_ddp{suffix}{end}", *aliases):
                        if name not in strategy_registry:
                            strategy_registry.register(
                                name,
                                cls,
                                description=f"DDP with compressed gradients: {method}, started by {start_method}.",
                                **options,
                                start_method=start_method,
                                **unused,
                            )
