"""The thread that exchanges in parallel with the training thread, and calls in a thread."""

import threading

import pytest

from lightning_sparse.comm.store import in_thread
from lightning_sparse.comm.worker import Worker


def broken(*_: object) -> None:
    raise ArithmeticError("no report")


def test_an_error_of_the_report_leaves_no_work_pending():
    """The training thread waits for all items, and gets the first error."""
    worker = Worker(failed=broken)
    first, second = worker.submit(lambda: 1 // 0), worker.submit(print)
    for future in (first, second):
        with pytest.raises(ZeroDivisionError):
            future.result(20)
    worker.join()
    worker.end()


def test_skipped_and_late_work_ends_with_an_error():
    worker = Worker()
    worker._is_dropping = True
    skipped = worker.submit(print)
    assert isinstance(skipped.exception(20), RuntimeError)
    worker.end()
    failed = []
    worker.submit(print).add_done_callback(lambda done: failed.append(done.exception()))
    assert "The exchange was closed" in str(failed)


def test_the_garbage_collector_may_end_the_worker_within_its_own_wait():
    """The thread holds the queue's lock there."""
    ended, worker = threading.Event(), Worker()

    def collect() -> None:
        with worker._queue.mutex:
            worker.end(lambda is_alive: ended.set())

    worker.submit(collect)
    assert ended.wait(20)


def test_the_thread_ends_itself_after_pending_work():
    done, worker, begin = [], Worker(), threading.Event()
    worker.submit(begin.wait)
    worker.submit(lambda: worker.end(lambda is_alive: done.append(is_alive)))
    worker.submit(lambda: done.append("work"))
    thread = worker._thread
    begin.set()
    thread.join(20)
    assert done == ["work", False]


def test_while_the_interpreter_exits_a_call_runs_in_the_same_thread(monkeypatch):
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert in_thread(threading.current_thread, "name").result(0) is threading.current_thread()
