"""Checks and warnings at the start of a fit: optimizers, momenta and the placement of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.hooks.optimizer_kinds import is_named, reason_for_gradients
from lightning_sparse.memory import Momentum
from lightning_sparse.methods import Method
from lightning_sparse.momentum import moments_of
from lightning_sparse.options import listed
from lightning_sparse.shards import is_sharded, parameters_of
from lightning_sparse.trained import ABOVE_DENSE, WITH_UPDATES

log = logging.getLogger(__name__)


def trains_with_updates(optimizer: Optimizer) -> bool:
    """Return whether exchanged updates of this kind of optimizer trained as well as dense averages of gradients."""
    if reason_for_gradients(optimizer) or is_named(optimizer, ABOVE_DENSE):
        return False
    return moments_of(optimizer) is not None or is_named(optimizer, WITH_UPDATES)


def check_optimizers(optimizers: Sequence[Optimizer], method: Method) -> None:
    """Raise ValueError for an optimizer that evaluates the gradient several times per step."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            f"LBFGS does not work with {method}: it evaluates the gradient several times a step and compares the "
            f"results, but each exchange sends another part of the gradient. Use an optimizer that needs one gradient "
            f"a step, such as torch.optim.SGD, or train with strategy='ddp'."
        )


WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Classes whose models average or shard their parameters themselves."""


def check_not_wrapped(model: torch.nn.Module, but: str = "") -> None:
    """Raise TypeError for a model that another library for parallel training has wrapped or sharded.

    Args:
        but: "FSDPModule" if FSDP2 may shard the model.
    """
    for name, module in model.named_modules():
        if found := (WRAPPERS - {but}).intersection(kind.__name__ for kind in type(module).__mro__):
            raise TypeError(
                f"fabric.setup got a {type(model).__name__} with a {found.pop()} ({name or 'the model itself'}), which "
                f"averages or shards parameters itself. Give the model without it; or, to shard it by FSDP2, train "
                f"with strategy='topk_hsdp'."
            )
    for name, param in model.named_parameters():
        if not but and is_sharded(param):
            raise TypeError(
                f"fabric.setup got a {type(model).__name__} with {name!r} as a {type(param).__name__}, which is "
                f"sharded. Train sharded models with strategy='topk_hsdp'."
            )


def warn_of_two_momenta(optimizers: Sequence[Optimizer], method: Method) -> None:
    """Warn if the method and an optimizer both keep a momentum."""
    with_momentum = [
        x for x in optimizers if any(each.get("momentum") or each.get("betas", (0,))[0] for each in x.param_groups)
    ]
    if with_momentum and isinstance(method.memory, Momentum):
        log.warning(
            f"{type(with_momentum[0]).__name__} has a momentum, and {method} keeps another one: a GPT ended 0.5 above "
            f"dense training beside AdamW. Give the optimizer none, as SGD with momentum=0."
        )


def warn_of_unstepped(params: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Warn if optimizers step some parameters with sparse gradients, but not the others. Call it after a step.

    Args:
        params: the parameters whose gradients are exchanged, by name.
        optimizers: their optimizers. If these step copies of the parameters, there is no warning.
    """
    stepped = {*map(id, parameters_of(optimizers))}
    trained = {name: param for name, param in params.items() if param.requires_grad and param.grad is not None}
    alone = [repr(name) for name, param in trained.items() if id(param) not in stepped]
    if 0 < len(alone) < len(params):
        log.warning(
            f"{listed(alone)} require gradients but are in no optimizer: their gradients take the place of others "
            f"among the sent entries, so training is slower. Freeze them by requires_grad_(False) before fit or "
            f"fabric.setup; or give them to an optimizer."
        )


def check_placement(nodes: Sequence[int], ranks_per_node: int) -> None:
    """Raise ValueError unless each `ranks_per_node` consecutive ranks are on one node.

    Args:
        nodes: the node of each rank.
        ranks_per_node: number of consecutive ranks that add up their gradients densely.
    """
    for first in range(0, len(nodes), ranks_per_node):
        together = nodes[first : first + ranks_per_node]
        if len(set(together)) > 1:
            placed = ", ".join(f"rank {first + place} on node {node}" for place, node in enumerate(together))
            raise ValueError(
                f"TwoLevel(ranks_per_node={ranks_per_node}): the ranks {first} to {first + len(together) - 1} are to "
                f"add up their gradients inside one node, but they are on several ({placed}). Start the ranks node by "
                f"node, as torchrun does, and SLURM with --distribution=block; or leave hierarchical out."
            )
