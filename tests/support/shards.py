"""Four ranks that train a small model: two replicas, each sharded over two ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sparse import Method
from lightning_sparse.compressors import TopK
from lightning_sparse.shards import local
from lightning_sparse.update_rule import UpdateRule

BATCH = 16
"""Examples in the global batch of a step."""
EXACT = Method(TopK(density=1.0), update_rule=UpdateRule(rescale=False, momentum="keep"))
"""A method that sends all updates as they are."""


def mesh_of(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def net() -> nn.Sequential:
    """Return a model with layers of 6, 5 and 1 rows. Over two ranks, shards have 3 and 3, 3 and 2, 1 and 0 rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return one part of the global batch of a step: inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 8, generator=generator)
    y = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(BATCH, 1, generator=generator)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> Tensor:
    x, y = batch(step, part, parts)
    return (model(x) - y).square().mean()


def steps(
    model: Any,
    optimizer: Any,
    part: int,
    parts: int,
    count: int = 6,
    micro: int = 1,
    first: int = 0,
    skip: bool = False,
) -> Iterator[int]:
    """Train on one part of each batch, in micro-batches; yield before each optimizer step, with its number.

    If `skip`, FSDP2 averages only after the last micro-batch.
    """
    for step in range(first, first + count):
        optimizer.zero_grad()
        for piece in range(micro):
            if skip:
                model.set_requires_gradient_sync(piece == micro - 1)
            (loss_of(model, step, part * micro + piece, parts * micro) / micro).backward()
        yield step
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights, on every rank."""
    named = model.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def own(tensors: Any) -> Tensor:
    """Return this rank's parts of tensors, as one fp64 vector."""
    return torch.cat([local(x).detach().double().reshape(-1) for x in tensors])


def among(group: Any, x: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks of a group."""
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, x, group=group)
    return rows


def attempt(fn: Callable[[], Any]) -> str:
    """Return the error of a call, of type and text; "" without one."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
