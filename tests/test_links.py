"""Imitated links: rates, and that nothing of them stays behind."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.harness.shaped_links import (
    PAYLOAD_SHARE,
    PREFIX,
    Probe,
    ShapedLinks,
    bits_per_second,
    burst,
    missing,
    stale,
)

REASON = missing()
needs_links = pytest.mark.skipif(REASON is not None, reason=f"no imitated links here: {REASON}")


def namespaces(pid: int) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(f"{PREFIX}{pid}-")]


def test_rates_are_read_as_tc_writes_them() -> None:
    assert bits_per_second("100mbit") == 1e8
    assert bits_per_second("2.5gbit") == 2.5e9
    with pytest.raises(ValueError, match="'fast' is not a rate"):
        bits_per_second("fast")
    assert [burst(rate) for rate in ("100mbit", "1gbit", "10gbit")] == ["16kb", "64kb", "512kb"]


def test_probe_compares_payload_with_what_full_frames_leave() -> None:
    ideal = Probe("20 MB", "1gbit", 20_000_000, 0.16 / PAYLOAD_SHARE)
    assert ideal.ratio == pytest.approx(1)
    assert ideal.ok
    assert not Probe("20 MB", "1gbit", 20_000_000, 0.16 / PAYLOAD_SHARE / 1.2).ok


@needs_links
def test_links_slow_every_transfer_down_and_disappear_after_an_error() -> None:
    started = []

    def fail() -> None:
        with ShapedLinks(3, "500mbit") as links:
            # Other load on the machine may slow transfers down further, but nothing may exceed the rate.
            assert all(0.2 < probe.ratio < 1.2 for probe in links.calibrate())
            started.append(links.popen(1, ["sleep", "100"]))
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        fail()
    assert started[0].returncode == -signal.SIGTERM
    assert namespaces(os.getpid()) == []


@needs_links
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_links_disappear_when_their_program_is_told_to_stop(number: signal.Signals) -> None:
    script = """
        import time
        from benchmarks.harness.shaped_links import ShapedLinks
        with ShapedLinks(2, "1gbit") as links:
            print(links.popen(0, ["sleep", "100"]).pid, flush=True)
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
    sleeper = int(program.stdout.readline())
    assert len(namespaces(program.pid)) == 3
    program.send_signal(number)
    program.wait(timeout=30)
    program.stdout.close()
    assert namespaces(program.pid) == []
    assert not Path(f"/proc/{sleeper}").exists()


@needs_links
def test_links_remove_what_a_killed_program_left_behind() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"{PREFIX}{dead.pid}-0-host0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    sleeper = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "100"])
    assert name in stale()
    with ShapedLinks(2, "1gbit"):
        assert sleeper.wait(timeout=10) == -signal.SIGTERM
        assert namespaces(dead.pid) == []
