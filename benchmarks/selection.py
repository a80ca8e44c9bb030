"""What does it cost to select the entries to send?

All contestants run in one process, in turn, on the same data, which was checked to be selected rightly before. Each
turn is timed twice: "cold", after the caches were filled with other data, as in a training step, where a forward and a
backward pass lie between two selections; and "warm", once more at once. Times are the median of all repetitions,
between their 20th and 80th percentiles.

    python -m benchmarks.selection                                     # 1 M to 25 M elements
    python -m benchmarks.selection --numel 100000000 --repetitions 5 --append
    python -m benchmarks.selection --figure                            # only draws what was measured
    python -m benchmarks.selection --parts cuda                        # on the GPU, 1 M to 400 M elements
    python -m benchmarks.selection --parts cuda --numel 100000         # without one: the same, small, as a check

Written: `results/selection_cpu.csv`, one row per contestant. Its parts: "selection" of a Gaussian `u`; "step", the
whole of error feedback (add the gradient, select, take out what is sent); "hostile" inputs; "memory", the highest
memory that a process needs for one selection beyond what it needs before.

On CUDA: `results/selection_cuda.csv` and the figure of time against d, by CUDA events, from a cold cache. What memory
allows is measured beside it: the floor of a step is to read the gradient and to read and write the residual, 12 bytes
an element, at the rate at which the card copies as many elements. A step of ours adds, selects, encodes what would be
sent, and takes it out; others add, select and take out. "scratch" is the highest memory needed beyond gradient and
residual, as a share of the residual. "within" says whether TopK keeps to what is asked of it: so many floors, and so
much scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import dataclasses
import functools
import importlib.util
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_sparse.compressors import GaussianK, RandK, Sparsifier, TopK
from lightning_sparse.compressors.base import add_, drop_padding
from lightning_sparse.context import Context
from lightning_sparse.kernels.block_stats import add_with_stats_
from lightning_sparse.layout import Segment
from lightning_sparse.methods import METHODS, method

RESULT = Path(__file__).parent / "results" / "selection_cpu.csv"
RESULT_CUDA = RESULT.with_name("selection_cuda.csv")
EVICTION = 32_000_000  # elements, 128 MB: more than the caches hold

Row = dict[str, object]
Select = Callable[[Tensor, float], Tensor]


def torch_topk(u: Tensor, density: float) -> Tensor:
    """Select as everybody does."""
    return torch.topk(u.abs(), count(u, density)).indices


def numpy_partition(u: Tensor, density: float) -> Tensor:
    """Find the k-th largest magnitude in linear time, then compare."""
    magnitudes = np.abs(u.numpy())
    place = len(magnitudes) - count(u, density)
    return torch.from_numpy(np.flatnonzero(magnitudes >= np.partition(magnitudes, place)[place]))


def ours(make: Callable[[float], Sparsifier]) -> Select:
    """Return the selection of a sparsifier."""
    return lambda u, density: make(density).select(u)


SELECTIONS: dict[str, Select] = {
    "torch.topk": torch_topk,
    "numpy partition": numpy_partition,
    "GaussianK as published": ours(lambda density: GaussianK(density, refine="paper")),
    "TopK": ours(TopK),
    "GaussianK": ours(GaussianK),
    "RandK": ours(RandK),
}


def count(u: Tensor, density: float) -> int:
    """Return k."""
    return round(density * u.numel())


def check(name: str, u: Tensor, chosen: Tensor, density: float) -> None:
    """Raise unless a selection is what it should be."""
    k, ascending = count(u, density), chosen.sort().values
    if name == "RandK":
        right = len(chosen) == k and bool((chosen.diff() > 0).all()) and 0 <= chosen[0] <= chosen[-1] < len(u)
    else:
        # Everything larger than the smallest that was chosen, and of those equal to it the first.
        magnitudes = u.view(torch.int32) & 0x7FFFFFFF
        smallest = magnitudes[chosen].min()
        above, equal = (magnitudes > smallest).nonzero(), (magnitudes == smallest).nonzero()
        if name in ("torch.topk", "torch.sort"):  # which of equal ones it takes is not said
            right = len(chosen) == k and len(above) <= k == len(ascending.unique())
        else:
            expected = torch.cat([above, equal[: max(0, len(chosen) - len(above))]]).squeeze(1).sort().values
            right = torch.equal(ascending, expected)
        right &= {"GaussianK": 2 * k / 3 <= len(chosen) <= 4 * k / 3, "TopK": len(chosen) == k}.get(name, True)
    if not right:
        raise SystemExit(f"{name} selects wrongly at {len(u):,} elements, density {density}: no times for that.")


class Step:
    """Error feedback with one way to select: adds the gradient to the residual, takes out what would be sent."""

    def __init__(self, grad: Tensor, density: float, select: Select | Sparsifier) -> None:
        self.grad, self.density, self.select = grad, density, select
        self.residual = torch.zeros_like(grad)
        self.segment = Segment(0, ("w",), (tuple(grad.shape),), 0)

    def __call__(self) -> object:
        u = self.residual.add_(self.grad)
        if isinstance(self.select, Sparsifier):
            payload, applied = self.select.compress(u, Context(self.segment))
            add_(u, applied, -1)
            return payload
        chosen = self.select(u, self.density)
        values = u[chosen]
        u[chosen] = 0
        return values

    def check(self, name: str) -> None:
        """Raise unless what is left is what was not sent."""
        before = self.residual + self.grad
        self()
        sent = (self.residual != before).nonzero().squeeze(1)
        if bool(self.residual[sent].any()) or not count(before, self.density) / 2 < len(sent):
            raise SystemExit(f"The step with {name} keeps the wrong rest: no times for that.")
        chosen = SELECTIONS.get(name, torch_topk)(before, self.density)
        if not torch.equal(chosen.sort().values, sent):
            raise SystemExit(f"The step with {name} sends the wrong entries: no times for that.")


def measure(contestants: dict[str, Callable[[], object]], repetitions: int) -> Iterator[Row]:
    """Time all contestants in turn."""
    other = torch.ones(EVICTION)
    times: dict[tuple[str, str], list[float]] = {
        (name, cache): [] for name in contestants for cache in ("cold", "warm")
    }
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            other.sum()
            for cache in ("cold", "warm"):
                start = time.perf_counter()
                run()
                if repetition:  # the first round is to warm up
                    times[name, cache].append(1e3 * (time.perf_counter() - start))
    for (name, cache), values in times.items():
        p20, _, _, p80 = statistics.quantiles(values, n=5)
        yield {"contestant": name, "cache": cache, "ms": statistics.median(values), "ms_p20": p20, "ms_p80": p80}


def selection(numel: int, density: float, repetitions: int) -> Iterator[Row]:
    """Time selections on a Gaussian vector, beside reading it once."""
    u, e = torch.randn(numel), torch.zeros(numel)
    contestants: dict[str, Callable[[], object]] = {"read (sum)": u.sum, "add_": lambda: e.add_(u)}
    for name, select in SELECTIONS.items():
        check(name, u, select(u, density), density)
        contestants[name] = lambda select=select: select(u, density)  # type: ignore[misc]
    yield from measure(contestants, repetitions)


def step(numel: int, density: float, repetitions: int) -> Iterator[Row]:
    """Time whole steps of error feedback."""
    grad, e = torch.randn(numel), torch.zeros(numel)
    contestants: dict[str, Callable[[], object]] = {"add_": lambda: e.add_(grad)}
    for name, select in {
        "torch.topk": torch_topk,
        "GaussianK as published": SELECTIONS["GaussianK as published"],
        "TopK": TopK(density),
        "GaussianK": GaussianK(density),
    }.items():
        whole = Step(grad, density, select)
        whole.check(name)
        contestants[name] = whole
    yield from measure(contestants, repetitions)


HOSTILE: dict[str, Callable[[int], Tensor]] = {
    "constant": lambda numel: torch.full((numel,), -0.25),
    "mostly zero": lambda numel: torch.randn(numel) * (torch.rand(numel) < 1e-4),
    "clustered": lambda numel: torch.cat([100 * torch.randn(numel // 500), torch.randn(numel - numel // 500)]),
    "bf16": lambda numel: torch.randn(numel).bfloat16().float(),
    "Student t, 3 d.o.f.": lambda numel: torch.distributions.StudentT(3.0).sample((numel,)),
}


def hostile(name: str, numel: int, density: float, repetitions: int) -> Iterator[Row]:
    """Time selections on an input that is not friendly."""
    u = HOSTILE[name](numel)
    contestants: dict[str, Callable[[], object]] = {"read (sum)": u.sum}
    for contestant in ("torch.topk", "TopK", "GaussianK"):
        select = SELECTIONS[contestant]
        check(contestant, u, select(u, density), density)
        contestants[contestant] = lambda select=select: select(u, density)  # type: ignore[misc]
    yield from measure(contestants, repetitions)


def memory(name: str, numel: int, density: float) -> int:
    """Return how many bytes more than before this process needs at its highest, for its first large selection."""

    def status(key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(found[1]) if found else 0

    u = torch.randn(numel)
    SELECTIONS[name](torch.randn(70_000), density)  # starts threads, loads code
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # what is free already must not hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = status("VmRSS")
    SELECTIONS[name](u, density)
    return status("VmHWM") - before


def torch_sort(u: Tensor, density: float) -> Tensor:
    """Select by sorting everything."""
    return u.abs().sort(descending=True).indices[: count(u, density)]


def sparsifiers(density: float) -> dict[str, Sparsifier]:
    """Return one of each kind that a method uses."""
    found = (method(name).compressor for name in METHODS)
    return {
        type(compressor).__name__: dataclasses.replace(compressor, density=density)
        for compressor in found
        if isinstance(compressor, Sparsifier)
    }


LIMITS = {400_000_000: 1.4, 100_000_000: 1.6, 25_000_000: 2.5}
"""Elements to how many floors a step with TopK may take; by a CUDA graph, where launches count."""
SCRATCH_LIMIT = 0.2
"""Of a residual, at density 0.001."""


class DeviceStep:
    """Error feedback as training does it: the pass that adds the gradient scans for the selection."""

    def __init__(self, grad: Tensor, density: float, select: Select | Sparsifier) -> None:
        self.grad, self.density, self.select = grad, density, select
        self.residual = torch.zeros_like(grad)
        self.segment = Segment(0, ("w",), (tuple(grad.shape),), 0)

    def __call__(self) -> tuple[Tensor, ...]:
        if isinstance(self.select, Sparsifier):
            ctx = Context(self.segment, stats=self.select.block_stats(self.grad.numel()))
            u = add_with_stats_(self.residual, self.segment.bounds, [self.grad], 1.0, ctx.stats)
            payload, applied = self.select.compress(u, ctx)
            add_(u, applied, -1)
            return payload
        u = self.residual.add_(self.grad)
        chosen = self.select(u, self.density)
        values = u[chosen]
        u[chosen] = 0
        return chosen, values

    def check(self, name: str) -> None:
        """Raise unless the right entries were sent, with their values, and all else was kept."""
        before = self.residual + self.grad
        sent = self()
        if isinstance(self.select, Sparsifier):
            sent = drop_padding(self.select.decode(sent, Context(self.segment)), self.segment.numel)
        chosen, values = sent
        check(name, before, chosen, self.density)
        rest = before.index_fill(0, chosen, 0.0)
        if not torch.equal(values, before[chosen]) or not torch.equal(self.residual, rest):
            raise SystemExit(f"The step with {name} keeps the wrong rest: no times for that.")


def device_times(run: Callable[[], object], repetitions: int, other: Tensor) -> Row:
    """Time on the device where `other` is, whose caches are filled with `other` before."""
    times = []
    for repetition in range(repetitions + 2):
        other.zero_()
        if other.is_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            ms = start.elapsed_time(stop)
        else:
            started = time.perf_counter()
            run()
            ms = 1e3 * (time.perf_counter() - started)
        if repetition >= 2:  # the first ones compile and warm up
            times.append(ms)
    p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
    return {"ms": statistics.median(times), "ms_p20": p20, "ms_p80": p80}


def scratch(run: Callable[[], object], numel: int) -> float:
    """Return the highest memory that a run needs beyond what there is, as a share of a residual."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / (4 * numel)


def on_device(numel: int, density: float, repetitions: int, device: str) -> Iterator[Row]:
    """Check and time selections and whole steps, on CUDA or, as a rehearsal, on the CPU."""
    cuda, other = device == "cuda", torch.empty(2 * EVICTION if device == "cuda" else 1, device=device)
    grad = torch.randn(numel, device=device)
    naive: dict[str, Select | Sparsifier] = {
        "torch.topk": torch_topk,
        "torch.sort": torch_sort,
        "GaussianK as published": SELECTIONS["GaussianK as published"],
    }
    copied = device_times(functools.partial(torch.empty_like(grad).copy_, grad), repetitions, other)
    rate = {"bytes_per_s": 8e3 * numel / float(str(copied["ms"]))}
    rows: list[Row] = [{"part": "copy", "contestant": "copy_"} | copied | rate]
    for name, select in {**naive, **sparsifiers(density)}.items():
        with no_room(name):
            chooses = select.select if isinstance(select, Sparsifier) else lambda u, select=select: select(u, density)
            check(name, grad, chooses(grad), density)
            row = device_times(lambda chooses=chooses: chooses(grad), repetitions, other)  # type: ignore[misc]
            rows.append({"part": "selection", "contestant": name} | row)
    for name, select in {**naive, **sparsifiers(density)}.items():
        with no_room(name):
            step = DeviceStep(grad, density, select)
            for _ in range(2):
                step.check(name)
            row = device_times(step, repetitions, other) | ({"scratch": scratch(step, numel)} if cuda else {})
            rows.append({"part": "step", "contestant": name} | row)
            if cuda and name in ("TopK", "GaussianK"):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                row = device_times(graph.replay, repetitions, other)
                rows.append({"part": "step", "contestant": f"{name}, CUDA graph"} | row)
    yield from compared(rows, numel, density)


@contextlib.contextmanager
def no_room(name: str) -> Iterator[None]:
    """Go on without a contestant for which there is not enough memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        print(f"{name}: not enough memory")
        torch.cuda.empty_cache()


def compared(rows: list[Row], numel: int, density: float) -> Iterator[Row]:
    """Add how many floors each took, how many times the selection by torch.topk and by TopK, and what was asked."""
    times = {(row["part"], row["contestant"]): float(str(row["ms"])) for row in rows}
    floor = 1.5 * times["copy", "copy_"]  # a copy moves 8 bytes an element, a step at least 12
    for row in rows:
        part, contestant, ms = row["part"], str(row["contestant"]), float(str(row["ms"]))
        row["times_floor"] = ms / floor
        for base in ("torch.topk", "TopK"):
            if (part, base) in times:
                row[f"times_{base}"] = ms / times[part, base]
        if part == "step" and contestant.startswith("TopK") and numel in LIMITS:
            row["limit"] = LIMITS[numel]
            row["within"] = ms / floor <= LIMITS[numel] and (
                density > 0.001 or float(str(row.get("scratch", 0))) <= SCRATCH_LIMIT
            )
        yield row


def device_and_versions() -> Row:
    """Return the columns that say where figures of a GPU come from."""
    triton = importlib.util.find_spec("triton") is not None
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, a rehearsal: nothing is written",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": importlib.import_module("triton").__version__ if triton else "",
    }


def report_on_device(arguments: argparse.Namespace) -> None:
    """Print all that was asked for, and write it if it was measured on CUDA."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    surroundings = device_and_versions()
    print(", ".join(f"{key} {value}" for key, value in surroundings.items()))
    measured = []
    for numel in arguments.numel or [1_000_000, 25_000_000, 100_000_000, 400_000_000]:
        for density in arguments.density:
            for row in on_device(numel, density, arguments.repetitions, device):
                case = {"numel": numel, "density": density, "repetitions": arguments.repetitions}
                print(
                    "{part:10}{numel:>12,}{density:>7}  {contestant:24}{ms:10.3f} ms ({ms_p20:.3f} to {ms_p80:.3f})"
                    "{times_floor:9.2f} floors".format(**row, **case),
                    f"{row['times_TopK']:9.2f} times TopK" if "times_TopK" in row else "",
                    f"{row['scratch']:9.3f} scratch" if "scratch" in row else "",
                    f"{'within' if row['within'] else 'above'} the limit of {row['limit']}" if "limit" in row else "",
                    flush=True,
                )
                rounded = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
                measured.append(case | rounded | surroundings)
    if device == "cuda":
        with RESULT_CUDA.open("w", newline="") as file:
            first = ["part", "numel", "density", "contestant", "ms", "ms_p20", "ms_p80", "times_floor", "limit"]
            first += ["within", "times_torch.topk", "times_TopK", "scratch", "bytes_per_s", "repetitions"]
            writer = csv.DictWriter(file, [*first, *surroundings], restval="")
            writer.writeheader()
            writer.writerows(measured)
        figure(RESULT_CUDA)


def machine() -> Row:
    """Describe what the times depend on."""
    cpu = platform.processor() or "unknown"
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = found[1] if found else cpu
    return {
        "threads": torch.get_num_threads(),
        "cpu": cpu,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure all that was asked for."""
    repetitions = arguments.repetitions
    for numel in arguments.numel:
        for density in arguments.density:
            case: Row = {"numel": numel, "density": density, "input": "Gaussian", "repetitions": repetitions}
            if "selection" in arguments.parts:
                yield from (case | {"part": "selection"} | row for row in selection(numel, density, repetitions))
            if "step" in arguments.parts:
                yield from (case | {"part": "step"} | row for row in step(numel, density, repetitions))
            if "hostile" in arguments.parts:
                for name in HOSTILE:
                    case_of_input = case | {"part": "hostile", "input": name}
                    yield from (case_of_input | row for row in hostile(name, numel, density, repetitions))
            if "memory" in arguments.parts:
                for name in SELECTIONS:
                    command = [sys.executable, "-m", "benchmarks.selection", "--peak", name]
                    command += ["--numel", str(numel), "--density", str(density)]
                    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    extra = {"contestant": name, "extra_bytes": peak, "extra_share": peak / (4 * numel)}
                    yield case | {"part": "memory", "repetitions": 1} | extra


COLUMNS = [
    *("part", "input", "numel", "density", "contestant", "cache", "ms", "ms_p20", "ms_p80", "times_read", "times_add"),
    *("extra_bytes", "extra_share", "repetitions", "threads", "cpu", "torch", "numpy", "python"),
]


def report(measured: Iterator[Row], append: bool) -> None:
    """Print and write rows as they come."""
    surroundings = machine()
    print(", ".join(f"{key} {value}" for key, value in surroundings.items()))
    fresh = not (append and RESULT.exists())
    with RESULT.open("w" if fresh else "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if fresh:
            writer.writeheader()
        read: dict[object, float] = {}
        for row in measured:
            title = "{part:10}{input:20}{numel:>12,}{density:>7}  {contestant:24}".format(**row)
            if "ms" in row:
                ms, cache = float(str(row["ms"])), row["cache"]
                for base in ("read (sum)", "add_"):
                    if row["contestant"] == base:
                        read[base, cache, row["part"], row["input"], row["numel"], row["density"]] = ms
                    found = read.get((base, cache, row["part"], row["input"], row["numel"], row["density"]))
                    if found:
                        row["times_read" if base != "add_" else "times_add"] = f"{ms / found:.2f}"
                ratios = f"{row.get('times_read', '-'):>8} reads {row.get('times_add', '-'):>8} adds"
                print(f"{title}{cache:6}{ms:9.2f} ms ({row['ms_p20']:.2f} to {row['ms_p80']:.2f}) {ratios}", flush=True)
                row |= {key: f"{float(str(row[key])):.4g}" for key in ("ms", "ms_p20", "ms_p80")}
            else:
                print(f"{title}{float(str(row['extra_share'])):.3f} of the input", flush=True)
                row["extra_share"] = f"{float(str(row['extra_share'])):.4f}"
            writer.writerow(row | surroundings)
            file.flush()


def figure(result: Path) -> None:
    """Draw the times of selection at the smallest density, cold, from the CSV."""
    import matplotlib.pyplot as plt

    with result.open(newline="") as file:
        shown = ("selection", "copy")
        measured = [row for row in csv.DictReader(file) if row["part"] in shown and row.get("cache") != "warm"]
    density = min(float(row["density"]) for row in measured)
    measured = [row for row in measured if float(row["density"]) == density]
    _, axes = plt.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row["contestant"] for row in measured):
        line = sorted((int(row["numel"]), float(row["ms"])) for row in measured if row["contestant"] == name)
        base = name in ("read (sum)", "add_", "copy_")
        axes.plot(*zip(*line, strict=True), marker="o", ls=":" if base else "-", color="gray" if base else None)
        axes.annotate(f" {name}", line[-1], fontsize=8, va="center")
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="ms, median", xlim=(None, 6 * line[-1][0]))
    row = measured[0]
    where = row["device"] if "device" in row else f"{row['threads']} threads, {row['cpu']}"
    axes.set_title(f"Selecting {density:.1%}, {where}", fontsize=10)
    axes.grid(alpha=0.3)
    plt.savefig(result.with_suffix(".png"), dpi=150, bbox_inches="tight")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", help="default: 1 M, 10 M, 25 M; on CUDA up to 400 M")
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01])
    parts = ["selection", "step", "hostile", "memory"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=[*parts, "cuda"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--append", action="store_true", help="keep the rows that were measured before")
    parser.add_argument("--figure", action="store_true", help="only draw")
    parser.add_argument("--peak", choices=SELECTIONS, help="only print the extra memory of one selection, in bytes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(memory(arguments.peak, arguments.numel[0], arguments.density[0]))
    elif arguments.figure:
        for result in filter(Path.exists, (RESULT, RESULT_CUDA)):
            figure(result)
    elif "cuda" in arguments.parts:
        report_on_device(arguments)
    else:
        arguments.numel = arguments.numel or [1_000_000, 10_000_000, 25_000_000]
        report(rows(arguments), arguments.append)


if __name__ == "__main__":
    main()
