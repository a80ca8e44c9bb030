"""One rank's wire: the only place where collectives are called, bytes are counted and time on the wire is measured.

`ProcessGroupComm` talks over torch.distributed; `simulate` runs a function on many ranks as threads of one process,
without any network:

    def rank(comm: Comm) -> float:
        return comm.all_reduce(torch.tensor([float(comm.rank)])).item()

    simulate(3, rank)  # [3.0, 3.0, 3.0]
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
Op = Literal["sum", "max"]
POLL = timedelta(seconds=0.5)
"""How long a rank waits for the wire before it looks whether another rank has failed."""
ANSWER_SECONDS = 1.5
"""How long a rank that has failed waits for a word of the others, which look for its question every POLL."""


CONNECT_SECONDS = 20.0
_NEVER_SENT = 0x6C737061
"""Tag of `has_ended`."""


class RankFailure(RuntimeError):
    """Another rank cannot go on, so this one cannot either."""


class Comm(abc.ABC):
    """One rank's connection to the others. Every rank makes the same calls in the same order.

    Attributes:
        rank: this rank, 0 ≤ rank < size.
        size: number of ranks.
        ranks: what the ranks are called in messages: those of a `sub` as they are counted in the whole.
        sent_bytes: bytes that this rank has put on the wire so far, protocol overhead not counted. All-gather counts
            (P − 1) times its input, all-reduce 2(P − 1)/P times, as the ring algorithms do; broadcast (source only)
            and exchange their input, all-to-all the chunks for others.
        seconds: time spent inside collectives so far, waiting for slower ranks included. Over NCCL only what the host
            takes to start them: it does not wait for the device.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.ranks: Sequence[int] = range(size)
        self.sent_bytes = 0
        self.seconds = 0.0
        self._begun = self._calls = 0  # collectives begun, and those that the host has completed

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """Replace `x` by the sum or the maximum over all ranks, in place, and return it.

        For the maximum NaN counts as infinity: left to itself, gloo drops a NaN or not, depending on the rank.
        """
        if op == "max" and x.is_floating_point():
            x.masked_fill_(x.isnan(), torch.inf)
        if self.size > 1:
            self._timed(2 * (self.size - 1) * _nbytes(x) // self.size, self._all_reduce, x, op)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order. Shape and dtype must agree on all ranks."""
        if self.size == 1:
            return [x.clone()]
        return self._timed((self.size - 1) * _nbytes(x), self._all_gather, x.contiguous())

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send chunk i to rank i and return what each rank sent here, in rank order. All shapes must agree."""
        if len(chunks) != self.size:
            raise ValueError(f"all_to_all got {len(chunks)} chunks for {self.size} ranks; give one for each rank.")
        if self.size == 1:
            return [chunks[0].clone()]
        sizes = [chunk.numel() for chunk in chunks]
        received = self._swapped(torch.cat([chunk.reshape(-1) for chunk in chunks]), sizes, sizes)
        return [part.view(chunks[0].shape) for part in received.split(sizes)]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's part of `x` (1-D), which is `x.tensor_split(size)[rank]`.

        Added up in rank order. Takes a buffer of about the size of `x`.
        """
        if self.size == 1:
            return x.clone()
        send = [part.numel() for part in x.tensor_split(self.size)]
        receive = [send[self.rank]] * self.size
        first, *others = torch.split(self._swapped(x.contiguous(), send, receive), receive)
        for part in others:
            first.add_(part)
        return first

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Replace `x` by rank `src`'s, in place, and return it."""
        if self.size > 1:
            self._timed(_nbytes(x) if self.rank == src else 0, self._broadcast, x, src)
        return x

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        """Swap `x` with rank `peer`, which names this rank as its peer, and return what it sent.

        As with any collective all ranks call; one that has nobody to talk to names itself.
        """
        if self.size == 1:
            return x.clone()
        sizes = [x.numel() if rank == peer else 0 for rank in range(self.size)]
        return self._swapped(x.reshape(-1), sizes, sizes).view(x.shape)

    def sub(self, ranks: Sequence[int], *, counted: bool = True) -> Comm:
        """Return a `Comm` for some of the ranks, this one among them.

        All ranks make one, in groups that do not overlap and have equal sizes, and all make the same calls in the same
        order: each call is a collective of all ranks.

        Args:
            ranks: the group; its members are counted in ascending order.
            counted: whether its bytes belong to `sent_bytes` here; not so where they stay within a host.
        """
        return _SubComm(self, sorted(ranks), counted)

    def fetch(self, x: Tensor) -> Callable[[], list[Any]]:
        """Start to copy a tensor to the host, and return a function that waits for it and returns it as a list."""
        if not x.is_cuda:
            return x.clone().tolist
        there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(x.device))

        def wait() -> list[Any]:
            looked = time.monotonic()
            while not copied.query():
                if time.monotonic() > looked + POLL.total_seconds():
                    self.look()
                    looked = time.monotonic()
                time.sleep(1e-4)
            return there.tolist()  # type: ignore[no-any-return]

        return wait

    def report(self, reason: str) -> None:  # noqa: B027
        """Tell the other ranks that this one cannot go on, where they would not notice."""

    def look(self) -> None:  # noqa: B027
        """Raise RankFailure if another rank is known to have failed; to be called while waiting."""

    def _swapped(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        nbytes = (sum(send) - send[self.rank]) * x.element_size()
        return self._timed(nbytes, self._swap, x, send, receive)

    def _timed(self, nbytes: int, collective: Callable[..., T], *args: Any) -> T:
        self._begun += 1
        start = time.perf_counter()
        result = collective(*args)
        self.seconds += time.perf_counter() - start
        self.sent_bytes += nbytes
        self._calls += 1
        return result

    @abc.abstractmethod
    def _all_reduce(self, x: Tensor, op: Op) -> None: ...

    @abc.abstractmethod
    def _all_gather(self, x: Tensor) -> list[Tensor]: ...

    @abc.abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> None: ...

    @abc.abstractmethod
    def _swap(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[r]` elements of `x` (1-D) to rank r, one part after the other; receive `receive[r]` from it."""


class _SubComm(Comm):
    """Some ranks of another `Comm`. Everything is a swap there, in which the others get nothing.

    So it needs no process group of its own, and a failure anywhere ends it.
    """

    def __init__(self, whole: Comm, ranks: Sequence[int], counted: bool) -> None:
        super().__init__(ranks.index(whole.rank), len(ranks))
        self._whole, self._ranks, self._counted = whole, ranks, counted
        self.ranks = [whole.ranks[rank] for rank in ranks]
        self.fetch = whole.fetch  # type: ignore[method-assign]

    def _swap(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        to, by = dict(zip(self._ranks, send, strict=True)), dict(zip(self._ranks, receive, strict=True))
        every = range(self._whole.size)
        before = self._whole.sent_bytes
        received = self._whole._swapped(x, [to.get(rank, 0) for rank in every], [by.get(rank, 0) for rank in every])
        if not self._counted:
            self._whole.sent_bytes = before
        return received

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        sizes = [x.numel()] * self.size
        return [part.view(x.shape) for part in self._swap(x.reshape(-1).repeat(self.size), sizes, sizes).split(sizes)]

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        flat = x.reshape(-1)
        parts = flat.new_zeros(self.size * -(-flat.numel() // self.size))
        parts[: flat.numel()] = flat
        sizes = [parts.numel() // self.size] * self.size
        stacked = self._swap(parts, sizes, sizes).view(self.size, -1)
        mine = stacked.sum(0) if op == "sum" else stacked.amax(0)
        x.copy_(torch.cat(self._all_gather(mine))[: flat.numel()].view(x.shape))

    def _broadcast(self, x: Tensor, src: int) -> None:
        send = [x.numel() if self.rank == src else 0] * self.size
        receive = [x.numel() if rank == src else 0 for rank in range(self.size)]
        flat = x.reshape(-1)
        x.copy_(self._swap(flat.repeat(self.size) if self.rank == src else flat[:0], send, receive).view(x.shape))


def default_store() -> Store:
    """Return the default process group's store, over a connection of its own: no client waits while another does.

    Raises:
        RankFailure: the process that hosts the store has ended.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + CONNECT_SECONDS

    def give_up() -> None:
        world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        if (dist.get_rank() != 0 and has_ended(world, 0)) or time.monotonic() > deadline:
            raise dist.DistNetworkError("cannot connect")

    try:
        store.check([""])  # fails at once if the host has ended, whereas a clone tries to connect until the timeout
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
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(fn())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name="lightning_sparse connecting", daemon=True).start()
    try:
        while not wait([result], POLL.total_seconds()).done:
            poll()
    except BaseException:
        result.add_done_callback(lambda late: late.exception() or discard(late.result()))
        raise
    return result.result()


def open_group(parent: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group with the ranks and the backend of another one. Only those ranks call this, all of them.

    `torch.distributed.new_group` names a group by the number of groups that a rank has made before; if ranks differ in
    that, they wait for each other under different names until the timeout.
    """
    c10d: Any = dist.distributed_c10d
    ranks = dist.get_process_group_ranks(parent)
    world = dist.group.WORLD
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(parent),
        ranks,
        dist.get_backend(parent),
        c10d._get_default_store(),
        name,
        timeout=timeout,
        device_id=getattr(world, "bound_device_id", None),
        group_desc="lightning_sparse",
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def has_ended(group: dist.ProcessGroup, peer: int) -> bool | None:
    """Return whether the process of a member has ended, as gloo's connection to it shows; None without gloo.

    Args:
        group: a process group whose connections have been made.
        peer: the member's rank within the group.
    """
    try:
        if group._get_backend(torch.device("cpu")).name() != "gloo":
            return None
    except RuntimeError:
        return None
    try:
        # Gloo refuses to begin to receive over a connection that the peer's end has closed. Nobody sends under this
        # tag, and an open receive that nobody waits for takes part in nothing.
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT)
    except RuntimeError:
        return True
    return False


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Peers:
    """The ranks of a process group, seen through the store: which have failed, finished, or do not respond.

    Only the process that made it communicates: a forked child, such as a worker of a DataLoader, has copies of this
    object and of the store's connection, and would speak for the rank.

    Args:
        store: a client that nobody else waits with, see `default_store`.
        group: the process group's name, which the keys in the store contain.
        rank: this rank within the group.
        ranks: global rank numbers of the group's members, for error messages.
    """

    def __init__(self, store: Store, group: str, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._pid = os.getpid()
        self._failed, self._done, self._terminating, self._poll = (
            f"lightning_sparse/{group}/{key}" for key in ("failed", "done", "terminating", "poll")
        )

    def mark_failed(self, reason: str) -> None:
        """Record that this rank cannot go on. The first reason stays."""
        self._put(self._failed, reason)

    def mark_done(self, calls: int, reason: str) -> None:
        """Record that this rank makes no collective calls after its first `calls`. Peers that make more will fail."""
        self._put(self._done, f"{calls} {reason}")

    def mark_terminating(self, reason: str) -> None:
        """Record that this rank is being terminated. Peers do not fail; `diagnose` names it as the likely cause."""
        self._put(self._terminating, reason)

    def raise_if_failed(self, calls: int) -> None:
        """Raise RankFailure if a rank has failed, or is done with fewer collective calls than this one has begun."""
        try:
            if self._store.check([self._failed]):
                raise RankFailure(self._store.get(self._failed).decode())
            if self._store.check([self._done]):
                made, reason = self._store.get(self._done).decode().split(" ", 1)
                if int(made) < calls:
                    raise RankFailure(reason)
        except dist.DistError as error:
            raise RankFailure(lost_store(self._ranks[self._rank], error)) from error

    def diagnose(self, calls: int) -> str:
        """Return why a collective broke off: the reason a rank has recorded, or which ranks do not respond."""
        try:
            self.raise_if_failed(calls)
            if self._store.check([self._terminating]):
                return str(self._store.get(self._terminating).decode())
            silent, absent = self._poll_peers()
        except RankFailure as failure:
            return str(failure)
        except dist.DistError:
            return "The store of the process group is gone, too: the process that hosts it, usually rank 0, has ended."
        if silent:
            return (
                f"No answer from {rank_list(silent)}: killed, ended, or frozen, or still before the first backward "
                f"pass. Look at the end of the output there."
            )
        if absent:
            return (
                f"Still running, but not taking part: {rank_list(absent)}. It hangs, or needs longer than the timeout."
            )
        return "All ranks have come to this error: look for an interruption of the network."

    def respond(self) -> None:
        """Respond if a failed rank polls its peers."""
        with contextlib.suppress(Exception):
            if os.getpid() == self._pid and self._store.check([self._poll]):
                self._put(f"{self._poll}/{self._rank}", "running")

    def _poll_peers(self) -> tuple[list[int], list[int]]:
        """Poll all ranks. Returns those that do not respond, and those that respond but are not in this collective."""
        keys = [f"{self._poll}/{rank}" for rank in range(len(self._ranks))]
        self._store.set(self._poll, "")
        self._store.set(keys[self._rank], "failed")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            silent, absent = [], []
            for rank, key in zip(self._ranks, keys, strict=True):
                if not self._store.check([key]):
                    silent.append(rank)
                elif self._store.get(key) != b"failed":
                    absent.append(rank)
            if not silent + absent or time.monotonic() > deadline:
                return silent, absent
            time.sleep(0.02)

    def _put(self, key: str, text: str) -> None:
        """Set a key, unless it is set."""
        if os.getpid() != self._pid:
            return
        # Without the store its host is gone, and the peers lose their connections anyway. Nothing may go wrong here.
        with contextlib.suppress(Exception):
            self._store.compare_set(key, "", text.encode(errors="backslashreplace").decode())


class ProcessGroupComm(Comm):
    """A `Comm` over a torch.distributed process group.

    Every wait checks twice a second whether a rank has failed (`report`) or makes no more calls (`leave`), and raises
    that rank's reason instead of waiting for the group's timeout.

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

    def use(self, group: dist.ProcessGroup) -> None:
        """Communicate over another process group of the same ranks from now on."""
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.peers = Peers(self.store, group.group_name, self.rank, self.ranks)

    def report(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on. The first reason stays."""
        self.peers.mark_failed(reason)

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one makes no further calls. Those that still wait for it will fail."""
        self.peers.mark_done(self._calls, reason)

    def warn(self, reason: str) -> None:
        """Record that this rank is being terminated (SIGTERM). Its peers do not fail; `explain` names it as a cause."""
        self.peers.mark_terminating(reason)

    def explain(self) -> str:
        """Return why a collective broke off, as far as that is known."""
        return self.peers.diagnose(self._begun)

    def answer(self) -> None:
        """Reply to a rank that has failed and asks whether this one is running."""
        self.peers.respond()

    def check(self) -> None:
        """Raise RankFailure if a rank has failed, or has left before a collective that this one has begun."""
        self.peers.raise_if_failed(self._begun)

    def look(self) -> None:
        """Raise RankFailure if another rank is known to have failed, and reply to one that asks."""
        self.check()
        self.answer()

    def _over_gloo(self, x: Tensor) -> bool:
        return bool(self.group._get_backend(x.device).name() == "gloo")

    def _by_host(self, x: Tensor) -> bool:
        return x.is_cuda and self._over_gloo(x)

    def _timed(self, nbytes: int, collective: Callable[..., Any], *args: Any) -> Any:
        x: Tensor = args[0]
        if not self._by_host(x):
            return super()._timed(nbytes, collective, *args)
        # Gloo has no all-gather of CUDA tensors, and its other collectives of them wait for the device as well. So
        # everything goes through the host's memory, for those who have no NCCL between their devices.
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
                    self.look()
            else:
                # This lets the current stream wait, not the host, which goes on to launch what comes after; with a
                # limit it would stop the host, and abort the communicator when the limit is reached. A peer that
                # fails is noticed by who calls `check` while the device is busy; for one that is silent NCCL's
                # watchdog ends this process, after the group's timeout, as it does with stock DDP.
                work.wait()
        except RankFailure:
            raise
        except RuntimeError as error:
            self.check()  # a reason that a rank has left says more
            failure = RankFailure(
                f"Rank {self.ranks[self.rank]} lost its peers in an exchange of gradients: {first_line(error)}. "
                f"{self.explain()} If it is running: check that all ranks use the same strategy and see the same "
                f"number of batches."
            )
            # In a ring only its neighbours notice that a rank has died; the others would wait for the timeout.
            self.report(str(failure))
            raise failure from error

    def _gloo_waited(self, work: dist.Work) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it came to an end in the meantime: well, or with an error of its own
        return True

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        self._wait(lambda: dist.all_reduce(x, reduce_op, group=self.group, async_op=True), x)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        # Into one tensor, which NCCL fills where it lies; of a list it would make a copy of each.
        rows = x.new_empty(self.size * x.numel())
        self._wait(lambda: dist.all_gather_single(rows, x.view(-1), group=self.group, async_op=True), x)
        return list(rows.view(self.size, *x.shape).unbind())

    def _broadcast(self, x: Tensor, src: int) -> None:
        self._wait(lambda: dist.broadcast(x, group=self.group, async_op=True, group_src=src), x)

    def _swap(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        # Not send and receive: a wait with a limit on these closes gloo's connection when the limit is reached.
        received = x.new_empty(sum(receive))
        self._wait(
            lambda: dist.all_to_all_single(received, x, list(receive), list(send), group=self.group, async_op=True), x
        )
        return received


def lost_store(rank: int, error: BaseException) -> str:
    """Return the error message for a store that does not respond any more."""
    return (
        f"Rank {rank} lost the store of the process group: the process that hosts it, usually rank 0, has ended. "
        f"({first_line(error)})"
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", for error messages."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Meeting:
    """Where the threads of `simulate` meet: each call brings one item per rank and hands out all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.items: dict[int, Any] = {}
        self.result: list[Any] = []
        self.number = 0
        self.ended: dict[int, BaseException | None] = {}
        self.first_error: BaseException | None = None

    def meet(self, rank: int, item: Any) -> list[Any]:
        with self.condition:
            mine = self.number
            self.items[rank] = item
            if len(self.items) == self.size:
                # Nobody can complete the next meeting before everybody has left this one, so one result is enough.
                self.result = [self.items[member] for member in range(self.size)]
                self.items = {}
                self.number += 1
                self.condition.notify_all()
            self.condition.wait_for(lambda: self.number != mine or self.ended)
            if self.number == mine:
                other, error = next(iter(self.ended.items()))
                how = "ended" if error is None else f"failed with {error!r}"
                raise RankFailure(f"Rank {rank} waits in a collective for rank {other}, which has {how}.")
            return self.result

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.condition:
            self.ended[rank] = error
            self.first_error = self.first_error or error
            self.condition.notify_all()


class _ThreadComm(Comm):
    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _meet(self, what: str, item: Any) -> list[Any]:
        items = self._meeting.meet(self.rank, (what, item))
        for rank, (call, _) in enumerate(items):
            if call != items[0][0]:
                raise RankFailure(f"Ranks are out of step: rank 0 calls {items[0][0]}, rank {rank} calls {call}.")
        return [theirs for _, theirs in items]

    def _meet_alike(self, what: str, x: Tensor) -> list[Tensor]:
        # A copy: the owner may overwrite its tensor while slower ranks still read it.
        return self._meet(f"{what} of {tuple(x.shape)} {x.dtype}", x.clone())

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        parts = self._meet_alike(f"all_reduce({op})", x)
        x.copy_(parts[0])
        for part in parts[1:]:
            if op == "sum":
                x.add_(part)
            else:
                torch.maximum(x, part, out=x)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        return [part.clone() for part in self._meet_alike("all_gather", x)]

    def _broadcast(self, x: Tensor, src: int) -> None:
        x.copy_(self._meet_alike(f"broadcast({src})", x)[src])

    def _swap(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = [part.clone() for part in x.split(list(send))]
        received = [theirs[self.rank] for theirs in self._meet(f"swap of {x.dtype}", parts)]
        if [part.numel() for part in received] != list(receive):
            raise RankFailure(
                f"Ranks are out of step: rank {self.rank} waits for {list(receive)} elements and is sent "
                f"{[part.numel() for part in received]}."
            )
        return torch.cat(received)


def simulate(size: int, fn: Callable[[Comm], T]) -> list[T]:
    """Run `fn` once per rank, each in a thread of this process, and return the results in rank order.

    Args:
        size: number of ranks.
        fn: called with the rank's `Comm`.

    Raises:
        Exception: whatever the first rank to fail raised; the others are told and end too.
        RankFailure: a rank waits for one that has ended, or ranks make different calls.
    """
    if size < 1:
        raise ValueError(f"simulate(size={size}): there must be at least one rank.")
    meeting = _Meeting(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            results[rank] = fn(_ThreadComm(rank, meeting))
        except BaseException as caught:  # it is raised again below, in the caller's thread
            error = caught
        meeting.end(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.first_error is not None:
        raise meeting.first_error
    return results
