"""What does one segment take: of the device, of the host that launches it, and beside the products of backward?

A segment is a block of GPT-2 small, 7.09 M elements, at density 0.001; ranks are stand-ins that all send the same, so
that nothing travels. Of updates it is the whole exchange after a step of AdamW. All times are medians in μs:

- `device_us`: between two CUDA events. The device sleeps until the host has launched everything, so no kernel waits
  for its launch.
- `host_us`: from the first launch to the last, while the device sleeps.
- `beside_us`: between two events in a stream of high priority, while another stream has bf16 products to do, of 8192
  tokens with a layer of GPT-2.
- `delay_us`: how much longer the products take with the segment beside them than alone.
- `launches`, `busy_us`: the number of kernels and copies of a segment, and the sum of their times, by torch's
  profiler; `counted` is the number that `benchmarks.launches` counts without a GPU.

Before a method is timed, one segment shows that nothing is lost: the mean and the residual add up to the gradient and
the residual before.

    python -m benchmarks.segment              # on a GPU
    python -m benchmarks.segment --rehearse   # on a CPU, small, to see that all of it runs; times mean nothing

Written: `segment.csv`, after each method. `limit_us` and `within`: what docs/gpu.md promises for an H100 or H200.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import results
from benchmarks.harness.rehearsal import device_of_run
from benchmarks.harness.timing import spread
from benchmarks.launches import SHAPES
from lightning_sparse import METHODS, Reducer, method
from lightning_sparse.aggregators import TwoPass
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.kernels import Echo

CASES = [(name, ranks) for ranks in (2, 1, 8) for name in ("topk", "topk updates", "gaussiank", "int4")]
LIMITS = {"device_us": 150, "host_us": 600}
"""Of `topk` with two ranks: with these, segments hide behind backward."""
JUDGED = ("topk", 2)
SLEEP = 20_000_000  # cycles of the device, some 10 ms
TOKENS, PRODUCTS = 8192, 40


class Case(NamedTuple):
    """One contestant.

    Attributes:
        before: makes a gradient or an update that is there to be exchanged; not timed.
        run: exchanges the segment.
        check: raises SystemExit unless a segment loses nothing.
    """

    before: Callable[[], object]
    run: Callable[[], object]
    check: Callable[[], None]


def case(name: str, ranks: int, shapes: dict[str, Any], device: str) -> Case:
    """Return a contestant on tensors of some shapes."""
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
        old = residuals(reducer)  # on the CPU
        before()
        run()
        new = residuals(reducer)
        for key, x in fresh.items():
            whole, found = x.cpu() + old.get(key, 0), given[key].cpu() + new[key]
            # Three sums, each rounded to fp32.
            if not torch.allclose(found, whole, rtol=0, atol=1e-6 * float(whole.abs().max())):
                raise SystemExit(f"{name}, P = {reducer.comm.size}, loses something of {key}: no times for that.")

    return Case(before, run, check)


def residuals(reducer: Reducer) -> dict[str, Tensor]:
    """Return copies of the residuals by parameter; none before the first step."""
    elements = reducer.state_dict()["elements"].get("residual", {})
    return {key: x.clone() for key, x in elements.items()}


def of_updates(name: str, reducer: Reducer, fresh: dict[str, Tensor], device: str) -> Case:
    """Return the exchange of AdamW's updates."""
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
            raise SystemExit(f"{name}, P = {reducer.comm.size}, changes {changed:,} of {numel:,}: no times for that.")

    return Case(before, run, check)


def event() -> Any:
    """Return a CUDA event that takes times."""
    return torch.cuda.Event(enable_timing=True)


def alone(made: Case, repetitions: int) -> tuple[list[float], list[float]]:
    """Return times in μs of the device and of the host, without other work."""
    device_us, host_us, cycles = [], [], SLEEP
    while len(device_us) < repetitions:
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
            cycles *= 4  # the device has waited for the host
            continue
        torch.cuda.synchronize()
        device_us.append(1e3 * start.elapsed_time(stop))
        host_us.append(host)
    return device_us, host_us


def beside(made: Case, repetitions: int, device: str, tokens: int) -> tuple[list[float], float]:
    """Return the segment's times beside products, and how much longer these take, in μs."""
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


@functools.cache
def counted() -> dict[tuple[str, int, str], int]:
    """Return the launches that `benchmarks.launches` counts, by method, ranks, and "gradient" or "update, fused"."""
    table = results.load(results.RESULTS / "launches.csv")
    table = table[(table.state == "now") & (table.gradients == "float32")]
    return {(row.method, row.ranks, row.exchanged): row.launches for row in table.itertuples()}


def measure(name: str, ranks: int, shapes: dict[str, Any], repetitions: int, device: str, tokens: int) -> results.Row:
    """Check and time one contestant."""
    made = case(name, ranks, shapes, device)
    for _ in range(3):  # compiles, and makes the tables of addresses
        made.before()
        made.run()
    # The stand-ins all answer for the first region of two passes, so these are checked with one rank.
    (case(name, 1, shapes, device) if isinstance(method(name.split()[0]).aggregator, TwoPass) else made).check()
    device_us, host_us = alone(made, repetitions)
    beside_us, delay_us = beside(made, max(3, repetitions // 2), device, tokens)
    row: results.Row = {
        "method": name,
        "ranks": ranks,
        "numel": sum(torch.Size(shape).numel() for shape in shapes.values()),
        **spread(device_us, "device_us"),
        **spread(host_us, "host_us"),
        **spread(beside_us, "beside_us"),
        "delay_us": delay_us,
        **profiled(made, device, show=(name, ranks) == JUDGED),
        "counted": counted().get((name.split()[0], ranks, "update, fused" if "updates" in name else "gradient"), ""),
        "repetitions": repetitions,
    }
    if (name, ranks) == JUDGED:
        limits = {f"limit_{column}": limit for column, limit in LIMITS.items()}
        row |= limits | {"within": all(row[column] <= limit for column, limit in LIMITS.items())}
    return row


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a small segment")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--methods", nargs="+", help="default: all")
    arguments = parser.parse_args()
    device, context = device_of_run(arguments.rehearse)
    shapes = (
        {key: [max(1, size // 16) for size in shape] for key, shape in SHAPES.items()} if device == "cpu" else SHAPES
    )
    tokens = TOKENS if device == "cuda" else 16
    with context():
        for name, ranks in CASES:
            if arguments.methods and name not in arguments.methods:
                continue
            row = measure(name, ranks, shapes, arguments.repetitions, device, tokens)
            print({key: round(x, 1) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
            # After each, as the next may be the last.
            results.save(arguments.out / "segment.csv", [row | results.device()], ["method", "ranks"], digits=5)
