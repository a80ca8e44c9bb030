"""The exchange of updates while backward goes on: each segment is stepped as soon as its gradients are there.

    steps = WithinBackward(updates, reducer, optimizer)
    steps.watch()
    ...                     # a backward pass whose gradients are those of the optimizer's next step
    steps.end()
    if steps.begun:         # the optimizer has no gradients any more, and so its own step does nothing
        steps.finish()      # weights are equal on all ranks
    else:                   # nothing was stepped: the exchange comes after the step

Weights, residuals, moments and messages are those of an exchange after the step, bit for bit, and segments come in the
same order. So each rank decides for itself, in each step.

A thread exchanges the segments, in the layout's order, whatever the order of their gradients. On CUDA it works on a
stream of its own, which waits for the step of a segment, and at the end the caller's stream waits for it.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from lightning_sparse._compat import collectives_so_far, gradient_hooks, in_backward, step_without_hooks
from lightning_sparse.comm.peers import JOIN_SECONDS
from lightning_sparse.comm.store import in_thread, inherit_thread_settings
from lightning_sparse.layout import Segment
from lightning_sparse.reducer import Reducer
from lightning_sparse.updates import Updates

log = logging.getLogger(__name__)
_NEEDED_AGAIN = (
    "A weight may have been needed for another gradient after it had been stepped within backward, as it is where a "
    "detached one is used. Then set overlap='none' of the strategy: the exchange begins when backward has ended."
)


class WithinBackward:
    """The steps of one optimizer, segment by segment, within the backward passes that are watched.

    The first pass only shows what they are like. Nothing is stepped within where a gradient comes in parts, as with
    reentrant checkpointing; where backward computes parts of the model anew, which may take weights of others; on CUDA,
    where it has collectives of its own; and where a parameter has hooks of the user's on its gradient.

    Args:
        updates: exchanges what the optimizer changes.
        reducer: of `updates`.
        optimizer: changes each parameter by that parameter's gradient and state alone, as those of torch but LBFGS do.
        prepare: called before the first segment of a step is stepped.
        stream: on CUDA the stream to exchange in.

    Attributes:
        begun: whether segments have been stepped, so that `finish` is to be called.
        in_step: whether a closure is being evaluated.
    """

    def __init__(
        self,
        updates: Updates,
        reducer: Reducer,
        optimizer: Optimizer,
        prepare: Callable[[], None] = lambda: None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._updates, self._reducer, self._optimizer = updates, reducer, optimizer
        self._prepare, self._stream = prepare, stream
        self.begun = self.in_step = self._watching = self._abandoned = False
        self._trained: list[tuple[Tensor, bool]] = []
        self._params: list[list[Tensor]] = []  # of each segment
        self._index: dict[Tensor, int] = {}  # the segment of each
        self._parts: list[Optimizer] = []  # of each segment, and its parameters by group
        self._groups: list[list[list[Tensor]]] = []
        self._hooks: list[Any] = []
        self._allowed: bool | None = None  # whether segments may be stepped within; None before a pass was seen
        self._on_modules: Any = None
        self._arrived: set[Tensor] = set()
        self._missing: dict[int, int] = {}  # gradients to come, by segment that has not been stepped
        self._stepped: list[threading.Semaphore] = []  # by segment
        # On CUDA: the streams of the gradients, events behind the step of each segment, and behind a failed backward.
        self._streams: set[torch.cuda.Stream] = set()
        self._ready: dict[int, torch.cuda.Event] = {}
        self._end: torch.cuda.Event | None = None
        self._collectives = 0  # that there had been when backward began
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._exchange: Future[None] | None = None

    def evaluate(self, closure: Callable[[], Any], failed: Callable[[BaseException], None]) -> Any:
        """Return what a step's closure returns, within which `watch` is called before the backward pass that counts.

        `failed` is called with its error, if segments have been stepped.
        """
        self.in_step = True
        try:
            result = closure()
            self.end()
        except BaseException as error:
            self.abandon(error)
            if self.begun:
                failed(error)
                self._settle()
            raise
        finally:
            self.in_step = False
        return result

    def watch(self) -> None:
        """Step segments in the backward pass that comes now, if it is as the one before."""
        self._updates.adopt()
        if not self._are_same():
            layout, params = self._reducer.layout, self._updates.parameters
            assert layout is not None
            self._params = [[params[name] for name in segment.names] for segment in layout.segments]
            self._allowed = None
            self._parts = [copy.copy(self._optimizer) for _ in self._params]
            self._index = {param: index for index, each in enumerate(self._params) for param in each}
            self._groups = [[[] for _ in self._optimizer.param_groups] for _ in self._params]
            for number, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    if param in self._index:
                        self._groups[self._index[param]][number].append(param)
            self._trained = [(param, param.requires_grad) for param in self._index]
            self._remove_hooks()
            self._hooks = [
                param.register_post_accumulate_grad_hook(self._on_gradient) for param, used in self._trained if used
            ]
        self._arrived.clear()
        self._streams.clear()
        self._collectives = 0 if self._stream is None else collectives_so_far()
        if self._allowed is None:
            self._on_modules = register_module_forward_pre_hook(self._on_forward)
        self._watching = True

    def end(self) -> None:
        """Step what has not been stepped, if the pass has begun to, and put gradients aside until `finish`."""
        self._stop_watching()
        if self.begun:
            for index in sorted(self._missing):
                self._step(index)
            self._gradients = [(param, param.grad) for param in self._index]
            for param in self._index:
                param.grad = None
        elif self._allowed is None and self._arrived:
            self._allowed = self._stream is None or collectives_so_far() == self._collectives
            if not self._allowed:
                self._say("backward has collectives of its own")

    def finish(self) -> None:
        """Wait until weights are equal on all ranks; gradients are again where they were.

        Raises:
            NonFiniteGradient, RankFailure: see `Updates.exchange`.
        """
        self.begun = False
        for param, gradient in self._gradients:
            param.grad = gradient
        self._gradients = []
        assert self._exchange is not None
        try:
            self._exchange.result()
        finally:
            self._settle()

    def abandon(self, error: BaseException) -> None:
        """Step nothing more of the backward pass, which has failed, and end the thread where it waits for it."""
        self._stop_watching()
        if self.begun:
            if "modified by an inplace operation" in str(error):
                error.args = (f"{_NEEDED_AGAIN} ({error})",)
            self._abandoned = True
            if self._stream is not None:
                self._end = torch.cuda.current_stream(self._stream.device).record_event()
            for stepped in self._stepped:
                stepped.release()

    def close(self) -> bool:
        """Watch no more; return whether nothing is being exchanged any more."""
        self._stop_watching()
        self._remove_hooks()
        return self._exchange is None or not wait([self._exchange], JOIN_SECONDS).not_done

    def _stop_watching(self) -> None:
        self._watching = False
        if self._on_modules is not None:
            self._on_modules.remove()
            self._on_modules = None

    def _settle(self) -> None:
        """Wait until the thread has ended: after an error it gives back the weights."""
        if self._exchange is not None:
            wait([self._exchange], JOIN_SECONDS)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _say(self, why: str) -> None:
        if self._reducer.comm.rank == 0:
            log.info(f"Updates are exchanged after backward: {why}.")

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _are_same(self) -> bool:
        """Return whether the parameters are those that are watched, and the same ones are frozen."""
        params = self._updates.parameters
        return len(params) == len(self._trained) and all(
            param in self._index and param.requires_grad == trained for param, trained in self._trained
        )

    # In the thread of backward:

    def _on_forward(self, *_: Any) -> None:
        if in_backward() and self._allowed is not False:
            self._say("backward computes activations anew, by checkpointing")
            self._allowed = False

    def _on_gradient(self, param: Tensor) -> None:
        if not self._watching:
            return
        index = self._index[param]
        if param in self._arrived:
            name = next(name for name, each in self._updates.parameters.items() if each is param)
            if self._allowed is not False:
                self._say(f"the gradient of {name!r} comes in parts")
            self._allowed = False
            if self.begun and index in self._missing:
                self._missing[index] += 1  # so the segment waits for the end
            elif self.begun:
                raise RuntimeError(
                    f"The gradient of {name!r} came in two parts, though in the step before it came at once, so its "
                    f"update may be of one part only. Checkpoint activations with use_reentrant=False, or set "
                    f"overlap='none' of the strategy."
                )
        if self._stream is not None:
            self._streams.add(torch.cuda.current_stream(self._stream.device))
        is_first = not self._arrived and self._allowed and self._are_same()
        # Hooks of others on gradients may come after ours and change them.
        if is_first and not any(len(gradient_hooks(each)) > 1 for each in self._index):
            self._begin()
        self._arrived.add(param)
        if self.begun:
            self._missing[index] -= 1
            if not self._missing[index]:
                self._step(index)

    def _begin(self) -> None:
        # A frozen parameter, too, counts as one to come: backward may need its weight until it ends.
        self._missing = {index: len(each) for index, each in enumerate(self._params)}
        self._stepped = [threading.Semaphore(0) for _ in self._params]
        self._updates.begin(self._optimizer)
        self._prepare()
        self.begun = True
        if self._stream is not None:  # a state that an exchange replaces may be of the caller's stream
            for x in (x for state in self._reducer.states for x in state.values()):
                x.record_stream(self._stream)

        exchange = partial(self._updates.exchange, self._optimizer, self._wait_for)
        self._exchange = in_thread(exchange, "lightning_sparse", inherit_thread_settings(self._stream))

    def _step(self, index: int) -> None:
        part = self._parts[index]
        part.state = self._optimizer.state
        chosen = zip(self._optimizer.param_groups, self._groups[index], strict=False)  # a new group has none of ours
        part.param_groups = [{**group, "params": params} for group, params in chosen]
        current = None if self._stream is None else torch.cuda.current_stream(self._stream.device)
        if current is not None:
            for stream in self._streams - {current}:
                current.wait_stream(stream)
        step_without_hooks(part)
        if current is not None:
            self._ready[index] = current.record_event()
        del self._missing[index]
        self._stepped[index].release()

    # In the thread that exchanges:

    def _wait_for(self, segment: Segment) -> None:
        self._stepped[segment.index].acquire()
        if self._abandoned:
            if self._end is not None:
                self._end.wait()
            raise RuntimeError("Backward has failed.")  # the training thread has raised why
        if self._stream is not None:
            self._ready[segment.index].wait()
