"""`python -m lightning_sparse advise`: estimates each method's step time on your link, and recommends one.

    python -m lightning_sparse advise --params 25.6e6 --workers 32 --bandwidth 1Gbit --backward 0.15

The compute time of each method is measured on this machine, on its GPU if it has one. So run the command on a machine
like your training machines. The communication time is computed (see `lightning_sparse.cost`). A method is recommended
only if it trained as well as dense training in this project's benchmarks. Compare losses with your own model. With SGD,
sparse methods exchange gradients; with AdamW and most other optimizers they exchange updates. The estimates assume that
both overlap with backward. If gradients are clipped by norm, or scaled, updates do not overlap.

With --from-log, it shows the measured times by which `auto_ddp` or `auto_hsdp` has chosen in a run.

With `--shards 8`, a worker is a replica of the model, which FSDP2 shards over the devices of a node. All methods
exchange updates after backward. Two rows are for whole models on all devices: `topk_ddp`, and with `hierarchical=True`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_sparse import logged
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.compressors import Sparsifier
from lightning_sparse.cost import DENSE, Costs, Link, Step, Workload, break_even_bandwidth, matrices, step
from lightning_sparse.exchange import Exchanged
from lightning_sparse.methods import METHODS, Method, method, resolve_updates
from lightning_sparse.reducer import Reducer
from lightning_sparse.trained import DELAYED, SHARDED, TRAINED
from lightning_sparse.updates.exchange import DeltaExchange

TIMED_ELEMENTS = 8_000_000
"""Largest number of elements that a method is timed with. It exceeds the caches; times are scaled in proportion."""
SECONDS = 18.0
"""Time limit in seconds for timing all methods; each method gets an equal share."""
BUSY = 1.3
"""If the ratio of times in `estimates` exceeds this number, other programs slow this machine down."""
BASELINES = {"ddp": 4, "ddp, 16-bit hook": 2}
"""Bytes per gradient element, by dense baseline."""
SHARDED_BASELINES = {"dense_hsdp": 4, "dense_hsdp, 16-bit": 2}
"""The same if FSDP2 shards the model. Half of the bytes are sent with `reduce_dtype=torch.bfloat16`."""
CAUTIONS = {
    "randk": "a random choice: needs many more steps",
    **{name: "rounds at random, keeps no errors" for name, spec in METHODS.items() if not spec.traits.conserves},
    **{
        name: f"{spec.update_rule.local_steps} local steps between exchanges: may need more steps"
        for name, spec in METHODS.items()
        if spec.update_rule and spec.update_rule.local_steps > 1
    },
    **dict.fromkeys(("memsgd", "dgc"), "for SGD"),
    **{
        name: "a vote, not a mean: needs its own learning rate"
        if not spec.make().contracts
        else "for faulty or malicious ranks: sends as many bytes as dense"
        for name, spec in METHODS.items()
        if not spec.aggregator.averages
    },
}
"""Methods that are listed but never recommended, and the reason: a step with them contributes less to training."""
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


def bandwidth(text: str) -> float:
    """Parse "1Gbit", "100Mbps" or "12.5GB", and return bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG])(bit|b|B)(?:/s|ps)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth: write 1Gbit, 100Mbit or 12.5GB (per second)")
    return float(match[1]) * UNITS[match[2]] / (1 if match[3] == "B" else 8)


def number(text: str) -> float:
    """Parse a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number, such as 25.6e6 or 0.15")
    return value


def gbit(bandwidth: float) -> str:
    """Format bytes per second as Gbit/s or Mbit/s, with three digits."""
    bits = bandwidth * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 0.9995e9 else f"{bits / 1e6:.3g} Mbit/s"


def measure(
    chosen: Method, params: int, exchanged: Exchanged = "gradient", *, adaptive: bool = False, seconds: float = 1.0
) -> tuple[Costs, float]:
    """Time a method's compute on this machine: a step with one rank, and summing the entries of another rank.

    Args:
        params: number of elements to exchange; at most `TIMED_ELEMENTS` are used.
        exchanged: whether to exchange gradients or updates. The optimizer's own step is not timed.
        adaptive: whether updates are those of AdamW; otherwise they are those of SGD.
        seconds: time limit in seconds after which no further step begins. At least two steps run.

    Returns:
        The costs of the fastest step, because other programs only slow steps down; and the ratio of the median step to
        the fastest.
    """
    shape = matrices(min(params, TIMED_ELEMENTS))[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gradient = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
    out = torch.zeros(gradient.numel(), device=device)

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def rank(comm: Comm) -> tuple[float, float, float]:
        reducer = Reducer(chosen, comm, granularity="model", exchanged=exchanged)
        model = torch.nn.ParameterDict({"all": torch.zeros_like(gradient)})
        optimizer = torch.optim.AdamW(model.parameters()) if adaptive else torch.optim.SGD(model.parameters())
        updates = DeltaExchange(reducer, model, [optimizer]) if exchanged == "update" else None
        steps: list[float] = []
        entries: list[float] = []
        began = time.perf_counter()
        while len(steps) < 2 or (len(steps) < 20 and time.perf_counter() < began + seconds):
            result = gradient.clone()
            if updates is None:
                started = now()
                reducer.reduce_({"all": result})
            else:
                model["all"].grad, before = result, model["all"].detach().clone()
                started = now()
                updates.begin(optimizer)
                begun = now() - started
                optimizer.step()
                started = now() - begun
                updates.exchange(optimizer)
            steps.append(now() - started)
            sent = (result if updates is None else before - model["all"].detach()).view(-1)
            indices = sent.nonzero().view(-1)
            values = sent[indices]
            started = now()
            out.index_add_(0, indices, values)
            entries.append((now() - started) / max(1, len(indices)))
        # The first step is excluded because it allocates memory.
        fastest = min(steps[1:])
        return fastest / gradient.numel(), min(entries[1:]), statistics.median(steps[1:]) / fastest

    ((element, entry, spread),) = simulate(1, rank)
    return Costs(element=element, entry=entry), spread


def slowdown(seconds: float = 0.3) -> float:
    """Return the factor by which other programs slow down work on all cores; 1 without other programs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a container may get fewer; "max" is no limit
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = max(1, min(cores, quota // period))
    data = bytes(1 << 20)

    def work(_: int) -> None:
        while time.perf_counter() < began + seconds:
            hashlib.sha256(data).digest()  # releases Python's lock

    began, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, range(cores)))
    return cores * (time.perf_counter() - began) / (time.process_time() - used)


class Estimate(NamedTuple):
    """Estimated step of a method or of a dense baseline.

    Attributes:
        name: name of the method or baseline.
        step: estimated step.
        point: break-even bandwidth, see `break_even_bandwidth`; None for a baseline.
        delayed: estimated step with `overlap="next_step"`; None if the method exchanges gradients or cannot be delayed,
            or if the model is sharded.
    """

    name: str
    step: Step
    point: float | None = None
    delayed: Step | None = None


def estimates(
    work: Workload,
    workers: int,
    link: Link,
    density: float | None,
    adaptive: bool,
    tell: Callable[[str], object] = lambda line: None,
) -> tuple[list[Estimate], dict[str, str], float]:
    """Estimate the steps of all methods and dense baselines.

    Args:
        density: fraction of entries to send; None selects each method's own.
        adaptive: whether the optimizer is Adam-like, so that sparse methods exchange updates.
        tell: function that receives a line of text for each method after it is timed.

    Returns:
        The estimates, fastest first; the reason by name for methods that cannot be timed here; and a ratio that is 1 on
        an idle machine. It is the maximum of `slowdown` before, `slowdown` after, and the median ratio of `measure`.
    """
    sharded = work.shards > 1
    baselines = SHARDED_BASELINES if sharded else BASELINES
    rows = [
        Estimate(name, step(DENSE, work, workers, link, Costs(), dense_bytes=each)) for name, each in baselines.items()
    ]

    def resolved(name: str, ranks: int, updates: bool) -> Method:
        given = density if "density" in METHODS[name].options else None
        return resolve_updates(name, given, ranks=ranks)[0] if updates else method(name, density=given)

    slow = slowdown()
    timed: dict[str, Costs] = {}
    spreads: list[float] = []
    failed: dict[str, str] = {}
    for name in METHODS:
        if name == "dense" or (sharded and not METHODS[name].aggregator.averages):
            continue
        chosen = resolved(name, workers, adaptive or sharded)
        updates = sharded or chosen.update_rule or (adaptive and chosen.is_sparse)
        what: Exchanged = "update" if updates else "gradient"
        # With one rank, a sparsifier takes the same time with every aggregator, so it is timed once.
        parts = chosen.compressor if isinstance(chosen.compressor, Sparsifier) else chosen
        kind = repr((parts, what, what == "update" and chosen.update_rule))
        try:
            chosen.aggregator.check_size(workers)
            if kind not in timed:
                timed[kind], spread = measure(
                    chosen, sum(work.segments), what, adaptive=adaptive, seconds=SECONDS / len(METHODS)
                )
                spreads.append(spread)
            costs = timed[kind]
            found = step(chosen, work, workers, link, costs, exchanged=what)
            point = break_even_bandwidth(chosen, work, workers, link, costs, list(baselines.values()), what)
            later = None
            if what == "update" and not sharded:
                with contextlib.suppress(ValueError):  # it cannot be delayed
                    delayed = replace(chosen, update_rule=chosen.rule.changed(None, "next_step"))
                    later = step(delayed, work, workers, link, costs)
            rows.append(Estimate(f"{name}_hsdp" if sharded else name, found, point, later))
            if sharded and name == "topk":
                whole = Workload.even(work.shards * sum(work.segments), work.forward, work.backward)
                ranks, what = workers * work.shards, "update" if adaptive else "gradient"
                flat, by_node = resolved(name, ranks, adaptive), resolved(name, workers, adaptive)
                by_node = replace(by_node, aggregator=TwoLevel(by_node.aggregator, work.shards))
                for label, each in (("topk_ddp", flat), ("topk_ddp, hierarchical", by_node)):
                    rows.append(Estimate(label, step(each, whole, ranks, link, costs, exchanged=what)))
            tell(f"{name}: {1e3 * found.seconds:.1f} ms a step")
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    busy = max(slow, slowdown(), statistics.median(spreads or [1.0]))
    return sorted(rows, key=lambda row: row.step.seconds), failed, busy


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_sparse advise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--from-log",
        type=Path,
        metavar="FOLDER",
        help="only show the measurements of a run with auto_ddp or auto_hsdp: the folder of its TensorBoard logs",
    )
    parser.add_argument("--params", type=number, help="trainable parameters, for example 25.6e6")
    parser.add_argument("--workers", type=int, help="number of workers that share gradients")
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        help="devices over which FSDP2 shards the model of each worker, and which share its link. Default: 1. If above "
        "1, measure the forward and the backward pass with one worker",
    )
    parser.add_argument(
        "--bandwidth", type=bandwidth, help="bandwidth of a worker's link, for example 1Gbit or 100Mbit"
    )
    parser.add_argument("--backward", type=number, metavar="SECONDS", help="time of the backward pass")
    parser.add_argument(
        "--forward", type=number, metavar="SECONDS", help="time of the forward pass. Default: half of backward"
    )
    parser.add_argument(
        "--latency",
        type=number,
        default=50e-6,
        metavar="SECONDS",
        help="latency of a message. Default: 50e-6, one switch",
    )
    parser.add_argument(
        "--optimizer",
        choices=["adamw", "sgd"],
        default="adamw",
        help="choose adamw for every optimizer that divides by past gradients",
    )
    parser.add_argument(
        "--density",
        type=number,
        help="fraction of entries to send. Default: 0.001 of gradients, which sgd without --shards exchanges; 0.003 of "
        "updates, higher with over four workers",
    )
    args = parser.parse_args(argv)
    if args.from_log is not None:
        try:
            print(logged.table(args.from_log))
        except ValueError as error:
            parser.error(f"--from-log: {error}")
        return
    needed = ("params", "workers", "bandwidth", "backward")
    if absent := [f"--{name}" for name in needed if getattr(args, name) is None]:
        parser.error(f"the following arguments are required: {', '.join(absent)}")
    if args.workers < 2:
        parser.error(f"--workers {args.workers}: with fewer than two workers there is nothing to send")
    try:
        work = Workload.even(
            round(args.params),
            args.backward / 2 if args.forward is None else args.forward,
            args.backward,
            shards=args.shards,
        )
        link = Link(args.bandwidth, args.latency)
        method("topk", density=args.density)
    except ValueError as error:
        parser.error(str(error))

    adaptive = args.optimizer == "adamw"
    sharded, baselines = args.shards > 1, SHARDED_BASELINES if args.shards > 1 else BASELINES
    trained = {name: most for name, most in TRAINED[args.optimizer].items() if name not in CAUTIONS}
    if sharded:
        trained = {"topk_hsdp": SHARDED} if adaptive else {}
    if args.density is not None:  # the runs had the default density
        takes = {name for name, spec in METHODS.items() if "density" in spec.options}
        trained = {name: most for name, most in trained.items() if name.removesuffix("_hsdp") not in takes}
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine's CPU"
    tell = functools.partial(print, file=sys.stderr, flush=True)
    tell(f"Timing every method on {where}, which takes about half a minute, longer if the machine is busy:")
    rows, failed, spread = estimates(work, args.workers, link, args.density, adaptive, tell)
    dense_name, *_ = baselines
    dense_seconds = next(row.step for row in rows if row.name == dense_name).seconds
    shards = f" of {args.shards} shards each" * sharded
    print(
        f"{args.params:,.0f} parameters, {args.workers} workers{shards}, {gbit(args.bandwidth)}, forward and "
        f"backward {1e3 * (work.forward + work.backward):g} ms; selection timed on {where}.\n"
    )
    width, times = max(len(row.name) for row in rows) + 2, "x dense" if sharded else "x ddp"
    print(f"{'':{width}}{'ms/step':>10}{times:>8}{'waiting, ms':>13}{'MB/step':>10}  pays below")
    for name, found, point, _ in rows:
        if point is None:
            pays = ""
        elif point == 0:
            pays = "never"
        else:
            pays = "any bandwidth" if math.isinf(point) else gbit(point)
        if caution := CAUTIONS.get(name.removesuffix("_hsdp")):
            pays += f"  ({caution})"
        elif point is not None and trained.get(name, 0) < args.workers:
            most = trained.get(name)
            pays += f"  (trained as dense with up to {most} workers)" if most else "  (not seen to train as dense)"
        print(
            f"{name:{width}}{1e3 * found.seconds:10.1f}{dense_seconds / found.seconds:8.2f}{1e3 * found.exposed:13.1f}"
            f"{found.sent_bytes / 1e6:10.3f}  {pays}"
        )
    if sharded:
        print(
            f"topk_ddp trains whole models on {args.workers * args.shards} devices, without the collectives of FSDP2, "
            f"so its forward and backward may take less time than given."
        )
    for name, reason in failed.items():
        print(f"{name:{width}} cannot be timed here: {reason}")
    if spread > BUSY:
        print(
            f"\nThis machine is busy: steps took {spread:.1f} times as long as they would alone. So the estimates are "
            f"too pessimistic, and the recommendation may be wrong. Run it again when no other program runs."
        )
    dense_name, dense, _, _ = next(row for row in rows if row.name in baselines)
    best, fastest, _, _ = next(row for row in rows if row.name in baselines or trained.get(row.name, 0) >= args.workers)
    if best in baselines:
        how = "" if args.density is None else ", with the options of its runs,"
        print(f"\nNo method that trained as well as dense with {args.workers} workers{how} is faster than {best}.")
        untried = next((row for row in rows if row.name in trained), None)
        if untried is None or untried.step.seconds > dense.seconds / 1.1:
            print(
                "Stay with it." if args.density is None else "Leave --density out to compare the density that trained."
            )
        else:
            print(
                f"{untried.name} would take {untried.step.seconds / dense.seconds:.0%} of its time, but it trained as "
                f"well as dense only with up to {trained[untried.name]} workers: try it, and compare losses."
            )
    elif dense.seconds < 1.1 * fastest.seconds:
        print(
            f"\n{best} is {dense.seconds / fastest.seconds - 1:.0%} faster than {dense_name}: less than the model's "
            f"error. Dense training is simpler; stay with it unless you measure a larger gain."
        )
    else:
        print(
            f"\n{best} takes {fastest.seconds / dense.seconds:.0%} of the time of {dense_name}, the faster dense "
            f"baseline. It trained as well as dense training in this project's runs with up to {trained[best]} "
            f"workers; check that with your model."
        )
    delayed = next((row.delayed for row in rows if row.name == "topk"), None)
    if delayed and min(DELAYED, trained.get("topk", 0)) >= args.workers and delayed.seconds < 0.9 * fastest.seconds:
        print(
            f"With overlap='next_step' topk would take {1e3 * delayed.seconds:.1f} ms a step, as ranks go on while "
            f"they exchange."
        )
