"""Creates several hosts with slow links on one machine, from Linux network namespaces.

    with ShapedLinks(hosts=4, rate="1gbit") as links:
        print(links.calibrate())
        worker = links.popen(0, [sys.executable, "train.py"])

Each host is a namespace with one interface, `eth0`. The other end of its veth pair is a port of a bridge in a separate
namespace, without access to any other network. A token bucket (`tc … tbf`) shapes both ends of each pair. Shaping one
end would not limit the total traffic from several hosts to one host.

If the rate includes a round trip, such as "100mbit 50ms", the interfaces are tun devices. A program carries packets
between them and delays each packet. So this works without `netem`, which not every kernel has.

The namespaces have no names. Each host's namespaces hold a `cat`, the first process of its process namespace. The `cat`
ends when this program closes its input or ends, even by SIGKILL. The kernel then ends every process on the host, and
removes the links.

Requires root, `ip`, `tc` and util-linux. This module imports only the standard library, because it is also a program:
calibration runs `python shaped_links.py receive …` and `python shaped_links.py send …` on the hosts, and `python
shaped_links.py carry …` carries packets.
"""

import contextlib
import fcntl
import heapq
import json
import math
import os
import re
import select
import shutil
import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, final

INTERFACE = "eth0"
# The shaper counts 1514 bytes for a full frame, of which TCP with time stamps leaves 1448 to the application.
PAYLOAD_SHARE = 1448 / 1514
_PORT = 29400
QUEUE = 0.1
"""Longest time in seconds that a packet waits for a link before it is dropped."""


def bits_per_second(rate: str) -> float:
    """Parse a rate in `tc`'s notation: a number followed by kbit, mbit or gbit."""
    return _read(rate)[0]


def round_trip(rate: str) -> float:
    """Return the round-trip time in seconds from a rate such as "100mbit 50ms"; 0 if the rate has none."""
    return _read(rate)[1]


def _read(rate: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit(?: (\d+)ms)?", rate)
    if not match:
        raise ValueError(f"rate={rate!r} is not a rate; write it as 100mbit or 1gbit, or 100mbit 50ms.")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]], int(match[3] or 0) / 1e3


def burst(rate: str) -> str:
    """Choose the token bucket's size: the amount of data that passes at full speed after a pause."""
    # It must be large enough for the timer to sustain the rate, and small compared with one step's traffic. With 512 KB
    # at 1 Gbit/s, a whole sparse step of 0.6 MB would pass nearly unshaped.
    limits = ((100e6, "16kb"), (500e6, "32kb"), (1e9, "64kb"))
    return next((size for limit, size in limits if bits_per_second(rate) <= limit), "512kb")


def shape(rate: str) -> str:
    """Return the arguments of `tc qdisc` for a link of a rate."""
    return f"root tbf rate {rate} burst {burst(rate)} latency {1e3 * QUEUE:.0f}ms"


def missing() -> str | None:
    """Return which requirement for namespaces this machine lacks; None if it has all."""
    absent = [tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found (Linux, packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:  # root in a container often lacks the permission; the only way to find out is to try
        _run("unshare --net --pid --fork true")
    except RuntimeError as error:
        return str(error)
    return None


def probe(name: str, rate: str, payload_bytes: int, seconds: float) -> dict[str, Any]:
    """Return the columns of a calibration measurement.

    "ratio_to_expected" is the payload per second divided by that of full frames at the nominal rate, which is 95.6 % of
    the rate. The ideal ratio is 1. The time starts with the first byte and ends when the receiver's one-byte answer
    arrives.
    """
    goodput = 8 * payload_bytes / seconds
    return {
        "probe": name,
        "payload_bytes": payload_bytes,
        "seconds": round(seconds, 5),
        "payload_mbit_per_s": round(goodput / 1e6, 1),
        "ratio_to_expected": round(goodput / (bits_per_second(rate) * PAYLOAD_SHARE), 3),
    }


@final
class ShapedLinks:
    """A context manager that creates hosts with links of a given rate in each direction.

    At the end of its block all processes on the hosts end. The rate may include the milliseconds of a round trip:
    "100mbit 50ms".

    With `separate_processes`, hosts have process namespaces, so that no process outlives this program. CUDA does not
    start in them.
    """

    def __init__(self, hosts: int, rate: str, separate_processes: bool = True) -> None:
        self.hosts, self.rate, self.burst, self._separate = hosts, rate, burst(rate), separate_processes
        self._holders: list[subprocess.Popen[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._carrier: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ShapedLinks":
        if reason := missing():
            raise RuntimeError(f"ShapedLinks(hosts={self.hosts}, rate={self.rate!r}): {reason}.")
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._carrier is not None:
            self._carrier.terminate()
            self._carrier.communicate()
        for process in self._holders:
            process.communicate()  # closes its input
        for process in self._processes:
            process.wait()

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        return _address(host)

    @property
    def congestion_control(self) -> str:
        """TCP's congestion control on the hosts."""
        with self.popen(0, ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"], stdout=subprocess.PIPE) as program:
            return program.communicate()[0].strip()

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process on a host, with options of `subprocess.Popen`. Terminating it kills the program."""
        # `nsenter` waits for the program, and setpriv makes the kernel kill the program when `nsenter` ends. In a new
        # session the program does not receive the terminal's Ctrl-C.
        namespaces = f"/proc/{self._holders[host - self.hosts].pid}/ns"
        enter = ["nsenter", f"--net={namespaces}/net"]
        enter += [f"--pid={namespaces}/pid_for_children"] if self._separate else []
        command = [*enter, "setpriv", "--pdeathsig", "KILL", *argv]
        process = subprocess.Popen(command, text=True, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def calibrate(self) -> list[dict[str, Any]]:
        """Measure 600 KB (the median of nine), 20 MB, a stream of 50 KB messages, and 20 MB from all hosts to host 0.

        A message is written when the socket has accepted the previous message. In the last measurement all other hosts
        send equal parts. If the rate includes a round trip, only the round trip is measured, with one byte. TCP would
        need several round trips to reach a link's rate.
        """
        # The stream is so long that the burst, which is sent at full speed, does not matter.
        stream = max(40, round(bits_per_second(self.rate) / 8 * 0.1 / 50_000))
        receiver = self._end("receive", 0)
        receiver.stdout.readline()  # type: ignore[union-attr]
        if expected := round_trip(self.rate):
            found = statistics.median(_seconds(self._end("send", 1, 1, 1, 9, math.ceil(time.monotonic() + 0.5))))
            receiver.terminate()
            receiver.communicate()
            return [probe("1 byte", self.rate, 1, found) | {"ratio_to_expected": round(found / expected, 3)}]
        probes = []
        for name, size, count, repeat, senders in (
            ("600 KB", 600_000, 1, 9, 1),
            ("20 MB", 20_000_000, 1, 1, 1),
            ("50 KB messages", 50_000, stream, 1, 1),
            ("all to one, 20 MB", 20_000_000 // (self.hosts - 1), 1, 1, self.hosts - 1),
        ):
            start = math.ceil(time.monotonic() + 0.5)  # all hosts start at the same time
            ends = [self._end("send", host, size, count, repeat, start) for host in range(1, 1 + senders)]
            slowest = max(statistics.median(_seconds(end)) for end in ends)
            probes.append(probe(name, self.rate, size * count * senders, slowest))
        receiver.terminate()
        receiver.communicate()
        return probes

    def _end(self, end: str, host: int, *numbers: int) -> subprocess.Popen[str]:
        script = [sys.executable, "-S", __file__, end, self.address(0), *map(str, numbers)]
        return self.popen(host, script, stdout=subprocess.PIPE)

    def _hold(self) -> int:
        """Create namespaces for network and processes; return the id of the process that holds them."""
        command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", "echo made; exec cat"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        holder = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        self._holders.append(holder)
        holder.stdout.readline()  # type: ignore[union-attr]
        return holder.pid

    def _make(self) -> None:
        if round_trip(self.rate):
            pids = [str(self._hold()) for _ in range(self.hosts)]
            carry = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-S", __file__, "carry", self.rate, *pids]
            self._carrier = subprocess.Popen(carry, text=True, start_new_session=True, stdout=subprocess.PIPE)
            if self._carrier.stdout.readline() != "ready\n":  # type: ignore[union-attr]
                raise RuntimeError("The program that carries packets has failed: are there tun devices, /dev/net/tun?")
            return
        switch, *hosts = (self._hold() for _ in range(1 + self.hosts))
        on_switch = f"nsenter --net=/proc/{switch}/ns/net"
        _run(f"{on_switch} ip link add bridge up type bridge")
        for number, host in enumerate(hosts):
            port, on_host = f"host{number}", f"nsenter --net=/proc/{host}/ns/net"
            _run(f"{on_switch} ip link add {port} type veth peer name {INTERFACE} netns {host}")
            _run(f"{on_switch} ip link set {port} master bridge up")
            _bring_up(number, on_host)
            _run(f"{on_host} tc qdisc add dev {INTERFACE} {shape(self.rate)}")
            _run(f"{on_switch} tc qdisc add dev {port} {shape(self.rate)}")


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _bring_up(number: int, on_host: str) -> None:
    """Set the address of a host's interface and bring it up. The prefix `on_host` runs a command on the host."""
    _run(f"{on_host} ip addr add {_address(number)}/24 dev {INTERFACE}")
    _run(f"{on_host} ip link set {INTERFACE} up")
    _run(f"{on_host} ip link set lo up")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")


def _seconds(sender: subprocess.Popen[str]) -> list[float]:
    out, _ = sender.communicate(timeout=120)
    if sender.returncode:
        raise RuntimeError(f"A calibration sender ended with status {sender.returncode}.")
    return list(json.loads(out))


def _tun(number: int, pid: str) -> int:
    """Create a tun device as a host's interface, and return its file descriptor."""
    device, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"tun{os.getpid()}_{number}"
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH14x", name.encode(), 0x1001))  # TUNSETIFF: IFF_TUN, IFF_NO_PI
    on_host = f"nsenter --net=/proc/{pid}/ns/net"
    _run(f"ip link set {name} txqueuelen 10000")
    _run(f"ip link set {name} netns {pid} name {INTERFACE}")
    _bring_up(number, on_host)
    return device


def _carry(rate: str, *pids: str) -> None:
    """Carry packets between hosts. Each passes the sender's link, half a round trip, and the receiver's link."""
    devices = [_tun(number, pid) for number, pid in enumerate(pids)]
    poll = select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    print("ready", flush=True)
    second_per_byte, delay = 8 / bits_per_second(rate), round_trip(rate) / 2
    free = {(device, way): 0.0 for device in devices for way in ("up", "down")}  # time at which each link is free
    under_way: list[tuple[float, int, int, bytes]] = []  # time of arrival, number, device, and packet
    for number in range(sys.maxsize):
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            *_, device, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # drop the packet, as networks do
                os.write(device, packet)
        for device, _ in poll.poll(max(0, under_way[0][0] - now) if under_way else None):
            packet = os.read(device, 1 << 16)
            if packet[0] >> 4 != 4 or packet[16:19] != bytes((10, 77, 0)) or not 1 <= packet[19] <= len(devices):
                continue
            now, arrival, to = time.monotonic(), 0.0, devices[packet[19] - 1]
            for link in ((device, "up"), (to, "down")):
                arrival = max(free[link], now, arrival) + len(packet) * second_per_byte
                if arrival > now + QUEUE:
                    break
                free[link] = arrival
            else:
                heapq.heappush(under_way, (arrival + delay, number, to, packet))


class _Receiver(socketserver.BaseRequestHandler):
    """Until the connection ends: reads a length in eight bytes, reads that many bytes, and answers with one byte."""

    def handle(self) -> None:
        buffer = bytearray(1 << 20)
        while header := self.request.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "big")
            while left:
                left -= self.request.recv_into(buffer, min(left, len(buffer)))
            self.request.sendall(b"!")


def _send(address: str, size: int, count: int, repeat: int, start: int) -> None:
    """Send `count` messages of `size` bytes, `repeat` times, and print the seconds of each repetition."""
    message = bytes(size)
    seconds = []
    with socket.create_connection((address, _PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time.sleep(max(0, start - time.monotonic()))
        for _ in range(repeat):
            before = time.monotonic()
            connection.sendall((size * count).to_bytes(8, "big"))
            for _ in range(count):
                connection.sendall(message)
            connection.recv(1)
            seconds.append(time.monotonic() - before)
            # Training steps have pauses between them, in which the token bucket fills up again.
            time.sleep(0.05 if repeat > 1 else 0)
    print(json.dumps(seconds))


if __name__ == "__main__":
    if sys.argv[1] == "send":
        _send(sys.argv[2], *map(int, sys.argv[3:]))
    elif sys.argv[1] == "carry":
        _carry(*sys.argv[2:])
    else:
        with socketserver.ThreadingTCPServer((sys.argv[2], _PORT), _Receiver) as server:
            print("ready", flush=True)
            server.serve_forever()
