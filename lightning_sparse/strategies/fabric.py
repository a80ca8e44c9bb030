"""Fabric's strategy without its base class. Fabric has two namespaces, and each needs a subclass of its DDPStrategy.

    fabric = Fabric(strategy="topk_ddp", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)  # chooses the exchange, and begins it

If ranks exchange gradients, `setup` wraps the model in DistributedDataParallel. If they exchange updates, it returns
the model itself, and the exchange is part of `optimizer.step()`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._lightning import FABRIC
from lightning_sparse.hooks import GradientExchanger, exchange_updates, report_errors_to_peers
from lightning_sparse.hooks.misuse import UnattachedOptimizerCheck
from lightning_sparse.hooks.updates import check_all_stepped, parameters_of, unstepped
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.base import SparseStrategy, destroy_process_group
from lightning_sparse.strategies.checkpoints import Checkpoints, Infos, Part
from lightning_sparse.strategies.ddp_options import DDPOptions
from lightning_sparse.strategies.fit_checks import check_not_wrapped
from lightning_sparse.strategies.gradient_training import GradientTraining
from lightning_sparse.strategies.training import enabled_scaler
from lightning_sparse.strategies.update_training import UpdateTraining

if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = object


class BackwardSyncControl:
    """Fabric's switch for the exchange within backward, see `Fabric.no_backward_sync`."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Skip the exchange of gradients. Backward has no exchange of updates, so nothing is skipped."""
        if enabled and isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return contextlib.nullcontext()


class _Waiting:
    """A model that was set up alone and exchanges updates. It waits for its optimizers.

    Attributes:
        optimizers: the optimizers that were set up so far.
        check: raises an error if an optimizer steps the model before the exchange begins.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizers: list[Optimizer] = []
        self.check = UnattachedOptimizerCheck((), model)
        weakref.finalize(model, self.check.close)


class _ExplainFailures:
    """Names the cause if a forward pass fails because another rank has ended.

    DistributedDataParallel broadcasts buffers in the forward pass. Torch's error does not say why it broke off.
    """

    def __init__(self, exchanger: GradientExchanger) -> None:
        self._exchanger: GradientExchanger | None = exchanger  # copies of the model have none

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        """Look at the error of the forward pass, if there is one."""
        if self._exchanger is not None and (error := sys.exc_info()[1]) is not None:
            self._exchanger.fail_in_model(error)


class _Loaded:
    """Stands for an optimizer while Lightning loads a checkpoint, and keeps the state that the optimizer will get."""

    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing. Lightning recognises an object with a state by this method."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


class FabricSparseDDP(DDPOptions, SparseStrategy, DDPStrategy):  # type: ignore[misc]  # its strategies resemble the Trainer's
    """Data-parallel training with Fabric, with the options of `DDPOptions`."""

    __doc__ = DDPOptions.__doc__

    _class_name, _clipping = "FabricSparseDDPStrategy", "call fabric.clip_gradients"

    def _begin(self) -> None:
        self._options.reducer.check_method(self._options.method, counts_epochs=False)
        self._backward_sync_control: Any = BackwardSyncControl()
        # By the module that Fabric calls. They end with the module.
        self._trainings: MutableMapping[torch.nn.Module, GradientTraining | UpdateTraining]
        self._trainings = weakref.WeakKeyDictionary()
        self._waiting: MutableMapping[torch.nn.Module, _Waiting] = weakref.WeakKeyDictionary()
        self._checkpoints = Checkpoints(self)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the models that were set up, which belong to this process."""
        return {name: value for name, value in vars(self).items() if name not in ("_trainings", "_waiting")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @classmethod
    def _lightning(cls, namespace: str) -> ModuleType:
        return import_module(FABRIC[namespace])

    @property
    def scaler(self) -> Any:
        return enabled_scaler(self.precision)

    @property
    def reducers(self) -> list[Reducer]:
        """The reducers of the models that were set up, in this order."""
        return [training.exchanger.reducer for training in self._trainings.values()]

    def setup_environment(self) -> None:
        super().setup_environment()
        atexit.register(self._leave, os.getpid())

    def _leave(self, pid: int) -> None:
        """End all exchanges before the interpreter exits. Fabric does not tell its strategy about errors."""
        if os.getpid() != pid:  # a forked child
            return
        error: BaseException | None = getattr(sys, "last_value", None)  # has ended the program
        trainings = [*self._trainings.values()]
        in_order = error is None and all(training.exchanger.is_consistent for training in trainings)
        for training in trainings:
            if error is not None:
                training.fail(error)
            elif isinstance(training, UpdateTraining):
                training.exchanger.warn_of_pending()
            training.close()
        if in_order:
            destroy_process_group(pid)

    # Models and optimizers:

    def setup_module_and_optimizers(  # type: ignore[override]
        self, module: torch.nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Begin the exchange of a model with its optimizers.

        Returns:
            The module, wrapped if gradients are exchanged, the optimizers and the scheduler. Lightning 2.5 gives no
            scheduler and expects none.
        """
        with report_errors_to_peers():
            check_not_wrapped(module)
            self._check_owned(module, optimizers)
        return self._begin_exchange(module, optimizers), optimizers, *scheduler

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        """Wrap a model alone if gradients are exchanged. If updates are exchanged, it waits for its optimizers.

        Raises:
            RuntimeError: the exchange depends on the optimizers.
        """
        if not any(param.requires_grad for param in module.parameters()):
            return module
        with report_errors_to_peers():
            check_not_wrapped(module)
            if self._options.depends_on_optimizers:
                raise RuntimeError(
                    f"fabric.setup_module got a {type(module).__name__} alone, but its optimizer decides whether ranks "
                    f"exchange gradients or updates. Set up both together, model, optimizer = fabric.setup(model, "
                    f"optimizer); or decide it yourself, {self._class_name}(..., exchange='update') or "
                    f"exchange='gradient'. For inference alone freeze the model, model.requires_grad_(False)."
                )
        if self._options.choose(())[0] == "gradient":
            return self._begin_exchange(module, [])
        self._waiting[module] = _Waiting(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Join an optimizer to its model, which was set up before. The last one begins an exchange of updates."""
        with report_errors_to_peers():
            model = self._model_of(optimizer)
            waiting, training = self._waiting.get(model), self._trainings.get(model)
            if isinstance(training, UpdateTraining):
                raise ValueError(
                    f"fabric.setup_optimizers got a {type(optimizer).__name__}, but the updates of the "
                    f"{type(model).__name__} are exchanged for other optimizers already. Set up all together: "
                    f"fabric.setup(model, first, second)."
                )
            if training is not None:
                training.add(optimizer)
        if waiting is not None:
            waiting.optimizers.append(optimizer)
            if not unstepped(model, waiting.optimizers):
                del self._waiting[model]
                waiting.check.close()
                self._begin_exchange(model, waiting.optimizers)
        return optimizer

    def _model_of(self, optimizer: Optimizer) -> torch.nn.Module:
        """Return the model that an optimizer steps; ValueError unless there is exactly one."""
        stepped = parameters_of([optimizer])
        models = [
            model for model in (*self._waiting, *self._trainings) if not stepped.isdisjoint(map(id, model.parameters()))
        ]
        if len(models) == 1 or (models and all(model in self._trainings for model in models)):
            return models[0]
        name = type(optimizer).__name__
        if models:
            names = " and ".join(type(model).__name__ for model in models)
            raise ValueError(
                f"fabric.setup_optimizers got a {name} of several models, {names}, whose updates are exchanged apart. "
                f"Give each model its optimizer; or set up one module that holds all, torch.nn.ModuleList([...])."
            )
        raise ValueError(
            f"fabric.setup_optimizers got a {name} that steps no parameter of a model that was set up. Set up the "
            f"model first, model = fabric.setup_module(model), and make the optimizer of the parameters of this model."
        )

    @staticmethod
    def _check_owned(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Raise ValueError if an optimizer steps no parameter of the model."""
        own = {*map(id, model.parameters())}
        for optimizer in optimizers:
            if own.isdisjoint(parameters_of([optimizer])):
                raise ValueError(
                    f"fabric.setup got a {type(optimizer).__name__} that steps no parameter of the "
                    f"{type(model).__name__}. Make the optimizer of the parameters of this model."
                )

    def _begin_exchange(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> torch.nn.Module:
        """Begin the exchange of a model; return it, in DistributedDataParallel if gradients are exchanged."""
        with report_errors_to_peers():
            method, what, why = self._choose(optimizers)
            if what == "update":
                check_all_stepped(module, optimizers)
        self._agree_on(what, method, module, optimizers)
        training: GradientTraining | UpdateTraining
        if what == "gradient":
            with self._without_broadcast():
                ddp = module = super().setup_module(module)
            training = GradientTraining(self, ddp, optimizers, method)
            training.begin()
            weakref.finalize(ddp, training.close)
            ddp.register_forward_hook(_ExplainFailures(training.exchanger), always_call=True)
        else:
            training = UpdateTraining(self, self._exchange_updates(exchange_updates, module, optimizers, method))
            if not training.exchanger.reducer.method.delayed:
                training.note = " They are exchanged after the step."
        self._trainings[module] = training
        self._began(training, why)
        return module

    # Training:

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take an optimizer's step, after the checks and the clipping of gradients."""
        trainings = (x for x in self._trainings.values() if any(optimizer is each for each in x.optimizers))
        training = next(trainings, None)
        if training is None:
            return super().optimizer_step(optimizer, **kwargs)
        if isinstance(training, GradientTraining):
            training.check_complete()
        take, given = partial(super().optimizer_step, optimizer), kwargs.pop("closure", None)

        def step(closure: Callable[[], Any]) -> Any:
            if given is not None:
                return take(closure=closure, **kwargs)
            closure()  # the gradients are there; this only looks at them
            return take(**kwargs)

        return training.step(optimizer, given or _nothing, step)

    # Checkpoints:

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint, with sidecar files if `state` has optimizers of models that were set up.

        It completes pending exchanges first.
        """
        self._exchange_pending()
        parts = self._parts(state)
        if not parts and self.is_global_zero and any(self._is_set_up(value) for value in state.values()):
            self.inform(
                f"{str(path)!r} gets no residuals, as it has no optimizer. To resume training from it, put the "
                f"optimizer into the state as well."
            )
        checkpoint = dict(state)

        def enter(infos: Infos) -> None:
            found = zip(parts, infos, strict=True)
            checkpoint[sidecars.KEY] = {name: info for part, info in found for name in part.optimizers}

        write = partial(super().save_checkpoint, path, checkpoint, storage_options, filter)
        self._checkpoints.save(parts, enter, path, write, self.checkpoint_io.remove_checkpoint)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint into the objects of `state`, on all ranks or on none.

        It completes pending exchanges first. Without a `state` nothing is restored, residuals included.
        `Fabric.load_raw` calls it with one object, and perhaps on one rank alone. Then it only loads this object.

        Returns:
            The items that were not restored.
        """
        load = super().load_checkpoint
        if isinstance(state, torch.nn.Module | Optimizer):
            return load(path, state, *args, **kwargs)
        self._exchange_pending()
        if not state:
            whole: dict[str, Any] = self._checkpoints.together(partial(load, path, state, *args, **kwargs), path)
            return whole
        parts = self._parts(state)
        loaded = {name: _Loaded() for part in parts for name in part.optimizers}
        held = {**state, **loaded}
        rest: dict[str, Any] = self._checkpoints.together(partial(load, path, held, *args, **kwargs), path)
        state.update((name, value) for name, value in held.items() if name not in loaded)
        infos = rest.pop(sidecars.KEY, None)
        for part in parts:
            states = {name: loaded[name].state for name in part.optimizers if loaded[name].state is not None}
            remedy = f"fabric.load({str(path)!r}, {{'model': model}})"
            self._checkpoints.load_together(
                part.optimizers, states, partial(_load_states, part.optimizers, states), path, remedy
            )
            known = infos if isinstance(infos, Mapping) else {}
            info = next((known[name] for name in part.optimizers if name in known), None)
            self._checkpoints.load(part, info, states, path)
        for training in self._trainings.values():
            if isinstance(training, UpdateTraining):
                training.begin()  # from rank 0's weights: nodes may have different files
        return rest

    def _exchange_pending(self) -> None:
        for training in self._trainings.values():
            training.exchange_pending()

    def _is_set_up(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module) and value in self._trainings

    def _parts(self, state: Mapping[str, Any]) -> list[Part]:
        """Return the exchanges of the optimizers in a checkpoint's state. Residuals go with the optimizers."""
        parts = []
        for training in self._trainings.values():
            optimizers = {
                name: value for name, value in state.items() if any(value is each for each in training.optimizers)
            }
            if optimizers:
                parts.append(Part(training.exchanger.reducer, optimizers, training.exchanger.drain()))
        return parts


def _load_states(optimizers: Mapping[str, Optimizer], states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        optimizers[name].load_state_dict(state)


def _nothing() -> None:
    pass
