"""The strategy without its base class: Lightning has two namespaces, and each needs a real subclass of its own."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse._compat import ddp_options
from lightning_sparse._lightning import INSTALLED
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.compressors import Identity
from lightning_sparse.hooks import GradientExchanger, UpdateExchanger, report_or_diagnose
from lightning_sparse.hooks.scalers import unwrap, wrap
from lightning_sparse.hooks.update_exchange import check_updates
from lightning_sparse.methods import METHODS, Method, method_options, resolve_method
from lightning_sparse.options import (
    Granularity,
    OnNonFinite,
    Overlap,
    check,
    check_overflow_options,
    check_partition,
    check_seed,
    check_timeout,
    check_warmup,
)
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.fit_checks import (
    check_optimizers,
    check_placement,
    share_parameters,
    warn_of_sparse_gradients,
    warn_of_two_momenta,
    why_gradients,
)
from lightning_sparse.strategies.sigterm import EndTogether
from lightning_sparse.strategies.summary import run_summary
from lightning_sparse.strategies.updates import UpdateOrGradientExchange
from lightning_sparse.update_rule import UpdateRule

log = logging.getLogger(__name__)


def _destroy_process_group(pid: int) -> None:
    """Destroy the process groups before the interpreter of process `pid` ends, as Lightning does for NCCL.

    Otherwise gloo's threads free Python objects during the interpreter's exit, which sometimes aborts the process
    (pytorch issue 179291). The groups in a forked child are its parent's.
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
"""Options of Lightning's DDPStrategy and torch's DistributedDataParallel that are refused, and why."""

FIND_UNUSED = {
    f"_find_unused_parameters_{str(value).lower()}": {"find_unused_parameters": value} for value in (True, False)
}
"""Lightning's suffixes of a strategy's name, and the options that they set."""


class SparseDDP(UpdateOrGradientExchange):
    """Data-parallel training that sends a small part of each gradient and keeps the rest for later steps.

    Args:
        method: a name in `lightning_sparse.METHODS`, or a `Method` made of own parts.
        density: fraction of entries to send, in (0, 1]; None is the method's own, 0.001. Of updates None is 0.003, in
            two bits each, more with more than four ranks, after a warm-up, unless the method has an `UpdateRule`.
        granularity: what is compressed together: each "layer", each "bucket" of `bucket_cap_mb`, or the whole "model".
        density_warmup: densities to use in turn before `density`, an epoch each, or `density_warmup_steps` steps each.
            None is no warm-up; of updates, if no density is given, 8, 4 and 2 times the density, 15 exchanges each.
        density_warmup_steps: number of optimizer steps, or of exchanges of updates, for each density of
            `density_warmup`.
        seed: of the method's random choices.
        on_nonfinite: what a gradient with a NaN or an infinity means where no gradient scaler is at work: "raise" an
            error on all ranks, or "skip" the step: on all ranks, counted in `reducer.skipped`, where gradients are
            exchanged; on this rank alone, which then sends of its residual, where updates are.
        clip_norm: largest 2-norm of a worker's own gradient, before compression; use it in place of Trainer's
            gradient_clip_val, which destroys what has already left the residuals.
        hierarchical: add up densely inside each node, and compress only between nodes: for several devices behind one
            network card. Nodes must have equal numbers of devices.
        exchange: what ranks exchange: the "gradient", or the "update" that each rank's optimizer makes of its own
            gradient. "auto" takes updates for a sparse method, unless the optimizer is torch's SGD, takes signs, or
            evaluates other weights than it trains.
        local_steps: number of optimizer steps before each exchange of updates; None keeps the method's own, 1 for most.
        overlap: what goes on during an exchange of updates. "backward": the rest of backward, unless something needs
            all gradients before a step. "next_step": the next step, for links of high latency: a rank's weights change
            by what it has sent itself, until the mean is there. "none": nothing.
        **kwargs: further options of a method given by name, such as `levels=7` of "qsgd"; and those of Lightning's
            DDPStrategy and torch's DistributedDataParallel.

    Attributes:
        reducer: the algorithm and its state; there from the start of `fit`.
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
        exchange: Literal["auto", "gradient", "update"] = "auto",
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
        # Lightning's DDPStrategy and DistributedDataParallel look at their options when the model is wrapped, or never.
        makers = [DistributedDataParallel, *(cls for cls in type(self).__mro__ if "__init__" in vars(cls))]
        known = {name for cls in makers for name in inspect.signature(cls.__init__).parameters}  # type: ignore[misc]
        own = {name: kwargs.pop(name) for name in method_options(type(self).__name__, known, method, kwargs)}
        check_timeout(kwargs.get("timeout"))
        self._launched = kwargs.get("start_method", "popen") != "popen"
        # With an explicit size DDP's buckets hold the same parameters as our segments, so no segment waits for two.
        if kwargs.get("bucket_cap_mb") is None:
            kwargs["bucket_cap_mb"] = 25
        # Those that are refused by name, so that the command line does not offer them.
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
        for option in UNSUPPORTED:  # which not every version of torch has
            ours.pop(option, None)
        ours["bucket_cap_mb"] = check_partition(granularity, ours["bucket_cap_mb"])
        self._method = resolve_method(method, density, **own)
        self._given = method, density, own
        self._compresses = not isinstance(self._method.compressor, Identity)
        self._hierarchical = check("hierarchical", hierarchical)
        if hierarchical:
            self._on_two_levels()
        density_warmup, density_warmup_steps = check_warmup(self._method, density_warmup, density_warmup_steps)
        self._options: dict[str, Any] = {
            "granularity": granularity,
            "density_warmup": density_warmup,
            "density_warmup_steps": density_warmup_steps,
            "seed": check_seed(seed),
            "on_nonfinite": on_nonfinite,
            "clip_norm": check_overflow_options(on_nonfinite, clip_norm),
        }
        self._exchanged, self._overlap = check("exchange", exchange), check("overlap", overlap)
        self._local_steps = None if local_steps is None else check("local_steps", local_steps)
        if exchange == "gradient" and self._method.update_rule is not None:
            raise ValueError(
                f"exchange='gradient' with {self._method}: it is made to exchange updates. Leave exchange out, or take "
                f"another method, such as 'topk'."
            )
        if exchange == "gradient" and (self._local_steps or 1) > 1:
            raise ValueError(
                f"local_steps={local_steps!r} with exchange='gradient': gradients are exchanged in every step. Set "
                f"exchange='update' to let each rank take {local_steps} steps before each exchange."
            )
        if overlap == "next_step" and exchange == "gradient":
            raise ValueError(
                "overlap='next_step' with exchange='gradient': every step waits for its gradients. Set "
                "exchange='update', and the next step goes on while ranks exchange."
            )
        if self._local_steps is not None or overlap == "next_step":  # raises where they do not go together
            rule = (self._method.update_rule or UpdateRule()).changed(self._local_steps, overlap)
            replace(self._method, update_rule=rule)
        if self._choice()[0] == "update":  # whatever the optimizers, of which there are none yet
            check_updates(self._method, self.optimizers)
        self._exchange: GradientExchanger | UpdateExchanger | None = None
        # The reducer outlives fit, so that a checkpoint can be written afterwards.
        self._reducer: Reducer | None = None
        self._consistent = True  # whether the reducer's state belongs to a complete step

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the exchange of the present fit, which belongs to this process: a copy begins its own."""
        return {**super().__getstate__(), "_exchange": None, "_reducer": None, "_sigterm": None}

    @property
    def accelerator(self) -> Any:
        """The accelerator; a Trainer sets its own before anything else, which shows by which name it knows Lightning.

        Raises:
            TypeError: the Trainer is of Lightning's other name, and this class is derived from ours.
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
        """Become a new strategy of the same options, for Lightning's other name."""
        module = f"{__package__}.{namespace.replace('.', '_')}"
        twin, arguments = import_module(module).SparseDDPStrategy, self._arguments
        if SparseDDP not in type(self).__bases__:
            raise TypeError(
                f"{type(self).__name__} derives from SparseDDPStrategy for {self._namespace}, and this Trainer is of "
                f"{namespace}. Derive it from {module}.SparseDDPStrategy, or make the Trainer by {self._namespace}."
            )
        self.__dict__.clear()
        self.__class__ = twin
        self.__init__(**arguments)  # type: ignore[misc]  # with what the base class of this name makes

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launching_process = os.getpid()

    @property
    def launcher(self) -> Any:
        """What starts the ranks.

        Raises:
            RuntimeError: this process is in the process group of an earlier fit, in which new ranks would wait.
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
        """Do nothing yet: `setup_optimizers`, which comes next, decides whether the model is wrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._reducer = None  # free the residuals of an earlier fit before new ones are allocated
        if self._hierarchical:
            self._on_two_levels(self.num_processes)
        what, why = self._choice()
        ranks: list[Any] = [None] * self.world_size
        assert self.model is not None
        # Dtypes too: where they differ, gloo aborts a process when DDP makes all weights rank 0's.
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in self.model.parameters()})
        optimizers = [type(optimizer).__name__ for optimizer in self.optimizers]
        dist.all_gather_object(ranks, f"{what} of {' and '.join(dtypes)} by {' and '.join(optimizers)}")
        if len(set(ranks)) > 1:
            raise ValueError(
                f"Ranks differ in what they exchange: {', '.join(f'rank {i}: {x}' for i, x in enumerate(ranks))}. "
                f"Give all ranks the same optimizers, the same precision and the same exchange."
            )
        if what == "gradient" and self._compresses:  # where ranks are alike, so that all of them hear of it
            check_optimizers(self.optimizers, self._method)
        if what == "update":
            self._begin_updates()
        else:
            super().configure_ddp()
        assert self._exchange is not None
        self._reducer, self._consistent = self._exchange.reducer, True
        if self.world_size > 1:
            self._sigterm = EndTogether(trainer, self._exchange.comm, launched=self._launched)
        self._exchange_before_callbacks(trainer)
        if isinstance(self._method.aggregator, TwoLevel):
            nodes: list[Any] = [None] * self.world_size
            dist.all_gather_object(nodes, self.node_rank)
            check_placement(nodes, self._method.aggregator.ranks_per_node)
        if self.global_rank == 0:
            self._inform(run_summary(self._reducer, trainer, f"{self._exchange.note}{self._note} Chosen by {why}."))
        if self.world_size == 1 and self._compresses:
            log.warning(
                f"{type(self).__name__} on one rank sends nothing to anybody, yet keeps back what it does not choose: "
                f"that only costs steps. Train with strategy='auto', or on several devices."
            )

    def _on_two_levels(self, *ranks_per_node: int) -> None:
        one_level = self._method.aggregator
        if isinstance(one_level, TwoLevel):
            one_level = one_level.inter_node
        self._method = replace(self._method, aggregator=TwoLevel(one_level, *ranks_per_node))

    def _choice(self) -> tuple[str, str]:
        """Return what ranks exchange, "update" or "gradient", and by what this was chosen."""
        if self._exchanged != "auto":
            return self._exchanged, f"exchange={self._exchanged!r}"
        if self._method.update_rule is not None:
            return "update", "the method"
        if (self._local_steps or 1) > 1:
            return "update", f"local_steps={self._local_steps}"
        if self._overlap == "next_step":
            return "update", "overlap='next_step'"
        if not self._method.is_sparse:
            return "gradient", "the method"
        if share_parameters(self.optimizers):
            return (
                "gradient",
                f"the optimizers: {' and '.join(type(x).__name__ for x in self.optimizers)} share parameters",
            )
        reasons = [(type(optimizer).__name__, why_gradients(optimizer)) for optimizer in self.optimizers]
        if others := [name for name, reason in reasons if reason is None]:
            return "update", f"the optimizer, {others[0]}"
        return "gradient", "the optimizer" + "".join(f": {name} {reason}" for name, reason in reasons[:1])

    def on_train_start(self) -> None:
        super().on_train_start()
        wrap("scale", self._scaled_loss)
        if self._update_exchange is not None:
            self._update_exchange.begin()
        elif self.global_rank == 0:
            if (self._method.density or 1) < 1:
                warn_of_sparse_gradients(self.optimizers)
            warn_of_two_momenta(self.optimizers, self._method)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.reducer.epoch = self.lightning_module.trainer.current_epoch
        if self._sigterm is not None:
            self._sigterm.begin()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._sigterm is not None:
            self._sigterm.begin(validation=True)
        return super().validation_step(*args, **kwargs)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._sigterm is not None:
            self._sigterm.finish()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._sigterm is not None:
            self._sigterm.explain(exception)
        atexit.unregister(_destroy_process_group)  # would wait for collectives that may never complete
        if self._exchange is not None:
            self._exchange.fail(exception)
        elif dist.is_initialized():
            report_or_diagnose(exception)

    def teardown(self) -> None:
        # Lightning may call teardown after an exception, and before setup.
        unwrap("scale", self._scaled_loss)
        sigterm, self._sigterm = self._sigterm, None
        if sigterm is not None:
            sigterm.close()
        if self._exchange is not None:
            self._exchange.close()
            self._consistent = self._exchange.is_consistent
            self._exchange = None
        if sigterm is not None:
            sigterm.leave()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add `<method>_ddp` of every method, with Lightning's suffixes; and its aliases `<method>`, `ddp_<method>`."""
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
