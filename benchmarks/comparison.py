"""Compares all rows of METHODS on the same tasks: loss against bytes sent, and against seconds over a slow link.

There are three tasks with two workers: ResNet-20 on scikit-learn's digits with SGD, and the byte-level GPT of
`benchmarks.language` with SGD and with AdamW. SGD has momentum 0.9, except with Signum, which has its own momentum. The
density is 0.01. The learning rate warms up linearly over a tenth of 300 steps, and then follows a cosine to zero.

Each method uses the learning rate with the lowest final loss for seed 0. The grid of rates is equal for all
methods of a task. Two more seeds follow; a rate is rejected if one of them diverges. The strategy's default decides
whether gradients or updates are exchanged. Two methods per task exchange the other quantity. Their names end in
"gradients" or "updates". Ranks are threads of this process, and their bytes are counted.

    python -m benchmarks.comparison                      # do missing trainings; --task NAME: one task
    sudo python -m benchmarks.comparison --seconds       # time steps over shaped links, all methods in turn
    python -m benchmarks.comparison --figure             # only draw the figure

Output: `comparison_TASK.csv` with a row per evaluation, `comparison_seconds.csv` and `comparison.png`. If the loss
exceeds ten times its initial value, or a gradient is not finite, training ends and the loss is infinite.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.ticker import StrMethodFormatter
from torch import nn

from benchmarks.harness import plots, results, training
from benchmarks.harness.baselines import ours
from benchmarks.harness.results import Row
from benchmarks.harness.training import Data, Trainee, attach_thread, text, train_threads
from benchmarks.language import LENGTH, OPTIMIZERS, RATES
from examples.data.digits import digits
from examples.models import ResNet20
from examples.models.gpt import GPT
from lightning_sparse import METHODS, Comm, Method, ProcessGroupComm, UpdateRule
from lightning_sparse import method as make_method
from lightning_sparse.memory import Momentum

WORKERS, STEPS, EVERY, DENSITY, SEEDS = 2, 300, 50, 0.01, (0, 1, 2)
LOCAL_STEPS = {"local_sgd": 50, "diloco": 50, "sparseloco": 25}
"""Steps between exchanges. All are divisors of `EVERY`, so that weights are equal when they are evaluated."""
NAMED = ["dense", "int8", "powersgd", "topk", "local_sgd", "sparseloco"]
TITLES = {"digits_sgd": "ResNet-20, digits, SGD", "gpt_sgd": "GPT, SGD", "gpt_adamw": "GPT, AdamW"}
TOP = {"digits_sgd": 2.0, "gpt_sgd": 1.1, "gpt_adamw": 1.2}
"""In the figure: methods with a name and a colour, and the highest loss shown, as a multiple of their lowest loss."""


class Run(NamedTuple):
    """One training of a task."""

    contestant: str
    lr: float
    seed: int


def images() -> Data:
    """Return handwritten digits."""
    train, test = digits()
    return Data(lambda numbers: (train.images[numbers], train.labels[numbers]), len(train.labels), test)


class Task(NamedTuple):
    """A training task: data, model, optimizer, and the learning rates that each method tries."""

    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    batch_size: int
    optimizer: str  # with "adamw", sparse methods exchange updates
    rates: tuple[float, ...]


SGD_RATES = (0.001, 0.01, 0.03, 0.1)
ADAMW_RATES = (0.0005, 0.001, 0.002, 0.005)
TASKS = {
    "digits_sgd": Task(images, lambda: ResNet20(1), 16, "sgd", SGD_RATES),
    "gpt_sgd": Task(lambda: text(LENGTH, 128), lambda: GPT(LENGTH), 4, "sgd", SGD_RATES),
    "gpt_adamw": Task(lambda: text(LENGTH, 128), lambda: GPT(LENGTH), 4, "adamw", ADAMW_RATES),
}


def contestants(task: str) -> list[str]:
    """Return the rows of METHODS, and two methods that exchange the quantity that is not the default."""
    other = "gradients" if TASKS[task].optimizer == "adamw" else "updates"
    return [*METHODS, f"topk {other}", f"gaussiank {other}"]


def made(task: str, contestant: str, most: int = STEPS) -> Method:
    """Return a method by name, with at most `most` local steps. Without an `update_rule` it exchanges gradients."""
    name, _, what = contestant.partition(" ")
    chosen = make_method(name, density=DENSITY if "density" in METHODS[name].options and name != "sparseloco" else None)
    rule = chosen.update_rule
    if rule is not None:
        return replace(chosen, update_rule=replace(rule, local_steps=min(LOCAL_STEPS.get(name, 1), most)))
    updates = what == "updates" or (not what and TASKS[task].optimizer == "adamw" and chosen.is_sparse)
    return replace(chosen, update_rule=UpdateRule() if updates else None)


def optimizer_for(task: str, method: Method, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return a method's optimizer. It has no momentum if the method has its own, as Signum does."""
    optimizer = OPTIMIZERS[TASKS[task].optimizer](model.parameters(), lr=lr)
    if isinstance(method.memory, Momentum) and "momentum" in optimizer.defaults:
        optimizer.param_groups[0]["momentum"] = 0.0
    return optimizer


def train(task: str, run: Run, data: Data, steps: int = STEPS) -> list[Row]:
    """Train with ranks as threads; return loss, accuracy and a rank's sent bytes, every `EVERY` steps."""
    method, batch_size = made(task, run.contestant), TASKS[task].batch_size

    def trainee(model: nn.Module, comm: Comm) -> Trainee:
        optimizer = optimizer_for(task, method, model, run.lr)
        wrapped = attach_thread(model, [optimizer], method, comm, seed=run.seed)
        found = Trainee(model, wrapped, optimizer, data, comm, seed=run.seed, batch_size=batch_size, steps=STEPS)
        # Only rank 0 evaluates, because statistics of batch normalisation differ between ranks.
        found.evaluated = slice(None) if comm.rank == 0 else slice(0)
        return found

    return train_threads(TASKS[task].model, trainee, WORKERS, run.seed, steps, EVERY)


def missing_runs(task: str, table: pd.DataFrame) -> list[Run]:
    """Return the trainings that a table lacks: first the grid with seed 0, then the best rates with the other seeds."""
    if lacking := results.missing(table, [Run(name, lr, 0) for name in contestants(task) for lr in TASKS[task].rates]):
        return lacking
    return results.missing(table, [Run(*best, seed) for seed in SEEDS[1:] for best in best_rates(table).items()])


def best_rates(table: pd.DataFrame) -> dict[str, float]:
    """Return each method's rate with the lowest final loss for seed 0, without rates at which a seed diverges."""
    ends = table.groupby([*Run._fields], sort=False)["val_loss"].last()
    diverges = ends.groupby(level=["contestant", "lr"], sort=False).max() == math.inf
    first = ends.xs(SEEDS[0], level="seed").mask(diverges, math.inf)
    return {name: float(losses.idxmin()[1]) for name, losses in first.groupby(level=0, sort=False)}


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """Return, for each method's best rate: mean and range of the final loss, accuracy, bytes, rate, and seeds."""
    best = best_rates(table)
    chosen = table[table["lr"] == table["contestant"].map(best)]
    ends = chosen.groupby(["contestant", "seed"], sort=False).last().reset_index()
    groups = ends.groupby("contestant", sort=False)
    found = groups["val_loss"].agg(loss="mean", low="min", high="max").join(groups[["accuracy", "sent_bytes"]].mean())
    return found.assign(lr=best, seeds=groups.size()).reset_index()


def work(job: Row) -> None:
    """Time steps of each method in turn. This runs in each process of the benchmark."""
    task, data, comm = job["task"], TASKS[job["task"]].data(), ProcessGroupComm()
    timed = []
    for name in contestants(task):
        torch.manual_seed(0)
        model, method = TASKS[task].model(), made(task, name)
        optimizer = optimizer_for(task, method, model, 1e-3)
        wrapped = ours(made(task, name, training.TIMED_STEPS), model, optimizer)
        trainee = Trainee(model, wrapped, optimizer, data, comm, seed=0, batch_size=TASKS[task].batch_size, steps=STEPS)
        timed.append(({"contestant": name}, method.local_steps, trainee))
    training.take_turns(timed, job["out"])


def draw(folder: Path) -> Any:
    """Draw the final loss of each method against the bytes that a worker has sent, some with their names."""
    present = [task for task in TASKS if (folder / f"comparison_{task}.csv").exists()]
    figure, panels = plots.panels(len(present), 1, 0.8 + 2.5 * len(present))
    said = []
    for (panel,), task in zip(panels, present, strict=True):
        found = finals(results.load(folder / f"comparison_{task}.csv")).query("loss < inf").set_index("contestant")
        shown = found[found.index.isin(NAMED)]
        top = TOP[task] * shown["loss"].min()
        others = found[~found.index.isin(NAMED) & (found["loss"] < top)]
        panel.plot(others["sent_bytes"] / 1e6, others["loss"], "o", color="0.8", markersize=4)
        labels = []
        for row in shown.itertuples():
            at, color = row.sent_bytes / 1e6, plots.color(row.Index)
            error = [[row.loss - row.low], [row.high - row.loss]]
            panel.errorbar(at, row.loss, error, fmt="o", markersize=6, color=color, linewidth=1.4)
            labels.append((at, row.loss, plots.shown(row.Index), color))
        lost = len(found) - len(shown) - len(others)
        above = f"; {lost} more above this panel" if lost else ""
        panel.set(
            xscale="log", ylabel="held-out loss", ylim=(min(shown["low"].min(), others["loss"].min()) / 1.02, top)
        )
        panel.set_title(f"{TITLES[task]} (grey dots: {len(others)} other methods, see the table{above})")
        panel.axhline(found["loss"]["dense"], color="black", linewidth=0.6)
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        plots.ends(panel, labels, reach=6)
        gap = 100 * (found["loss"]["topk"] / found["loss"]["dense"] - 1)
        said.append(f"{abs(gap):.1f} % {'above' if gap > 0 else 'below'} ({TITLES[task]})")
    panels[-1][0].set_xlabel("MB that a worker sends in 300 steps (log scale)")
    share = 100 * found["sent_bytes"]["topk"] / found["sent_bytes"]["dense"]
    finding = f"With {share:.1f} % of the bytes topk ends {', '.join(said)} the loss of dense training"
    task = (
        "Two workers, density 0.01, 300 steps, each at its best learning rate of a grid; dots: mean, lines: range "
        "of three seeds. With AdamW sparse methods exchange updates. Loss axes do not start at zero."
    )
    plots.headline(figure, finding, task)
    return figure


FIGURES = [plots.Figure("comparison", draw, tuple(f"comparison_{task}" for task in TASKS))]

if __name__ == "__main__":
    parser = results.command_line(__doc__)
    parser.add_argument("--task", choices=TASKS, help="run only this task")
    parser.add_argument("--seconds", action="store_true", help="time steps over shaped links; needs root")
    args = parser.parse_args()
    tasks = [args.task] if args.task else list(TASKS)
    if args.seconds:
        for task, rate in itertools.product(tasks, RATES):
            path, case = args.out / "comparison_seconds.csv", {"task": task, "rate": rate}
            training.save_times(path, "benchmarks.comparison", case, WORKERS, task=task)
    elif not args.figure:
        torch.set_num_threads(1)  # ranks run in parallel
        for task in tasks:
            data, path = TASKS[task].data(), args.out / f"comparison_{task}.csv"
            while runs := missing_runs(task, results.load(path)):
                results.save_each(path, runs, lambda run, task=task, data=data: train(task, run, data), digits=6)
    for figure in FIGURES:
        figure.write(args.out)
