"""Step times of ways to average gradients, over links of a given rate.

    sudo python -m benchmarks.network --rates 100mbit 1gbit
    python -m benchmarks.network --workload real --rates loopback --tune
    sudo python -m benchmarks.network --workload real --rates 100mbit
    sudo python -m benchmarks.network --workload resnet50 --contestants none ddp topk gtopk
    python -m benchmarks.network --plot

Each worker is a process on a host of its own (see `benchmarks.links`); the links are calibrated first, and nothing is
reported when they are off by more than 10 %. Without root the workers share the loopback interface, unshaped. The
contestants run one after the other in the same processes, several times over, each checked before it is timed
(see `benchmarks.rank`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.links import INTERFACE, Links, bits_per_second, missing
from benchmarks.shapes import COMPUTE_SECONDS

RESULTS = Path(__file__).parent / "results"
CONTESTANTS = ["none", "idle_hook", "ddp", "fp16", "bf16", "powersgd", "naive_topk", "topk", "gaussiank"]
MORE = ["gtopk", "oktopk", "scalecom", "randk", "topk_two_level", "ddp_accumulated", "local_sgd", "parts"]
# What must hold: how many times faster than another contestant, by rate.
TARGETS = {"1gbit": {"ddp": 5.0, "powersgd": 1.8}, "100mbit": {"ddp": 35.0}}
# One thread each, as with more ranks than processors any other number is worse. And memory that is freed stays with the
# process: by default glibc hands large blocks back to the kernel or not depending on what ran before, and the page
# faults that follow make the same step 60 to 90 ms long on one core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
}
# A step may take this much longer than one without communication plus selection plus decoding.
SLACK = 1.2
# What other programs may use of the processors.
FOREIGN_LOAD = 0.05
# Workloads that train for real, and the rates to choose from.
TRAININGS = {"real": "convolutional network, 2.1 M", "real_resnet20": "ResNet-20, 0.27 M"}
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
# With paced models processors stand for accelerators and network cards, and must not be what limits them.
BUSY = 0.7
Start = Callable[[int, list[str], dict[str, str], Path], "subprocess.Popen[str]"]
Row = dict[str, Any]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        default=["1gbit"],
        metavar="RATE",
        help="link rates as tc writes them (100mbit, 1gbit, 10gbit), or loopback: one host, unshaped. Default: 1gbit",
    )
    parser.add_argument(
        "--workload",
        choices=["mlp", *TRAININGS, *COMPUTE_SECONDS],
        default="mlp",
        metavar="NAME",
        help="mlp: time steps of a model of 25.6 million parameters on random data. real, real_resnet20: "
        "train a small convolutional network, or ResNet-20, on scikit-learn's handwritten digits and record the test "
        "loss over time. "
        f"{', '.join(COMPUTE_SECONDS)}: paced, so gradients of that model's shapes, made of real ones of a small "
        "network, come after the published compute time, while the processors sleep. Default: mlp",
    )
    parser.add_argument(
        "--dilate",
        type=float,
        default=1,
        metavar="N",
        help="paced models: a link of the Nth part of the rate and N times the compute time, so that two cores keep "
        "up with many ranks; reported times are the Nth part. Latency, and what the processors do, count for less "
        "by that. Default: 1",
    )
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="N",
        help="how many ranks share a link. Default: 1",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=[*CONTESTANTS, *MORE],
        default=[*CONTESTANTS, "parts"],
        metavar="NAME",
        help=f"among {', '.join([*CONTESTANTS, *MORE])}; parts times selection and decoding alone (mlp only); "
        f"ddp_accumulated and local_sgd send as many bytes as topk, seldom and densely (real only). Default: "
        f"{', '.join(CONTESTANTS)}, parts",
    )
    parser.add_argument("--workers", type=int, default=4, help="number of ranks. Default: 4")
    parser.add_argument("--rounds", type=int, default=1, help="how often all contestants take turns. Default: 1")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10,
        help="mlp: time each contestant for about so long in each round; real: train so long at most. Default: 10",
    )
    parser.add_argument("--min-steps", type=int, default=3, help="timed steps at least. Default: 3")
    parser.add_argument("--max-steps", type=int, default=30, help="timed steps at most, in each round. Default: 30")
    parser.add_argument("--batch", type=int, default=16, help="examples per rank and step. Default: 16")
    parser.add_argument("--density", type=float, default=0.001, help="of the sparse contestants. Default: 0.001")
    parser.add_argument(
        "--bucket-cap-mb", type=float, default=25, help="size of DDP's buckets for our contestants. Default: 25"
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help=f"real: train with each of the learning rates {', '.join(map(str, LEARNING_RATES))} and keep, in "
        "network_tuning.csv, the one that takes the fewest steps. Without it what is kept there is used, or 0.05",
    )
    parser.add_argument("--target-loss", type=float, default=0.2, help="real: stop at this test loss. Default: 0.2")
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        help="seconds without news from the ranks after which a contestant counts as hung and the others go on. "
        "Default: 120",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the CSV files and figures. Default: benchmarks/results"
    )
    parser.add_argument("--plot", action="store_true", help="measure nothing, draw the figures of the CSV files")
    args = parser.parse_args(argv)
    if args.workers < 2:
        parser.error(f"--workers {args.workers}: at least two ranks are needed to communicate.")
    if args.workers % args.ranks_per_host:
        parser.error(f"--ranks-per-host {args.ranks_per_host} does not divide --workers {args.workers}.")
    if args.dilate != 1 and args.workload not in COMPUTE_SECONDS:
        parser.error(f"--dilate {args.dilate:g}: only paced models can be slowed down, not {args.workload}.")
    return args


@contextlib.contextmanager
def hosts(
    workers: int, rate: str, *, ranks_per_host: int = 1, dilate: float = 1
) -> Iterator[tuple[Start, dict[str, str], list[Row], str]]:
    """Make the hosts, or stay on loopback.

    Args:
        workers: number of ranks.
        rate: of the links, as tc writes it, or "loopback".
        ranks_per_host: how many of them share a link.
        dilate: the links have this part of the rate.

    Yields:
        A function that starts a rank, the environment the ranks need, the calibration's rows, and what the links are.

    Raises:
        SystemExit: the links are not what they should be.
    """
    if rate == "loopback":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes: list[subprocess.Popen[str]] = []

        def start(rank: int, argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[str]:
            with log.open("w") as file:
                processes.append(subprocess.Popen(argv, env=env, stderr=file, text=True))
            return processes[-1]

        try:
            yield start, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}, [], "none"
        finally:
            end(processes)
        return
    slowed = f"{bits_per_second(rate) / dilate / 1e3:g}kbit" if dilate != 1 else rate
    with Links(workers // ranks_per_host, slowed) as links:
        rows = []
        for measured in links.calibrate():
            print(
                f"  {measured.name}: {measured.goodput / 1e6:.0f} Mbit/s of payload, {measured.ratio:.3f} of expected"
            )
            rows.append(
                {
                    "rate": slowed,
                    "burst": links.burst,
                    "probe": measured.name,
                    "payload_bytes": measured.payload_bytes,
                    "seconds": round(measured.seconds, 5),
                    "payload_mbit_per_s": round(measured.goodput / 1e6, 1),
                    "ratio_to_expected": round(measured.ratio, 3),
                }
            )
            if not measured.ok:
                raise SystemExit(
                    f"The {slowed} links carry {measured.ratio:.2f} times what they should ({measured.name}): more "
                    f"than 10 % off, so nothing is measured. Is there another load on the machine, or is the rate "
                    f"beyond what its processors move?"
                )

        def start(rank: int, argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[str]:
            with log.open("w") as file:
                return links.popen(rank // ranks_per_host, argv, env=env, stderr=file)

        yield (
            start,
            {"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE},
            rows,
            f"tbf {links.burst}, {links.congestion_control}",
        )


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End processes, by force after three seconds."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def launch(
    args: argparse.Namespace, start: Start, env: dict[str, str], todo: list[tuple[str, int]]
) -> tuple[list[Row], str | None]:
    """Run contestants in one set of processes.

    Returns:
        A record per finished contestant and round, and what ended the run early, None if nothing did.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "results")
        out.touch()
        job = {
            name: getattr(args, name)
            for name in (
                "workload",
                "seconds",
                "min_steps",
                "max_steps",
                "batch",
                "density",
                "bucket_cap_mb",
                "target_loss",
                "ranks_per_host",
            )
        }
        job["compute"] = COMPUTE_SECONDS.get(args.workload, 0.0) * args.dilate
        argv = [sys.executable, "-m", "benchmarks.rank", json.dumps({**job, "todo": todo, "out": str(out)})]
        logs = [Path(folder, f"rank{rank}") for rank in range(args.workers)]
        processes = [
            start(
                rank,
                argv,
                {**ENVIRONMENT, **os.environ, **env, "RANK": str(rank), "WORLD_SIZE": str(args.workers)},
                logs[rank],
            )
            for rank in range(args.workers)
        ]
        size, news, reason = 0, time.monotonic(), None
        while reason is None and None in (states := [process.poll() for process in processes]) and not any(states):
            time.sleep(0.2)
            if out.stat().st_size > size:
                size, news = out.stat().st_size, time.monotonic()
            if time.monotonic() - news > args.patience:
                reason = f"no news for {args.patience:g} s"
        if any(states):
            # One rank knows the reason and the others only miss it, in whatever order they end: show all.
            time.sleep(2)
            reason = "".join(
                f"\n    rank {rank} (status {process.poll()}): {last_line(logs[rank])}"
                for rank, process in enumerate(processes)
            )
        end(processes)
        return [json.loads(line) for line in out.read_text().splitlines()], reason


def last_line(log: Path) -> str:
    """Return the last line that a rank wrote."""
    return ([line.strip() for line in log.read_text().splitlines() if line.strip()] or ["no message"])[-1]


def measure(args: argparse.Namespace, rate: str) -> None:
    """Measure all contestants at one rate, print the result and put it in the CSV files."""
    print(f"{args.workload}, {rate}, {args.workers} workers")
    options = {"ranks_per_host": args.ranks_per_host, "dilate": args.dilate}
    with hosts(args.workers, rate, **options) as (start, env, calibration, links):
        names = args.contestants
        if args.workload != "mlp":
            names = [name for name in names if name != "parts"]
        if args.workload not in TRAININGS:
            names = [name for name in names if name not in ("ddp_accumulated", "local_sgd")]
        else:
            tuned = [row for row in load(args.out / "network_tuning.csv") if row["workload"] == args.workload]
            best = {row["contestant"]: row["learning_rate"] for row in tuned}
            names = [
                f"{name}@{rate}"
                for name in names
                for rate in (LEARNING_RATES if args.tune else [best.get(name, "0.05")])
            ]
        todo = [(name, number) for number in range(1 if args.workload in TRAININGS else args.rounds) for name in names]
        results: dict[str, list[Any]] = {}
        while todo:
            records, reason = launch(args, start, env, todo)
            for record in records:
                if "finished" in record:
                    results.setdefault(record["finished"], []).append(record["result"])
                    todo.remove((record["finished"], record["round"]))
            if reason:
                if not records:
                    raise SystemExit(f"The ranks did not start: {reason}")
                print(f"  {todo[0][0]} has no result: {reason}")
                results.pop(todo[0][0], None)
                todo = [(name, number) for name, number in todo if name != todo[0][0]]
    for probe in calibration[:1]:
        save(args.out / "network_links.csv", calibration, {"rate": probe["rate"]})
    key = {
        "workload": args.workload,
        "rate": rate,
        "workers": args.workers,
        "ranks_per_host": args.ranks_per_host,
    }
    common = {
        **key,
        "dilate": args.dilate,
        "links": links,
        "batch": args.batch,
        "density": args.density,
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_rank": 1,
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.workload in TRAININGS:
        curves = {tuple(name.split("@")): curve for name, (curve, *_) in results.items()}
        for (name, learning_rate), curve in curves.items():
            last = curve[-1]
            print(
                f"  {name:12} rate {learning_rate:5} test loss {last['test_loss']:.3f}, accuracy "
                f"{last['test_accuracy']:.3f} after {last['step']} steps, {last['seconds']:.1f} s"
            )
        if args.tune:
            reached = [
                {"contestant": name, "learning_rate": learning_rate, "steps": curve[-1]["step"], **common}
                for (name, learning_rate), curve in curves.items()
                if curve[-1]["test_loss"] < args.target_loss
            ]
            for name in dict.fromkeys(row["contestant"] for row in reached):
                rows = sorted((row for row in reached if row["contestant"] == name), key=lambda row: row["steps"])
                save(args.out / "network_tuning.csv", rows[:1], {"contestant": name, "workload": args.workload})
            return
        rows = [
            {
                "contestant": name,
                "learning_rate": learning_rate,
                **{column: round(value, 4) for column, value in point.items()},
                **common,
            }
            for (name, learning_rate), curve in curves.items()
            for point in curve
        ]
        save(args.out / "network_real.csv", rows, key)
        return
    rows = [{**row, **common} for row in summarise(results, args.workers, args.dilate)]
    save(args.out / ("network_paced.csv" if args.workload in COMPUTE_SECONDS else "network.csv"), rows, key)
    report(rows, rate)


def summarise(results: dict[str, list[Any]], workers: int, dilate: float) -> list[Row]:
    """Make one row per contestant, per phase of our reducer, and per part timed alone."""
    cores = os.cpu_count() or 1
    rows: list[Row] = []

    def row(kind: str, name: str, ms: list[float], **more: Any) -> None:
        ms = [value / dilate for value in ms]
        p20, _, _, p80 = statistics.quantiles(ms, n=5, method="inclusive") if len(ms) > 1 else ms * 4
        rows.append(
            {
                "kind": kind,
                "contestant": name,
                "params": "",
                "steps": len(ms),
                "median_ms": round(statistics.median(ms), 1),
                "p20_ms": round(p20, 1),
                "p80_ms": round(p80, 1),
                "times_faster_than_ddp": "",
                "sent_bytes_per_step": "",
                "tx_bytes_per_step": "",
                "cpu_ms_per_step_and_rank": "",
                "busy": "",
                "foreign_load": "",
                **more,
            }
        )

    medians: dict[str, float] = {}
    for name, rounds in results.items():
        if name == "parts":
            continue
        # Rounds that other programs disturbed count only where there is no other.
        results[name] = rounds = [one for one in rounds if one["foreign_load"] <= FOREIGN_LOAD] or rounds
        ms = [value for one in rounds for value in one["ms"]]
        medians[name] = statistics.median(ms)
        row(
            "step",
            name,
            ms,
            params=rounds[0]["params"],
            times_faster_than_ddp=round(medians["ddp"] / medians[name], 2) if "ddp" in medians else "",
            sent_bytes_per_step=round(rounds[0]["sent_bytes"]) or "",
            tx_bytes_per_step=round(rounds[0]["tx_bytes"]) or "",
            cpu_ms_per_step_and_rank=round(cpu_ms := statistics.mean(one["cpu_ms"] for one in rounds), 1),
            busy=round(cpu_ms * workers / cores / medians[name], 3),
            foreign_load=round(max(one["foreign_load"] for one in rounds), 3),
        )
    for name, rounds in results.items():
        for phase in rounds[0].get("phases_ms", {}):
            row("phase", f"{name} {phase}", [one["phases_ms"][phase] for one in rounds])
    for part in results.get("parts", [{}])[0]:
        row("part", part, [value for one in results["parts"] for value in one[part]])
    return rows


def report(rows: list[Row], rate: str) -> None:
    """Print a table, and what became of the targets."""
    for row in rows:
        times = f"{row['median_ms']:9.1f} ms  [{row['p20_ms']:.1f}, {row['p80_ms']:.1f}]  n={row['steps']}"
        faster = f"  {row['times_faster_than_ddp']} x ddp" if row["times_faster_than_ddp"] else ""
        if row["cpu_ms_per_step_and_rank"]:
            faster += f"  cpu {row['cpu_ms_per_step_and_rank']} ms"
        wire = "".join(
            f"  {key.partition('_')[0]} {row[key] / 1e6:.3f} MB"
            for key in ("sent_bytes_per_step", "tx_bytes_per_step")
            if row[key]
        )
        print(f"  {row['kind']:6}{row['contestant']:24}{times}{faster}{wire}")
    for row in rows:
        if row["busy"] and row["workload"] in COMPUTE_SECONDS and row["contestant"] != "none" and row["busy"] > BUSY:
            print(
                f"  {row['contestant']}: the processors were busy for {row['busy']:.0%} of the time, so this says more "
                f"about them than about the links: not valid. Use --dilate."
            )
        if row["foreign_load"] and row["foreign_load"] > FOREIGN_LOAD:
            print(f"  {row['contestant']}: other programs used {row['foreign_load']:.0%} of the processors; repeat it")
    median = {row["contestant"]: row["median_ms"] for row in rows}
    targets = TARGETS.get(rate, {}) if (rows[0]["workload"], rows[0]["workers"]) == ("mlp", 4) else {}
    for name in ("topk", "gaussiank"):
        for other, factor in targets.items():
            if name in median and other in median:
                reached = median[other] / median[name]
                print(f"  {name}: {reached:.2f} times faster than {other}, {verdict(reached >= factor)} {factor:g}")
        if {name, "none", f"select {name}", "decode"} <= set(median):
            allowed = SLACK * (median["none"] + median[f"select {name}"] + median["decode"])
            met = verdict(median[name] <= allowed)
            print(f"  {name}: {median[name]:.0f} ms, {met} {SLACK:g} x (none + select + decode) = {allowed:.0f} ms")


def verdict(met: bool) -> str:
    """Say whether a target is met."""
    return "meets" if met else "MISSES"


def save(path: Path, rows: list[Row], key: Row) -> None:
    """Replace what a CSV file holds on one set-up, given as some columns and their values."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [
        row
        for row in load(path)
        if set(row) == set(rows[0]) and any(row[column] != str(value) for column, value in key.items())
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def load(path: Path) -> list[Row]:
    """Read a CSV file; no rows where there is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cpu() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def plot(folder: Path) -> None:
    """Draw the figures of the CSV files beside them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = load(folder / "network.csv")
    rows += [row for row in load(folder / "network_paced.csv") if row["workload"] == "mlp_paced"]
    rows = [row for row in rows if (row["kind"], row["workers"], row["ranks_per_host"]) == ("step", "4", "1")]
    if rows:
        rates = ordered(row["rate"] for row in rows)
        lines = -(-len(rates) // 2)
        figure, panels = plt.subplots(lines, 2, figsize=(11, 3.6 * lines), squeeze=False, layout="constrained")
        for panel in panels.flat[len(rates) :]:
            panel.remove()
        for panel, rate in zip(panels.flat, rates, strict=False):
            mine = [row for row in rows if row["rate"] == rate]
            medians = [float(row["median_ms"]) for row in mine]
            errors = [
                [median - float(row["p20_ms"]) for median, row in zip(medians, mine, strict=True)],
                [float(row["p80_ms"]) - median for median, row in zip(medians, mine, strict=True)],
            ]
            # Points, not bars: a logarithmic axis has no zero for a bar to start from.
            for row, median, low, high in zip(mine, medians, *errors, strict=True):
                color = "C0" if row["sent_bytes_per_step"] else "0.5"
                panel.errorbar(median, row["contestant"], xerr=[[low], [high]], fmt="o", color=color, capsize=3)
                place = (median + high, row["contestant"])
                panel.annotate(f"{median:,.0f}", place, (5, 0), textcoords="offset points", va="center", fontsize=8)
            dilate = float(mine[0]["dilate"])
            how = f"{mine[0]['workers']} workers" if dilate == 1 else f"{dilate:g} times slowed down"
            panel.set(xscale="log", xlabel="ms per step, median", title=f"{rate}, {how}")
            panel.margins(x=0.15, y=0.05)
            panel.grid(axis="x", alpha=0.3)
            panel.invert_yaxis()
        figure.savefig(folder / "network.png", dpi=150)
    if rows := load(folder / "network_real.csv"):
        plot_trainings(rows, folder / "network_real.png")


def ordered(rates: Iterable[str]) -> list[str]:
    """Return each rate once, slow ones first, and loopback last."""
    return sorted(set(rates), key=lambda rate: math.inf if rate == "loopback" else bits_per_second(rate))


def plot_trainings(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw test loss against seconds: a row for each workload, a column for each rate."""
    from matplotlib import pyplot as plt

    from lightning_sparse import METHODS

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    rates = ordered(row["rate"] for row in rows)
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    figure, panels = plt.subplots(
        len(workloads), len(rates), figsize=(4 * len(rates), 3.2 * len(workloads)), squeeze=False, layout="constrained"
    )
    for line, workload in zip(panels, workloads, strict=True):
        for panel, rate in zip(line, rates, strict=True):
            mine = [row for row in rows if (row["workload"], row["rate"]) == (workload, rate)]
            if not mine:
                panel.remove()
                continue
            for number, name in enumerate(names):
                curve = [row for row in mine if row["contestant"] == name]
                panel.plot(
                    [float(row["seconds"]) for row in curve[1:]],
                    [float(row["test_loss"]) for row in curve[1:]],
                    f"C{number}{'--' if name in METHODS else '-'}",
                    label=name,
                )
            panel.set(xscale="log", yscale="log", xlabel="seconds of training")
            panel.set_title(f"{TRAININGS[workload]}, {rate}", fontsize=10)
            panel.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        line[0].set_ylabel("test loss")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, or draw."""
    args = parse()
    if args.plot:
        plot(args.out)
        return
    rates = args.rates
    reason = missing()
    if reason and rates != ["loopback"]:
        print(f"No links can be made here: {reason}. Running unshaped over loopback instead.")
        rates = ["loopback"]
    for rate in rates:
        measure(args, rate)


if __name__ == "__main__":
    main()
