"""Ranks that are asked to end do so after the same batch, wherever each of them is."""

import random
import threading
import time
from concurrent import futures
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from lightning_sparse.comm import POLL, Termination, termination
from lightning_sparse.comm.peers import Peers
from lightning_sparse.comm.store import StoreTimeout
from tests.support.tiers import one_in


@pytest.fixture
def pair(monkeypatch):
    """Two ranks whose threads look into the store only when the test calls `_watch`."""
    monkeypatch.setattr(termination, "Worker", Mock())
    monkeypatch.setattr(termination, "AGREE_SECONDS", 0.2)
    store = dist.HashStore()
    return [Termination(store, Peers(store, "group", rank, [10, 11])) for rank in range(2)]


def test_by_hand(pair):
    first, second = pair
    assert [first.begin() for _ in range(3)] == [False] * 3
    assert [second.begin() for _ in range(2)] == [False] * 2
    second.request()  # in its second batch, while the first rank is in its third
    assert (first.requested, first.reason) == (False, "")
    first._watch()
    assert (first.requested, first.reason) == (False, "Rank 11 was told to end (SIGTERM).")
    assert first.begin()  # the fourth
    assert not second.begin()  # the third
    assert second.begin()
    assert second.requested


def test_batches_of_validation_lie_between_those_of_training(pair):
    first, second = pair
    for rank, validations in ((first, 3), (second, 1)):
        assert not rank.begin()
        assert not any(rank.begin(validation=True) for _ in range(validations))
    first.request()
    second.request()
    assert first.begin(validation=True)  # the fourth
    assert [second.begin(validation=True) for _ in range(3)] == [False, False, True]


def test_one_with_fewer_batches_of_validation_ends_in_training(pair):
    first, second = pair
    for rank in pair:
        assert not rank.begin()
    assert not any(first.begin(validation=True) for _ in range(2))
    first.request()
    second.request()
    assert not second.begin(validation=True)
    assert second.begin()


def test_a_rank_that_does_not_say_where_it_is_is_not_waited_for(pair):
    first, _ = pair
    assert not first.begin()
    first.request()
    start = time.monotonic()
    assert first.begin()
    assert 0.2 <= time.monotonic() - start < 5


def test_a_signal_may_interrupt_a_rank_anywhere(pair):
    """The signal handler runs in the same thread, so the lock may be held."""
    first, second = pair
    with first._lock:
        first.request()
    second._watch()
    assert first.begin()
    assert second.begin()


def finish(ranks):
    with futures.ThreadPoolExecutor() as pool:
        return list(pool.map(Termination.finish, ranks))


def test_told_in_the_last_batch_all_hear_of_it_when_they_finish(pair):
    assert finish(pair) == [False, False]  # as a learning rate finder does
    assert not pair[0].begin()
    pair[1].request()
    assert finish(pair) == [True, True]
    assert pair[0].reason == "Rank 11 was told to end (SIGTERM)."


def test_who_does_not_finish_is_not_waited_for(pair, monkeypatch):
    """For example, the other rank has more batches. It waits for this rank, whose end shows that none follow."""
    monkeypatch.setattr(termination, "FINISH_SECONDS", 0.2)
    first, _ = pair
    assert not first.finish()
    first.request()
    assert first.finish()


def test_a_rank_that_comes_too_late_hears_of_the_request(pair, monkeypatch):
    """It decides as the rank that has not waited for it: each ends because of the request."""
    monkeypatch.setattr(termination, "FINISH_SECONDS", 0.2)
    first, second = pair
    first.request()
    assert first.finish()
    second._watch()
    assert second.finish()
    for rank in pair:
        rank.wait_for_peers()  # it returns at once: the ranks have not met


@pytest.fixture
def of_rank_0_and_1(monkeypatch):
    monkeypatch.setattr(termination, "Worker", Mock())
    store = dist.HashStore()
    return [Termination(store, Peers(store, "group", rank, [0, 1])) for rank in range(2)]


def test_the_rank_that_hosts_the_store_leaves_last(of_rank_0_and_1):
    host, other = of_rank_0_and_1
    finish(of_rank_0_and_1)
    with futures.ThreadPoolExecutor() as pool:
        left = pool.submit(host.wait_for_peers)
        assert not futures.wait([left], 0.3).done
        other.wait_for_peers()
        left.result(60)


def test_it_does_not_wait_after_a_failure_nor_for_a_rank_that_does_not_leave(of_rank_0_and_1, monkeypatch):
    monkeypatch.setattr(termination, "FINISH_SECONDS", 60)
    started = time.monotonic()
    of_rank_0_and_1[0].wait_for_peers()
    assert time.monotonic() - started < 30
    monkeypatch.setattr(termination, "FINISH_SECONDS", 0.2)
    finish(of_rank_0_and_1)
    of_rank_0_and_1[0].wait_for_peers()


def without_answers(rank, error, monkeypatch, names=("check", "get", "set", "compare_set")):
    def fail(*_):
        raise error("no answer")

    for name in names:
        monkeypatch.setattr(rank._store, name, fail)


def test_without_a_store_a_rank_that_is_told_ends(pair, monkeypatch):
    """The other ranks continue until they notice that the store's host has ended."""
    first, second = pair
    for rank in pair:
        without_answers(rank, dist.DistNetworkError, monkeypatch)
    second._watch()
    first.request()
    second.request()  # which knows already that there is none
    assert first.begin()
    assert second.begin()


@pytest.mark.parametrize("names", [("compare_set",), ("set",), ("check", "get", "set", "compare_set")])
def test_with_a_store_that_does_not_answer_for_a_while_it_is_said_later(pair, names, monkeypatch):
    first, second = pair
    with monkeypatch.context() as patched:
        without_answers(second, StoreTimeout, patched, names)
        second.request()
        second._watch()
        first._watch()
    second._watch()
    first._watch()
    assert first.reason == second.reason
    assert first.begin()
    assert second.begin()


def test_nothing_ends_the_thread_that_looks_into_the_store(pair, monkeypatch):
    without_answers(pair[0], ArithmeticError, monkeypatch)
    pair[0]._watch()


@one_in(2)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("every", [1, 3])
def test_all_ranks_end_after_the_same_batch(size, every, monkeypatch):
    """Ranks are threads that synchronise after every few batches. Some are asked to end at different places."""
    monkeypatch.setattr("lightning_sparse.comm.worker.POLL", 0.02 * POLL)
    chance = random.Random(size * every)
    for _ in range(5):
        store, ended = dist.HashStore(), {}
        meeting = threading.Barrier(size)
        told = {rank: chance.randrange(1, 30) for rank in chance.sample(range(size), chance.randint(1, size))}
        naps = [[chance.choice([0, 0, 0.002]) for _ in range(100)] for _ in range(size)]

        def train(rank, store=store, ended=ended, meeting=meeting, told=told, naps=naps):
            part = Termination(store, Peers(store, "group", rank, range(size)))
            for batch in range(1, 100_000):
                last = part.begin()
                time.sleep(naps[rank][batch % 100])
                if batch % every == 0:
                    meeting.wait(60)
                if told.get(rank) == batch:
                    part.request()
                if last:
                    ended[rank] = batch
                    break
            part.end()

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert len(ended) == size
        assert len(set(ended.values())) == 1
        assert min(ended.values()) > min(told.values())
