"""Trains replicas that FSDP2 shards: dense HSDP, TopUp between replicas, and TopUp between ranks with whole models.

The GPT, the data and the schedule come from `benchmarks.language`, with AdamW. Each step uses 32 sequences, in the
same order in all trainings. A run is reported only if all ranks end with the same weights.

    python -m benchmarks.sharded                 # trains
    sudo python -m benchmarks.sharded --seconds  # times steps between two nodes
    python -m benchmarks.sharded --memory

Losses are deterministic, so other programs may run. Ranks are processes, and each uses one thread. Bytes are counted
for one rank, to other replicas. With dense HSDP a ring all-reduce of its shards is counted.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import results
from benchmarks.harness.baselines import Wrapped
from benchmarks.harness.launch import check_weights, gather, run_ranks, write
from benchmarks.harness.results import Row
from benchmarks.harness.timing import peak_bytes, reset_peak
from benchmarks.harness.training import Data, Trainee, save_times, take_turns, text
from benchmarks.language import LENGTH, VAL_SEQUENCES
from examples.models.gpt import GPT
from lightning_sparse import ProcessGroupComm, attach_updates
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.methods import resolve_updates

STEPS, EVERY, SEQUENCES = 1000, 50, 32
RATE = 0.002  # of four workers with 8 sequences, as of two workers with 16
SHAPES = {  # replicas, and ranks that shard each of them
    "dense HSDP": (2, 2),
    "TopUp between replicas": (2, 2),
    "TopUp between replicas of one rank": (4, 1),
    "TopUp, one replica": (1, 4),  # sends nothing, but compresses its updates
    "TopUp, two ranks with whole models": (2, 0),
    "TopUp, four ranks with whole models": (4, 0),
    "TopUp, hierarchical": (4, 0),  # two nodes of two ranks, which average their gradients
}
CURVES = list(SHAPES)[:6]
TIMED = ["dense HSDP", "TopUp between replicas", "TopUp, four ranks with whole models", "TopUp, hierarchical"]


class Run(NamedTuple):
    """One training: a key of `SHAPES` and a seed."""

    contestant: str
    seed: int


def sharded(model: GPT, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer, and then the rest of the model."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(contestant: str, model: GPT, make: Any) -> tuple[Wrapped, torch.optim.Optimizer]:
    """Prepare a model on this rank; return it with its optimizer, which `make` makes of parameters."""
    replicas, shards = SHAPES[contestant]
    if not shards:
        optimizer = make(model.parameters())
        method, options = resolve_updates("topk", None, ranks=2 if "hierarchical" in contestant else replicas)
        if "hierarchical" in contestant:
            method = replace(method, aggregator=TwoLevel(method.aggregator, 2))
        warmup: dict[str, Any] = {
            "density_warmup": options.density_warmup,
            "density_warmup_steps": options.density_warmup_steps,
        }
        return Wrapped(model, reducer=attach_updates(model, optimizer, method, **warmup)), optimizer
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    if contestant == "dense HSDP":
        sharded(model, mesh)
        optimizer = make(model.parameters())
        part = 2 * (replicas - 1) * 4 // replicas
        numel = sum(param.to_local().numel() for param in model.parameters())  # type: ignore[attr-defined]
        return Counted(model, nbytes=numel * part), optimizer
    sharded(model, mesh["shard"])
    optimizer = make(model.parameters())
    reducer = attach_updates(model, optimizer, "topk", group=mesh["replicate"].get_group())
    return Wrapped(model, reducer=reducer), optimizer


@dataclass
class Counted(Wrapped):
    """A dense exchange of a known number of bytes in each step."""

    nbytes: int = 0

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that this rank sent in its first `steps` steps."""
        return self.nbytes * steps


def trainee(contestant: str, seed: int, data: Data, steps: int = STEPS) -> Trainee:
    """Return a model in training on this rank of a process group."""
    torch.manual_seed(seed)
    model = GPT(LENGTH)
    prepared, optimizer = wrapped(contestant, model, functools.partial(torch.optim.AdamW, lr=RATE))
    comm = ProcessGroupComm()
    schedule = {"seed": seed, "batch_size": SEQUENCES // comm.size, "steps": steps}
    return Trainee(model, prepared, optimizer, data, comm, **schedule)


def work(job: Row) -> None:
    """Do a job on this rank."""
    if job["what"] == "memory":
        memory(job)
        return
    data = text(LENGTH, VAL_SEQUENCES)
    if job["what"] == "step times":
        made = [trainee(name, 0, data) for name in job["runs"]]
        for each in made:
            each.skip_density_warmup()
        columns = [{"contestant": name} for name in job["runs"]]
        take_turns([*zip(columns, [1] * len(made), made, strict=True)], job["out"])
        return
    run = Run(*job["run"])
    trained = trainee(run.contestant, run.seed, data)
    for point in trained.curve(STEPS, EVERY):
        write(job["out"], **point | {"sent_bytes": max(gather(point["sent_bytes"]))})
    check_weights(trained.model)


def train(run: Run) -> list[Row]:
    """Train once, in several processes; return rows of a CSV file."""
    replicas, shards = SHAPES[run.contestant]
    ranks = replicas * max(1, shards)
    points, _ = run_ranks("benchmarks.sharded", {"what": "curve", "run": run}, ranks)
    table = pd.DataFrame(points).rename(columns={"sent_bytes": "sent_bytes_per_rank"}).drop(columns="accuracy")
    common = {"replicas": replicas, "shards": max(1, shards), "sequences": SEQUENCES, "lr": RATE, "steps": STEPS}
    return list(table.assign(**common, threads_per_rank=1).to_dict("records"))


def memory(job: Row) -> None:
    """Train a few steps of a larger model, and write the peak memory of a rank beyond that before the model."""
    before = peak_bytes()
    model = GPT(LENGTH, job["width"], job["layers"], heads=8)
    prepared, optimizer = wrapped(job["contestant"], model, functools.partial(torch.optim.AdamW, lr=RATE))
    x = torch.randint(256, (1, LENGTH))
    for step in range(3):
        if step == 1:
            reset_peak()
        optimizer.zero_grad()
        prepared.module(x).square().mean().backward()
        optimizer.step()
    numel = sum(param.numel() for param in model.parameters())
    write(job["out"], parameters=numel, peak_mb=round(max(gather(peak_bytes() - before)) / 1e6))


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--seconds", action="store_true", help="time steps over shaped links; needs root")
    parser.add_argument("--memory", action="store_true", help="measure peak memory")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    if args.seconds:
        for rate in ("100mbit", "1gbit"):
            case = {"rate": rate, "nodes": 2, "ranks": 4}
            job = {"what": "step times", "runs": TIMED, "ranks_per_host": 2}
            save_times(args.out / "sharded_seconds.csv", "benchmarks.sharded", case, 4, **job)
    elif args.memory:
        rows = []
        for name in ("dense HSDP", "TopUp between replicas"):
            job = {"what": "memory", "contestant": name, "width": 512, "layers": 16}
            (record,), _ = run_ranks("benchmarks.sharded", job, 4)
            rows.append({"contestant": name, **job, **record, **results.origin()})
        print(pd.DataFrame(rows).to_string())
        results.save(args.out / "sharded_memory.csv", rows, ["contestant"])
    else:
        path = args.out / "sharded.csv"
        runs = [Run(name, seed) for seed in args.seeds for name in CURVES]
        results.save_each(path, results.missing(results.load(path), runs), train, digits=7)
