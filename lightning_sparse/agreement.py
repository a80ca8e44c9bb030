"""What all ranks must agree on before they exchange anything: compared through the process group's store.

Where settings differ, no collective would line up, so none can be used to find out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_sparse._compat import default_store
from lightning_sparse.comm import RankFailure

log = logging.getLogger(__name__)
SUSPECT_SECONDS = 20.0
BELIEVE_SECONDS = 2.0
"""How long a rank's word that it cannot attach has to stand: one of an earlier attempt is soon replaced."""


@contextlib.contextmanager
def agreement(group: str, ranks: Sequence[int], timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Compare settings with all ranks, before any collective could be out of step.

    Yields a dictionary to fill in with what must be equal on all ranks, name to value. An exception in the meantime
    is told to the others. In the end it holds one thing more, "session": a name that all ranks have in common, and that
    nobody has had before.

    Args:
        group: name of the process group.
        ranks: its members.
        timeout: how long to wait for the slowest.

    Raises:
        RankFailure: the settings differ, or a rank cannot attach, or does not come.
    """
    rank = dist.get_rank()
    store = default_store()
    place = f"lightning_sparse/{group}/attach"
    # torchrun keeps one store for all its attempts, so what is there may be of processes that exist no more. A rank
    # that has seen this number, which is new each time, is of the present.
    number = secrets.token_hex(8)
    described: dict[str, Any] = {}
    try:
        yield described
    except Exception as error:
        reason = f"Rank {rank} cannot attach: {type(error).__name__}: {error}"
        store.set(f"{place}/{rank}", json.dumps({"number": number, "error": reason}))
        raise
    store.set(f"{place}/{rank}", json.dumps({"number": number, **described}))
    deadline = time.monotonic() + timeout.total_seconds()
    numbers = {rank: number}
    try:
        for other in ranks:
            if other != rank:
                theirs = _met(store, place, rank, number, other, deadline, described["method"])
                numbers[other] = theirs["number"]
                for setting, mine in described.items():
                    if theirs.get(setting, mine) != mine:
                        raise RankFailure(
                            f"Ranks differ in {setting}: rank {rank} has {mine}, rank {other} has {theirs[setting]}. "
                            f"Give all ranks the same settings."
                        )
                if "error" in theirs:
                    raise RankFailure(theirs["error"])
    except RankFailure as failure:
        store.set(f"{place}/{rank}", json.dumps({"number": number, **described, "error": str(failure)}))
        raise
    described["session"] = numbers[ranks[0]]


def _met(store: Any, place: str, rank: int, number: str, other: int, deadline: float, method: str) -> dict[str, Any]:
    """Return what another rank says about itself, as soon as it is known to be of the present."""
    theirs: dict[str, Any] = {}
    warn_at = time.monotonic() + SUSPECT_SECONDS
    while True:
        present = _content(store, f"{place}/{rank} as seen by {other}") == number
        found = json.loads(_content(store, f"{place}/{other}") or "{}")
        if found != theirs:
            theirs, changed = found, time.monotonic()
            store.set(f"{place}/{other} as seen by {rank}", theirs["number"])
        if present or ("error" in theirs and time.monotonic() > changed + BELIEVE_SECONDS):
            return theirs
        suspicion = (
            f"Rank {rank} waits for rank {other} to attach {method}. If it is running already, it uses another "
            f"strategy, such as stock 'ddp': give all ranks the same one."
        )
        if time.monotonic() > deadline:
            raise RankFailure(suspicion)
        if time.monotonic() > warn_at:
            log.warning(suspicion)
            warn_at = float("inf")
        time.sleep(0.02)


def _content(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
