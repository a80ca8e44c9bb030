"""What the processes that `launch` starts do together. `run_ranks` starts this module, and it a benchmark's `work`."""

import importlib
import json
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.timing import elapsed_ms, spent


class WrongResult(RuntimeError):
    """A contestant computes something else than it should, so its time means nothing."""


def write(out: str, **record: Any) -> None:
    """Append a record to the results of the job; rank 0 only."""
    if dist.get_rank() == 0:
        with Path(out).open("a") as file:
            file.write(json.dumps(record) + "\n")


def gather(value: Any) -> list[Any]:
    """Return every rank's `value`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def timed(step: Callable[[], object], count: int) -> dict[str, Any]:
    """Take steps on all ranks together; return milliseconds, and per step bytes and processor time."""
    dist.barrier()
    before = spent()
    times = [elapsed_ms(step) for _ in range(count)]
    dist.barrier()
    seconds, own, machine, transmitted = (spent() - before).tolist()
    all_times, all_own, all_transmitted = zip(*gather((times, own, transmitted)), strict=True)
    return {
        # A step is over when its slowest rank is.
        "ms": [max(column) for column in zip(*all_times, strict=True)],
        "tx_bytes": max(all_transmitted) / count,
        "cpu_ms": 1e3 * sum(all_own) / len(all_own) / count,
        # The share of the processors that other programs used.
        "foreign_load": max(0.0, machine - sum(all_own)) / (seconds * (os.cpu_count() or 1)),
    }


def check_weights(model: nn.Module) -> None:
    """Raise unless all ranks have the same weights, bit by bit."""
    checksum = 0
    for param in model.parameters():
        checksum = zlib.crc32(param.detach().numpy().data, checksum)
    checksums = gather(checksum)
    if len(set(checksums)) > 1:
        raise WrongResult(f"the ranks' weights differ: checksums {checksums}")


def main(argument: str) -> None:
    """Do the job that `run_ranks` passed, in a process group, with one thread per rank."""
    job = json.loads(argument)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    importlib.import_module(job["module"]).work(job)
    dist.barrier()  # one of the ranks hosts the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
