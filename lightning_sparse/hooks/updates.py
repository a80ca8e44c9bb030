"""Exchange of what optimizers change, instead of gradients, for plain torch training loops and for the strategy.

    reducer = attach_updates(model, optimizer, "topk", density=0.01)
    for batch in batches:                       # on every rank
        optimizer.zero_grad()
        loss(model, batch).backward()           # the rank's own gradient: no DistributedDataParallel
        optimizer.step()                        # and the exchange: afterwards weights are equal on all ranks

What is exchanged is in `lightning_sparse.updates`; this is the process group, the hooks and the failures around it.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse._compat import register_first, step_depth, step_hooks
from lightning_sparse.comm.peers import Responder
from lightning_sparse.hooks.closure import begin_step
from lightning_sparse.hooks.misuse import OtherSteps, abandon, check_optimizers, refuse_ddp
from lightning_sparse.hooks.session import Session, told_to_others
from lightning_sparse.layout import Granularity
from lightning_sparse.methods import Method, resolve_update_method
from lightning_sparse.options import check_warmup, listed
from lightning_sparse.reducer import Reducer
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates import Updates, broadcast, exchanged_parameters

log = logging.getLogger(__name__)


def attach_updates(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    method: str | Method = "topk",
    *,
    density: float | None = None,
    granularity: Granularity = "bucket",
    bucket_cap_mb: float = 25,
    every: int | None = None,
    seed: int = 0,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    timeout: timedelta | None = None,
) -> Reducer:
    """Exchange optimizers' updates of `model` after their steps. All ranks call it, before the first step.

    The model is not wrapped: each rank steps on its own gradient. Weights and buffers become rank 0's at once.

    Args:
        model: the model, on its device.
        optimizer: its optimizer, or several of them.
        method: a name in `METHODS`, or a `Method` made of own parts.
        density: fraction of entries to send, in (0, 1]; None is 0.01, or a method's own where it has an `UpdateRule`.
            Only beside a name.
        granularity: what is compressed together: "layer", "bucket" or "model".
        bucket_cap_mb: size of a "bucket" in MiB.
        every: number of steps of an optimizer before each exchange; None keeps the method's own, 1 for most. With more
            than one, call `exchange_pending` before weights are evaluated or saved, and at the end.
        seed: of all random choices; equal on all ranks.
        warmup: densities to use in turn before `density`, `warmup_steps` exchanges each.
        warmup_steps: number of exchanges for each density of `warmup`.
        timeout: how long to wait for other ranks; None takes the default process group's.

    Returns:
        The reducer at work: its `comm` counts bytes, its `state_dict` holds the residuals.

    Raises:
        TypeError, ValueError: an option, a parameter or an optimizer that cannot be used; the message says which.
        RuntimeError: there is no process group.
        RankFailure: other ranks use other settings, or do not attach.
    """
    with told_to_others():
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"attach_updates(model={type(model).__name__}(...)): give the model itself, and then its optimizer. "
                f"DistributedDataParallel would send all gradients as well."
            )
        model = getattr(model, "_orig_mod", model)  # of torch.compile, whose result nobody may keep
        optimizers = check_optimizers(optimizer)
        stepped = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        if alone := [repr(name) for name, param in trained.items() if id(param) not in stepped]:
            raise ValueError(
                f"{listed(alone)} require gradients but are in no optimizer that attach_updates got, so ranks would "
                f"drift apart in them. Pass all optimizers, attach_updates(model, [first, second], ...), or freeze "
                f"them by requires_grad_(False)."
            )
        method = resolve_update_method(method, density)
        warmup, warmup_steps = check_warmup(method, warmup, warmup_steps, counts_epochs=False)
    if not dist.is_initialized():
        raise RuntimeError("attach_updates needs a process group: call torch.distributed.init_process_group before.")
    exchange = UpdateExchange(
        model,
        optimizers,
        method,
        every=every,
        timeout=timeout,
        granularity=granularity,
        bucket_cap_mb=bucket_cap_mb,
        seed=seed,
        warmup=warmup,
        warmup_steps=warmup_steps,
    )
    if exchange.comm.rank == 0:
        log.info(f"{exchange.reducer.method} on {exchange.comm.size} ranks. {exchange.note}")
    refuse_ddp(model)
    weakref.finalize(model, abandon, exchange.close, optimizers)
    return exchange.reducer


def exchange_pending(optimizer: Optimizer) -> None:
    """Exchange what an optimizer with `attach_updates(every=...)` has changed since its last exchange.

    Then weights are equal on all ranks: before they are evaluated or saved, and at the end. All ranks call it; nothing
    happens where nothing is pending.

    Raises:
        ValueError: its updates are not exchanged.
        NonFiniteGradient, RankFailure: as in a step.
    """
    exchange = _exchange_of(optimizer)
    if exchange is None:
        raise ValueError(
            f"exchange_pending got a {type(optimizer).__name__} whose updates are not exchanged: call attach_updates "
            f"with it before."
        )
    exchange.exchange_pending()


def _exchange_of(optimizer: Optimizer) -> UpdateExchange | None:
    """Return what exchanges an optimizer's updates, if anything does."""
    owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer))
    return next((owner for owner in owners if isinstance(owner, UpdateExchange)), None)


class UpdateExchange:
    """The exchange of what all optimizers of a model change, on one rank.

    Args:
        model: the model; its weights and buffers become rank 0's.
        optimizers: the optimizers; each parameter belongs to one of them at most.
        method: the compression method.
        every: number of steps of an optimizer before each exchange; None keeps the method's own.
        broadcast_buffers: whether buffers become rank 0's after each exchange, as DistributedDataParallel does it.
        group: the process group whose ranks take part; None is the default one.
        timeout: time to wait for other ranks; None takes the group's.
        options: of the `Reducer`.

    Attributes:
        reducer: compresses and exchanges.
        comm: the reducer's wire.
        is_consistent: whether no step is under way, so that residuals and weights belong together.
        note: what the summary of a run says about it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        method: Method,
        *,
        every: int | None = None,
        broadcast_buffers: bool = True,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        with told_to_others(group):
            rule = (method.update_rule or UpdateRule()).with_every(every)
        method = replace(method, update_rule=rule)
        self.optimizers, self._every = optimizers, rule.every
        self._steps = [0] * len(optimizers)
        # Looked up each time: a module may put another tensor in a buffer's place.
        self._model = weakref.ref(model) if broadcast_buffers else lambda: None

        def parameters() -> Mapping[str, Tensor]:
            check_updates(method, optimizers)
            return exchanged_parameters(model, optimizers)[0]

        self._session = Session(
            parameters,
            method,
            group=dist.group.WORLD if group is None else group,  # type: ignore[arg-type]
            device=next(model.parameters()).device,
            timeout=timeout,
            apart=lambda: exchanged_parameters(model, optimizers)[2],
            exchanged="update",
            **options,
        )
        self.reducer, self.comm = self._session.reducer, self._session.comm
        self._all = [*(param.detach() for param in model.parameters()), *model.buffers()]
        try:
            broadcast(self.comm, self._all)
            self._updates = Updates(self.reducer, model, optimizers)
        except BaseException as error:  # such as too little memory for a copy of the weights
            self._session.fail(error)
            self._session.close()
            raise
        self.note = self._updates.note
        self._hooks = [
            *(optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers),
            *(register_first(optimizer, self._on_step) for optimizer in optimizers),  # others see equal weights
        ]
        self._others = OtherSteps(optimizers, self._updates.has)
        self._stepped, self.is_consistent = False, True
        self._responder = Responder(self.comm.respond)

    def begin(self) -> None:
        """Start from rank 0's weights, whatever has happened to them since the exchange was made."""
        broadcast(self.comm, self._all)
        for optimizer in self.optimizers:
            self._updates.begin(optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if step_depth(optimizer) > 1:  # `step` of a class from which the optimizer's derives
            return None
        begin, changed = partial(self._begin_step, optimizer), partial(self._updates.changed, optimizer)
        return begin_step(optimizer, args, kwargs, begin, changed)

    def _begin_step(self, optimizer: Optimizer, unless: Tensor | None = None) -> None:
        if self._steps[self.optimizers.index(optimizer)] % self._every == 0:
            self._updates.begin(optimizer, unless)
        else:
            self._updates.adopt()

    @contextlib.contextmanager
    def one_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Exchange at the end of the block if the optimizer has not stepped in it.

        A gradient scaler may leave a step out on one rank, and the others exchange.
        """
        self._stepped = False
        yield
        if not self._stepped:
            self._begin_step(optimizer)  # a rank that leaves the step out starts from the same weights as the others
            self._count(optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if step_depth(optimizer) > 1:
            return
        self._stepped, self.is_consistent = True, False  # until the exchange, weights differ among ranks
        self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        index = self.optimizers.index(optimizer)
        self._steps[index] += 1
        if self._steps[index] % self._every == 0:
            self._exchange(optimizer)

    def adopt(self) -> None:
        """Take in parameters that optimizers were given since the last step."""
        self._updates.adopt()

    @property
    def is_pending(self) -> bool:
        """Whether there are steps whose exchange is still to come, so that weights differ among ranks."""
        return any(steps % self._every for steps in self._steps)

    def exchange_pending(self) -> None:
        """Exchange what optimizers have changed in steps whose exchange is still to come. All ranks call it."""
        for index, optimizer in enumerate(self.optimizers):
            if self._steps[index] % self._every:
                self._steps[index] = 0
                self._exchange(optimizer)

    def _exchange(self, optimizer: Optimizer) -> None:
        self.is_consistent = False
        started = time.perf_counter()
        try:
            self._updates.exchange(optimizer)
            if (model := self._model()) is not None:
                broadcast(self.comm, list(model.buffers()))
        except Exception as error:
            self._session.fail(error)
            raise
        self.reducer.seconds["exposed"] += time.perf_counter() - started  # nothing hides behind backward
        self.is_consistent = True

    def drain(self) -> bool:
        """Return whether the residuals belong to the weights."""
        return self.is_consistent

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed on this one."""
        self._session.fail(error)

    def close(self) -> None:
        """Leave the group. May be called twice, and after a failure."""
        for hook in self._hooks:
            hook.remove()
        self._others.close()
        self._responder.end()
        self._session.mark_done()
        self._session.close()


def check_updates(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError unless the updates of these optimizers can be exchanged by a method."""
    if not method.aggregator.averages:
        raise ValueError(
            f"{method} makes no mean of what ranks send, so it cannot exchange updates. Exchange gradients, by "
            f"exchange='gradient' of the strategy or by attach; or take another method, such as 'topk'."
        )
    for optimizer in optimizers:
        if _exchange_of(optimizer) is not None:
            raise ValueError(
                f"The updates of this {type(optimizer).__name__} are exchanged already: attach_updates was called with "
                f"it before. Once is enough; for other settings make a new optimizer."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS keeps differences of gradients from step to step, and weights that other ranks change as well "
                "make them wrong. Use an optimizer that needs one gradient a step, or train with strategy='ddp'."
            )
