"""One rank's connection to its peers. All collectives are called, counted in bytes, and timed here."""

from __future__ import annotations

import abc
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Op = Literal["sum", "max"]
POLL = timedelta(seconds=0.5)
"""Interval at which a waiting rank checks whether a peer has failed."""


class RankFailure(RuntimeError):
    """Another rank has failed, so this rank cannot continue."""


class Comm(abc.ABC):
    """One rank's connection to the others. Every rank makes the same calls in the same order.

    Attributes:
        rank: this rank, 0 ≤ rank < size.
        size: number of ranks.
        ranks: global rank numbers for error messages; a sub-communicator uses its parent's.
        sent_bytes: bytes that this rank has sent so far, without protocol overhead. All-gather counts (P − 1) times its
            input and all-reduce 2(P − 1)/P times its input, as in the ring algorithms. Broadcast counts its input on
            the source, sendrecv its input, and all-to-all the chunks for other ranks. The broadcast of weights before
            the first step is not counted.
        dense_bytes: bytes that it would have sent so far for dense averages instead; see `Routing`.
        seconds: time spent inside collectives so far, including the wait for slower ranks. With NCCL it is the host's
            time to launch them, because the host does not wait for the device.
        statuses: status tensors by device; `Exchange` keeps them here for these `ranks`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.ranks: Sequence[int] = range(size)
        self.sent_bytes, self.dense_bytes = 0, 0.0
        self.seconds = 0.0
        self.statuses: dict[torch.device, Tensor] = {}
        self._counts = Counter[str]()  # collectives that the host has started and completed

    @property
    def is_first(self) -> bool:
        """Whether this rank logs messages about all ranks."""
        return self.rank == 0

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """Replace `x` with the sum or the maximum over all ranks, in place, and return it.

        The maximum treats NaN as infinity. Gloo itself keeps or drops a NaN, depending on the rank.
        """
        if op == "max" and x.is_floating_point():
            x.masked_fill_(x.isnan(), torch.inf)
        if self.size > 1:
            self._timed(2 * (self.size - 1) * x.nbytes // self.size, self._all_reduce, x, op)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x` in rank order, as rows of one tensor. Shape and dtype must be equal on all ranks."""
        if self.size == 1:
            return x.clone().unsqueeze(0)
        return self._timed((self.size - 1) * x.nbytes, self._all_gather, x.contiguous())

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i to rank i and return the received rows in rank order. Shapes must be equal on all ranks."""
        if len(rows) != self.size:
            raise ValueError(f"all_to_all got {len(rows)} rows for {self.size} ranks; give one for each rank.")
        if self.size == 1:
            return rows.clone()
        sizes = [rows[0].numel()] * self.size
        return self._timed_all_to_all_v(rows.reshape(-1), sizes, sizes).view(rows.shape)

    def reduce_scatter_mean(self, x: Tensor) -> Tensor:
        """Return the mean over all ranks of this rank's part of `x` (1-D), `x.tensor_split(size)[rank]`.

        The parts are added in rank order. The receive buffer is about as large as `x`.
        """
        if self.size == 1:
            return x.clone()
        send = [part.numel() for part in x.tensor_split(self.size)]
        receive = [send[self.rank]] * self.size
        first, *others = torch.split(self._timed_all_to_all_v(x.contiguous(), send, receive), receive)
        first.div_(self.size)
        for part in others:
            first.add_(part, alpha=1 / self.size)  # dividing before adding keeps the sum in range
        return first

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Replace `x` with rank `src`'s, in place, and return it."""
        self._check_rank("src", src)
        if self.size > 1:
            self._timed(x.nbytes if self.rank == src else 0, self._broadcast, x, src)
        return x

    def sendrecv(self, x: Tensor, peer: int) -> Tensor:
        """Send `x` to rank `peer` and return that rank's `x`; `peer` must name this rank as its peer.

        All ranks must call it, like any collective. A rank without a peer names itself.
        """
        self._check_rank("peer", peer)
        if self.size == 1:
            return x.clone()
        sizes = [x.numel() if rank == peer else 0 for rank in range(self.size)]
        return self._timed_all_to_all_v(x.reshape(-1), sizes, sizes).view(x.shape)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank!r} among {self.size} ranks: give a rank from 0 to {self.size - 1}.")

    def sub(self, ranks: Sequence[int], *, counted: bool = True) -> Comm:
        """Return a `Comm` for a group of ranks that includes this rank.

        All ranks create one, in groups of equal size that do not overlap. All ranks make the same calls in the same
        order, because each call is a collective of all ranks.

        Args:
            ranks: ranks of the group; they are numbered in ascending order.
            counted: whether this object's `sent_bytes` includes the group's bytes; False for ranks of one host.
        """
        return _SubComm(self, sorted(ranks), counted)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave `sent_bytes` as it is, because it counts the bytes of training steps only."""
        sent = self.sent_bytes
        yield
        self.sent_bytes = sent

    def to_host_async(self, x: Tensor) -> Callable[[], list[Any]]:
        """Start copying a tensor to the host; return a function that waits for the copy and returns it as a list."""
        if not x.is_cuda:
            values = x.tolist()
            return lambda: values
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(x.device))

        def wait() -> list[Any]:
            polled = time.monotonic()
            while not copied.query():
                if time.monotonic() > polled + POLL.total_seconds():
                    self.poll()
                    polled = time.monotonic()
                time.sleep(1e-4)
            return host.tolist()  # type: ignore[no-any-return]

        return wait

    def mark_failed(self, reason: str) -> None:  # noqa: B027
        """Record that this rank has failed, so that its peers raise an error instead of waiting."""

    def poll(self) -> None:  # noqa: B027
        """Raise RankFailure if another rank has failed. It is called while this rank waits."""

    def _timed_all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        nbytes = (sum(send) - send[self.rank]) * x.element_size()
        return self._timed(nbytes, self._all_to_all_v, x, send, receive)

    def _timed(self, nbytes: int, collective: Callable[..., T], *args: Any) -> T:
        self._counts["begun"] += 1
        start = time.perf_counter()
        result = collective(*args)
        self.seconds += time.perf_counter() - start
        self.sent_bytes += nbytes
        self._counts["done"] += 1
        return result

    def direct_bytes(self, device: torch.device) -> int:
        """Return the bytes of the longest message that a rank sends directly to each other rank; 0: all use a ring."""
        return 0

    def _direct_all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x` as rows; each rank sends to each other. One round trip, a ring's bytes."""
        sizes = [x.numel()] * self.size
        received = self._all_to_all_v(x.reshape(-1).repeat(self.size), sizes, sizes)
        return received.view(self.size, *x.shape)

    def _direct_all_reduce(self, x: Tensor, op: Op) -> None:
        """Reduce `x` in place: each rank reduces one part and sends it to all others. Two round trips."""
        flat = x.reshape(-1)
        parts = flat.new_zeros(self.size * -(-flat.numel() // self.size))
        parts[: flat.numel()] = flat
        sizes = [parts.numel() // self.size] * self.size
        stacked = self._all_to_all_v(parts, sizes, sizes).view(self.size, -1)
        mine = stacked.sum(0, dtype=x.dtype) if op == "sum" else stacked.amax(0)
        x.copy_(self._direct_all_gather(mine).view(-1)[: flat.numel()].view(x.shape))

    @abc.abstractmethod
    def _all_reduce(self, x: Tensor, op: Op) -> None: ...

    @abc.abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x` in rank order, as rows of one tensor."""

    @abc.abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> None: ...

    @abc.abstractmethod
    def _all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send consecutive parts of `x` (1-D) to the ranks: `send[r]` elements to rank r, `receive[r]` from it."""


class _SubComm(Comm):
    """A group of ranks of another `Comm`.

    Each call is an all-to-all of the parent in which non-members exchange empty chunks. So the group needs no separate
    process group, and the failure of any rank ends the call.
    """

    def __init__(self, parent: Comm, ranks: Sequence[int], counted: bool) -> None:
        super().__init__(ranks.index(parent.rank), len(ranks))
        self._parent, self._ranks, self._counted = parent, ranks, counted
        self.ranks = [parent.ranks[rank] for rank in ranks]
        self.to_host_async = parent.to_host_async  # type: ignore[method-assign]

    def _all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        to, by = dict(zip(self._ranks, send, strict=True)), dict(zip(self._ranks, receive, strict=True))
        everyone = range(self._parent.size)
        before = self._parent.sent_bytes
        received = self._parent._timed_all_to_all_v(
            x, [to.get(rank, 0) for rank in everyone], [by.get(rank, 0) for rank in everyone]
        )
        if not self._counted:
            self._parent.sent_bytes = before
        return received

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._direct_all_gather(x)

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        self._direct_all_reduce(x, op)

    def _broadcast(self, x: Tensor, src: int) -> None:
        send = [x.numel() if self.rank == src else 0] * self.size
        receive = [x.numel() if rank == src else 0 for rank in range(self.size)]
        flat = x.reshape(-1)
        x.copy_(
            self._all_to_all_v(flat.repeat(self.size) if self.rank == src else flat[:0], send, receive).view(x.shape)
        )
