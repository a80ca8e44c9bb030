"""What does each method cost: bytes that a worker sends in a step, and time to compress, beside a copy?

All rows of `METHODS`, with their own options, on one rank's gradient of 25 matrices of 1000 · 1000, Gaussian. Before a
time is taken, what other ranks decode is compared with what is taken out of the residual. Then a copy of as many
elements, compressing, and a rank's whole step take turns, as in `benchmarks.selection`, each "cold", after the caches
were filled with other data. Times are of one core: other programs slow them down little.

    python -m benchmarks.methods                     # all methods
    python -m benchmarks.methods --methods qsgd      # replaces their rows only

Written: `results/methods.csv`, a row per method.

- `bytes`, `dense_bytes`: what a worker sends in a step, local steps averaged, by the method's own formula, without
  headers; and what dense gradients take. Equal where the method goes dense.
- `copy_ms`: of a copy, the least that a pass over the data can take: it reads and writes 4 bytes an element.
- `compress_ms`: of u to a payload and the update that it stands for. The pass that adds the gradient to the residual
  comes before; it also finds what some selections start with.
- `step_ms`: of that pass, compressing, and taking the update out of the residual.

Methods with the same compressor and memory are timed once.
"""

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.results import Row
from benchmarks.harness.timing import in_turns
from lightning_sparse import METHODS, Comm, Method, method, simulate
from lightning_sparse.compressors.base import add_
from lightning_sparse.context import Context, State
from lightning_sparse.layout import Layout, Segment
from lightning_sparse.routing import Routing

WORKERS = 8
SIDE = 1000


def layout(matrices: int) -> Layout:
    """Return a model of square matrices, in buckets."""
    return Layout.of({f"layer {number}": (SIDE, SIDE) for number in range(matrices)})


def volume(chosen: Method, matrices: int) -> Row:
    """Return how many bytes a worker sends in a step."""

    def rank(comm: Comm) -> Row:
        routing = Routing(chosen, comm, layout(matrices))
        return {
            "bytes": round(routing.nbytes(chosen.density) / chosen.every),
            "dense_bytes": round(routing.dense_nbytes),
        }

    return simulate(WORKERS, rank)[0]


def works(chosen: Method, matrices: int) -> dict[str, Callable[[], object]]:
    """Return a copy, compressing and a whole step, to be timed.

    Raises:
        SystemExit: what other ranks decode differs from the update.
    """
    buckets = [_Bucket(chosen, segment) for segment in layout(matrices).segments]
    for bucket in buckets:
        bucket.check()
    return {part: functools.partial(_each, buckets, part) for part in ("copy", "compress", "step")}


class _Bucket:
    """One rank's work for a segment."""

    def __init__(self, chosen: Method, segment: Segment) -> None:
        self.chosen, self.segment = chosen, segment
        self.gradient = torch.randn(segment.numel, generator=torch.Generator().manual_seed(segment.index))
        self.copied = torch.empty_like(self.gradient)
        self.state: State = {
            spec.name: torch.zeros_like(self.gradient)
            for spec in (*chosen.memory.state, *chosen.compressor.state)
            if spec.per != "segment"
        }
        self.step()
        self.u, self.ctx = self.compensated()

    def compensated(self) -> tuple[Tensor, Context]:
        stats = self.chosen.compressor.block_stats(self.segment.numel)
        ctx = Context(self.segment, density=self.chosen.density, state=self.state, stats=stats)
        return self.chosen.memory.compensate(self.segment.views(self.gradient), ctx), ctx

    def copy(self) -> None:
        self.copied.copy_(self.gradient)

    def compress(self) -> None:
        self.chosen.compressor.compress(self.u, self.ctx)

    def step(self) -> None:
        u, ctx = self.compensated()
        _, update = self.chosen.compressor.compress(u, ctx)
        self.chosen.memory.update(u, update, None, ctx)

    def check(self) -> None:
        payload, update = self.chosen.compressor.compress(self.u, self.ctx)
        decoded = self.chosen.compressor.decode(payload, self.ctx)
        if not torch.equal(*(add_(torch.zeros_like(self.u), x) for x in (update, decoded))):
            raise SystemExit(f"{self.chosen}: other ranks decode something else than the update: no times for that.")


def _each(buckets: list[_Bucket], part: str) -> None:
    for bucket in buckets:
        getattr(bucket, part)()


def times(chosen: Method, matrices: int, repetitions: int) -> Row:
    """Return the median milliseconds of each part of the work, from a cold cache."""
    timed = in_turns(works(chosen, matrices), repetitions, time.process_time)
    rows = {row["contestant"]: row for row in timed if row["cache"] == "cold"}
    return {
        f"{name}_{column}": value
        for name, row in rows.items()
        for column, value in row.items()
        if column.startswith("ms")
    }


def measure(names: Sequence[str], matrices: int, repetitions: int) -> list[Row]:
    """Return a row for each method."""
    timed: dict[str, Row] = {}
    rows: list[Row] = []
    for name in names:
        chosen = method(name)
        kind = repr((chosen.compressor, chosen.memory))
        if kind not in timed:
            timed[kind] = times(chosen, matrices, repetitions)
        rows.append({"method": name, **volume(chosen, matrices), **timed[kind]})
        print(
            {key: value if isinstance(value, str) else round(value, 1) for key, value in rows[-1].items()}, flush=True
        )
    return rows


def main() -> None:
    """Run from the command line."""
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--matrices", type=int, default=25, help="of a million elements each, default 25")
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.methods, arguments.matrices, arguments.repetitions)
    case = {"elements": arguments.matrices * SIDE**2, "workers": WORKERS}
    more = {"repetitions": arguments.repetitions} | results.origin()
    results.save(arguments.out / "methods.csv", [row | case | more for row in rows], ["method"], digits=4)


if __name__ == "__main__":
    main()
