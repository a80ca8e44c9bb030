"""What does each method cost: bytes that a worker sends in a step, and time to compress, beside a copy?

All rows of `METHODS`, with their own options, on one rank's gradient of 25 matrices of 1000 · 1000, Gaussian. Before a
time is taken, what other ranks decode is compared with what is taken out of the residual. Then a copy of as many
elements, compressing, and a rank's whole step take turns, each "cold", after the caches were filled with other data.
Times are of one core: other programs slow them down little. Methods with the same compressor and memory share them.

    python -m benchmarks.methods                     # all methods
    python -m benchmarks.methods --methods qsgd      # replaces their rows only

Written: `results/methods.csv`, a row per method.

- `bytes`, `dense_bytes`: what a worker sends in a step, local steps averaged, by the method's own formula, without
  headers; and what dense gradients take. Equal where the method goes dense.
- `copy_ms`: of a copy, the least that a pass over the data can take: it reads and writes 4 bytes an element.
- `compress_ms`: of u to a payload and the update that it stands for; the pass that makes u comes before.
- `step_ms`: of that pass, compressing, and taking the update out of the residual.
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
    """Return a model of square matrices, in buckets."""
    return Layout.of({f"layer {number}": (SIDE, SIDE) for number in range(matrices)})


def volume(chosen: Method, matrices: int) -> Row:
    """Return how many bytes a worker sends in a step."""

    def rank(comm: Comm) -> Row:
        routing = Routing(chosen, comm, layout(matrices))
        nbytes = round(routing.nbytes(chosen.density) / chosen.local_steps)
        return {"bytes": nbytes, "dense_bytes": round(routing.dense_nbytes)}

    return simulate(WORKERS, rank)[0]


def works(chosen: Method, matrices: int) -> dict[str, Callable[[], object]]:
    """Return a copy, compressing and a whole step, to be timed, of all segments.

    Raises:
        SystemExit: what other ranks decode differs from the update.
    """
    parts = [parts_of(chosen, segment) for segment in layout(matrices).segments]
    # Each result is freed before the next, as in training: the page faults of keeping them all cost as much as a copy.
    return {name: lambda name=name: deque((each[name]() for each in parts), maxlen=0) for name in parts[0]}


def parts_of(chosen: Method, segment: Segment) -> dict[str, Callable[[], object]]:
    """Return the parts of one rank's work for a segment, after a first step and a check."""
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
    u = u.clone()  # steps change the residual, and its statistics belong to it
    payload, update = compressor.compress(u, ctx)
    if not torch.equal(*(add_(torch.zeros_like(u), x) for x in (update, compressor.decode(payload, ctx)))):
        raise SystemExit(f"{chosen}: other ranks decode something else than the update: no times for that.")
    return {"copy": lambda: copied.copy_(gradient), "compress": lambda: compressor.compress(u, ctx), "step": step}


def main() -> None:
    """Measure all methods that the command line names, and write a row for each."""
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--matrices", type=int, default=25, help="of a million elements each, default 25")
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
