"""Counts the operations of a segment on a GPU: this package's kernels, torch's kernels, and collectives.

The count needs no GPU: it uses fake CUDA tensors that are computed on the CPU. It includes each launch of a Triton
kernel, each operation of torch on the device, each copy between host and device, and each collective. An operation
counts once even if torch launches several kernels for it, as for sorts. An operation on a list of tensors of different
dtypes counts once per tensor. The segment is a block of GPT-2 small with 12 parameters and 7.09 M elements. The step is
the eleventh: ranks do not compare gradients in it. The density is 0.001 if the method has one. For updates, the count
includes the whole exchange after a step of AdamW with default options, with two-bit values. The fused AdamW keeps its
step counts on the device.

    python -m benchmarks.launches
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import results
from lightning_sparse import METHODS, Reducer, method
from lightning_sparse.methods import resolve_updates
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.fake_cuda import CUDA, Counting, on_fake_cuda

WIDTH = 768
LINEAR = {"in": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "wide": (4 * WIDTH, WIDTH), "narrow": (WIDTH, 4 * WIDTH)}
SHAPES = {
    **{f"{norm} {part}": (WIDTH,) for norm in ("norm 1", "norm 2") for part in ("weight", "bias")},
    **{f"{name} weight": shape for name, shape in LINEAR.items()},
    **{f"{name} bias": shape[:1] for name, shape in LINEAR.items()},
}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh", "is_pinned", "device"}


class Operations(TorchDispatchMode):
    """Counts torch's operations on CUDA tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor) and x.numel()]
        if name not in NO_LAUNCH and not func.is_view and any(x.device == CUDA for x in tensors):
            mixed = name.startswith("_foreach") and len({x.dtype for x in tensors}) > 1
            self.count += len(args[0]) if mixed else 1
        return result


def launches(name: str, ranks: int, dtype: torch.dtype, exchanged: str) -> results.Row:
    """Return the number of launches of a segment in the eleventh step."""
    row: results.Row = {"method": name, "ranks": ranks, "gradients": str(dtype)[6:], "exchanged": exchanged}
    with on_fake_cuda() as launched:
        comm = Counting(ranks, first_may_wait=True)
        what: Any = exchanged.partition(",")[0]
        made = method(name, density=0.001 if "density" in METHODS[name].options else None)
        if what == "update":
            made, *_ = resolve_updates(name, None)
        reducer = Reducer(made, comm, granularity="model", exchanged=what)
        model = torch.nn.ParameterDict({key: torch.empty(s, dtype=dtype, device=CUDA) for key, s in SHAPES.items()})
        form = {"fused": True} if "fused" in exchanged else {"foreach": True}
        optimizer = torch.optim.AdamW(model.parameters(), **form)  # type: ignore[arg-type]
        updates = DeltaExchange(reducer, model, [optimizer]) if what == "update" else None
        for comm.steps in range(11):
            for param in model.values():
                param.grad = torch.empty_like(param)
            if updates is not None:
                updates.begin(optimizer)
                optimizer.step()
            launched.clear()
            calls = comm._counts["done"]
            with Operations() as operations:
                if updates is not None:
                    updates.exchange(optimizer)
                else:
                    reducer.reduce_({key: param.grad for key, param in model.items()})
    found = {"triton": len(launched), "torch": operations.count, "collectives": comm._counts["done"] - calls}
    return row | found | {"launches": sum(found.values())}


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--state", default="now", help="label of the count. Default: now")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.methods:
        gradients = [(2, torch.float32, "gradient"), (8, torch.float32, "gradient"), (2, torch.bfloat16, "gradient")]
        kinds = ("update", "update, fused") if method(name).is_sparse or method(name).update_rule else ()
        sparse = [(2, torch.float32, kind) for kind in kinds]
        cases = sparse if method(name).update_rule else gradients + sparse
        for case in cases:
            rows.append({"state": arguments.state, **launches(name, *case)})
            print(rows[-1], flush=True)
    results.save(arguments.out / "launches.csv", rows, ["state", "method", "ranks", "gradients", "exchanged"])
