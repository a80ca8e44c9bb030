"""The Trainer's strategy for models that FSDP2 shards, without its base class. Replicas of the model exchange updates.

    Trainer(strategy="topk_hsdp", num_nodes=2, devices=8)  # two replicas, each sharded over the devices of a node

`hsdp_options` has the mesh and the exchange.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.reducer import Reducer
from lightning_sparse.shards import is_sharded, reshard
from lightning_sparse.strategies.base import SparseStrategy
from lightning_sparse.strategies.hsdp_options import HSDPOptions
from lightning_sparse.strategies.trainer import TrainerCalls
from lightning_sparse.strategies.trainer_updates import TrainerUpdates

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ModelParallelStrategy
else:
    ModelParallelStrategy = object

log = logging.getLogger(__name__)


class SparseHSDP(HSDPOptions, TrainerCalls, SparseStrategy, ModelParallelStrategy):
    """Replicas of a sharded model with a Trainer, with the options of `HSDPOptions`.

    The LightningModule shards its model in `configure_model`; its `self.device_mesh` is the mesh.
    """

    __doc__ = HSDPOptions.__doc__

    _sharding = (
        "In configure_model, call fully_shard(module, mesh=self.device_mesh['data_parallel']) with the module that "
        "holds it; or freeze it by requires_grad_(False)."
    )

    def _begin(self) -> None:
        super()._begin()
        self._exchanger: UpdateExchanger | None = None  # of the running fit, or of the last one, for a checkpoint

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_exchanger": None}

    def _start_exchange(self, trainer: Any) -> None:
        self._reducer = self._exchanger = None  # free the residuals of an earlier exchange before allocating new ones
        assert self.model is not None
        self._exchanger = self._begin_between_replicas(self.model, self.optimizers)
        if self._exchanger is not None:
            training = TrainerUpdates(self, self._exchanger)
            training.note = self._note
            self._begin_fit(trainer, training, "the strategy")

    @property
    def reducer(self) -> Reducer:
        if self._is_dense and self._reducer is None:
            raise RuntimeError(
                f"{type(self).__name__}('dense') compresses nothing and has no reducer. Remove the callbacks of "
                f"lightning_sparse, or take another method."
            )
        return super().reducer

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Run configure_model in the block. Warn if it replaces parameters that an earlier run has sharded."""
        module: Any = self.lightning_module
        reshard(module)
        before = {name: weakref.ref(param) for name, param in module.named_parameters() if is_sharded(param)}
        with super().model_sharded_context():
            yield
        replaced = [name for name, param in module.named_parameters() if name in before and before[name]() is not param]
        if replaced and self.global_rank == 0:
            log.warning(
                f"configure_model has replaced {replaced[0]!r} of the run before, so its weights are lost. Lightning "
                f"calls configure_model in each fit, validate, test and predict. If the model exists, return at once."
            )

    def setup(self, trainer: Any) -> None:
        # FSDP2 keeps tensors of its first forward pass. Training cannot write to tensors made in inference mode.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        super().setup(trainer)

    def _end_fit(self, teardown: Callable[[], None]) -> None:
        teardown()
        self.checkpoint_io.teardown()  # waits for asynchronous saves. Lightning's ModelParallelStrategy leaves it out

    def _report(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self.exchanger is not None:  # FSDP2's collectives say that a rank has ended, but not why
            self.exchanger.session.fail(exception, in_model=True)
        super()._report(trainer, module, exception)

    # Checkpoints:

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.may_be_alone and not self._is_distributed:
            self._training.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
            raise RuntimeError("The weights are not saved: training failed, and whole weights need all ranks.")
        return self._snapshot(self._training.state_dict(super().lightning_module_state_dict))

    def _snapshot(self, state: dict[str, Any]) -> dict[str, Any]:
        # Torch writes distributed checkpoints at once, without the CheckpointIO.
        return state if self._is_distributed else super()._snapshot(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save, has_optimizers = super().save_checkpoint, "optimizer_states" in checkpoint
        if storage_options is not None:  # Lightning refuses them
            save(checkpoint, filepath, storage_options)
            return
        exchange = self._exchanger if has_optimizers and self._is_distributed else None
        is_consistent = exchange is None or (self._is_consistent if self.exchanger is None else exchange.drain())
        is_alone = not is_consistent or (exchange is not None and self.may_be_alone)
        if is_alone or (self._is_distributed and not self.all_ranks_present()):
            log.warning(f"{str(filepath)!r} is not saved: training failed, and a save needs all ranks.")
            return
        if exchange is not None:
            self.pause()
        elif has_optimizers:
            remedy = "To resume bit for bit, save within fit, with save_distributed_checkpoint=True."
            self._inform_of_no_residuals(filepath, remedy)

        def write(added: Mapping[str, Any]) -> None:
            checkpoint.update(added)
            if has_optimizers and self._is_distributed and self._replica:
                # Torch's distributed checkpoint stores one copy of tensors with equal names, and would mix replicas.
                checkpoint["optimizer_states"] = []
            save(checkpoint, filepath, storage_options)

        assert self.model is not None
        self._save(filepath, None if exchange is None else (self.model, exchange), write)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            sidecars.prune(sidecars.absolute(filepath), [])

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module: Any = self.lightning_module
        info = checkpoint.get(sidecars.KEY)
        if self.exchanger is not None:
            self._load_residuals(info, checkpoint, checkpoint_path)
        elif module.trainer.state.fn != "fit":  # weights for validation, for example
            self._exchanger = None  # the residuals of the last fit do not belong to them
        elif info is not None:
            self.warn_of_lost_residuals(checkpoint_path, "replicas average gradients")
        return checkpoint

    def _load_residuals(self, info: Any, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Load the state in which replicas differ; `info` is the checkpoint's entry about it, if it has one."""
        if self._exchanger is not None:
            assert self.model is not None
            self._load_replica(path, info, self.model, self._exchanger)
