"""What do sparse gradients, and sparse updates, do to a small language model, under AdamW and under SGD?

A GPT of 0.84 M parameters learns to predict the bytes of Python's standard library: two workers over gloo, or four or
eight, 8 sequences of 128 bytes per worker and step, density 0.01, or 0.0075 with more than two workers, a linear
warm-up of the rate over a tenth of the steps and a cosine to zero. With one seed, all contestants start from the same
weights and see the same batches in the same order. Nothing is reported unless all workers have the same weights at the
end, bit by bit.

    python -m benchmarks.language               # train what `language.csv` lacks of `TRIED`
    sudo python -m benchmarks.language --seconds  # step times over shaped links, all contestants in turn
    python -m benchmarks.language --figure      # draw

Rates. Four rates per optimizer and method are tried in short runs, and more where the best one lies at the end; final
losses on held-out text decide. The seed is not among those of the comparison. Short runs of AdamW mislead, so the best
and its neighbours are tried at full length too.

Seconds. The losses are deterministic, so they are measured on a machine that may be busy. The times are not: they are
the medians of one short run without other load, over two network namespaces whose links are shaped to the rate in both
directions and calibrated. "Seconds" are steps times that median: `language_seconds.csv`. Steps of
four workers are timed too.

Bytes are what a worker puts on the wire; for DDP and its hooks, which do not count, the volume of ring all-reduces. For
comparison, `language_seconds.csv` has what left the network interface too, headers and acknowledgements included.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from benchmarks.harness import plots, results
from benchmarks.harness.baselines import CONTESTANTS, Options
from benchmarks.harness.launch import hosts, launch
from benchmarks.harness.ranks import check_weights, gather, join, leave, timed, write
from benchmarks.harness.results import Row
from benchmarks.harness.shaped_links import missing
from benchmarks.harness.timing import FOREIGN_LOAD, step_columns
from examples.data.text import StandardLibrary
from examples.models.gpt import GPT
from lightning_sparse import method

SPARSE = ["topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
UPDATES = {
    "topk updates": 1,
    "gaussiank updates": 1,
    "two_pass updates": 1,
    "local_sgd": 50,
    "diloco": 50,
    "sparseloco": 25,
}
"""What exchanges updates, and after how many steps: weights are equal when they are evaluated."""
METHODS = {
    "adamw": ["ddp", "bf16", "powersgd", "int4", *SPARSE, *UPDATES],
    "sgd": ["ddp", "topk", "gaussiank"],
}
WORKERS = 2
BATCH_SIZE = 8
LENGTH = 128
VAL_SEQUENCES = 256
TITLES = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}

STEPS = {"tune": 250, "retune": 500, "final": 1000, "four": 1000, "eight": 1000, "large": 3000}
EVERY = {"tune": 125, "retune": 125, "final": 50, "four": 50, "eight": 50, "large": 150}
"""Steps between two evaluations."""
SEEDS = {"tune": 100, "retune": 100, "final": 0, "four": 0, "eight": 0, "large": 0}
WORKERS_OF = {"four": 4, "eight": 8}
"""Where there are not two."""
DENSITY = 0.01
DENSITY_OF = {"four": 0.0075, "eight": 0.0075}
"""Where it is not `DENSITY`: with more ranks the entries of one are a larger part of dense bytes."""
WIDTH = {"large": 256}
"""Of the model, where it is not the GPT's own: 3.3 M parameters."""
GRID = [0.001, 0.002, 0.005, 0.01]
TRIED: dict[tuple[str, str], dict[str, list[float]]] = {
    ("adamw", "ddp"): {
        "tune": [0.0005, *GRID],
        "retune": [0.0005, 0.001, 0.002, 0.005],
        "final": [0.002],
        "four": [0.002, 0.004, 0.008],
        "eight": [0.004, 0.008],
        "large": [0.002],
    },
    ("adamw", "bf16"): {"final": [0.002], "four": [0.004]},
    ("adamw", "powersgd"): {"tune": [0.0005, 0.001, 0.002, 0.005], "final": [0.001, 0.002], "four": [0.002, 0.004]},
    ("adamw", "int4"): {"final": [0.002], "four": [0.004]},
    ("adamw", "topk"): {"tune": GRID, "retune": GRID, "final": [0.001, 0.002, 0.005]},
    ("adamw", "gaussiank"): {"tune": GRID, "final": [0.0005, 0.001, 0.002]},
    ("adamw", "gtopk"): {"final": [0.0002, 0.0005, 0.001]},
    ("adamw", "oktopk"): {"final": [0.0002, 0.0005, 0.001]},
    ("adamw", "scalecom"): {"final": [0.0005, 0.001, 0.002]},
    ("adamw", "topk updates"): {"final": [0.002], "four": [0.004], "large": [0.002]},
    ("adamw", "gaussiank updates"): {"final": [0.002], "four": [0.004]},
    ("adamw", "two_pass updates"): {"eight": [0.004]},
    ("adamw", "local_sgd"): {"final": [0.002], "four": [0.004]},
    ("adamw", "diloco"): {"final": [0.002], "four": [0.004]},
    ("adamw", "sparseloco"): {"final": [0.002], "four": [0.004]},
    ("sgd", "ddp"): {"tune": [0.05, 0.1, 0.2, 0.5], "retune": [0.05, 0.1, 0.2], "final": [0.1]},
    ("sgd", "topk"): {"tune": [0.02, 0.05, 0.1, 0.2, 0.5], "retune": [0.01, 0.02, 0.05, 0.1], "final": [0.02]},
    ("sgd", "gaussiank"): {"tune": [0.02, 0.05, 0.1, 0.2, 0.5], "final": [0.02]},
}
"""The rates of each part.

With AdamW and sparse gradients, 250 and 500 steps prefer a rate that 1,000 do not: so it was with topk and gaussiank,
and the other sparse methods were not tried in short runs. PowerSGD was, and 250 steps preferred 0.001. bf16 takes the
rate of ddp, and so do int4 and all that exchange updates, untuned; for gaussiank with SGD the longer runs of topk,
which likes the same rates of the grid, are enough.
"""
REPEATED = {
    **{("final", "adamw", name): 0.002 for name in ("ddp", "int4", "topk updates", "gaussiank updates")},
    **{("four", "adamw", name): 0.004 for name in ("ddp", "topk updates")},
}
"""Rates of those that are repeated with `MORE_SEEDS`."""
MORE_SEEDS = [1, 2]
TARGET = 2.6
"""Nats per byte: the lowest tenth that every contestant reaches, at its best rate."""
RATES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
"""Of the links, where step times are measured."""
ROUNDS, TIMED_STEPS = 5, 8
TIMED_WORKERS = [WORKERS, 4]
"""With four, those that serve with AdamW: what a step costs where twice as many ranks share the processors."""
FIXED = {"beta2": 0.999, "momentum": 0.9, "clip_norm": 0.0, "warmup_steps": 0}
"""Options of all runs: AdamW's, SGD's, and of the sparse methods."""


class Run(NamedTuple):
    """One training.

    Attributes:
        part: "tune", "retune", "final", "four" and "eight", with as many workers, or "large", a model of 3.3 M
            parameters and 3,000 steps.
        optimizer: "adamw" or "sgd".
        method: one of `CONTESTANTS` in `benchmarks.harness.baselines`.
        lr: the learning rate between warm-up and cosine.
        seed: of the initial weights and of the order of the data.
    """

    part: str
    optimizer: str
    method: str
    lr: float
    seed: int


def factor(step: int, steps: int) -> float:
    """Return the factor on the learning rate: linear warm-up over a tenth, then half a cosine to zero."""
    warmup = max(1, steps // 10)
    return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2


class Trainee:
    """A model in training on this rank.

    Args:
        run: how to train it.
        text: the data, set up.
        every: number of steps from one exchange of updates to the next; None takes that of `UPDATES`.
    """

    def __init__(self, run: Run, text: StandardLibrary, every: int | None = None) -> None:
        self.run, self.text, self.steps = run, text, STEPS[run.part]
        torch.manual_seed(run.seed)
        self.model = GPT(LENGTH, WIDTH.get(run.part, 128))
        self.optimizer = optimizer(run, self.model)
        options = Options(DENSITY_OF.get(run.part, DENSITY), every=every or UPDATES.get(run.method, 1))
        self.wrapped = CONTESTANTS[run.method].wrap(self.model, options, self.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factor(step, self.steps))
        self.order = torch.randperm(len(text.train_set), generator=torch.Generator().manual_seed(run.seed))
        self.done = 0
        self.sent_before = self.wrapped.counted_bytes

    def step(self) -> None:
        """Train on the next batch."""
        first = (self.done * dist.get_world_size() + dist.get_rank()) * BATCH_SIZE
        chosen = self.order[first : first + BATCH_SIZE]
        tokens, following = default_collate([self.text.train_set[index] for index in chosen])
        self.optimizer.zero_grad()
        functional.cross_entropy(self.wrapped.module(tokens).flatten(0, 1), following.flatten()).backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def sent_bytes(self) -> int:
        """Return the bytes that this rank has put on the wire so far."""
        return self.wrapped.sent_bytes(self.done) - self.sent_before

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss over the held-out sequences, nats per byte, the same on all ranks."""
        held_out = self.text.val_set
        chosen = torch.linspace(0, len(held_out) - 1, VAL_SEQUENCES).long()[dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros((), dtype=torch.float64)
        for part in chosen.split(32):
            tokens, following = default_collate([held_out[index] for index in part])
            total += functional.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten(), reduction="sum")
        dist.all_reduce(total)
        return total.item() / (VAL_SEQUENCES * LENGTH)


def optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a run."""
    if run.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, FIXED["beta2"]), weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=run.lr, momentum=FIXED["momentum"])


def curve(run: Run, text: StandardLibrary, out: str) -> None:
    """Train; report the validation loss and the bytes sent so far at the start and after every `EVERY` steps."""
    trainee = Trainee(run, text)
    for step in range(trainee.steps + 1):
        if step % EVERY[run.part] == 0:
            write(out, step=step, val_loss=trainee.loss(), sent_bytes=max(gather(trainee.sent_bytes())))
        if step < trainee.steps:
            trainee.step()
    check_weights(trainee.model)


def step_times(runs: Sequence[Run], text: StandardLibrary, out: str) -> None:
    """Time some steps of each run in turn, several rounds, and report what each round found."""
    # Of steps between exchanges one in each round exchanges; `measure_seconds` knows how many really do.
    trainees = [Trainee(run, text, min(TIMED_STEPS, UPDATES.get(run.method, 1))) for run in runs]
    for trainee in trainees:  # DDP forms its buckets anew in the second step
        for _ in range(3):
            trainee.step()
    for number, trainee in list(enumerate(trainees)) * ROUNDS:
        trainee.step()  # brings the model back into the caches
        sent_before = trainee.sent_bytes()
        found = timed(trainee.step, TIMED_STEPS)
        sent = max(gather(trainee.sent_bytes() - sent_before)) / TIMED_STEPS
        write(out, run=number, sent_bytes=sent, **found)
    for trainee in trainees:
        check_weights(trainee.model)


def work(argument: str) -> None:
    """Do the job that `run_ranks` passed as JSON: "curve" of one run, or "step_times" of several."""
    job = join(argument)
    text = StandardLibrary(LENGTH, BATCH_SIZE)
    text.setup()
    runs = [Run(*run) for run in job["runs"]]
    if job["what"] == "curve":
        curve(runs[0], text, job["out"])
    else:
        step_times(runs, text, job["out"])
    leave()


def run_ranks(
    what: str, runs: Sequence[Run], link: str = "loopback", workers: int = WORKERS
) -> tuple[list[Row], list[Row]]:
    """Run ranks of this module; return what rank 0 reports and what the links' calibration found."""
    with hosts(workers, link) as where:
        records, reason = launch("benchmarks.language", {"what": what, "runs": runs}, where, workers)
    if reason:
        raise SystemExit(f"The ranks ended early: {reason}")
    return records, where.calibration


def train(run: Run, path: Path) -> None:
    """Train once and add the curve to a CSV file.

    Raises:
        SystemExit: the first loss differs from that of other trainings with this seed, so they cannot be compared.
    """
    workers = WORKERS_OF.get(run.part, WORKERS)
    points, _ = run_ranks("curve", [run], workers=workers)
    table, first = results.load(path), round(points[0]["val_loss"], 6)
    started = first_losses(run, table)
    if started - {first}:
        raise SystemExit(f"{run} starts at a loss of {first}, others of its seed at {started}.")
    density = DENSITY_OF.get(run.part, DENSITY) if run.method in SPARSE or "updates" in run.method else 1.0
    if run.method == "sparseloco":
        density = method("sparseloco").density or 1.0
    common = {**run._asdict(), **FIXED, "density": density, "workers": workers, "batch_size_per_worker": BATCH_SIZE}
    common["steps"] = STEPS[run.part]
    rows = [
        {
            **common,
            "step": point["step"],
            "val_loss": f"{point['val_loss']:.6f}",
            "val_bits_per_byte": f"{point['val_loss'] / math.log(2):.5f}",
            "sent_bytes_per_worker": point["sent_bytes"],
            "threads_per_rank": 1,
            **results.origin(),
        }
        for point in points
    ]
    results.save(path, rows, Run._fields)
    print(f"{run}: {points[-1]['val_loss']:.4f} nats per byte", flush=True)


def first_losses(run: Run, table: pd.DataFrame) -> set[float]:
    """Return at which losses a table's trainings of the same model with the same seed start."""
    if table.empty:
        return set()
    same = (table["seed"] == run.seed) & (table["part"].isin(WIDTH) == (run.part in WIDTH))
    return set(table[same & (table["step"] == 0)]["val_loss"])


def missing_runs(path: Path) -> list[Run]:
    """Return the runs of `TRIED` that a CSV file does not have."""
    table = results.load(path)
    found = set() if table.empty else set(table[list(Run._fields)].itertuples(index=False, name=None))
    runs = [
        Run(part, *contestant, lr, SEEDS[part])
        for contestant, parts in TRIED.items()
        for part, rates in parts.items()
        for lr in rates
    ]
    runs += [Run(*what, lr, seed) for seed in MORE_SEEDS for what, lr in REPEATED.items()]
    return [run for run in runs if run not in found]


def measure_seconds(path: Path) -> None:
    """Time the steps of all contestants over shaped links, and write a CSV file."""
    if reason := missing():
        raise SystemExit(f"No links can be made here: {reason}.")
    rows = []
    for workers, link in itertools.product(TIMED_WORKERS, RATES):
        chosen = TRIED if workers == WORKERS else [("adamw", name) for name in METHODS["adamw"] if name not in SPARSE]
        part = next((part for part, count in WORKERS_OF.items() if count == workers), "tune")
        runs = [Run(part, *contestant, 0.001, 0) for contestant in chosen]
        records, calibration = run_ranks("step_times", runs, link, workers)
        off = round(max(abs(probe["ratio_to_expected"] - 1) for probe in calibration), 3)
        for number, rounds in pd.DataFrame(records).groupby("run"):
            row = {"workers": workers, "rate": link}
            row |= {"optimizer": runs[number].optimizer, "method": runs[number].method}
            every = UPDATES.get(runs[number].method, 1)
            share = min(TIMED_STEPS, every) / every  # of the exchanges timed, how many a training has
            row |= step_columns([amortized(ms, share) for ms in rounds["ms"]] if share < 1 else rounds["ms"].sum())
            row["sent_bytes_per_step"] = round(rounds["sent_bytes"].mean() * share)
            row["transmitted_bytes_per_step"] = round(rounds["tx_bytes"].mean() * share)
            row["foreign_load"] = round(rounds["foreign_load"].mean(), 3)
            row |= {"largest_calibration_error": off, "threads_per_rank": 1, **results.origin()}
            rows.append(row)
        print(pd.DataFrame(rows).iloc[:, :8].to_string(), flush=True)
    if max(row["foreign_load"] for row in rows) > FOREIGN_LOAD:
        print(f"Other programs used more than {FOREIGN_LOAD:.0%} of the processors; repeat it.")
    results.save(path, rows)


def amortized(ms: Sequence[float], share: float) -> float:
    """Return the mean time of a step, if only a share of the exchanges took place; one of the steps had one."""
    *steps, exchange = sorted(ms)
    return mean(steps) + (exchange - mean(steps)) * share / len(ms)


def draw(folder: Path) -> None:
    """Draw the losses of each method at its best rate against steps, bytes and seconds."""
    table = results.load(folder / "language.csv").query("part == 'final' and seed == 0")
    seconds = results.load(folder / "language_seconds.csv").query("workers == @WORKERS")
    timed = seconds.set_index(["rate", "optimizer", "method"])["median_ms"]
    losses = table.groupby(["optimizer", "method", "lr"])["val_loss"].last()
    figure, panels = plots.panels(len(METHODS), 2 + len(RATES), (16, 7.5), sharey=True)
    for row, optimizer in zip(panels, METHODS, strict=True):
        for name in [name for name in METHODS[optimizer] if (optimizer, name) in losses]:
            lr = losses[optimizer, name].idxmin()
            curve = table.query("optimizer == @optimizer and method == @name and lr == @lr and step > 0")
            sent, steps = curve["sent_bytes_per_worker"], curve["step"]
            seconds = [timed.get((rate, optimizer, name), math.nan) / 1e3 * steps for rate in RATES]
            for panel, x in zip(row, [steps, sent / 1e6, *seconds], strict=True):
                panel.plot(x, curve["val_loss"], **plots.line(name), label=f"{name}, rate {lr:g}")
        row[0].set(ylabel=f"{TITLES[optimizer]}\nvalidation loss, nats per byte", xlabel="steps")
        row[1].set(xscale="log", xlabel="sent per worker, MB")
        for panel, rate in zip(row[2:], RATES.values(), strict=True):
            panel.set(xlabel=f"seconds at {rate}")
        row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        for panel in row:
            panel.axhline(TARGET, color="black", linewidth=0.6)
    plots.write(figure, folder / "language.png")


def main() -> None:
    """Read the command line and run."""
    if sys.argv[1:] and sys.argv[1].startswith("{"):  # started by `launch`
        work(sys.argv[1])
        return
    parser = results.command_line(__doc__)
    parser.add_argument("--seconds", action="store_true", help="time steps over shaped links; needs root")
    args = parser.parse_args()
    if args.seconds:
        measure_seconds(args.out / "language_seconds.csv")
    elif not args.figure:
        for run in missing_runs(args.out / "language.csv"):
            train(run, args.out / "language.csv")
    draw(args.out)


if __name__ == "__main__":
    main()
