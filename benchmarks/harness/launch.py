"""A process for each rank, on hosts behind shaped links or on loopback, and the records that rank 0 writes."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.shaped_links import INTERFACE, ShapedLinks, bits_per_second

# One thread each, as with more ranks than processors any other number is worse. And memory that is freed stays with the
# process: by default glibc hands large blocks back to the kernel or not depending on what ran before, and the page
# faults that follow make the same step 60 to 90 ms long on one core.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
ROOT = Path(__file__).parents[2]
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TRIES, TOLERANCE = 3, 0.10
"""Calibrations before links count as wrong, as whatever else runs for a moment makes them slower; and how far off."""

Record = dict[str, Any]


class Hosts(NamedTuple):
    """Where ranks run."""

    popen: Callable[..., subprocess.Popen[str]]  # starts a process of a rank, with options of `subprocess.Popen`
    env: dict[str, str]  # by which the ranks find each other
    calibration: list[Record]  # a row per measurement of the links; empty on loopback
    links: str  # their description, for a table


@contextlib.contextmanager
def hosts(
    workers: int, rate: str, *, ranks_per_host: int = 1, dilate: float = 1, calibrate: bool = True
) -> Iterator[Hosts]:
    """Make hosts for a number of ranks, calibrated.

    The rate of the links is as tc writes it, or "loopback": one host, unshaped. Links have a `dilate`th part of it, and
    some ranks may share one.
    """
    if rate == "loopback":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": LOOPBACK}
        yield Hosts(lambda rank, argv, **options: subprocess.Popen(argv, text=True, **options), address, [], "none")
        return
    slowed = f"{bits_per_second(rate) / dilate / 1e3:g}kbit" if dilate != 1 else rate
    with ShapedLinks(workers // ranks_per_host, slowed) as links:
        yield Hosts(
            lambda rank, argv, **options: links.popen(rank // ranks_per_host, argv, **options),
            {"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE},
            calibrated(links) if calibrate else [],
            f"tbf {links.burst}, {links.congestion_control}",
        )


def calibrated(links: ShapedLinks) -> list[Record]:
    """Measure links; print each try, and return what was found in the first in which all are close to their rate."""
    for _ in range(TRIES):
        rows = [{"rate": links.rate, "burst": links.burst, **row} for row in links.calibrate()]
        for row in rows:
            print(
                "  {probe}: {payload_mbit_per_s:.0f} Mbit/s of payload, {ratio_to_expected} of expected".format(**row)
            )
        if all(abs(row["ratio_to_expected"] - 1) <= TOLERANCE for row in rows):
            return rows
    raise SystemExit(
        f"The {links.rate} links are more than {TOLERANCE:.0%} off in {TRIES} tries, so nothing is measured. Is there "
        f"another load on the machine, or is the rate beyond what its processors move?"
    )


def launch(
    module: str,
    job: Record,
    where: Hosts,
    workers: int,
    patience: float = 3600,
    on_record: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], str | None]:
    """Run `python -m module <job as JSON>` on every rank, until all end or one fails.

    Ranks append records to the file `job["out"]`, see `ranks.write`; `on_record` is called with each as it comes. After
    `patience` seconds without a new one the ranks count as hung. Returns the records, and why the ranks ended early,
    None if they did not.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out, logs = Path(folder, "records"), [Path(folder, f"rank{rank}") for rank in range(workers)]
        out.touch()
        argv = [sys.executable, "-m", module, json.dumps({**job, "out": str(out)})]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        env = {**ENVIRONMENT, **os.environ, **where.env, "PYTHONPATH": path, "WORLD_SIZE": str(workers)}
        processes, records = [], []
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                processes.append(where.popen(rank, argv, env={**env, "RANK": str(rank)}, stderr=file))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        news, running = time.monotonic(), True
        while running:
            time.sleep(0.1)
            states = [process.poll() for process in processes]
            running = None in states
            for line in out.read_text().splitlines()[len(records) :]:
                records.append(json.loads(line))
                on_record(records[-1])
                news = time.monotonic()
            if any(states):
                # One rank knows the reason and the others only miss it, in whatever order they end: show all.
                time.sleep(2)
                last = [(log.read_text().strip().splitlines() or ["no message"])[-1] for log in logs]
                ends = zip(processes, last, strict=True)
                return records, "".join(
                    f"\n    rank {rank} (status {process.poll()}): {line}" for rank, (process, line) in enumerate(ends)
                )
            if running and time.monotonic() - news > patience:
                return records, f"no news for {patience:g} s"
        return records, None


def run_ranks(module: str, job: Record, workers: int, rate: str = "loopback") -> tuple[list[Record], list[Record]]:
    """Run `work(job)` of a module on every rank; return the records, and what was found of the links.

    Raises:
        SystemExit: a rank fails.
    """
    with hosts(workers, rate) as where:
        records, reason = launch("benchmarks.harness.ranks", {**job, "module": module}, where, workers)
    if reason:
        raise SystemExit(f"The ranks ended early: {reason}")
    return records, where.calibration
