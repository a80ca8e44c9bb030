"""The strategy without its base class. Lightning has two namespaces, and each needs a subclass of its DDPStrategy."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import delay_static_graph_again
from lightning_sparse.strategies.base import SparseStrategy
from lightning_sparse.strategies.checkpoints import Checkpoints, Infos, Part
from lightning_sparse.strategies.ddp_options import DDPOptions
from lightning_sparse.strategies.gradient_training import GradientTraining
from lightning_sparse.strategies.trainer import TrainerCalls
from lightning_sparse.strategies.trainer_updates import TrainerUpdates
from lightning_sparse.strategies.training import Training

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

log = logging.getLogger(__name__)


class SparseDDP(DDPOptions, TrainerCalls, SparseStrategy, DDPStrategy):
    """Data-parallel training with a Trainer, with the options of `DDPOptions`."""

    __doc__ = DDPOptions.__doc__

    _clipping = "set gradient_clip_val of the Trainer"

    def _begin(self) -> None:
        super()._begin()
        self._loaded_from: Any = None  # the path of the checkpoint that was loaded last
        self._checkpoints = Checkpoints(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checkpoints = copy.copy(self._checkpoints)
        self._checkpoints.strategy = self

    def configure_ddp(self) -> None:
        """Do nothing. `setup_optimizers` comes next and decides whether to wrap the model."""

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        with self._with_ddp_options(init_sync=False):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: Lightning registers hooks on CUDA only. `GradientTraining` registers ours."""

    def _wrap(self) -> DistributedDataParallel:
        """Wrap the model."""
        delay_static_graph_again(self)
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    def _start_exchange(self, trainer: Any) -> None:
        self._reducer = None  # free the residuals of an earlier fit before allocating new ones
        assert self.model is not None
        method, what, why = self._choose(self.optimizers)
        self._agree_on(what, method, self.model, self.optimizers)
        training: Training
        if what == "update":
            training = TrainerUpdates(self, self._exchange_updates(self.model, self.optimizers, method))
        else:
            training = GradientTraining(self, self._wrap(), self.optimizers, method)
        self._begin_fit(trainer, training, why)

    def _end_training(self) -> None:
        # If this rank alone ends training, others wait for it in a step, and would not join a collective.
        if self._checkpoints.has_saved and self._rendezvous.all_ranks_present("end"):
            self._checkpoints.end_training()
        super()._end_training()

    def _end_fit(self, teardown: Callable[[], None]) -> None:
        self._checkpoints.close(teardown)

    # Checkpoints:

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._snapshot(self._training.state_dict(super().lightning_module_state_dict))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        def enter(infos: Infos) -> None:
            checkpoint[sidecars.KEY] = infos[0]

        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options=storage_options)
        # Training does not resume from a checkpoint of weights alone.
        parts = self._parts(filepath) if "optimizer_states" in checkpoint else []
        if parts:
            self.pause()
        self._checkpoints.save(parts, enter, filepath, write)

    def _parts(self, filepath: Any) -> list[Part]:
        """Return the exchange whose state belongs to a checkpoint; none if this process does not train."""
        if self._reducer is None:
            log.warning(
                f"{str(filepath)!r} gets no residuals: they belong to the processes that trained, which are not this "
                f"one. Save from within fit, with ModelCheckpoint for example."
            )
            return []
        if self.exchanger is not None:
            if self.may_be_alone:
                # A callback may save on an exception of this rank alone. The other ranks would wait in backward.
                self.exchanger.session.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
            self._is_consistent = self.exchanger.drain()
        waits = self.exchanger is not None and self.exchanger.gradients_wait(self.optimizers)
        return [Part(self._reducer, self._optimizers_by_name, self._is_consistent, waits)]

    @property
    def _optimizers_by_name(self) -> dict[str, Optimizer]:
        return {str(i): optimizer for i, optimizer in enumerate(self.optimizers)}

    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        module: Any = self.lightning_module
        if self._reducer is not None and self.exchanger is None and module.trainer.state.fn != "fit":
            self._reducer.segment_states.clear()  # residuals of the last fit do not belong to an evaluation's weights
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._training.refresh_parameters()
        path, optimizers = self._loaded_from, self._optimizers_by_name
        states = {str(i): state for i, state in enumerate(checkpoint["optimizer_states"])}
        load = partial(super().load_optimizer_state_dict, checkpoint)
        module = type(self.lightning_module).__name__
        remedy = f"{module}.load_from_checkpoint({str(path)!r}), and fit without ckpt_path"
        self._checkpoints.load_together(optimizers, states, load, path, remedy)
        self._load_residuals(checkpoint.get(sidecars.KEY), states, path)

    def _load_residuals(self, info: Any, states: Mapping[str, Any], path: Any) -> None:
        if self._reducer is not None:
            self._checkpoints.load(Part(self._reducer, self._optimizers_by_name), info, states, path)
        elif info is not None:  # this process has forked or spawned the ranks, for example
            log.warning(
                f"The residuals of {str(path)!r} are not loaded: they belong to processes that train, and this one "
                f"does not. Pass ckpt_path to fit."
            )
