"""The thread that exchanges gradients while backward goes on.

DDP's buckets only bring gradients in and carry results out. The communication hook puts each bucket in a queue and
returns a future. One communication thread owns the residuals: it reduces a segment as soon as the segment's last
gradient has arrived, and completes a bucket's future when all segments in the bucket are reduced. DDP calls the hook in
the same order on all ranks, so all ranks reduce the segments in the same order.

On CUDA the thread works on a stream of its own, which waits for an event that the hook records behind the bucket's last
gradient; DDP's stream waits for an event of the thread's stream in the future. So the host does not wait for the
device: the thread completes a future when it has launched the kernels.

NCCL wants the collectives of all its communicators on a device in one order, the same on all ranks. In plain backward
there are only this thread's. Where backward has others (`exchanges_after_backward`), the thread gets the buckets at its
end: first come backward's own collectives, in the order of autograd, then ours. Nothing overlaps there.

After an exception in the thread nobody may be left waiting: the thread tells the other ranks, and completes all futures
with the local gradients (a future that never completes hangs backward for ever); the training thread raises the
exception at the end of backward.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse._compat import at_end_of_backward, in_backward
from lightning_sparse.comm import POLL
from lightning_sparse.comm.peers import JOIN_SECONDS
from lightning_sparse.comm.store import inherit_thread_settings
from lightning_sparse.hooks.exchanged_gradients import ExchangedGradients
from lightning_sparse.hooks.rates import Rates
from lightning_sparse.hooks.session import Session
from lightning_sparse.hooks.step import Bucket, Step
from lightning_sparse.options import listed
from lightning_sparse.reducer import error_message

log = logging.getLogger(__name__)


class CommThread:
    """The communication thread of one DDP instance in one process.

    Args:
        session: the exchange with the other ranks.
        ddp: the wrapped model.
        params: its parameters by name.
        rates: of the optimizers, to be compared now and then.

    Attributes:
        reducer: reduces the gradients; used by this thread only.
        comm: the reducer's wire.
    """

    note = "Gradients are exchanged."
    """What the summary of a run says about it."""

    def __init__(
        self,
        session: Session,
        ddp: DistributedDataParallel,
        params: Mapping[str, Tensor],
        rates: Rates,
    ) -> None:
        self._session = session
        self.comm, self.reducer = session.comm, session.reducer
        self._pid = os.getpid()
        self._params = list(params.values())  # keeps the ids valid
        self._name_of = {id(param): name for name, param in params.items()}
        self._frozen = {
            name: param
            for name, param in ddp.module.named_parameters()
            if not param.requires_grad and name not in ddp.parameters_to_ignore
        }
        self._device, self._stream = ddp.device, session.stream
        self._queue: queue.Queue[Bucket | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._step = Step(self.reducer, rates)
        # One rank warns, and only if there are residuals: it looks at all parameters in each step.
        warns = self.comm.rank == 0 and self.reducer.method.memory.error_feedback
        self._exchanged = ExchangedGradients(params) if warns else None
        self._held: list[Bucket] | None = [] if session.over_nccl and exchanges_after_backward(ddp) else None
        self._device_busy = False  # whether the device may still have work of ours
        self._error: BaseException | None = None
        self._in_backward = False
        self._closed = self._closed_by_thread = False
        # DDP delivers parameters that took no part too, with the stale contents of their .grad; only autograd knows.
        self._tracks_use = bool(ddp.find_unused_parameters or ddp.static_graph)
        self._finds_unused = bool(ddp.find_unused_parameters and not ddp.static_graph)
        self._used: set[str] = set()
        tracked = self._params if self._tracks_use else []
        self._hooks = [param.register_post_accumulate_grad_hook(self._mark_used) for param in tracked]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the thread out of copies of the model: like a stock DistributedDataParallel's, they have no hook."""
        return type(None), ()

    # In the training thread:

    def _mark_used(self, param: Tensor) -> None:
        self._used.add(self._name_of[id(param)])

    def enqueue(self, bucket: Any) -> Any:
        """Hand one of DDP's buckets to the thread; called by DDP within backward."""
        if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
            raise TypeError(
                "The communication hook was called by torch's Python reducer. Set "
                "torch._dynamo.config.optimize_ddp = 'ddp_optimizer' (the default), which calls it with real buckets."
            )
        buffer = bucket.buffer()
        if not self._in_backward:
            try:
                at_end_of_backward(self._end_of_backward)
            except RuntimeError as error:
                raise self._fail_with(
                    "DDP reduces gradients outside of backward, as it does within ddp.join(). Give all ranks the same "
                    "number of batches instead."
                ) from error
            self._in_backward = True
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        # By flat position: gradients() has the strides of the parameters, which need not be those of memory.
        if unknown := [param for param in bucket.parameters() if id(param) not in self._name_of]:
            raise self._fail_with(
                f"DDP delivered a gradient of shape {list(unknown[0].shape)} whose parameter had requires_grad=False "
                f"when compression was attached. Freeze and unfreeze parameters before the model is wrapped."
            )
        names = [self._name_of[id(param)] for param in bucket.parameters()]
        views = dict(zip(names, buffer.split([param.numel() for param in bucket.parameters()]), strict=True))
        unused = set(names) - self._used if self._tracks_use else set()
        self._used -= set(names)
        ready = None
        if self._stream is not None:
            # In the stream in which DDP has just filled the bucket; it is the one of autograd's node for the parameter,
            # not always the one in which backward was called.
            ready = torch.cuda.current_stream(self._device).record_event()
        if self._thread is None and not self._closed:
            # Started here, in the process that trains: a thread does not survive fork, nor can it be pickled.
            self._thread = threading.Thread(
                target=self._run, args=(inherit_thread_settings(self._stream),), name="lightning_sparse", daemon=True
            )
            self._thread.start()
        arrived = Bucket(future, buffer, views, unused, ready)
        if self._held is None:
            self._queue.put(arrived)
        else:
            self._held.append(arrived)
        return future

    def _end_of_backward(self) -> None:
        """Wait for the thread and raise its exception. Runs before DDP itself waits for the futures.

        On CUDA this waits until the thread has launched its kernels, as DDP's own wait for the futures would, not for
        the device.
        """
        # With reentrant checkpointing this is the end of a part only: the next bucket queues it again.
        within_backward, self._in_backward = in_backward(), False
        started = time.perf_counter()
        if self._held:
            if self._stream is not None:  # behind all that backward has launched, not only behind the gradients
                self._held[0].ready = torch.cuda.current_stream(self._device).record_event()
            for bucket in self._held:
                self._queue.put(bucket)
            self._held.clear()
        self._queue.join()
        self.reducer.seconds["exposed"] += time.perf_counter() - started
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            # DDP synchronises only the stream its hook ran on. Make the caller's stream wait too: it reuses the buffers
            # the thread still reads. After this no gradient, bucket or residual needs record_stream.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for name, param in self._frozen.items():
            if param.requires_grad:
                raise self._fail_with(
                    f"{name!r} was frozen when the model was wrapped and takes gradients now: DDP does not exchange "
                    f"them, so the ranks would drift apart. Let it require gradients before the model is wrapped, and "
                    f"set its learning rate to 0 until it is to be trained."
                )
        exchanged, self._step.exchanged = self._step.exchanged, []
        if self._exchanged is not None and exchanged:
            note = partial(self._exchanged.on_exchange, exchanged)
            at_end_of_backward(note) if within_backward else note()  # once DDP has written the gradients

    @contextlib.contextmanager
    def after_backward(self) -> Iterator[None]:
        """Let DDP reduce gradients outside of backward, and raise the thread's exception at the end."""
        self._in_backward = True
        yield
        self._end_of_backward()

    @property
    def reductions(self) -> int:
        """Number of steps that are complete, skipped ones included."""
        return self.reducer.step + self.reducer.skipped

    def check_reduced(self, before: int) -> None:
        """Raise RuntimeError, on all ranks, unless `reductions` is one more than before backward."""
        self._queue.join()
        if self._error is not None or self.reductions > before:
            return
        late = {name: p for p in self._params if (name := self._name_of[id(p)]) not in self._step.arrived}
        where = f"on rank {self.comm.ranks[self.comm.rank]} at step {self.reducer.step}"
        # DDP does not deliver a bucket with one gradient missing, so not every parameter that is late is at fault.
        unused = [repr(name) for name, param in late.items() if param.grad is None or not param.requires_grad]
        remedy = "If that is meant, set find_unused_parameters=True, with static_graph=False."
        if self._finds_unused or len(unused) == len(self._params):
            remedy = (
                "The loss does not depend on all that the model returned, and find_unused_parameters=True does not "
                "help there. Let the loss touch the parameters: loss + 0 * output.sum(), for each output."
            )
        raise self._fail_with(
            f"{listed(unused or [*map(repr, late)])} got no gradient {where}, so DDP did not exchange all gradients "
            f"and the ranks would drift apart. {remedy}"
        )

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed on this one, outside the communication thread."""
        self._session.fail(error)

    @property
    def is_consistent(self) -> bool:
        """Whether every step that was begun is complete, so that all residuals belong to the same step."""
        return self._error is None and not self._step.buckets and not self._held

    def drain(self) -> bool:
        """Wait until the queue is empty, and return whether the residuals are consistent."""
        self._queue.join()
        return self.is_consistent

    def _fail_with(self, text: str) -> RuntimeError:
        error = RuntimeError(text)
        self.fail(error)
        return error

    def close(self) -> None:
        """End the thread and leave the group. May be called twice, and after a failure."""
        # A forked child that collects its copy of the model has no thread, and its parent goes on.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._session.mark_done()
        for hook in self._hooks:
            hook.remove()
        if self._exchanged is not None:
            self._exchanged.close()
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is threading.current_thread():
                self._closed_by_thread = True  # by the garbage collector; `_run` closes the session at its end
                return
            self._thread.join(JOIN_SECONDS)
        self._close_session(alive=self._thread is not None and self._thread.is_alive())

    def _close_session(self, *, alive: bool) -> None:
        done = self._stream.query if self._stream is not None else lambda: True
        error = self._session.finish(done, failed=self._error is not None or alive)
        self._error = self._error or error

    # In the communication thread:

    def _run(self, prepare: Callable[[], None]) -> None:
        prepare()
        while (bucket := self._next()) is not None:
            try:
                if self._error is None:
                    if bucket.ready is not None:
                        bucket.ready.wait()
                    self._device_busy = True
                    self._step.add(bucket)
            except BaseException as error:  # raised again in the training thread
                self._fail(error)
            finally:
                if self._error is not None:
                    bucket.complete()
                self._queue.task_done()
            del bucket
            if self._error is not None:
                # A kernel may wait for a dead rank, and whoever reads a tensor waits for the kernel: a deadlock.
                self._session.free_device()
        if self._closed_by_thread:
            self._close_session(alive=False)

    def _next(self) -> Bucket | None:
        while True:
            try:
                return self._queue.get(timeout=POLL.total_seconds())
            except queue.Empty:
                self.comm.respond()
                self._watch_device()

    def _watch_device(self) -> None:
        """If this rank's device waits for a rank that has failed, free the device."""
        # Querying a stream invalidates a CUDA graph that another thread captures: no query once our work is done.
        if self._stream is None or self._error is not None or not self._device_busy:
            return
        try:
            if self._stream.query():
                self._device_busy = False
            else:
                self.comm.raise_if_peer_failed()
        except Exception as error:
            # The training thread may be waiting for the device, and so for the failed rank. The gradients it gets now
            # are invalid, and the next backward raises the error.
            self._fail(error)
            log.error(error_message(error, self.comm, self.reducer.step))
            self._session.free_device()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        # First of all, so that backward ends whatever happens here.
        for bucket in self._step.buckets:
            bucket.complete()
        self.comm.mark_failed(error_message(error, self.comm, self.reducer.step))


def exchanges_after_backward(ddp: DistributedDataParallel) -> bool:
    """Return whether backward has collectives beside the thread's, or may have, so that the thread has to wait.

    DDP agrees on unused parameters by one.
    """
    return (ddp.find_unused_parameters and not ddp.static_graph) or has_collectives(ddp.module)


def has_collectives(model: torch.nn.Module) -> bool:
    """Return whether a model's backward has collectives of its own, or may have.

    SyncBatchNorm agrees on sums of gradients; and a user who sets NCCL_LAUNCH_ORDER_IMPLICIT=1 asks for collectives in
    one order from one thread.
    """
    return any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()) or (
        os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0")
    )
