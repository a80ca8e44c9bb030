"""Fabric's strategy without its base class. Fabric has two namespaces, and each needs a subclass of its DDPStrategy.

    fabric = Fabric(strategy="topk_ddp", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)  # chooses the exchange, and begins it

If ranks exchange gradients, `setup` wraps the model in DistributedDataParallel. If they exchange updates, it returns
the model itself, and the exchange is part of `optimizer.step()`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.hooks import report_errors_to_peers
from lightning_sparse.hooks.updates import check_all_stepped
from lightning_sparse.strategies.base import SparseStrategy
from lightning_sparse.strategies.checkpoints import Checkpoints, Infos, Part
from lightning_sparse.strategies.ddp_options import DDPOptions
from lightning_sparse.strategies.fabric_calls import FabricCalls
from lightning_sparse.strategies.fit_checks import check_not_wrapped
from lightning_sparse.strategies.gradient_training import GradientTraining
from lightning_sparse.strategies.training import Training
from lightning_sparse.strategies.update_training import UpdateTraining

if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = object


def _without_exchange(module: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Skip the exchange of gradients. Backward has no exchange of updates, so nothing is skipped."""
    if enabled and isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return contextlib.nullcontext()


class FabricSparseDDP(DDPOptions, FabricCalls, SparseStrategy, DDPStrategy):  # type: ignore[misc]  # its strategies resemble the Trainer's
    """Data-parallel training with Fabric, with the options of `DDPOptions`."""

    __doc__ = DDPOptions.__doc__

    def _begin(self) -> None:
        super()._begin()
        self._backward_sync_control: Any = SimpleNamespace(no_backward_sync=_without_exchange)
        self._checkpoints = Checkpoints(self)

    # Models and optimizers:

    def _prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        if any(param.requires_grad for param in module.parameters()):
            check_not_wrapped(module)
        return module

    def _waits(self, module: torch.nn.Module) -> bool:
        exchanged, why = self._options.choose(())
        if (exchanged, why) == ("gradient", "the optimizer"):  # it depends on the optimizers
            raise RuntimeError(
                f"fabric.setup_module got a {type(module).__name__} alone, but its optimizer decides whether ranks "
                f"exchange gradients or updates. Set up both together, model, optimizer = fabric.setup(model, "
                f"optimizer); or decide it yourself, {self._class_name}(..., exchange='update') or "
                f"exchange='gradient'. For inference alone freeze the model, model.requires_grad_(False)."
            )
        return exchanged == "update"

    def _begin_exchange(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> torch.nn.Module:
        """Begin the exchange of a model; return it, in DistributedDataParallel if gradients are exchanged."""
        with report_errors_to_peers():
            method, what, why = self._choose(optimizers)
            if what == "update":
                check_all_stepped(module, optimizers)
        self._agree_on(what, method, module, optimizers)
        training: GradientTraining | UpdateTraining
        if what == "gradient":
            with self._with_ddp_options(init_sync=False):
                ddp = module = self._set_up(module)
            training = GradientTraining(self, ddp, optimizers, method)
            others = [each for each in self._trainings.values() if isinstance(each, GradientTraining)]
            for optimizer in (each for other in others for each in other.optimizers):  # perhaps of this model, too
                is_new = not any(optimizer is each for each in training.optimizers)
                if is_new and training.is_stepped_by(optimizer):
                    training.add(optimizer)
            training.begin()
            weakref.finalize(ddp, training.close)
            ddp.register_forward_hook(training.forward, always_call=True)
        else:
            training = UpdateTraining(self, self._exchange_updates(module, optimizers, method))
            if not training.exchanger.reducer.method.delayed:
                training.note = " They are exchanged after the step."
        self._trainings[module] = training
        self._began(training, why)
        return module

    # Checkpoints:

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint, with sidecar files if `state` has optimizers of models that were set up.

        It completes pending exchanges first.
        """
        self._exchange_pending()
        parts = self._parts(state)
        models = [value for value in state.values() if any(value is model for model in self._trainings)]
        if models and not parts and self.is_global_zero:
            self.inform(
                f"{str(path)!r} gets no residuals, as it has no optimizer. To resume training from it, put the "
                f"optimizer into the state as well."
            )
        checkpoint = dict(state)

        def enter(infos: Infos) -> None:
            found = zip(_keys(parts), infos, strict=True)
            checkpoint[sidecars.KEY] = {key: info for keys, info in found for key in keys}

        write = partial(super().save_checkpoint, path, checkpoint, storage_options, filter)
        self._checkpoints.save(parts, enter, path, write)

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
            if sidecars.KEY in whole and self._trainings and self.is_global_zero:
                self.inform(
                    f"fabric.load({str(path)!r}) without a state restores nothing. Its optimizer states are of rank 0, "
                    f"and its residuals are not loaded. To resume training, give the model and the optimizer: "
                    f"fabric.load({str(path)!r}, {{'model': model, 'optimizer': optimizer}})."
                )
            return whole
        parts = self._parts(state)
        names = [name for part in parts for name in part.optimizers]
        held = {**state, **dict.fromkeys(names)}  # Lightning puts their states in the place of None
        rest: dict[str, Any] = self._checkpoints.together(partial(load, path, held, *args, **kwargs), path)
        state.update((name, value) for name, value in held.items() if name not in names)
        infos = rest.pop(sidecars.KEY, None)
        known = infos if isinstance(infos, Mapping) else {}
        self._warn_of_early_load(path, {name: state.get(name) for name in known if name not in names})
        for part, keys in zip(parts, _keys(parts), strict=True):
            states = {name: held[name] for name in part.optimizers if held[name] is not None}
            remedy = f"fabric.load({str(path)!r}, {{'model': model}})"
            self._checkpoints.load_together(
                part.optimizers, states, partial(_load_states, part.optimizers, states), path, remedy
            )
            info = next((known[key] for key in keys if key in known), None)
            self._checkpoints.load(part, info, states, path)
        for training in self._trainings_in([*state.values(), *(x for part in parts for x in part.optimizers.values())]):
            if isinstance(training, UpdateTraining):
                training.begin()  # from rank 0's weights: nodes may have different files
        return rest

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        return self._snapshot(super().get_module_state_dict(module))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._snapshot(super().get_optimizer_state(optimizer))

    def _parts(self, state: Mapping[str, Any]) -> list[Part]:
        """Return the exchanges of the optimizers in a checkpoint's state. Residuals go with the optimizers."""
        parts = []
        latest: dict[frozenset[int], Training] = {}  # by the ids of parameters: a model may be set up again
        for training in self._trainings.values():
            if isinstance(training, GradientTraining):
                params: Mapping[str, torch.Tensor] = training.exchanger.params
            elif isinstance(training, UpdateTraining):
                params = training.exchanger.updates.parameters
            latest[frozenset(map(id, params.values()))] = training
        for training in latest.values():
            optimizers = {
                name: value for name, value in state.items() if any(value is each for each in training.optimizers)
            }
            if optimizers and (exchanger := training.exchanger) is not None:
                is_consistent, waits = exchanger.drain(), exchanger.gradients_wait(training.optimizers)
                parts.append(Part(exchanger.reducer, optimizers, is_consistent, waits))
        return parts


def _keys(parts: Sequence[Part]) -> list[list[str]]:
    """Return the keys of each part in a checkpoint: the names of its optimizers, with a number if they recur."""
    before = Counter[str]()
    keys = []
    for part in parts:
        keys.append([f"{name}, model {before[name] + 1}" if before[name] else name for name in part.optimizers])
        before.update([*part.optimizers])
    return keys


def _load_states(optimizers: Mapping[str, Optimizer], states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        optimizers[name].load_state_dict(state)
