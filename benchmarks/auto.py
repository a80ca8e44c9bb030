"""Times the steps of `auto_ddp` beside its candidates as fixed strategies, over links of several rates.

    sudo python -m benchmarks.auto
    sudo python -m benchmarks.auto --sharded  # `auto_hsdp` on two nodes of two ranks

Workers train a paced model with AdamW: forward and backward sleep for the time that a GPU would take, and the rest is
real. So the processors, which workers share, do little, and times vary little. A round trains with each strategy in
turn, in an order that changes, in the same processes. A strategy that is far from the fastest of a round does not train
in later rounds. Times are medians of steps after the first hundred, in which `auto_ddp` decides. `auto_ddp` is compared
with a strategy in each round, because times drift between rounds: the ratio is the median of the ratios of the rounds.
A run is reported only if all workers end with the same weights.

An event is something that happens while `auto_ddp` has decided already, or that disturbs its measurements.
"""

import functools
import itertools
import statistics
import subprocess
import time
from typing import Any, NamedTuple

import pandas as pd
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import results
from benchmarks.harness.launch import check_weights, gather, run_ranks, write
from benchmarks.harness.lightning import as_if_by_torchrun, bare_trainer
from benchmarks.harness.results import Row
from benchmarks.harness.shaped_links import shape
from benchmarks.harness.workloads import Paced, real_gradients
from lightning_sparse import AutoDDPStrategy, AutoHSDPStrategy, SparseDDPStrategy, SparseHSDPStrategy


class InBfloat16(pl.strategies.DDPStrategy):
    """Stock DDP with torch's hook, which Lightning registers on GPUs only."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))


class Case(NamedTuple):
    """A link, a model by its millions of parameters, the number of workers, and an event or "no event"."""

    rate: str
    million: float
    workers: int
    event: str


STRATEGIES: dict[str, Any] = {
    "ddp": pl.strategies.DDPStrategy,
    "ddp, bf16": InBfloat16,
    "topk": functools.partial(SparseDDPStrategy, "topk"),
    "topk, next step": functools.partial(SparseDDPStrategy, "topk", overlap="next_step"),
    "int8": functools.partial(SparseDDPStrategy, "int8"),
    "int4": functools.partial(SparseDDPStrategy, "int4"),
    "auto": functools.partial(AutoDDPStrategy, overlap="next_step"),
}
REPLICAS = "two replicas of two shards"
SHARDED: dict[str, Any] = {
    "dense": functools.partial(SparseHSDPStrategy, "dense", replicas=2),
    "topk": functools.partial(SparseHSDPStrategy, "topk", replicas=2),
    "topk, next step": functools.partial(SparseHSDPStrategy, "topk", replicas=2, overlap="next_step"),
    "auto": functools.partial(AutoHSDPStrategy, replicas=2, overlap="next_step"),
}
"""Strategies of the event `REPLICAS`. Each replica is a node of two ranks."""
MODELS = {0.017: (64, 0.03), 0.26: (256, 0.03), 4.2: (1024, 0.06), 21.2: (2304, 0.15)}
"""By million parameters: the width of four square layers, and seconds of forward and backward."""
RATES = ("50mbit", "1gbit", "50mbit 50ms", "1gbit 50ms", "loopback")
EVENTS = {
    "1gbit falls to 50mbit": 0.26,
    "50mbit rises to 1gbit": 0.26,
    "1gbit falls to 20mbit": 0.017,
    "20mbit rises to 1gbit": 0.017,
    "a slow rank": 0.26,
    "slow first steps": 0.26,
}
"""By event: the model, in million parameters."""
SMALL_SEGMENTS = Case("50mbit 50ms", 4.2, 2, "segments of 2.5 MiB")
"""A model of 26 million parameters has four segments, too. They are exchanged one after the other."""
DECIDED, WARMED, TIMED = 100, 50, 30
"""Untimed steps, in which `auto_ddp` decides, or the density warm-up of updates ends, and timed steps. Other strategies
are timed after three steps. Each is timed for at most `MOST` seconds."""
NOTICED = 250
"""Untimed steps after the link has changed. In them `auto_ddp` looks, in the first hundred, and decides anew."""
MOST, LEAST = 10.0, 3
FAR = 1.3
"""A strategy that takes this times the fastest of a round is left out of later rounds."""
ROUNDS, LEAST_ROUNDS, SECONDS = 7, 3, 500.0
"""Number of rounds, the least number, and seconds after which no further round begins."""


def cases(rates: list[str], millions: list[float], workers: list[int]) -> list[Case]:
    """Return all combinations without an event, and with two workers the events of these models."""
    found = [Case(*each, "no event") for each in itertools.product(rates, millions, workers)]
    found += [
        Case("1gbit", million, 2, event) for event, million in EVENTS.items() if 2 in workers and million in millions
    ]
    asked = SMALL_SEGMENTS.rate in rates and SMALL_SEGMENTS.million in millions and SMALL_SEGMENTS.workers in workers
    return [*found, SMALL_SEGMENTS] if asked else found


class Model(pl.LightningModule):
    """Four square layers, paced."""

    def __init__(self, million: float, event: str, rank: int) -> None:
        super().__init__()
        width, seconds = MODELS[million]
        seconds *= 1.5 if rank and event == "a slow rank" else 1
        self.paced = Paced([(width, width), (width,)] * 4, seconds, real_gradients(rank))
        self.slow_steps = 20 if event == "slow first steps" else 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        time.sleep(0.5 * (index < self.slow_steps))  # as if a compiler worked
        loss: Tensor = self.paced(batch % 8)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Shards(pl.LightningModule):
    """Six square layers, sharded over the ranks of a replica. Each step also sleeps."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(*(nn.Linear(384, 384) for _ in range(6)))
            for module in (*self.layers, self.layers):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        time.sleep(0.03)
        inputs = torch.randn(8, 384, generator=torch.Generator().manual_seed(int(batch) + 1000 * self.global_rank))
        loss: Tensor = self.layers(inputs).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Times(pl.Callback):
    """Changes the link at a step, and records the seconds of each step and the chosen candidate."""

    def __init__(self, leave_out: int, new_rate: str = "", at: int = 0) -> None:
        self.leave_out, self.new_rate, self.at = leave_out, new_rate, at
        self.seconds, self.began, self.choice = list[float](), time.perf_counter(), ""

    @property
    def timed(self) -> list[float]:
        """Seconds of the timed steps."""
        return self.seconds[self.leave_out + 1 :]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if self.new_rate and len(self.seconds) == self.at:
            change_link(self.new_rate)
        if isinstance(trainer.strategy, AutoDDPStrategy | AutoHSDPStrategy):
            self.choice = trainer.strategy.choice
        if self.timed and len(self.timed) % LEAST == 0:
            trainer.should_stop = len(self.timed) >= TIMED or max(gather(sum(self.timed) > MOST))
        self.began = time.perf_counter()  # a step does not include the collective above


def change_link(rate: str) -> None:
    """Give this host's interface another rate, at most that of the run: the switch keeps its rate."""
    subprocess.run(f"tc qdisc change dev eth0 {shape(rate)}".split(), check=True)


def work(job: Row) -> None:
    """Train with all strategies on this rank, in several rounds."""
    rank, case = as_if_by_torchrun(), Case(*(job[field] for field in Case._fields))
    names, began, late = [*strategies_of(case)], time.monotonic(), False
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and late:
            break
        found = {name: train(name, case, rank) for name in (names if number % 2 else [*reversed(names)])}
        for name, row in found.items():
            write(job["out"], strategy=name, round=number, **row)
        fastest = min(row["ms"] for row in found.values())
        names = [name for name in names if name == "auto" or found[name]["ms"] < FAR * fastest]
        late = max(gather(time.monotonic() - began > SECONDS))


def strategies_of(case: Case) -> dict[str, Any]:
    """Return the strategies of a case by name, stock training first."""
    return SHARDED if case.event == REPLICAS else STRATEGIES


def train(name: str, case: Case, rank: int) -> Row:
    """Train with a strategy; return the median milliseconds of a step and the choice of `auto_ddp`."""
    begun = DECIDED if name == "auto" else WARMED if name.startswith("topk") else 3
    old, new = (case.event.split()[0], case.event.split()[-1]) if "bit" in case.event else ("", "")
    leave_out = begun + (NOTICED if name == "auto" else 3) if new else begun
    leave_out = max(leave_out, 25) if case.event == "slow first steps" else leave_out
    times, is_sharded = Times(leave_out, new, begun), case.event == REPLICAS
    model = Shards() if is_sharded else Model(case.million, case.event, rank)
    if old:
        change_link(old)
    options: dict[str, Any] = {} if name.startswith("ddp") else {"process_group_backend": "gloo"}
    if case == SMALL_SEGMENTS:
        options["bucket_cap_mb"] = 2.5
    trainer = bare_trainer(strategies_of(case)[name](**options), [times])
    trainer.fit(model, torch.utils.data.DataLoader(torch.arange(2000), batch_size=None))  # type: ignore[arg-type]
    check_weights(model)
    slowest = [max(each) for each in zip(*gather(times.timed), strict=True)]
    return {"ms": 1e3 * statistics.median(slowest), "choice": times.choice}


def measure(case: Case) -> list[Row]:
    """Measure all strategies over a link; return rows of the CSV file."""
    per_host = 2 if case.event == REPLICAS else 1
    records, _ = run_ranks("benchmarks.auto", case._asdict(), case.workers, case.rate, per_host)
    stock, *_ = names = [*strategies_of(case)]
    ms = pd.DataFrame(records).pivot(index="round", columns="strategy", values="ms")[names]
    choices = " or ".join(dict.fromkeys(each["choice"] for each in records if each["choice"]))
    best = ms.drop(columns="auto").median().idxmin()
    rows = []
    for name in names:
        row = {"strategy": name, "ms": ms[name].median(), "ms_min": ms[name].min(), "ms_max": ms[name].max()}
        row |= {"rounds": ms[name].count(), "choice": choices if name == "auto" else ""}
        for column, other in (("to_best", best), ("to_ddp", stock)):
            ratios = (ms[name] / ms[other]).dropna()
            row |= {column: ratios.median(), f"{column}_min": ratios.min(), f"{column}_max": ratios.max()}
        rows.append(row)
    print(ms.assign(choice=pd.Series({each["round"]: each["choice"] for each in records if each["choice"]})))
    return rows


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--rates", nargs="*", default=RATES)
    parser.add_argument("--million", type=float, nargs="+", default=[*MODELS])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sharded", action="store_true", help="time `auto_hsdp` and its candidates")
    args = parser.parse_args()
    if args.sharded:
        path, runs = args.out / "auto_hsdp.csv", [Case(rate, 0.9, 4, REPLICAS) for rate in ("50mbit", "1gbit")]
    else:
        path, runs = args.out / "auto.csv", cases(args.rates, args.million, args.workers)
    results.save_each(path, results.missing(results.load(path), runs), measure, digits=4)
