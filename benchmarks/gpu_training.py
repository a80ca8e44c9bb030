"""Trains larger models with several ranks that share one GPU, and times their steps over shaped links.

Each rank is a process; all ranks exchange over gloo, through host memory. GPTs of 11 to 85 M parameters learn to
predict the bytes of Python's standard library, with AdamW, in bf16-mixed precision. Each rank uses 8 sequences of 256
bytes per step. The learning rate warms up linearly over a tenth of the steps, and then follows a cosine to zero. The
density warm-up is that of the defaults. The last loss is reported only if all ranks end with the same weights.

"dense" is one rank with the batches of all ranks, from the same weights and in the same order. Up to rounding it is
equal to stock `ddp`, without the time of its all-reduce.

    python -m benchmarks.gpu_training              # losses
    sudo python -m benchmarks.gpu_training --links # step times
    python -m benchmarks.gpu_training --rehearse   # on a CPU

Losses depend on the seed and the GPU's rounding. Step times are the medians of a few steps of all methods in turn.

Output: `gpu_training.csv` and `gpu_links.csv`.
"""

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pandas as pd
import torch

from benchmarks.harness import results
from benchmarks.harness.baselines import CONTESTANTS, Options
from benchmarks.harness.launch import check_weights, gather, hosts, launch, timed, write
from benchmarks.harness.results import Row
from benchmarks.harness.timing import step_columns
from benchmarks.harness.training import Data, Trainee, text
from examples.models.gpt import GPT
from lightning_sparse import ProcessGroupComm

MODULE = "benchmarks.gpu_training"
DENSE, DEFAULT = "dense", "topk by default"
LINKED = [DEFAULT, "int4", "bf16", "ddp"]
RATES = ["1gbit", "10gbit", "loopback"]
ROUNDS, TIMED = 2, 2
"""Number of turns of each method, and of timed steps per turn."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A model, its learning rate, and the number of ranks and steps."""

    layers: int
    width: int
    lr: float
    workers: int
    steps: int = 1000
    context: int = 256
    batch_size: int = 8
    vocabulary: int = 256

    def model(self) -> GPT:
        """Return a new model."""
        return GPT(self.context, self.width, self.layers, self.width // 64, self.vocabulary)

    def rehearsed(self) -> "Part":
        """Return a part that takes a CPU a few seconds."""
        return dataclasses.replace(self, layers=1, width=64, workers=2, steps=4, context=32, vocabulary=256)


PARTS = {
    "11 M, P = 2": Part(6, 384, 0.001, 2),
    "11 M, P = 8": Part(6, 384, 0.001, 8),
    "85 M, P = 2": Part(12, 768, 0.0006, 2),
    "85 M, P = 8": Part(12, 768, 0.0006, 8, steps=500),
}
GPT2 = Part(12, 768, 0.0006, 2, context=1024, vocabulary=50257)


def trainee(part: Part, method: str, seed: int, data: Data) -> Trainee:
    """Return a model in training on this rank of a process group."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = part.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), part.lr, fused=device == "cuda")
    wrapped = CONTESTANTS["none" if method == DENSE else method].wrap(model, Options(), optimizer)
    batch_size = part.batch_size * (part.workers if method == DENSE else 1)
    schedule = {"seed": seed, "batch_size": batch_size, "steps": part.steps}
    return Trainee(model, wrapped, optimizer, data, ProcessGroupComm(), **schedule)


def work(job: Row) -> None:
    """Do a job: the curve of one training, or step times of several methods. This runs in each rank."""
    part = Part(**job["of"])
    data = text(part.context, job["held_out"])
    if "method" in job:
        trained = trainee(part, job["method"], job["seed"], data)
        for point in trained.curve(part.steps, max(1, part.steps // 10)):
            write(job["out"], **point | {"sent_bytes": max(gather(point["sent_bytes"]))})
        check_weights(trained.model)
        return
    made = {name: trainee(part, name, 0, data) for name in LINKED}
    made[DEFAULT].skip_density_warmup()
    for turn in range(ROUNDS):
        for name, each in made.items():
            for _ in range(1 if turn else 5 if name == DEFAULT else 2):  # compiles kernels, and captures graphs
                each.step()
            before = each.settled_bytes
            found = timed(each.step, TIMED)
            sent = max(gather(each.settled_bytes - before)) / TIMED
            write(job["out"], method=name, sent_bytes=sent, **found)
    for each in made.values():
        each.wrapped.settle()
        check_weights(each.model)


def losses(parts: Sequence[tuple[str, Part]], seeds: Sequence[int], held_out: int, path: Path) -> None:
    """Train all parts at the same time. Rows are written as soon as they are known."""
    runs = [(*part, method, seed) for seed in seeds for part in parts for method in (DEFAULT, DENSE)]
    saving = threading.Lock()

    def train(run: tuple[str, Part, str, int]) -> None:
        (name, part, method, seed), began = run, time.monotonic()
        job = {"of": dataclasses.asdict(part), "method": method, "seed": seed, "held_out": held_out, "module": MODULE}
        params = sum(x.numel() for x in part.model().parameters())
        case = {"part": name, "method": method, "seed": seed, "params": params, "workers": part.workers, "lr": part.lr}
        rows: list[Row] = []
        workers = 1 if method == DENSE else part.workers

        def save() -> None:
            with saving:
                results.save(path, rows, ["part", "lr", "method", "seed"], digits=6)

        with hosts(workers, "loopback") as made:
            for point in launch("benchmarks.harness.launch", job, made, workers):
                save()
                rows.append(case | {"steps": part.steps} | point | results.device())
        save()  # the ranks have compared their weights
        print(name, part.lr, method, seed, f"{rows[-1]['val_loss']:.4f}, {time.monotonic() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(len(runs)) as pool:
        for future in as_completed([pool.submit(train, run) for run in runs]):
            try:
                future.result()
            except (Exception, SystemExit) as error:  # continue with the other trainings
                print(f"A training failed: {error}", flush=True)


def links(part: Part, rates: Sequence[str], path: Path) -> None:
    """Time steps at each rate. The rows of a rate are written after ranks have compared their weights."""
    job = {"of": dataclasses.asdict(part), "held_out": 2, "module": MODULE}
    for rate in rates:
        records: list[Row] = []
        try:
            with hosts(part.workers, rate) as made:
                off = max((abs(probe["ratio_to_expected"] - 1) for probe in made.calibration), default=0.0)
                for record in launch("benchmarks.harness.launch", job, made, part.workers):
                    print(rate, record["method"], [round(ms) for ms in record["ms"]], flush=True)
                    records.append(record)
            rows = [
                {"rate": rate, "method": name, "workers": part.workers, "batch_size": part.batch_size}
                | step_columns([ms for each in turns["ms"] for ms in each])
                | {key: round(turns[key].mean()) for key in ("sent_bytes", "tx_bytes")}
                | {"largest_calibration_error": round(off, 3), **results.device()}
                for name, turns in pd.DataFrame(records).groupby("method", sort=False)
            ]
            results.save(path, rows, ["rate"])
            print(pd.DataFrame(rows).loc[:, :"tx_bytes"].to_string(index=False), flush=True)
        except (Exception, SystemExit) as error:  # continue with the other rates
            print(f"{rate}: {error}", flush=True)


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--links", action="store_true", help="time steps over shaped links; needs root")
    parser.add_argument("--rehearse", action="store_true", help="use the CPU and tiny models")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--steps", type=int, help="number of steps. Default: as in the part")
    parser.add_argument("--lr", nargs="+", type=float, help="learning rates of all parts. Default: as in the part")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    if not (args.rehearse or torch.cuda.is_available()):
        parser.error("torch finds no GPU here. Rehearse on the CPU with --rehearse.")

    def changed(part: Part) -> Part:
        """Return a part, changed by the options."""
        part = part.rehearsed() if args.rehearse else part
        return dataclasses.replace(part, steps=args.steps) if args.steps else part

    if args.links:
        links(changed(GPT2), args.rates, args.out / "gpu_links.csv")
    else:
        named = [(name, changed(PARTS[name])) for name in args.parts]
        chosen = [(name, dataclasses.replace(part, lr=lr)) for name, part in named for lr in args.lr or [part.lr]]
        losses(chosen, args.seeds, 16 if args.rehearse else 512, args.out / "gpu_training.csv")
