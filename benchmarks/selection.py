"""Measures the cost of selecting the entries to send.

All methods run in one process, in turn, on the same data, after a check that they select the right entries. Each
turn is timed twice. "Cold" is after other data filled the caches, as between a forward and a backward pass. "Warm" is a
repetition immediately after. Times are medians of all repetitions with 20th and 80th percentiles.

    python -m benchmarks.selection                                     # 1 M to 25 M elements
    python -m benchmarks.selection --numel 100000000 --repetitions 5   # replaces only the rows of this length
    python -m benchmarks.selection --figure                            # only draws the figures from the CSV files
    python -m benchmarks.selection --parts cuda                        # on the GPU
    python -m benchmarks.selection --parts cuda --rehearse --numel 20000 --out /tmp/rehearsal

Output: `results/selection_cpu.csv`, with four parts. "selection" selects from a Gaussian `u`, and "hostile" from
difficult inputs. "step" is a whole step of error feedback. "memory" is the additional peak memory of a process for one
selection.

On CUDA the output is `results/selection_cuda.csv`, with cold times from CUDA events. The floor is the time that memory
bandwidth allows: a step must read the gradient, and read and write the residual. These are 12 bytes per element, at the
rate at which the card copies. "scratch" is the peak memory in addition to gradient and residual, as a share of the
residual. "within" says whether TopK stays within `LIMITS` times the floor, and within `SCRATCH_LIMIT`.
"""

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.rehearsal import device_of_run, rehearsal
from benchmarks.harness.results import Row
from benchmarks.harness.timing import captured, in_turns, peak_bytes, reset_peak, spread
from lightning_sparse import METHODS, method
from lightning_sparse.compressors import Sparsifier
from lightning_sparse.compressors.base import add_
from lightning_sparse.context import Context
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from lightning_sparse.kernels.chunks import CHUNK
from lightning_sparse.layout import Segment
from lightning_sparse.memory import Residual

SIZES = {"cpu": (1_000_000, 10_000_000, 25_000_000), "cuda": (1_000_000, 25_000_000, 100_000_000, 400_000_000)}
LIMITS = {400_000_000: 1.3, 100_000_000: 1.5, 25_000_000: 2.0}
"""Limit of a step with TopK, as a multiple of the floor, by number of elements. Short steps use a CUDA graph."""
SCRATCH_LIMIT = 0.2  # limit of a step's additional memory at density 0.001, as a share of a residual

Select = Callable[[Tensor, float], Tensor]


def numpy_partition(u: Tensor, density: float) -> Tensor:
    """Find the k-th largest magnitude in linear time, then compare."""
    magnitudes = np.abs(u.numpy())
    place = len(magnitudes) - count(u, density)
    return torch.from_numpy(np.flatnonzero(magnitudes >= np.partition(magnitudes, place)[place]))


SELECTIONS: dict[str, Select] = {
    "torch.topk": lambda u, density: torch.topk(u.abs(), count(u, density)).indices,
    "torch.sort": lambda u, density: u.abs().sort(descending=True).indices[: count(u, density)],
    "numpy partition": numpy_partition,
    "GaussianK as published": lambda u, density: PublishedGaussianK(density).select(u),
}
ESTIMATED = ["SampledTopK", "SIDCo", "MSTopK", "ChunkTopK"]
ON_CPU = {
    "selection": ["torch.topk", "numpy partition", "GaussianK as published", "TopK", "GaussianK", "RandK", *ESTIMATED],
    "step": ["torch.topk", "GaussianK as published", "TopK", "GaussianK"],
    "hostile": ["torch.topk", "TopK", "GaussianK"],
}
ON_CUDA = ["torch.topk", "torch.sort", "GaussianK as published", "TopK", "GaussianK", "RandK", *ESTIMATED]
DRAWN = {
    "torch.topk": ("#000000", "-"),
    "GaussianK as published": ("#CC79A7", "-"),
    "numpy partition": ("#7F7F7F", "-"),
    "GaussianK": ("#D55E00", "--"),
    "TopK": ("#0072B2", "-"),
    "read (sum)": ("#999933", ":"),
    "copy_": ("#999933", ":"),
}
"""Lines of the figure, with colour and dashes."""
INPUTS: dict[str, Callable[[int], Tensor]] = {
    "Gaussian": torch.randn,
    "constant": lambda numel: torch.full((numel,), -0.25),
    "mostly zero": lambda numel: torch.randn(numel) * (torch.rand(numel) < 1e-4),
    "clustered": lambda numel: torch.cat([100 * torch.randn(numel // 500), torch.randn(numel - numel // 500)]),
    "bf16": lambda numel: torch.randn(numel).bfloat16().float(),
    "Student t, 3 d.o.f.": lambda numel: torch.distributions.StudentT(3.0).sample((numel,)),
}


def count(u: Tensor, density: float) -> int:
    """Return k."""
    return max(1, round(density * u.numel()))


def check(name: str, u: Tensor, chosen: Tensor, density: float) -> None:
    """Exit unless `chosen` are the indices that a method should select."""
    wrong = SystemExit(
        f"{name} selects wrong entries of {len(u):,} elements at density {density}, so nothing is measured."
    )
    if not len(chosen):
        raise wrong
    full = u.numel() // CHUNK
    if name == "ChunkTopK" and full:
        # Check all chunks at once. Separate checks would each make the host wait for the device.
        whole, rest = chosen[chosen < full * CHUNK], chosen[chosen >= full * CHUNK] - full * CHUNK
        rows = (u.view(torch.int32)[: full * CHUNK] & 0x7FFFFFFF).view(full, CHUNK)
        k = count(u[:CHUNK], density)
        least = rows.topk(k).values[:, -1:]
        above, equal = rows > least, rows == least
        first = equal.cumsum(1, dtype=torch.int16) <= k - above.sum(1, keepdim=True)
        if not torch.equal(whole, (above | equal & first).view(-1).nonzero().squeeze(1)):
            raise wrong
        if len(u) > full * CHUNK:
            check("TopK", u[full * CHUNK :], rest, density)
        return
    k, ascending = count(u, density), chosen.sort().values
    if name == "RandK":
        right = len(chosen) == k and bool((chosen.diff() > 0).all()) and 0 <= chosen[0] <= chosen[-1] < len(u)
    else:
        # Expect all entries above the smallest chosen magnitude, and the first of the entries that are equal to it.
        magnitudes = u.view(torch.int32) & 0x7FFFFFFF
        smallest = magnitudes[chosen].min()
        above, equal = (magnitudes > smallest).nonzero(), (magnitudes == smallest).nonzero()
        if name in ("torch.topk", "torch.sort", "MSTopK"):  # the choice among equal entries is undocumented or random
            right = len(chosen) == k and len(above) <= k == len(ascending.unique())
        else:
            expected = torch.cat([above, equal[: max(0, len(chosen) - len(above))]]).squeeze(1).sort().values
            right = torch.equal(ascending, expected)
        limits = {"TopK": (k, k), **dict.fromkeys(["GaussianK", "SIDCo", "SampledTopK"], (2 * k / 3, 4 * k / 3))}
        fewest, most = limits.get(name, (0, len(u)))
        right &= fewest <= len(chosen) <= most
    if not right:
        raise wrong


class Step:
    """One rank's error feedback: adds the gradient to the residual, selects entries, and removes them from it.

    A sparsifier runs as in training: the pass that adds the gradient computes its block statistics, and the payload is
    encoded. A plain selection function receives the density.
    """

    def __init__(self, grad: Tensor, density: float, select: Select | Sparsifier) -> None:
        self.grad, self.density, self.select, self.residual = grad, density, select, torch.zeros_like(grad)
        self.segment = Segment(0, ("w",), (tuple(grad.shape),), 0)

    def __call__(self) -> tuple[Tensor, ...]:
        if isinstance(self.select, Sparsifier):
            stats = self.select.block_stats(self.grad.numel())
            ctx = Context(self.segment, state={"residual": self.residual}, stats=stats)
            u = Residual().compensate([self.grad], ctx)
            payload, applied = self.select.compress(u, ctx)
            add_(u, applied, -1)
            return payload
        u = self.residual.add_(self.grad)
        chosen = self.select(u, self.density)
        values = u[chosen]
        u[chosen] = 0
        return chosen, values

    def check(self, name: str) -> None:
        """Exit unless a step sends the right entries and values, and keeps all other entries in the residual."""
        u = self.residual + self.grad
        sent = self()
        if isinstance(self.select, Sparsifier):
            chosen = self.select.select(u)
            decoded = add_(torch.zeros_like(u), self.select.decode(sent, Context(self.segment)))
        else:
            chosen, decoded = sent[0], torch.zeros_like(u).index_copy_(0, *sent)
        check(name, u, chosen, self.density)
        rest = u.index_fill(0, chosen, 0.0)
        if not torch.equal(decoded, u - rest) or not torch.equal(self.residual, rest):
            raise SystemExit(f"The step with {name} keeps a wrong residual, so nothing is measured.")


def sparsifiers(density: float) -> dict[str, Sparsifier]:
    """Return one sparsifier of each type that a method uses, with the options of its first row."""
    found = (method(name).compressor for name in reversed(METHODS))
    return {
        type(compressor).__name__: dataclasses.replace(compressor, density=density)
        for compressor in found
        if isinstance(compressor, Sparsifier)
    }


def selector(name: str, density: float) -> Callable[[Tensor], Tensor]:
    """Return the selection function of a method."""
    ours = sparsifiers(density)
    return ours[name].select if name in ours else functools.partial(SELECTIONS[name], density=density)


def checked(part: str, names: list[str], data: Tensor, density: float) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield functions that select entries of `data`, or that do whole steps with it, after their check."""
    for name in names:
        with skipped_if_out_of_memory(name):
            if part == "step":
                step = Step(data, density, sparsifiers(density).get(name) or SELECTIONS[name])
                for _ in range(2):
                    step.check(name)
                yield name, step
            else:
                select = selector(name, density)
                check(name, data, select(data), density)
                yield name, functools.partial(select, data)


@contextlib.contextmanager
def skipped_if_out_of_memory(name: str) -> Iterator[None]:
    """Skip a method if there is not enough memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        print(f"{name}: not enough memory")
        torch.cuda.empty_cache()


def in_memory(part: str, data: Tensor, density: float, repetitions: int) -> list[Row]:
    """Check and time selections of `data`, or whole steps with it, and one pass of reading and of adding it."""
    e = torch.zeros_like(data)
    contestants: dict[str, Callable[[], object]] = {"read (sum)": data.sum, "add_": lambda: e.add_(data)}
    times = in_turns(contestants | dict(checked(part, ON_CPU[part], data, density)), repetitions)
    rows: list[Row] = [{"contestant": name, "cache": cache, **spread(ms)} for (name, cache), ms in times.items()]
    for base, column in (("read (sum)", "times_read"), ("add_", "times_add")):
        for row in rows:
            row[column] = round(row["ms"] / np.median(times[base, row["cache"]]), 2)
    return rows


def memory(name: str, numel: int, density: float) -> int:
    """Return the additional peak memory of this process, in bytes, for its first large selection."""
    u, select = torch.randn(numel), selector(name, density)
    select(torch.randn(70_000))  # starts threads, loads code
    reset_peak()
    before = peak_bytes()
    select(u)
    return peak_bytes() - before


def on_device(
    numel: int, density: float, repetitions: int, device: str, contestants: Sequence[str] = ON_CUDA
) -> list[Row]:
    """Check and time selections and whole steps on CUDA, or within `rehearsal` on the CPU."""
    grad = torch.randn(numel, device=device)
    rows: list[Row] = []

    def add(part: str, name: str, run: Callable[[], object]) -> None:
        times = in_turns({name: run}, repetitions, device)
        rows.append({"part": part, "contestant": name, **spread(times[name, "cold"])})

    add("copy", "copy_", functools.partial(torch.empty_like(grad).copy_, grad))
    rows[0]["bytes_per_s"] = 8e3 * numel / rows[0]["ms"]
    for part in ("selection", "step"):
        for name, run in checked(part, list(contestants), grad, density):
            add(part, name, run)
            if part == "step":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run()
                rows[-1]["scratch"] = (torch.cuda.max_memory_allocated() - before) / (4 * numel)
                if name in ("TopK", "GaussianK"):
                    graph, _ = captured(run)
                    add(part, f"{name}, CUDA graph", graph.replay)
    return compared(rows, numel, density)


def compared(rows: list[Row], numel: int, density: float) -> list[Row]:
    """Add the ratios of each time to the floor, to torch.topk and to TopK, and whether the limits are kept."""
    times = {(row["part"], row["contestant"]): row["ms"] for row in rows}
    floor = 1.5 * times["copy", "copy_"]  # a copy moves 8 bytes per element, a step at least 12
    for row in rows:
        row["times_floor"] = row["ms"] / floor
        for base in ("torch.topk", "TopK"):
            if (row["part"], base) in times:
                row[f"times_{base}"] = row["ms"] / times[row["part"], base]
        if row["part"] == "step" and row["contestant"].startswith("TopK") and numel in LIMITS:
            fits = density > 0.001 or row.get("scratch", 0) <= SCRATCH_LIMIT
            row |= {"limit": LIMITS[numel], "within": fits and row["times_floor"] <= LIMITS[numel]}
    return rows


def draw(folder: Path, device: str = "cpu") -> Any:
    """Draw the times of selection at the smallest density, cold."""
    from benchmarks.harness import plots  # a machine with a GPU may lack matplotlib

    table = results.load(folder / f"selection_{device}.csv")
    table = table[table["part"].isin(["selection", "copy"]) & (table["density"] == table["density"].min())]
    if "cache" in table:
        table = table[table["cache"] == "cold"]
    figure, ((axes,),) = plots.panels(1, 1, 4.6)
    labels, last = [], {}
    for name, (color, style) in DRAWN.items():
        line = table[table["contestant"] == name].sort_values("numel", kind="stable")
        if not line.empty:
            axes.plot(line["numel"] / 1e6, line["ms"], style, color=color, marker="o", label=name)
            labels.append((line["numel"].iloc[-1] / 1e6, line["ms"].iloc[-1], name, color))
            last[name] = line["ms"].iloc[-1]
    axes.set(xscale="log", yscale="log", xlabel="million elements (log scale)", ylabel="ms, median (log scale)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    plots.ends(axes, labels)
    row, numel = table.iloc[0], table["numel"].max() / 1e6
    where = row["device"] if "device" in row else f"{row['threads']} threads, {row['cpu']}"
    others = [name for name in ("torch.topk", "numpy partition") if name in last]
    said = ", ".join(f"{name} {last[name]:,.{0 if last[name] > 9 else 2}f} ms" for name in ["TopK", *others])
    finding = f"Time to select {100 * row['density']:g} % of {numel:,g} million elements exactly: {said}"
    dotted = "a copy of the input" if "copy_" in last else "one read of the input, the least that a selection needs"
    task = f"Selection alone, {where}. Dotted: {dotted}."
    plots.headline(figure, finding, task)
    return figure


def figures() -> list[Any]:
    """Return the figures of each device."""
    from benchmarks.harness import plots

    names = {device: f"selection_{device}" for device in SIZES}
    return [plots.Figure(name, functools.partial(draw, device=device), (name,)) for device, name in names.items()]


def measure(part: str, name: str, numel: int, density: float, repetitions: int) -> list[Row]:
    """Measure one part on the CPU with an input of `INPUTS`."""
    if part != "memory":
        return in_memory(part, INPUTS[name](numel), density, repetitions)
    names = ON_CPU["selection"]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # each process selects once
        peaks = pool.starmap(memory, [(contestant, numel, density) for contestant in names], chunksize=1)
    rows = zip(names, peaks, strict=True)
    return [{"contestant": name, "extra_bytes": peak, "extra_share": peak / (4 * numel)} for name, peak in rows]


if __name__ == "__main__":
    parser = results.command_line(__doc__)
    parser.add_argument(
        "--numel", type=int, nargs="+", help="numbers of elements. Default: 1 M, 10 M, 25 M; on CUDA up to 400 M"
    )
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01])
    parts = [*ON_CPU, "memory"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=[*parts, "cuda"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument(
        "--contestants", nargs="+", default=ON_CUDA, choices=ON_CUDA, help="only for cuda. Default: all"
    )
    parser.add_argument("--rehearse", action="store_true", help="run the part cuda on the CPU")
    args = parser.parse_args()
    torch.manual_seed(0)
    paths = {device: args.out / f"selection_{device}.csv" for device in SIZES}
    device = "cuda" if "cuda" in args.parts else "cpu"
    on, context = device_of_run(args.rehearse) if device == "cuda" and not args.figure else ("cpu", rehearsal)
    sizes, parts = args.numel or SIZES[device], ["cuda"] if device == "cuda" else args.parts
    cases = [] if args.figure else itertools.product(sizes, args.density, parts, INPUTS)
    for numel, density, part, name in cases:
        if (part == "hostile") == (name == "Gaussian"):
            continue
        if part == "cuda":
            with context():
                rows = on_device(numel, density, args.repetitions, on, args.contestants)
        else:
            rows = measure(part, name, numel, density, args.repetitions)
        print(f"\n{part}, {name}, {numel:,} elements, density {density}")
        print(pd.DataFrame(rows).to_string(na_rep=""), flush=True)
        case = {"part": part, "input": name, "numel": numel, "density": density, "repetitions": args.repetitions}
        where = results.device() if device == "cuda" else {"threads": torch.get_num_threads()} | results.origin("numpy")
        key = ["part", "input", "numel", "density"]
        results.save(paths[device], [case | row | where for row in rows], key, digits=4)
    if args.figure:
        for figure in figures():
            figure.write(args.out)
