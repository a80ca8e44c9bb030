"""Compares ways to go from exchanged updates to dense averages of gradients, as `auto_ddp` does when it switches.

The GPT, the data and the schedule come from `benchmarks.language`, with AdamW and two ranks as threads. Dense
averages come first, for `first` steps or not at all. Then ranks exchange updates by default options until step `last`,
and dense averages follow. The optimizers' states are averaged. The ways differ in the residuals at that time.

    python -m benchmarks.switches
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.harness import results
from benchmarks.harness.baselines import Wrapped
from benchmarks.harness.results import Row
from benchmarks.harness.training import Data, Trainee, attach_thread, text, train_threads
from benchmarks.language import BATCH_SIZE, LENGTH, VAL_SEQUENCES
from examples.models.gpt import GPT
from lightning_sparse import Comm, UpdateRule
from lightning_sparse.methods import resolve_updates

WAYS = {"applied at once": 1, "applied in 100 steps": 100, "dropped": 0}
"""Number of steps in which the mean of the residuals is applied."""
SPANS = {(62, 72): 200, (0, 200): 300}
"""Step at which the exchange of updates begins, and that at which it ends; by these, the last step of the training."""
STEPS, EVERY, RANKS, RATE = 1000, 25, 2, 0.002


class Run(NamedTuple):
    """One training: a key of `WAYS`, the first and last step of the exchange of updates, and a seed."""

    way: str
    first: int
    last: int
    seed: int


class Switching(Trainee):
    """Exchanges updates from one step to another, and averages gradients before and after."""

    run: Run

    def step(self) -> None:
        if self.done in (0, self.run.last):
            if self.done:
                self._leave()
            self._averages = self.optimizer.register_step_pre_hook(self._average)
        if self.done == self.run.first:
            self._averages.remove()
            method, options = resolve_updates("topk", None, ranks=self.comm.size)
            method = dataclasses.replace(method, update_rule=UpdateRule())
            # A try of auto_ddp has no density warm-up.
            warmup = {key: getattr(options, key) for key in ("density_warmup", "density_warmup_steps")}
            self.wrapped = attach_thread(
                self.model, [self.optimizer], method, self.comm, **(warmup if self.run.first == 0 else {})
            )
        if self.done >= self.run.last:
            self._apply_part()
        super().step()

    def _average(self, *_: Any) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            self.comm.all_reduce(param.grad).div_(self.comm.size)

    @torch.no_grad()
    def _leave(self) -> None:
        assert self.wrapped.reducer is not None
        self.optimizer._optimizer_step_pre_hooks.clear()  # type: ignore[attr-defined]
        self.optimizer._optimizer_step_post_hooks.clear()  # type: ignore[attr-defined]
        residuals = self.wrapped.reducer.state_dict()["elements"]["residual"]
        mean = {name: self.comm.all_reduce(x).div_(self.comm.size) for name, x in residuals.items()}
        self._mean = [mean[name] for name, _ in self.model.named_parameters()]
        for state in self.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                self.comm.all_reduce(state[key]).div_(self.comm.size)

    @torch.no_grad()
    def _apply_part(self) -> None:
        parts = WAYS[self.run.way]
        if self.done - self.run.last < parts:
            torch._foreach_sub_(list(self.model.parameters()), [x / parts for x in self._mean])


def train(run: Run, data: Data) -> list[Row]:
    """Train once; return rows of the CSV file."""

    def trainee(model: nn.Module, comm: Comm) -> Trainee:
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
        options = {"seed": run.seed, "batch_size": BATCH_SIZE, "steps": STEPS}
        made = Switching(model, Wrapped(model), optimizer, data, comm, **options)
        made.run = run
        return made

    build = functools.partial(GPT, context=LENGTH)
    points = train_threads(build, trainee, RANKS, run.seed, SPANS[run.first, run.last], EVERY)
    return [{"step": each["step"], "val_loss": each["val_loss"], "ranks": RANKS, "lr": RATE} for each in points]


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    path, held = args.out / "switches.csv", text(LENGTH, VAL_SEQUENCES)
    torch.set_num_threads(1)  # ranks run in parallel
    runs = [Run(way, *span, seed) for seed in args.seeds for span in SPANS for way in WAYS]
    results.save_each(path, results.missing(results.load(path), runs), lambda run: train(run, held), digits=7)
