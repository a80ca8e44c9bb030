"""The comparison of settings, with threads as ranks, and its number of store calls."""

import json
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_sparse.comm import RankFailure
from lightning_sparse.comm.handshake import Handshake
from tests.support.tiers import tiers

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


def shake(settings, *, late=0.0, seconds=20, store=None):
    """Let one thread per entry of `settings` take part, the last one `late`; return outcomes and clients."""
    store = store or dist.HashStore()
    size = len(settings)
    clients = [CountingStore(store) for _ in range(size)]
    outcomes = [None] * size

    def run(rank):
        if rank == size - 1:
            time.sleep(late)
        shaking = Handshake(clients[rank], "0", rank, range(size), timedelta(seconds=seconds))
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


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_equal_settings_get_a_common_name_that_is_new(size):
    store = dist.HashStore()
    names = set()
    for _ in range(3):
        outcomes, _ = shake([{"method": "topk"}] * size, store=store)
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


@pytest.mark.parametrize("pause", [0.0, 4.0])
def test_a_late_refusal_does_not_end_the_next_attempt(pause):
    """All ranks refuse and try again, and the leader calls again before another rank has reported its first refusal.

    Ranks believe a refusal only if its entry stands for a while. The other rank may pause longer before it tries again.
    """
    store, outcomes = dist.HashStore(), []

    def shaking(rank):
        return Handshake(store, "0", rank, range(2), timedelta(seconds=20))

    shaking(0).refuse(ValueError("not so"))
    leader = threading.Thread(target=lambda: outcomes.append(shaking(0).agree({"method": "topk"})))
    leader.start()
    while not store.check(["lightning_sparse/0/0/handshake/call"]):
        time.sleep(0.01)
    shaking(1).refuse(ValueError("not so"))
    time.sleep(pause)
    outcomes.append(shaking(1).agree({"method": "topk"}))
    leader.join()
    assert len(outcomes) == 2
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("absent", [0, 2])
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
