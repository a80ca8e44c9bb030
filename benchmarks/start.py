"""Measures the time until a training over a slow link begins.

There are two workers on separate hosts, with 100 Mbit/s between them, and an MLP of 25.2 M parameters. The time is
measured from the call of `fit` to the first batch. Before this batch, DistributedDataParallel sends all weights. In
each round, each method runs once, in turn. Nothing is reported unless all workers start with the same weights.

    sudo python -m benchmarks.start
"""

import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness import results
from benchmarks.harness.launch import check_weights, run_ranks, write
from benchmarks.harness.lightning import as_if_by_torchrun, bare_trainer
from benchmarks.harness.timing import spread
from lightning_sparse import SparseDDPStrategy

WORKERS, ROUNDS, RATE = 2, 3, "100mbit"
WIDTH, LAYERS = 1024, 24
EXCHANGES = {"ddp": None, "topk": "gradient", "topk updates": "update"}
STARTS = "equal weights", "weights of each rank's own"


class Net(pl.LightningModule):
    """A stack of layers, initialised with a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_start(self, *_: object) -> int:
        """Record the time and end training."""
        self.first = time.perf_counter()
        return -1


def work(job: dict[str, Any]) -> None:
    """Run the methods in turn. `run_ranks` calls this on each rank."""
    rank = as_if_by_torchrun()
    for _ in range(ROUNDS):
        for name, exchange in EXCHANGES.items():
            for start in STARTS:
                model = Net(0 if start == STARTS[0] else rank)
                strategy: Any = DDPStrategy(process_group_backend="gloo")
                if exchange is not None:
                    strategy = SparseDDPStrategy("topk", exchange=exchange, process_group_backend="gloo")  # type: ignore[arg-type]
                trainer = bare_trainer(strategy)
                begun = time.perf_counter()
                trainer.fit(model, DataLoader(torch.zeros(1, 1, WIDTH), batch_size=None))
                check_weights(model)
                write(job["out"], contestant=name, start=start, ms=1e3 * (model.first - begun))


if __name__ == "__main__":
    args = results.command_line(__doc__, figure=False).parse_args()
    records, links = run_ranks("benchmarks.start", {}, WORKERS, RATE)
    params = LAYERS * (WIDTH + 1) * WIDTH
    case = {"params": params, "rate": RATE, "workers": WORKERS, "rounds": ROUNDS}
    case["largest_calibration_error"] = max(abs(row["ratio_to_expected"] - 1) for row in links)
    rows = []
    for name in EXCHANGES:
        for start in STARTS:
            taken = spread([x["ms"] for x in records if (x["contestant"], x["start"]) == (name, start)])
            rows.append({"contestant": name, "start": start, **taken, **case, **results.origin("pytorch-lightning")})
            print(f"{name}, {start}: {taken['ms']:.0f} ms, {taken['ms_p20']:.0f} to {taken['ms_p80']:.0f}")
    results.save(args.out / "start.csv", rows, ["contestant", "start", "rate"], digits=3)
