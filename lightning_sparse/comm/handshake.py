"""Compares all ranks' settings through the process group's store, before the first collective.

Ranks with different settings would call collectives that do not match, so a collective cannot compare them. The first
rank of the group is the leader:

1. The leader writes its settings and then a call: a new nonce and a digest of the settings.
2. Every other rank answers the call with its nonce, under a key that contains the leader's nonce. If its digest
   differs, the rank reads the leader's settings and writes an objection that names the setting.
3. The leader writes a verdict: the nonces of all answers, and the first objection.

If a rank cannot attach, or gives up, it writes a refusal. A rank may try again at once, while another one has not even
begun the attempt that failed. So the keys of each attempt contain its number, and the late rank still finds the reason.

Ranks may form parts that exchange separately, as the shards of a model do. Some settings need to be equal only within a
part. The first rank of each part writes them before it answers, and the others of the part compare them with theirs.

When torchrun restarts processes, the store may still hold entries of their predecessors. An answer to the leader's new
nonce cannot be stale, and neither can a verdict that contains the rank's nonce.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_sparse.comm.base import POLL, RankFailure
from lightning_sparse.comm.peers import LONGEST, lost_store, rank_list, silent_store
from lightning_sparse.comm.store import BoundedStore, StoreTimeout

log = logging.getLogger(__name__)
WARN_AFTER_SECONDS = 5.0
"""Seconds after which a warning names a rank that has not attached. DDP's constructor has just synchronised all."""
STALE_AFTER_SECONDS = 2.0
"""Seconds that an error entry must remain unchanged before it is trusted. A stale entry is overwritten sooner."""
LONG, PACKED = 1 << 16, "zlib:"
"""Length from which values are compressed, and the start of compressed ones. torch's store takes 8 MiB at most. The
settings of 50,000 parameters are longer."""


EACH_PART = (
    " All ranks of the default process group must attach, each with its own group. If some do not train, make a "
    "default group of the others."
)


class Handshake:
    """One rank's side of the comparison.

    Args:
        store: a clone of the process group's store, so that its waits block no other client.
        group: name of the process group, equal on all its ranks.
        ranks: all ranks of the group; the first is the leader.
        timeout: time to wait for the slowest rank.
        has_ended: returns whether a rank's connections are closed, or None if this is unknown.
        part: this rank's part of the group; None is the whole group.
        attempt: number of this attempt, equal on all ranks and new in this group.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        has_ended: Callable[[int], bool | None] = lambda rank: None,
        part: Sequence[int] | None = None,
        attempt: int = 0,
    ) -> None:
        self._rank, self._leader = rank, ranks[0]
        self._part = sorted(part or (), key=[*ranks].index)
        self._others = [other for other in ranks if other != rank]
        self._timeout, self._has_ended = timeout.total_seconds(), has_ended
        self._store = BoundedStore(store, max(self._timeout, STALE_AFTER_SECONDS))
        self._reason = ""  # the latest known reason for a failure
        # Groups of a mesh dimension may share a name.
        self._prefix = f"lightning_sparse/{group}/{ranks[0]}/handshake/{attempt}"
        self._nonce = secrets.token_hex(8)
        self._method = ""
        self._refusal = "", 0.0  # the latest refusal, and the time at which this rank first read it

    def refuse(self, error: BaseException, *, attaches: bool = True) -> None:
        """Report to the other ranks that this rank cannot attach, or that it has failed without attaching."""
        why = f"{type(error).__name__}: {error}"
        self._refuse(f"Rank {self._rank} cannot attach: {why}" if attaches else f"Rank {self._rank} failed: {why}")

    def _refuse(self, reason: str) -> None:
        self._set("refused", json.dumps([self._rank, self._nonce, reason]))
        if self._rank != self._leader and (call := self._get("call")):
            self._object(call.split()[0], reason)  # then the leader need not wait until the refusal is trusted

    def agree(self, settings: Mapping[str, Any], of_part: Mapping[str, Any] | None = None) -> str:
        """Compare settings with all ranks.

        Args:
            settings: values by name; of two lists, the error message shows only the first difference.
            of_part: settings that need to be equal within this rank's part only.

        Returns:
            A name for this session, equal on all ranks and new for each call.

        Raises:
            RankFailure: settings differ, or a rank cannot attach, has ended, or does not attach in time.
        """
        try:
            try:
                if not self._part:
                    return self._agree({**settings, **(of_part or {})}, {})
                return self._agree(settings, {"group": rank_list(self._part), **(of_part or {})})
            except RankFailure as failure:
                with contextlib.suppress(dist.DistError, StoreTimeout):  # without a store, no rank waits for long
                    if not self._get("refused"):
                        self._refuse(str(failure))
                raise
        except dist.DistError as error:
            raise RankFailure(self._reason or lost_store(self._rank, error)) from error
        except StoreTimeout as error:
            raise RankFailure(self._reason or silent_store(self._rank)) from error

    def refusal(self) -> str:
        """Return why another rank cannot attach; "" if no rank has reported a reason."""
        rank, *_, reason = json.loads(self._get("refused") or "[null, null]")
        return reason or "" if rank != self._rank else ""

    def _agree(self, settings: Mapping[str, Any], of_part: Mapping[str, Any]) -> str:
        text = json.dumps(settings, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._method = f" {settings['method']}" if "method" in settings else ""
        if (refused := self._get("refused")) and json.loads(refused)[0] == self._rank:
            self._set("refused", "")  # by this rank's predecessor
        if self._rank == self._leader:
            return self._lead(text, digest, of_part)
        return self._follow(settings, digest, of_part)

    def _lead(self, text: str, digest: str, of_part: Mapping[str, Any]) -> str:
        session = self._nonce
        self._set(f"{session}/settings", text)
        self._publish(session, of_part)
        self._set("call", f"{session} {digest}")
        try:
            self._await_answers(session)
            error = self._get(f"{session}/objection")
        except RankFailure as failure:
            error = str(failure)
        nonces = [answer for other in self._others if (answer := self._get(f"{session}/{other}"))]
        self._set(f"{session}/verdict", json.dumps({"nonces": nonces, "error": error}))
        if error:
            raise RankFailure(error)
        return session

    def _await_answers(self, session: str) -> None:
        """Wait until all ranks have answered, or one has objected."""
        start, warned = time.monotonic(), False
        for i, other in enumerate(self._others):
            while not self._wait(f"{session}/{other}"):
                if self._get(f"{session}/objection"):
                    return
                missing = [rank for rank in self._others[i:] if not self._get(f"{session}/{rank}")]
                waited = time.monotonic() - start
                self._raise_if_refused()
                self._raise_if_ended(missing, waited)
                if self._part:  # a rank may have arrived, and wait for the first rank of its part
                    missing = [rank for rank in missing if not self._get(f"{session}/part/{rank}")] or missing
                if missing and waited > min(WARN_AFTER_SECONDS, self._timeout) and not warned:
                    warned = True
                    self._set(f"{session}/missing", json.dumps(missing))
                    log.warning(self._still_missing(missing, waited))
                if missing and waited > self._timeout:
                    raise RankFailure(self._still_missing(missing, waited))

    def _publish(self, session: str, of_part: Mapping[str, Any]) -> None:
        """Write this rank's group, and on the first rank of a part the settings of the part."""
        if self._part:
            shown = of_part if self._rank == self._part[0] else {"group": of_part["group"]}
            self._set(f"{session}/part/{self._rank}", json.dumps(shown))

    def _follow(self, settings: Mapping[str, Any], digest: str, of_part: Mapping[str, Any]) -> str:
        session, first, answered = "", next(iter(self._part), self._rank), False
        start, warned = time.monotonic(), False
        while True:
            call = self._get("call")
            if call and call.split()[0] != session:
                session, leaders_digest = call.split()
                start, answered = time.monotonic(), False
                if digest != leaders_digest:
                    self._compare(session, self._leader, json.loads(self._get(f"{session}/settings")), settings)
                self._publish(session, of_part)
            if session and not answered and (first == self._rank or self._get(f"{session}/part/{first}")):
                if first != self._rank:
                    self._compare(session, first, json.loads(self._get(f"{session}/part/{first}")), of_part)
                self._set(f"{session}/{self._rank}", self._nonce)
                answered = True
            # The first rank of the part may come much later, or never.
            self._wait(f"{session}/verdict" if answered else f"{session}/part/{first}" if session else "call")
            if session and (text := self._get(f"{session}/verdict")):
                verdict = json.loads(text)
                if self._nonce in verdict["nonces"] or (
                    # The leader may have failed before it read this rank's answer.
                    verdict["error"] and time.monotonic() > start + STALE_AFTER_SECONDS
                ):
                    if verdict["error"]:
                        raise RankFailure(verdict["error"])
                    return session
                time.sleep(POLL.total_seconds())
            waited = time.monotonic() - start
            self._raise_if_refused()
            self._raise_if_ended([self._leader], waited)
            missing = json.loads((session and self._get(f"{session}/missing")) or "[]")
            # The leader warns about other ranks itself, slightly earlier.
            if not missing and waited > WARN_AFTER_SECONDS + 2 * POLL.total_seconds() and not warned:
                warned = True
                log.warning(self._still_missing([self._leader], waited))
            if waited > self._timeout + 2 * POLL.total_seconds():
                raise RankFailure(self._still_missing(missing or [self._leader], waited))

    def _compare(self, session: str, rank: int, theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Write an objection that names the first setting in which this rank differs from another one."""
        for name in [*theirs, *(name for name in settings if name not in theirs)]:
            here, there = settings.get(name), theirs.get(name)
            if isinstance(here, list) and isinstance(there, list):
                here, there = next(
                    ((mine, its) for mine, its in zip_longest(here, there, fillvalue="no more") if mine != its),
                    (None, None),
                )
            if here != there:
                self._object(
                    session,
                    f"Ranks differ in {name}: rank {rank} has {there}, rank {self._rank} has {here}"
                    f"{_first_difference(there, here)}. Give all ranks the same settings.",
                )
                return

    def _object(self, session: str, reason: str) -> None:
        self._reason = reason
        self._store.compare_set(f"{self._prefix}/{session}/objection", "", _encodable(reason[:LONGEST]))

    def _raise_if_refused(self) -> None:
        entry = self._get("refused")
        if entry != self._refusal[0]:
            self._refusal, self._reason = (entry, time.monotonic()), json.loads(entry)[-1] if entry else ""
        if entry and time.monotonic() > self._refusal[1] + STALE_AFTER_SECONDS:
            raise RankFailure(json.loads(entry)[-1])

    def _raise_if_ended(self, missing: Sequence[int], waited: float) -> None:
        if waited > 0.9 * self._timeout:
            return  # by now a collective of stock DDP has timed out too, which also closes connections
        for rank in missing:
            if self._has_ended(rank):
                entry = self._get("refused")
                if entry and json.loads(entry)[0] == rank:
                    raise RankFailure(json.loads(entry)[-1])
                raise RankFailure(
                    f"Rank {rank} has ended before it attached{self._method}: its connections are closed. It was "
                    f"killed, failed, or never called attach; look at the end of its output."
                )

    def _still_missing(self, missing: Sequence[int], seconds: float) -> str:
        several = len(missing) > 1
        if all(self._has_ended(rank) is False for rank in missing):
            seen = "There is no sign that a process has ended" if several else "There is no sign that its process ended"
            causes = "loading, frozen"
        else:
            seen, causes = "The process group does not show whether a process has ended", "loading, ended, frozen"
        return (
            f"Rank {self._rank} waits for {rank_list(missing)} to attach{self._method}, for {seconds:.0f} s so far. "
            f"{seen}: {'they may be' if several else 'it may be'} {causes}, or using another strategy, such as stock "
            f"'ddp'. All ranks need the same one.{EACH_PART * bool(self._part)}"
        )

    def _get(self, key: str) -> str:
        """Return the value of a key; "" if it is not set."""
        key = f"{self._prefix}/{key}"
        value = self._store.get(key).decode() if self._store.check([key]) else ""
        packed = value.removeprefix(PACKED)
        return value if packed == value else zlib.decompress(base64.b64decode(packed)).decode()

    def _set(self, key: str, value: str) -> None:
        value = _encodable(value)
        if len(value) > LONG:
            value = PACKED + base64.b64encode(zlib.compress(value.encode())).decode()
        self._store.set(f"{self._prefix}/{key}", value)

    def _wait(self, key: str) -> bool:
        """Wait for a key, at most for POLL, and return whether it is set."""
        return self._store.has_within(POLL.total_seconds(), [f"{self._prefix}/{key}"])


def _first_difference(there: Any, here: Any) -> str:
    """Return the first `name=value` pair in which two texts differ."""
    options = [re.findall(r"\w+=[^\s,()]*", str(text)) for text in (there, here)]
    differing = [f"{its} and {mine}" for its, mine in zip(*options, strict=False) if its != mine]
    return f", which differ in {differing[0]}" if differing else ""


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
