"""The common part of the strategies for Trainer and Fabric: options, choice of the exchange, launch of the ranks."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._compat import ddp_options
from lightning_sparse._lightning import INSTALLED
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.hooks import UpdateExchanger, agree
from lightning_sparse.methods import METHODS, Method, method_options
from lightning_sparse.options import (
    ExchangeMode,
    Granularity,
    OnNonFinite,
    Overlap,
    ReducerOptions,
    check_optional,
)
from lightning_sparse.strategies.fit_checks import check_optimizers, check_placement
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.summary import run_summary
from lightning_sparse.strategies.training import Training

log = logging.getLogger(__name__)


def destroy_process_group(pid: int) -> None:
    """Destroy the process groups before the interpreter of process `pid` exits, as Lightning does for NCCL.

    Otherwise gloo's threads free Python objects while the interpreter exits, which sometimes aborts the process
    (pytorch issue 179291). A forked child must not destroy the groups of its parent.
    """
    if dist.is_initialized() and os.getpid() == pid:
        dist.destroy_process_group()


HOOK = "DDP takes one communication hook, and compression is it. Leave {option} out, or use strategy='ddp'."
BYPASS = "it bypasses the exchange of gradients. Leave {option} out, or use strategy='ddp'."
UNSUPPORTED = {
    **dict.fromkeys(("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"), HOOK),
    "mixed_precision": HOOK.replace(", or", " and set precision='bf16-mixed' of the Trainer, or"),
    "delay_all_reduce_named_params": BYPASS,
    "param_to_hook_all_reduce": BYPASS,
    "skip_all_reduce_unused_params": BYPASS,
}
"""Unsupported options of Lightning's DDPStrategy and torch's DistributedDataParallel, and the reasons."""

FIND_UNUSED = {
    f"_find_unused_parameters_{str(value).lower()}": {"find_unused_parameters": value} for value in (True, False)
}
"""Lightning's suffixes of a strategy's name, and the options that they set."""


class SparseStrategy:
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
            updates: this rank alone skips its optimizer step, and it sends a part of its residual.
        clip_norm: largest 2-norm of a worker's local gradient, before compression. Use it in place of Trainer's
            gradient_clip_val and `fabric.clip_gradients`, which destroy entries that have already left the residuals.
        hierarchical: add up densely inside each node, and compress only between nodes. It is for several devices that
            share a network card. All nodes must have the same number of devices.
        exchange: the exchanged quantity: the "gradient", or the "update" that each rank's optimizer makes of its local
            gradient. "auto" takes updates for a sparse method, unless the optimizer is torch's SGD, takes signs, or
            evaluates other weights than it trains.
        local_steps: number of optimizer steps before each exchange of updates; None takes the method's, mostly 1.
        overlap: the work during an exchange of updates. "backward": the rest of backward, unless something needs all
            gradients before a step. "next_step": the next step, for links of high latency; until the mean arrives, a
            rank applies the entries that it has sent. "none": no work. Fabric takes "backward" for "none", because
            its loop may change gradients after backward.
        **kwargs: further options of a method that is given by name, such as `levels=7` of "qsgd", and the options of
            Lightning's DDPStrategy and torch's DistributedDataParallel.
    """

    _namespace: ClassVar[str]
    """Lightning's name in this strategy, an entry of `INSTALLED`."""
    _clipping: ClassVar[str]
    """Advice to clip gradients after backward."""
    _class_name: ClassVar[str]
    """The name of the strategy's class in the module of each of Lightning's names."""

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
        makers = [DistributedDataParallel, *(cls for cls in type(self).__mro__ if "__init__" in vars(cls))]
        known = {name for cls in makers for name in inspect.signature(cls.__init__).parameters}  # type: ignore[misc]
        own = {name: kwargs.pop(name) for name in method_options(type(self).__name__, known, method, kwargs)}
        check_optional("timeout", kwargs.get("timeout"))
        # With an explicit size, DDP's buckets hold the same parameters as our segments, so no segment waits for two.
        if kwargs.get("bucket_cap_mb") is None:
            kwargs["bucket_cap_mb"] = 25
        reducer_options = ReducerOptions(
            granularity=granularity,
            bucket_cap_mb=kwargs["bucket_cap_mb"],
            density_warmup=density_warmup,
            density_warmup_steps=density_warmup_steps,
            seed=seed,
            on_nonfinite=on_nonfinite,
            clip_norm=clip_norm,
        )
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
            **kwargs,
        )
        ours = ddp_options(self)
        for option in UNSUPPORTED:  # not every version of torch has them
            ours.pop(option, None)
        ours["bucket_cap_mb"] = reducer_options.bucket_cap_mb  # a Python number
        self._begin()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Stands for the attributes of Lightning's strategies."""

    def _begin(self) -> None:
        """Make the attributes that do not depend on options, at the end of the constructor."""

    def inform(self, text: str) -> None:
        """Log at INFO, through Lightning's logger, which shows it, unless the program has configured logging."""
        lightnings = logging.getLogger(self._lightning(self._namespace).__name__)
        (log if lightnings.propagate else lightnings).info(text)

    # Lightning's two names:

    @classmethod
    def _lightning(cls, namespace: str) -> ModuleType:
        """Return the module that has the Trainer or Fabric, under one of Lightning's names."""
        return import_module(namespace)

    @property
    def accelerator(self) -> Any:
        """The accelerator. Lightning sets it before anything else, and its class tells Lightning's name.

        Raises:
            TypeError: Lightning has its other name, and this class is a user's subclass.
        """
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        bases = {name: self._lightning(name).accelerators.Accelerator for name in INSTALLED}
        names = (name for name, base in bases.items() if isinstance(accelerator, base))
        namespace = next(names, self._namespace)
        if namespace != self._namespace:
            self._begin_anew(namespace)
        self._accelerator = accelerator

    def _begin_anew(self, namespace: str) -> None:
        """Become a new strategy with the same options, for Lightning's other name."""
        module = f"{__package__}.{namespace.replace('.', '_')}"
        twin, arguments = getattr(import_module(module), self._class_name), self._arguments
        if twin.__bases__[0] not in type(self).__bases__:
            raise TypeError(
                f"{type(self).__name__} derives from the strategy for {self._namespace}, and a Trainer or Fabric of "
                f"{namespace} got it. Derive it from {module}.{self._class_name}, or take both from {self._namespace}."
            )
        self.__dict__.clear()
        self.__class__ = twin
        self.__init__(**arguments)  # type: ignore[misc]  # with the attributes of this name's base class

    # Launch of the ranks:

    @property
    def _launched(self) -> bool:
        """Whether another process starts the ranks, by fork or spawn."""
        return bool(self._arguments.get("start_method", "popen") != "popen")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        self._launching_process = os.getpid()

    @property
    def launcher(self) -> Any:
        """The launcher of the ranks.

        Raises:
            RuntimeError: this process is in the process group of an earlier run, so new ranks would wait for ever.
        """
        launcher = super().launcher  # type: ignore[misc]
        if launcher is None or self._launching_process != os.getpid() or not dist.is_initialized():
            return launcher
        size = self.num_processes * self.num_nodes
        if self._launched or size != dist.get_world_size():
            how = "fork or spawn" if self._launched else f"{size} ranks"
            raise RuntimeError(
                f"{type(self).__name__} cannot start {how} here: this process is in a process group of "
                f"{dist.get_world_size()} already, from an earlier fit for example, and its ranks would wait for each "
                f"other for ever. Start both fits by fork, as strategy='topk_ddp_fork' does, whatever the number of "
                f"devices; or run each in a process of its own."
            )
        return launcher

    def _destroys_groups_at_exit(self) -> None:
        """Call it when the process group exists."""
        if dist.get_backend() == "gloo":
            atexit.register(destroy_process_group, os.getpid())

    # After an error:

    @property
    def interrupted(self) -> bool:
        """Whether an error has ended training."""
        return False

    def all_ranks_present(self) -> bool:
        """Return whether all ranks will join the collective that this rank is about to call."""
        return True

    # The exchange:

    @property
    def scaler(self) -> Any:
        """Lightning's gradient scaler; None if there is none, or if it is disabled and so skips no step."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _without_broadcast(self) -> Iterator[None]:
        """Let DistributedDataParallel not send all weights: we send only tensors that differ."""
        options = ddp_options(self)
        syncs = options.get("init_sync", True)
        try:
            options["init_sync"] = False
            yield
        finally:
            options["init_sync"] = syncs

    def _choose(self, optimizers: Sequence[Optimizer]) -> tuple[Method, str, str]:
        """Choose the exchange for a model's optimizers, on this rank.

        Returns:
            The method, the exchanged quantity ("gradient" or "update"), and the reason for it.
        """
        what, why = self._options.choose(optimizers)
        clip_norm = self._options.reducer.clip_norm
        if what == "update" and clip_norm is not None and self.scaler is not None:
            raise ValueError(
                f"clip_norm={clip_norm:g} with updates and precision='16-mixed': {self._clipping} instead, which clips "
                f"each rank's own gradient after it was unscaled."
            )
        return self._options.with_nodes(self.num_processes), what, why

    def _agree_on(
        self, exchanged: str, method: Method, model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        """Check that all ranks have made the same choice, before the first collective.

        Args:
            exchanged: the quantity, "gradient" or "update".
            method: the compression method.
            model: the model.
            optimizers: its optimizers.

        Raises:
            RankFailure: ranks differ in the exchange, in the optimizers or in the dtypes.
            ValueError: an optimizer is not supported.
        """
        # Compare dtypes, too: if they differ, gloo aborts a process when DDP broadcasts the weights.
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in model.parameters()})
        names = [type(optimizer).__name__ for optimizer in optimizers] or ["optimizers to come"]
        exchange = f"{exchanged} of {' and '.join(dtypes)} by {' and '.join(names)}"
        agree({"exchange": exchange}, self.root_device, self._timeout)
        if (
            exchanged == "gradient" and method.compresses
        ):  # all ranks have the same optimizers here, so all raise the error
            check_optimizers(optimizers, method)

    def _exchange_updates(
        self,
        make: Callable[..., UpdateExchanger],
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        method: Method,
    ) -> UpdateExchanger:
        """Make the exchanger of optimizers' updates.

        Args:
            make: gets the arguments of `UpdateExchanger`.
            model, optimizers: see `UpdateExchanger`.
            method: the compression method, see `StrategyOptions.with_nodes`.
        """
        ddp = ddp_options(self)
        return make(
            model,
            optimizers,
            *self._options.for_updates(method, self.world_size),
            local_steps=self._options.local_steps,
            overlap=self._options.overlap,
            # None, torch's default, means True. A configuration file passes all defaults explicitly.
            broadcast_buffers=ddp.get("broadcast_buffers") is not False,
            forward_sync_buffers=ddp.get("forward_sync_buffers"),
            timeout=self._timeout,
        )

    def _began(self, training: Training, why: str, loggers: Sequence[Any] = ()) -> None:
        """Check the placement of the ranks, and log a summary of the exchange that has begun.

        Args:
            training: has the exchange.
            why: the reason for the exchanged quantity.
            loggers: Lightning's loggers.
        """
        assert training.exchanger is not None
        reducer = training.exchanger.reducer
        if isinstance(reducer.method.aggregator, TwoLevel):
            nodes: list[Any] = [None] * self.world_size
            dist.all_gather_object(nodes, self.node_rank)
            check_placement(nodes, reducer.method.aggregator.ranks_per_node)
        if self.global_rank == 0:
            self.inform(run_summary(reducer, loggers, f"{training.exchanger.note}{training.note} Chosen by {why}."))
        if self.world_size == 1 and reducer.method.compresses:
            log.warning(
                f"{type(self).__name__} on one rank sends nothing to anybody, yet keeps back what it does not choose: "
                f"that only costs steps. Train with strategy='auto', or on several devices."
            )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add `<method>_ddp` of each method, with Lightning's suffixes and aliases `<method>` and `ddp_<method>`."""
        starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for method in METHODS:
            for suffix, start_method in starts.items():
                for end, unused in {"": {}, **FIND_UNUSED}.items():
                    aliases = () if suffix or end else (method, f"ddp_{method}")
                    for name in (f"{method}_ddp{suffix}{end}", *aliases):
                        if name not in strategy_registry:
                            strategy_registry.register(
                                name,
                                cls,
                                description=f"DDP with compressed gradients: {method}, started by {start_method}.",
                                method=method,
                                start_method=start_method,
                                **unused,
                            )
