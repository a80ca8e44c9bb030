"""Real ranks for tests: processes over gloo, forked by default."""

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist


def reserve_port() -> socket.socket:
    """Return a socket whose port no other process gets by chance until the socket is closed, as tests run in parallel.

    It is bound and does not listen, and reuses the address as torch's store does: rank 0 can still bind the port.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def free_port() -> int:
    with reserve_port() as holder:
        return int(holder.getsockname()[1])


def run_program(command: Sequence[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program that starts ranks itself. They connect at a port that no other process gets by chance."""
    with reserve_port() as holder:
        env = {**env, "MASTER_PORT": str(holder.getsockname()[1])}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def run_script(script: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a Python file that starts ranks, in a forked process. A fork has imported torch, which takes seconds."""
    with reserve_port() as holder, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        port = str(holder.getsockname()[1])
        process = multiprocessing.get_context("fork").Process(
            target=_script, args=(script, arguments, port, out.fileno(), err.fileno())
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        for file in (out, err):
            file.seek(0)
        assert process.exitcode is not None
        return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, out.read(), err.read())


def _script(script: Path, arguments: Sequence[str], port: str, out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()  # pytest's
    for name in logging.root.manager.loggerDict:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    # Since torch 2.14 it counts as a use of CUDA that tests have asked for GPUs, and Lightning then refuses to fork.
    torch.cuda._is_in_bad_fork = lambda: False
    os.environ.update(MASTER_PORT=port)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


FIRST = os.getpid()
"""The process that imports this module: pytest."""


def _leave_garbage() -> None:
    if os.getppid() == FIRST:  # of pytest, but not of a rank: users' processes collect garbage
        gc.freeze()
    gc.enable()


# A forked process never collects its parent's garbage, also not before its first line. Otherwise the destructor of a
# process group would wait for threads that only the parent has.
os.register_at_fork(before=gc.disable, after_in_parent=gc.enable, after_in_child=_leave_garbage)


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    patience: float = 300,
    timeout: float = 30,
    start: str = "fork",
    backend: str | None = "gloo",
) -> list[Any]:
    """Run `fn(rank, *args)` in `size` processes that share a process group.

    Args:
        size: number of ranks.
        fn: called in each process, with torch.distributed initialised.
        patience: seconds after which the test fails, because a rank hangs.
        timeout: the group's, in seconds.
        start: "fork"; or "spawn" if forked processes cannot work, as on CUDA. With "spawn", `fn` must be in a module.
        backend: backend of the group; None: `fn` creates the group.

    Returns:
        For each rank, the result of `fn` or its exception; None for a process that died.
    """
    context = multiprocessing.get_context(start)
    holder = reserve_port()
    port = int(holder.getsockname()[1])
    listening, done = context.Event(), context.Event()
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    inherited = pipes if start == "fork" else []
    processes = [
        context.Process(
            target=_rank,
            args=(rank, size, port, backend, timeout, inherited, pipes[rank][1], listening, done, patience, fn, args),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, writing in pipes:
        writing.close()
    results: list[Any] = []
    try:
        for rank, (reading, _) in enumerate(pipes):
            assert reading.poll(patience), f"rank {rank} of {size} hangs"
            try:
                results.append(pickle.loads(reading.recv_bytes()))
            except EOFError:
                results.append(None)
    finally:
        holder.close()
        done.set()
        for process in processes:
            process.join(2 if len(results) == size else 0)
            process.kill()
    return results


def _rank(
    rank: int,
    size: int,
    port: int,
    backend: str | None,
    timeout: float,
    inherited: Any,
    answer: Any,
    listening: Any,
    done: Any,
    patience: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    for other, (_, writing) in enumerate(inherited):
        if other != rank:
            writing.close()  # or the end of a rank that dies would go unnoticed
    faulthandler.dump_traceback_later(0.95 * patience, file=sys.__stderr__)  # shows the place at which a rank hangs
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    try:
        if backend is not None:
            if rank:  # if a client finds no server, it waits before it tries again: up to 5 s
                listening.wait(timeout)
            limit = timedelta(seconds=timeout)
            store = dist.TCPStore("127.0.0.1", port, size, rank == 0, limit, wait_for_workers=False, multi_tenant=True)
            listening.set()
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        result = fn(rank, *args)
    except BaseException as error:
        traceback.print_exc()
        result = error
    try:
        data = pickle.dumps(result)
    except Exception:  # an exception that cannot be pickled
        data = pickle.dumps(RuntimeError(repr(result)))
    faulthandler.cancel_dump_traceback_later()
    answer.send_bytes(data)
    done.wait(patience)  # leave together: one rank hosts the store
    os._exit(0)
