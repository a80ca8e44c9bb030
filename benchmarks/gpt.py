"""Measures the time that compression adds to a step of GPT-2 small on one GPU.

There is one rank, so no bytes are sent. But each gradient is added to the residual, and entries are selected, encoded,
decoded and written back, as with several ranks. The benchmark compares plain DDP, `attach` with each method, and the
exchange of updates, which does not rescale with one rank. All train the same model on random tokens and take turns of a
few steps each. Times are from CUDA events; the result is the median of all turns. Updates are exchanged after the step,
within backward, or during the next step. Before a method is timed, one step checks its result: average and residual
must add up to the gradient, bit by bit. If it exchanges updates, only few weights may change.

    python -m benchmarks.gpt                          # 124 M parameters, 16 × 1024 tokens, on the GPU, over NCCL
    python -m benchmarks.gpt --contestants ddp topk   # only these, at all precisions
    python -m benchmarks.gpt --rehearse               # a small model on the CPU, over gloo: a test of the benchmark

Output: `gpt_cuda.csv`, written after each precision. "added" is a method's time minus plain DDP's. Its limit is 1.6
times the floor plus one millisecond. The floor is the time to read the gradient, to read and write the residual in
fp32, and to write the result. It assumes the rate at which the card copies fp32 numbers. For exchanged updates the
floor is the time of the kernels' loads and stores, see `UPDATE_BYTES`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import results
from benchmarks.harness.baselines import CONTESTANTS, Options, Wrapped, data_parallel
from benchmarks.harness.rehearsal import device_of_run
from benchmarks.harness.results import Row
from benchmarks.harness.timing import in_turns, spread
from examples.models import GPT

PRECISIONS = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
"""Dtype of parameters and gradients, by name. Computation is in bf16."""
UPDATES = ("topk updates", "topk updates within backward", "topk updates, delayed")
METHODS = ("topk", "topk, whole model", "gaussiank", "randk", *UPDATES)
UPDATE_BYTES = {torch.float32: 60, torch.bfloat16: 74}
"""Bytes that kernels load and store per parameter in an exchange of updates, not rescaled. In fp32 the weights before
the step take 8, the delta 12, payout and residual 24, mean and weights 16, all in the first version."""
FLOORS, CONSTANT_MS = 1.6, 1.0
SMALL = {"context": 32, "width": 64, "layers": 2, "heads": 2, "vocabulary": 211}
GPT2 = {"context": 1024, "width": 768, "layers": 12, "heads": 12, "vocabulary": 50257}


class Contestant:
    """A GPT of a given shape, and the method that averages its gradients, or "ddp" for plain DDP."""

    def __init__(self, method: str, shape: dict[str, int], precision: str, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.method, self.device, self.mixed = method, device, precision == "bf16-mixed"
        self.model = GPT(**shape).to(device, PRECISIONS[precision])
        self.numel = sum(param.numel() for param in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        if method == "ddp":
            self.wrapped = Wrapped(data_parallel(self.model))
        else:
            self.wrapped = CONTESTANTS[method].wrap(self.model, Options(density=0.001), self.optimizer)
        tokens = torch.randint(shape["vocabulary"], (batch, shape["context"] + 1), device=device)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)

    def backward(self) -> None:
        """Run the forward and backward passes."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            loss = functional.cross_entropy(self.wrapped.module(self.inputs).flatten(0, 1), self.targets)
        loss.backward()

    def step(self) -> None:
        """Run a whole training step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def graph_bytes(self) -> int:
        """Return the bytes of device memory that the CUDA graphs of the exchange reserve."""
        pool = self.wrapped.reducer and self.wrapped.reducer.captures.pool
        segments = torch.cuda.memory_snapshot() if pool else []
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(pool or ()))

    def check(self) -> None:
        """Exit unless, in the first step, the sparse result and residual add up to the gradient exactly."""
        given: dict[str, Tensor] = {}
        params: dict[str, Any] = dict(self.model.named_parameters())
        hooks = [x.register_hook(lambda grad, key=key: given.update({key: grad.clone()})) for key, x in params.items()]
        self.backward()
        kept = self.wrapped.residuals()
        for name, param in params.items():
            if not torch.equal(param.grad.float() + kept[name].to(param.device), given[name].float()):
                raise SystemExit(f"{self.method} loses a part of the gradient of {name}, so nothing is measured.")
        handed = sum(int(param.grad.count_nonzero()) for param in params.values())
        if not 0.0005 * self.numel < handed < 0.0015 * self.numel:
            raise SystemExit(f"{self.method} applies {handed:,} of {self.numel:,} entries, so nothing is measured.")
        for hook in hooks:
            hook.remove()
        self.optimizer.zero_grad()

    def check_updates(self) -> None:
        """Exit unless a step changes only a few weights, those of the sent entries."""
        before = [param.detach().clone() for param in self.model.parameters()]
        self.step()
        changed = sum(int((x != y).sum()) for x, y in zip(before, self.model.parameters(), strict=True))
        if not 0 < changed < 0.0015 * self.numel:
            raise SystemExit(f"{self.method} changes {changed:,} of {self.numel:,} weights, so nothing is measured.")


def measured(
    shape: dict[str, int],
    turns: int,
    device: str,
    batch: int = 16,
    steps: int = 5,
    precisions: Iterable[str] = tuple(PRECISIONS),
    methods: Iterable[str] = METHODS,
) -> Iterator[Row]:
    """Check and time DDP and some methods, with several steps in each turn. Call it with one rank."""
    for precision in precisions:
        dtype = PRECISIONS[precision]
        contestants = {name: Contestant(name, shape, precision, batch, device) for name in ("ddp", *methods)}
        for name in methods:
            (contestants[name].check_updates if CONTESTANTS[name].updates else contestants[name].check)()
        numel = contestants["ddp"].numel
        x = torch.randn(numel, device=device)
        copied = in_turns({"copy_": functools.partial(torch.empty_like(x).copy_, x)}, 15, device)["copy_", "cold"]
        rate = 8 * numel / spread(copied)["ms"]  # reads and writes
        del x
        runs = {name: lambda step=each.step: [step() for _ in range(steps)] for name, each in contestants.items()}
        times = in_turns(runs, turns, device)
        spreads = {name: spread([ms / steps for ms in times[name, "warm"]]) for name in contestants}
        case = {"params": numel, "batch": batch, "length": shape["context"], "turns": turns, "steps": steps}
        for name, found in spreads.items():
            counted = UPDATE_BYTES[dtype] if "updates" in name else 8 + 2 * dtype.itemsize
            floor = counted * numel / rate
            row: Row = {"precision": precision, "contestant": name, **found, **case}
            row |= {"copy_bytes_per_s": 1e3 * rate, "counted_bytes": counted, "floor_ms": floor}
            row |= {"graph_bytes": contestants[name].graph_bytes()}
            if name != "ddp":
                added, limit = row["ms"] - spreads["ddp"]["ms"], FLOORS * floor + CONSTANT_MS
                row |= {"added_ms": added, "limit_ms": limit, "within": added <= limit}
            yield row
        del contestants, runs


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--rehearse", action="store_true", help="use the CPU and a small model")
    parser.add_argument("--turns", type=int, default=15, help="number of timed turns of each contestant. Default: 15")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--contestants", nargs="+", default=list(METHODS), choices=["ddp", *METHODS])
    arguments = parser.parse_args()
    device, context = device_of_run(arguments.rehearse)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    where = {"backend": "nccl", "device_id": torch.device("cuda", 0)} if device == "cuda" else {"backend": "gloo"}
    dist.init_process_group(**where, store=store, rank=0, world_size=1)
    methods = [name for name in arguments.contestants if name != "ddp"]  # ddp is always the baseline
    for precision in arguments.precisions:
        with context():
            small = {"batch": 2, "steps": 1} if arguments.rehearse else {}
            shape = SMALL if arguments.rehearse else GPT2
            rows = list(measured(shape, arguments.turns, device, precisions=[precision], methods=methods, **small))
        columns = ["precision", "contestant", "ms", "ms_p20", "ms_p80", "added_ms", "limit_ms", "floor_ms", "within"]
        print(pd.DataFrame(rows).reindex(columns=columns).to_string(index=False, na_rep=""), flush=True)
        rows = [row | results.device() for row in rows]
        results.save(arguments.out / "gpt_cuda.csv", rows, ["precision", "contestant"], digits=5)
    dist.destroy_process_group()
