"""The comparison of settings, with threads as ranks, and its number of store calls."""

import json
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_sparse.comm import RankFailure
from lightning_sparse.comm.handshake import Handshake
from tests.support.tiers import in_full, tiers

MODEL = [f"layers.{i}.attention.weight[768, 768] float32" for i in range(576)]
NBYTES = len(json.dumps(MODEL))


class CountingStore:
    """One rank's client of a store; counts the bytes of keys and values that it sends and receives."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.bytes = self.requests = 0

    def _count(self, *texts: str | bytes) -> None:
        self.bytes += sum(map(len, texts))
        self.requests += 1

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self.store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self._count(key, expected, value)
        self.store.compare_set(key, expected, value)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self._count(key, value)
        return value

    def check(self, keys: list[str]) -> bool:
        self._count(*keys, b"x")
        return self.store.check(keys)


def shake(settings, *, late=0.0, seconds=20, store=None, attempt=0):
    """Let one thread per entry of `settings` take part, the last one `late`; return outcomes and clients."""
    store = store or dist.HashStore()
    size = len(settings)
    clients = [CountingStore(store) for _ in range(size)]
    outcomes = [None] * size

    def run(rank):
        if rank == size - 1:
            time.sleep(late)
        shaking = Handshake(clients[rank], "0", rank, range(size), timedelta(seconds=seconds), attempt=attempt)
        try:
            if isinstance(settings[rank], Exception):
                shaking.refuse(settings[rank])
                outcomes[rank] = settings[rank]
            elif settings[rank] is not None:
                outcomes[rank] = shaking.agree(settings[rank])
        except RankFailure as failure:
            outcomes[rank] = failure

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, clients


class ShortStore(CountingStore):
    """Refuses long values, as torch's store does from 8 MiB."""

    def set(self, key, value):
        assert len(value) < len(json.dumps({"model": MODEL * 20})) // 4
        super().set(key, value)


def test_settings_of_very_many_parameters_are_compressed(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "CountingStore", ShortStore)
    settings = {"model": MODEL * 20}
    outcomes, _ = shake([settings, settings, {"model": [*MODEL * 20, "more"]}])
    text = "Ranks differ in model: rank 0 has no more, rank 2 has more"
    assert all(isinstance(outcome, RankFailure) and text in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("size", [1, 2, 8, *in_full(64)])
def test_equal_settings_get_a_common_name_that_is_new(size):
    store = dist.HashStore()
    names = set()
    for attempt in range(3):
        outcomes, _ = shake([{"method": "topk"}] * size, store=store, attempt=attempt)
        assert len(set(outcomes)) == 1
        names.add(outcomes[0])
    assert len(names) == 3


@pytest.mark.parametrize("late", tiers([0.0, 2.5], [0.0]))
@pytest.mark.parametrize("odd", tiers(range(4), [0, 2]))
def test_a_difference_is_named_on_all_ranks(odd, late):
    settings = [{"method": "topk", "model": MODEL, "seed": 7 if rank == odd else 0} for rank in range(4)]
    outcomes, _ = shake(settings, late=late)
    for outcome in outcomes:
        assert str(outcome).startswith("Ranks differ in seed: rank 0 has ")
        assert "Give all ranks the same settings." in str(outcome)


@pytest.mark.parametrize("late", tiers([0.0, 1.0], [0.0]))
@pytest.mark.parametrize("odd", tiers(range(4), [0, 2]))
def test_a_rank_that_refuses_is_named_on_all_ranks(odd, late):
    settings = [ValueError("not so") if rank == odd else {"method": "topk"} for rank in range(4)]
    started = time.monotonic()
    outcomes, _ = shake(settings, late=late)
    assert time.monotonic() - started < 8
    assert [str(outcome) for outcome in outcomes if outcome is not settings[odd]] == [
        f"Rank {odd} cannot attach: ValueError: not so"
    ] * 3


def in_turn(store, rank, attempts, pauses):
    """Let a rank try again after each error; return all outcomes. It pauses before each attempt."""
    outcomes = []
    for attempt, (settings, pause) in enumerate(zip(attempts, pauses, strict=True)):
        time.sleep(pause)
        shaking = Handshake(store, "0", rank, range(3), timedelta(seconds=20), attempt=attempt)
        try:
            if isinstance(settings, Exception):
                shaking.refuse(settings)
                raise settings
            outcomes.append(shaking.agree(settings))
        except (RankFailure, ValueError) as error:
            outcomes.append(str(error))
    return outcomes


NO = ValueError("not so")
FINE, OTHER = {"method": "topk"}, {"method": "qsgd"}


@pytest.mark.parametrize(
    ("attempts", "reason"),
    [
        ([FINE, OTHER, FINE], "Ranks differ in method: rank 0 has topk, rank 1 has qsgd"),
        *tiers(
            [
                ([NO, NO, NO], "not so"),
                ([FINE, NO, FINE], "not so"),
                ([NO, FINE, FINE], "not so"),
                ([FINE, FINE, OTHER], "Ranks differ in method: rank 0 has topk, rank 2 has qsgd"),
            ],
            [],
        ),
    ],
)
@pytest.mark.parametrize("late", tiers([0, 1, 2, None], [2, None]))
def test_ranks_that_try_again_get_the_reason_of_each_attempt(attempts, reason, late):
    """One rank begins the first attempt when the others have failed it, and are in the second one."""
    store, outcomes = dist.HashStore(), {}

    def run(rank):
        pauses = [3.0 * (rank == late), 0.0, 0.0, 3.0 * (late is None and rank == 1)]
        outcomes[rank] = in_turn(store, rank, [attempts[rank], FINE, attempts[rank], FINE], pauses)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first, second, third, last in outcomes.values():
        assert reason in first
        assert reason in third
        assert (second, last) == (outcomes[0][1], outcomes[0][3])
        assert "Rank" not in second + last


def test_a_rank_that_comes_after_the_others_gave_up_learns_so_at_once():
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RankFailure, match="to attach topk"):
            Handshake(store, "0", rank, range(2), timedelta(seconds=0.5)).agree(FINE)
        started = time.monotonic()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("absent", [0, *in_full(2)])
def test_a_rank_that_does_not_come_is_named_on_all_ranks(absent):
    settings = [None if rank == absent else {"method": "topk"} for rank in range(3)]
    outcomes, _ = shake(settings, seconds=1)
    for rank, outcome in enumerate(outcomes):
        assert rank == absent or f"for rank {absent} to attach topk" in str(outcome)


def test_what_a_rank_sends_and_receives_at_the_start():
    """32 ranks and 576 parameters, one rank late: no description is read, and waiting costs little."""
    _, clients = shake([{"method": "topk", "model": MODEL}] * 32, late=2.0)
    leader, *followers = (client.bytes for client in clients)
    assert leader < NBYTES + 20_000
    assert max(followers[:-1]) < 8_000


def test_only_a_rank_that_differs_reads_the_leaders_settings():
    other = [*MODEL[:300], "head[768, 10] float32", *MODEL[301:]]
    outcomes, clients = shake([{"method": "topk", "model": other if rank == 5 else MODEL} for rank in range(8)])
    assert {str(outcome) for outcome in outcomes} == {
        "Ranks differ in model: rank 0 has layers.300.attention.weight[768, 768] float32, rank 5 has head[768, 10] "
        "float32. Give all ranks the same settings."
    }
    assert [rank for rank, client in enumerate(clients) if client.bytes > NBYTES] == [0, 5]
