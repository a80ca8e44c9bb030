"""Ways to average gradients: stock DDP, its hooks, naive top-k, local SGD, and this package's methods.

`CONTESTANTS["topk"].wrap(model, Options(), optimizer)` prepares a model for one of them on every rank of a gloo
process group. All take DDP's default options, except that PowerSGD has one bucket.
"""

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse import (
    Method,
    ProcessGroupComm,
    Reducer,
    UpdateRule,
    attach,
    attach_updates,
    method,
)
from lightning_sparse.aggregators import TwoLevel, TwoPass
from lightning_sparse.comm.worker import Worker
from lightning_sparse.compressors.encoding import ValueFormat
from lightning_sparse.hooks.overlap import BackwardOverlap
from lightning_sparse.hooks.update_exchange import exchange_of
from lightning_sparse.layout import Granularity
from lightning_sparse.methods import WARMUP_FACTORS, WARMUP_STEPS
from lightning_sparse.updates.exchange import DeltaExchange

RANK = 4  # rank of the factors that PowerSGD sends

Bucket = dist.GradBucket  # type: ignore[attr-defined]


class Options(NamedTuple):
    """Density of sparse methods, number of ranks that share a link, and steps between exchanges of updates."""

    density: float = 0.001
    ranks_per_host: int = 1
    every: int = 1


@dataclass
class Wrapped:
    """A model that is prepared for one method's communication."""

    module: nn.Module  # module to call in the training loop
    residuals: Callable[[], dict[str, Tensor]] = dict  # this rank's residuals by name; empty without error feedback
    reducer: Reducer | None = None  # reducer of this package's methods
    all_reduced: Callable[[int, int], int] | None = None  # if dense: (parameters, steps) to bytes all-reduced
    every: int = 1  # steps between exchanges
    settle: Callable[[], None] = lambda: None  # completes a pending exchange, so that weights are equal on all ranks
    wait: Callable[[], None] = lambda: None  # waits until a pending exchange has sent its bytes

    @property
    def counted_bytes(self) -> int:
        """Bytes that the reducer has sent so far; 0 without a reducer."""
        return self.reducer.comm.sent_bytes if self.reducer else 0

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that this rank sent in its first `steps` steps; dense methods use ring all-reduce."""
        if not self.all_reduced:
            return self.counted_bytes
        nbytes = self.all_reduced(sum(param.numel() for param in self.module.parameters()), steps)
        return 2 * (dist.get_world_size() - 1) * nbytes // dist.get_world_size()


Wrap = Callable[[nn.Module, Options, Optimizer], Wrapped]


class Contestant(NamedTuple):
    """A way to communicate: the function that prepares a model, and the properties that are checked."""

    wrap: Wrap
    tolerance: float = 1e-4  # largest share of the gradients that rounding may remove
    check_steps: int = 1  # number of steps over which gradients must balance; they also are the warm-up
    sparse: bool = False  # whether the result has few entries: at most P·⌈4k/3⌉
    alone: bool = False  # whether ranks do not communicate at all
    updates: bool = False  # whether it exchanges optimizer updates instead of gradients


def data_parallel(model: nn.Module, hook: Any = None, state: Any = None, **options: Any) -> DistributedDataParallel:
    """Wrap a model in DDP with a hook. The model is equal on all ranks, so DDP need not broadcast it."""
    ddp = DistributedDataParallel(model, init_sync=False, **options)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return ddp


def _dense(nbytes: int, hook: Any = None) -> Wrap:
    """Return a method that all-reduces `nbytes` bytes of each parameter."""
    return lambda model, *_: Wrapped(
        data_parallel(model, hook), all_reduced=lambda numel, steps: nbytes * numel * steps
    )


def _powersgd(model: nn.Module, options: Options, optimizer: Optimizer) -> Wrapped:
    # Use one bucket: with several, the hook's callbacks wait for each other on gloo's threads and never end. The hook
    # requires two dense steps at the start.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    order: list[Tensor] = []

    def hook(state: powerSGD_hook.PowerSGDState, bucket: Bucket) -> torch.futures.Future[Tensor]:  # type: ignore[valid-type]
        order[:] = bucket.parameters()
        return powerSGD_hook.powerSGD_hook(state, bucket)

    def residuals() -> dict[str, Tensor]:
        parts = dict(zip(order, state.error_dict[0].split([param.numel() for param in order]), strict=True))
        return {name: parts[param] for name, param in model.named_parameters()}

    # The hook counts elements, not bytes, and only after its dense steps.
    return Wrapped(
        data_parallel(model, hook, state, bucket_cap_mb=100_000),
        residuals,
        all_reduced=lambda numel, steps: 4 * (numel * min(steps, 2) + state.compression_stats()[2]),
    )


def _naive_topk(model: nn.Module, options: Options, optimizer: Optimizer) -> Wrapped:
    """Top-k in its usual implementation: torch.topk over each bucket, and two all-gathers within the hook."""
    kept = {param: torch.zeros_like(param) for param in model.parameters()}

    def hook(state: None, bucket: Bucket) -> torch.futures.Future[Tensor]:  # type: ignore[valid-type]
        u, grads, ranks = bucket.buffer(), bucket.gradients(), dist.get_world_size()
        residuals = [kept[param] for param in bucket.parameters()]
        torch._foreach_add_(grads, residuals)
        indices = u.abs().topk(max(1, int(options.density * u.numel()))).indices
        values = u[indices]
        u[indices] = 0
        torch._foreach_copy_(residuals, grads)
        all_indices, all_values = ([torch.empty_like(part) for _ in range(ranks)] for part in (indices, values))
        dist.all_gather(all_indices, indices)
        dist.all_gather(all_values, values)
        u.zero_().index_add_(0, torch.cat(all_indices), torch.cat(all_values) / ranks)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(u)
        return future

    return Wrapped(data_parallel(model, hook), lambda: {name: kept[param] for name, param in model.named_parameters()})


def ours(chosen: Method, model: nn.Module, optimizer: Optimizer, *, granularity: Granularity = "bucket") -> Wrapped:
    """Prepare a model for a method of this package, which exchanges updates if it has an update rule."""
    if chosen.update_rule is not None:
        made = Wrapped(model, reducer=attach_updates(model, optimizer, chosen), every=chosen.local_steps)
        exchange = exchange_of(optimizer)
        if exchange is not None and chosen.delayed:
            made = replace(made, settle=exchange.exchange_pending, wait=exchange.updates.wait)
        return made
    ddp = data_parallel(model)
    reducer = attach(ddp, chosen, granularity=granularity)
    return Wrapped(ddp, lambda: reducer.state_dict()["elements"]["residual"], reducer)


def _by_default(name: str, model: nn.Module, _: Options, optimizer: Optimizer) -> Wrapped:
    """Exchange updates with default options."""
    return Wrapped(model, reducer=attach_updates(model, optimizer, name))


def _thinner(model: nn.Module, options: Options, optimizer: Optimizer) -> Wrapped:
    """Exchange updates as by default, but at a given density."""
    warmup = {"density_warmup": [factor * options.density for factor in WARMUP_FACTORS]}
    chosen: dict[str, Any] = {"density": options.density, "value_format": "int2", **warmup}
    return Wrapped(model, reducer=attach_updates(model, optimizer, "topk", density_warmup_steps=WARMUP_STEPS, **chosen))


def _within_backward(value_format: ValueFormat, model: nn.Module, options: Options, optimizer: Optimizer) -> Wrapped:
    chosen = method("topk", density=options.density, value_format=value_format)
    reducer = Reducer(chosen, ProcessGroupComm(), exchanged="update")
    stream = torch.cuda.Stream(priority=-1) if next(model.parameters()).is_cuda else None
    updates, step_all = DeltaExchange(reducer, model, [optimizer], worker=Worker(stream)), optimizer.step
    within = BackwardOverlap(updates, optimizer)

    def step() -> None:
        within.end()
        started = time.perf_counter()
        if within.has_begun:
            within.finish()
        else:
            updates.begin(optimizer)
            step_all()
            updates.exchange(optimizer)
        reducer.seconds["exposed"] += time.perf_counter() - started
        within.watch()

    within.watch()
    optimizer.step = step  # type: ignore[assignment,method-assign]
    return Wrapped(model, reducer=reducer)


def _ours(
    name: str,
    sparse: bool = True,
    hierarchical: bool = False,
    updates: bool = False,
    overlap: Literal["none", "next_step"] = "none",
    granularity: Granularity = "bucket",
    value_format: ValueFormat | None = None,
    **parts: Any,
) -> Contestant:
    def wrap(model: nn.Module, options: Options, optimizer: Optimizer) -> Wrapped:
        given = {"value_format": value_format} if value_format else {}
        chosen = replace(method(name, density=options.density if sparse else None, **given), **parts)
        if hierarchical:
            chosen = replace(chosen, aggregator=TwoLevel(chosen.aggregator, options.ranks_per_host))
        if updates:
            chosen = replace(chosen, update_rule=(chosen.update_rule or UpdateRule()).changed(options.every, overlap))
        return ours(chosen, model, optimizer, granularity=granularity)

    return Contestant(wrap, check_steps=2, sparse=sparse, updates=updates)


def steps_for_equal_bytes(model: nn.Module, density: float) -> int:
    """Return the number of steps in which top-k sends the bytes of one dense exchange."""
    reducer = Reducer(method("topk", density=density), ProcessGroupComm())
    reducer.setup(dict(model.named_parameters()))
    return round(reducer.routing.dense_nbytes / reducer.routing.nbytes(None))


CONTESTANTS = {
    "none": Contestant(lambda model, *_: Wrapped(model), alone=True),
    "idle_hook": Contestant(_dense(0, debugging_hooks.noop_hook), alone=True),
    "ddp": Contestant(_dense(4)),
    "fp16": Contestant(_dense(2, default_hooks.fp16_compress_hook), tolerance=1e-2),
    # The lambda hides the hook's name. Without NCCL, DDP rejects torch's bf16_compress_hook, but gloo can sum bf16.
    "bf16": Contestant(
        _dense(2, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)), tolerance=5e-2
    ),
    "powersgd": Contestant(_powersgd, check_steps=4),
    "naive_topk": Contestant(_naive_topk, check_steps=2, sparse=True),
    **{name: _ours(name) for name in ("topk", "gaussiank", "gtopk", "oktopk", "scalecom", "randk")},
    "ddp_accumulated": Contestant(
        lambda model, options, _: Wrapped(data_parallel(model), every=steps_for_equal_bytes(model, options.density))
    ),
    "topk, whole model": _ours("topk", granularity="model"),
    "topk_two_level": _ours("topk", hierarchical=True),
    "int4": _ours("int4", sparse=False),
    **{f"{name} updates": _ours(name, updates=True) for name in ("topk", "gaussiank")},
    **{
        f"{name} by default": Contestant(functools.partial(_by_default, name), sparse=True, updates=True)
        for name in ("topk", "gaussiank")
    },
    "topk by default, thinner": Contestant(_thinner, sparse=True, updates=True),
    "topk updates, delayed": _ours("topk", updates=True, overlap="next_step"),
    "topk updates within backward": Contestant(
        functools.partial(_within_backward, "float32"), check_steps=2, sparse=True, updates=True
    ),
    # Equal to the default after density warm-up, if the density is the default.
    "topk updates, int2": _ours("topk", updates=True, value_format="int2"),
    "topk updates, int2, within backward": Contestant(
        functools.partial(_within_backward, "int2"), check_steps=2, sparse=True, updates=True
    ),
    "two_pass updates": _ours("topk", updates=True, aggregator=TwoPass(second=3)),
    **{name: _ours(name, sparse=False, updates=True) for name in ("local_sgd", "diloco", "sparseloco")},
}


def along(direction: list[Tensor], tensors: Iterable[Tensor]) -> float:
    """Return the scalar product of two lists of tensors in double precision."""
    return sum(float(a.double().flatten().dot(b.double().flatten())) for a, b in zip(direction, tensors, strict=True))
