"""One segment's exchange: the collectives that aggregators call, and the checks that travel in every message.

A message holds these parts, each aligned to 8 bytes:

- fingerprint: a digest of method, seed, step, density, segment and layout, and the number of the message within the
  exchange. It differs if ranks are out of step, or if a message belongs to another step;
- status: the worst error that the sender knows of. A rank passes on the worst status it has received, so after the
  last message all ranks raise the same error, or none does. One exception: if the last message is corrupt, its receiver
  reports this through the store. The other ranks raise that error in their next collective;
- the payload's tensors;
- checksum: chosen so that the sum of all 4-byte words, each times a weight of its position, is a fixed number. So
  flipped, swapped and zeroed words are found, a message of zeros included; TCP's own checksum has 16 bits.

Sums (`all_reduce`) cannot carry these parts: ranks `agree` before them.

On the CPU a corrupt message raises its error at once, and a non-finite gradient after the last message. On CUDA the
host must not wait for the device. The status is copied to the host in the background, and raised one step later
(`deferred`). Until then `step_ok`, a bool on the device, masks the result. In the first exchange after a start or a
resume, ranks are not known to be `in_sync`. Only then a strict `agree` makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors.base import Compressor, Entries, Payload, Update
from lightning_sparse.context import Context
from lightning_sparse.framing import INTACT, intact, partial_sums, seal, unframe, weighted_sum, words_on_host
from lightning_sparse.kernels.checks import note_broken, worst_status
from lightning_sparse.kernels.dispatch import backend_of
from lightning_sparse.kernels.graphs import NO_GRAPHS, Graphs
from lightning_sparse.kernels.launch import to_device
from lightning_sparse.kernels.messages import HEADER_BYTES, Parts

T = TypeVar("T")
NOT_FINITE = (
    "Training cannot go on from here: start from the last checkpoint. Look for a loss that is NaN or inf, lower the "
    "learning rate, or clip the gradients. Strategies with on_nonfinite='skip' leave such steps out. If a GradScaler "
    "scales the loss, attach needs loss_scale=scaler.get_scale."
)
IN_FP16 = " If weights are fp16, Adam's eps of 1e-8 becomes 0: set eps=1e-4, or train in bf16."
MESSAGES = 64
"""If messages take more than this part of the residual's bytes, no CUDA graph decodes them. It would keep a copy of
them, and entries of twice their size."""
Exchanged = Literal["gradient", "update"]
"""The exchanged quantity: gradients, or updates of optimizers."""

OK = (1 << 63) - 1
"""The status without an error. Any other status is (rank + 1) << 32 plus an error code. The lowest status wins."""
TOO_LARGE, CORRUPT, OUT_OF_STEP, FAILED = -1, -2, -3, -4
"""Error codes. The code of a non-finite element is 1 + its index in the segment."""


class NonFiniteGradient(RuntimeError):
    """A gradient holds a NaN or an infinity; raised on all ranks."""


class Exchange:
    """A `Comm` for the payloads of one segment in one step.

    Args:
        comm: this rank's connection to the other ranks.
        ctx: the segment and the step.
        fingerprint: 32-bit digest of everything that must be equal on all ranks.
        device: the device of the tensors.
        in_sync: whether ranks are known to count steps alike, because the last exchange of this segment was the same.
        exchanged: name of the exchanged quantity in errors.

    Attributes:
        step_ok: on CUDA, after `finish`, a bool on the device: False if a rank reported an error. None on the CPU.
        worst: the status so far.
        precompressed: the result of `compress`, if it was called before the aggregator; else None.
        deferred: on CUDA, after `finish`, a function that raises the error; call it one step later. None on the CPU.
    """

    def __init__(
        self,
        comm: Comm,
        ctx: Context,
        fingerprint: int | Tensor = 0,
        *,
        device: torch.device,
        in_sync: bool = True,
        parent: Exchange | None = None,
        exchanged: Exchanged = "gradient",
    ) -> None:
        self.comm, self.ctx, self.device, self.in_sync, self._exchanged = comm, ctx, device, in_sync, exchanged
        self.step_ok: Tensor | None = None
        self.deferred: Callable[[], None] | None = None
        self.precompressed: tuple[Payload, Update] | None = None
        self._sent, self._parent = fingerprint, parent  # the fingerprint of the last message, which counts messages
        if device not in comm.statuses:
            comm.statuses[device] = to_device(torch.tensor([*map(status_of, comm.ranks), OK], device="cpu"), device)
        self.worst = comm.statuses[device][-1]  # not changed in place
        self._found: tuple[Tensor, Tensor] | None = None  # on CUDA, a status and whether it is OK

    @property
    def rank(self) -> int:
        """As in `Comm`."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """As in `Comm`."""
        return self.comm.size

    @property
    def _senders(self) -> Tensor:
        return self.comm.statuses[self.device][:-1]

    @property
    def _checks_on_device(self) -> bool:
        """Whether kernels check messages, and the host does not wait for them."""
        return backend_of(self.worst) == "triton"

    @property
    def _graphs(self) -> Graphs:
        """CUDA graphs of the kernels; none for an exchange among some of the ranks."""
        return NO_GRAPHS if self._parent else self.ctx.graphs

    @property
    def _root(self) -> Exchange:
        """The exchange that holds the status for all. Not an attribute, which would be a reference cycle."""
        return self._parent._root if self._parent else self

    def sub(self, ranks: Sequence[int], *, ctx: Context | None = None, counted: bool = True) -> Exchange:
        """Return an exchange among some of the ranks, see `Comm.sub`, with the same status.

        Args:
            ranks: members, this rank among them.
            ctx: with another segment, which is a part of this exchange's; None is the same segment.
            counted: whether its bytes belong to `sent_bytes`.
        """
        comm = self.comm.sub(ranks, counted=counted)
        device, in_sync = self.device, self.in_sync
        return Exchange(comm, ctx or self.ctx, self._sent, device=device, in_sync=in_sync, parent=self)

    def compress(self, u: Tensor, compressor: Compressor, region: Context | None = None) -> tuple[Payload, Update]:
        """Compress `u`. Set the status if an element is not finite, or too large for the compressor.

        Args:
            u: 1-D, fp32.
            compressor: the compressor of the method.
            region: the context of the part of the segment that `u` is; None if it is all of it.
        """
        if self.precompressed is not None:
            return self.precompressed
        ctx, worst = region or self.ctx, self._root.worst

        def run() -> tuple[Payload, Update, Tensor | None, Tensor]:
            self._root.worst = worst  # a capture that failed has replaced it
            payload, update = compressor.compress(u, ctx)
            floats = [part for part in payload if part.is_floating_point() and part is not u]
            exposed = compressor.exposes_nonfinite
            if not self._checks_on_device:
                self._check(u, floats if exposed else [u, *floats], ctx)
            elif exposed and isinstance(update, Entries):
                self._note_broken(u, update.indices, (), ctx)  # in u, because the update's values are rounded
            else:
                self._note_broken(u, None, floats, ctx)
            return payload, update, payload.messages if isinstance(payload, Parts) else None, self._root.worst

        graphs = self._graphs if region is None else NO_GRAPHS
        name = "compress", compressor
        payload, update, messages, self._root.worst = graphs.run(name, run, [u, worst])
        if isinstance(payload, Parts):
            payload.messages = messages  # a replay has written a new message, which is not sealed yet
        return payload, update

    def check_finite(self, u: Tensor, *made: Tensor) -> None:
        """Set the status if `u` is not finite; for aggregators that do not compress all of it.

        Args:
            u: 1-D, fp32.
            made: tensors computed from `u`. One of them is not finite if `u` is not finite, or too large for them.
        """
        if not self._checks_on_device:
            self._check(u, made or [u], self.ctx)
            return
        self._note_broken(u, None, made, self.ctx)

    def check_sum(self, x: Tensor) -> None:
        """Set the status if an all-reduced tensor is not finite: it is identical on all ranks, and so is the status."""
        fine = x.isfinite().all() | (self._root.worst != OK)  # keep an earlier error: it caused this one
        self._note_status(torch.where(fine, OK, self._senders[0] + TOO_LARGE))

    def pin(self, x: Tensor) -> None:
        """Add `x` (int64) to the fingerprint. From now on, ranks with different `x` are out of step."""
        self._sent = self._sent + (weighted_sum(x) >> 32)

    def agree(self, payload: Payload = (), *, strict: bool = False) -> Payload:
        """Return the payloads of all ranks, as rows, and raise the worst error that any rank knows.

        On CUDA it raises only if `strict` and not `in_sync`: for aggregators whose next collectives depend on the step.
        """
        rows = self.all_gather(payload)
        if not self._checks_on_device or (strict and not self.in_sync):
            worst: Any = self.comm.to_host_async(self._root.worst)()
            self._raise(worst)
        return rows

    def all_gather(self, payload: Payload) -> Payload:
        """Return the payloads of all ranks, as rows."""
        return self._receive(self.comm.all_gather(self._frame(payload)), payload, self._senders)

    def all_gather_as(self, decode: Callable[[Payload], T], payload: Payload) -> T:
        """Return `decode` of the payloads of all ranks, which are rows. Call it once in an exchange."""
        messages, graphs = self.comm.all_gather(self._frame(payload)), self._graphs
        if messages.nbytes * MESSAGES > 4 * self.ctx.segment.numel:
            graphs = NO_GRAPHS  # copies and entries of many ranks would take too much memory
        messages, worst = graphs.fixed("messages", messages), self._root.worst

        def run() -> tuple[T, tuple[Tensor, Tensor] | None]:
            self._root.worst = worst
            # A graph contains no number that changes with the step, so take the fingerprint from this rank's message.
            sent = messages.view(torch.int64)[self.rank, 0] if graphs.is_active(messages) else None
            return decode(self._receive(messages, payload, self._senders, sent)), self._root._found

        result, self._root._found = graphs.run(("receive",), run, [messages, worst, self._senders])
        if self._root._found is not None:
            self._root.worst = self._root._found[0]
        return result

    def all_to_all(self, rows: Payload) -> Payload:
        """Send row r of each part to rank r; return the rows that all ranks have sent here, in rank order."""
        return self._receive(self.comm.all_to_all(self._frame(rows)), rows, self._senders)

    def broadcast(self, payload: Payload, src: int) -> Payload:
        """Return rank `src`'s payload; the other ranks pass one of the same shapes."""
        message = self.comm.broadcast(self._frame(tuple(payload)), src)  # the message is overwritten
        return tuple(rows[0] for rows in self._receive(message[None], payload, self._senders[src]))

    def sendrecv(self, payload: Payload, peer: int) -> Payload:
        """Swap payloads with a peer; a rank without one names itself."""
        message = self.comm.sendrecv(self._frame(payload), peer)
        return tuple(rows[0] for rows in self._receive(message[None], payload, self._senders[peer]))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place. Call it after `agree`."""
        return self.comm.all_reduce(x)

    def all_reduce_with_status(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of a short fp32 `x` (1-D), with one more element for errors since `agree`."""
        worst = self._root.worst
        total = self.comm.all_reduce(torch.cat([x, (worst != OK).float().view(1)]))
        self._note_status(torch.where((total[-1] == 0) | (worst != OK), worst, self._senders[self.rank] + FAILED))
        return total[:-1]

    def reduce_scatter_mean(self, x: Tensor) -> Tensor:
        """Return the mean over the ranks of this rank's part of `x`. Call it after `agree`."""
        return self.comm.reduce_scatter_mean(x)

    def finish(self) -> None:
        """Raise the error that any rank has reported; on CUDA prepare `step_ok` and `deferred`."""
        status = self._root.worst
        worst: Callable[[], Any] = self.comm.to_host_async(status)
        if not self._checks_on_device:
            self._raise(worst())
            return
        # Free memory that `deferred` does not need.
        self.ctx, self.precompressed = replace(self.ctx, stats=None, payout=None), None
        found, fine = self._root._found or (None, None)
        self.step_ok = fine if found is status else status == OK
        self.deferred = lambda: self._raise(worst())

    def _check(self, u: Tensor, floats: Sequence[Tensor], ctx: Context) -> None:
        """Note non-finite elements, on the CPU. `floats` contain one if `u` does, or if `u` cannot be compressed."""
        # Finite values may have an infinite sum, so check elements only then: `isfinite` takes 10× the time.
        if all(torch.isfinite(part.sum()) for part in floats):
            return
        positions = (~torch.isfinite(u)).nonzero()
        if len(positions):
            self._note(self._first_element(ctx) + int(positions[0, 0]))
        elif not all(torch.isfinite(part).all() for part in floats):
            self._note(self._too_large)

    def _note_broken(self, u: Tensor, indices: Tensor | None, made: Sequence[Tensor], ctx: Context) -> None:
        """Check by Triton the elements of `u` at the indices (None: all), and the tensors computed from `u`."""
        self._root.worst = note_broken(u, indices, self._first_element(ctx), self._root.worst, OK)
        for part in made:
            flat = part.contiguous().view(-1)
            self._root.worst = note_broken(flat, None, self._too_large, self._root.worst, OK, place=False)

    def _first_element(self, ctx: Context) -> int:
        """Return this rank's status for a non-finite first element of `ctx`'s segment, which may be a region."""
        return status_of(self.comm.ranks[self.rank]) + 1 + ctx.segment.start - self._root.ctx.segment.start

    @property
    def _too_large(self) -> int:
        """This rank's status if `u` is too large for the compressor."""
        return status_of(self.comm.ranks[self.rank]) + TOO_LARGE

    def _note(self, status: int) -> None:
        """Note a status of this rank, unless an earlier one is known, because that is the cause.

        In TwoLevel, for example, the sum of a node contains a NaN of one rank.
        """
        self._note_status(torch.where(self._root.worst != OK, OK, status))

    def _note_status(self, status: Tensor) -> None:
        self._root.worst = torch.minimum(self._root.worst, status)

    def _frame(self, payload: Payload) -> Tensor:
        """Return a message: fingerprint, status, payload and checksum."""
        self._sent = self._sent + (1 << 40)
        return seal(payload, self._sent, self._root.worst)

    def _receive(self, messages: Tensor, like: Payload, senders: Tensor, sent: Tensor | None = None) -> Payload:
        """Return the payloads of messages, one per row, and note errors in them or their senders.

        Args:
            messages: as received.
            like: tensors of the payload's shapes.
            senders: the status of each sender, or of all.
            sent: on CUDA the fingerprint that messages must have; None is that of the last sent message.
        """
        payload = unframe(messages, like, HEADER_BYTES)
        if self._checks_on_device:
            known = self._sent if sent is None else sent, senders, self._root.worst
            codes = INTACT, CORRUPT, OUT_OF_STEP, OK
            self._root._found = worst_status(messages.view(torch.int64), partial_sums(messages), *known, *codes)
            self._root.worst = self._root._found[0]
            return payload
        words, senders_on_host = words_on_host(messages), senders.cpu().numpy()
        statuses = np.where(words[:, 0] == int(self._sent), words[:, 1], senders_on_host + OUT_OF_STEP)
        worst = int(np.where(intact(words), statuses, senders_on_host + CORRUPT).min())
        if worst != OK:
            self._note_status(torch.tensor(worst, device=self.device))
            # Raise non-finite gradients later, when all ranks know of them.
            self._raise(int(self._root.worst), only=(CORRUPT, OUT_OF_STEP))
        return payload

    def _raise(self, status: int, only: Sequence[int] | None = None) -> None:
        """Raise the error of a status, unless it is OK. `only`: raise these error codes only."""
        if status == OK:
            return
        ctx = self._root.ctx
        rank = ((status - FAILED) >> 32) - 1
        code = status - status_of(rank)
        if only is not None and code not in only:
            return
        segment = ctx.segment
        where = f"at step {ctx.step}, segment {segment.index} ({segment.names[0]!r} and on)"
        if code == CORRUPT:
            raise ValueError(
                f"A message of rank {rank} {where}, is corrupt: its checksum is wrong. It was damaged on its way, or "
                f"ranks run different versions."
            )
        if code == OUT_OF_STEP:
            raise RankFailure(
                f"Ranks are out of step: {where}, rank {rank} differs from other ranks in method, density, seed, "
                f"step or model, in frozen parameters or shapes of buffers, or in having been loaded or reset. Give "
                f"all ranks the same settings and the same number of batches."
            )
        if code == FAILED:
            raise RankFailure(f"Another rank received a corrupt message {where}. Its own error names the sender.")
        if not TOO_LARGE <= code <= segment.numel:
            raise RankFailure(f"The status of rank {rank} {where}, names element {code}: it is corrupt.")
        what = (
            f"The {self._root._exchanged} of {segment.owner(code - 1)!r} is not finite"
            if code > 0
            else f"The {self._root._exchanged}s from {segment.names[0]!r} on are too large for the compressor"
        )
        advice = NOT_FINITE + (IN_FP16 if self._root._exchanged == "update" else "")
        raise NonFiniteGradient(f"{what} on rank {rank} at step {ctx.step}. {advice}")


def status_of(rank: int) -> int:
    """Return the status to which an error code of a rank is added."""
    return (rank + 1) << 32
