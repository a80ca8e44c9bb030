"""The parameters whose updates are exchanged, and the settings that ranks compare before training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sparse._compat import ignored_by_ddp, parameters_by_name, plain_name
from lightning_sparse.gradients import check_no_overlap
from lightning_sparse.shards import (
    AFTER_SHARDING,
    copies,
    is_any_sharded,
    is_sharded,
    local,
    locals_of,
    parameters_of,
    placement,
)


def exchanged_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer], before: Collection[int] = (), stepping: bool = False
) -> tuple[dict[str, Tensor], dict[str, Optimizer], dict[str, int]]:
    """Return the parameters of a model that optimizers step, by name, in registration order.

    Frozen parameters are left out, as optimizers may have a whole frozen backbone. So are parameters that
    DistributedDataParallel is to ignore.

    Args:
        before: the ids of parameters that have been exchanged before. They stay while they are frozen.
        stepping: whether a step comes next. An optimizer also steps a frozen parameter that has a gradient.

    Returns:
        The parameters, the optimizer of each, and the number of each one's group for `Layout.of`; all by name.

    Raises:
        ValueError: a parameter belongs to two optimizers or not to the model, has no shape yet, or shares memory with
            another parameter.
    """
    names = {id(param): name for name, param in parameters_by_name(model).items()}
    ignored = ignored_by_ddp(model)
    found: dict[str, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not _joins(param, before, stepping):
                    continue
                name = names.get(id(param))
                if name in ignored:
                    continue
                if is_lazy(param):
                    raise ValueError(
                        f"{name!r} has no shape yet: run one batch through the model before training, as for "
                        f"DistributedDataParallel."
                    )
                if name is None:
                    raise ValueError(
                        f"{type(optimizer).__name__} has a parameter of shape {list(param.shape)} that the model does "
                        f"not have: give the model whose parameters it steps.{AFTER_SHARDING * is_any_sharded(model)}"
                    )
                if found.get(name, optimizer) is not optimizer:
                    raise ValueError(
                        f"{name!r} belongs to two optimizers: each exchanges what its own step has changed, so the "
                        f"same change would be sent twice. Give each parameter to one optimizer; or let ranks exchange "
                        f"gradients: exchange='gradient' of the strategy, without local_steps and overlap, or attach."
                    )
                found[name] = optimizer
    params: dict[str, Tensor] = {names[id(param)]: param for param in model.parameters() if names[id(param)] in found}
    check_no_overlap(locals_of(params))
    kinds = {name: (optimizers.index(found[name]), copies(param)) for name, param in params.items()}
    order = sorted({*kinds.values()})
    return params, found, {name: order.index(kind) for name, kind in kinds.items()}


def owners_of_exchanged(
    model: nn.Module, optimizers: Sequence[Optimizer], before: Collection[int], stepping: bool
) -> dict[int, set[int]]:
    """Return the numbers of the optimizers that step each exchanged parameter, by its id. Several are an error.

    Args:
        model, optimizers, before, stepping: see `exchanged_parameters`.
    """
    ignored = ignored_by_ddp(model)
    left_out = {id(param) for name, param in parameters_by_name(model).items() if name in ignored} if ignored else set()
    found: dict[int, set[int]] = {}
    for number, optimizer in enumerate(optimizers):
        for param in parameters_of([optimizer]):
            if _joins(param, before, stepping) and id(param) not in left_out:
                found.setdefault(id(param), set()).add(number)
    return found


def _joins(param: Tensor, before: Collection[int], stepping: bool) -> bool:
    """Return whether a parameter of an optimizer is exchanged, see `exchanged_parameters`."""
    return param.requires_grad or id(param) in before or (stepping and param.grad is not None)


def not_ignored(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return named parameters or buffers of a model without the names that DistributedDataParallel is to ignore."""
    ignored = ignored_by_ddp(model)
    return {name: x for name, x in named if plain_name(name) not in ignored}


def others_settings(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    buffers: Iterable[tuple[str, Tensor]],
    compare_numbers: bool = True,
) -> Mapping[str, list[str]]:
    """Return the settings that must be equal on all ranks, in addition to the exchanged parameters.

    Args:
        buffers: buffers to compare, by name.
        compare_numbers: whether the options of optimizers, such as rates and betas, are settings.
    """
    params, optimizer_of, _ = exchanged_parameters(model, optimizers)
    ours = {*map(id, params.values())}
    rest = {name: x for name, x in not_ignored(model, model.named_parameters()).items() if id(x) not in ours}
    rest.update(buffers)
    return {
        "optimizers": [
            f"optimizer {optimizers.index(optimizer)}, {type(optimizer).__name__}, of {name}"
            for name, optimizer in ((name, optimizer_of[name]) for name in params)
        ],
        "settings of optimizers": [
            f"{key} {number} of group {place} of {type(optimizer).__name__}"
            for optimizer in optimizers
            for place, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            for number in _numbers(value)
            if compare_numbers
        ],
        "frozen parameters and buffers": described(rest),
        "shards": [f"{name} {placement(x)}" for name, x in {**params, **rest}.items() if is_sharded(x)],
    }


def described(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the name, shape and dtype of each tensor, for ranks to compare."""
    return [
        f"{plain_name(name)}{list(local(x).shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items()
    ]


def _numbers(value: Any) -> list[float]:
    """Return the numbers in an optimizer's option, such as a rate or betas. Flags and parameters have none."""
    values = value if isinstance(value, tuple) else (value,)
    return [float(x) for x in values if isinstance(x, float) or (isinstance(x, Tensor) and x.numel() == 1)]
