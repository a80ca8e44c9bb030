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

from benchmarks.harness.shaped_links import INTERFACE, Probe, ShapedLinks, bits_per_second

# One thread each, as with more ranks than processors any other number is worse. And memory that is freed stays with the
# process: by default glibc hands large blocks back to the kernel or not depending on what ran before, and the page
# faults that follow make the same step 60 to 90 ms long on one core.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}

ROOT = Path(__file__).parents[2]

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

Record = dict[str, Any]

TRIES = 3
"""Calibrations of a link before it counts as wrong: whatever else runs for a moment makes it slower."""


class Hosts(NamedTuple):
    """Where ranks run.

    Attributes:
        popen: starts a process of a rank, with options of `subprocess.Popen`.
        env: environment by which the ranks find each other.
        calibration: a row per measurement of the links; empty on loopback.
        links: description of the links, for a table.
    """

    popen: Callable[..., subprocess.Popen[str]]
    env: dict[str, str]
    calibration: list[Record]
    links: str


@contextlib.contextmanager
def hosts(
    workers: int, rate: str, *, ranks_per_host: int = 1, dilate: float = 1, calibrate: bool = True
) -> Iterator[Hosts]:
    """Make hosts for a number of ranks.

    Args:
        workers: number of ranks.
        rate: of the links, as tc writes it, or "loopback": one host, unshaped.
        ranks_per_host: how many ranks share a link.
        dilate: the links have this part of the rate.
        calibrate: measure the links first.

    Raises:
        SystemExit: a link is more than 10 % off its rate each time, of `TRIES`.
    """
    if rate == "loopback":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": LOOPBACK}
        yield Hosts(lambda rank, argv, **options: subprocess.Popen(argv, text=True, **options), address, [], "none")
        return
    slowed = f"{bits_per_second(rate) / dilate / 1e3:g}kbit" if dilate != 1 else rate
    with ShapedLinks(workers // ranks_per_host, slowed) as links:
        probes: list[Probe] = []
        for _ in range(TRIES if calibrate else 0):
            probes = links.calibrate()
            for probe in probes:
                print(f"  {probe.name}: {probe.goodput / 1e6:.0f} Mbit/s of payload, {probe.ratio:.3f} of expected")
            if all(probe.ok for probe in probes):
                break
        if wrong := [f"{probe.name}: {probe.ratio:.2f}" for probe in probes if not probe.ok]:
            raise SystemExit(
                f"The {slowed} links are more than 10 % off in {TRIES} tries ({', '.join(wrong)} of what they should "
                f"carry), so nothing is measured. Is there another load on the machine, or is the rate beyond what its "
                f"processors move?"
            )
        yield Hosts(
            lambda rank, argv, **options: links.popen(rank // ranks_per_host, argv, **options),
            {"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE},
            [{"rate": slowed, "burst": links.burst, **probe.row()} for probe in probes],
            f"tbf {links.burst}, {links.congestion_control}",
        )


def launch(
    module: str,
    job: Record,
    where: Hosts,
    workers: int,
    patience: float = 3600,
    on_record: Callable[[Record], None] = lambda record: None,
) -> tuple[list[Record], str | None]:
    """Run `python -m module <job as JSON>` on every rank.

    Args:
        module: its ranks append records to the file `job["out"]`, see `ranks.write`.
        job: what they are asked to do.
        where: they run.
        workers: number of ranks.
        patience: seconds without a new record after which the ranks count as hung.
        on_record: called with each record as it comes.

    Returns:
        The records, and why the ranks ended early; None if they did not.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "records")
        out.touch()
        argv = [sys.executable, "-m", module, json.dumps({**job, "out": str(out)})]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        env = {**ENVIRONMENT, **os.environ, **where.env, "PYTHONPATH": path, "WORLD_SIZE": str(workers)}
        logs = [Path(folder, f"rank{rank}") for rank in range(workers)]
        processes = []
        records: list[Record] = []
        reason, news, running = None, time.monotonic(), True
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as file:
                    processes.append(where.popen(rank, argv, env={**env, "RANK": str(rank)}, stderr=file))
            while running and reason is None:
                time.sleep(0.1)
                states = [process.poll() for process in processes]
                running = None in states and not any(states)
                for line in out.read_text().splitlines()[len(records) :]:
                    records.append(json.loads(line))
                    on_record(records[-1])
                    news = time.monotonic()
                if any(states):
                    # One rank knows the reason and the others only miss it, in whatever order they end: show all.
                    time.sleep(2)
                    last = [(log.read_text().strip().splitlines() or ["no message"])[-1] for log in logs]
                    reason = "".join(
                        f"\n    rank {rank} (status {process.poll()}): {last[rank]}"
                        for rank, process in enumerate(processes)
                    )
                elif running and time.monotonic() - news > patience:
                    reason = f"no news for {patience:g} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return records, reason


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
