"""Every collective with threads and with processes: the same results and the same bytes."""

import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from lightning_sparse import method
from lightning_sparse.comm import Comm, ProcessGroupComm, RankFailure, simulate
from lightning_sparse.comm.handshake import Handshake
from lightning_sparse.comm.peers import ANSWER_SECONDS, Peers
from lightning_sparse.comm.process_group import DIRECT
from lightning_sparse.hooks import handshakes
from lightning_sparse.hooks import session as sessions
from lightning_sparse.hooks.session import Session
from lightning_sparse.options import ReducerOptions
from lightning_sparse.strategies import rendezvous
from tests.processes import run_ranks
from tests.support.tiers import tiers


def all_collectives(comm: Comm) -> list[object]:
    rank, size = comm.rank, comm.size
    x = torch.tensor([float(rank), 1.0])
    results = [
        comm.all_reduce(x.clone()).tolist(),
        comm.all_reduce(-x, "max").tolist(),
        [part.tolist() for part in comm.all_gather(torch.tensor([rank], dtype=torch.uint8))],
        [part.tolist() for part in comm.all_to_all(torch.tensor([[rank, other] for other in range(size)]))],
        comm.broadcast(x.clone(), size - 1).tolist(),
        comm.sendrecv(x, rank ^ 1 if rank ^ 1 < size else rank).tolist(),
    ]
    return [*results, comm.sent_bytes]


def expected(rank: int, size: int) -> list[object]:
    peer = rank ^ 1 if rank ^ 1 < size else rank
    sent = 2 * (2 * (size - 1) * 8 // size) + (size - 1) + 16 * (size - 1)
    sent += 8 * (rank == size - 1 and size > 1) + 8 * (peer != rank)
    return [
        [sum(range(size)), float(size)],
        [0.0, -1.0],
        [[other] for other in range(size)],
        [[other, rank] for other in range(size)],
        [float(size - 1), 1.0],
        [float(peer), 1.0],
        sent,
    ]


@pytest.mark.parametrize("size", tiers([1, 2, 3, 5, 129], [1, 2, 3, 5]))
def test_threads(size):
    assert simulate(size, all_collectives) == [expected(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_processes(size):
    results = run_ranks(size, lambda rank: all_collectives(ProcessGroupComm()))
    assert results == [expected(rank, size) for rank in range(size)]


def by_host(rank: int) -> list[object]:
    comm = ProcessGroupComm()
    comm._via_host = lambda x: True  # as for CUDA tensors over gloo
    return all_collectives(comm)


def test_collectives_by_way_of_the_host():
    assert run_ranks(3, by_host) == [expected(rank, 3) for rank in range(3)]


def short_and_long(rank: int) -> list[object]:
    comm, found = ProcessGroupComm(), []
    direct = []
    comm._direct_all_gather = lambda x: direct.append(x.numel()) or Comm._direct_all_gather(comm, x)
    for numel in (0, 1, 7, DIRECT // 4, DIRECT // 4 + 1):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(numel, generator=generator)
        rows, total = comm.all_gather(x), comm.all_reduce(x.clone())
        torch.testing.assert_close(total, rows.sum(0), rtol=1e-5, atol=1e-5)
        assert torch.equal(comm.all_reduce(x.clone(), "max"), rows.amax(0))
        found += [rows.tolist(), total.tolist()]
    assert comm.direct_bytes(torch.device("cpu")) == DIRECT
    return [found, direct, comm.sent_bytes]


def test_short_messages_go_from_each_rank_to_each_other():
    """Gloo's ring takes a round trip for each rank. Results are equal on all ranks, with the ring and without."""
    (found, direct, sent), *others = run_ranks(3, short_and_long)
    assert others == [[found, direct, sent]] * 2
    assert direct == [0, 0, 0, 1, 1, 1, 7, 3, 3, DIRECT // 4, *[-(-DIRECT // 12)] * 2]
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    assert found[4] == [torch.randn(7, generator=generator).tolist() for generator in generators]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3)])
def test_gathering_any_shape(shape):
    def rank(rank: int) -> list[list[float]]:
        return [part.tolist() for part in ProcessGroupComm().all_gather(torch.full(shape, float(rank)))]

    assert run_ranks(2, rank) == [[torch.full(shape, float(other)).tolist() for other in range(2)]] * 2


def test_results_do_not_alias_other_ranks():
    def rank(comm: Comm) -> list[float]:
        mine = torch.ones(3)
        parts = comm.all_gather(mine)
        parts[0].add_(comm.rank)
        mine.fill_(7)
        comm.all_reduce(torch.zeros(1))
        return parts[0].tolist()

    assert simulate(3, rank) == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_sums_are_in_rank_order():
    # 1e8 absorbs the first 1. The last 1 is added after -1e8 has cancelled 1e8, so it remains.
    values = [1e8, 1.0, -1e8, 1.0]
    results = simulate(4, lambda comm: comm.all_reduce(torch.tensor([values[comm.rank]])).item())
    assert results == [1.0] * 4


def test_a_failing_rank_surfaces_and_frees_the_others():
    def rank(comm: Comm) -> None:
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(1))

    before = threading.active_count()
    with pytest.raises(KeyError, match="mine"):
        simulate(3, rank)
    assert threading.active_count() == before


def test_a_rank_that_ends_early_frees_the_others():
    def rank(comm: Comm) -> None:
        if comm.rank != 1:
            comm.all_reduce(torch.ones(1))

    with pytest.raises(RankFailure, match="waits in a collective for rank 1, which has ended"):
        simulate(2, rank)


def test_ranks_out_of_step():
    with pytest.raises(RankFailure, match=r"out of step: rank 0 calls all_gather of \(1,\).*rank 1.*\(2,\)"):
        simulate(2, lambda comm: comm.all_gather(torch.ones(comm.rank + 1)))
    with pytest.raises(RankFailure, match=r"all_reduce\(sum\).*all_reduce\(max\)"):
        simulate(2, lambda comm: comm.all_reduce(torch.ones(1), "max" if comm.rank else "sum"))


def test_on_one_rank_results_have_memory_of_their_own():
    def rank(comm: Comm) -> list[float]:
        x = torch.ones(1)
        found = [comm.all_gather(x), comm.all_to_all(x.unsqueeze(0)), comm.sendrecv(x, 0), comm.reduce_scatter_mean(x)]
        x.zero_()
        return [each.item() for each in found]

    assert simulate(1, rank) == [[1.0] * 4]


def test_bad_sizes():
    for size in (0, "2", 2.0):
        with pytest.raises(ValueError, match=r"simulate\(size=.*\): the number of ranks is a whole number from 1"):
            simulate(size, lambda comm: None)
    for call in (lambda comm: comm.broadcast(torch.ones(1), 5), lambda comm: comm.sendrecv(torch.ones(1), 5)):
        for ranks in (1, 2):
            with pytest.raises(ValueError, match=f"=5 among {ranks} ranks: give a rank from 0 to {ranks - 1}"):
                simulate(ranks, call)
    with pytest.raises(ValueError, match="got 1 rows for 2 ranks"):
        simulate(2, lambda comm: comm.all_to_all(torch.ones(1, 1)))
    with pytest.raises(RuntimeError, match=r"needs torch.distributed.*simulate"):
        ProcessGroupComm()


def failing(rank: int, how: str) -> tuple[str, float]:
    comm = ProcessGroupComm()
    comm.all_reduce(torch.ones(1))
    if rank == 1:
        if how == "report":
            comm.mark_failed("rank 1 has had enough")
        else:
            comm.mark_done("rank 1 has gone home")
        # Rank 1 stays connected until all ranks have answered, so only its report can free the others.
        return "", 0.0
    started = time.monotonic()
    try:
        comm.all_gather(torch.ones(1))
    except RankFailure as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize(
    ("how", "word"),
    tiers(
        [("report", "rank 1 has had enough"), ("leave", "rank 1 has gone home")], [("report", "rank 1 has had enough")]
    ),
)
def test_word_of_a_failure_reaches_ranks_that_wait(how, word):
    results = run_ranks(3, failing, how, timeout=30)
    for text, seconds in (results[0], results[2]):
        assert text == word
        assert seconds < 3  # the group's timeout is 30


def session() -> Session:
    params = {"w": torch.zeros(4)}
    everyone = dist.group.WORLD
    return Session(lambda: params, method("topk"), ReducerOptions(), group=everyone, device=torch.device("cpu"))


def opened(rank: int) -> tuple[list[int], int]:
    """Return the bytes that `open_connections` sends to each rank, and the bytes that are counted."""
    mine, sent = session(), []
    send = mine.comm._all_to_all_v
    mine.comm._all_to_all_v = lambda x, sizes, receive: [sent.extend(sizes), send(x, sizes, receive)][1]
    mine.open_connections()
    return sent, mine.comm.sent_bytes


@pytest.mark.parametrize(("size", "nbytes"), [(2, 1 << 18), (5, 1 << 17)])
def test_ranks_send_enough_before_training_for_tcp_to_find_the_rate(size, nbytes):
    # Benchmark `opening`: after less, TCP's BBR sends short messages slowly for the whole training.
    assert run_ranks(size, opened) == [([nbytes] * size, 0)] * size


NCCL = SimpleNamespace(name=lambda: "nccl")


def failure_seen(rank: int) -> str:
    """Rank 1 fails while rank 0 waits for no exchange, perhaps in an all-reduce of DDP."""
    mine = session()
    if rank == 1:
        mine.fail(ValueError("no more data"))
    dist.barrier()
    mine.stream, mine.comm.group = "any", SimpleNamespace(_get_backend=lambda device: NCCL, abort=lambda: None)
    mine.look()
    return str(mine.error)


def test_over_nccl_a_failure_is_seen_outside_of_exchanges():
    assert "no more data" in run_ranks(2, failure_seen)[0]


def stuck(rank: int) -> list[str]:
    """Free a device that still waits after our collectives were aborted, in one of DDP."""
    mine, aborted = session(), list[str]()
    mine.stream, mine.comm.group = "any", SimpleNamespace(_get_backend=lambda device: NCCL, abort=lambda: None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sessions, "STUCK_SECONDS", 0.1)
        patched.setattr(sessions, "_is_idle", lambda device: False)
        patched.setattr(dist.ProcessGroup, "abort", lambda group: aborted.append(group.group_desc))
        mine.free_device()
    return aborted


def test_a_device_that_waits_in_a_collective_of_ddp_is_freed():
    assert run_ranks(1, stuck) == [["default_pg"]]


def launching(rank: int) -> list[int]:
    """Look at a failed rank while another thread launches collectives, and when it still does after a while."""
    mine, freed = session(), list[int]()
    mine.stream, mine.comm.group = "any", SimpleNamespace(_get_backend=lambda device: NCCL, abort=lambda: None)
    mine.free_device = lambda: freed.append(len(looks))
    mine.launching()
    mine.comm.mark_failed("Rank 1 failed")
    looks = [1]
    for _ in range(2):
        mine.look()
        looks.append(1)
    return freed


def test_a_communicator_is_not_freed_while_a_thread_begins_to_use_it():
    """NCCL would crash. If the thread is still there in the next look, it waits for the failed rank."""
    assert run_ranks(1, launching) == [[2]]


def left_alone(rank: int) -> bool:
    """Leave a group of NCCL that the other ranks of the node do not leave."""
    mine, others, ended = session(), threading.Event(), list[bool]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "over_nccl", property(lambda self: True))
        patched.setattr(sessions, "JOIN_SECONDS", 0.1)
        patched.setattr(dist, "destroy_process_group", lambda group: ended.append(others.wait(20)))
        mine.close()
    waited = bool(ended)
    others.set()
    return waited


def test_a_rank_does_not_wait_for_others_to_leave():
    assert run_ranks(1, left_alone) == [False]


def references_to_a_closed_group(rank: int) -> int:
    """Return the number of references to a session's group after its end, besides that of this function."""
    mine = session()
    group = mine.comm.group
    mine.close()
    return sys.getrefcount(group) - 2  # one is the argument


def test_a_closed_session_leaves_no_process_group_to_the_garbage_collection_of_a_forked_process():
    """There, the group's destructor would wait for threads of the parent: in a DataLoader's worker of a second fit."""
    assert run_ranks(1, references_to_a_closed_group) == [0]


def uncaught(rank: int) -> str:
    """Rank 1 ends by an error that nothing has reported, as a script does."""
    mine = session()
    if rank == 1:
        sys.last_value = ValueError("the disk is full")
        sessions._report_uncaught()
    dist.barrier()
    return mine.comm.peers.reported()


def test_an_error_that_ends_the_program_is_the_reason_of_other_ranks():
    assert all(text.endswith("ValueError: the disk is full") for text in run_ranks(2, uncaught))


def reported_twice(rank: int) -> tuple[int, int]:
    mine, error = session(), ValueError("the disk is full")
    group = dist.group.WORLD
    mine.fail(error)
    before = handshakes._attempts[group]
    handshakes.report_or_diagnose(error)
    reported = handshakes._attempts[group]
    handshakes.report_or_diagnose(ValueError("another one"))
    return reported - before, handshakes._attempts[group] - before


def test_an_error_that_a_session_has_reported_counts_no_handshake():
    """Other ranks count none for it, so the next handshakes would miss each other."""
    assert run_ranks(1, reported_twice) == [(0, 1)]


def shard() -> None:
    try:
        raise ConnectionResetError(104, "Connection reset by peer")
    except OSError as cause:
        raise RuntimeError("cannot read the shard") from cause


def worker_fails(rank: int, within: str) -> tuple[str, str]:
    """A DataLoader's worker loses its connection to a file server. Return the error's text before and afterwards."""
    try:
        shard()
    except RuntimeError:
        worker = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(RuntimeError) as raised:
        worker.reraise()
    error, before = raised.value, str(raised.value)
    if within == "a session":
        session().fail(error)
    else:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Handshake, "refusal", lambda self: "Rank 7 failed: ValueError")
            handshakes.report_or_diagnose(error)
    return before, str(error)


@pytest.mark.parametrize("within", ["a session", "an evaluation"])
def test_an_error_that_quotes_a_broken_connection_keeps_its_text(within):
    ((before, after),) = run_ranks(1, worker_fails, within)
    assert "Connection reset by peer" in before
    assert after == before


def collective_fails(rank: int) -> str:
    error = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp\nLast error:\nsocketProgress")
    session().fail(error)
    return str(error)


def test_a_broken_collective_is_explained_before_the_whole_text_of_torch():
    (text,) = run_ranks(1, collective_fails)
    assert text.startswith("All ranks have this error: look for")
    assert text.endswith("(NCCL error in: ProcessGroupNCCL.cpp\nLast error:\nsocketProgress)")


def last_exchange(rank: int, how: str) -> tuple[str, bool]:
    """Rank 1 has one exchange less than rank 0, and ends later. Rank 0's device waits, or is only slow."""
    mine = session()
    mine.comm.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(0.3)
    elif how == "fewer batches":
        mine.comm._counts.update(begun=1, done=1)  # of one more
        mine._done = lambda: False
    else:
        mine._done = iter([False, False, True]).__next__
    mine.mark_done()
    mine.finish(failed=False)
    return str(mine.error), mine.is_closed


@pytest.mark.parametrize("how", ["fewer batches", "slow"])
def test_a_device_that_waits_for_a_rank_with_fewer_batches_is_an_error_at_the_end(how):
    """With NCCL, the host does not wait. The store stands for the device here."""
    (text, closed), _ = run_ranks(2, last_exchange, how, timeout=30)
    assert closed
    reason = r"Rank 1 has ended training after 0 steps, while other ranks go on.*"
    assert re.fullmatch(reason if how == "fewer batches" else "None", text)


def met(rank: int) -> list[bool]:
    """Both ranks meet after the first fit, and only rank 0 after the second one, with another strategy."""
    rendezvous.MEET_SECONDS = 20.0  # rank 1 may start later
    first, second = rendezvous.Rendezvous(), rendezvous.Rendezvous()
    first.begin_run()
    results = [first.all_ranks_present()]
    first.end_fit()
    second.begin_run()
    rendezvous.MEET_SECONDS = 0.5
    return [*results, *([second.all_ranks_present()] if rank == 0 else [])]


def test_a_rank_does_not_meet_the_entries_of_an_earlier_fit():
    assert run_ranks(2, met)[0] == [True, False]


def met_elsewhere(rank: int) -> list[bool]:
    rendezvous.MEET_SECONDS = 20.0  # rank 1 may start later
    meeting = rendezvous.Rendezvous()
    present = meeting.all_ranks_present("end")
    rendezvous.MEET_SECONDS = 1.0
    return [present, meeting.all_ranks_present("end" if rank else "after an error")]


def test_ranks_in_different_places_do_not_meet():
    """They would take part in different collectives."""
    assert run_ranks(2, met_elsewhere) == [[True, False]] * 2


def counted(rank: int) -> tuple[int, int, list[float]]:
    groups = [dist.new_group(part) for part in ([0, 1], [2, 3])]
    comm = ProcessGroupComm(groups[rank // 2])
    ranks = [0, 1] if rank < 2 else [2, 3]
    comm.use(comm.group, Peers(comm.store, "session", rank, range(4), ranks))
    everyone = comm.of_all()
    found = everyone.all_gather(torch.tensor([float(rank)])).flatten().tolist()
    return comm._counts["done"], comm._counts["begun"], found


def test_a_part_counts_the_calls_of_all_ranks():
    """A rank that continues after such a call, and closes its exchange, has made it: no rank waits for it there."""
    assert run_ranks(4, counted) == [(1, 1, [0.0, 1.0, 2.0, 3.0])] * 4


def late_exchange(rank: int) -> float:
    comm = ProcessGroupComm()
    time.sleep(1.2 * rank)  # longer than a slice of waiting
    return comm.sendrecv(torch.tensor([float(rank)]), 1 - rank).item()


def test_exchange_with_a_peer_that_is_late():
    assert run_ranks(2, late_exchange) == [1.0, 0.0]


def maximum_with_nan(rank: int) -> float:
    return ProcessGroupComm().all_reduce(torch.tensor([float("nan") if rank else 1.0]), "max").item()


def test_a_nan_shows_in_the_maximum():
    assert run_ranks(2, maximum_with_nan) == [float("inf")] * 2


def test_a_wait_that_ends_just_after_its_limit():
    class Work:
        calls = 0

        def wait(self, *limit):
            self.calls += 1
            if limit:
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return True

    work = Work()
    assert ProcessGroupComm._gloo_waited(None, work)
    assert work.calls == 2


def test_a_peer_that_vanishes_is_an_error_that_says_so():
    def vanish(rank: int) -> str:
        import os

        comm = ProcessGroupComm()
        comm.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(1)
        try:
            comm.all_gather(torch.ones(1))
        except RankFailure as error:
            return str(error)
        return "no error"

    first, second = run_ranks(2, vanish)
    assert second is None
    assert "Rank 0 lost its peers" in first


def test_a_rank_that_does_not_answer_may_not_have_begun():
    """Rank 1 runs, but no thread replies before its first backward pass. The message must not call it dead."""

    def rank(rank: int) -> str:
        comm = ProcessGroupComm()
        if rank == 1:
            time.sleep(ANSWER_SECONDS + 1)
        text = comm.diagnose() if rank == 0 else ""
        comm.all_reduce(torch.ones(1))
        return text

    first, _ = run_ranks(2, rank)
    assert "No answer from rank 1: killed, ended, or frozen, or still before the first backward pass." in first


def test_ctrl_c_ends_all_ranks_before_simulate_does():
    """A thread that is in torch when the interpreter ends aborts the process."""
    ended = []

    def rank(comm):
        try:
            for step in range(1_000_000):
                comm.all_reduce(torch.ones(10))
                if comm.rank == 0 and step == 3:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        except RankFailure as error:
            ended.append(str(error))

    with pytest.raises(KeyboardInterrupt):
        simulate(3, rank)
    assert ended == ["Interrupted."] * 3


@pytest.mark.parametrize("killed", [True, False])
def test_a_killed_rank_is_named_although_torchrun_has_told_the_others_to_end(killed, monkeypatch):
    monkeypatch.setattr("lightning_sparse.comm.peers.ANSWER_SECONDS", 0.1)
    store, told = dist.HashStore(), "Rank 0 was told to end (SIGTERM)."
    peers = Peers(store, "group", 0, range(2))
    store.set(peers.terminating, told)
    if not killed:
        store.set(f"{peers._request}/1", "running")
    text = peers.diagnose(1)
    assert text.endswith(told)
    assert text.startswith("No answer from rank 1: killed" if killed else told)


class Frozen:
    """A store whose host is frozen until `thaw` is set."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.get, self.set, self._check = store.get, store.set, store.check
        self.thaw, self.calls = threading.Event(), 0

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        self.thaw.wait(30)
        return self._check(keys)


def test_a_store_that_is_frozen_is_waited_for_only_for_a_while(monkeypatch):
    monkeypatch.setattr("lightning_sparse.comm.peers.ANSWER_SECONDS", 0.1)
    store = Frozen()
    peers = Peers(store, "group", 1, range(2))
    for _ in range(3):
        peers.raise_if_failed(calls=1)  # the collective itself times out
        peers.respond()
    assert "Rank 1 gets no answer from the store" in peers.diagnose(1)
    assert store.calls == 1, "one thread waits for it, not one for each call"
    store.thaw.set()
    deadline = time.monotonic() + 20
    while "No answer from rank 0" not in peers.diagnose(1):
        assert time.monotonic() < deadline


class Gone:
    """A store whose host has ended."""

    calls = 0

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_is_asked_for_failed_ranks_no_more():
    """torch prints a screen of its calls each time."""
    store = Gone()
    peers = Peers(store, "group", 1, range(2))
    for _ in range(3):
        peers.respond()
    assert store.calls == 1


def test_a_reason_that_the_store_would_reject_is_cut():
    """torch's store takes 8 MiB at most."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peers = Peers(store, "group", 0, range(2))
    peers.mark_failed("The reason. " + "x" * (9 << 20))
    assert peers.reported().startswith("The reason. xx")
