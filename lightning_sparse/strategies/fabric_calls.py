"""Fabric's calls of a strategy: models and optimizers, together or apart, steps, and the end of the program."""
# Lightning's strategy is the next base:
# mypy: disable-error-code="misc"

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse._lightning import FABRIC, Mixin
from lightning_sparse.hooks import exchange_updates, report_errors_to_peers
from lightning_sparse.hooks.misuse import UnattachedOptimizerCheck
from lightning_sparse.hooks.updates import check_all_stepped, unstepped
from lightning_sparse.reducer import Reducer
from lightning_sparse.shards import AFTER_SHARDING, is_any_sharded, parameters_of, reshard
from lightning_sparse.strategies.base import destroy_process_group
from lightning_sparse.strategies.gradient_training import GradientTraining
from lightning_sparse.strategies.training import Training
from lightning_sparse.strategies.update_training import UpdateTraining

log = logging.getLogger(__name__)


class FabricCalls(Mixin):  # type: ignore[misc]
    """Fabric's calls of a `SparseStrategy`, without the wrapping of the model and checkpoints.

    Subclasses have three methods. `_prepare` checks and shards a model that Fabric sets up. `_waits` says whether a
    model without optimizers waits for them. `_begin_exchange` begins the exchange, and returns the module to train.
    """

    _clipping, _plugin_name = "call fabric.clip_gradients", "precision"
    _make_exchanger = staticmethod(exchange_updates)

    def _begin(self) -> None:
        self._options.reducer.check_method(self._options.method, counts_epochs=False)
        # By the module that Fabric calls. They end with the module.
        self._trainings: MutableMapping[torch.nn.Module, Training] = weakref.WeakKeyDictionary()
        # Models that wait: their optimizers so far, and a check that none steps before the exchange begins.
        self._waiting: MutableMapping[torch.nn.Module, tuple[list[Optimizer], UnattachedOptimizerCheck]]
        self._waiting = weakref.WeakKeyDictionary()

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
    def reducers(self) -> list[Reducer]:
        """The reducers of the models that were set up, in this order."""
        return [exchanger.reducer for exchanger in self._exchangers]

    @property
    def _exchangers(self) -> list[Any]:
        """The exchangers of the models that were set up. A model whose replicas are averaged densely has none."""
        return [training.exchanger for training in self._trainings.values() if training.exchanger is not None]

    def setup_environment(self) -> None:
        super().setup_environment()
        atexit.register(self._leave, os.getpid())

    def _leave(self, pid: int) -> None:
        """End all exchanges before the interpreter exits. Fabric does not tell its strategy about errors."""
        if os.getpid() != pid:  # a forked child
            return
        error: BaseException | None = getattr(sys, "last_value", None)  # has ended the program
        in_order = error is None and all(exchanger.is_consistent for exchanger in self._exchangers)
        for training in [*self._trainings.values()]:
            if error is not None:
                training.fail(error)
            elif isinstance(training, UpdateTraining):
                training.exchanger.warn_of_pending()
            training.close()
        if in_order:
            destroy_process_group(pid)

    # Models and optimizers:

    def _set_up(self, module: torch.nn.Module) -> Any:
        """Wrap or shard a model, as Lightning's strategy does."""
        return super().setup_module(module)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Begin the exchange of a model with its optimizers.

        Returns:
            The module, wrapped if DistributedDataParallel exchanges gradients, the optimizers and the scheduler.
            Lightning 2.5 gives no scheduler and expects none.
        """
        with report_errors_to_peers():
            module = self._prepare(module)
            self._check_owned(module, optimizers)
        self._stop_waiting(module)
        return self._begin_exchange(module, optimizers), optimizers, *scheduler

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Begin the exchange of a model alone, or let the model wait for its optimizers.

        A model without trained parameters exchanges nothing.

        Raises:
            RuntimeError: the exchange depends on the optimizers.
        """
        with report_errors_to_peers():
            module = self._prepare(module)
            if not any(param.requires_grad for param in module.parameters()):
                return module
            waits = self._waits(module)
        if not waits:
            return self._begin_exchange(module, [])
        self._stop_waiting(module)
        check = UnattachedOptimizerCheck((), module)
        weakref.finalize(module, check.close)
        self._waiting[module] = [], check
        return module

    def _stop_waiting(self, module: torch.nn.Module) -> None:
        """End the check that no optimizer steps a model before its exchange begins, if the model waits."""
        if module in self._waiting:
            _, check = self._waiting.pop(module)
            check.close()

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
            for each in self._trainings.values():  # one optimizer may step several models
                if isinstance(each, GradientTraining) and each.is_stepped_by(optimizer):
                    each.add(optimizer)
        if waiting is not None:
            optimizers, _ = waiting
            optimizers.append(optimizer)
            if not unstepped(model, optimizers):
                self._stop_waiting(model)
                self._begin_exchange(model, optimizers)
        return optimizer

    def _model_of(self, optimizer: Optimizer) -> torch.nn.Module:
        """Return the model that an optimizer steps; ValueError unless there is exactly one."""
        stepped, known = {*map(id, parameters_of([optimizer]))}, [*self._waiting, *self._trainings]
        for model in known:
            reshard(model)
        models = [model for model in known if not stepped.isdisjoint(map(id, model.parameters()))]
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
            f"{AFTER_SHARDING * any(map(is_any_sharded, known))}"
        )

    @staticmethod
    def _check_owned(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Raise TypeError or ValueError if an object is no optimizer, or steps no parameter of the model."""
        own = {*map(id, model.parameters())}
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise TypeError(
                    f"fabric.setup got a {type(optimizer).__name__} in the place of an optimizer. After the model, "
                    f"give only optimizers. If it is a scheduler, leave it out: it needs no setup."
                )
            if own.isdisjoint(map(id, parameters_of([optimizer]))):
                remedy = "Make the optimizer of the parameters of this model."
                if is_any_sharded(model):
                    remedy = (
                        "Sharding replaces the parameters, so set up the model first, model = "
                        "fabric.setup_module(model). Then make the optimizer, and call fabric.setup_optimizers."
                    )
                raise ValueError(
                    f"fabric.setup got a {type(optimizer).__name__} that steps no parameter of the "
                    f"{type(model).__name__}. {remedy}"
                )

    # Training:

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take an optimizer's step, after the checks and the clipping of gradients."""
        training = self._training_of(optimizer)
        if training is None:
            self._check_waiting(optimizer)
            return super().optimizer_step(optimizer, **kwargs)
        for each in self._trainings_in([optimizer]):
            if isinstance(each, GradientTraining):
                each.check_complete()
        take, given = partial(super().optimizer_step, optimizer), kwargs.pop("closure", None)

        def step(closure: Callable[[], Any]) -> Any:
            if given is not None:
                return take(closure=closure, **kwargs)
            closure()  # the gradients are there; this only looks at them
            return take(**kwargs)

        return training.step(optimizer, given or (lambda: None), step)

    def _training_of(self, optimizer: Any) -> Training | None:
        return next(iter(self._trainings_in([optimizer])), None)

    def _trainings_in(self, objects: Sequence[Any]) -> list[Training]:
        """Return the trainings of which a model or an optimizer is among objects.

        Models of others, as of earlier folds, may be alive on some ranks only.
        """
        ids = {*map(id, objects)}
        return [
            training
            for model, training in self._trainings.items()
            if not ids.isdisjoint(map(id, [model, getattr(model, "_orig_mod", model), *training.optimizers]))
        ]

    def clip_gradients_norm(self, module: Any, optimizer: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        """Clip gradients by their norm; `max_norm` is for the mean gradient of all workers."""
        max_norm = self._threshold(optimizer, max_norm)
        norm: Tensor = super().clip_gradients_norm(module, optimizer, max_norm, *args, **kwargs)
        return norm

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Clip each element of gradients; `clip_val` is for the mean gradient of all workers."""
        super().clip_gradients_value(module, optimizer, self._threshold(optimizer, clip_val))

    def _threshold(self, optimizer: Any, given: float) -> float:
        training = self._training_of(optimizer)
        return given if training is None else training.threshold(optimizer, given)

    def _check_waiting(self, optimizer: Any) -> None:
        """Raise ValueError if an optimizer steps while its model waits for optimizers of the other parameters."""
        for model, (given, _) in self._waiting.items():
            if any(optimizer is each for each in given):
                with report_errors_to_peers():
                    reshard(model)
                    check_all_stepped(model, given)

    def _exchange_pending(self) -> None:
        for training in self._trainings.values():
            training.exchange_pending()

    def _warn_of_early_load(self, path: Any, state: Mapping[str, Any]) -> bool:
        """Warn on rank 0 of residuals that are not loaded, because their optimizer is not set up yet.

        Args:
            state: objects of the checkpoint's state, by name.

        Returns:
            Whether there is such an optimizer.
        """
        known = [each for training in self._trainings.values() for each in training.optimizers]
        given = [value for value in state.values() if isinstance(value, Optimizer)]
        early = next((value for value in given if not any(value is each for each in known)), None)
        if early is None or not self._options.method.compresses:
            return False
        if self.is_global_zero:
            log.warning(
                f"The residuals of {str(path)!r} are not loaded, because its {type(early).__name__} is not set up: "
                f"call fabric.setup, or fabric.setup_optimizers, before fabric.load."
            )
        return True
