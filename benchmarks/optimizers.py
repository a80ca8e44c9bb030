"""Compares exchanging gradients and exchanging updates for many optimizers, in the same training.

The GPT, the data, their order and the schedule are those of `benchmarks.updates`. Ranks are two threads; the method is
topk with density 0.01, and with its default options. A run is the start of a training of 1,000 steps. The learning rate
is the best one of dense training, among at least three. Gradients use half of this rate, which is better than the whole
rate with AdamW. Lion, which uses signs, is also tried with int4, which sends every element of the gradients.

    python -m benchmarks.optimizers                  # do the trainings of `TRIED` that `optimizers.csv` lacks; print
    python -m benchmarks.optimizers --only Ranger    # only some optimizers

Muon steps the matrices of the layers, and AdamW steps the other parameters. The optimizers in `OTHERS` are from the
package pytorch-optimizer. Lookahead wraps torch's AdamW.
"""

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.harness import results
from benchmarks.harness.results import Row
from benchmarks.harness.training import Data, Trainee, attach_thread, text, train_threads
from benchmarks.language import BATCH_SIZE, LENGTH, VAL_SEQUENCES
from benchmarks.updates import steps_to
from examples.models.gpt import GPT
from lightning_sparse import Comm, UpdateRule, method
from lightning_sparse.methods import resolve_updates
from lightning_sparse.options import ReducerOptions
from lightning_sparse.trained import WITH_UPDATES

RANKS, STEPS, SCHEDULED, EVERY = 2, 200, 1000, 25
DEFAULT = "updates by default"
METHODS = {"dense": method("dense"), "int4": method("int4")}
"""Methods by name, other than sparse "gradients" and sparse "updates"."""


class Lion(Optimizer):
    """Steps by the sign of a momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(moment.lerp(param.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                moment.lerp_(param.grad, 1 - beta2)


class Lamb(Optimizer):
    """Adam with steps in proportion to the weights' norm (You et al. 2019, arXiv 1904.00962). Not part of torch."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
                step = state["step"] = state.get("step", 0) + 1
                first = state["exp_avg"].lerp_(param.grad, 1 - beta1) / (1 - beta1**step)
                second = state["exp_avg_sq"].lerp_(param.grad.square(), 1 - beta2) / (1 - beta2**step)
                update = first.div_(second.sqrt_().add_(1e-6)).add_(param, alpha=group["weight_decay"])
                size, length = param.norm(), update.norm()
                trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
                param.sub_(update * trust, alpha=group["lr"])


class Together(Optimizer):
    """Combines several optimizers under one schedule."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})  # keeps the groups unchanged

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all optimizers."""
        for part in self.parts:
            part.step()


def optimizers(name: str, model: nn.Module, lr: float) -> list[Optimizer]:
    """Return the optimizers of a training by the name of the tested optimizer."""
    if name != "Muon":
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        if name == "Lookahead":
            inner = torch.optim.AdamW(model.parameters(), lr=lr)
            return [importlib.import_module("pytorch_optimizer").Lookahead(inner)]
        package = importlib.import_module("pytorch_optimizer") if name in OTHERS else torch.optim
        kind = {"Lamb": Lamb, "Lion": Lion}.get(name) or getattr(package, name)
        return [kind(model.parameters(), lr=lr, **options)]
    matrices, rest = list[Tensor](), list[Tensor]()
    for param_name, param in model.named_parameters():
        (matrices if param_name.startswith("layers.") and param.dim() == 2 else rest).append(param)
    return [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=lr)]


class Run(NamedTuple):
    """One training: optimizer, exchanged quantity, and learning rate."""

    optimizer: str
    exchanged: str
    lr: float


OTHERS = {
    "Ranger": [0.002, 0.004, 0.008],
    "SOAP": [0.001, 0.002, 0.004],
    "AdEMAMix": [0.0005, 0.001, 0.002],
    "ADOPT": [0.001, 0.002, 0.004],
    "Lookahead": [0.002, 0.004, 0.008],
    "Prodigy": [1.0],
    "DAdaptSGD": [1.0],
}
"""Learning rates of dense training. The last two optimizers find their own rate, and 1 is their recommended factor."""
RATES = {
    "AdamW": [0.001, 0.002, 0.004],
    "RMSprop": [0.00025, 0.0005, 0.001],
    "Adagrad": [0.01, 0.02, 0.04],
    "Adadelta": [0.25, 0.5, 1.0, 2.0],
    "Adafactor": [0.01, 0.02, 0.04, 0.08],
    "Lamb": [0.005, 0.01, 0.02],
    "Lion": [0.00025, 0.0005, 0.001],
    "SGD": [0.025, 0.05, 0.1, 0.2],
    "Muon": [0.001, 0.002, 0.004, 0.008, 0.016, 0.032],
}
"""Learning rates of dense training."""
BEST = {
    "AdamW": 0.002,
    "RMSprop": 0.0005,
    "Adagrad": 0.02,
    "Adadelta": 0.5,
    "Adafactor": 0.04,
    "Lamb": 0.01,
    "Lion": 0.0005,
    "SGD": 0.05,
    "Muon": 0.016,
}
"""The best rate of `RATES` for each optimizer."""
TRIED = [Run(name, "dense", lr) for name, rates in RATES.items() for lr in rates]
TRIED += [Run("AdamW", "gradients", BEST["AdamW"]), Run("Lion", "int4", BEST["Lion"])]
TRIED += [run for name, lr in BEST.items() for run in (Run(name, "gradients", lr / 2), Run(name, "updates", lr))]
TRIED += [Run(name, "dense", lr) for name, rates in OTHERS.items() for lr in rates]
TRIED += [Run(name, DEFAULT, BEST[name]) for name in BEST if name == "AdamW" or name in WITH_UPDATES]


def sparse_runs(table: pd.DataFrame) -> list[Run]:
    """Return the sparse trainings with optimizers of `OTHERS`, at the best rate of their dense trainings."""
    found = []
    for name, rates in OTHERS.items():
        dense = table[(table.optimizer == name) & (table.exchanged == "dense") & (table.step == STEPS)]
        if set(dense.lr) >= set(rates):
            best = float(dense.sort_values("val_loss").lr.iloc[0])
            found += [Run(name, DEFAULT, best)] if name in WITH_UPDATES else []
            found += [Run(name, "gradients", best / 2 if len(rates) > 1 else best), Run(name, "updates", best)]
    return found


def train(run: Run, data: Data) -> list[Row]:
    """Train with ranks as threads; return loss and bytes every `EVERY` steps."""
    made, options = METHODS.get(run.exchanged, method("topk", density=0.01)), ReducerOptions(density_warmup=())
    if run.exchanged == DEFAULT:
        made, options = resolve_updates("topk", None, ranks=RANKS)
    made = replace(made, update_rule=UpdateRule() if "updates" in run.exchanged else None)

    def trainee(model: nn.Module, comm: Comm) -> Trainee:
        parts = optimizers(run.optimizer, model, run.lr)
        wrapped = attach_thread(model, parts, made, comm, **vars(options))
        together = parts[0] if len(parts) == 1 else Together(parts)
        return Trainee(model, wrapped, together, data, comm, seed=0, batch_size=BATCH_SIZE, steps=SCHEDULED)

    return train_threads(lambda: GPT(context=LENGTH), trainee, RANKS, 0, STEPS, EVERY)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the final loss of each run, and the steps that dense training needs for this loss at its best rate."""
    rows = []
    for name, of_optimizer in table.groupby("optimizer", sort=False):
        curves = dict(iter(of_optimizer.groupby(["exchanged", "lr"], sort=False)))
        dense = min((curve for key, curve in curves.items() if key[0] == "dense"), key=lambda x: x.val_loss.iloc[-1])
        for (exchanged, lr), curve in curves.items():
            last = curve.val_loss.iloc[-1]
            steps = steps_to(dense, last) if math.isfinite(last) else 0.0
            rows.append(Run(name, exchanged, lr)._asdict() | {"val_loss": last, "dense_steps": steps})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    parser = results.command_line(__doc__, figure=False)
    parser.add_argument("--only", nargs="+", choices=[*RATES, *OTHERS], help="run only these optimizers. Default: all")
    args = parser.parse_args()
    path = args.out / "optimizers.csv"
    torch.set_num_threads(1)  # ranks run in parallel
    data = text(LENGTH, VAL_SEQUENCES)
    for tried in (lambda: TRIED, lambda: sparse_runs(results.load(path))):
        runs = [run for run in tried() if not args.only or run.optimizer in args.only]
        if runs:
            results.save_each(path, results.missing(results.load(path), runs), lambda run: train(run, data), digits=7)
    print(summary(results.load(path)).to_string(index=False, float_format="{:.4g}".format))
