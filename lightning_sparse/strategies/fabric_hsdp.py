"""Fabric's strategy for models that FSDP2 shards, without its base class. Replicas of the model exchange updates.

    strategy = FabricSparseHSDPStrategy("topk", parallelize_fn=parallelize, replicas=2)
    fabric = Fabric(strategy=strategy, devices=8)
    fabric.launch()
    model = fabric.setup_module(model)                         # calls parallelize(model, mesh)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))  # begins the exchange

`hsdp_options` has the mesh and the exchange.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.hooks import report_errors_to_peers
from lightning_sparse.hooks.updates import check_all_stepped
from lightning_sparse.methods import Method
from lightning_sparse.shards import is_any_sharded, reshard, without_reduction
from lightning_sparse.strategies.base import SparseStrategy
from lightning_sparse.strategies.fabric_calls import FabricCalls
from lightning_sparse.strategies.fit_checks import check_not_wrapped
from lightning_sparse.strategies.hsdp_options import HSDPOptions
from lightning_sparse.strategies.training import Training
from lightning_sparse.strategies.update_training import UpdateTraining

if TYPE_CHECKING:
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
else:
    ModelParallelStrategy = object


def _unchanged(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Parallelize nothing: the user has sharded the model before."""
    return module


class FabricSparseHSDP(HSDPOptions, FabricCalls, SparseStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """Replicas of a sharded model with Fabric, with the options of `HSDPOptions`.

    Args:
        method: see `HSDPOptions`.
        parallelize_fn: shards a model: it gets the model and the mesh, and returns the model. See Lightning's
            ModelParallelStrategy. None: shard models yourself, after `fabric.launch()` and before you set them up, over
            `fabric.strategy.device_mesh["data_parallel"]`.
        **options: see `HSDPOptions`.
    """

    _sharding = (
        "Call fully_shard(module, mesh=mesh['data_parallel']) with the module that holds it: in a function "
        "parallelize(model, mesh) that returns the model, FabricSparseHSDPStrategy(..., parallelize_fn=parallelize); "
        "or before you set up the model, with mesh=fabric.strategy.device_mesh['data_parallel']. Or freeze it by "
        "requires_grad_(False)."
    )

    def __init__(
        self,
        method: str | Method = "topk",
        *,
        parallelize_fn: Callable[[Any, Any], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(method, parallelize_fn=parallelize_fn or _unchanged, **options)

    def _begin(self) -> None:
        super()._begin()
        self._backward_sync_control: Any = SimpleNamespace(no_backward_sync=without_reduction)

    # Models and optimizers:

    def _prepare(self, module: torch.nn.Module) -> Any:
        check_not_wrapped(module, but="FSDPModule")
        module = self._set_up(module)
        reshard(module)
        return module

    def _waits(self, module: torch.nn.Module) -> bool:
        return not self._is_dense

    def _begin_exchange(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> torch.nn.Module:
        """Begin the exchange of a model; return it."""
        if not self._is_dense:
            with report_errors_to_peers():
                check_all_stepped(module, optimizers)
        exchanger = self._begin_between_replicas(module, optimizers)
        if exchanger is None:
            self._trainings[module] = Training()
            return module
        self._trainings[module] = training = UpdateTraining(self, exchanger)
        training.note = self._note
        self._began(training, "the strategy")
        return module

    # Training:

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the cause of an error in the block if a collective of the model broke off."""
        try:
            yield
        except Exception as error:
            for exchanger in self._exchangers:
                exchanger.session.fail(error, in_model=True)
            raise

    @property
    def backward(self) -> Callable[..., None]:  # type: ignore[override]
        """Lightning's backward pass. The property keeps Lightning from taking it for another one."""
        stock = super().backward

        @functools.wraps(stock)
        def backward(*args: Any, **kwargs: Any) -> None:
            with self._explained():
                stock(*args, **kwargs)

        return backward

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip the gradient of a replica by its norm over all shards."""
        with self._explained():
            return super().clip_gradients_norm(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take an optimizer's step, after the checks and the clipping of gradients."""
        with self._explained():
            return super().optimizer_step(optimizer, **kwargs)

    # Checkpoints:

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint, and the state in which replicas differ if `state` has all optimizers of the model.

        It completes pending exchanges first.
        """
        _reshard_all(state.values())
        self._exchange_pending()
        write = partial(super().save_checkpoint, path, storage_options=storage_options, filter=filter)
        checkpoint, found = {**state}, None
        sharded = [each for each in state.values() if isinstance(each, torch.nn.Module) and is_any_sharded(each)]
        if storage_options is not None or len(sharded) != 1 or (self._is_distributed and filter is not None):
            write(state)  # Lightning refuses it
            return
        if self._is_distributed:
            _initialize_states(sharded[0], state)
            found = self._resumed(state)
            if self._replica:
                # Torch's distributed checkpoint stores one copy of tensors with equal names, and would mix replicas.
                checkpoint = {name: value for name, value in state.items() if not isinstance(value, Optimizer)}
        if found is None and _has_optimizer(state):
            remedy = "To resume bit for bit, save all optimizers, with save_distributed_checkpoint=True."
            self._inform_of_no_residuals(path, remedy)
        self._save(path, found, lambda added: write({**checkpoint, **added}))

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint into the objects of `state`, on all ranks. It completes pending exchanges first.

        `Fabric.load_raw` calls it with one object, and only this object is loaded.

        Returns:
            The items that were not restored.
        """
        _reshard_all(state.values() if isinstance(state, Mapping) else [state])
        if isinstance(state, torch.nn.Module | Optimizer):
            return super().load_checkpoint(path, state, *args, **kwargs)
        self._exchange_pending()
        objects = [*(state or {}).values()]  # Lightning may replace them
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        info = rest.pop(sidecars.KEY, None)
        if (found := self._resumed(state)) is not None:
            self._load_replica(path, info, *found)
        elif info is not None and _has_optimizer(state):
            if self._is_dense:
                self.warn_of_lost_residuals(path, "replicas average gradients")
            elif not self._warn_of_early_load(path, state) and self.global_rank == 0:
                self.inform(
                    f"The residuals of {str(path)!r} are not loaded: the state lacks an optimizer of the model."
                )
        for training in self._trainings_in(objects):
            training.begin()  # from replica 0's weights
        return rest

    def _resumed(self, state: Mapping[str, Any]) -> tuple[torch.nn.Module, Any] | None:
        """Return a model with its exchange if a checkpoint's state has the model and all its optimizers."""
        held = {id(value) for value in state.values()}
        for module, training in self._trainings.items():
            module = getattr(module, "_orig_mod", module)  # Fabric saves the module within torch.compile's
            if training.exchanger is not None and held.issuperset({id(module), *map(id, training.optimizers)}):
                return module, training.exchanger
        return None


def _reshard_all(objects: Iterable[Any]) -> None:
    """Make the models among a checkpoint's objects hold shards. Lightning takes a whole one for an unsharded model."""
    for each in objects:
        if isinstance(each, torch.nn.Module):
            reshard(each)


def _initialize_states(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Let new optimizers make their states in all replicas. Torch does so in the replica that it saves."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # the import takes time

    for optimizer in (value for value in state.values() if isinstance(value, Optimizer)):
        if not optimizer.state:
            get_optimizer_state_dict(model, optimizer)


def _has_optimizer(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())
