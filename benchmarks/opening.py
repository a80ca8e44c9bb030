"""Times short messages over new connections with a long round trip, by the bytes that ranks exchange before.

Each case makes a process group, whose connections are new. Ranks send some bytes to each other rank, or none. Then they
gather messages of one length, as sparse steps do, with pauses in which training would compute.

BBR, which these hosts use, raises the rate of a connection only while a message fills it. So after a short first
message each exchange takes longer, for the rest of the training. With a first message of 128 to 256 KiB most exchanges
are shorter. After 16 KiB a connection is slower than a new one. With four workers 256 KiB are worse than 128 KiB.

    sudo python -m benchmarks.opening
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import results
from benchmarks.harness.launch import WrongResult, gather, hosts, launch, write
from benchmarks.harness.timing import elapsed_ms, spread
from lightning_sparse.comm import ProcessGroupComm

LINKS = (("50mbit 50ms", 2), ("1gbit 50ms", 2), ("50mbit 50ms", 4))
OPENINGS = (0, 1 << 14, 1 << 16, 1 << 17, 1 << 18, 1 << 19)
MESSAGES = (5_000, 20_000, 60_000)
STEPS, SKIPPED, PAUSE = 24, 12, 0.03
"""Number of messages, number of first messages without a time, and seconds before each message."""


def work(job: dict[str, Any]) -> None:
    """Time all cases over this rank's link. `launch` calls this on each rank."""
    for opening in OPENINGS:
        for nbytes in MESSAGES:
            comm = ProcessGroupComm(dist.new_group())
            comm.all_gather(torch.zeros(1))  # connects
            rows = torch.zeros(comm.size, opening, dtype=torch.uint8)
            opened = elapsed_ms(lambda comm=comm, rows=rows: comm.all_to_all(rows)) if opening else 0.0
            message, times = torch.full((nbytes,), comm.rank, dtype=torch.uint8), []
            for _ in range(STEPS):
                time.sleep(PAUSE)
                began = time.perf_counter()
                received = comm.all_gather(message)
                times.append(1e3 * (time.perf_counter() - began))
            if received[:, -1].tolist() != [*range(comm.size)]:
                raise WrongResult(f"Messages of {nbytes} bytes arrived wrong.")
            slowest = [max(each) for each in zip(*gather(times[SKIPPED:]), strict=True)]
            write(job["out"], opening=opening, nbytes=nbytes, opening_ms=opened, **spread(slowest))
            dist.destroy_process_group(comm.group)


if __name__ == "__main__":
    args = results.command_line(__doc__, figure=False).parse_args()
    for rate, workers in LINKS:
        with hosts(workers, rate) as where:
            records = [*launch("benchmarks.harness.launch", {"module": "benchmarks.opening"}, where, workers)]
        case = {"rate": rate, "workers": workers, "links": where.links}
        rows = [{**case, **record, **results.origin()} for record in records]
        results.save(args.out / "opening.csv", rows, ["rate", "workers", "opening", "nbytes"], digits=3)
        print(*rows, sep="\n")
