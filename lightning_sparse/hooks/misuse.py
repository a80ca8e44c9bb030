"""Detects uses of `attach_updates` that would silently let ranks drift apart. Each error names the remedy."""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sparse._compat import in_ddp_forward, initializes_state, keep_last, version
from lightning_sparse.comm import Comm
from lightning_sparse.comm.broadcast import as_bytes
from lightning_sparse.options import listed
from lightning_sparse.shards import local, parameters_of

if TYPE_CHECKING:
    from lightning_sparse.hooks.gradient_exchange import GradientExchanger
    from lightning_sparse.hooks.update_exchange import UpdateExchanger

log = logging.getLogger(__name__)


def check_optimizers(given: Any) -> Sequence[Optimizer]:
    """Return the optimizers that a user gave, one or several; TypeError for anything else."""
    optimizers = [given] if isinstance(given, Optimizer) else given
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(f"attach_updates(optimizer={type(given).__name__}(...)): give an optimizer, or a list of them.")
    return optimizers


class UnattachedOptimizerCheck:
    """Raises an error if an optimizer that is not attached has stepped a parameter of the model.

    Wrappers around an attached optimizer are allowed, whether they call it or it calls them.

    Args:
        optimizers: the attached optimizers, whose updates are exchanged.
        model: the model; the check keeps no reference to it.
        last: a hook before the steps of these optimizers, to run after hooks that a user registers later; None if
            there is none.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], model: nn.Module, last: Callable[..., Any] | None = None
    ) -> None:
        self._own, self._model, self._last = optimizers, weakref.ref(model), last
        self._steps, self._inside = 0, False  # steps of `optimizers` so far, and whether one is running
        self._steps_before: dict[int, int] = {}  # `_steps` when a step of another optimizer began
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it no longer exists."""
        return self._model()

    def close(self) -> None:
        """Stop checking."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._own:
            self._inside, self._steps = True, self._steps + 1
            if self._last is not None:
                keep_last(optimizer, self._last)
        elif not initializes_state():  # torch creates the state by a step that changes nothing
            self._steps_before[id(optimizer)] = self._steps

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._own:
            self._inside = False
            if (model := self._model()) is not None:
                RefuseDDP.end(model)
            return
        unchanged = self._steps_before.pop(id(optimizer), None) == self._steps and not self._inside
        model = self._model()
        if not unchanged or model is None:
            return
        name_of = {id(param): name for name, param in model.named_parameters()}
        stepped = (name_of.get(id(param)) for param in parameters_of([optimizer]))
        if name := next(filter(None, stepped), None):
            raise RuntimeError(
                f"A {type(optimizer).__name__} that attach_updates did not get has stepped {name!r} of the "
                f"{type(model).__name__} whose updates are exchanged for other optimizers: ranks would drift apart. "
                f"Call attach_updates again, with all optimizers that step the model now; or give the parameters to "
                f"an attached one, by add_param_group. In Lightning return it from configure_optimizers; in Fabric "
                f"freeze the parameters that no optimizer steps before you pass it to fabric.setup or "
                f"fabric.setup_optimizers. If your code restores the weights after such steps, let it step a copy of "
                f"the module."
            )


SAMPLE, FEWEST = 1024, 64
"""Number of elements of a parameter that ranks compare, and the fewest of them that must have changed."""
FEW = 8
"""A copy is looked for in parameters with at least this many changed elements, at this many places at most."""
Changes = Callable[[], Mapping[str, tuple[Tensor, Tensor, Tensor]]]
"""Returns an optimizer's weights before and after its step, and the gradients, by name."""


class ExchangeChecks:
    """Looks, at each exchange, for optimizers and parameters that an exchange of updates does not suit.

    Args:
        params: the parameters without exchanged updates, by name.
        warns: whether this is rank 0, which warns of copies.
    """

    def __init__(self, params: Mapping[str, Tensor], warns: bool) -> None:
        self._params, self._warns = params, warns
        self._versions: dict[str, int] = {}  # of these parameters
        self._exchanges, self._changes = Counter[Optimizer](), Counter[Optimizer]()  # all, and those after a change
        self._copies = Counter[Optimizer]()  # exchanges with a copy
        self._stepped: set[str] | None = set()  # frozen parameters with a gradient, in the last exchange

    def look_for_untracked(self, exchanged: Collection[int]) -> None:
        """Warn if a parameter has gradients and has changed, but belongs to no optimizer whose updates are exchanged.

        Args:
            exchanged: the ids of the parameters whose updates are exchanged by now.
        """
        for name, param in self._params.items():
            # A parameter without gradients may be that of a momentum encoder, which exchange_pending makes equal.
            if (param.grad is None and name not in self._versions) or id(param) in exchanged:
                continue
            if self._versions.setdefault(name, version(param)) != version(param):
                self._params = {}  # warn once
                log.warning(
                    f"{name!r} has gradients and has changed, but it is in no optimizer whose updates are exchanged: "
                    f"ranks drift apart in it, unless you average its gradients yourself. Give it to an optimizer of "
                    f"configure_optimizers or attach_updates; or freeze it by requires_grad_(False)."
                )
                return

    def look_for_frozen(self, exchanged: Mapping[str, Tensor]) -> None:
        """Warn on rank 0 if a frozen parameter keeps a gradient of zeros, as by `zero_grad(set_to_none=False)`.

        Optimizers step such a parameter, so it is exchanged, and entries of residuals change it.

        Args:
            exchanged: the parameters whose updates are exchanged, by name.
        """
        if self._stepped is None or not self._warns:
            return
        before = self._stepped
        self._stepped = {name for name, x in exchanged.items() if not x.requires_grad and x.grad is not None}
        if kept := sorted(before & self._stepped):  # after the first exchange, the gradient may be from before
            self._stepped = None
            grads = [local(grad) for name in kept if (grad := exchanged[name].grad) is not None]
            if not any(bool(grad.any()) for grad in grads):
                log.warning(
                    f"{listed([*map(repr, kept)])} require no gradient, but have one of zeros: optimizers step such "
                    f"parameters, and residuals still change them. Clear gradients by zero_grad(set_to_none=True)."
                )

    def look_for_copies(self, optimizer: Optimizer, changes: Changes, params: Mapping[str, Tensor]) -> None:
        """Look for an optimizer's own copy of the weights, in the second and the third exchange after a change.

        An exchange does not change this copy, such as an fp32 master copy. So each later delta would again contain all
        unsent entries, and training would diverge. With local steps ranks would drift apart. Such a copy equals the
        weights after each step. Slow weights, as Lookahead keeps them, equal the weights after some steps only. A copy
        with dtype and size of the weights causes a warning, because it may only serve to find the last change. Another
        dtype, or one tensor for several parameters, is an error. Torch's optimizers are not checked.
        """
        if self._changes[optimizer] == 3 or _is_torchs(optimizer):
            return
        changed = {name: after for name, (before, after, _) in changes().items() if (before != after).sum() >= FEW}
        if not changed:  # as if a gradient scaler skips the step
            return
        self._changes[optimizer] += 1
        if self._changes[optimizer] == 1:
            return
        name = min(changed, key=lambda name: changed[name].numel())  # one is enough, and a search takes time
        weights = changed[name]
        copies = _copies(optimizer, params[name], weights)
        self._copies[optimizer] += bool(copies)
        if self._copies[optimizer] != 2:
            return
        is_certain = any(x.dtype != weights.dtype or x.numel() > weights.numel() for x in copies)
        text = (
            f"{type(optimizer).__name__} keeps its own copy of {name!r}, which an exchange of updates does not change. "
            f"If it computes the weights from this copy, ranks drift apart or training diverges. Then let ranks "
            f"exchange gradients: by strategy='int4_ddp' or 'ddp', for a sharded model by 'dense_hsdp', and in plain "
            f"torch by attach with method='int4'; or take an optimizer without such a copy, such as AdamW."
        )
        if is_certain:
            raise RuntimeError(text)
        if self._warns:
            log.warning(text)

    def look_for_equal_updates(
        self, optimizer: Optimizer, changes: Changes, is_rescaled: bool
    ) -> Callable[[Comm, torch.device], None] | None:
        """Note an exchange, before it begins; return a function that compares ranks, to call after it, or None.

        The function warns on rank 0 if all ranks make the same update of a parameter; with torch's optimizers, of most
        parameters. Torch's optimizers exchange nothing themselves. If their updates are rescaled, ranks compare
        gradients, in the first exchange, which does not overlap backward. Other optimizers may exchange gradients or
        updates in their steps. So ranks compare the changed weights, in the second exchange. Adam's first step contains
        only the signs of gradients, which may be equal.

        Args:
            is_rescaled: whether updates are rescaled as if ranks had different batches.
        """
        self._exchanges[optimizer] += 1
        of_gradients = _is_torchs(optimizer)
        if self._exchanges[optimizer] != (1 if of_gradients else 2) or (of_gradients and not is_rescaled):
            return None
        rows = []
        for each in (found := changes()).values():
            if each[-1].layout is not torch.strided:  # of an embedding, perhaps on some ranks only
                rows.append([0, 0])
                continue
            needed = each[-1:] if of_gradients else each
            *weights, grad = (x.flatten()[:: max(1, x.numel() // SAMPLE)].cpu() for x in needed)
            # After an overflow, all elements may be NaN. Weight decay alone changes elements equally.
            chosen = (grad != 0) & (grad.isfinite() if of_gradients else weights[0] != weights[1])
            digest = zlib.crc32(as_bytes(torch.where(chosen, grad if of_gradients else weights[1], 0)).numpy().data)
            rows.append([digest, int(chosen.sum()) >= FEWEST])
        return partial(_compare_updates, optimizer, [*found], rows)


def _compare_updates(
    optimizer: Optimizer, names: list[str], rows: list[list[int]], comm: Comm, device: torch.device
) -> None:
    """Compare ranks; all call it with the same names."""
    if comm.size == 1 or not names:
        return
    with comm.uncounted():
        found = comm.all_gather(torch.tensor(rows, dtype=torch.int64, device=device)).cpu()
    counts = found[0, :, 1] > 0
    equal = ((found == found[0]).all(0).all(1) & counts).tolist()
    # A penalty may give a few parameters gradients that do not depend on the batch.
    fewest = int(counts.sum()) // 2 + 1 if _is_torchs(optimizer) else 1
    if comm.is_first and sum(equal) >= fewest:
        harm = f"{type(optimizer).__name__} exchanges its results among ranks, gradients are lost"
        if _is_torchs(optimizer):
            harm = "your code averages gradients among ranks, steps become too large"
        log.warning(
            f"All ranks have made the same update of {listed([*map(repr, itertools.compress(names, equal))])}. If "
            f"they have the same batches, give each rank its part of the data, as DistributedSampler does. If "
            f"{harm}: let ranks exchange gradients instead, by exchange='gradient' of the strategy or by attach."
        )


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Return the tensors in an object made of dictionaries, lists and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping | list | tuple):
        for each in x.values() if isinstance(x, Mapping) else x:
            yield from tensors_in(each)


def keeps_copy(optimizer: Optimizer) -> bool:
    """Return whether an optimizer that has stepped keeps a copy of the weights. Torch's optimizers are not checked.

    The slow weights of a Lookahead may count as a copy after some steps, too.
    """
    if _is_torchs(optimizer):
        return False
    for param in sorted(parameters_of([optimizer]), key=torch.numel):
        weights = local(param).detach()
        if param in optimizer.state and weights.unique().numel() >= FEW:  # one is enough, and a search takes time
            return bool(_copies(optimizer, param, weights))
    return False


def _copies(optimizer: Optimizer, param: Tensor, weights: Tensor) -> list[Tensor]:
    """Return an optimizer's copies of a parameter, or of this rank's part of it: `weights`."""
    others = [x for key, x in vars(optimizer).items() if key not in ("state", "param_groups")]
    kept = map(local, tensors_in([optimizer.state.get(param, {}), others]))
    return [x for x in kept if _is_copy(x, weights)]


def _is_copy(x: Tensor, weights: Tensor) -> bool:
    """Return whether a tensor has its own memory and contains these weights, rounded to their dtype, in one piece."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.is_floating_point()
    if not is_plain or x.numel() < weights.numel():
        return False
    if x.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr():
        return False
    flat, ours = x.detach().reshape(-1).to(weights), weights.reshape(-1)
    largest = int(ours.abs().argmax())  # its value is rare; the first one may be a zero of many
    starts = (flat[largest : len(flat) - len(ours) + largest + 1] == ours[largest]).nonzero().flatten()[:FEW].tolist()
    return any(torch.equal(flat[start : start + len(ours)], ours) for start in starts)


class RefuseDDP:
    """Makes a model's forward pass raise an error if DistributedDataParallel wraps it. It can be pickled.

    It checks all passes up to the first one after an exchange, because the model may be wrapped after an evaluation.
    Then the hook goes: TorchScript takes no model with it, and a saved model would need this package. Under
    torch.compile it does not check.
    """

    def __init__(self, model: nn.Module) -> None:
        if earlier := _refusing.pop(model, None):  # the model is attached anew
            earlier.remove()
        self._hook = _refusing[model] = model.register_forward_pre_hook(self)

    @staticmethod
    def end(model: nn.Module) -> None:
        """Remove the model's hook at the second exchange, because torch.compile does not call the hook."""
        if model in _refusing and ((exchange := attached(model)) is None or exchange.reducer.step > 1):
            _refusing.pop(model).remove()

    def __call__(self, model: nn.Module, *_: Any) -> None:
        """Check one pass."""
        if torch.compiler.is_compiling():
            return
        exchange = attached(model)
        if exchange is None or exchange.reducer.step > 0:
            self._hook.remove()
        if exchange is not None and in_ddp_forward():
            raise RuntimeError(
                f"DistributedDataParallel is around the {type(model).__name__} that attach_updates got: all gradients "
                f"would be sent as well, and updates be rescaled as if they had not been averaged. Train with the "
                f"model itself; or call attach with the wrapped model, to exchange gradients."
            )


def explain_failures(model: nn.Module) -> None:
    """Let a sharded model's forward pass raise the error of another rank.

    The collectives of a sharded model would wait for a failed rank before this rank's next exchange. If they break off,
    torch's error does not name the cause. The hooks last until `detach`.
    """
    _explaining[model] = (
        model.register_forward_pre_hook(_raise_known, prepend=True),  # before FSDP2's collectives
        model.register_forward_hook(_explain, always_call=True),
    )


def _raise_known(model: nn.Module, *_: Any) -> None:
    """Raise the error that has ended training, if this rank knows of one."""
    if not torch.compiler.is_compiling() and (exchange := attached(model)) is not None:
        exchange.session.raise_known_failure()


def _explain(model: nn.Module, *_: Any) -> None:
    """Look at the error of the forward pass, if there is one."""
    if torch.compiler.is_compiling():
        return
    error, exchange = sys.exc_info()[1], attached(model)
    if error is not None and exchange is not None:
        exchange.session.fail(error, in_model=True)


_attached: weakref.WeakKeyDictionary[nn.Module, weakref.finalize[..., Any]] = weakref.WeakKeyDictionary()
_checked: weakref.WeakSet[GradientExchanger] = weakref.WeakSet()
_refusing: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
_explaining: weakref.WeakKeyDictionary[nn.Module, Sequence[RemovableHandle]] = weakref.WeakKeyDictionary()
_refusals: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
_left: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
"""The ids of parameters that the optimizer of an ended exchange must not step."""


def keep_attached(model: nn.Module, exchange: UpdateExchanger, optimizers: Sequence[Optimizer]) -> None:
    """Register the exchange of a model's updates, and close an earlier one.

    The exchange is closed when the model is deleted, or when it or a part of it is attached again. Further steps of its
    optimizers then raise an error.
    """
    detach(replaced(exchange.updates.ids, model), exchange.updates.ids, by_updates=True)
    for optimizer in optimizers:
        _left.pop(optimizer, None)
        if refusal := _refusals.pop(optimizer, None):
            refusal.remove()
    _attached[model] = weakref.finalize(model, _abandon, exchange, optimizers, GONE)


def attached(model: nn.Module) -> UpdateExchanger | None:
    """Return the exchange of a model's updates, if there is one."""
    finalizer = _attached.get(model)
    found = finalizer and finalizer.peek()
    return found[2][0] if found else None


def keep_checked(exchanger: GradientExchanger) -> None:
    """Register an exchange of gradients."""
    _checked.add(exchanger)


def replaced(ids: Collection[int], model: nn.Module | None = None) -> list[nn.Module]:
    """Return the models of `attach_updates` that exchange parameters with these ids, and `model` if it is one."""

    def shares(exchange: UpdateExchanger | None) -> bool:
        return exchange is not None and not exchange.updates.ids.isdisjoint(ids)

    return [each for each in [*_attached] if each is model or shares(attached(each))]


def detach(models: Collection[nn.Module], ids: set[int], *, by_updates: bool) -> None:
    """End earlier exchanges, because another one replaces them.

    The optimizer of an ended exchange may step again if ranks exchange the gradients of all its parameters.

    Args:
        models: the models of `attach_updates` whose exchange ends.
        ids: the ids of the parameters that are exchanged from now on.
        by_updates: whether their updates are exchanged; False: their gradients.
    """
    for exchanger in [*_checked]:
        if not {*map(id, exchanger.params.values())}.isdisjoint(ids):
            _checked.discard(exchanger)
            exchanger.stop_checks()
    for each in models:
        for hook in _explaining.pop(each, ()):
            hook.remove()
        if found := _attached.pop(each).detach():
            _, _, (exchange, optimizers, _), _ = found
            # An exchange that its owner has closed may be followed by any other one.
            ended = set() if exchange.session.is_closed else exchange.updates.ids
            _abandon(exchange, optimizers, "the model or a part of it was attached anew, without it", ended)
    for optimizer, left in _left.items():
        left.difference_update(ids)
        if by_updates:
            left.update(ids.intersection(map(id, parameters_of([optimizer]))))


GONE = (
    "the module that attach_updates got is gone, so its updates are exchanged no more. Keep a reference to it as long "
    "as you train: modules = nn.ModuleList([first, second]); attach_updates(modules, ...)"
)


def _abandon(
    exchange: UpdateExchanger, optimizers: Sequence[Optimizer], why: str, ids: Collection[int] | None = None
) -> None:
    """Close an exchange, and let its optimizers refuse to step parameters that no rank exchanges then.

    Args:
        ids: the ids of the parameters whose exchange ends; None is all.
    """
    exchange.warn_of_pending()
    exchange.close()
    ids = exchange.updates.ids if ids is None else ids

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        left = _left.get(optimizer, ())
        if any(id(param) in left and param.requires_grad for param in parameters_of([optimizer])):
            raise RuntimeError(f"{type(optimizer).__name__} steps, but {why}.")

    for optimizer, left in _left.items():  # of earlier exchanges
        left.update({*ids}.intersection(map(id, parameters_of([optimizer]))))
    for optimizer in optimizers:
        _left[optimizer] = {*ids}
        _refusals[optimizer] = optimizer.register_step_pre_hook(refuse)
