"""Errors and settings that ranks tell each other outside of a `Session`: before it opens, or in a run without one."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse._compat import group_timeout
from lightning_sparse.comm import ProcessGroupComm, RankFailure
from lightning_sparse.comm.handshake import Handshake
from lightning_sparse.comm.peers import first_line
from lightning_sparse.comm.process_group import CONNECT_SECONDS, has_ended
from lightning_sparse.comm.store import StoreTimeout

_attempts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The number of the latest handshake of each group. All ranks of a group count alike, and a new process starts anew.
A run of a Trainer begins with another number, because an error of one rank after a fit counts a handshake there."""
_BROKEN = re.compile(
    "gloo|NCCL|ProcessGroup|monitoredBarrier|pair closure|Connection (closed|reset)|Broken pipe|Timed out waiting"
)
"""Matches the first line of torch's errors for a broken collective, which have no special class."""


@contextlib.contextmanager
def report_errors_to_peers(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Report an error in the block to the other ranks of a group; None is the default group.

    For work before a `Session`, which the other ranks would otherwise wait to open with this rank.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            # Without the store's host the other ranks end anyway. RankFailure: the store gave no first answer.
            with contextlib.suppress(dist.DistError, StoreTimeout, RankFailure):
                _refuse(error, group)
        raise


def report_or_diagnose(error: BaseException) -> None:
    """Report an error of a training without a `Session` to the other ranks, or find its cause.

    If the error says that a connection broke, the cause is put in front of its text. The cause is the error that
    another rank has reported, or the loss of the store.
    """
    broken, reason = is_broken(error), ""
    try:
        if broken:
            reason = next_handshake(ProcessGroupComm(None)).refusal()
        else:
            _refuse(error, None, attaches=False)
    except RankFailure as failure:  # no first answer from the store: its host has ended or is frozen
        reason = str(failure)
    except (dist.DistError, StoreTimeout):
        pass
    if broken and reason:
        error.args = (f"{reason} ({error})",)


def _refuse(error: BaseException, group: dist.ProcessGroup | None, *, attaches: bool = True) -> None:
    """Report an error to the other ranks once, although it may pass here again; they know of a RankFailure already."""
    if not isinstance(error, RankFailure) and not hasattr(error, "_lightning_sparse_reported"):
        error._lightning_sparse_reported = True  # type: ignore[attr-defined]
        next_handshake(ProcessGroupComm(group)).refuse(error, attaches=attaches)


def agree(settings: Mapping[str, Any], device: torch.device, timeout: timedelta | None) -> None:
    """Compare settings with all ranks of the default group, before a `Session`.

    Args:
        settings: values by name, see `Handshake.agree`.
        timeout: time to wait for other ranks; None takes the group's.

    Raises:
        RankFailure: settings differ, or a rank cannot attach, has ended, or does not arrive in time.
    """
    comm = ProcessGroupComm(None)
    next_handshake(comm, timeout or group_timeout(comm.group, device)).agree(settings)


def number_handshakes(run: int) -> None:
    """Number the next handshakes of the default group anew, because ranks may have counted differently before.

    Args:
        run: number of the run to which the handshakes belong; equal on all ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    _attempts[world] = run << 16


def is_broken(error: BaseException) -> bool:
    """Return whether an error says that a collective broke off, but not why."""
    # Later lines may quote another connection: an error of a DataLoader's worker contains the worker's traceback.
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, RankFailure)
        and bool(_BROKEN.search(first_line(error)))
    )


def next_handshake(
    comm: ProcessGroupComm,
    timeout: timedelta = timedelta(seconds=CONNECT_SECONDS),
    part: Sequence[int] | None = None,
) -> Handshake:
    """Return this rank's next handshake with the ranks of a group."""
    group, ranks = comm.group, comm.ranks
    attempt = _attempts[group] = _attempts.get(group, -1) + 1

    def ended(rank: int) -> bool | None:
        return has_ended(group, ranks.index(rank))

    return Handshake(comm.store, group.group_name, dist.get_rank(), ranks, timeout, ended, part, attempt)
