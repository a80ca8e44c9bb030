"""Two hosts with separate addresses and two ranks each, in network namespaces: torchrun trains the digits."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.harness.shaped_links import INTERFACE, ShapedLinks, missing
from tests.support.tiers import exhaustive

REASON = missing()
PATIENCE = 200.0  # time limit in seconds; on an idle machine the test takes about ten
SCRIPT = """
    import json, socket, sys
    from pathlib import Path

    import pytorch_lightning as pl
    import torch

    from benchmarks.harness.timing import interface_bytes
    from examples.elastic import train
    from examples.train import quiet
    from lightning_sparse import SparseDDPStrategy


    class Note(pl.Callback):
        def on_train_end(self, trainer, module):
            reducer = trainer.strategy.reducer
            self.seen = {
                "rank": trainer.global_rank,
                "local_rank": trainer.local_rank,
                "node": trainer.node_rank,
                "interfaces": [name for _, name in socket.if_nameindex()],
                "steps": reducer.step,
                "sent": reducer.comm.sent_bytes,
                "on the wire": interface_bytes(),
                "weights": [float(param.double().sum()) for param in module.parameters()],
            }


    quiet()
    for hierarchical in (False, True):
        folder, note = Path(sys.argv[1]) / str(hierarchical), Note()
        strategy = SparseDDPStrategy("topk", density=0.01, hierarchical=hierarchical)
        accuracy = train(folder, strategy, steps=60, every=30, callbacks=[note])
        (folder / f"rank{note.seen['rank']}.json").write_text(json.dumps({**note.seen, "accuracy": accuracy}))
"""


@exhaustive
@pytest.mark.skipif(REASON is not None, reason=f"no hosts to be had here: {REASON}")
@pytest.mark.reliability(
    "torchrun over two hosts with separate addresses, two ranks each",
    checked="trains the digits; equal weights on all four ranks; the counted bytes crossed the wire",
    methods=["topk"],
)
def test_two_hosts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    # At the end of the block all processes on the hosts end, and the hosts are removed, even after an error.
    with ShapedLinks(2, "1gbit") as links:
        agents = []
        for host in range(2):
            arguments = [
                *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host)),
                *("--master-addr", links.address(0), "--master-port", "29500"),
            ]
            with (tmp_path / f"output{host}").open("w") as output:
                agents.append(
                    links.popen(
                        host,
                        [
                            sys.executable,
                            "-m",
                            "torch.distributed.run",
                            *arguments,
                            str(script),
                            str(tmp_path),
                        ],
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        for host, agent in enumerate(agents):
            assert agent.wait(PATIENCE) == 0, (tmp_path / f"output{host}").read_text()
    for hierarchical in (False, True):
        ranks = [json.loads((tmp_path / str(hierarchical) / f"rank{rank}.json").read_text()) for rank in range(4)]
        assert [(seen["node"], seen["local_rank"]) for seen in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert all(set(seen["interfaces"]) == {"lo", INTERFACE} for seen in ranks)
        assert all(seen["steps"] == 60 for seen in ranks)
        assert all(seen["weights"] == ranks[0]["weights"] for seen in ranks)
        # In a ring, one rank of each host sends to the other host. With hierarchical exchange, all ranks do, and bytes
        # within a host do not count.
        assert all(seen["on the wire"] > seen["sent"] > 0 for seen in ranks)
        assert ranks[0]["accuracy"] > 0.8
