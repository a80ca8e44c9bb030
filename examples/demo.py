"""Train over a slow link with top-k and with stock DDP, and compare the training times. `make demo` runs this script.

    python examples/demo.py

Two workers train a byte-level GPT of 1.8 million parameters on Python's standard library, with AdamW. They train first
with strategy="topk_ddp" and then with strategy="ddp". Each training ends when the test loss is below 2.8 nats per byte,
or after one minute. The link between the workers has 100 Mbit/s. With root on Linux, each worker runs in a separate
network namespace, and `tc` shapes the link. Otherwise the link is emulated: after each step, a worker waits for the
time that its bytes would take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from benchmarks.harness.launch import RanksFailed, hosts, launch, write
    from benchmarks.harness.shaped_links import bits_per_second, missing
except ImportError as error:
    raise SystemExit(
        f"The demo needs PyTorch and the folder benchmarks/harness: run `make demo` in a clone of the repository. "
        f"({error})"
    ) from error

RATE, TARGET, WORKERS = "100mbit", 2.8, 2
LIMIT = 60.0
"""Seconds of training after which a run ends even if it has not reached `TARGET`."""
PATIENCE = 600.0
"""Seconds without a new point after which the workers count as hung. A busy machine starts them slowly."""
EVERY = 5
"""Number of steps between tests."""
LENGTH, BATCH, WIDTH = 64, 4, 192
"""Bytes per sequence, sequences per worker and step, and width of the GPT."""
LEARNING_RATE, SEED = 0.0005, 0
"""The learning rate is the best of 0.00025, 0.0005, 0.001 and 0.002 for dense training."""
STRATEGIES = OURS, STOCK = "topk_ddp", "ddp"

Curve = list[dict[str, float]]


# The worker. Lightning is imported only here, so that the program that shows the curves starts at once.


def train(job: dict[str, Any]) -> None:
    """Train as one worker with the job's strategy, and report the test loss over time."""
    import pytorch_lightning as pl
    import torch
    from pytorch_lightning.loggers import TensorBoardLogger
    from torch.nn import functional

    from examples.data import StandardLibrary
    from examples.models import GPT, LanguageModel
    from examples.train import quiet, sent_bytes

    class Model(LanguageModel):
        """The network and its optimizer."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), LEARNING_RATE)

    class Clock(pl.Callback):
        """Counts the seconds of training without tests, and ends training when the loss is low enough."""

        seconds = 0.0

        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.test(trainer, module)
            trainer.strategy.barrier()
            self.started, self.sent = time.perf_counter(), sent_bytes(trainer)

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            if job["emulated"]:
                sent = sent_bytes(trainer) - self.sent
                if trainer.strategy.__class__.__name__ == "DDPStrategy":
                    gradient = sum(4 * param.numel() for param in module.parameters())
                    sent = 2 * (trainer.world_size - 1) * gradient // trainer.world_size  # ring all-reduce
                time.sleep(8 * sent / bits_per_second(RATE))
                self.sent = sent_bytes(trainer)
            if trainer.global_step % EVERY:
                return
            self.seconds += time.perf_counter() - self.started
            loss = self.test(trainer, module)
            # All workers have the same weights, but different clocks.
            late = trainer.strategy.broadcast(self.seconds > LIMIT)
            trainer.should_stop = loss < TARGET or late or not math.isfinite(loss)
            trainer.strategy.barrier()
            self.started = time.perf_counter()

        @torch.no_grad()
        def test(self, trainer: pl.Trainer, module: pl.LightningModule) -> float:
            loss = float(functional.cross_entropy(module(test_set[0]).flatten(0, 1), test_set[1].flatten()))
            if trainer.is_global_zero:
                point = {"step": trainer.global_step, "seconds": self.seconds, "loss": loss}
                write(job["out"], **point)
                trainer.logger.log_metrics({"test/loss": loss, "seconds": self.seconds}, trainer.global_step)
            return loss

    quiet()
    torch.set_num_threads(1)
    # Set the variables that torchrun would set with one worker per node.
    os.environ |= {"TORCHELASTIC_RUN_ID": "demo", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "NODE_RANK": os.environ["RANK"]}
    pl.seed_everything(SEED, verbose=False)
    data = StandardLibrary(LENGTH, BATCH, max_bytes=2_000_000)
    data.setup()
    test_set = next(iter(torch.utils.data.DataLoader(data.val_set, 128)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=WORKERS,
        strategy=job["strategy"],
        max_epochs=-1,
        callbacks=Clock(),
        logger=TensorBoardLogger(job["log_dir"], name=job["strategy"], version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(GPT(LENGTH, WIDTH)), data.train_dataloader())


# The main program, which starts the workers and shows their curves.


def show(text: str, end: str = "\n") -> None:
    """Print to stderr, so that stdout starts with the result."""
    print(text, end=end, file=sys.stderr, flush=True)


class View:
    """Shows test loss against seconds during training: as a chart in a terminal, otherwise as one line per test."""

    ROWS, TOP, BOTTOM = 14, 5.0, 2.4

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.drawn = 0

    def add(self, strategy: str, point: dict[str, float]) -> None:
        """Show one more point."""
        self.curves.setdefault(strategy, []).append(point)
        if sys.stderr.isatty():
            if self.drawn:
                show(f"\x1b[{self.drawn}A", end="")
            lines = self.chart(min(100, shutil.get_terminal_size().columns) - 12)
            show("\n".join(f"\x1b[2K{line}" for line in lines))
            self.drawn = len(lines)
        else:
            text = "{:>14} {seconds:7.1f} s   step {step:3d}   test loss {loss:.3f}"
            show(text.format(strategy, **point))

    def row(self, loss: float) -> int:
        """Return the chart's row of a loss; a loss outside of the chart is drawn at its edge."""
        share = (self.TOP - min(self.TOP, max(self.BOTTOM, loss))) / (self.TOP - self.BOTTOM)
        return round(share * (self.ROWS - 1))

    def chart(self, width: int) -> list[str]:
        """Return the chart's lines: loss from `TOP` down to `BOTTOM`, against seconds."""
        end = max(10.0, *(point["seconds"] for curve in self.curves.values() for point in curve))
        grid = [[" "] * width for _ in range(self.ROWS)]
        for strategy, curve in self.curves.items():
            for point in curve:
                grid[self.row(point["loss"])][round(point["seconds"] / end * (width - 1))] = strategy[0].upper()
        target = self.row(TARGET)
        lines = []
        for number, row in enumerate(grid):
            text = "".join(row)
            label = {0: f"loss {self.TOP:g}", self.ROWS - 1: f"{self.BOTTOM:g}", target: f"{TARGET:g}"}.get(number, "")
            lines.append(f"{label:>7} |{text.replace(' ', '·') if number == target else text}")
        lines.append(" " * 8 + "+" + "-" * width)
        lines.append(" " * 9 + "0 s" + f"{end:.0f} s".rjust(width - 3))
        lasts = [f"{name[0].upper()} = {name}, {curve[-1]['loss']:.3f}" for name, curve in self.curves.items()]
        return [*lines, " " * 9 + "   ".join(lasts)]


def reached(curve: Curve) -> float | None:
    """Return the seconds at which a curve falls below the target, or None if it does not."""
    return next((point["seconds"] for point in curve if point["loss"] < TARGET), None)


def verdict(curves: dict[str, Curve], emulated: bool) -> str:
    """Return the result in one sentence."""
    ours, stock = (reached(curves[name]) for name in STRATEGIES)
    link = f"over {'an emulated' if emulated else 'a'} {bits_per_second(RATE) / 1e6:.0f} Mbit/s link"
    if ours is None and stock is None:
        return f"Neither strategy reached test loss {TARGET:g} within {LIMIT:.0f} s {link}: nothing was gained."
    if ours is None:
        return f"Stock ddp reached test loss {TARGET:g} in {stock:.1f} s {link}, {OURS} not within {LIMIT:.0f} s."
    text = f"{OURS} reached test loss {TARGET:g} in {ours:.1f} s, stock ddp "
    if stock is None:
        last = curves[STOCK][-1]
        return text + f"was at {last['loss']:.2f} after {last['seconds']:.0f} s, {link}."
    if ours < stock:
        return text + f"in {stock:.1f} s: {stock / ours:.1f} times faster {link}."
    return text + f"in {stock:.1f} s: {ours / stock:.1f} times slower {link}."


def stop(number: int, frame: Any) -> None:
    """Unwind on SIGTERM, so that workers and namespaces are removed."""
    raise SystemExit(128 + number)


def main() -> None:
    """Train with both strategies, show their curves, and print the result."""
    if sys.argv[1:] and sys.argv[1].startswith("{"):  # started by `launch`
        train(json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log-dir", type=Path, default=Path("runs/demo"), help="folder for metrics")
    parser.add_argument("--emulate", action="store_true", help="emulate the link even if it could be shaped")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    reason = "requested by --emulate" if args.emulate else missing()
    show(f"1.8 million parameters, AdamW, {WORKERS} workers, {bits_per_second(RATE) / 1e6:.0f} Mbit/s between them.")
    if reason:
        show(
            f"The link is EMULATED ({reason}): with both strategies, a worker waits after each step for the\n"
            f"time that the bytes of this step would take on such a link."
        )
    view = View()
    for old in (file for name in STRATEGIES for file in (args.log_dir / name).glob("events.out.tfevents.*")):
        old.unlink()  # TensorBoard would join this run's curves with the previous run's
    try:
        with hosts(WORKERS, "loopback" if reason else RATE, calibrate=False) as where:
            for name in STRATEGIES:
                job = {"strategy": name, "emulated": bool(reason), "log_dir": str(args.log_dir.resolve())}
                if not sys.stderr.isatty():
                    show(f'strategy="{name}": starting the workers ...')
                try:
                    for point in launch("examples.demo", job, where, WORKERS, PATIENCE):
                        view.add(name, point)
                except RanksFailed as error:
                    raise SystemExit(f"strategy={name!r} failed: {error}") from None
                if name not in view.curves:
                    raise SystemExit(f"strategy={name!r} reported no result.")
    except KeyboardInterrupt:
        raise SystemExit("\nStopped; workers and links are removed.") from None
    print(verdict(view.curves, bool(reason)))
    print("Times include training only, not the start of the workers and the tests.")
    print(f"tensorboard --logdir {args.log_dir}")


if __name__ == "__main__":
    main()
