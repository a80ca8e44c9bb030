"""A rank's session with its peers: a settings handshake, a process group, and failure reporting.

    session = Session(parameters, "topk", group=dist.group.WORLD, device=device)
    session.reducer.reduce_(grads)
    session.close()

It does not depend on DistributedDataParallel, so both exchanges, of gradients and of updates, use it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse
from lightning_sparse._compat import backend_name, group_timeout, is_open, new_named_group
from lightning_sparse.comm import POLL, ProcessGroupComm, RankFailure
from lightning_sparse.comm.link import shortest_gather
from lightning_sparse.comm.peers import JOIN_SECONDS, Peers
from lightning_sparse.comm.process_group import call_in_thread, has_ended
from lightning_sparse.comm.store import in_thread
from lightning_sparse.hooks.handshakes import is_broken, next_handshake, report_errors_to_peers
from lightning_sparse.methods import Method
from lightning_sparse.options import ReducerOptions, check_optional
from lightning_sparse.reducer import Exchanged, Reducer, error_message

log = logging.getLogger(__name__)
STUCK_SECONDS = 20.0
"""Seconds after which a device that still works is taken to wait for another rank, after training has failed."""
OPENING, LEAST_OPENING, MOST_OPENED = 1 << 19, 1 << 17, 32
"""Bytes that a rank sends before training to all ranks, the least to each one, and the most ranks to which it sends
them (benchmarks.opening)."""
HOST_SECONDS = 2 * POLL.total_seconds()
"""Seconds that rank 0 lives after its error, because it may host the store. The others read the reason every POLL."""
LONG_TRIP, LONG_WAIT = 0.005, 0.05
"""Seconds of one message, and seconds of all messages of a step, above which there is a warning."""
LONG_BUFFERS = 1 << 16
"""Bytes of buffers below which there is no warning. Over 50 Mbit/s they take 10 ms."""


@cache
def _source_hash() -> str:
    """Return a hash of this package's Python files: clones of different commits may have one version number.

    The loops in C, whose sources a wheel lacks, compute the same bits.
    """
    root = Path(lightning_sparse.__file__).parent
    found = 0
    for file in sorted(root.rglob("*.py")):
        # Editors and Jupyter leave hidden files and folders, and links to nothing.
        if file.is_file() and "/." not in f"/{file.relative_to(root).as_posix()}":
            found = zlib.crc32(file.read_bytes().replace(b"\r\n", b"\n"), found)
    return f"{found:08x}"


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _report_uncaught() -> None:
    """Report the error that has ended this program to the other ranks, which may wait for this one."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None and not hasattr(sys, "ps1"):  # an interactive session survives errors
        for session in list(_sessions):
            session.fail(error)
        if hasattr(error, "_lightning_sparse_reported") and dist.is_initialized() and dist.get_rank() == 0:
            time.sleep(HOST_SECONDS)


@cache
def _report_at_exit() -> None:
    # Functions of atexit run in reverse order. Models may be finalized, and sessions closed, by an earlier one.
    atexit.register(_report_uncaught)


class Session:
    """One rank's part in a training.

    All ranks of the group make it together. Steps that can fail on one rank alone, such as allocating residuals, come
    before the handshake. So the other ranks get the error instead of waiting.

    The ranks of a group may exchange in several parts, as the shards of a model do. An error in one part ends training
    on all ranks of the group.

    Args:
        parameters: returns the exchanged parameters by name, in registration order. Its errors are reported to the
            other ranks, too.
        group: the ranks that train together.
        part: the ranks of `group` that exchange with this one; None is all of them. The session makes a separate
            process group for them.
        timeout: time to wait for other ranks; None takes the group's.
        group_of: returns numbers of parameters by name; see `Layout.of`.
        settings: returns further settings that must be equal within a part, see `Handshake.agree`.
        groups: returns the process groups of the model's own collectives, which a failure aborts over NCCL.
        exchanged: the quantity that the reducer gets, see `Reducer`.

    Attributes:
        reducer: compresses and exchanges; a checkpoint needs its state.
        comm: the reducer's connection to the other ranks.
        stream: on CUDA the stream to exchange in.
        device: the device of the parameters.
        error: the error that has ended training, on this rank or on another one; None without an error.

    Raises:
        ValueError: the timeout is no length of time, or the reducer rejects an option.
        RankFailure: other ranks have different settings, cannot take part, have ended, or do not arrive in time.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, Tensor]],
        method: Method,
        options: ReducerOptions,
        *,
        group: dist.ProcessGroup,
        part: dist.ProcessGroup | None = None,
        device: torch.device,
        timeout: timedelta | None = None,
        group_of: Callable[[], Mapping[str, int]] = dict,
        settings: Callable[[], Mapping[str, Any]] = dict,
        groups: Callable[[], Iterable[dist.ProcessGroup]] = tuple,
        exchanged: Exchanged = "gradient",
    ) -> None:
        self._pid = os.getpid()
        self.device, self._groups = device, groups
        self._closed = self._freed = False
        self._reported: int | None = None  # id of the last error of this rank
        self.error: BaseException | None = None
        self._done: Callable[[], bool] = _nothing_to_wait_for  # whether the device no longer waits for ranks
        self._seen_done = self._done
        # High priority: otherwise each short kernel waits until all blocks of a running backward kernel are scheduled.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        everyone = ProcessGroupComm(group)
        self.comm = everyone if part is None else ProcessGroupComm(part)
        with report_errors_to_peers(group):
            check_device(self.comm.group, device)
            timeout = check_optional("timeout", timeout) or group_timeout(self.comm.group, device)
            params = parameters()
            self.reducer = Reducer(method, self.comm, exchanged=exchanged, **vars(options))
            self.reducer.setup(params, group_of())
            others, version = settings(), f"{lightning_sparse.__version__} (source files {_source_hash()})"
        name = next_handshake(everyone, timeout, None if part is None else self.comm.ranks).agree(
            {
                "__version__ of lightning_sparse": version,  # the first in the order of names
                "method": repr(method),
                "exchanged": repr(exchanged),
                "size of the group": self.comm.size,
                **options.settings(),
            },
            {
                "model": [
                    f"{name}{list(param.shape)} {str(param.dtype).removeprefix('torch.')}"
                    for name, param in params.items()
                ],
                **others,
            },
        )
        name = f"lightning_sparse_{name}"
        peers = Peers(self.comm.store, name, everyone.rank, everyone.ranks, part=self.comm.ranks)
        self.comm.use(self._open_group(peers, f"{name}_{peers.part[0]}", timeout), peers)
        _sessions.add(self)
        _report_at_exit()

    def _open_group(self, peers: Peers, name: str, timeout: timedelta) -> dist.ProcessGroup:
        """Make the session's process group; RankFailure if another rank has ended, or cannot make it."""
        parent = self.comm.group

        def connect() -> dist.ProcessGroup:
            if self.stream is not None:
                torch.cuda.set_device(self.device)
            return new_named_group(parent, name, timeout)

        def raise_if_peer_failed() -> None:
            peers.raise_if_failed(0)
            for rank in range(self.comm.size):
                if rank != self.comm.rank and has_ended(parent, rank):
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

    def open_connections(self) -> None:
        """Connect the ranks, and send enough for TCP to find the rate of the links. All ranks call it before training.

        A new connection sends slowly. BBR raises its rate only while a message fills it. The messages of sparse steps
        are too short: over a round trip of 50 ms they would stay slow for the whole training.
        """
        if (size := self.comm.size) == 1:
            return
        nbytes = max(OPENING // size, LEAST_OPENING) if size <= MOST_OPENED else 1
        row = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        with self.comm.uncounted():
            if self.over_nccl:
                self.comm.all_gather(row)
            else:
                self.comm.all_to_all(row.repeat(size, 1))

    def dry_run(self, params: Mapping[str, Tensor]) -> None:
        """Run warm-up steps on zeros along every code path that training will take, then reset.

        The first use of a kernel loads it, and the first use of a group connects it. Both may wait for the device.
        Within backward this wait may never end: the device may wait for this rank, in one of DDP's collectives.

        Each density of the warm-up gets two steps, because the density decides which segments fall back to dense. The
        first step has gradients in aligned memory, the second in unaligned memory: DDP's buckets hold both. In the
        second step one parameter of each segment took no part in backward. The method's own density gets two more
        steps, for CUDA graphs: each step captures one, whose inputs are results of the one before.
        """
        try:
            if self.stream is None:
                self._warm_up(params)
            else:
                # Residuals were allocated in the current stream and may be read there, so order both streams.
                current = torch.cuda.current_stream(self.device)
                self.stream.wait_stream(current)
                with torch.cuda.stream(self.stream), self.reducer.captures.allowed():
                    self._warm_up(params)
                current.wait_stream(self.stream)
        except Exception as error:
            self.fail(error)
            raise
        self.reducer.seconds = dict.fromkeys(self.reducer.seconds, 0.0)
        self.comm.sent_bytes, self.comm.seconds = 0, 0.0

    def _warm_up(self, params: Mapping[str, Tensor]) -> None:
        reducer = self.reducer
        assert reducer.layout is not None
        options, epoch, reducer.epoch = reducer.options, reducer.epoch, 0
        densities = dict.fromkeys((*(options.density_warmup or ()), reducer.method.density))
        try:
            for density in densities:
                only = () if density is None else (density,)
                reducer.options = replace(options, density_warmup=only, density_warmup_steps=None)
                for shift in (0, 1, 0, 0) if density == reducer.method.density else (0, 1):
                    if reducer.gradient_check.needs_all_gradients:
                        ones = {name: param.new_zeros(1) for name, param in params.items()}
                        reducer.check_gradients(ones)
                        torch._foreach_mul_(list(ones.values()), 1.0)  # the kernel of a skipped step
                    for segment in reducer.layout.segments:
                        flat = params[segment.names[0]].new_zeros(segment.numel + shift)[shift:]
                        reducer.reduce_segment_(segment, segment.views(flat), segment.names[:shift])
                    reducer.finish_step()
                reducer.raise_deferred()
                reducer.reset()
        finally:
            reducer.options, reducer.epoch = options, epoch

    def warn_of_buffers(self, buffers: Mapping[str, Tensor], when: str) -> None:
        """Warn on one rank of buffers that rank 0 broadcasts, if they are longer than an exchange's message.

        Args:
            when: the time of the broadcast, for the warning.
        """
        nbytes = sum(x.nbytes for x in buffers.values())
        sent = round(self.reducer.routing.nbytes(self.reducer.method.density))
        if self.comm.is_first and self.comm.size > 1 and nbytes > max(sent, LONG_BUFFERS):
            largest = max(buffers, key=lambda name: buffers[name].nbytes)
            log.warning(
                f"Rank 0 broadcasts {nbytes:,} bytes of buffers {when}, more than the {sent:,} bytes that a rank sends "
                f"in an exchange. The largest is {largest!r}. If buffers are constant, set broadcast_buffers=False. "
                f"The statistics of BatchNorm would then differ among ranks."
            )

    def warn_of_round_trips(self, count: int) -> None:
        """Warn on one rank if the segments of a step wait for the link one after the other. All ranks call it.

        Args:
            count: number of segments that a step exchanges; equal on all ranks.
        """
        if self.comm.size == 1 or count == 1 or self.reducer.options.granularity == "model":
            return
        with self.comm.uncounted():
            seconds = shortest_gather(self.comm, self.device)
        if self.comm.is_first and seconds > LONG_TRIP and (count - 1) * seconds > LONG_WAIT:
            log.warning(
                f"A step exchanges {count} segments, one after the other, and each waits at least {1e3 * seconds:.0f} "
                f"ms for the link. Set granularity='model' to exchange the model in one segment."
            )

    def fail(self, error: BaseException, *, in_model: bool = False) -> None:
        """Report to the other ranks that training has failed on this one.

        If a connection broke, the known cause is put in front of the error's text.

        Args:
            in_model: whether the model's forward or backward pass raised it. Then only a broken connection counts, in a
                collective of the model, as FSDP2 has them.
        """
        broken = is_broken(error)
        if self.is_closed or (in_model and not broken):
            return
        is_new, self._reported = self._reported != id(error), id(error)
        if broken and is_new:  # a checkpoint on the exception reports the same error again
            # Meanwhile torchrun may send SIGTERM, and Lightning's handler may raise another error.
            with contextlib.suppress(Exception):
                if cause := self.comm.peers.diagnose(None) if in_model else self.comm.diagnose():
                    error.args = (f"{cause} ({error})",)
        self.comm.mark_failed(error_message(error, self.comm, self.reducer.step))
        if not in_model:
            error._lightning_sparse_reported = True  # type: ignore[attr-defined]  # `_refuse` would count a handshake

    def raise_known_failure(self) -> None:
        """Raise the error that has ended training on this rank or on another one, if there is one."""
        if self.error is not None:
            raise self.error

    def mark_done(self) -> None:
        """Tell the other ranks that this one makes no further calls. Ranks that still wait for it will fail."""
        self.comm.mark_done(
            f"Rank {self.comm.ranks[self.comm.rank]} has ended training after {self.reducer.step} steps, while other "
            f"ranks go on. Look for an error in its output, or give all ranks the same number of batches and of steps."
        )

    def pause(self) -> None:
        """Tell the other ranks that this one waits for them outside of a step. A rank that continues gets an error."""
        self.comm.mark_pause(
            f"Rank {self.comm.ranks[self.comm.rank]} pauses after {self.reducer.step} steps, for a validation, a "
            f"checkpoint, another density or the end, while other ranks go on. Give all ranks the same number of "
            f"batches and of steps."
        )

    def outside(self) -> ProcessGroupComm:
        """Pause; return a connection to the same ranks for a collective that does not follow their numbers of steps."""
        self.pause()
        return self.comm.outside()

    @property
    def is_closed(self) -> bool:
        """Whether this process has left the process group, or never was in it."""
        # A forked child has a copy of the group, but the threads and connections are its parent's.
        return self._closed or os.getpid() != self._pid

    def close(self, *, pending: bool = False) -> None:
        """Leave the process group, unless this rank has left it already.

        Args:
            pending: whether a collective may still be waiting for other ranks.
        """
        if self.is_closed:
            return
        self._closed = True
        group = self.comm.group
        if pending:
            # The group's destructor must not run. At some garbage collection it would wait for the timeout, and hold
            # the interpreter lock.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self.free_device()
        # Destroying the default process group has destroyed all other groups, too.
        if is_open(group):
            # An error of an aborted group must not hide the first error.
            with contextlib.suppress(RuntimeError) if pending else contextlib.nullcontext():
                self._leave(group)
        if not pending:
            # Let its destructor run now, which ends its threads. A later garbage collection might run it in a forked
            # worker of a DataLoader, and wait there for threads that only this process has.
            self.comm.group = self.comm.first

    def _leave(self, group: dist.ProcessGroup) -> None:
        if not self.over_nccl:
            dist.destroy_process_group(group)
            return
        # NCCL may wait here until all ranks of the node do the same. They may do it later, or never.
        left = in_thread(partial(dist.destroy_process_group, group), "lightning_sparse leaving")
        for ended in wait([left], JOIN_SECONDS).done:
            ended.result()

    def finish(self, *, failed: bool) -> None:
        """Wait for the device and leave the process group; log the error of the last step, if there was one.

        Args:
            failed: whether an exchange is unfinished. If not, and if training has not failed, this rank waits for the
                device, until a rank has failed or has ended with fewer exchanges.
        """
        failed = failed or self.error is not None or isinstance(self._done, _Launching)  # an interrupted one
        if not failed:
            try:
                while not self._done():
                    self.comm.raise_if_peer_failed()
                    time.sleep(0.02)
                self.reducer.raise_deferred()
            except Exception as error:  # no later step can raise it
                log.error(f"{error}")
                self.error, failed = error, True
        self.close(pending=failed)

    # The following methods watch the device, on which collectives may wait for a failed rank.

    def launching(self) -> None:
        """Note that collectives are about to be launched on the device; raise an earlier error."""
        self.raise_known_failure()
        if self.over_nccl:
            self._done = _Launching()

    def launched(self, stream: torch.cuda.Stream | None = None) -> None:
        """Note that the collectives have been launched in a stream; None is the current one."""
        if self.over_nccl:
            self._done = (stream or torch.cuda.current_stream(self.device)).record_event().query

    def device_is_done(self) -> bool:
        """Wait at most `JOIN_SECONDS` for the device; return whether it no longer waits for other ranks."""
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            while not self._done():
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
        except RuntimeError:  # an error on the device
            return False
        return True

    def look(self) -> None:
        """Reply to failed ranks, and free this rank's device if it waits for one of them. Call it every POLL."""
        self.comm.peers.respond()
        done = self._done
        if self.error is not None:
            self._free_unless_launching()
            return
        try:
            # A query of an event invalidates a CUDA graph that another thread captures. So stop when our work is done.
            if done is not self._seen_done and done():
                self._seen_done = done
            elif done is not self._seen_done:
                self.comm.raise_if_peer_failed()
            elif self._reported is None and (reason := self.comm.peers.reported()) and self._looks_ahead:
                raise RankFailure(reason)
        except Exception as error:
            # The training thread may wait for the failed rank, for the device or in a collective of the model. It
            # raises this error later.
            self.end_by(error)
            log.error(error_message(error, self.comm, self.reducer.step))
            self._free_unless_launching()

    @property
    def _looks_ahead(self) -> bool:
        """Whether a failure of another rank ends training between exchanges: the next is far, or the device waits."""
        return self.comm.peers.has_parts or self.over_nccl or self.reducer.method.local_steps > 1

    def _free_unless_launching(self) -> None:
        """Free the device, unless another thread has just begun to launch: NCCL would then use a freed communicator.

        If the launch has not ended at the next call, it waits for the failed rank.
        """
        done = self._done
        if isinstance(done, _Launching) and done is not self._seen_done:
            self._seen_done = done
        else:
            self.free_device()

    def end_by(self, error: BaseException) -> None:
        """Record the error that has ended training, and report it to the other ranks."""
        self.error = self.error or error
        self.fail(error)

    @property
    def over_nccl(self) -> bool:
        """Whether collectives are kernels on the device, which wait there for other ranks."""
        return self.stream is not None and backend_name(self.comm.group, self.device) == "nccl"

    def free_device(self) -> None:
        """Abort collectives that wait on the device for missing ranks; those of NCCL would wait for the timeout."""
        if self._freed or not self.over_nccl:
            return
        self._freed = True
        _abort([self.comm.group, *self._groups()])
        deadline = time.monotonic() + STUCK_SECONDS
        while not _is_idle(self.device):
            if time.monotonic() > deadline:  # a collective of DDP or of the user waits
                _abort({self.comm.first, *filter(None, [dist.group.WORLD])})
                return
            time.sleep(0.02)


def check_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ValueError unless a group can send tensors of a device."""
    try:
        backend_name(group, device)
    except RuntimeError as error:
        raise ValueError(
            f"The process group has no backend for the parameters on {device.type!r}. For shards that are offloaded to "
            f"the CPU, call init_process_group('cpu:gloo,cuda:nccl'). Give values to parameters on 'meta' first."
        ) from error


def _abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort the collectives of groups, all at once: each abort may wait until the device has ended all of them."""
    wait([in_thread(group.abort, "lightning_sparse aborting") for group in groups], JOIN_SECONDS)


def _is_idle(device: torch.device) -> bool:
    """Return whether a device has done all work of its default stream, or can do none any more."""
    with contextlib.suppress(Exception):  # CUDA may be broken
        return torch.cuda.default_stream(device).query()
    return True


def _nothing_to_wait_for() -> bool:
    return True


class _Launching:
    """Stands for collectives that a thread is launching: the device has not ended them."""

    def __call__(self) -> bool:
        return False
