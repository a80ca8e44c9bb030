"""Exchanges gradients while backward runs.

DDP's buckets only bring gradients in and carry results out. The communication hook hands each bucket to a worker thread
and returns a future. The thread owns the residuals: it reduces a segment as soon as the segment's last gradient has
arrived. It completes a bucket's future when all segments in the bucket are reduced. DDP calls the hook in the same
order on all ranks, so all ranks reduce the segments in the same order.

On CUDA the thread works in a separate stream. This stream waits for an event that the hook records after the bucket's
last gradient. DDP's stream waits for an event of the thread's stream, through the future. So the host does not wait for
the device: the thread completes a future when it has launched the kernels.

NCCL requires one order of the collectives of all its communicators on a device, the same on all ranks. In plain
backward only this thread has collectives. If backward has others (`exchanges_after_backward`), or if several models
exchange gradients, the thread gets the buckets at the end of backward. First come backward's collectives, in the order
of autograd, then ours. Nothing overlaps in this case.

After an exception in the thread, no rank and no thread may wait for ever. The thread reports the exception to the other
ranks. It completes all futures with the local gradients, because backward hangs if a future never completes. The
training thread raises the exception at the end of backward.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sparse._compat import at_end_of_backward, in_backward
from lightning_sparse.comm import RankFailure
from lightning_sparse.comm.worker import Worker
from lightning_sparse.hooks.base import Exchanger
from lightning_sparse.hooks.closure import replace_closure
from lightning_sparse.hooks.exchanged_gradients import ExchangedGradients
from lightning_sparse.hooks.optimizer_kinds import closure_called_twice_message
from lightning_sparse.hooks.rates import Rates
from lightning_sparse.hooks.session import Session
from lightning_sparse.hooks.step import Bucket, Step
from lightning_sparse.options import listed
from lightning_sparse.reducer import timed
from lightning_sparse.shards import parameters_of

log = logging.getLogger(__name__)
_over_nccl: weakref.WeakSet[GradientExchanger] = weakref.WeakSet()
"""The open exchanges over NCCL in this process."""


class GradientExchanger(Exchanger):
    """The exchange of the gradients of one DDP instance, on one rank.

    Args:
        rates: compares the learning rates of the optimizers.
        optimizers: the optimizers that are known now; more may be added later.

    Attributes:
        params: the given parameters.
    """

    note = "Gradients are exchanged."
    """One sentence for the summary of a run."""

    def __init__(
        self,
        session: Session,
        ddp: DistributedDataParallel,
        params: Mapping[str, Tensor],
        rates: Rates,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.session, self.params = session, params  # a reference keeps the ids valid
        # The name, the strides, and whether the order of elements in DDP's bucket has been checked, or needs no check.
        unusual = session.reducer.segment_states.strides
        self._known = {id(param): (name, _strides(param), name not in unusual) for name, param in params.items()}
        self._frozen = {
            name: param
            for name, param in ddp.module.named_parameters()
            if not param.requires_grad and name not in ddp.parameters_to_ignore
        }
        if ddp.will_sync_module_buffers():
            kept = {name: x for name, x in ddp.module.named_buffers() if name not in ddp.parameters_to_ignore}
            session.warn_of_buffers(kept, "in each forward pass")
        self._worker = Worker(session.stream, session.over_nccl, session.look, self._failed, session.free_device)
        self._step = Step(self.reducer, rates)
        self._held: list[Bucket] | None = [] if session.over_nccl and exchanges_after_backward(ddp) else None
        if session.over_nccl:
            _over_nccl.add(self)
            self._worker.start()  # another rank may fail before the first backward pass
        self._in_backward = False
        # DDP also delivers parameters that took no part, with the stale contents of their .grad. Only autograd knows.
        self._used: set[str] | None = set() if ddp.find_unused_parameters or ddp.static_graph else None
        self._finds_unused = bool(ddp.find_unused_parameters and not ddp.static_graph)
        tracked = params.values() if self._used is not None else ()
        self._hooks = [param.register_post_accumulate_grad_hook(self._mark_used) for param in tracked]
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        # Only rank 0 checks, and only if it may find something, because it checks all parameters in each step.
        method = self.reducer.method
        votes = not method.aggregator.averages and not method.compressor.contracts
        warns = self.comm.rank == 0 and (method.memory.error_feedback or votes)
        self._exchanged = ExchangedGradients(params, self.reducer, optimizers) if warns else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the thread out of copies of the model. They have no hook, like copies of a stock model."""
        return type(None), ()

    def stop_checks(self) -> None:
        """Check no more whether optimizers step with the gradients that ranks have exchanged."""
        if self._exchanged is not None:
            self._exchanged.close()

    # The following methods run in the training thread.

    def _mark_used(self, param: Tensor) -> None:
        assert self._used is not None
        self._used.add(self._known[id(param)][0])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return replace_closure(args, kwargs, partial(self.evaluate_once, optimizer, self.reductions))

    def evaluate_once(self, optimizer: Optimizer, before: int, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step.

        Args:
            before: `reductions` when the step began.

        Raises:
            RuntimeError: on all ranks, if this evaluation and an earlier one of the step have exchanged compressed
                gradients.
        """
        start = self.reductions
        result = closure()
        exchanged_twice = before < start < self.reductions and self.reducer.method.compresses
        if exchanged_twice and any(id(param) in self._known for param in parameters_of([optimizer])):
            raise self._fail_with(closure_called_twice_message(optimizer, self.reducer.method))
        return result

    def enqueue(self, bucket: Any) -> Any:
        """Pass one of DDP's buckets to the thread; DDP calls it within backward."""
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
        # Use flat positions: gradients() has the strides of the parameters, which may differ from those of the buffer.
        if unknown := [param for param in bucket.parameters() if id(param) not in self._known]:
            raise self._fail_with(
                f"DDP delivered a gradient of shape {list(unknown[0].shape)} whose parameter had requires_grad=False "
                f"when compression was attached. Freeze and unfreeze parameters before the model is wrapped."
            )
        params = bucket.parameters()
        names = [self._known[id(param)][0] for param in params]
        views = dict(zip(names, buffer.split([param.numel() for param in params]), strict=True))
        for name, param in zip(names, params, strict=True):
            if _strides(param) != self._known[id(param)][1] or self._is_permuted(param, views[name]):
                raise self._fail_with(
                    f"{name!r} has changed its memory format since DistributedDataParallel wrapped the model, so DDP "
                    f"permutes its gradient. Call .to(memory_format=...) in the module's constructor."
                )
        unused = set[str]() if self._used is None else set(names) - self._used
        if self._used is not None:
            self._used -= set(names)
        if self._exchanged is not None:
            self._exchanged.on_delivery(bucket.parameters(), unused)
        ready = None
        if self.session.stream is not None:
            # DDP has just filled the bucket in this stream. It belongs to autograd's node of the parameter, and may
            # differ from the stream that called backward.
            ready = torch.cuda.current_stream(self.session.device).record_event()
        arrived = Bucket(future, buffer, views, unused, ready)
        if self._held is None and self in _over_nccl and len(_over_nccl) > 1:
            self._held = []  # the threads of two models would launch their collectives in any order
        if self._held is None:
            self._submit(arrived)
        else:
            self._held.append(arrived)
        return future

    def _is_permuted(self, param: Tensor, view: Tensor) -> bool:
        """Return whether the first gradient of a parameter that is not row-major has another order in DDP's bucket."""
        name, strides, is_checked = self._known[id(param)]
        if is_checked or param.grad is None:
            return False
        self._known[id(param)] = name, strides, True
        expected = view.as_strided(param.shape, param.stride())
        return not ((expected == param.grad) | expected.isnan()).all()

    def _submit(self, bucket: Bucket) -> None:
        work = self._worker.submit(partial(self._reduce, bucket), bucket.ready)
        work.add_done_callback(lambda done: done.exception() and bucket.complete())  # type: ignore[func-returns-value]

    def _end_of_backward(self) -> None:
        """Wait for the thread and raise its exception. It runs before DDP itself waits for the futures.

        On CUDA it waits until the thread has launched its kernels, but not for the device. DDP's wait for the futures
        would do the same.
        """
        # With reentrant checkpointing this may be the end of one part: the next bucket queues this call again.
        within_backward, self._in_backward = in_backward(), False
        with timed(self.reducer.seconds, "exposed"):
            if self._held:
                if self.session.stream is not None:  # wait for all kernels of backward
                    self._held[0].ready = torch.cuda.current_stream(self.session.device).record_event()
                for bucket in self._held:
                    self._submit(bucket)
                self._held.clear()
            self._worker.join()
        self.session.raise_known_failure()
        if self.session.stream is not None:
            # DDP synchronises only the stream of its hook. The caller's stream must wait too, because it reuses buffers
            # that the thread still reads. After this no gradient, bucket or residual needs record_stream.
            torch.cuda.current_stream(self.session.device).wait_stream(self.session.stream)
        for name, param in self._frozen.items():
            if param.requires_grad:
                raise self._fail_with(
                    f"{name!r} was frozen when the model was wrapped and takes gradients now: DDP does not exchange "
                    f"them, so the ranks would drift apart. Let it require gradients before the model is wrapped, and "
                    f"set its learning rate to 0 until it is to be trained. Or set exchange='update' of the strategy, "
                    f"or in plain torch call attach_updates: then you may freeze and unfreeze parameters at any time."
                )
        exchanged, self._step.exchanged = self._step.exchanged, None
        if self._exchanged is not None and exchanged is not None:
            note = partial(self._exchanged.on_exchange, exchanged)
            at_end_of_backward(note) if within_backward else note()  # after DDP has written the gradients

    @contextlib.contextmanager
    def after_backward(self) -> Iterator[None]:
        """Let DDP reduce gradients outside of backward, and raise the thread's exception at the end."""
        self._in_backward = True
        yield
        self._end_of_backward()

    @property
    def reductions(self) -> int:
        """Number of complete steps, including skipped ones."""
        return self.reducer.step + self.reducer.skipped

    def check_reduced(self, before: int) -> None:
        """Raise RuntimeError, on all ranks, unless `reductions` is one more than before backward."""
        self._worker.join()
        if self.session.error is not None or self.reductions > before:
            return
        late = {name: param for name, param in self.params.items() if name not in self._step.arrived}
        where = f"on rank {self.comm.ranks[self.comm.rank]} at step {self.reducer.step}"
        # DDP does not deliver a bucket with a missing gradient, so some late parameters are not the cause.
        unused = [repr(name) for name, param in late.items() if param.grad is None or not param.requires_grad]
        remedy = "If that is meant, set find_unused_parameters=True, with static_graph=False."
        if self._finds_unused or len(unused) == len(self.params):
            remedy = (
                "The loss does not depend on all that the model returned, and find_unused_parameters=True does not "
                "help there. Let the loss touch the parameters: loss + 0 * output.sum(), for each output."
            )
        raise self._fail_with(
            f"{listed(unused or [*map(repr, late)])} got no gradient {where}, so DDP did not exchange all gradients "
            f"and the ranks would drift apart. {remedy}"
        )

    @property
    def left_collective(self) -> bool:
        # DDP agrees on unused parameters by a collective, which a rank without a backward pass does not join.
        return super().left_collective or (self._finds_unused and isinstance(self.session.error, RankFailure))

    @property
    def is_consistent(self) -> bool:
        """Whether no step is incomplete, so that all residuals belong to the same step."""
        return self.session.error is None and not self._step.buckets and not self._held

    def drain(self) -> bool:
        """Wait until the queue is empty, and return whether the residuals are consistent."""
        self._worker.join()
        return self.is_consistent

    def mean_residuals(self) -> dict[str, Tensor]:
        """Return the means of the residuals over the ranks, fp32, by name. All ranks call it between steps."""
        self.drain()
        if not (residuals := self.reducer.state_dict()["elements"].get("residual")):
            return {}
        self.session.launching()  # raises an error of the thread
        flat = torch.cat([x.view(-1) for x in residuals.values()]).to(self.session.device)
        mean = self.session.outside().all_reduce(flat).div_(self.comm.size)
        self.session.launched()
        parts = mean.split([x.numel() for x in residuals.values()])
        return {name: part.view(x.shape) for (name, x), part in zip(residuals.items(), parts, strict=True)}

    def gradients_wait(self, optimizers: Iterable[Optimizer]) -> bool:
        return self._exchanged is not None and self._exchanged.gradients_wait(optimizers)

    def _fail_with(self, text: str) -> RuntimeError:
        error = RuntimeError(text)
        self.session.fail(error)
        return error

    def close(self) -> None:
        """End the thread and leave the group. It may be called twice, and after a failure."""
        if self.session.is_closed:
            return
        self.session.mark_done()
        _over_nccl.discard(self)
        for hook in self._hooks:
            hook.remove()
        self.stop_checks()
        self._worker.end(lambda is_alive: self.session.finish(failed=is_alive))

    # The following methods run in the worker thread.

    def _reduce(self, bucket: Bucket) -> None:
        self.session.launching()
        self._step.add(bucket)
        self.session.launched(self.session.stream)

    def _failed(self, error: BaseException) -> None:
        # Complete the futures first, so that backward ends in any case.
        for bucket in self._step.buckets:
            bucket.complete()
        self.session.end_by(error)


def exchanges_after_backward(ddp: DistributedDataParallel) -> bool:
    """Return whether backward may have collectives other than the thread's. If so, the thread has to wait.

    With find_unused_parameters, DDP uses a collective to agree on unused parameters.
    """
    return (ddp.find_unused_parameters and not ddp.static_graph) or has_collectives(ddp.module)


def has_collectives(model: torch.nn.Module) -> bool:
    """Return whether a model's backward may call collectives.

    SyncBatchNorm agrees on sums of gradients. A user who sets NCCL_LAUNCH_ORDER_IMPLICIT=1 asks for collectives in one
    order from one thread.
    """
    return any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()) or (
        os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0")
    )


def _strides(x: Tensor) -> list[int]:
    """Return the strides of dimensions with several elements. The stride of a dimension with one is arbitrary."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
