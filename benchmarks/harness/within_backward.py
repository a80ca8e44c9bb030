"""Updates that are exchanged while backward goes on: each segment is stepped as soon as its gradients are there.

    steps = StepsWithinBackward(Reducer("topk", comm, exchanged="update"), model, optimizer)
    ...                # zero_grad and forward
    loss.backward()    # steps segment after segment, and another thread exchanges them
    steps.finish()     # in place of optimizer.step()

The numbers are those of `Updates` after backward, bit for bit. An experiment: every backward pass is a step, so there
is no accumulation, and nothing that needs all gradients before the step, such as clipping by their norm.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse import Reducer
from lightning_sparse.layout import Segment
from lightning_sparse.updates import Updates


class _Waiting(Updates):
    """Exchanges a segment once its parameters have been stepped, in another thread."""

    def __init__(self, reducer: Reducer, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(reducer, model, optimizers)
        assert reducer.layout is not None
        self.stepped = [threading.Semaphore(0) for _ in reducer.layout.segments]

    def _exchange_segment(self, segment: Segment, *args: Any) -> None:
        self.stepped[segment.index].acquire()
        super()._exchange_segment(segment, *args)


class StepsWithinBackward:
    """Steps an optimizer within backward, and exchanges its updates in a thread.

    Args:
        reducer: of `exchanged="update"`.
        model: the model; its weights are equal on all ranks.
        optimizer: its optimizer, which changes each parameter by that parameter's gradient and state alone.
    """

    def __init__(self, reducer: Reducer, model: nn.Module, optimizer: Optimizer) -> None:
        self._reducer, self._optimizer = reducer, optimizer
        self._updates = _Waiting(reducer, model, [optimizer])
        assert reducer.layout is not None
        self._segments, params = reducer.layout.segments, dict(model.named_parameters())
        self._params = [[params[name] for name in segment.names] for segment in self._segments]
        self._index: dict[Tensor, int] = {
            param: index for index, members in enumerate(self._params) for param in members
        }
        self._missing: list[int] = []  # gradients to come, by segment
        # The thread takes segments in the layout's order, in which ranks agree, whatever the order of their gradients.
        self._stepped = self._updates.stepped
        self._exchange: Future[None] | None = None
        for param in self._index:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def finish(self) -> None:
        """Step what had no gradient, and wait until weights are equal on all ranks."""
        exchange = self._exchange or self._begin()
        for index, missing in enumerate(self._missing):
            if missing:
                self._step(index)
        started = time.perf_counter()
        exchange.result()
        self._reducer.seconds["exposed"] += time.perf_counter() - started
        self._exchange = None

    def _begin(self) -> Future[None]:
        self._updates.begin(self._optimizer)
        self._missing = [len(members) for members in self._params]
        self._exchange = exchange = Future[None]()
        threading.Thread(target=self._run, args=(exchange, torch.get_num_threads()), daemon=True).start()
        return exchange

    def _run(self, exchange: Future[None], threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP keeps this number per thread
        try:
            self._updates.exchange(self._optimizer)
            exchange.set_result(None)
        except BaseException as error:  # raised again by `finish`
            exchange.set_exception(error)

    def _on_gradient(self, param: Tensor) -> None:
        if self._exchange is None:
            self._begin()
        index = self._index[param]
        self._missing[index] -= 1
        if not self._missing[index]:
            self._step(index)

    def _step(self, index: int) -> None:
        part = copy.copy(self._optimizer)  # of the same state, and without hooks
        members = set(self._params[index])
        groups = self._optimizer.param_groups
        part.param_groups = [{**group, "params": [x for x in group["params"] if x in members]} for group in groups]
        part.step()
        self._stepped[index].release()
