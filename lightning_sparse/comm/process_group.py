"""Collectives over torch.distributed, and a process group under a name of ours."""

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
"""Most bytes that each rank sends to each other over gloo, whose own algorithms go round a ring: of P ranks all-gather
takes P - 1 round trips, and all-reduce 2 (P - 1). Longer messages fill a ring's links better."""
CONNECT_SECONDS = 20.0
"""Seconds to wait for the store and for a connection to it, which is there unless its host has ended or is frozen."""
_NEVER_SENT = 0x6C737061
"""Tag of the receive operations by which `has_ended` tests a connection."""


class ProcessGroupComm(Comm):
    """A `Comm` over a torch.distributed process group.

    Every wait checks twice a second whether a rank has failed (`mark_failed`) or makes no more calls (`mark_done`), and
    raises that rank's reason instead of waiting for the group's timeout.

    Args:
        group: the process group; None is the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "ProcessGroupComm needs torch.distributed: call torch.distributed.init_process_group first, or use "
                "simulate(size, fn) to run ranks as threads."
            )
        group = dist.group.WORLD if group is None else group
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.store = default_store()
        self.use(group)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection out of copies and pickles, such as those of a callback that counts bytes."""
        return {name: value for name, value in vars(self).items() if name not in ("store", "group", "peers")}

    def use(self, group: dist.ProcessGroup) -> None:
        """Communicate over another process group of the same ranks from now on."""
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.statuses.clear()
        self.peers = Peers(self.store, group.group_name, self.rank, self.ranks)

    def mark_failed(self, reason: str) -> None:
        """Record that this rank cannot go on, for the peers to raise. The first reason stays."""
        self.peers.mark_failed(reason)

    def mark_done(self, reason: str) -> None:
        """Record that this rank makes no further calls. Peers that still wait for it will fail."""
        self.peers.mark_done(self._calls, reason)

    def diagnose(self) -> str:
        """Return why a collective broke off, as far as that is known."""
        return self.peers.diagnose(self._begun)

    def respond(self) -> None:
        """Reply to a failed rank that polls its peers."""
        self.peers.respond()

    def raise_if_peer_failed(self) -> None:
        """Raise RankFailure if a rank has failed, or has left before a collective that this one has begun."""
        self.peers.raise_if_failed(self._begun)

    def poll(self) -> None:
        """Raise RankFailure if another rank has failed; reply to a failed rank that polls its peers."""
        self.raise_if_peer_failed()
        self.respond()

    def _over_gloo(self, x: Tensor) -> bool:
        return backend_name(self.group, x.device) == "gloo"

    def _via_host(self, x: Tensor) -> bool:
        return x.is_cuda and self._over_gloo(x)

    def _timed(self, nbytes: int, collective: Callable[..., Any], *args: Any) -> Any:
        x: Tensor = args[0]
        if not self._via_host(x):
            return super()._timed(nbytes, collective, *args)
        # Gloo has no all-gather of CUDA tensors, and its other collectives of them wait for the device too. So without
        # NCCL between the devices all tensors go through the host's memory.
        host = x.to("cpu", copy=True)
        result = super()._timed(nbytes, collective, host, *args[1:])
        if isinstance(result, list):
            return [part.to(x.device) for part in result]
        return x.copy_(host) if result is None else result.to(x.device)  # None: it worked in place

    def _wait(self, start: Callable[[], dist.Work], x: Tensor) -> None:
        """Start a collective on `x` and wait for it: on the host over gloo, on the current stream over NCCL."""
        try:
            work = start()
            if self._over_gloo(x):
                while not self._gloo_waited(work):
                    self.poll()
            else:
                # This makes the current stream wait, not the host, which goes on to launch kernels; with a time limit
                # it would stop the host, and abort the communicator after the limit. The communication thread calls
                # `raise_if_peer_failed` while the device is busy; if a peer is silent, NCCL's watchdog ends this
                # process after the group's timeout, as it does with stock DDP.
                work.wait()
        except RankFailure:
            raise
        except RuntimeError as error:
            self.raise_if_peer_failed()  # a recorded reason says more
            failure = RankFailure(
                f"Rank {self.ranks[self.rank]} lost its peers in an exchange: {first_line(error)}. "
                f"{self.diagnose()} If it is running: check that all ranks use the same strategy and see the same "
                f"number of batches."
            )
            # In a ring only the neighbours of a dead rank lose a connection; the others would wait for the timeout.
            self.mark_failed(str(failure))
            raise failure from error

    def _gloo_waited(self, work: dist.Work) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it has completed meanwhile, or raises its own error
        return True

    def _goes_direct(self, x: Tensor) -> bool:
        return self.size > 2 and x.numel() * x.element_size() <= DIRECT and self._over_gloo(x)

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        if self._goes_direct(x):
            self._direct_all_reduce(x, op)
            return
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        self._wait(lambda: dist.all_reduce(x, reduce_op, group=self.group, async_op=True), x)

    def _all_gather(self, x: Tensor) -> Tensor:
        if self._goes_direct(x):
            return self._direct_all_gather(x)
        # Into one tensor, which NCCL fills in place; a list it would copy.
        rows = x.new_empty(self.size * x.numel())
        self._wait(lambda: all_gather_single(rows, x.view(-1), group=self.group, async_op=True), x)
        return rows.view(self.size, *x.shape)

    def _broadcast(self, x: Tensor, src: int) -> None:
        self._wait(lambda: dist.broadcast(x, group=self.group, async_op=True, group_src=src), x)

    def _all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        # Not send and receive: a wait with a limit on these closes gloo's connection when the limit is reached.
        received = x.new_empty(sum(receive))
        self._wait(
            lambda: dist.all_to_all_single(received, x, list(receive), list(send), group=self.group, async_op=True), x
        )
        return received


def has_ended(group: dist.ProcessGroup, peer: int) -> bool | None:
    """Return whether the process of a member has ended, as gloo's connection to it shows; None if that cannot be seen.

    It cannot without gloo, nor in torch's debug mode, which counts the receive that is begun here.

    Args:
        group: a process group whose connections have been made.
        peer: the member's rank within the group.
    """
    host = torch.device("cpu")
    try:
        if backend_name(group, host) != "gloo" or compares_collectives(group, host):
            return None
    except RuntimeError:
        return None
    try:
        # Gloo refuses to begin to receive over a connection that the peer's end has closed. Nobody sends under this
        # tag, and an open receive that nobody waits for takes part in nothing.
        group.recv([torch.empty(1, dtype=torch.uint8, device=host)], peer, _NEVER_SENT)
    except RuntimeError:
        return True
    return False


def default_store() -> Store:
    """Return the default process group's store, over a connection of its own: no client waits while another does.

    Raises:
        RankFailure: the process that hosts the store has ended, or does not answer within `CONNECT_SECONDS`.
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
        # Fails at once if the host has ended, whereas a clone tries to connect until the timeout.
        call_in_thread(lambda: store.check([""]), give_up)
        return call_in_thread(store.clone, give_up)  # type: ignore[no-any-return]
    except dist.DistError as error:
        raise RankFailure(lost_store(dist.get_rank(), error)) from error


def call_in_thread(fn: Callable[[], T], poll: Callable[[], None], discard: Callable[[T], object] = id) -> T:
    """Return `fn()`, which another thread calls because it may wait for peers that have ended.

    Args:
        fn: the function.
        poll: called every POLL in the meantime; it may raise to give up.
        discard: called with a result that comes after that.
    """
    result = in_thread(fn, "lightning_sparse connecting")
    try:
        while not wait([result], POLL.total_seconds()).done:
            poll()
    except BaseException:
        result.add_done_callback(lambda late: late.exception() or discard(late.result()))
        raise
    return result.result()
