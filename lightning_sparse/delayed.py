"""Exchange of updates that goes on while ranks take their next step: no rank waits for a message.

With x the weights that all ranks agree on, and c what a rank has sent last, the rank goes on from y = x − c at once:
what it has sent itself stands for the mean of all ranks until that is there. At its next exchange, with w what its
optimizer has made of y,

    u = e + (y − w);  x ← x − mean of the c sent last;  c ← what is sent of u, e ← u − c;  y ← x − c

So x is equal on all ranks, and nothing is lost; each gradient is taken where the other ranks' last updates are missing.
The idea is that of DaSGD (Zhou et al. 2020, arXiv 2006.00441) and of eager updates (Kale et al. 2025, arXiv
2502.12996), for sparse updates with error feedback.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.comm.broadcast import broadcast
from lightning_sparse.comm.peers import JOIN_SECONDS
from lightning_sparse.comm.store import in_thread, inherit_thread_settings
from lightning_sparse.compressors.base import Entries, Update
from lightning_sparse.kernels.changes import changes_
from lightning_sparse.layout import Segment
from lightning_sparse.reducer import Reducer
from lightning_sparse.segment_exchanges import Begun
from lightning_sparse.updates import Updates

_THREAD = "lightning_sparse updates"


@atexit.register
def _wait_at_exit() -> None:
    """Wait for threads that exchange, `JOIN_SECONDS` each: other ranks need this one, and C++ may abort."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(JOIN_SECONDS)


class _Flight(NamedTuple):
    """A segment whose exchange goes on.

    Attributes:
        segment: what is exchanged.
        mean: 1-D fp32; holds the mean of all ranks in the end.
        places: where y differs from x: int64 indices, perhaps padded with the segment's length; None is everywhere.
        x: its values there.
    """

    segment: Segment
    mean: Tensor
    places: Tensor | None
    x: Tensor


class DelayedUpdates(Updates):
    """`Updates` whose exchanges end with the next one of the same optimizer, or with `land`.

    In between weights are each rank's own, and only optimizers may change them. A thread exchanges, for one optimizer
    after another; but over NCCL, which needs one order of all collectives, the training thread launches all of it, and
    the host waits for nothing.

    Args:
        reducer, model, optimizers: as in `Updates`.
        buffers: returns the buffers that are to become rank 0's where an exchange lands, by name.
        stream: on CUDA the stream to exchange in.
        over_nccl: whether collectives are kernels on the device.
    """

    def __init__(
        self,
        reducer: Reducer,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
        stream: torch.cuda.Stream | None = None,
        over_nccl: bool = False,
    ) -> None:
        super().__init__(reducer, model, optimizers)
        self._buffers, self._stream, self._over_nccl = buffers, stream, over_nccl
        self._flights: dict[int, _Flight] = {}  # by segment
        self._unwritten: dict[int, Segment] = {}  # whose weights the model does not have yet
        self._rank_0s: dict[str, Tensor] = {}  # copies of buffers, which the exchange that goes on makes rank 0's
        self._exchange: Future[None] | None = None
        self._lay_out()

    def _lay_out(self) -> None:
        """Make the weights of each segment one tensor, with one element more, for the places of padding."""
        self._flat, self._layout = list[Tensor](), self._reducer.layout
        assert self._layout is not None
        for segment in self._layout.segments:
            parts = [self._weights[name].reshape(-1) for name in segment.names]
            self._flat.append(torch.cat([*parts, parts[0].new_zeros(1)]))
            views = segment.views(self._flat[-1][:-1])
            self._weights |= {
                name: view.view(shape) for name, view, shape in zip(segment.names, views, segment.shapes, strict=True)
            }

    @property
    def in_flight(self) -> bool:  # type: ignore[override]
        return bool(self._flights)

    @property
    def is_unwritten(self) -> bool:  # type: ignore[override]
        return bool(self._unwritten)

    @property
    def weights(self) -> Mapping[int, Tensor]:
        agreed = dict(super().weights)
        for index, (segment, _, places, x) in self._flights.items():
            flat = self._flat[index].clone()
            flat[places if places is not None else slice(-1)] = x
            for name, view, shape in zip(segment.names, segment.views(flat[:-1]), segment.shapes, strict=True):
                agreed[id(self.parameters[name])] = view.view(shape)
        for name in self._frozen_of(self.parameters):  # `_write` leaves them alone
            del agreed[id(self.parameters[name])]
        return agreed

    def _take_weights(self, names: Sequence[str], unless: Tensor | None) -> None:
        self._write_all()
        waiting = {name for flight in self._flights.values() for name in flight.segment.names}
        if others := [name for name in names if name not in waiting or name in self._frozen]:
            super()._take_weights(others, unless)

    def adopt(self) -> None:
        if self._is_given_others:
            self.land()
        super().adopt()
        if self._layout is not self._reducer.layout:
            self._lay_out()

    @torch.no_grad()
    def exchange(self, optimizer: Optimizer, ready: Callable[[Segment], None] = lambda _: None) -> None:
        """Begin to exchange what an optimizer has changed since `begin`, and end the exchange before.

        If either fails, weights are those that all ranks have agreed on last.

        Raises:
            NonFiniteGradient, RankFailure: see `Updates.exchange`; those of an exchange come with the next one.
        """
        self._end()
        segments, group_of = self._segments_of(optimizer)
        try:
            self._write_all()
            begun = []
            for segment in segments:
                ready(segment)
                begun.append(self._begin(segment, optimizer, group_of))
            self._start(begun)
        except BaseException as error:  # some segments are of this exchange, and some of the one before
            self._give_back(segments)
            if not isinstance(error, Exception):
                self._exchange = Future()
                self._exchange.set_exception(RuntimeError("An exchange of updates was interrupted as it began."))
            raise
        self._reducer.finish_step()
        if self._new:
            self.land()  # not while another thread exchanges
            self._share_new(optimizer)

    def _begin(self, segment: Segment, optimizer: Optimizer, group_of: Mapping[int, Any]) -> Begun:
        """Change weights by the mean that is there, choose what to send, and go on as if it were the next mean."""
        flat, params = self._flat[segment.index], [self.parameters[name].detach() for name in segment.names]
        frozen, rescaling, payout, emptied = self._of_optimizer(segment, optimizer, group_of)
        mean = torch.empty(segment.numel, dtype=torch.float32, device=flat.device)
        changes, y = segment.views(mean), segment.views(flat[:-1])
        changes_(changes, y, [param.reshape(-1) for param in params], segment.bounds, rescaling)
        if segment.index in self._flights:
            self._land(self._flights[segment.index])
        begun = self._reducer.begin_segment(segment, changes, frozen, payout)
        begun.exchange.ahead = begun.exchange.compress(begun.u, begun.compressor)
        _, sent = begun.exchange.ahead
        if emptied is not None and isinstance(sent, Entries):
            emptied.take_out(sent)
        self._flights[segment.index] = _Flight(segment, mean, *_step_ahead_(flat, sent))
        self._reducer.in_flight = True
        self._write(segment)
        return begun

    def _start(self, begun: Sequence[Begun]) -> None:
        self._rank_0s = {name: buffer.clone() for name, buffer in self._buffers().items()}
        stream, copies = self._stream, list(self._rank_0s.values())
        if stream is not None:
            for tensor in (tensor for each in begun for tensor in each.tensors):
                tensor.record_stream(stream)
            stream.wait_stream(torch.cuda.current_stream(stream.device))

        def finish() -> None:
            for each in begun:
                self._reducer.finish_segment_(each)
            if copies:
                broadcast(self._reducer.comm, copies, self._flat[0].device)

        if self._over_nccl:
            with torch.cuda.stream(stream):
                finish()
        else:
            self._exchange = in_thread(finish, _THREAD, inherit_thread_settings(stream))

    def wait(self) -> None:
        if self._exchange is not None:
            self._exchange.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def ends_soon(self) -> bool:
        if self._exchange is None:
            return True
        return not wait([self._exchange], JOIN_SECONDS).not_done and self._exchange.exception() is None

    def _end(self) -> None:
        """Wait for the exchange that goes on. Where it has failed, give back weights; after an interrupt it goes on."""
        try:
            self.wait()
        except Exception:
            self._give_back()
            raise

    @torch.no_grad()
    def land(self, write: bool = True) -> None:
        """End the exchange that goes on, if any: weights are equal on all ranks. Needs no other rank to call it.

        What has been changed since is left to the residual; where there is none, it stays in what is written. Without
        `write` the model keeps its buffers, and gets weights before the next step only: backward may need those it has.
        """
        self._end()
        names = (name for flight in self._flights.values() for name in flight.segment.names)
        if frozen := [*self._frozen.intersection(names)]:
            super()._take_weights(frozen, None)
        kept: list[tuple[Tensor, Tensor]] = []
        for segment, mean, *_ in [*self._flights.values()]:
            own, residual = segment.views(torch.empty_like(mean)), self._reducer.states[segment.index].get("residual")
            params = [self.parameters[name].detach() for name in segment.names]
            y = segment.views(self._flat[segment.index][:-1])
            changes_(own, y, [param.reshape(-1) for param in params], segment.bounds)
            if residual is not None:
                torch._foreach_add_(segment.views(residual), own)
            else:
                kept += zip(params, own, strict=True)
            self._land(self._flights[segment.index])
            self._unwritten[segment.index] = segment
        if write:
            self._write_all()
            for param, change in kept:
                param.sub_(change.view(param.shape))
            present, rank_0s = self._buffers(), self._rank_0s
            self._rank_0s = {}
            for name in present.keys() & rank_0s.keys():
                if present[name].shape == rank_0s[name].shape:
                    present[name].copy_(rank_0s[name])
        self._reducer.raise_deferred()

    def _write_all(self) -> None:
        for segment in self._unwritten.values():
            self._write(segment)
        self._unwritten.clear()

    def _land(self, flight: _Flight) -> None:
        """Change the weights of a segment by the mean, from those that all ranks agreed on before."""
        index, mean = flight.segment.index, flight.mean
        frozen = {name: self._weights[name].clone() for name in self._frozen.intersection(flight.segment.names)}
        self._step_back(flight)
        del self._flights[index]
        self._reducer.in_flight = self.in_flight
        flat, residual = self._flat[index][:-1], self._reducer.states[index].get("residual")
        exact = torch.sub(flat.float(), mean, out=mean)
        flat.copy_(exact)
        if flat.dtype != torch.float32 and residual is not None:
            residual.add_(torch.sub(flat.float(), exact, out=exact))  # it keeps what rounding has added to the weights
        for name, weight in frozen.items():
            self._weights[name].copy_(weight)

    def _step_back(self, flight: _Flight) -> None:
        flat, places = self._flat[flight.segment.index], flight.places
        flat[places if places is not None else slice(-1)] = flight.x

    def _give_back(self, segments: Sequence[Segment] = ()) -> None:
        """Give the model the weights that all ranks have agreed on last, of these segments too: training has failed."""
        for flight in self._flights.values():
            self._step_back(flight)
        for segment in (*segments, *(flight.segment for flight in self._flights.values())):
            with contextlib.suppress(RuntimeError):  # CUDA may be broken
                self._write(segment)
        self._flights.clear()
        self._reducer.in_flight = True  # its state is of no complete step

    def _write(self, segment: Segment) -> None:
        frozen = self._frozen_of(segment.names)
        if names := [name for name in segment.names if name not in frozen]:
            params = [self.parameters[name].detach() for name in names]
            torch._foreach_copy_(params, [self._weights[name] for name in names])


def _step_ahead_(flat: Tensor, sent: Update) -> tuple[Tensor | None, Tensor]:
    """Subtract what is sent from weights with one element of padding; return at which places, and what was there."""
    if isinstance(sent, Entries):
        places = sent.indices
        x = flat[places]
        flat[places] = (x.float() - sent.values).to(flat.dtype)
        return places, x
    x = flat[:-1].clone()
    flat[:-1].copy_(x.float() - sent)
    return None, x
