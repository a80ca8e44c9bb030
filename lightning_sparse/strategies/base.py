"""The common part of the strategies for Trainer and Fabric: options, choice of the exchange, launch of the ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_sparse._lightning import INSTALLED, Mixin
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.hooks import agree
from lightning_sparse.methods import Method
from lightning_sparse.replica_checkpoint import gather
from lightning_sparse.strategies.fit_checks import check_optimizers, check_placement
from lightning_sparse.strategies.saves import snapshot
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


class SparseStrategy(Mixin):  # type: ignore[misc]
    """The common part of all strategies: Lightning's two names, the launch of ranks, and the start of an exchange."""

    _namespace: ClassVar[str]
    """Lightning's name in this strategy, an entry of `INSTALLED`."""
    _clipping: ClassVar[str]
    """Advice to clip gradients after backward."""
    _class_name: ClassVar[str]
    """The name of the strategy's class in the module of each of Lightning's names."""
    _plugin_name: ClassVar[str]
    """The name of the attribute with Lightning's precision plugin."""

    @classmethod
    def __init_subclass__(cls, lightning: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if lightning:  # the class for one of Lightning's names
            cls._namespace, cls._class_name, cls.__doc__ = lightning, cls.__name__, cls.__bases__[0].__doc__

    def inform(self, text: str) -> None:
        """Log at INFO, through Lightning's logger, which shows it, unless the program has configured logging."""
        lightnings = logging.getLogger(self._lightning(self._namespace).__name__)
        (log if lightnings.propagate else lightnings).info(text)

    def warn_of_lost_residuals(self, path: Any, why: str) -> None:
        """Warn on rank 0 that the residuals of a checkpoint are not loaded."""
        if self.global_rank == 0:
            log.warning(
                f"The residuals of {str(path)!r} are lost, because {why} here: entries that were not sent yet do not "
                f"reach the weights. Resume with the strategy that wrote them."
            )

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

    # After an error:

    @property
    def interrupted(self) -> bool:
        """Whether an error has ended training."""
        return False

    def all_ranks_present(self) -> bool:
        """Return whether all ranks will join the collective that this rank is about to call."""
        return True

    # Checkpoints:

    def _snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of a model or an optimizer for the CheckpointIO, which writes the states of global rank 0."""
        return snapshot(state, self.checkpoint_io) if self.is_global_zero else state

    # The exchange:

    @property
    def scaler(self) -> Any:
        """Lightning's gradient scaler; None if there is none, or if it is disabled and so skips no step."""
        scaler = getattr(getattr(self, self._plugin_name), "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

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
                f"each rank's own gradient after it was unscaled, at √P times the threshold that you give."
            )
        return self._options.with_nodes(self.num_processes), what, why

    def _agree_on(
        self, exchanged: str, method: Method, model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        """Check that all ranks have made the same choice, before the first collective.

        Args:
            exchanged: the quantity, "gradient" or "update".

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

    def _began(self, training: Training, why: str, loggers: Sequence[Any] = ()) -> None:
        """Check the placement of the ranks, and log a summary of the exchange that has begun.

        Args:
            training: has the exchange.
            why: the reason for the exchanged quantity.
        """
        assert training.exchanger is not None
        reducer = training.exchanger.reducer
        if isinstance(two_level := reducer.method.aggregator, TwoLevel):
            check_placement(gather(self.node_rank), two_level.ranks_per_node)
        if self.global_rank == 0:
            self.inform(run_summary(reducer, loggers, f"{training.exchanger.note}{training.note} Chosen by {why}."))
        if reducer.workers == 1 and reducer.method.compresses and self.global_rank == 0:
            kind, remedy = "rank", "Train with strategy='auto', or on several devices."
            if reducer.comm.size > 1:
                kind, remedy = "node", "Train with strategy='ddp', or on several nodes."
            elif self.world_size > 1:
                kind, remedy = "replica", "Set replicas, or train with strategy='dense_hsdp'."
            log.warning(
                f"{type(self).__name__} on one {kind} sends nothing to anybody, yet keeps back the entries that it "
                f"does not choose, which only costs steps. {remedy}"
            )
