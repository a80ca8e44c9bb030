"""Compressed averaging for DistributedDataParallel, overlapped with backward.

    ddp = DistributedDataParallel(model)
    attach(ddp, "gaussiank", density=0.001)

DDP's buckets only bring gradients in and carry results out. The communication hook puts each bucket in a queue and
returns a future; one communication thread owns all state and does the rest: a segment is reduced as soon as its last
gradient is there, and a bucket's future completes when all segments that touch it are done. DDP calls the hook in the
same order on all ranks, so the segments' order agrees without further talk.

On CUDA the thread works on a stream of its own. That waits for an event which the hook records behind the bucket's last
gradient; the future holds an event of the thread's stream, for which DDP's stream waits. So the host need not wait for
the device: what the thread has done, it has launched.

An exception in the thread must not leave anybody waiting: the thread tells the other ranks, completes all futures as if
nothing had happened (a future that never completes hangs backward for ever), and the training thread raises at the end
of backward.
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and refuses strings.
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.comm import POLL
from lightning_sparse.layout import Granularity, Segment
from lightning_sparse.methods import Method
from lightning_sparse.methods import method as make_method
from lightning_sparse.reducer import OnNonFinite, Reducer
from lightning_sparse.session import JOIN_SECONDS, Session

log = logging.getLogger(__name__)


def attach(
    ddp: DistributedDataParallel,
    method: str | Method = "topk",
    *,
    density: float | None = None,
    granularity: Granularity = "bucket",
    lr: float | Callable[[], float] | None = None,
    seed: int = 0,
    warmup: Sequence[float] = (),
    warmup_steps: int | None = None,
    loss_scale: Callable[[], float] | None = None,
    on_nonfinite: OnNonFinite = "raise",
    clip_norm: float | None = None,
    timeout: timedelta | None = None,
) -> Reducer:
    """Replace the gradient all-reduce of `ddp` by a compressed exchange. All ranks call it, before the first backward.

    Args:
        ddp: the wrapped model; its communication hook is set.
        method: a name in `METHODS`, or a `Method` made of own parts.
        density: fraction of entries to send, in (0, 1]; None keeps the method's own. Only beside a name.
        granularity: what is compressed together: "layer", "bucket" (of the size of DDP's own buckets) or "model".
        lr: the learning rate, or a function that returns the present one, for methods that need it.
        seed: of all random choices; equal on all ranks.
        warmup: densities to use in turn before `density`, `warmup_steps` steps each.
        warmup_steps: number of steps for each density of `warmup`.
        loss_scale: the `get_scale` of a GradScaler, where one is used. Where a gradient overflows on any rank, all
            ranks get NaN, so that all scalers leave the step out, and no residual changes.
        on_nonfinite: without a loss scale, what a gradient with a NaN or an infinity means: "raise" NonFiniteGradient
            on all ranks, or "skip": all ranks get NaN gradients, no residual changes, and it is yours to leave the
            optimizer step out.
        clip_norm: largest 2-norm of a rank's own gradient, before compression. Clipping afterwards would destroy what
            has already left the residuals.
        timeout: how long to wait for other ranks; None takes the default process group's.

    Returns:
        The reducer at work: its `comm` counts bytes, its `state_dict` holds what a checkpoint needs.

    Raises:
        TypeError, ValueError: an option, a parameter or a feature of DDP that cannot be used; the message says which.
        RankFailure: other ranks use other settings, or do not attach.
    """
    if warmup and warmup_steps is None:
        raise ValueError(
            f"warmup={tuple(warmup)!r} without epochs: say how many steps each density lasts, warmup_steps."
        )
    return CommThread(
        ddp,
        method_of(method, density),
        granularity=granularity,
        lr=lr,
        seed=seed,
        warmup=warmup,
        warmup_steps=warmup_steps,
        loss_scale=loss_scale,
        on_nonfinite=on_nonfinite,
        clip_norm=clip_norm,
        timeout=timeout,
    ).reducer


def method_of(method: str | Method, density: float | None) -> Method:
    """Return the method that a user's pair of options means."""
    if isinstance(method, str):
        return make_method(method, density=density)
    if not isinstance(method, Method):
        raise TypeError(f"method={method!r}: give a method's name, or a Method.")
    if density is not None:
        raise ValueError(f"density={density!r} beside method={method!r}: set the density of its compressor instead.")
    return method


@dataclass
class _Bucket:
    """One call of the hook: what it brought and how many segments still keep it waiting."""

    future: Any
    buffer: Tensor
    views: dict[str, Tensor]
    unused: set[str]
    ready: torch.cuda.Event | None
    open: int = 0


class CommThread:
    """The communication thread of one DDP instance in one process.

    Attributes:
        reducer: does the work, in this thread only.
    """

    def __init__(
        self, ddp: DistributedDataParallel, method: Method, *, timeout: timedelta | None = None, **options: Any
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"attach got a {type(ddp).__name__}: wrap the model in DistributedDataParallel first and pass that."
            )

        def parameters() -> dict[str, Tensor]:
            check_no_hook(ddp)
            return trainable_parameters(ddp)

        self._pid = os.getpid()
        self._closed = self._closed_by_thread = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._watches: list[Any] = []
        self.session = Session(
            parameters,
            method,
            group=ddp.process_group,  # need not be all the ranks
            device=ddp.device,
            timeout=timeout,
            bucket_cap_mb=ddp.bucket_bytes_cap / 2**20,
            **options,
        )
        self.comm, self.reducer = self.session.comm, self.session.reducer
        try:
            self._start(ddp)
        except BaseException as error:
            self.session.fail(error)
            self.close()
            raise

    def _start(self, ddp: DistributedDataParallel) -> None:
        assert self.reducer.layout is not None
        params = trainable_parameters(ddp)
        self._segment_of = {name: segment for segment in self.reducer.layout.segments for name in segment.names}
        self._name_of = {id(param): name for name, param in params.items()}
        self._params = list(params.values())  # keeps the ids valid
        self._frozen = {
            name: param
            for name, param in ddp.module.named_parameters()
            if not param.requires_grad and name not in ddp.parameters_to_ignore
        }
        self._queue: queue.Queue[_Bucket | None] = queue.Queue()
        self._device = ddp.device
        self._stream = self.session.stream
        # Of the present step, and the thread's own:
        self._buckets: list[_Bucket] = []
        self._arrived: dict[str, _Bucket] = {}
        self._missing: dict[int, int] = {}  # parameters per segment
        self._in_backward = False
        # DDP hands over parameters that took no part as well, with whatever their .grad holds; only autograd knows.
        self._watches_use = bool(ddp.find_unused_parameters or ddp.static_graph)
        self._used: set[str] = set()
        if self._watches_use:
            self._watches = [param.register_post_accumulate_grad_hook(self._mark_used) for param in self._params]
        if self._stream is not None:
            self.session.dry_run(params)
        ddp.register_comm_hook(self, _on_bucket)
        weakref.finalize(ddp, self.close)  # when the model goes, or the interpreter

    # In the training thread:

    def _mark_used(self, param: Tensor) -> None:
        self._used.add(self._name_of[id(param)])

    def enqueue(self, bucket: Any) -> Any:
        """Take over one of DDP's buckets; called by DDP within backward."""
        if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
            raise TypeError(
                "The communication hook was called by torch's Python reducer. Set "
                "torch._dynamo.config.optimize_ddp = 'ddp_optimizer' (the default), which calls it with real buckets."
            )
        buffer = bucket.buffer()
        if not self._in_backward:
            try:
                Variable._execution_engine.queue_callback(self._end_of_backward)
            except RuntimeError as error:
                raise self._told(
                    "DDP reduces gradients outside of backward, as it does within ddp.join(). Give all ranks the same "
                    "number of batches instead."
                ) from error
            self._in_backward = True
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        # By flat position: gradients() has the strides of the parameters, which need not be those of memory.
        if unknown := [param for param in bucket.parameters() if id(param) not in self._name_of]:
            raise self._told(
                f"DDP delivered a gradient of shape {list(unknown[0].shape)} whose parameter had requires_grad=False "
                f"when compression was attached. Freeze and unfreeze parameters before the model is wrapped."
            )
        names = [self._name_of[id(param)] for param in bucket.parameters()]
        views = dict(zip(names, buffer.split([param.numel() for param in bucket.parameters()]), strict=True))
        unused = set(names) - self._used if self._watches_use else set()
        self._used -= set(names)
        ready = None
        if self._stream is not None:
            # In the stream in which DDP has just filled the bucket; it is the one of autograd's node for the parameter,
            # not always the one in which backward was called.
            ready = torch.cuda.current_stream(self._device).record_event()
        if self._thread is None and not self._closed:
            # Started here, in the process that trains: a thread does not survive fork, nor can it be pickled.
            self._thread = threading.Thread(
                target=self._run, args=(torch.get_num_threads(),), name="lightning_sparse", daemon=True
            )
            self._thread.start()
        self._queue.put(_Bucket(future, buffer, views, unused, ready))
        return future

    def _end_of_backward(self) -> None:
        """Wait for the thread and raise what went wrong in it. Runs before DDP itself waits for the futures.

        On CUDA this waits until the thread has launched all, as DDP's own wait for the futures would, not for the
        device.
        """
        # With reentrant checkpointing this is the end of a part only: the next bucket queues it again.
        self._in_backward = False
        started = time.perf_counter()
        self._queue.join()
        self.reducer.seconds["exposed"] += time.perf_counter() - started
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            # DDP lets only that stream wait in which its hook ran. The caller's goes on to use, and to free, what the
            # thread works on: gradients, their buckets, the residuals. After this none of them needs record_stream.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for name, param in self._frozen.items():
            if param.requires_grad:
                raise self._told(
                    f"{name!r} was frozen when the model was wrapped and takes gradients now: DDP does not exchange "
                    f"them, so the ranks would drift apart. Let it require gradients before the model is wrapped, and "
                    f"set its learning rate to 0 until it is to be trained."
                )

    @contextlib.contextmanager
    def after_backward(self) -> Iterator[None]:
        """Let DDP reduce gradients outside of backward, and raise at the end what went wrong."""
        self._in_backward = True
        yield
        self._end_of_backward()

    @property
    def reductions(self) -> int:
        """How many have come to their end, steps that were left out included."""
        return self.reducer.step + self.reducer.skipped

    def check_reduced(self, before: int) -> None:
        """Raise RuntimeError, on all ranks, unless there is one more of `reductions` than there was before backward."""
        self._queue.join()
        if self._error is not None or self.reductions > before:
            return
        # A bucket with one gradient missing is not delivered at all, so not everything that did not come is at fault.
        late = {name: p for p in self._params if (name := self._name_of[id(p)]) not in self._arrived}
        unused = [name for name, p in late.items() if p.grad is None or not p.requires_grad] or list(late)
        raise self._told(
            f"{', '.join(map(repr, unused[:3]))}{' and others' if len(unused) > 3 else ''} got no gradient on rank "
            f"{self.comm.rank} at step {self.reducer.step}, so DDP did not exchange all gradients and the ranks would "
            f"drift apart. If that is meant, set find_unused_parameters=True, with static_graph=False."
        )

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed here, outside the thread."""
        self.session.fail(error)

    @property
    def whole(self) -> bool:
        """Whether all steps that were begun have come to their end, so that the state belongs to a step."""
        return self._error is None and not self._buckets

    def settle(self) -> bool:
        """Wait until the thread has nothing to do, and return whether it is `whole`."""
        self._queue.join()
        return self.whole

    def _told(self, text: str) -> RuntimeError:
        error = RuntimeError(text)
        self.fail(error)
        return error

    def close(self) -> None:
        """End the thread and leave the group. May be called twice, and after a failure."""
        # A forked child that collects its copy of the model has no thread, and its parent goes on.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.session.finish()
        for watch in self._watches:
            watch.remove()
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is threading.current_thread():
                self._closed_by_thread = True  # which has collected the model, and closes the session when it ends
                return
            self._thread.join(JOIN_SECONDS)
        self._close_session(alive=self._thread is not None and self._thread.is_alive())

    def _close_session(self, *, alive: bool) -> None:
        alive = alive or not self.session.device_done()
        if self._error is None and not alive:
            try:
                self.reducer.catch_up()
            except Exception as error:  # of the last step; backward does not come to raise it
                self._error = error
                log.error(f"{error}")
        self.session.close(pending=self._error is not None or alive)

    # In the communication thread:

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP keeps this number per thread
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # and CUDA the current device and stream
            torch.cuda.set_stream(self._stream)
        while (bucket := self._next()) is not None:
            try:
                if self._error is None:
                    if bucket.ready is not None:
                        bucket.ready.wait()
                    self._process(bucket)
            except BaseException as error:  # raised again in the training thread
                self._fail(error)
            finally:
                if self._error is not None:
                    _complete(bucket)
                self._queue.task_done()
            del bucket
        if self._closed_by_thread:
            self._close_session(alive=False)

    def _next(self) -> _Bucket | None:
        while True:
            try:
                return self._queue.get(timeout=POLL.total_seconds())
            except queue.Empty:
                self.comm.answer()
                self._watch_device()

    def _watch_device(self) -> None:
        """Notice that a rank has failed for which this one's device waits, and free the device."""
        if self._stream is None or self._error is not None:
            return
        try:
            if not self._stream.query():
                self.comm.check()
        except Exception as error:
            # The training thread may be waiting for the device, and with it for the other rank. What it gets now is
            # worth nothing, and the next backward raises the reason.
            self._fail(error)
            log.error(self.reducer.described(error))
            self.session.free_device()

    def _process(self, bucket: _Bucket) -> None:
        self._buckets.append(bucket)
        bucket.open = len({self._segment_of[name].index for name in bucket.views})
        for name in bucket.views:
            if name in self._arrived:
                raise RuntimeError(
                    f"The gradient of {name!r} arrived twice in a step: an earlier backward pass was cut short."
                )
            self._arrived[name] = bucket
            segment = self._segment_of[name]
            missing = self._missing[segment.index] = self._missing.get(segment.index, len(segment.names)) - 1
            if missing == 0 and not self.reducer.looks_ahead:
                self._reduce(segment)
        if len(self._arrived) < len(self._segment_of):
            return
        if not self.reducer.looks_ahead or self._reduce_all():
            self.reducer.finish_step()
        self._buckets, self._arrived, self._missing = [], {}, {}

    def _reduce(self, segment: Segment) -> None:
        brought_by = {name: self._arrived[name] for name in segment.names}
        self.reducer.reduce_segment_(
            segment,
            [touched.views[name] for name, touched in brought_by.items()],
            [name for name, touched in brought_by.items() if name in touched.unused],
        )
        for touched in {id(touched): touched for touched in brought_by.values()}.values():
            touched.open -= 1
            if touched.open == 0:
                touched.future.set_result(touched.buffer)

    def _reduce_all(self) -> bool:
        assert self.reducer.layout is not None
        grads = {name: self._arrived[name].views[name] for name in self.reducer.layout.names}
        if self.reducer.look_ahead(grads, set().union(*(bucket.unused for bucket in self._buckets))):
            for segment in self.reducer.layout.segments:
                self._reduce(segment)
            return True
        for bucket in self._buckets:
            bucket.future.set_result(bucket.buffer)
        return False

    def _fail(self, error: BaseException) -> None:
        self._error = error
        # First of all, so that backward ends whatever happens here.
        for bucket in self._buckets:
            _complete(bucket)
        self.comm.report(self.reducer.described(error))


def _complete(bucket: _Bucket) -> None:
    """Complete a bucket's future as if nothing had happened."""
    # After an error of CUDA not even this works. Then backward raises before anybody waits for the future.
    with contextlib.suppress(RuntimeError):
        if not bucket.future.done():
            bucket.future.set_result(bucket.buffer)


def check_no_hook(ddp: DistributedDataParallel) -> None:
    """Raise ValueError if the model has a communication hook: DDP takes one, and never another one."""
    if any(isinstance(state, CommThread) for _, state in ddp._comm_hooks):
        raise ValueError(
            "attach was called on this DistributedDataParallel before, and DDP takes one communication hook in its "
            "life: wrap the model in a new DistributedDataParallel to attach with other settings."
        )
    if hook := ddp._get_ddp_logging_data().get("comm_hook"):
        raise ValueError(
            f"This DistributedDataParallel has the communication hook {hook} already, and takes only one: leave its "
            f"register_comm_hook out, or do not attach."
        )


def _on_bucket(state: CommThread, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[torch.Tensor] = state.enqueue(bucket)
    return future


def trainable_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by name, in registration order.

    Raises:
        TypeError, ValueError: the model or DDP uses something that cannot be combined with compression.
    """
    for option, given in (
        ("skip_all_reduce_unused_params", getattr(ddp, "skip_all_reduce_unused_params", False)),
        ("delay_all_reduce_named_params", getattr(ddp, "_delay_all_reduce_params", None)),
    ):
        if given:
            raise ValueError(f"DistributedDataParallel({option}=...) bypasses the exchange of gradients: leave it out.")
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise TypeError(
                f"{name or 'The model'!r} is a {type(module).__name__} with sparse=True: sparse gradients cannot be "
                f"compressed. Set sparse=False, or train with strategy='ddp'."
            )
    reduced = {id(param) for param in ddp._module_parameters}
    return {
        name.replace("_orig_mod.", ""): param  # torch.compile's prefix
        for name, param in ddp.module.named_parameters()
        if param.requires_grad and id(param) in reduced
    }
