"""The part of a tensor that this rank holds: a shard if FSDP2 or tensor parallelism shards it, otherwise all of it.

Ranks form a mesh of replicas (R), of shards (S) and perhaps of tensor-parallel ranks (T). R ranks hold the same part of
the model, one in each replica. These ranks exchange updates with each other:

    mesh = init_device_mesh("cuda", (R, S), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

AFTER_SHARDING = (
    " Create the optimizer after fully_shard, which replaces the parameters. After a forward pass without backward, "
    "call reshard() of the sharded modules before."
)
"""The end of errors about an optimizer whose parameters a sharded model does not have."""
_AVERAGED: WeakSet[Any] = WeakSet()
"""Modules of FSDP2 whose gradients replicas average."""


def is_sharded(x: Any) -> bool:
    """Return whether a tensor is a DTensor, of which each rank of a mesh holds a part."""
    return hasattr(x, "to_local")  # an import of DTensor takes a second, which most trainings do not need


def is_any_sharded(model: nn.Module) -> bool:
    """Return whether a parameter of a model is sharded."""
    return any(map(is_sharded, model.parameters()))


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it shares memory with the tensor.

    Do not keep the result: FSDP2 replaces it when a module moves or loads weights.
    """
    if not is_sharded(x):
        return x
    with torch.no_grad():  # otherwise the result would be part of an autograd graph
        part: Tensor = x.to_local()  # type: ignore[attr-defined]
    return part


def local_gradient(param: Tensor) -> Tensor | None:
    """Return this rank's part of a parameter's gradient; None if it has none, or a sparse one."""
    grad: Any = param.grad
    if grad is None or grad.layout is not torch.strided:
        return None
    of: Any = param
    if is_sharded(grad) and grad.placements != of.placements:  # under tensor parallelism it may be a summand
        grad = grad.redistribute(placements=of.placements)
    return local(grad)


def locals_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor, by name."""
    return {name: local(x) for name, x in tensors.items()}


@torch.no_grad()
def like(x: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a tensor as the whole tensor: a DTensor that is sharded like `x`, or `part` itself."""
    if not is_sharded(x):
        return part
    from torch.distributed.tensor import DTensor

    of: Any = x
    return DTensor.from_local(  # type: ignore[no-any-return]
        part, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
    )


def state_like(param: Tensor, x: Any) -> Any:
    """Return this rank's part of a value of an optimizer's state as the parameter's optimizer keeps it."""
    return like(param, x.to(local(param).device)) if isinstance(x, Tensor) and x.shape == local(param).shape else x


def placement(x: Tensor) -> str:
    """Return how a DTensor is sharded, and the part that this rank holds, for ranks to compare."""
    of: Any = x
    kinds = ", ".join(map(str, of.placements))
    return f"({kinds}) part {tuple(of.device_mesh.get_coordinate())} of {tuple(of.device_mesh.shape)}"


def copies(x: Tensor) -> str:
    """Return the dimensions of the mesh over which a DTensor is sharded and copied; "" for a plain tensor.

    Ranks of a replica may hold copies of some parameters, such as the norms of a tensor-parallel model. The copies stay
    equal only if all these ranks select the same entries. So a segment with a copied parameter has no sharded one.
    """
    if not is_sharded(x):
        return ""
    of: Any = x
    names = of.device_mesh.mesh_dim_names or range(of.device_mesh.ndim)
    dims = zip(names, of.device_mesh.shape, of.placements, strict=True)
    return ", ".join(f"{name} {size} {'copied' if kind.is_replicate() else 'sharded'}" for name, size, kind in dims)


def reshard(model: nn.Module) -> None:
    """Make the modules of FSDP2 hold shards, as after a backward pass.

    A forward pass leaves whole parameters in the root module. If no backward pass follows, as in validation, they would
    hide the shards, and would not follow a change of the shards.
    """
    for module in _of_fsdp("FSDPModule", model):
        module.reshard()


def average_gradients(
    model: nn.Module, group: dist.ProcessGroup, count: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Let replicas of a sharded model average their gradients in backward.

    Args:
        model: the model, which FSDP2 has sharded over the mesh of one replica.
        group: the ranks that hold the same part of the model.
        count: gets the bytes that this rank sends for each average.

    Raises:
        TypeError, ValueError: see `check_averages`. A backward pass also raises ValueError if such a parameter was
            unfrozen.
    """
    check_averages(model, group)
    modules, size, others = _of_fsdp("FSDPModule", model), dist.get_world_size(group), _not_averaged(model)

    def average(gradient: Tensor) -> None:
        _check_frozen(others)
        _keep(gradient)
        dist.all_reduce(gradient, group=group)
        gradient.div_(size)
        count(2 * (size - 1) * gradient.nbytes // size)  # of a ring

    for module in modules:
        module.set_all_reduce_hook(average)
    _AVERAGED.update(modules)


def check_averages(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise TypeError or ValueError, see `check_group`, also if FSDP2 does not shard a trained parameter."""
    check_group(model, group)
    _check_frozen(_not_averaged(model))


def _not_averaged(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that FSDP2 does not shard, by name."""
    modules = _of_fsdp("FSDPModule", model)
    averaged = {id(param) for module in modules for param in module.parameters() if is_sharded(param)}
    return {name: param for name, param in model.named_parameters() if id(param) not in averaged}


def _check_frozen(params: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter that FSDP2 does not shard requires gradients."""
    for name, param in params.items():
        if param.requires_grad:
            raise ValueError(
                f"{name!r} is in no module of fully_shard, which averages gradients, so replicas would differ in it. "
                f"Call fully_shard with the module that holds it; or freeze it by requires_grad_(False)."
            )


def keep_gradients(model: nn.Module) -> None:
    """Let the replicas of a sharded model keep their own gradients, after `average_gradients` or without it."""
    for module in _AVERAGED.intersection(_of_fsdp("FSDPModule", model)):
        module.set_all_reduce_hook(_keep)  # torch documents no way to remove a hook
        _AVERAGED.discard(module)


def _keep(gradient: Tensor) -> None:
    """Let the present stream, in which FSDP2 calls its hook, use the gradient after FSDP2 has freed it.

    FSDP2 allocates it in another stream. Without this, the gradient of the next layer may get the same memory while
    this one is averaged, converted or copied.
    """
    if gradient.is_cuda:
        gradient.record_stream(torch.cuda.current_stream(gradient.device))


@contextlib.contextmanager
def without_reduction(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Let FSDP2 accumulate gradients without averaging them over the ranks of a replica, within the block.

    Lightning's function leaves averages off after `enabled=False`.
    """
    modules = _of_fsdp("FSDPModule", model) if enabled else []
    try:
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def unsharded(model: nn.Module, ranks: Collection[int]) -> str:
    """Return the name of a trained parameter that is not sharded or copied over all these ranks; "" if all are."""
    for name, param in model.named_parameters():
        of: Any = param
        mesh = of.device_mesh.mesh.flatten().tolist() if is_sharded(param) else []
        if param.requires_grad and not {*ranks} <= {*mesh}:
            return name
    return ""


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of optimizers, in the order of their groups."""
    return [param for each in optimizers for group in each.param_groups for param in group["params"]]


def load_optimizer(optimizer: Optimizer, state_dict: Mapping[str, Any], before: Mapping[int, str] = {}) -> None:
    """Load an optimizer's state whose tensors are on the host. Of sharded parameters, it has this rank's part.

    Args:
        state_dict: its state. Tensors keep their dtypes, unless `before` has them.
        before: by number, the dtypes of parameters that have another dtype now. States of these dtypes get the new one.
    """
    params, states = parameters_of([optimizer]), state_dict.get("state", {})
    of_params = {i: each for i, each in states.items() if isinstance(i, int) and isinstance(each, dict)}
    wrapped = {
        i: {key: state_like(params[i], x) for key, x in each.items()} if isinstance(i, int) else each
        for i, each in states.items()
    }
    optimizer.load_state_dict({**state_dict, **({"state": wrapped} if states else {})})
    for i, each in of_params.items():
        for key, x in each.items():
            param = params[i]
            loaded = optimizer.state.get(param, {}).get(key)
            # torch gives all states the dtype of the parameter, which differs for bf16 weights with fp32 moments.
            is_cast = isinstance(loaded, Tensor) and isinstance(x, Tensor) and loaded.dtype != x.dtype
            if is_cast and str(x.dtype) != before.get(i):
                optimizer.state[param][key] = state_like(param, x.to(local(loaded).device))


def groups_of(optimizers: Iterable[Optimizer]) -> set[dist.ProcessGroup]:
    """Return the process groups over which parameters of optimizers are sharded.

    FSDP2 sometimes replaces a model's parameters by gathered ones. An optimizer keeps its own.
    """
    params: list[Any] = parameters_of(optimizers)
    return {group for mesh in {x.device_mesh for x in params if is_sharded(x)} for group in mesh.get_all_groups()}


def check_group(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise an error unless the ranks of a group may hold the same part of a model in different replicas.

    Args:
        model: the model, sharded or not.
        group: the ranks that exchange updates; None is the default group.

    Raises:
        TypeError: the model is sharded by FSDP1, or DistributedDataParallel averages a part over ranks of the group.
        ValueError: a rank of the group shares a parameter with this rank, or a trained parameter is not sharded.
    """
    if _of_fsdp("FullyShardedDataParallel", model):
        raise TypeError(
            f"The {type(model).__name__} is sharded by FullyShardedDataParallel, whose updates cannot be exchanged. "
            f"Shard it by FSDP2: fully_shard(module, mesh=mesh['shard'])."
        )
    ranks, rank = {*dist.get_process_group_ranks(group or dist.group.WORLD)}, dist.get_rank()  # type: ignore[arg-type]
    for name, module in model.named_modules():
        averages = isinstance(module, DistributedDataParallel)
        if averages and ranks & {*dist.get_process_group_ranks(module.process_group)} - {rank}:
            raise TypeError(
                f"{name!r} of the {type(model).__name__} is a DistributedDataParallel: its gradients would be sent as "
                f"well, and its updates be rescaled as if they had not been averaged. Give the model without it."
            )
    shards = {name: param for name, param in model.named_parameters() if is_sharded(param)}
    meshes: dict[str, Any] = {name: param.device_mesh for name, param in shards.items()}  # type: ignore[attr-defined]
    for name, mesh in meshes.items():
        if common := ranks & {*mesh.mesh.flatten().tolist()} - {rank}:
            given = "None" if group is None else f"ranks {sorted(ranks)}"
            raise ValueError(
                f"group={given} contains rank {min(common)}, which shares {name!r} with rank {rank} in {mesh}. Updates "
                f"are exchanged between replicas, each of which holds the whole model. Pass "
                f"group=mesh['replicate'].get_group(), and shard over the mesh of one replica, fully_shard(module, "
                f"mesh=mesh['shard'])."
            )
    check_all_sharded(model)


def is_frozen(param: Tensor) -> bool:
    """Return whether an optimizer leaves a parameter out. It steps a frozen one that still has a gradient."""
    return not param.requires_grad and param.grad is None


def check_all_sharded(model: nn.Module) -> None:
    """Raise ValueError if FSDP2 shards some parameters of a model, but not a trained one."""
    named: dict[str, Any] = dict(model.named_parameters())
    meshes = [param.device_mesh for param in named.values() if is_sharded(param)]
    whole = [name for name, param in named.items() if not is_frozen(param) and not is_sharded(param)]
    if whole and _of_fsdp("FSDPModule", model) and any(mesh.size() > 1 for mesh in meshes):
        raise ValueError(
            f"{whole[0]!r} is not sharded, but other parameters are: FSDP2 averages its gradient over no ranks, so its "
            f"copies within a replica would differ. Call fully_shard with the module that holds it, without "
            f"ignored_params; or freeze it by requires_grad_(False)."
        )


def _of_fsdp(kind: str, model: nn.Module) -> list[Any]:
    """Return the modules of a model that are of a class of torch.distributed.fsdp, which may not be imported."""
    found = getattr(sys.modules.get("torch.distributed.fsdp"), kind, None)
    return [] if found is None else [module for module in model.modules() if isinstance(module, found)]
