"""Measures the time of one segment: on the device, on the host that launches it, and in parallel with backward.

A segment is a block of GPT-2 small, 7.09 M elements, at density 0.001. The other ranks are mocks that send the same
payload, so no bytes are transferred. For updates, the time includes the whole exchange after a step of AdamW. All times
are medians in μs:

- `device_us`: time between two CUDA events. The device sleeps until the host has launched all kernels, so no kernel
  waits for its launch.
- `host_us`: time from the first launch to the last, while the device sleeps.
- `plain_device_us`, `plain_host_us`: the same two without CUDA graphs, measured right before.
- `beside_us`: time between two events in a stream of high priority. Another stream computes bf16 matrix products of
  8192 tokens with a layer of GPT-2 at the same time.
- `delay_us`: additional time of these products when the segment runs in parallel.
- `launches`, `busy_us`: number of kernels and copies of a segment, and the sum of their times, from torch's profiler.
  `counted` is the number that `benchmarks.launches` counts without a GPU. After its first use, the profiler may make
  each launch in the process slower. So all times are measured before.
- `add_us`: time in which the host launches `x.add_(1)`, to compare hosts.

Before a method is timed, one segment checks that nothing is lost: mean and residual must add up to the gradient and the
previous residual. For updates, it checks that only a few weights change.

    python -m benchmarks.segment              # on a GPU
    python -m benchmarks.segment --rehearse   # a small segment on a CPU: tests the benchmark; times are meaningless

Output: `segment.csv`, written after each method. `limit_us` and `within` have the limits of docs/gpu-tests.md, for an
H100 or H200.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import results
from benchmarks.harness.rehearsal import device_of_run
from benchmarks.harness.timing import spread
from benchmarks.launches import SHAPES
from lightning_sparse import METHODS, Reducer, method
from lightning_sparse.aggregators import TwoPass
from lightning_sparse.kernels import graphs
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.kernels import Echo

CASES = [(name, ranks) for ranks in (2, 1, 8) for name in ("topk", "topk updates", "gaussiank", "int4")]
LIMITS = {"device_us": 150, "host_us": 600}
"""Limits in μs for `topk` with two ranks. Within these limits, segments overlap with backward completely."""
JUDGED = ("topk", 2)
SLEEP = 20_000_000  # cycles of the device, about 10 ms
UNTIMED = 5
"""Number of first repetitions whose times do not count, because the host is still warming up."""
TOKENS, PRODUCTS = 8192, 40


class Case(NamedTuple):
    """One measured case.

    Attributes:
        before: function that creates a gradient or an update to exchange; not timed.
        run: function that exchanges the segment.
        check: function that raises SystemExit if a segment loses a part.
        reducer: the reducer.
    """

    before: Callable[[], object]
    run: Callable[[], object]
    check: Callable[[], None]
    reducer: Reducer


def case(name: str, ranks: int, shapes: dict[str, Any], device: str) -> Case:
    """Return a case for tensors of the given shapes."""
    torch.manual_seed(0)
    kind, *updates = name.split()
    made = method(kind, **({"density": 0.001} if "density" in METHODS[kind].options else {}))
    reducer = Reducer(made, Echo(ranks), granularity="model", exchanged="update" if updates else "gradient")
    fresh = {key: torch.randn(shape, device=device) for key, shape in shapes.items()}
    if updates:
        return of_updates(name, reducer, fresh, device)
    given = {key: x.clone() for key, x in fresh.items()}
    reducer.setup(given)
    (segment,) = reducer.layout.segments  # type: ignore[union-attr]
    flat = [given[key].view(-1) for key in segment.names]

    def before() -> None:
        torch._foreach_copy_([given[key] for key in fresh], list(fresh.values()))

    def run() -> None:
        reducer.reduce_segment_(segment, flat)
        reducer.finish_step()

    def check() -> None:
        old = residuals(reducer)  # copies on the CPU
        before()
        run()
        new = residuals(reducer)
        for key, x in fresh.items():
            whole, found = x.cpu() + old.get(key, 0), given[key].cpu() + new[key]
            # Tolerate the rounding of three sums to fp32.
            if not torch.allclose(found, whole, rtol=0, atol=1e-6 * float(whole.abs().max())):
                raise SystemExit(f"{name}, P = {reducer.comm.size}, loses a part of {key}, so nothing is measured.")

    return Case(before, run, check, reducer)


def residuals(reducer: Reducer) -> dict[str, Tensor]:
    """Return copies of the residuals by parameter name; empty before the first step."""
    elements = reducer.state_dict()["elements"].get("residual", {})
    return {key: x.clone() for key, x in elements.items()}


def of_updates(name: str, reducer: Reducer, fresh: dict[str, Tensor], device: str) -> Case:
    """Return a case in which AdamW's updates are exchanged."""
    model = torch.nn.ParameterDict({key: torch.zeros_like(x) for key, x in fresh.items()})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=device == "cuda")
    updates = DeltaExchange(reducer, model, [optimizer])

    def before() -> None:
        for key, param in model.items():
            param.grad = fresh[key]
        updates.begin(optimizer)
        optimizer.step()

    def run() -> None:
        updates.exchange(optimizer)

    def check() -> None:
        old = {key: param.detach().clone() for key, param in model.items()}
        before()
        run()
        changed = sum(int((param != old[key]).sum()) for key, param in model.items())
        numel = sum(x.numel() for x in fresh.values())
        if not 0 < changed < 0.002 * numel + 2:
            text = f"changes {changed:,} of {numel:,} weights, so nothing is measured."
            raise SystemExit(f"{name}, P = {reducer.comm.size}, {text}")

    return Case(before, run, check, reducer)


def event() -> Any:
    """Return a CUDA event with timing."""
    return torch.cuda.Event(enable_timing=True)


def alone(made: Case, repetitions: int) -> tuple[list[float], list[float]]:
    """Return the times of the device and of the host in μs, without other work."""
    device_us, host_us, cycles = [], [], SLEEP
    while len(device_us) < UNTIMED + repetitions:
        made.before()
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start, stop = event(), event()
        start.record()
        began = time.perf_counter()
        made.run()
        host = 1e6 * (time.perf_counter() - began)
        stop.record()
        if start.query() and cycles < 100 * SLEEP:
            cycles *= 4  # the device waited for the host
            continue
        torch.cuda.synchronize()
        device_us.append(1e3 * start.elapsed_time(stop))
        host_us.append(host)
    return device_us[UNTIMED:], host_us[UNTIMED:]


def beside(made: Case, repetitions: int, device: str, tokens: int) -> tuple[list[float], float]:
    """Return the segment's times in parallel with products, and the additional time of the products, in μs."""
    x, w = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((tokens, 3072), (3072, 768)))
    out = x @ w
    side = torch.cuda.Stream(priority=-1)
    times: list[float] = []
    products: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * repetitions):
        with_segment = turn % 2 == 0
        made.before()
        torch.cuda.synchronize()
        first, last, start, stop = (event() for _ in range(4))
        first.record()
        for _ in range(PRODUCTS):
            torch.mm(x, w, out=out)
        last.record()
        if with_segment:
            with torch.cuda.stream(side):
                start.record()
                made.run()
                stop.record()
        torch.cuda.synchronize()
        products[with_segment].append(1e3 * first.elapsed_time(last))
        if with_segment:
            times.append(1e3 * start.elapsed_time(stop))
    return times, statistics.median(products[True]) - statistics.median(products[False])


def profiled(made: Case, device: str, show: bool) -> results.Row:
    """Return the number of kernels and copies of a segment, and the sum of their times in μs."""
    made.before()
    torch.cuda.synchronize()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        made.run()
        torch.cuda.synchronize()
    of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    found = [each for each in seen.key_averages() if getattr(each, of) > 0]
    for each in sorted(found, key=lambda each: -getattr(each, of))[: 12 if show else 0]:
        print(f"    {getattr(each, of):8.1f} μs {each.count:3} × {each.key[:70]}")
    return {"launches": sum(each.count for each in found), "busy_us": sum(getattr(each, of) for each in found)}


def add_us(device: str) -> float:
    """Return the median time in which the host launches `x.add_(1)`, in μs."""
    x, times = torch.zeros(1024, device=device), []
    for _ in range(200):
        began = time.perf_counter()
        x.add_(1)
        times.append(1e6 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return statistics.median(times)


@functools.cache
def counted() -> dict[tuple[str, int, str], int]:
    """Return the launches that `benchmarks.launches` counts, by method, ranks, and "gradient" or "update, fused"."""
    table = results.load(results.RESULTS / "launches.csv")
    table = table[(table.state == "now") & (table.gradients == "float32")]
    return {(row.method, row.ranks, row.exchanged): row.launches for row in table.itertuples()}


def warm_up(made: Case) -> None:
    """Compile kernels, create the tables of addresses, and capture graphs, as before training."""
    with made.reducer.captures.allowed():
        for _ in range(4):
            made.before()
            made.run()


def measure(name: str, ranks: int, shapes: dict[str, Any], repetitions: int, device: str) -> results.Row:
    """Check and time one case."""
    made = case(name, ranks, shapes, device)
    with mock.patch.object(graphs, "can_capture", return_value=False):
        warm_up(made)
        plain_device_us, plain_host_us = alone(made, repetitions)
    warm_up(made)
    # All mocked ranks answer for the first region of two passes, so check these methods with one rank.
    (case(name, 1, shapes, device) if isinstance(method(name.split()[0]).aggregator, TwoPass) else made).check()
    device_us, host_us = alone(made, repetitions)
    beside_us, delay_us = beside(made, max(3, repetitions // 2), device, TOKENS if device == "cuda" else 1)
    row: results.Row = {
        "method": name,
        "ranks": ranks,
        "numel": sum(torch.Size(shape).numel() for shape in shapes.values()),
        **spread(device_us, "device_us"),
        **spread(host_us, "host_us"),
        "plain_device_us": statistics.median(plain_device_us),
        "plain_host_us": statistics.median(plain_host_us),
        **spread(beside_us, "beside_us"),
        "delay_us": delay_us,
        "add_us": add_us(device),
        "counted": counted().get((name.split()[0], ranks, "update, fused" if "updates" in name else "gradient"), ""),
        "repetitions": repetitions,
    }
    if (name, ranks) == JUDGED:
        limits = {f"limit_{column}": limit for column, limit in LIMITS.items()}
        row |= limits | {"within": all(row[column] <= limit for column, limit in LIMITS.items())}
    return row


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--rehearse", action="store_true", help="use the CPU and a small segment")
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--methods", nargs="+", help="run only these methods. Default: all")
    arguments = parser.parse_args()
    device, context = device_of_run(arguments.rehearse)
    shapes = (
        {key: [max(1, size // 16) for size in shape] for key, shape in SHAPES.items()} if device == "cpu" else SHAPES
    )
    chosen = [one for one in CASES if not arguments.methods or one[0] in arguments.methods]
    rows: dict[tuple[str, int], results.Row] = {}

    def save(key: tuple[str, int], row: results.Row) -> None:
        """Save a row at once, because the run may be interrupted."""
        rows[key] = row
        print({key: round(x, 1) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
        results.save(arguments.out / "segment.csv", [row | results.device()], ["method", "ranks"], digits=5)

    with context():
        for one in chosen:
            save(one, measure(*one, shapes, arguments.repetitions, device))
        for one in chosen:
            made = case(*one, shapes, device)
            warm_up(made)
            save(one, rows[one] | profiled(made, device, show=one == JUDGED))
