"""`sent_bytes` compared with the counters of the network interface, between hosts in network namespaces."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.harness.shaped_links import INTERFACE, ShapedLinks, missing
from tests.support.tiers import full

REASON = missing()
HOSTS = 3
SCRIPT = """
    import json, sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from lightning_sparse import ProcessGroupComm

    rank, size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=size)
    comm = ProcessGroupComm()
    x = torch.randn(1_000_000)
    peer = [1, 0, 2][rank]  # the third has nobody to talk to


    def transmitted():
        # Without 66 bytes of headers per packet, and without what was sent twice.
        # /sys shows the interfaces of the namespace in which it was mounted.
        (interface,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
        sent_bytes, packets = (int(number) for number in interface.split()[9:11])
        names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line)
        again = int(dict(zip(names, values))["RetransSegs"])
        return sent_bytes - 66 * packets - 1448 * again


    def pause():
        # What a collective has left in the sockets is on its way by then.
        comm.all_reduce(torch.zeros(1))
        time.sleep(0.3)


    found = {}
    for name, call in {
        "all_gather": lambda: comm.all_gather(x),
        "all_reduce": lambda: comm.all_reduce(x),
        "all_to_all": lambda: comm.all_to_all(torch.stack([x] * size)),
        "exchange": lambda: comm.sendrecv(x, peer),
        "reduce_scatter_mean": lambda: comm.reduce_scatter_mean(x),
    }.items():
        call()  # makes the connections
        pause()
        sent, before = comm.sent_bytes, transmitted()
        for _ in range(3):
            call()
        sent = comm.sent_bytes - sent
        pause()
        found[name] = sent, transmitted() - before
    print(json.dumps(found))
    dist.destroy_process_group()
"""


@full
@pytest.mark.skipif(REASON is not None, reason=f"no hosts to be had here: {REASON}")
def test_sent_bytes_are_those_of_the_interface(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    with ShapedLinks(HOSTS, "1gbit") as links:
        ranks = [
            links.popen(
                host,
                [sys.executable, str(script), str(host), str(HOSTS), f"tcp://{links.address(0)}:29500"],
                env=environment,
                stdout=subprocess.PIPE,
            )
            for host in range(HOSTS)
        ]
        told = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    for rank, found in enumerate(told):
        for name, (sent, transmitted) in found.items():
            if (name, rank) == ("exchange", 2):
                assert sent == 0
                assert transmitted < 50_000
            else:
                assert sent == pytest.approx(transmitted, rel=0.02), (name, rank)
