"""Trains a small language model with sparse gradients and with sparse updates, under AdamW and under SGD.

A GPT of 0.84 M parameters learns to predict the bytes of Python's standard library, with two, four or eight workers
over gloo. Each worker uses 8 sequences of 128 bytes per step. The density is 0.01, or 0.0075 with more than two
workers. The learning rate warms up linearly over a tenth of the steps, and then follows a cosine to zero. With equal
seeds, all methods have equal initial weights and equal batches in the same order. A run is reported only if all
workers end with the same weights.

    python -m benchmarks.language                 # do the trainings of `TRIED` that `language.csv` lacks
    sudo python -m benchmarks.language --seconds  # time steps over shaped links, all methods in turn
    python -m benchmarks.language --figure        # only draw the figure

Learning rates are chosen by the final loss on held-out text, in short runs with a separate seed. If the best rate is at
the end of the grid, more rates are tried. With AdamW, short runs are misleading, so the best rate and its neighbours
are also tried at full length. Losses are deterministic, so other programs may run. Step times are not deterministic:
`language_seconds.csv` contains the medians of one short run without other load. Bytes are counted for one worker.
DDP and its hooks do not count bytes, so the volume of ring all-reduces is reported. `language_seconds.csv` also
contains the bytes that left the network interface, including headers and acknowledgements.
"""

import functools
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from benchmarks.harness import plots, results
from benchmarks.harness.baselines import CONTESTANTS, Options
from benchmarks.harness.launch import check_weights, gather, run_ranks, write
from benchmarks.harness.results import Row
from benchmarks.harness.training import TIMED_STEPS, Data, Trainee, save_times, take_turns, text
from examples.models.gpt import GPT
from lightning_sparse import ProcessGroupComm

SPARSE = ["topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
LOCAL = {"local_sgd": 50, "diloco": 50, "sparseloco": 25}
EQUAL = "local_sgd, every 75"  # with two workers it sends the same bytes as topk updates; with four, every 50 does
INTERVALS = {f"{name}, every {steps}": steps for name in ("sparseloco", "diloco") for steps in (10, 50, 200)}
DELAYED = "topk updates, delayed"
DEFAULT, GAUSSIANK = "topk by default", "gaussiank by default"  # the strategies with default options
THINNER = "topk by default, thinner"  # at the density of its part
IN_EACH_STEP = [DEFAULT, GAUSSIANK, "topk updates", DELAYED, "gaussiank updates", "two_pass updates"]
UPDATES = dict.fromkeys(IN_EACH_STEP, 1) | LOCAL | {EQUAL: 75, THINNER: 1} | INTERVALS
"""Steps between exchanges, by method that exchanges updates. Weights are equal when they are evaluated."""
METHODS = {
    "adamw": ["ddp", "bf16", "powersgd", "int4", *SPARSE, *IN_EACH_STEP, *LOCAL, EQUAL],
    "sgd": ["ddp", "topk", "gaussiank"],
}
DRAWN = {
    "adamw": ["ddp", "bf16", "powersgd", "topk", DEFAULT, "local_sgd", "sparseloco"],
    "sgd": ["ddp", "topk", "gaussiank"],
}
"""Methods in the figure. The tables have all `METHODS`."""
SLOWEST = ["ddp", "bf16 hook", "TopUp by default"]  # and ours: they end far from each other
TOPS = {"adamw": (1.5, 3.5), "sgd": (2.0, 3.5)}
TITLES = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}
BATCH_SIZE, LENGTH, VAL_SEQUENCES = 8, 128, 256


class Part(NamedTuple):
    """A group of trainings: number of steps, steps between evaluations, and other common settings."""

    steps: int
    every: int
    seed: int = 0
    workers: int = 2
    density: float = 0.01
    width: int = 128
    until: int = 0  # step at which training stops; 0: after all steps


PARTS = {
    "tune": Part(250, 125, seed=100),
    "retune": Part(500, 125, seed=100),
    "final": Part(1000, 50),
    "four": Part(1000, 50, workers=4, density=0.0075),  # one rank's entries are a larger share of dense bytes
    "eight": Part(1000, 50, workers=8, density=0.0075),
    "thin": Part(1000, 50, density=0.001),  # for comparison with one worker alone
    "thinner": Part(1000, 50, density=0.0003),
    "interval": Part(1000, 200),  # weights are equal at these steps
    "alone": Part(1000, 50, workers=1),
    "large": Part(3000, 150, width=256),  # 3.3 M parameters
    "equal": Part(1000, 75, until=975),  # the last step after which weights are equal
}
LENGTHS = {20: [], 50: [], 100: [], 200: [0.006, 0.015], 500: [0.006], 3000: [0.001]}
"""Densities besides the default, by the number of steps of a whole training."""
SHORT = [f"{steps} steps" for steps in LENGTHS if steps <= 200]
"""Parts that are also trained at another rate, with three seeds."""
OF_LENGTH = {f"{steps} steps": Part(steps, steps // 2) for steps in LENGTHS}
OF_LENGTH |= {
    f"{steps} steps, density {density:g}": Part(steps, steps // 2, density=density)
    for steps, densities in LENGTHS.items()
    for density in densities
}
PARTS |= OF_LENGTH
OTHER_RATES = [0.0005, 0.001, 0.003, 0.004, 0.006, 0.008]
"""Learning rates of the part "rates", besides that of the part "final", for `ddp` and the default."""
PARTS["rates"] = Part(1000, 250)
# Steps to a loss are interpolated linearly. Early in training, the loss falls so fast that its curve is below a chord.
EARLY = {part: f"{part}, early" for part in ("final", "four", "eight", "thin", "alone")}
PARTS |= {early: PARTS[part]._replace(every=10, until=200) for part, early in EARLY.items()}
GRID = [0.001, 0.002, 0.005, 0.01]
TRIED = [
    ("tune", "adamw", ["ddp"], [0.0005, *GRID]),
    ("tune", "adamw", ["powersgd"], [0.0005, *GRID[:3]]),
    ("tune", "adamw", ["topk", "gaussiank"], GRID),
    ("retune", "adamw", ["ddp"], [0.0005, *GRID[:3]]),
    ("retune", "adamw", ["topk"], GRID),
    ("final", "adamw", ["bf16"], [0.002, 0.004]),
    ("final", "adamw", ["gaussiank updates"], [0.002]),
    ("final", "adamw", ["ddp", "int4", "topk", "topk updates", DELAYED, *LOCAL], GRID[:3]),
    ("final", "adamw", ["ddp", "int4", "topk updates", DELAYED, "gaussiank updates", DEFAULT, GAUSSIANK], [0.004]),
    ("final", "adamw", ["powersgd"], GRID),
    ("final", "adamw", ["gaussiank", "scalecom"], [0.0005, 0.001, 0.002]),
    ("final", "adamw", ["gtopk", "oktopk"], [0.0002, 0.0005, 0.001]),
    ("equal", "adamw", [EQUAL], GRID[:3]),
    ("four", "adamw", ["ddp"], [0.002, 0.004, 0.008]),
    ("four", "adamw", ["powersgd", "int4", "topk updates", DELAYED, *LOCAL], [0.002, 0.004, 0.008]),
    ("four", "adamw", ["bf16", "gaussiank updates"], [0.004]),
    ("eight", "adamw", ["ddp"], [0.004, 0.008]),
    ("eight", "adamw", ["bf16", "int4", "two_pass updates"], [0.004]),
    ("thin", "adamw", ["topk updates"], [0.002]),
    ("thin", "adamw", [THINNER], [0.002, 0.004]),
    ("thinner", "adamw", [THINNER], [0.002, 0.004]),
    ("final", "adamw", ["sparseloco"], [0.01]),
    ("interval", "adamw", ["sparseloco, every 10"], [0.002, 0.005, 0.01]),
    ("interval", "adamw", ["sparseloco, every 50", "sparseloco, every 200"], [0.005, 0.01]),
    ("interval", "adamw", ["diloco, every 10", "diloco, every 200"], GRID[:2]),
    ("final", "adamw", [DEFAULT, GAUSSIANK], [0.002]),
    ("four", "adamw", [DEFAULT], [0.004, 0.008]),
    ("eight", "adamw", [DEFAULT], [0.004, 0.008]),
    ("alone", "adamw", ["ddp"], [0.001, 0.002, 0.004]),
    *(
        (name, "adamw", [THINNER] if "density" in name else ["ddp", DEFAULT], [0.001 if part.steps < 1000 else 0.002])
        for name, part in OF_LENGTH.items()
    ),
    *((name, "adamw", ["ddp", DEFAULT], [0.004]) for name in SHORT),
    ("rates", "adamw", ["ddp", DEFAULT], OTHER_RATES),
    ("rates", "adamw", [GAUSSIANK], [0.004, 0.006]),
    ("large", "adamw", ["ddp", "topk updates", DEFAULT], [0.002]),
    ("large", "adamw", ["topk"], [0.001]),
    ("tune", "sgd", ["ddp"], [0.05, 0.1, 0.2, 0.5]),
    ("tune", "sgd", ["topk", "gaussiank"], [0.02, 0.05, 0.1, 0.2, 0.5]),
    ("retune", "sgd", ["ddp"], [0.05, 0.1, 0.2]),
    ("retune", "sgd", ["topk"], [0.01, 0.02, 0.05, 0.1]),
    ("final", "sgd", ["ddp"], [0.1]),
    ("final", "sgd", ["topk", "gaussiank"], [0.02]),
]
"""Part, optimizer, methods and rates. With AdamW and sparse gradients, the best rate for 250 and 500 steps is not the
best for 1,000 steps. So after topk and gaussiank, the other sparse methods were not tried in short runs. The methods
bf16 and gaussiank updates use ddp's rate; gaussiank with SGD uses topk's."""
REPEATED = {
    **{("final", "adamw", name): 0.004 for name in ("ddp", "int4", DEFAULT, *IN_EACH_STEP[2:5])},
    **{("four", "adamw", name): 0.004 for name in ("ddp", "topk updates", DELAYED, DEFAULT)},
    **{("eight", "adamw", name): 0.004 for name in ("ddp", "two_pass updates", DEFAULT)},
    ("thin", "adamw", "topk updates"): 0.002,
    ("alone", "adamw", "ddp"): 0.002,
}
HALF = 0.002  # rate of the trainings of the part "final" in `REPEATED`, besides the rate there
LARGE_TWICE = ["ddp", "topk updates", DEFAULT]  # also with seed 1; more would take hours
MORE_SEEDS = [1, 2]  # further seeds of `REPEATED` and of `SHORT`; the parts in `EARLY` use all seeds
TARGET = 2.6  # nats per byte: the lowest multiple of 0.1 that every method reaches at its best rate
RATES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}  # rates of the links for step times
FAR = "100mbit 50ms"  # links between distant sites, for the methods in `AT_SITES`
AT_SITES = ["ddp", "bf16", "powersgd", "int4", DEFAULT, "topk updates", DELAYED, "gaussiank updates", *LOCAL]
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": functools.partial(torch.optim.SGD, momentum=0.9)}


class Run(NamedTuple):
    """One training: a key of `PARTS`, an optimizer and a method of `METHODS`, a learning rate and a seed."""

    part: str
    optimizer: str
    method: str
    lr: float
    seed: int


def trainee(run: Run, data: Data, most: int = 1000) -> Trainee:
    """Return a model in training on this rank of a process group, with at most `most` steps between exchanges."""
    part = PARTS[run.part]
    torch.manual_seed(run.seed)
    model = GPT(LENGTH, part.width)
    optimizer = OPTIMIZERS[run.optimizer](model.parameters(), lr=run.lr)
    options = Options(part.density, every=min(UPDATES.get(run.method, 1), most))
    wrapped = CONTESTANTS[run.method.split(", every")[0]].wrap(model, options, optimizer)
    schedule = {"seed": run.seed, "batch_size": BATCH_SIZE, "steps": part.steps}
    return Trainee(model, wrapped, optimizer, data, ProcessGroupComm(), **schedule)


def work(job: Row) -> None:
    """Do a job: the curve of one run, or step times of several. This runs in each process of the benchmark."""
    data, runs = text(LENGTH, VAL_SEQUENCES), [Run(*run) for run in job["runs"]]
    if job["what"] == "step times":
        columns = [{"optimizer": run.optimizer, "method": run.method} for run in runs]
        everys, made = [UPDATES.get(run.method, 1) for run in runs], [trainee(run, data, TIMED_STEPS) for run in runs]
        for each in made:
            each.skip_density_warmup()
        take_turns([*zip(columns, everys, made, strict=True)], job["out"])
        return
    trained = trainee(runs[0], data)
    reducer = trained.wrapped.reducer
    density = (reducer and reducer.method.density) or 1.0
    part = PARTS[runs[0].part]
    for point in trained.curve(part.until or part.steps, part.every):
        write(job["out"], **point | {"sent_bytes": max(gather(point["sent_bytes"])), "density": density})
    check_weights(trained.model)


def train(run: Run, path: Path) -> list[Row]:
    """Train once, in several processes; return rows of a CSV file.

    Raises:
        SystemExit: the first loss differs from that of other trainings with this seed, so they are not comparable.
    """
    part = PARTS[run.part]
    points, _ = run_ranks("benchmarks.language", {"what": "curve", "runs": [run]}, part.workers)
    first, started = round(points[0]["val_loss"], 6), first_losses(run, results.load(path))
    if started - {first}:
        raise SystemExit(f"{run} starts at a loss of {first}, but other trainings with its seed start at {started}.")
    table = pd.DataFrame(points).rename(columns={"sent_bytes": "sent_bytes_per_worker"}).drop(columns="accuracy")
    table["val_bits_per_byte"] = table["val_loss"] / math.log(2)
    common = {"workers": part.workers, "batch_size_per_worker": BATCH_SIZE, "steps": part.steps}
    return list(table.assign(**common, threads_per_rank=1).to_dict("records"))


def first_losses(run: Run, table: pd.DataFrame) -> set[float]:
    """Return the initial losses of a table's trainings with the same model and seed."""
    table = table.reindex(columns=["part", "seed", "step", "val_loss"])  # it may be empty
    same = (table["seed"] == run.seed) & ((table["part"] == "large") == (run.part == "large"))
    return set(table[same & (table["step"] == 0)]["val_loss"])


def missing_runs(path: Path) -> list[Run]:
    """Return the runs of `TRIED` that a CSV file lacks."""
    runs = [
        Run(part, optimizer, name, lr, PARTS[part].seed)
        for part, optimizer, methods, rates in TRIED
        for name, lr in itertools.product(methods, rates)
    ]
    repeated = [Run(*what, lr, seed) for seed in [0, *MORE_SEEDS] for what, lr in REPEATED.items()]
    repeated += [run._replace(lr=HALF) for run in repeated if run.part == "final"]
    runs += [Run("large", "adamw", name, 0.002, 1) for name in LARGE_TWICE]
    runs += [
        Run(part, "adamw", name, 0.004, seed) for seed in MORE_SEEDS for part in SHORT for name in ("ddp", DEFAULT)
    ]
    runs += [run for run in repeated if run.seed] + [run._replace(part=EARLY[run.part]) for run in repeated]
    return results.missing(results.load(path), runs)


def best_rates(ends: pd.DataFrame) -> pd.Series:
    """Return each method's rate with the lowest mean of the final losses; the default has the rate of `ddp`.

    If a method's rates differ in their number of seeds, only rates with the most seeds count.
    """
    losses = ends.fillna({"val_loss": math.inf})  # of a training that diverged
    found = losses.groupby(["method", "lr"])["val_loss"].agg(["size", "mean"]).reset_index()
    found = found[found["size"] == found.groupby("method")["size"].transform("max")]
    best = found.sort_values("mean").drop_duplicates("method").set_index("method")["lr"]
    return best.where(best.index != DEFAULT, best["ddp"])


def draw(folder: Path) -> Any:
    """Draw the losses of some methods, each at its best rate, against steps and against seconds over a slow link."""
    table = results.load(folder / "language.csv").query("part == 'final' and step > 0")
    seconds = results.load(folder / "language_seconds.csv").query("workers == 2 and rate == '100mbit'")
    timed = seconds.set_index(["optimizer", "method"])["median_ms"]
    figure, panels = plots.panels(len(DRAWN), 2, 6.4, sharey="row")
    last: dict[tuple[str, str], float] = {}
    for row, (optimizer, names) in zip(panels, DRAWN.items(), strict=True):
        labels: list[list[Any]] = [[], []]
        best = best_rates(table[(table["optimizer"] == optimizer) & (table["step"] == PARTS["final"].steps)])
        for name in names:
            mine = table.query("optimizer == @optimizer and method == @name")
            curve = mine[mine["lr"] == best[name]].groupby("step", as_index=False)["val_loss"].mean()
            last[optimizer, name] = curve["val_loss"].iloc[-1]
            spent = timed[optimizer, name] / 1e3 * curve["step"]
            label = "topk, gradients" if name == "topk" and optimizer == "adamw" else plots.shown(name)
            for panel, x, its in zip(row, (curve["step"], spent), labels, strict=True):
                panel.plot(x, curve["val_loss"], color=plots.color(name), label=name)
                its.append((x.iloc[-1], curve["val_loss"].iloc[-1], label, plots.color(name)))
        low, high = TOPS[optimizer]
        row[0].set(xlim=(0, 1000), ylim=(low, high), xlabel="steps", ylabel="validation loss, nats per byte")
        row[1].set(xlim=(0, None), xlabel="seconds at 100 Mbit/s")
        row[0].set_title(f"{TITLES[optimizer]}: loss against steps")
        row[1].set_title(f"{TITLES[optimizer]}: loss against seconds")
        plots.ends(row[0], labels[0])
        plots.ends(row[1], [each for each in labels[1] if optimizer == "sgd" or each[2] in SLOWEST])
    above = 100 * (last["adamw", "topk"] / last["adamw", "ddp"] - 1)
    near = 100 * (last["adamw", DEFAULT] / last["adamw", "ddp"] - 1)
    sgd = 100 * (last["sgd", "topk"] / last["sgd", "ddp"] - 1)
    finding = (
        f"With AdamW sparse gradients end {above:.0f} % above ddp's loss, TopUp by default {abs(near):.1f} % "
        f"{'below' if near < 0 else 'above'} it; with SGD sparse gradients end {sgd:.0f} % above"
    )
    task = (
        "GPT of 0.84 M parameters on source text, two workers, 1,000 steps, each at its best learning rate of a grid "
        "(TopUp: at that of ddp), mean of the seeds. Seconds: steps times the median step."
    )
    plots.headline(figure, finding, task)
    return figure


FIGURES = [plots.Figure("language", draw, ("language", "language_seconds"))]

if __name__ == "__main__":
    parser = results.command_line(__doc__)
    parser.add_argument("--seconds", action="store_true", help="time steps over shaped links; needs root")
    args = parser.parse_args()
    path = args.out / "language.csv"
    if args.seconds:
        two = [(optimizer, name) for optimizer, names in METHODS.items() for name in names]
        four = [("adamw", name) for name in METHODS["adamw"] if name not in [*SPARSE, EQUAL]]
        far = [("adamw", name) for name in AT_SITES]
        cases = [*itertools.product((("tune", two), ("four", four)), RATES), (("tune", far), FAR), (("four", far), FAR)]
        for (part, contestants), rate in cases:
            case = {"workers": PARTS[part].workers, "rate": rate}
            runs = [Run(part, *contestant, 0.001, 0) for contestant in contestants]
            seconds = args.out / "language_seconds.csv"
            save_times(seconds, "benchmarks.language", case, case["workers"], what="step times", runs=runs)
    elif not args.figure:
        results.save_each(path, missing_runs(path), lambda run: train(run, path), digits=7)
    for figure in FIGURES:
        figure.write(args.out)
