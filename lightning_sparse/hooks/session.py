"""All that ranks share while they train together: equal settings, a process group, and word of failures.

    session = Session(parameters, "topk", group=dist.group.WORLD, device=device)
    session.reducer.reduce_(grads)
    session.close()

It knows nothing of DistributedDataParallel, so that other ways to exchange gradients or updates can use it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse._compat import backend_name, group_timeout, is_open, new_named_group
from lightning_sparse.comm import ProcessGroupComm, RankFailure
from lightning_sparse.comm.handshake import Handshake
from lightning_sparse.comm.peers import JOIN_SECONDS, Peers, first_line
from lightning_sparse.comm.process_group import call_in_thread, has_ended
from lightning_sparse.comm.store import StoreTimeout
from lightning_sparse.methods import Method
from lightning_sparse.options import check_timeout
from lightning_sparse.reducer import Reducer, error_message

log = logging.getLogger(__name__)
_BROKEN = re.compile("gloo|NCCL|ProcessGroup|pair closure|Connection (closed|reset)|Broken pipe|Timed out waiting")
"""Matches torch's errors for a broken collective of its own or of Lightning's, which have no class."""


@contextlib.contextmanager
def told_to_others(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Tell the other ranks of a group (None is the default one) of an error in the block.

    For what comes before a `Session`, in which they would wait for this rank.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            # Without the store's host they end anyway; RankFailure where there is no first answer from it.
            with contextlib.suppress(dist.DistError, StoreTimeout, RankFailure):
                _handshake(ProcessGroupComm(group), timedelta(0)).refuse(error)
        raise


def tell_or_ask(error: BaseException) -> None:
    """Tell the other ranks of an error that comes before a `Session`.

    If it says that a connection broke, put before its text what another rank has told, or that the store is gone, too.
    """
    broken, reason = _is_broken(error), ""
    try:
        handshake = _handshake(ProcessGroupComm(None), timedelta(0))
        if broken:
            reason = handshake.refusal()
        else:
            handshake.refuse(error)
    except RankFailure as failure:  # no first answer from the store: its host has ended or is frozen
        reason = str(failure)
    except (dist.DistError, StoreTimeout):
        pass
    if broken and reason:
        error.args = (f"{reason} ({first_line(error)})",)


def _is_broken(error: BaseException) -> bool:
    """Return whether an error says that a collective broke off, without saying why."""
    return isinstance(error, RuntimeError) and not isinstance(error, RankFailure) and bool(_BROKEN.search(str(error)))


def _handshake(comm: ProcessGroupComm, timeout: timedelta) -> Handshake:
    group, ranks = comm.group, comm.ranks
    return Handshake(
        comm.store, group.group_name, dist.get_rank(), ranks, timeout, lambda rank: has_ended(group, ranks.index(rank))
    )


class Session:
    """One rank's part in a training.

    All ranks of the group make it together. What can fail on one rank alone, such as allocating residuals, is done
    before they agree to begin, so that the others get its error instead of waiting.

    Args:
        parameters: returns the parameters to exchange gradients of, by name, in registration order; an error in it
            reaches the other ranks too.
        method: the compression method.
        group: whose ranks take part; the session makes a process group of its own for them.
        device: where the parameters are.
        timeout: time to wait for other ranks; None takes the group's.
        group_of: returns numbers of parameters by name; see `Layout.of`.
        settings: returns what else has to be equal on all ranks, see `Handshake.agree`.
        options: of the `Reducer`.

    Attributes:
        reducer: compresses and exchanges; its state is what a checkpoint needs.
        comm: the reducer's wire.
        stream: on CUDA the stream to exchange in.
        device: where the parameters are.
        error: what has ended training, on this rank or on another; None if nothing has.

    Raises:
        ValueError: a timeout that is no length of time; other options are the reducer's.
        RankFailure: other ranks use other settings, cannot take part, have ended, or do not come.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, Tensor]],
        method: Method,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None = None,
        group_of: Callable[[], Mapping[str, int]] = dict,
        settings: Callable[[], Mapping[str, Any]] = dict,
        **options: Any,
    ) -> None:
        self._pid = os.getpid()
        self._parent = group
        self.device = device
        self._closed = self._freed = False
        self._explained: int | None = None  # id of an error
        self.error: BaseException | None = None
        self._done: Callable[[], bool] = _nothing_to_wait_for  # whether the device waits for no other rank any more
        self._seen_done = self._done
        # High priority: otherwise each short kernel waits until all blocks of a running backward kernel are scheduled.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.comm = ProcessGroupComm(group)
        with told_to_others(group):
            timeout = check_timeout(timeout) or group_timeout(group, device)
            params = parameters()
            self.reducer = Reducer(method, self.comm, **options)
            self.reducer.setup(params, group_of())
            others = settings()
        name = _handshake(self.comm, timeout).agree(
            {
                "method": repr(method),
                **{name: "given" if callable(value) else repr(value) for name, value in options.items()},
                "model": [
                    f"{name}{list(param.shape)} {str(param.dtype).removeprefix('torch.')}"
                    for name, param in params.items()
                ],
                **others,
            }
        )
        self.comm.use(self._open_group(f"lightning_sparse_{name}", timeout))

    def _open_group(self, name: str, timeout: timedelta) -> dist.ProcessGroup:
        """Make the session's process group; RankFailure if another rank has ended or failed to do so."""
        peers = Peers(self.comm.store, name, self.comm.rank, self.comm.ranks)

        def connect() -> dist.ProcessGroup:
            if self.stream is not None:
                torch.cuda.set_device(self.device)
            return new_named_group(self._parent, name, timeout)

        def raise_if_peer_failed() -> None:
            peers.raise_if_failed(0)
            for rank in range(self.comm.size):
                if rank != self.comm.rank and has_ended(self._parent, rank):
                    raise RankFailure(
                        f"Rank {self.comm.ranks[rank]} has ended while the ranks connected: killed, or failed. Look at "
                        f"the end of its output."
                    )

        try:
            return call_in_thread(connect, raise_if_peer_failed, discard=dist.destroy_process_group)
        except BaseException as error:
            if not isinstance(error, RankFailure):
                raise_if_peer_failed()  # the cause
            peers.mark_failed(error_message(error, self.comm, self.reducer.step))
            raise

    def dry_run(self, params: Mapping[str, Tensor]) -> None:
        """Go through steps of zeros, of all kinds that training will take, and forget them.

        Kernels are loaded, and a group's connections made, when they are first used, and both may wait for the device.
        Within backward that can be for ever: the device may itself wait for this rank, in a collective of DDP's own.
        So there are two steps at each density of the warm-up, which go dense or not: the first with gradients where
        memory is aligned, the second elsewhere, as DDP's buckets hold both, and with a parameter that took no part.
        """
        try:
            if self.stream is None:
                self._rehearse(params)
            else:
                # Residuals were allocated in the current stream and may be read there: order both streams around this.
                current = torch.cuda.current_stream(self.device)
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream):
                    self._rehearse(params)
                current.wait_stream(self.stream)
        except Exception as error:
            self.fail(error)
            raise
        self.reducer.seconds = dict.fromkeys(self.reducer.seconds, 0.0)
        self.comm.sent_bytes, self.comm.seconds = 0, 0.0

    def _rehearse(self, params: Mapping[str, Tensor]) -> None:
        reducer = self.reducer
        assert reducer.layout is not None
        schedule = reducer.density_warmup, reducer.density_warmup_steps, reducer.epoch
        densities = dict.fromkeys((*reducer.density_warmup, reducer.method.density))
        try:
            for density in densities:
                reducer.density_warmup, reducer.density_warmup_steps, reducer.epoch = (density,), None, 0  # type: ignore[assignment]
                for shift in (0, 1):
                    if reducer.gradient_check.needs_all_gradients:
                        ones = {name: param.new_zeros(1) for name, param in params.items()}
                        reducer.check_gradients(ones)
                        torch._foreach_mul_(list(ones.values()), 1.0)  # as where a step is left out
                    for segment in reducer.layout.segments:
                        flat = params[segment.names[0]].new_zeros(segment.numel + shift)[shift:]
                        reducer.reduce_segment_(segment, segment.views(flat), segment.names[:shift])
                    reducer.finish_step()
                reducer.raise_deferred()
                reducer.reset()
        finally:
            reducer.density_warmup, reducer.density_warmup_steps, reducer.epoch = schedule

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed on this one.

        If a connection broke, what is known about the cause is put in front of the error's text.
        """
        if self.is_closed:
            return
        if _is_broken(error) and self._explained != id(error):
            self._explained = id(error)  # a checkpoint on the exception tells of it, too
            # torchrun sends SIGTERM while this goes on, and Lightning's handler of it may well raise another error.
            with contextlib.suppress(Exception):
                error.args = (f"{self.comm.diagnose()} ({first_line(error)})",)
        self.comm.mark_failed(error_message(error, self.comm, self.reducer.step))

    def mark_done(self) -> None:
        """Tell the other ranks that this one makes no further calls: those that still wait for it will fail."""
        self.comm.mark_done(
            f"Rank {self.comm.ranks[self.comm.rank]} has ended training after {self.reducer.step} steps, while other "
            f"ranks go on. Look for an error in its output, or give all ranks the same number of batches."
        )

    @property
    def is_closed(self) -> bool:
        """Whether this process has left the process group, or never was in it."""
        # A forked child has a copy of the group, whose threads and connections are its parent's.
        return self._closed or os.getpid() != self._pid

    def close(self, *, pending: bool = False) -> None:
        """Leave the process group, unless that has been done already.

        Args:
            pending: whether a collective may still be waiting for other ranks.
        """
        if self.is_closed:
            return
        self._closed = True
        group = self.comm.group
        if pending:
            # The group's destructor would wait for the timeout, with the interpreter locked, whenever garbage is
            # collected: so it must not run.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self.free_device()
        # Not if the default process group was destroyed meanwhile, and all others with it.
        if is_open(group):
            # What an aborted group has to say must not hide the error that led here.
            with contextlib.suppress(RuntimeError) if pending else contextlib.nullcontext():
                dist.destroy_process_group(group)

    def finish(self, *, failed: bool) -> None:
        """Leave the process group once the device is done; log the error of the last step, if there was one.

        Args:
            failed: whether an exchange has not ended. Training may have failed here without an error, too. Otherwise
                the device gets `JOIN_SECONDS`: it may be waiting for a rank that has ended.
        """
        failed = failed or self.error is not None
        found = None
        if not failed and not (failed := not done_in_time(self._done)):
            try:
                self.reducer.raise_deferred()
            except Exception as error:  # no step follows that would raise it
                log.error(f"{error}")
                found = self.error = error
        self.close(pending=failed or found is not None)

    # The device, on which collectives may wait for a rank that has failed:

    def launching(self) -> None:
        """Say that collectives are to be launched on the device; raise what has failed before."""
        if self.error is not None:
            raise self.error
        if self.over_nccl:
            self._done = _launching

    def launched(self, stream: torch.cuda.Stream | None = None) -> None:
        """Say that they have been launched, in a stream; None is the current one."""
        if self.over_nccl:
            self._done = (stream or torch.cuda.current_stream(self.device)).record_event().query

    def device_is_done(self) -> bool:
        """Wait until the device waits for no other rank, `JOIN_SECONDS` at most; return whether that is so."""
        return done_in_time(self._done)

    def look(self) -> None:
        """Reply to failed ranks; if this rank's device waits for one, free the device. Call it every POLL."""
        self.comm.respond()
        done = self._done
        # Querying an event invalidates a CUDA graph that another thread captures: no query once our work is done.
        if done is self._seen_done or self.error is not None:
            return
        try:
            if done():
                self._seen_done = done
            else:
                self.comm.raise_if_peer_failed()
        except Exception as error:
            # The training thread may be waiting for the device, and so for the failed rank. It raises this later.
            self.abort(error)
            log.error(error_message(error, self.comm, self.reducer.step))

    def end_by(self, error: BaseException) -> None:
        """Note the error that has ended training, and tell the other ranks."""
        self.error = self.error or error
        self.fail(error)

    def abort(self, error: BaseException) -> None:
        """Note the error that has ended training, tell the other ranks, and free the device."""
        self.end_by(error)
        self.free_device()

    @property
    def over_nccl(self) -> bool:
        """Whether collectives are kernels on the device, which wait there for other ranks."""
        return self.stream is not None and backend_name(self.comm.group, self.device) == "nccl"

    def free_device(self) -> None:
        """End collectives that wait on the device for ranks that do not come, as NCCL's do until a timeout."""
        if not self._freed and self.over_nccl:
            self._freed = True
            with contextlib.suppress(Exception):
                self.comm.group.abort()


def done_in_time(done: Callable[[], bool]) -> bool:
    """Wait for the device, `JOIN_SECONDS` at most; return whether it is done."""
    deadline = time.monotonic() + JOIN_SECONDS
    try:
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
    except RuntimeError:  # an error on the device
        return False
    return True


def _nothing_to_wait_for() -> bool:
    return True


def _launching() -> bool:
    return False
