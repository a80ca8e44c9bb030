"""A Trainer's calls of a strategy: steps, validation, errors and the end of a fit."""
# Lightning's strategy is the next base:
# mypy: disable-error-code="misc"

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse._lightning import Mixin
from lightning_sparse.hooks import Exchanger, UpdateExchanger
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.base import destroy_process_group
from lightning_sparse.strategies.rendezvous import Rendezvous
from lightning_sparse.strategies.shutdown import CoordinatedShutdown
from lightning_sparse.strategies.training import Training

log = logging.getLogger(__name__)


class TrainerCalls(Mixin):  # type: ignore[misc]
    """A Trainer's calls of a `SparseStrategy`, without the wrapping of the model and checkpoints."""

    _plugin_name = "precision_plugin"
    _make_exchanger: Any = UpdateExchanger

    def _begin(self) -> None:
        """Make the attributes that do not depend on options, at the end of the constructor."""
        self._training = Training()
        self._reducer: Reducer | None = None  # of the running fit, or of the last one, for a checkpoint afterwards
        self._is_consistent = True  # whether its state belongs to a complete step
        self._rendezvous = Rendezvous()
        self._shutdown: CoordinatedShutdown | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the present fit, which belongs to this process: a copy starts a new one."""
        state: Any = super().__getstate__()
        return {**state, "_training": Training(), "_reducer": None, "_shutdown": None}

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

    def _begin_fit(self, trainer: Any, training: Training, why: str) -> None:
        """Begin a fit, when the optimizers are set up.

        Args:
            training: has the exchange.
            why: the reason for the exchanged quantity.
        """
        assert training.exchanger is not None
        training.ended = self._training.ended
        self._training, self._reducer, self._is_consistent = training, training.exchanger.reducer, True
        if self.world_size > 1 and self._shutdown is None:
            self._shutdown = CoordinatedShutdown(trainer, training.exchanger.comm, launched=self._launched)
            # Lightning calls callbacks before the strategy. They may upload for minutes, while the other ranks wait.
            first = import_module(self._namespace).Callback()
            first.on_exception = self._report
            trainer.callbacks.insert(0, first)
        self._began(training, why, trainer.loggers)

    def wait_for_exchange(self) -> bool:
        """Wait until observers have seen the pending exchange; return whether it succeeded. The next raises errors."""
        return self._training.wait()

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._rendezvous.begin_run()  # before code of the user, which may fail on one rank alone

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size > 1:
            self._rendezvous.number_handshakes()
        if dist.get_backend() == "gloo":
            atexit.register(destroy_process_group, os.getpid())

    def setup_optimizers(self, trainer: Any) -> None:
        if self.exchanger is not None:
            raise self._training.failed(
                f"setup_optimizers of {type(self).__name__} was called within fit, and new optimizers would not "
                f"take part in the exchange. Change the present ones, by add_param_group or by their options; or end "
                f"this fit and begin another one."
            )
        super().setup_optimizers(trainer)
        self._start_exchange(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)
        if self._shutdown is not None:
            self._shutdown.protect_workers(dataloader)
        return dataloader

    # Training:

    def on_train_start(self) -> None:
        super().on_train_start()
        self._training.begin()
        module: Any = self.lightning_module
        continues = self._training.ended is not None and self._training.ended() is module
        if continues and module.trainer.global_step > 0 and self.global_rank == 0 and self.reducer.step == 0:
            log.warning(
                "This fit begins without the residuals of the last one: entries that it has not sent are lost. To "
                "keep them, call trainer.save_checkpoint('last.ckpt') after it, and fit with ckpt_path='last.ckpt'."
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._reducer is not None:
            self._begin_epoch(self._reducer, self.lightning_module.trainer.current_epoch)
        if self._shutdown is not None:
            self._shutdown.begin()
        if self.exchanger is not None:  # before a collective of FSDP2, or many local steps
            self.exchanger.session.raise_known_failure()

    def _begin_epoch(self, reducer: Reducer, epoch: int) -> None:
        """Set the epoch of the density warm-up. If the density changes, wait for ranks with more batches: they fail."""
        before, reducer.epoch = reducer.epoch, epoch
        options = reducer.options
        if options.density_warmup_steps is None and before < min(epoch, len(options.density_warmup or ())):
            assert self.exchanger is not None
            self._training.wait()
            self.exchanger.session.outside().all_reduce(torch.zeros(1, device=self.root_device))

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._training.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        self._training.after_backward(partial(super().post_backward, closure_loss))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self._training.step(optimizer, closure, step)

    def pause(self) -> None:
        """Note that all ranks meet outside of a step. If one has more batches, it gets an error in its next step."""
        if self.exchanger is not None and not self.may_be_alone:
            self.exchanger.session.pause()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._training.exchange_pending()
        module: Any = self.lightning_module
        sources = module, getattr(module.trainer, "datamodule", None)
        if not any(getattr(each, "allow_zero_length_dataloader_with_multiple_devices", False) for each in sources):
            self.pause()  # otherwise a rank without batches does not come here

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.all_ranks_present():
            return tensor
        if (module := self.lightning_module) is not None and module.trainer.training:
            batches = module.trainer.fit_loop.epoch_loop.batch_progress
            if batches.is_last_batch and batches.current.ready == batches.current.completed:  # the mean of an epoch
                self.pause()
        return super().reduce(tensor, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._shutdown is not None:
            self._shutdown.begin(validation=True)
        return super().validation_step(*args, **kwargs)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._training.exchange_pending()
        self.pause()  # if this rank alone ends training, the others learn it before it waits for them
        self._end_training()

    def _end_training(self) -> None:
        """Meet the other ranks after the last step."""
        if self._shutdown is not None:
            self._shutdown.finish()

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        return self._snapshot(super().optimizer_state(optimizer))

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
        if not dist.is_initialized() or not self.may_be_alone:
            return True
        left_collective = self.exchanger is not None and self.exchanger.left_collective
        return self._rendezvous.all_ranks_present(left_collective=left_collective)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.all_ranks_present():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self.all_ranks_present():
            return obj
        return super().broadcast(obj, src)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._shutdown is not None:
            self._shutdown.explain(exception)
        atexit.unregister(destroy_process_group)  # it would wait for collectives that may never complete
        self._report(None, None, exception)

    def _report(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Report an error to the other ranks, unless it ends training on all ranks. It may be called twice."""
        if self._shutdown is None or not self._shutdown.ends_by(exception):
            self._training.fail(exception)

    def teardown(self) -> None:
        # Lightning may call teardown after an exception, and before setup.
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown.close()
            callbacks = shutdown.trainer.callbacks  # the module may have another trainer now
            callbacks[:] = [each for each in callbacks if getattr(each, "on_exception", None) != self._report]
        self._training.close()
        ended = self._training.ended
        if self.exchanger is not None:
            self._is_consistent, reducer = self.exchanger.is_consistent, self.exchanger.reducer
            has_residuals = reducer.method.memory.error_feedback and reducer.step > 0
            ended = weakref.ref(self.lightning_module) if has_residuals else None
        self._training = Training()
        self._training.ended = ended
        if shutdown is not None:
            shutdown.leave()
        try:
            self._end_fit(super().teardown)
        finally:
            self._rendezvous.end_fit()

    def _end_fit(self, teardown: Callable[[], None]) -> None:
        """End a fit by Lightning's `teardown`."""
        teardown()
