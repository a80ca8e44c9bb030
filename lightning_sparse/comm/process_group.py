"""Collectives over torch.distributed, and helpers for the process group's store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_sparse import _compat
from lightning_sparse._compat import all_gather_single, backend_name, compares_collectives
from lightning_sparse.comm.base import POLL, Comm, Op, RankFailure
from lightning_sparse.comm.peers import Peers, first_line, lost_store, silent_store
from lightning_sparse.comm.store import in_thread

T = TypeVar("T")
DIRECT = 1 << 16
"""Largest message in bytes that each rank sends directly to each other over gloo. Gloo's own algorithms use a ring.
With P ranks its all-gather takes P - 1 round trips, and its all-reduce 2 (P - 1). Longer messages use a ring better."""
CONNECT_SECONDS = 20.0
"""Seconds to wait for a connection to the store. It fails only if the host has ended or is frozen."""
_NEVER_SENT = 0x6C737061
"""Tag of the receive operations with which `has_ended` tests a connection. No message is ever sent with it."""


class ProcessGroupComm(Comm):
    """A `Comm` over a torch.distributed process group.

    Every wait checks twice a second whether a rank has failed (`mark_failed`) or has stopped (`mark_done`). If so, it
    raises that rank's reason and does not wait for the group's timeout.

    Args:
        group: the process group; None selects the default group.
        store: a connection to the store that the same thread uses; None makes a new one.

    Attributes:
        first: the given group, also after `use`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, store: Store | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "ProcessGroupComm needs torch.distributed: call torch.distributed.init_process_group first, or use "
                "simulate(size, fn) to run ranks as threads."
            )
        group = group or dist.group.WORLD
        assert group is not None
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.store, self.first = store or default_store(), group
        self.use(group)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the connection from copies and pickles, such as the copy in a callback that counts bytes."""
        return {name: value for name, value in vars(self).items() if name not in ("store", "group", "peers", "first")}

    def use(self, group: dist.ProcessGroup, peers: Peers | None = None) -> None:
        """Communicate over another process group of the same ranks from now on.

        Args:
            group: the group.
            peers: the ranks that learn of failures; None takes the ranks of the group.
        """
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.statuses.clear()
        self.peers = peers or Peers(self.store, group.group_name, self.rank, self.ranks)

    def of_all(self) -> ProcessGroupComm:
        """Return a connection to all ranks, over the default group. It raises the same failures as this one."""
        if self.size == dist.get_world_size():
            return self
        everyone = ProcessGroupComm(None, self.store)
        if self.peers.has_parts:  # they are all ranks
            everyone.use(everyone.group, self.peers)
            everyone._counts = self._counts  # a rank that ends reports them to its part
        return everyone

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first rank of the training, which may have several groups."""
        return self.peers.rank == 0

    def mark_failed(self, reason: str) -> None:
        """Record that this rank has failed, so that its peers raise the reason. Only the first reason is kept."""
        self.peers.mark_failed(reason)

    def mark_done(self, reason: str) -> None:
        """Record that this rank makes no further calls. Peers that wait for it will fail."""
        self.peers.mark_done(self._counts["done"], reason)

    def mark_pause(self, reason: str) -> None:
        """Record that this rank waits until all ranks have called this. Peers that make calls before will fail."""
        self.peers.mark_pause(self._counts["done"], reason)

    def outside(self) -> ProcessGroupComm:
        """Return a connection over the group of `__init__`."""
        outside = ProcessGroupComm(self.first, self.store)
        outside.use(self.first, self.peers)
        return outside

    def diagnose(self) -> str:
        """Return why a collective failed, as far as this is known."""
        return self.peers.diagnose(self._counts["begun"])

    def raise_if_peer_failed(self) -> None:
        """Raise RankFailure if a rank failed, or finished with fewer collective calls than this rank has started."""
        self.peers.raise_if_failed(self._counts["begun"])

    def poll(self) -> None:
        """Raise RankFailure if another rank has failed; reply to a failed rank that polls its peers."""
        self.raise_if_peer_failed()
        self.peers.respond()

    def _over_gloo(self, x: Tensor) -> bool:
        return backend_name(self.group, x.device) == "gloo"

    def _via_host(self, x: Tensor) -> bool:
        return x.is_cuda and self._over_gloo(x)

    def _timed(self, nbytes: int, collective: Callable[..., Any], *args: Any) -> Any:
        x: Tensor = args[0]
        if not self._via_host(x):
            return super()._timed(nbytes, collective, *args)
        # Gloo cannot all-gather CUDA tensors, and its other collectives of CUDA tensors wait for the device. So if the
        # devices are not connected by NCCL, all tensors pass through the host's memory.
        host = x.to("cpu", copy=True)
        result = super()._timed(nbytes, collective, host, *args[1:])
        return x.copy_(host) if result is None else result.to(x.device)  # None: the collective worked in place

    def _wait(self, start: Callable[[], dist.Work], x: Tensor) -> None:
        """Start a collective on `x` and wait for it: with gloo on the host, with NCCL on the current stream."""
        try:
            work = start()
            if self._over_gloo(x):
                while not self._gloo_waited(work):
                    self.poll()
            else:
                # Only the current stream waits here; the host continues to launch kernels. With a time limit, `wait`
                # would block the host and abort the communicator after the limit. The communication thread calls
                # `raise_if_peer_failed` while the device is busy. If a peer does not respond, NCCL's watchdog ends
                # this process after the group's timeout, as with stock DDP.
                work.wait()
        except RankFailure:
            self.peers.left_collective |= self.group is self.first
            raise
        except RuntimeError as error:
            self.raise_if_peer_failed()  # a recorded reason is more precise
            failure = RankFailure(
                f"Rank {self.ranks[self.rank]} lost its peers in an exchange: {first_line(error)}. "
                f"{self.diagnose()} If it is running: check that all ranks use the same strategy and see the same "
                f"number of batches."
            )
            # In a ring only the neighbours of a dead rank lose a connection. The others would wait until the timeout.
            self.mark_failed(str(failure))
            raise failure from error

    def _gloo_waited(self, work: dist.Work) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it has completed in the meantime, or it raises its error
        return True

    def direct_bytes(self, device: torch.device) -> int:
        return DIRECT if self.size > 2 and backend_name(self.group, device) == "gloo" else 0

    def _goes_direct(self, x: Tensor) -> bool:
        return x.nbytes <= self.direct_bytes(x.device)

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        if self._goes_direct(x):
            self._direct_all_reduce(x, op)
            return
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        self._wait(lambda: dist.all_reduce(x, reduce_op, group=self.group, async_op=True), x)

    def _all_gather(self, x: Tensor) -> Tensor:
        if self._goes_direct(x):
            return self._direct_all_gather(x)
        # NCCL fills one tensor in place, but would copy into a list of tensors.
        rows = x.new_empty(self.size * x.numel())
        self._wait(lambda: all_gather_single(rows, x.view(-1), group=self.group, async_op=True), x)
        return rows.view(self.size, *x.shape)

    def _broadcast(self, x: Tensor, src: int) -> None:
        self._wait(lambda: dist.broadcast(x, group=self.group, async_op=True, group_src=src), x)

    def _all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        # Send and receive are not used: if a wait on them reaches its time limit, gloo closes the connection.
        received = x.new_empty(sum(receive))
        self._wait(
            lambda: dist.all_to_all_single(received, x, list(receive), list(send), group=self.group, async_op=True), x
        )
        return received


def has_ended(group: dist.ProcessGroup, peer: int) -> bool | None:
    """Return whether a peer's process has ended, according to gloo's connection to it; None if this is unknown.

    It is unknown without gloo, and in torch's debug mode, which would count the receive operation of this test.

    Args:
        group: a process group whose connections are established.
        peer: the peer's rank within the group.
    """
    host = torch.device("cpu")
    try:
        if backend_name(group, host) != "gloo" or compares_collectives(group, host):
            return None
    except RuntimeError:
        return None
    try:
        # Gloo raises an error for a receive over a connection that the peer has closed. No rank sends with this tag,
        # and a pending receive has no effect if no code waits for it.
        group.recv([torch.empty(1, dtype=torch.uint8, device=host)], peer, _NEVER_SENT)
    except RuntimeError:
        return True
    return False


def default_store() -> Store:
    """Return the default process group's store over a separate connection, so that clients do not block each other.

    Raises:
        RankFailure: the process that hosts the store has ended, or does not respond within `CONNECT_SECONDS`.
    """
    store = _compat.default_store()
    deadline = time.monotonic() + CONNECT_SECONDS

    def give_up() -> None:
        world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        if dist.get_rank() != 0 and has_ended(world, 0):
            raise dist.DistNetworkError("cannot connect")
        if time.monotonic() > deadline:
            raise RankFailure(silent_store(dist.get_rank()))

    try:
        # A check fails at once if the host has ended, while a clone tries to connect until the timeout.
        call_in_thread(lambda: store.check([""]), give_up)
        return call_in_thread(store.clone, give_up)  # type: ignore[no-any-return]
    except dist.DistError as error:
        raise RankFailure(lost_store(dist.get_rank(), error)) from error


def call_in_thread(fn: Callable[[], T], poll: Callable[[], None], discard: Callable[[T], object] = id) -> T:
    """Call `fn` in another thread and return its result. `fn` may block on peers that have ended.

    Args:
        poll: function that is called every POLL while `fn` runs; it may raise an error to stop waiting.
        discard: function that is called with the result if the result arrives after such an error.
    """
    result = in_thread(fn, "lightning_sparse connecting")
    try:
        while not wait([result], POLL.total_seconds()).done:
            poll()
    except BaseException:
        result.add_done_callback(lambda late: late.exception() or discard(late.result()))
        raise
    return result.result()
