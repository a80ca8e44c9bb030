"""Measures the cost of each method: bytes that a worker sends in a step, and compression time next to that of a copy.

The benchmark covers all rows of `METHODS` with their default options. The data are one rank's Gaussian gradient of 25
matrices of 1000 · 1000. Before the measurement it checks that other ranks decode the update that is subtracted from the
residual. Then three operations take turns: a copy of the same number of elements, compression, and a rank's whole step.
Each is "cold", after other data filled the caches. Times are for one core, so other programs affect them little.
Methods with the same compressor and memory share their times.

    python -m benchmarks.methods                     # all methods
    python -m benchmarks.methods --methods qsgd      # replaces only the rows of these methods

Output: `results/methods.csv`, one row per method.

- `bytes`: bytes that a worker sends per step, by the method's own formula, without headers, averaged over local steps.
- `dense_bytes`: the same for dense gradients. Both are equal if the method falls back to dense.
- `copy_ms`: time of a copy, a lower bound for a pass over the data. It reads and writes 4 bytes per element.
- `compress_ms`: time to compress u to a payload and the corresponding update, without the pass that computes u.
- `step_ms`: time of that pass, of compression, and of subtracting the update from the residual.
"""

import time
from collections import deque
from collections.abc import Callable

import torch

from benchmarks.harness import results
from benchmarks.harness.results import Row
from benchmarks.harness.timing import in_turns, spread
from lightning_sparse import METHODS, Comm, Method, method, simulate
from lightning_sparse.compressors.base import add_
from lightning_sparse.context import Context, State
from lightning_sparse.layout import Layout, Segment
from lightning_sparse.routing import Routing

WORKERS, SIDE = 8, 1000


def layout(matrices: int) -> Layout:
    """Return the layout of a model of square matrices, in buckets."""
    return Layout.of({f"layer {number}": (SIDE, SIDE) for number in range(matrices)})


def volume(chosen: Method, matrices: int) -> Row:
    """Return the number of bytes that a worker sends in a step."""

    def rank(comm: Comm) -> Row:
        routing = Routing(chosen, comm, layout(matrices))
        nbytes = round(routing.nbytes(chosen.density) / chosen.local_steps)
        return {"bytes": nbytes, "dense_bytes": round(routing.dense_nbytes)}

    return simulate(WORKERS, rank)[0]


def works(chosen: Method, matrices: int) -> dict[str, Callable[[], object]]:
    """Return functions to time: a copy, compression, and a whole step of all segments.

    Raises:
        SystemExit: other ranks decode a different update.
    """
    parts = [parts_of(chosen, segment) for segment in layout(matrices).segments]
    # Each result is freed before the next, as in training. Keeping all of them would cause page faults, which take the
    # time of a copy.
    return {name: lambda name=name: deque((each[name]() for each in parts), maxlen=0) for name in parts[0]}


def parts_of(chosen: Method, segment: Segment) -> dict[str, Callable[[], object]]:
    """Return one rank's operations for a segment, after a first step and a check."""
    compressor, memory = chosen.compressor, chosen.memory
    gradient = torch.randn(segment.numel, generator=torch.Generator().manual_seed(segment.index))
    copied, specs = torch.empty_like(gradient), (*memory.state, *compressor.state)
    state: State = {spec.name: torch.zeros_like(gradient) for spec in specs if spec.per != "segment"}

    def compensated() -> tuple[torch.Tensor, Context]:
        stats = compressor.block_stats(segment.numel)
        ctx = Context(segment, density=chosen.density, state=state, stats=stats)
        return memory.compensate(segment.views(gradient), ctx), ctx

    def step() -> None:
        u, ctx = compensated()
        _, update = compressor.compress(u, ctx)
        memory.update(u, update, None, ctx)

    step()
    u, ctx = compensated()
    u = u.clone()  # steps change the residual, but the block statistics belong to this u
    payload, update = compressor.compress(u, ctx)
    if not torch.equal(*(add_(torch.zeros_like(u), x) for x in (update, compressor.decode(payload, ctx)))):
        raise SystemExit(f"{chosen}: other ranks decode a different update, so nothing is measured.")
    return {"copy": lambda: copied.copy_(gradient), "compress": lambda: compressor.compress(u, ctx), "step": step}


def main() -> None:
    """Measure the methods given on the command line, and write a row for each."""
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--matrices", type=int, default=25, help="number of matrices of a million elements. Default: 25"
    )
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    case = {"elements": arguments.matrices * SIDE**2, "workers": WORKERS, "repetitions": arguments.repetitions}
    timed, rows = dict[str, Row](), list[Row]()
    for name in arguments.methods:
        chosen = method(name)
        kind = repr((chosen.compressor, chosen.memory))
        if kind not in timed:
            ms = in_turns(works(chosen, arguments.matrices), arguments.repetitions, clock=time.process_time)
            copy, compress, step = (spread(ms[part, "cold"], f"{part}_ms") for part in ("copy", "compress", "step"))
            timed[kind] = copy | compress | step
        rows.append({"method": name, **volume(chosen, arguments.matrices), **timed[kind]})
        print({key: results.text(value, 4) for key, value in rows[-1].items()}, flush=True)
    results.save(arguments.out / "methods.csv", [row | case | results.origin() for row in rows], ["method"], digits=4)


if __name__ == "__main__":
    main()
