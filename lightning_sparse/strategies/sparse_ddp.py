"""The strategy without its base class. Lightning has two namespaces, and each needs a subclass of its DDPStrategy."""

from __future__ import annotations

import atexit
import copy
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.hooks import Exchanger, UpdateExchanger
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.base import SparseStrategy, destroy_process_group
from lightning_sparse.strategies.checkpoints import Checkpoints, Infos, Part
from lightning_sparse.strategies.gradient_training import GradientTraining
from lightning_sparse.strategies.rendezvous import Rendezvous
from lightning_sparse.strategies.shutdown import CoordinatedShutdown
from lightning_sparse.strategies.trainer_updates import TrainerUpdates
from lightning_sparse.strategies.training import Training, enabled_scaler

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

log = logging.getLogger(__name__)


class SparseDDP(SparseStrategy, DDPStrategy):
    """Data-parallel training with a Trainer, with the options of `SparseStrategy`."""

    __doc__ = SparseStrategy.__doc__

    _class_name, _clipping = "SparseDDPStrategy", "set gradient_clip_val of the Trainer"

    def _begin(self) -> None:
        self._training = Training()
        self._reducer: Reducer | None = None  # of the running fit, or of the last one, for a checkpoint afterwards
        self._is_consistent = True  # whether its state belongs to a complete step
        self._loaded_from: Any = None  # the path of the checkpoint that was loaded last
        self._checkpoints = Checkpoints(self)
        self._rendezvous = Rendezvous()
        self._shutdown: CoordinatedShutdown | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the present fit, which belongs to this process: a copy starts a new one."""
        return {**super().__getstate__(), "_training": Training(), "_reducer": None, "_shutdown": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checkpoints = copy.copy(self._checkpoints)
        self._checkpoints.strategy = self

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running fit, or of the last one."""
        if self._reducer is None:
            raise RuntimeError("The strategy has a reducer only from the start of fit.")
        return self._reducer

    @property
    def exchanger(self) -> Exchanger | None:
        """The exchanger of the running fit; None if no fit is running."""
        return self._training.exchanger

    def setup_distributed(self) -> None:
        super().setup_distributed()
        self._destroys_groups_at_exit()

    @property
    def scaler(self) -> Any:
        return enabled_scaler(self.precision_plugin)

    def configure_ddp(self) -> None:
        """Do nothing. `setup_optimizers` comes next and decides whether to wrap the model."""

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        with self._without_broadcast():
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: Lightning registers hooks on CUDA only. `GradientTraining` registers ours."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._reducer = None  # free the residuals of an earlier fit before allocating new ones
        assert self.model is not None
        method, what, why = self._choose(self.optimizers)
        self._agree_on(what, method, self.model, self.optimizers)
        if what == "update":
            self._training = TrainerUpdates(
                self, self._exchange_updates(UpdateExchanger, self.model, self.optimizers, method)
            )
        else:
            super().configure_ddp()
            assert isinstance(self.model, DistributedDataParallel)
            self._training = GradientTraining(self, self.model, self.optimizers, method)
        exchanger = self._training.exchanger
        assert exchanger is not None
        self._reducer, self._is_consistent = exchanger.reducer, True
        if self.world_size > 1:
            self._shutdown = CoordinatedShutdown(trainer, exchanger.comm, launched=self._launched)
        self._began(self._training, why, trainer.loggers)

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
        atexit.unregister(destroy_process_group)  # it would wait for collectives that may never complete
        self._training.fail(exception)

    def teardown(self) -> None:
        # Lightning may call teardown after an exception, and before setup.
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown.close()
        self._training.close()
        if self.exchanger is not None:
            self._is_consistent = self.exchanger.is_consistent
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
        def enter(infos: Infos) -> None:
            checkpoint[sidecars.KEY] = infos[0]

        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options=storage_options)
        # Training does not resume from a checkpoint of weights alone.
        parts = self._parts(filepath) if "optimizer_states" in checkpoint else []
        self._checkpoints.save(parts, enter, filepath, write, super().remove_checkpoint)

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
                self.exchanger.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
            self._is_consistent = self.exchanger.drain()
        return [Part(self._reducer, self._optimizers_by_name, self._is_consistent)]

    @property
    def _optimizers_by_name(self) -> dict[str, Optimizer]:
        return {str(i): optimizer for i, optimizer in enumerate(self.optimizers)}

    def remove_checkpoint(self, filepath: Any) -> None:
        self._checkpoints.remove(filepath, super().remove_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._training.refresh_parameters()
        path, optimizers = self._loaded_from, self._optimizers_by_name
        states = {str(i): state for i, state in enumerate(checkpoint["optimizer_states"])}
        load = partial(super().load_optimizer_state_dict, checkpoint)
        module = type(self.lightning_module).__name__
        remedy = f"{module}.load_from_checkpoint({str(path)!r}), and fit without ckpt_path"
        self._checkpoints.load_together(optimizers, states, load, path, remedy)
        info = checkpoint.get(sidecars.KEY)
        if self._reducer is not None:
            self._checkpoints.load(Part(self._reducer, optimizers), info, states, path)
        elif info is not None:  # this process has forked or spawned the ranks, for example
            log.warning(
                f"The residuals of {str(path)!r} are not loaded: they belong to processes that train, and this one "
                f"does not. Pass ckpt_path to fit."
            )
