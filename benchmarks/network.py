r"""Measures step times of ways to average gradients, over links of a given rate.

    sudo python -m benchmarks.network
    python -m benchmarks.network --workload real --rates loopback --tune
    sudo python -m benchmarks.network --workload real
    sudo python -m benchmarks.network --workload resnet50 --contestants none ddp topk gtopk
    sudo python -m benchmarks.network --workload gpt2 --dilate 4 --density 0.003 --file network_gpt2.csv --contestants \
        none ddp int4 "topk updates, int2"
    python -m benchmarks.network --figure

Each worker is a process on a separate host (see `benchmarks.harness.shaped_links`). Nothing is reported if a link
deviates from its rate by more than 10 %. Without root, the workers share the loopback interface, which is not shaped,
and `--out` must be another folder. The methods run one after the other in the same processes. Each is checked before it
is timed (see `benchmarks.network_rank`).

Workloads: "mlp" runs steps of a model of 25.6 million parameters on random data with SGD, and "mlp_adamw" with AdamW.
The workloads "real" and "real_resnet20" train a small convolutional network, or ResNet-20, on scikit-learn's
handwritten digits. They record the test loss over time. All other workloads are paced: gradients of the model's shapes
arrive after the published compute time, and the processors sleep meanwhile. For the methods see
`benchmarks.harness.baselines`.
"""

import argparse
import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness import baselines, plots, results
from benchmarks.harness.launch import RanksFailed, Record, hosts, launch
from benchmarks.harness.results import Row
from benchmarks.harness.shaped_links import bits_per_second, missing
from benchmarks.harness.timing import FOREIGN_LOAD, step_columns
from benchmarks.harness.workloads import BATCH, COMPUTE_SECONDS, TARGET_LOSS, TRAININGS

OURS = ["topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
CONTESTANTS = ["none", "idle_hook", "ddp", "fp16", "bf16", "powersgd", "naive_topk", *OURS, "randk"]
WITH_ADAMW = ["none", "ddp", "bf16", "int4", "topk", "topk updates", "gaussiank updates"]
ONLY_TRAINED = ["ddp_accumulated", "local_sgd"]
IN_TRAININGS = ["ddp", "bf16", "powersgd", *OURS, *ONLY_TRAINED]
RATES, PACED_RATES = ["100mbit", "1gbit"], ["1gbit"]
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
SHOWN = ["none", "ddp", "bf16", "powersgd", "naive_topk", "topk", "scalecom"]
TIMED = ["ddp", "bf16", "powersgd", "topk", "oktopk", "local_sgd"]
"""Methods in the figures. The tables have all."""
SHORT = {"real": "CNN", "real_resnet20": "ResNet-20"}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "loopback": "loopback, no limit"}
AT = {rate: "over loopback" if rate == "loopback" else f"at {link}" for rate, link in LINKS.items()}
BUSY = 0.7
"""Share of busy processors above which a paced measurement is invalid, because the processors are its limit."""
PATIENCE = 900  # seconds without a record after which ranks count as hung; at 25 Mbit/s a dense GPT-2 step takes 240 s


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = results.command_line(__doc__)
    add = parser.add_argument
    workloads, known = ["mlp", "mlp_adamw", *TRAININGS, *COMPUTE_SECONDS], list(baselines.CONTESTANTS)
    slowed = "paced workloads: divide the link's rate by N, multiply the compute time by N, and divide reported times \
by N, so that two cores suffice for many ranks; latency and processor time then count less"
    tune = "real workloads: train with each of the LEARNING_RATES and write the one with the fewest steps to \
network_tuning.csv; other trainings use the rate in that file, or 0.05"
    rates = f"in tc's notation, or loopback. Default: {RATES}; paced workloads: {PACED_RATES}"
    add("--rates", nargs="+", metavar="RATE", help=rates)
    add("--workload", choices=workloads, default="mlp", help="see above. Default: mlp")
    add("--dilate", type=float, default=1, metavar="N", help=slowed)
    add("--ranks-per-host", type=int, default=1, metavar="N", help="number of ranks that share a link")
    add("--contestants", nargs="+", choices=known, metavar="NAME", help=f"choose from {known}")
    add("--workers", type=int, default=4, help="number of ranks. Default: 4")
    add("--rounds", type=int, default=1, help="number of turns of all contestants. Default: 1")
    add("--seconds", type=float, default=10, help="time per contestant and round; real: time limit. Default: 10")
    add("--density", type=float, help="density of sparse contestants. Default: 0.001; in trainings 0.01")
    add("--tune", action="store_true", help=tune)
    add("--file", help="CSV file to add rows to. Default: network.csv or network_paced.csv, whose rate is replaced")
    args = parser.parse_args()
    args.density = args.density or (0.01 if args.workload in TRAININGS else 0.001)
    args.rates = args.rates or (PACED_RATES if args.workload in COMPUTE_SECONDS else RATES)
    usual = IN_TRAININGS if args.workload in TRAININGS else CONTESTANTS
    args.contestants = args.contestants or (WITH_ADAMW if args.workload == "mlp_adamw" else usual)
    if args.workers < 2 or args.workers % args.ranks_per_host:
        parser.error(f"--workers {args.workers}: at least two, and a multiple of --ranks-per-host.")
    if args.dilate != 1 and args.workload not in COMPUTE_SECONDS:
        parser.error(f"--dilate {args.dilate:g}: only paced models can be slowed down, not {args.workload}.")
    if not args.figure and args.rates != ["loopback"] and (reason := missing()):
        if args.out.resolve() == results.RESULTS.resolve():
            parser.error(f"links cannot be created here: {reason}. To measure over loopback, give --out.")
        print(f"Links cannot be created here: {reason}. Using loopback without shaping instead.")
        args.rates = ["loopback"]
    return args


def contestants(args: argparse.Namespace) -> list[Row]:
    """Return the methods of a workload in order; for trainings, each with its learning rates."""
    if args.workload not in TRAININGS:
        return [{"contestant": name} for name in args.contestants if name not in ONLY_TRAINED] * args.rounds
    tuned = results.load(args.out / "network_tuning.csv")
    best = {} if tuned.empty else tuned[tuned["workload"] == args.workload].set_index("contestant")["learning_rate"]
    rates = {name: LEARNING_RATES if args.tune else [best.get(name, 0.05)] for name in args.contestants}
    return [{"contestant": name, "learning_rate": rate} for name in rates for rate in rates[name]]


def measure(args: argparse.Namespace, rate: str) -> None:
    """Measure all methods at one rate, print the results, and write them to the CSV files."""
    print(f"{args.workload}, {rate}, {args.workers} workers")
    todo, compute = contestants(args), COMPUTE_SECONDS.get(args.workload)
    job = {"module": "benchmarks.network_rank", "todo": todo, "compute": (compute or 0.0) * args.dilate}
    job |= {name: getattr(args, name) for name in ("workload", "ranks_per_host", "density", "seconds")}
    records: list[Record] = []
    as_is = rate == "loopback" or args.dilate == 1
    slowed = rate if as_is else f"{bits_per_second(rate) / args.dilate / 1e3:g}kbit"
    with hosts(args.workers, slowed, ranks_per_host=args.ranks_per_host) as where:
        try:
            records.extend(launch("benchmarks.harness.launch", job, where, args.workers, PATIENCE))
        except RanksFailed as error:
            failed = next((row["contestant"] for row in todo[len(records) :]), None)
            lacking = f"{failed} and the contestants after it have no result" if failed else "After all results"
            print(f"  {lacking}: {error}")
            records = [record for record in records if record["contestant"] != failed]
    key = {"workload": args.workload, "rate": rate, "workers": args.workers, "ranks_per_host": args.ranks_per_host}
    common = {**key, "dilate": f"{args.dilate:g}", "links": where.links, "batch": BATCH, "density": args.density}
    common |= {"threads_per_rank": 1, **results.origin()}
    if records and args.workload in TRAININGS:
        save_curves(args, records, common, list(key))
    elif records:
        rows = [row | common for row in summarise(records, args.workers, args.dilate)]
        name = args.file or ("network_paced.csv" if compute else "network.csv")
        results.save(args.out / name, rows, [*key, "dilate", "contestant"] if args.file else list(key))
        table = pd.DataFrame(rows)
        print(table.loc[:, :"foreign_load"].to_string(index=False, na_rep=""))
        for row in table.itertuples():
            if compute and row.contestant != "none" and row.busy > BUSY:
                print(f"  {row.contestant}: invalid, because the processors were {row.busy:.0%} busy. Use --dilate.")
            if row.foreign_load > FOREIGN_LOAD:
                print(f"  {row.contestant}: other programs used {row.foreign_load:.0%} of the processors; repeat this.")


def save_curves(args: argparse.Namespace, records: list[Record], common: Row, key: list[str]) -> None:
    """Write the test loss over time, or the best learning rates."""
    case = ["contestant", "learning_rate"]
    points = pd.DataFrame({name: record[name] for name in case} | row for record in records for row in record["curve"])
    ends = points.groupby(case, sort=False).tail(1)
    print(ends.to_string(index=False))
    if args.tune:
        reached = ends[ends["test_loss"] < TARGET_LOSS].rename(columns={"step": "steps"})
        best = reached.sort_values("steps", kind="stable").drop_duplicates("contestant")
        rows = best[[*case, "steps"]].assign(**common).to_dict("records")
        results.save(args.out / "network_tuning.csv", rows, ["contestant", "workload"])
    else:
        results.save(args.out / "network_real.csv", points.assign(**common).to_dict("records"), key, digits=6)


def summarise(records: list[Record], workers: int, dilate: float) -> list[Row]:
    """Return one row per method."""
    rows: list[Row] = []
    ddp = None
    for name, rounds in pd.DataFrame(records).groupby("contestant", sort=False):
        quiet = rounds[rounds["foreign_load"] <= FOREIGN_LOAD]
        quiet = rounds if quiet.empty else quiet  # use disturbed rounds only if there are no others
        ms, cpu_ms, first = quiet["ms"].sum(), quiet["cpu_ms"].mean(), quiet.iloc[0]
        median = statistics.median(ms)
        ddp = median if name == "ddp" else ddp
        rows.append(
            {
                "contestant": name,
                "params": first["params"],
                **step_columns(ms, dilate),
                "times_faster_than_ddp": round(ddp / median, 2) if ddp else None,
                "sent_bytes_per_step": round(first["sent_bytes"]) or None,
                "tx_bytes_per_step": round(first["tx_bytes"]) or None,
                "peak_mb": round(rounds["peak_bytes"].max() / 1e6),
                "cpu_ms_per_step_and_rank": round(cpu_ms / dilate, 1),
                "busy": round(cpu_ms * workers / (os.cpu_count() or 1) / median, 3),
                "foreign_load": round(quiet["foreign_load"].max(), 3),
            }
        )
    return rows


def ordered(rates: Iterable[str]) -> list[str]:
    """Return each rate once, slow ones first, and loopback last."""
    return sorted(set(rates), key=lambda rate: math.inf if rate == "loopback" else bits_per_second(rate))


def density_of(rows: pd.DataFrame) -> str:
    """Return the density of all rows as text.

    Raises:
        ValueError: the rows have several densities.
    """
    found = [f"{density:g}" for density in rows["density"].unique()]
    if len(found) > 1:
        raise ValueError(f"One figure cannot show runs with densities {' and '.join(found)}.")
    return "".join(found)


def draw_steps(folder: Path) -> Any:
    """Draw the step times of some methods, with one panel per rate."""
    rows = pd.concat(results.load(folder / f"{name}.csv") for name in ("network", "network_paced"))
    rows = rows.query("workload in ['mlp', 'mlp_paced'] and workers == 4 and ranks_per_host == 1")
    density, rates = density_of(rows), ordered(rows["rate"])
    lines = max(1, math.ceil(len(rates) / 2))
    figure, panels = plots.panels(lines, 2, 0.6 + 2.2 * lines)
    for panel in panels.flat[len(rates) :]:
        panel.remove()
    gains = []
    for panel, rate in zip(panels.flat, rates, strict=False):
        mine = rows[(rows["rate"] == rate) & rows["contestant"].isin(SHOWN)].set_index("contestant")
        mine = mine.loc[[name for name in SHOWN if name in mine.index]]
        times = (mine.median_ms["ddp"] / mine.median_ms) if "ddp" in mine.index else mine.median_ms * math.nan
        texts = [
            f"{ms:,.0f}" + (f"  ({gain:.1f}× faster)" if name not in ("none", "ddp") and gain > 1.05 else "")
            for name, ms, gain in zip(mine.index, mine.median_ms, times, strict=True)
        ]
        errors = [mine.median_ms - mine.p20_ms, mine.p80_ms - mine.median_ms]
        names = [plots.shown(name) for name in mine.index]
        plots.bars(panel, names, list(mine.median_ms), [plots.color(name) for name in mine.index], texts, errors)
        panel.set_xlim(0, 1.35 * mine.p80_ms.max())
        how = LINKS.get(rate, rate) + ("" if mine["dilate"].iloc[0] == 1 else ", emulated in slow motion")
        panel.set(xlabel="ms per step", title=how)
        if "topk" in times:
            gains.append(f"{times['topk']:.1f}× {AT.get(rate, rate)}")
    finding = f"Speed-up of a step with topk over stock ddp: {', '.join(gains)}"
    task = (
        f"Median step of an MLP of 25.6 M parameters with SGD, density {density}, four workers on two cores; "
        "whiskers: the middle three fifths of the steps. Other methods: see the table."
    )
    plots.headline(figure, finding, task)
    return figure


def draw_trainings(folder: Path) -> Any:
    """Draw the seconds to the target loss: a row for each workload, a column for each rate."""
    rows = results.load(folder / "network_real.csv")
    density, workloads, rates = density_of(rows), list(dict.fromkeys(rows["workload"])), ordered(rows["rate"])
    figure, panels = plots.panels(len(workloads), len(rates), 0.9 + 1.8 * len(workloads), sharey="row")
    reached = rows[rows["test_loss"] < TARGET_LOSS].groupby(["workload", "rate", "contestant"])["seconds"].first()
    for line, workload in zip(panels, workloads, strict=True):
        for panel, rate in zip(line, rates, strict=True):
            if (workload, rate) not in reached.index.droplevel("contestant"):
                panel.remove()
                continue
            seconds = reached[workload, rate]
            names = [name for name in TIMED if name in seconds]
            times = [seconds[name] for name in names]
            texts = [f"{time:.1f}" for time in times]
            plots.bars(
                panel, [plots.shown(name) for name in names], times, [plots.color(name) for name in names], texts
            )
            panel.set_xlim(0, 1.2 * max(times))
            title = f"{SHORT[workload]}, {LINKS.get(rate, rate).removesuffix(', no limit')}"
            panel.set(title=title, xlabel=f"seconds to test loss {TARGET_LOSS:g}")
    said = []
    for workload in workloads:
        gains = []
        for rate in rates:
            if {(workload, rate, "ddp"), (workload, rate, "topk")} <= set(reached.index):
                gain = reached[workload, rate, "ddp"] / reached[workload, rate, "topk"]
                gains.append(f"{gain:.1f}× {AT.get(rate, rate)}")
        said.append(f"{SHORT[workload]}: {', '.join(gains)}")
    task = (
        f"Seconds of training until the test loss is below {TARGET_LOSS:g}: handwritten digits, SGD, four workers on "
        f"two cores, density {density}, each at its best learning rate. CNN: convolutional network of 2.1 M parameters."
    )
    plots.headline(figure, f"Speed-up of topk over stock ddp to the same loss: {'; '.join(said)}", task)
    return figure


FIGURES = [
    plots.Figure("network", draw_steps, ("network", "network_paced")),
    plots.Figure("network_real", draw_trainings, ("network_real",)),
]

if __name__ == "__main__":
    args = parse()
    for rate in [] if args.figure else args.rates:
        measure(args, rate)
    for figure in FIGURES:
        figure.write(args.out)
