"""The strategy without its base class. Lightning has two namespaces, and each needs a subclass of its DDPStrategy."""

from __future__ import annotations

import atexit
import copy
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._compat import ddp_options
from lightning_sparse._lightning import INSTALLED
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.hooks import Exchanger
from lightning_sparse.methods import METHODS, Method, method_options
from lightning_sparse.options import (
    ExchangeMode,
    Granularity,
    OnNonFinite,
    Overlap,
    ReducerOptions,
    check_optional,
)
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.checkpoints import Checkpoints
from lightning_sparse.strategies.fit_checks import check_optimizers, check_placement
from lightning_sparse.strategies.gradient_training import GradientTraining
from lightning_sparse.strategies.rendezvous import Rendezvous
from lightning_sparse.strategies.shutdown import CoordinatedShutdown
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.summary import run_summary
from lightning_sparse.strategies.training import Training
from lightning_sparse.strategies.update_training import UpdateTraining

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object


def _destroy_process_group(pid: int) -> None:
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


class SparseDDP(DDPStrategy):
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
            gradient_clip_val, which destroys entries that have already left the residuals.
        hierarchical: add up densely inside each node, and compress only between nodes. It is for several devices that
            share a network card. All nodes must have the same number of devices.
        exchange: the exchanged quantity: the "gradient", or the "update" that each rank's optimizer makes of its local
            gradient. "auto" takes updates for a sparse method, unless the optimizer is torch's SGD, takes signs, or
            evaluates other weights than it trains.
        local_steps: number of optimizer steps before each exchange of updates; None takes the method's, mostly 1.
        overlap: the work during an exchange of updates. "backward": the rest of backward, unless something needs all
            gradients before a step. "next_step": the next step, for links of high latency; until the mean arrives, a
            rank applies the entries that it has sent. "none": no work.
        **kwargs: further options of a method that is given by name, such as `levels=7` of "qsgd", and the options of
            Lightning's DDPStrategy and torch's DistributedDataParallel.

    Attributes:
        reducer: the algorithm and its state; it exists from the start of `fit`.
    """

    _namespace: ClassVar[str]
    """Lightning's name in this strategy."""

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
        super().__init__(
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
        self._training = Training()
        self._checkpoints = Checkpoints(self)
        self._rendezvous = Rendezvous()
        self._shutdown: CoordinatedShutdown | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the present fit, which belongs to this process: a copy starts a new one."""
        return {**super().__getstate__(), "_training": Training(), "_shutdown": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checkpoints = copy.copy(self._checkpoints)
        self._checkpoints.strategy = self

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running fit, or of the last one."""
        if self._checkpoints.reducer is None:
            raise RuntimeError("The strategy has a reducer only from the start of fit.")
        return self._checkpoints.reducer

    @property
    def exchanger(self) -> Exchanger | None:
        """The exchanger of the running fit; None if no fit is running."""
        return self._training.exchanger

    def inform(self, text: str) -> None:
        """Log at INFO, through Lightning's logger, which shows it, unless the program has configured logging."""
        lightnings = logging.getLogger(self._namespace)
        (log if lightnings.propagate else lightnings).info(text)

    @property
    def accelerator(self) -> Any:
        """The accelerator. A Trainer sets it before anything else, and its class tells Lightning's name.

        Raises:
            TypeError: the Trainer has Lightning's other name, and this class is a user's subclass.
        """
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        names = (name for name in INSTALLED if isinstance(accelerator, import_module(name).accelerators.Accelerator))
        namespace = next(names, self._namespace)
        if namespace != self._namespace:
            self._begin_anew(namespace)
        self._accelerator = accelerator

    def _begin_anew(self, namespace: str) -> None:
        """Become a new strategy with the same options, for Lightning's other name."""
        module = f"{__package__}.{namespace.replace('.', '_')}"
        twin, arguments = import_module(module).SparseDDPStrategy, self._arguments
        if SparseDDP not in type(self).__bases__:
            raise TypeError(
                f"{type(self).__name__} derives from SparseDDPStrategy for {self._namespace}, and this Trainer is of "
                f"{namespace}. Derive it from {module}.SparseDDPStrategy, or make the Trainer by {self._namespace}."
            )
        self.__dict__.clear()
        self.__class__ = twin
        self.__init__(**arguments)  # type: ignore[misc]  # with the attributes of this name's base class

    @property
    def _launched(self) -> bool:
        """Whether another process starts the ranks, by fork or spawn."""
        return bool(self._arguments.get("start_method", "popen") != "popen")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launching_process = os.getpid()

    @property
    def launcher(self) -> Any:
        """The launcher of the ranks.

        Raises:
            RuntimeError: this process is in the process group of an earlier fit, so new ranks would wait for ever.
        """
        launcher = super().launcher
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

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if dist.get_backend() == "gloo":
            atexit.register(_destroy_process_group, os.getpid())

    def configure_ddp(self) -> None:
        """Do nothing. `setup_optimizers` comes next and decides whether to wrap the model."""

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        options = ddp_options(self)
        syncs = options.get("init_sync", True)
        try:
            options["init_sync"] = False  # DDP sends all weights; we send only tensors that differ
            return super()._setup_model(model)  # type: ignore[no-any-return]
        finally:
            options["init_sync"] = syncs

    def _register_ddp_hooks(self) -> None:
        """Do nothing: Lightning registers hooks on CUDA only. `GradientTraining` registers ours."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._checkpoints.reducer = None  # free the residuals of an earlier fit before allocating new ones
        method = self._options.with_nodes(self.num_processes)
        what, why = self._options.choose(self.optimizers)
        ranks: list[Any] = [None] * self.world_size
        assert self.model is not None
        # Compare dtypes, too: if they differ, gloo aborts a process when DDP broadcasts the weights.
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in self.model.parameters()})
        optimizers = [type(optimizer).__name__ for optimizer in self.optimizers]
        dist.all_gather_object(ranks, f"{what} of {' and '.join(dtypes)} by {' and '.join(optimizers)}")
        if len(set(ranks)) > 1:
            raise ValueError(
                f"Ranks differ in what they exchange: {', '.join(f'rank {i}: {x}' for i, x in enumerate(ranks))}. "
                f"Give all ranks the same optimizers, the same precision and the same exchange."
            )
        if what == "gradient" and method.compresses:  # all ranks have the same optimizers here, so all raise the error
            check_optimizers(self.optimizers, method)
        if what == "update":
            self._training = UpdateTraining(self, self._options, method, self._timeout)
        else:
            super().configure_ddp()
            self._training = GradientTraining(self, method, self._options.reducer, self._timeout)
        exchanger = self._training.exchanger
        assert exchanger is not None
        self._checkpoints.reducer, self._checkpoints.is_consistent = exchanger.reducer, True
        if self.world_size > 1:
            self._shutdown = CoordinatedShutdown(trainer, exchanger.comm, launched=self._launched)
        if isinstance(method.aggregator, TwoLevel):
            nodes: list[Any] = [None] * self.world_size
            dist.all_gather_object(nodes, self.node_rank)
            check_placement(nodes, method.aggregator.ranks_per_node)
        if self.global_rank == 0:
            note = f"{exchanger.note}{self._training.note} Chosen by {why}."
            self.inform(run_summary(exchanger.reducer, trainer, note))
        if self.world_size == 1 and method.compresses:
            log.warning(
                f"{type(self).__name__} on one rank sends nothing to anybody, yet keeps back what it does not choose: "
                f"that only costs steps. Train with strategy='auto', or on several devices."
            )

    def wait_for_exchange(self) -> None:
        """Wait until observers have seen the pending exchange. Its errors are raised by the next one."""
        self._training.wait()

    # Training:

    def on_train_start(self) -> None:
        super().on_train_start()
        self._training.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.reducer.epoch = self.lightning_module.trainer.current_epoch
        if self._shutdown is not None:
            self._shutdown.begin()

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._training.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        self._training.after_backward(partial(super().post_backward, closure_loss))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self._training.step(optimizer, closure, step)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._training.exchange_pending()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._shutdown is not None:
            self._shutdown.begin(validation=True)
        return super().validation_step(*args, **kwargs)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._checkpoints.end_training()
        self._training.exchange_pending()
        if self._shutdown is not None:
            self._shutdown.finish()

    # After an error:

    @property
    def interrupted(self) -> bool:
        """Whether an error has ended training."""
        return self.lightning_module is not None and self.lightning_module.trainer.interrupted

    @property
    def may_be_alone(self) -> bool:
        """Whether an error has ended training, and perhaps on this rank alone."""
        return self.interrupted and not (self._shutdown is not None and self._shutdown.ends_by(sys.exc_info()[1]))

    def all_ranks_present(self) -> bool:
        """Return whether all ranks will join the collective that this rank is about to call."""
        # A process that has forked the ranks has no process group, and its module has no trainer.
        return not dist.is_initialized() or not self.may_be_alone or self._rendezvous.all_ranks_present()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.all_ranks_present():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, src) if self.all_ranks_present() else obj

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._shutdown is not None:
            self._shutdown.explain(exception)
        atexit.unregister(_destroy_process_group)  # it would wait for collectives that may never complete
        self._training.fail(exception)

    def teardown(self) -> None:
        # Lightning may call teardown after an exception, and before setup.
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown.close()
        self._training.close()
        if self.exchanger is not None:
            self._checkpoints.is_consistent = self.exchanger.is_consistent
        self._training = Training()
        if shutdown is not None:
            shutdown.leave()
        try:
            self._checkpoints.close(super().teardown, super().remove_checkpoint)
        finally:
            self._rendezvous.end_fit()

    # Checkpoints:

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._training.state_dict(super().lightning_module_state_dict)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options=storage_options)
        self._checkpoints.save(checkpoint, filepath, write, super().remove_checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath, super().remove_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._checkpoints.loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._training.refresh_parameters()
        self._checkpoints.load_optimizers(checkpoint, super().load_optimizer_state_dict)

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
