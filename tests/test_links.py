"""Emulated links have their rates, and leave nothing behind."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.harness.launch import calibrated
from benchmarks.harness.shaped_links import (
    PAYLOAD_SHARE,
    ShapedLinks,
    bits_per_second,
    burst,
    missing,
    probe,
    round_trip,
)
from tests.support.tiers import full, in_full

REASON = missing()
needs_links = pytest.mark.skipif(REASON is not None, reason=f"no imitated links here: {REASON}")


STUBBORN = ["sh", "-c", "trap '' TERM HUP INT; setsid sleep 100 & readlink /proc/self/ns/net; wait"]
"""A program that ignores signals and starts another program in a new session. It prints its namespace."""


def inhabitants(namespace: str) -> list[str]:
    """Return the processes in a network namespace as `readlink` names it. It ends with the last of them."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # one that has just ended, or is not ours
            found += [link.parts[2]] if os.readlink(link) == namespace else []
    return found


def remaining(namespace: str, expected: int) -> int:
    """Return the number of processes in a namespace, when it is as expected or after ten seconds."""
    deadline = time.monotonic() + 10
    while (count := len(inhabitants(namespace))) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return count


def test_rates_are_read_as_tc_writes_them() -> None:
    assert bits_per_second("100mbit") == 1e8
    assert bits_per_second("2.5gbit") == 2.5e9
    assert (bits_per_second("100mbit 50ms"), round_trip("100mbit 50ms"), round_trip("1gbit")) == (1e8, 0.05, 0)
    with pytest.raises(ValueError, match="'fast' is not a rate"):
        bits_per_second("fast")
    assert [burst(rate) for rate in ("100mbit", "1gbit", "10gbit")] == ["16kb", "64kb", "512kb"]


def test_probe_compares_payload_with_what_full_frames_leave() -> None:
    assert probe("20 MB", "1gbit", 20_000_000, 0.16 / PAYLOAD_SHARE)["ratio_to_expected"] == 1
    assert probe("20 MB", "1gbit", 20_000_000, 0.16 / PAYLOAD_SHARE / 1.2)["ratio_to_expected"] == 1.2


def test_links_off_their_rate_are_measured_again_and_given_up_in_the_end() -> None:
    class Links:
        rate, burst = "1gbit", "64kb"

        def __init__(self, *ratios: float) -> None:
            self.ratios = list(ratios)

        def calibrate(self) -> list[dict[str, float | str]]:
            return [{"probe": "20 MB", "payload_mbit_per_s": 1.0, "ratio_to_expected": self.ratios.pop(0)}]

    assert [row["ratio_to_expected"] for row in calibrated(Links(0.8, 1.05))] == [1.05]
    with pytest.raises(SystemExit, match="more than 10% off in 3 tries"):
        calibrated(Links(0.8, 1.2, 0.89, 1.0))


@full
@needs_links
def test_links_slow_every_transfer_down_and_disappear_after_an_error() -> None:
    started = []

    def fail() -> None:
        with ShapedLinks(3, "500mbit") as links:
            # Other load on the machine may slow transfers down further, but nothing may exceed the rate.
            assert all(0.2 < row["ratio_to_expected"] < 1.2 for row in links.calibrate())
            started.append(links.popen(1, STUBBORN, stdout=subprocess.PIPE))
            started.append(started[0].stdout.readline().strip())
            assert len(inhabitants(started[1])) >= 3
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fail()
    program, namespace = started
    program.stdout.close()
    assert program.returncode == -signal.SIGKILL
    assert inhabitants(namespace) == []


@full
@needs_links
def test_packets_are_carried_for_as_long_as_is_said() -> None:
    with ShapedLinks(3, "20mbit 40ms") as links:
        assert links._carrier is not None
        receiver = links._end("receive", 0)
        receiver.stdout.readline()
        start = math.ceil(time.monotonic() + 0.5)
        sizes = 500_000, 1_000_000  # bytes from two hosts to one, which go over one link: 0.6 s
        ends = [links._end("send", host, size, 1, 1, start) for host, size in enumerate(sizes, 1)]
        assert 0.6 < max(json.loads(end.communicate(timeout=60)[0])[0] for end in ends) < 10
        receiver.terminate()
        receiver.communicate()
    assert links._carrier.poll() is not None
    with ShapedLinks(2, "20mbit 40ms") as links:
        (found,) = links.calibrate()
        assert 1 <= found["ratio_to_expected"] < 3  # another load makes it longer


@full
@needs_links
def test_terminating_what_popen_returned_ends_the_program() -> None:
    with ShapedLinks(2, "1gbit") as links:
        script = "trap '' TERM; readlink /proc/self/ns/net; exec sleep 100"
        program = links.popen(0, ["sh", "-c", script], stdout=subprocess.PIPE)
        namespace = program.stdout.readline().strip()
        program.terminate()
        program.communicate()  # ends with the program, which holds the other end
        assert remaining(namespace, 2) == 2  # which hold the namespaces


@needs_links
@pytest.mark.parametrize("rate", ["1gbit", *in_full("1gbit 20ms")])
@pytest.mark.parametrize("number", [signal.SIGTERM, *in_full(signal.SIGINT, signal.SIGKILL)])
def test_links_disappear_when_their_program_is_stopped(number: signal.Signals, rate: str) -> None:
    script = f"""
        import time
        from benchmarks.harness.shaped_links import ShapedLinks
        with ShapedLinks(2, {rate!r}) as links:
            print(links._carrier.pid if links._carrier else 0, flush=True)
            links.popen(0, {STUBBORN})
            time.sleep(100)
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout is not None
    carrier = int(program.stdout.readline())
    assert (carrier > 0) == (rate != "1gbit")
    namespace = program.stdout.readline().strip()
    assert len(inhabitants(namespace)) >= 3
    program.send_signal(number)
    program.wait(timeout=30)
    program.stdout.read()  # ends with the last process on the host, which has the other end
    program.stdout.close()
    deadline = time.monotonic() + 10
    while carrier and Path(f"/proc/{carrier}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not carrier or not Path(f"/proc/{carrier}").exists()
    assert remaining(namespace, 0) == 0


SLEEPER = """
import os, time
from benchmarks.harness.launch import gather, write

def work(job):
    write(job["out"], pids=gather(os.getpid()))
    time.sleep(100)
"""
DRIVER = """
from benchmarks.harness.launch import hosts, launch

with hosts(2, "loopback") as where:
    for record in launch("benchmarks.harness.launch", {"module": "sleeper"}, where, 2):
        print(*record["pids"], flush=True)
"""


@full
def test_ranks_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path)])
    argv = [sys.executable, "-c", DRIVER]
    driver = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        ranks = [Path("/proc", pid) for pid in driver.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(rank.exists() for rank in ranks)
        driver.kill()
        deadline = time.monotonic() + 30
        while any(rank.exists() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(rank.exists() for rank in ranks)
