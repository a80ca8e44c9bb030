"""Starts one process per rank, on hosts behind shaped links or on loopback, and provides functions for these processes.

`run_ranks` starts them as `python -m benchmarks.harness.launch JOB`, and returns the records that rank 0 writes.
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.shaped_links import INTERFACE, ShapedLinks, round_trip
from benchmarks.harness.timing import elapsed_ms, spent

# Each rank uses one thread, because more threads are slower if there are more ranks than cores. Freed memory stays with
# the process. By default, glibc returns large blocks to the kernel or keeps them, depending on earlier allocations. The
# resulting page faults make the same step 60 to 90 ms long on one core.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
ROOT = Path(__file__).parents[2]
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TRIES, TOLERANCE = 3, 0.10
"""Number of calibrations before links are rejected, and their largest relative error. A short load slows links down."""

Record = dict[str, Any]


class Hosts(NamedTuple):
    """The hosts of the ranks."""

    popen: Callable[..., subprocess.Popen[str]]  # starts a process of a rank, with options of `subprocess.Popen`
    env: dict[str, str]  # environment with which the ranks find each other
    calibration: list[Record]  # one row per measurement of the links; empty on loopback
    links: str  # description of the links for a table


@contextlib.contextmanager
def hosts(workers: int, rate: str, *, ranks_per_host: int = 1, calibrate: bool = True) -> Iterator[Hosts]:
    """Create hosts for a number of ranks; several ranks may share a host.

    The rate of the links is in tc's notation, or "loopback" for one host without shaping.
    """
    if rate == "loopback":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": LOOPBACK}
        yield Hosts(lambda rank, argv, **options: subprocess.Popen(argv, text=True, **options), address, [], "none")
        return
    with ShapedLinks(workers // ranks_per_host, rate, not torch.cuda.is_available()) as links:
        yield Hosts(
            lambda rank, argv, **options: links.popen(rank // ranks_per_host, argv, **options),
            {"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE},
            calibrated(links) if calibrate else [],
            f"{'carried' if round_trip(rate) else f'tbf {links.burst}'}, {links.congestion_control}",
        )


def calibrated(links: ShapedLinks) -> list[Record]:
    """Measure links, print each try, and return the results of the first try in which all are close to their rate."""
    for _ in range(TRIES):
        rows = [{"rate": links.rate, "burst": links.burst, **row} for row in links.calibrate()]
        for row in rows:
            print(f"  {row['probe']}: {row['payload_mbit_per_s']} Mbit/s, {row['ratio_to_expected']} of expected")
        if all(abs(row["ratio_to_expected"] - 1) <= TOLERANCE for row in rows):
            return rows
    raise SystemExit(
        f"The {links.rate} links are more than {TOLERANCE:.0%} off in {TRIES} tries, so nothing is measured. Either "
        f"other programs load the machine, or the rate is too high for its processors."
    )


class RanksFailed(SystemExit):
    """Ranks ended early or hang. The program exits unless it handles this error."""


def launch(module: str, job: Record, where: Hosts, workers: int, patience: float = 3600) -> Iterator[Record]:
    """Run `python -m module <job as JSON>` on every rank; yield the records that rank 0 writes to `job["out"]`.

    Raises:
        RanksFailed: a rank failed, or there was no new record for `patience` seconds.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out, logs = Path(folder, "records"), [Path(folder, f"rank{rank}") for rank in range(workers)]
        out.touch()
        argv = [sys.executable, "-m", module, json.dumps({**job, "out": str(out)})]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        env = {**ENVIRONMENT, **os.environ, **where.env, "PYTHONPATH": path, "WORLD_SIZE": str(workers)}
        processes = []
        alive, held = os.pipe()  # nothing is written; it closes when this process ends, even by a signal
        stack.callback(os.close, alive)
        stack.callback(os.close, held)
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                environment = {**env, "RANK": str(rank)}
                processes.append(where.popen(rank, argv, env=environment, stdin=alive, stderr=file))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        count, news, states = 0, time.monotonic(), [None]
        while None in states:
            time.sleep(0.1)
            states = [process.poll() for process in processes]
            for line in out.read_text().splitlines()[count:]:
                yield json.loads(line)
                count, news = count + 1, time.monotonic()
            if any(states):
                # One rank knows the reason, the others only lost their connection to it. Ranks end in any order, so
                # show the messages of all.
                time.sleep(2)
                ends = [(log.read_text().strip().splitlines() or ["no message"])[-1] for log in logs]
                states = [process.poll() for process in processes]
                ends = [f"rank {rank} (status {states[rank]}): {end}" for rank, end in enumerate(ends)]
                raise RanksFailed("\n    ".join(["Ranks ended early:", *ends]))
            if None in states and time.monotonic() - news > patience:
                raise RanksFailed(f"Ranks hang: no news for {patience:g} s.")


def run_ranks(
    module: str, job: Record, workers: int, rate: str = "loopback", ranks_per_host: int = 1
) -> tuple[list[Record], list[Record]]:
    """Run `work(job)` of a module on every rank; return the records and the calibration of the links."""
    with hosts(workers, rate, ranks_per_host=ranks_per_host) as where:
        records = list(launch("benchmarks.harness.launch", {**job, "module": module}, where, workers))
    return records, where.calibration


class WrongResult(RuntimeError):
    """A method computes a wrong result, so its time is meaningless."""


def write(out: str, **record: Any) -> None:
    """Append a record to the job's results, on rank 0 only."""
    if dist.get_rank() == 0:
        with Path(out).open("a") as file:
            file.write(json.dumps(record) + "\n")


def gather(value: Any) -> list[Any]:
    """Return every rank's `value`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def timed(step: Callable[[], object], count: int) -> dict[str, Any]:
    """Run `count` steps on all ranks; return milliseconds of each, and mean bytes and processor time per step."""
    dist.barrier()
    before = spent()
    times = [elapsed_ms(step) for _ in range(count)]
    dist.barrier()
    seconds, own, machine, transmitted = (spent() - before).tolist()
    all_times, all_own, all_transmitted = zip(*gather((times, own, transmitted)), strict=True)
    return {
        # A step ends when its slowest rank ends.
        "ms": [max(column) for column in zip(*all_times, strict=True)],
        "tx_bytes": max(all_transmitted) / count,
        "cpu_ms": 1e3 * sum(all_own) / len(all_own) / count,
        # Share of the processors that other programs used.
        "foreign_load": max(0.0, machine - sum(all_own)) / (seconds * (os.cpu_count() or 1)),
    }


def check_weights(model: nn.Module) -> None:
    """Raise WrongResult unless all ranks have identical weights, bit by bit."""
    checksum = 0
    for param in model.parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param  # of a sharded model
        checksum = zlib.crc32(whole.detach().cpu().numpy().data, checksum)
    checksums = gather(checksum)
    if len(set(checksums)) > 1:
        raise WrongResult(f"the ranks' weights differ: checksums {checksums}")


def _end_with_parent() -> None:
    """End this process together with the process of `launch`."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":  # a rank
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    importlib.import_module(job["module"]).work(job)
    dist.barrier()  # one of the ranks hosts the store
    dist.destroy_process_group()
