"""What do sparse gradients do to a small language model, under AdamW and under SGD?

A GPT of 0.84 M parameters learns to predict the bytes of Python's standard library: two workers over gloo, 8 sequences
of 128 bytes per worker and step, density 0.01, a linear warm-up of the rate over a tenth of the steps and a cosine
to zero. With one seed, all contestants start from the same weights and see the same batches in the same order.

The contestants are stock DDP, a bf16 hook, torch's PowerSGD hook of rank 4, and the sparse methods. All of them train
under AdamW; under SGD, to save time, only DDP and two sparse methods do.

    python -m benchmarks.language               # what is missing of everything below
    python -m benchmarks.language --tune        # the grid of rates, for every optimizer and method
    python -m benchmarks.language --final       # longer, with the best rate of each, on other seeds
    sudo python -m benchmarks.language --seconds  # step times over shaped links, all contestants in turn
    python -m benchmarks.language --figure      # draw, and print a table

A part trains only the runs that `language.csv` does not have yet; `--list` prints them without training.

Rates. The grid is 1, 2, 5 in every decade. Four rates per optimizer and method are tried, and more at the end where the
best one lies, until it has a neighbour on each side; the final loss on held-out text decides. The seed is not among
those of the comparison. Short runs of AdamW mislead, so the best and its neighbours are tried at full length too: see
`LONGER`.

Seconds. The losses are deterministic, so they are measured on a machine that may be busy. The times are not: they are
the medians of one short run without other load, over two network namespaces whose links are shaped to the rate in both
directions and calibrated. "Seconds" are steps times that median: `language_seconds.csv`. "Seconds to a loss" take the
first crossing of `TARGET` by the validation curve, linear between two evaluations.

Bytes are what a worker puts on the wire; for DDP and its hooks, which do not count, the volume of ring all-reduces. For
comparison, `language_seconds.csv` has what left the network interface too, headers and acknowledgements included.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.harness import results
from benchmarks.harness.launch import hosts, launch
from benchmarks.harness.results import RESULTS, Row
from benchmarks.harness.shaped_links import missing
from benchmarks.harness.timing import FOREIGN_LOAD

SPARSE = ["topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
METHODS = {"adamw": ["ddp", "bf16", "powersgd", *SPARSE], "sgd": ["ddp", "topk", "gaussiank"]}
DENSITY = 0.01
WORKERS = 2
BATCH_SIZE = 8
LENGTH = 128
VAL_SEQUENCES = 256
TITLES = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}

GRID = {"adamw": (0.0005, 0.001, 0.002, 0.005), "sgd": (0.05, 0.1, 0.2, 0.5)}
STEPS = {"tune": 250, "retune": 500, "final": 1000}
EVERY = {"tune": 125, "retune": 125, "final": 50}
"""Steps between two evaluations."""
LONGER = {
    ("adamw", "bf16"): [0.002],
    ("adamw", "powersgd"): [0.001, 0.002],
    ("adamw", "topk"): [0.001, 0.002, 0.005],
    ("adamw", "gaussiank"): [0.0005, 0.001, 0.002],
    ("adamw", "gtopk"): [0.0002, 0.0005, 0.001],
    ("adamw", "oktopk"): [0.0002, 0.0005, 0.001],
    ("adamw", "scalecom"): [0.0005, 0.001, 0.002],
    ("sgd", "gaussiank"): [0.02],
}
"""Rates tried at full length, whatever shorter runs say.

With AdamW and sparse gradients, 250 and 500 steps prefer a rate that 1,000 do not: so it was with topk and gaussiank,
and the other sparse methods were not tried in short runs. PowerSGD was, and 250 steps preferred 0.001. bf16 takes the
rate of ddp; for gaussiank with SGD the longer runs of topk, which likes the same rates of the grid, are enough.
"""
TUNING_SEED = 100
SEEDS = range(1)
TARGET = 2.6
"""Nats per byte, for "seconds to a loss": the lowest tenth that every contestant reaches, at its best rate."""
RATES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
"""Of the links, where step times are measured."""
ROUNDS, TIMED_STEPS = 5, 8


class Run(NamedTuple):
    """One training.

    Attributes:
        part: "tune", "retune" or "final".
        optimizer: "adamw" or "sgd".
        method: "ddp" for stock DDP, "bf16" or "powersgd" for DDP with that hook, or one of `lightning_sparse`.
        lr: the learning rate between warm-up and cosine.
        seed: of the initial weights and of the order of the data.
    """

    part: str
    optimizer: str
    method: str
    lr: float
    seed: int


FIXED = {"beta2": 0.999, "momentum": 0.9, "clip_norm": 0.0, "warmup_steps": 0}
"""Options of all runs: AdamW's, SGD's, and of the sparse methods."""


def neighbour(lr: float, step: int) -> float:
    """Return the rate `step` places further in the series 1, 2, 5, 10, 20, 50.

    >>> neighbour(0.5, 1), neighbour(0.1, -1)
    (1.0, 0.05)
    """
    series = (1, 2, 5)
    decade = math.floor(math.log10(lr) + 1e-9)
    place = 3 * decade + series.index(round(lr / 10.0**decade)) + step
    return float(f"{series[place % 3]}e{place // 3}")


def missing_rates(losses: Mapping[float, float], grid: Sequence[float]) -> list[float]:
    """Return the rates to try next: the rest of the grid, then what lies beyond the best one, if that is the last."""
    rest = [lr for lr in grid if lr not in losses]
    if rest:
        return rest
    return [lr for lr in (neighbour(best(losses), -1), neighbour(best(losses), 1)) if lr not in losses]


def best(losses: Mapping[float, float]) -> float:
    """Return the rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def run_ranks(what: str, runs: Sequence[Run], link: str = "loopback") -> tuple[list[Any], list[Any]]:
    """Run two ranks of `benchmarks.language_rank`; return the rows of rank 0 and those of the links' calibration."""
    with hosts(WORKERS, link) as where:
        records, reason = launch("benchmarks.language_rank", {"what": what, "runs": runs}, where, WORKERS)
    if reason:
        raise SystemExit(f"The ranks ended early: {reason}")
    return records[0]["rows"], where.calibration


def train(run: Run) -> None:
    """Train once and add the curve to `language.csv`.

    Raises:
        SystemExit: the first loss differs from that of other trainings with this seed, so they cannot be compared.
    """
    points, _ = run_ranks("curve", [run])
    table, first = results.load(RESULTS / "language.csv"), round(points[0]["val_loss"], 6)
    started = set() if table.empty else set(table.query("step == 0 and seed == @run.seed")["val_loss"])
    if started - {first}:
        raise SystemExit(f"{run} starts at a loss of {first}, others of its seed at {started}.")
    density = DENSITY if run.method in SPARSE else 1.0
    common = {**run._asdict(), **FIXED, "density": density, "workers": WORKERS, "batch_size_per_worker": BATCH_SIZE}
    rows = [
        {
            **common,
            "steps": STEPS[run.part],
            "step": point["step"],
            "val_loss": f"{point['val_loss']:.6f}",
            "val_bits_per_byte": f"{point['val_loss'] / math.log(2):.5f}",
            "sent_bytes_per_worker": point["sent_bytes"],
            "threads_per_rank": 1,
            **results.origin(),
        }
        for point in points
    ]
    results.save(RESULTS / "language.csv", rows, Run._fields)
    print(f"{run}: {points[-1]['val_loss']:.4f} nats per byte", flush=True)


def final_losses() -> dict[Run, float]:
    """Return the last loss of every run in `language.csv`."""
    table = results.load(RESULTS / "language.csv")
    if table.empty:
        return {}
    return {Run(*run): loss for run, loss in table.groupby(list(Run._fields), sort=False)["val_loss"].last().items()}


def missing_runs(part: str) -> list[Run]:
    """Return the runs of a part that `language.csv` does not have."""
    found, runs = final_losses(), []
    for optimizer, method in [(name, method) for name, methods in METHODS.items() for method in methods]:
        first, second = (
            {run.lr: loss for run, loss in found.items() if run[:3] == (name, optimizer, method)}
            for name in ("tune", "retune")
        )
        rates: list[float] = []
        if part == "final":
            rates = LONGER.get((optimizer, method), [best(second)] if second else [])
        elif (optimizer, method) not in LONGER and part == "tune":
            rates = missing_rates(first, GRID[optimizer])
        elif (optimizer, method) not in LONGER and first:
            rates = missing_rates(second, [neighbour(best(first), step) for step in (-1, 0, 1)])
        seeds = SEEDS if part == "final" else [TUNING_SEED]
        runs += [Run(part, optimizer, method, lr, seed) for lr in rates for seed in seeds]
    return sorted((run for run in runs if run not in found), key=lambda run: run.seed)


def measure_seconds() -> None:
    """Time the steps of all contestants over shaped links, and write `language_seconds.csv`."""
    if reason := missing():
        raise SystemExit(f"No links can be made here: {reason}.")
    runs = [
        Run("tune", optimizer, method, GRID[optimizer][0], 0) for optimizer in METHODS for method in METHODS[optimizer]
    ]
    rows = []
    for link in RATES:
        timed, calibration = run_ranks("step_times", runs, link)
        off = round(max(abs(probe["ratio_to_expected"] - 1) for probe in calibration), 3)
        common = {"largest_calibration_error": off, "threads_per_rank": 1, **results.origin()}
        rows += [{"rate": link, **row, **common} for row in timed]
        print(f"{link}, links up to {off:.1%} off\n{pd.DataFrame(timed).to_string()}")
        if max(row["foreign_load"] for row in timed) > FOREIGN_LOAD:
            print(f"Other programs used more than {FOREIGN_LOAD:.0%} of the processors; repeat it.")
    results.save(RESULTS / "language_seconds.csv", rows)


def steps_to(target: float, rows: Sequence[Row]) -> float:
    """Return after how many steps a curve first is at a loss, linear between two evaluations; infinity if it never is.

    >>> steps_to(2.5, [{"step": 50, "val_loss": 4.0}, {"step": 100, "val_loss": 2.0}])
    87.5
    """
    for before, after in pairwise(rows):
        high, low = float(before["val_loss"]), float(after["val_loss"])
        if low <= target:
            first, last = int(before["step"]), int(after["step"])
            return first + (last - first) * (high - target) / (high - low)
    return math.inf


def draw() -> None:
    """Print a table of the best rates, and draw their curves into `language.png`."""
    from benchmarks.harness import plots

    table = results.load(RESULTS / "language.csv").query("part == 'final'")
    timed = results.load(RESULTS / "language_seconds.csv").set_index(["rate", "optimizer", "method"])["median_ms"]
    losses = table.groupby(["optimizer", "method", "lr", "seed"])["val_loss"].last()
    means = losses.groupby(["optimizer", "method", "lr"]).mean()
    lines = []
    figure, panels = plots.panels(len(METHODS), 2 + len(RATES), (14, 7.5), sharey=True)
    for row, optimizer in zip(panels, METHODS, strict=True):
        for method in METHODS[optimizer]:
            lr = means[optimizer, method].idxmin()
            seconds = [timed.get((rate, optimizer, method), math.nan) / 1e3 for rate in RATES]
            mine = table.query("optimizer == @optimizer and method == @method and lr == @lr")
            for seed, whole in mine.groupby("seed"):
                curve = whole[whole["step"] > 0]
                sent, steps = curve["sent_bytes_per_worker"], curve["step"]
                for panel, x in zip(row, [steps, sent / 1e6, *(s * steps for s in seconds)], strict=True):
                    panel.plot(x, curve["val_loss"], **plots.line(method), label=f"{method}, rate {lr:g}")
                needed = steps_to(TARGET, whole.to_dict("records"))
                line = {"": f"{method}, {TITLES[optimizer]}", "rate": f"{lr:g}"}
                line["loss at the end"] = f"{losses[optimizer, method, lr, seed]:.2f}"
                line["kB per step"] = f"{sent.iloc[-1] / steps.iloc[-1] / 1e3:,.1f}"
                line[f"steps to {TARGET:g}"] = f"{needed:.0f}"
                line |= {f"s, {name}": f"{needed * s:.0f}" for name, s in zip(RATES.values(), seconds, strict=True)}
                lines.append(line)
        row[0].set(ylabel=f"{TITLES[optimizer]}\nvalidation loss, nats per byte", xlabel="steps")
        row[1].set(xscale="log", xlabel="sent per worker, MB")
        for panel, rate in zip(row[2:], RATES.values(), strict=True):
            panel.set(xlabel=f"seconds at {rate}")
        row[0].legend()
        for panel in row:
            panel.axhline(TARGET, color="black", linewidth=0.6)
    print(pd.DataFrame(lines).to_string(index=False))
    plots.write(figure, RESULTS / "language.png")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.language", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="try the grid of rates")
    parser.add_argument("--retune", action="store_true", help="try the best rates for longer")
    parser.add_argument("--final", action="store_true", help="compare with the rates found, still longer")
    parser.add_argument("--seconds", action="store_true", help="time steps over shaped links; needs root")
    parser.add_argument("--figure", action="store_true", help="draw the results and print a table")
    parser.add_argument("--list", action="store_true", help="print the missing runs of the part, train none")
    args = parser.parse_args()
    everything = not any([args.tune, args.retune, args.final, args.seconds, args.figure])
    for part in (part for part in ("tune", "retune", "final") if getattr(args, part) or everything):
        if args.list:
            print(*missing_runs(part), sep="\n")
        else:
            while runs := missing_runs(part):
                train(runs[0])
    if args.seconds or (everything and not args.list):
        measure_seconds()
    if args.figure or (everything and not args.list):
        draw()


if __name__ == "__main__":
    main()
