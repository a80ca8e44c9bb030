"""The exchange of updates while backward goes on: each segment is stepped as soon as its gradients are there.

    steps = WithinBackward(updates, reducer, optimizer, updates.begin)
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
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse._compat import gradient_hooks
from lightning_sparse.comm.peers import JOIN_SECONDS
from lightning_sparse.comm.store import in_thread
from lightning_sparse.layout import Segment
from lightning_sparse.reducer import Reducer
from lightning_sparse.updates import Updates

_NEEDED_AGAIN = (
    "A weight was needed for another gradient after it had been stepped within backward, as it is where a detached one "
    "is used. Set overlap=False of the strategy: then the exchange begins when backward has ended."
)


class WithinBackward:
    """The steps of one optimizer, segment by segment, within the backward passes that are watched.

    The first pass only shows whether each parameter gets its gradient at once. With reentrant checkpointing one that is
    used twice does not. Then, or where a parameter has hooks of the user's on its gradient, nothing is stepped within.

    Args:
        updates: exchanges what the optimizer changes.
        reducer: of `updates`.
        optimizer: changes each parameter by that parameter's gradient and state alone, as those of torch but LBFGS do.
        begin: called with the optimizer before its first segment is stepped; it begins its step.
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
        begin: Callable[[Optimizer], None],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._updates, self._reducer, self._optimizer = updates, reducer, optimizer
        self._begin_step, self._stream = begin, stream
        self.begun = self.in_step = self._watching = self._abandoned = False
        self._trained: list[tuple[Tensor, bool]] = []
        self._params: list[list[Tensor]] = []  # of each segment
        self._index: dict[Tensor, int] = {}  # the segment of each
        self._parts: list[Optimizer] = []
        self._hooks: list[Any] = []
        self._at_once: bool | None = None  # whether each gradient comes at once; None before a whole pass was seen
        self._arrived: set[Tensor] = set()
        self._missing: dict[int, int] = {}  # gradients to come, by segment that has not been stepped
        self._stepped: list[threading.Semaphore] = []  # by segment
        self._ready: dict[int, torch.cuda.Event] = {}  # on CUDA, behind the step of each segment
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
            self._at_once = None
            self._parts = [copy.copy(self._optimizer) for _ in self._params]  # without hooks
            self._index = {param: index for index, each in enumerate(self._params) for param in each}
            self._trained = [(param, param.requires_grad) for param in self._index]
            self._remove_hooks()
            self._hooks = [
                param.register_post_accumulate_grad_hook(self._on_gradient) for param, used in self._trained if used
            ]
        self._arrived.clear()
        self._watching = True

    def end(self) -> None:
        """Step what has not been stepped, if the pass has begun to, and put gradients aside until `finish`."""
        self._watching = False
        if self.begun:
            for index in sorted(self._missing):
                self._step(index)
            self._gradients = [(param, param.grad) for param in self._index]
            for param in self._index:
                param.grad = None
        elif self._at_once is None and self._arrived:
            self._at_once = True

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
        self._exchange.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def abandon(self, error: BaseException) -> None:
        """Step nothing more of the backward pass, which has failed, and end the thread where it waits for it."""
        self._watching = False
        if self.begun:
            if "modified by an inplace operation" in str(error):
                error.args = (f"{_NEEDED_AGAIN} ({error})",)
            self._abandoned = True
            for stepped in self._stepped:
                stepped.release()

    def close(self) -> bool:
        """Watch no more; return whether nothing is being exchanged any more."""
        self._remove_hooks()
        return self._exchange is None or not wait([self._exchange], JOIN_SECONDS).not_done

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _are_same(self) -> bool:
        """Return whether the parameters are those that are watched, and as many of them are frozen."""
        params = self._updates.parameters
        return len(params) == len(self._trained) and all(
            param in self._index and param.requires_grad == trained for param, trained in self._trained
        )

    # In the thread of backward:

    def _on_gradient(self, param: Tensor) -> None:
        if not self._watching:
            return
        if param in self._arrived:
            self._at_once = False
            if self.begun:
                name = next(name for name, each in self._updates.parameters.items() if each is param)
                raise RuntimeError(
                    f"The gradient of {name!r} came in two parts, though in the step before it came at once, so its "
                    f"update may be of one part only. Checkpoint activations with use_reentrant=False, or set "
                    f"overlap=False of the strategy."
                )
        if not self._arrived and self._at_once and self._are_same() and not self._are_hooked():
            self._begin()
        self._arrived.add(param)
        if self.begun:
            index = self._index[param]
            self._missing[index] -= 1
            if not self._missing[index]:
                self._step(index)

    def _are_hooked(self) -> bool:
        """Return whether somebody else has hooks on gradients, which may come after ours and change them."""
        return any(len(gradient_hooks(param)) > 1 for param in self._index)

    def _begin(self) -> None:
        # A frozen parameter, too, counts as one to come: backward may need its weight until it ends.
        self._missing = {index: len(each) for index, each in enumerate(self._params)}
        self._stepped = [threading.Semaphore(0) for _ in self._params]
        self._begin_step(self._optimizer)
        self.begun, threads = True, torch.get_num_threads()

        def exchange() -> None:
            torch.set_num_threads(threads)  # OpenMP keeps this number per thread
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)  # and CUDA the current device and stream
                torch.cuda.set_stream(self._stream)
            self._updates.exchange(self._optimizer, self._wait_for)

        self._exchange = in_thread(exchange, "lightning_sparse")

    def _step(self, index: int) -> None:
        part, members = self._parts[index], set(self._params[index])
        part.state = self._optimizer.state
        part.param_groups = [
            {**group, "params": [param for param in group["params"] if param in members]}
            for group in self._optimizer.param_groups
        ]
        part.step()
        if self._stream is not None:
            self._ready[index] = torch.cuda.current_stream(self._stream.device).record_event()
        del self._missing[index]
        self._stepped[index].release()

    # In the thread that exchanges:

    def _wait_for(self, segment: Segment) -> None:
        self._stepped[segment.index].acquire()
        if self._abandoned:
            raise RuntimeError("Backward has failed.")  # the training thread has raised why
        if self._stream is not None:
            self._ready[segment.index].wait()
