"""Compares the default with `ddp` with other text, other seeds and clipping.

The default was chosen on the text, the model and the seeds of `benchmarks.language`, also by held-out losses. This
module keeps all of its settings and changes one thing at a time:

- clipped: AdamW with β₂ = 0.95, and gradients clipped to a norm of 1, as is usual for language models. `ddp` clips the
  mean. Under the default each rank clips its own gradient, at the norm √P, as the strategy does.
- other text: the C++ headers of PyTorch, and seeds that were not used before. There, density 0.005 is tried, too.

    python -m benchmarks.confirmation  # do the trainings of `TRIED` that `confirmation.csv` lacks

Each training has the GPT, the schedule and the processes of `benchmarks.language`.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import results
from benchmarks.harness.baselines import CONTESTANTS, Options
from benchmarks.harness.launch import check_weights, gather, run_ranks, write
from benchmarks.harness.results import Row
from benchmarks.harness.training import Trainee, text
from benchmarks.language import BATCH_SIZE, DEFAULT, LENGTH, THINNER, VAL_SEQUENCES
from examples.data.text import TextFolder
from examples.models.gpt import GPT
from lightning_sparse import ProcessGroupComm

EVERY = 100
"""Number of steps between evaluations."""
DENSER, DENSITY = "topk, density 0.005", 0.005
HEADERS = Path(torch.__file__).parent / "include" / "torch"


class Case(NamedTuple):
    """Settings in which a training may differ from `benchmarks.language`."""

    beta2: float = 0.999
    clip_norm: float = 0.0
    other_text: bool = False


CASES = {"clipped": Case(beta2=0.95, clip_norm=1.0), "other text": Case(other_text=True)}


class Run(NamedTuple):
    """One training: a key of `CASES`, the number of workers, a method, a rate, a seed, and the number of steps."""

    case: str
    workers: int
    method: str
    lr: float
    seed: int
    steps: int = 1000


TRIED = [
    Run(case, workers, name, lr, seed)
    for case, workers, rates, seeds in (
        ("clipped", 2, [0.004], [0, 1]),
        ("other text", 2, [0.004], [10, 11, 12, 13, 14]),
        ("clipped", 4, [0.004], [0, 1]),
        ("clipped", 8, [0.004], [0]),
    )
    for seed, lr, name in itertools.product(seeds, rates, ["ddp", DEFAULT])
]
TRIED += [
    Run("clipped", workers, name, lr, 0, 3000)
    for workers, lr in ((2, 0.004), (4, 0.004), (4, 0.008))
    for name in ("ddp", DEFAULT)
]
TRIED += [Run("other text", 2, DENSER, 0.004, seed) for seed in [10, 11, 12, 13, 14]]
"""The file also contains other trainings. In an earlier version, ranks clipped at the norm 1 and had the given β₂. With
"factor from moments", each rank estimated the share of signal in its gradients from its two moments. With "denser
comparisons", ranks compared gradients in each tenth step at 1,000 elements, and with "other samples" at other elements
than now, in fp16."""


def work(job: Row) -> None:
    """Train on this rank."""
    run = Run(*job["run"])
    case = CASES[run.case]
    data = text(LENGTH, VAL_SEQUENCES, TextFolder(str(HEADERS), "*.h", LENGTH) if case.other_text else None)
    torch.manual_seed(run.seed)
    model = GPT(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), run.lr, (0.9, case.beta2))
    contestant = CONTESTANTS[THINNER if run.method == DENSER else run.method]
    wrapped = contestant.wrap(model, Options(DENSITY), optimizer)
    reducer = wrapped.reducer
    largest = case.clip_norm * (1.0 if reducer is None else reducer.method.rule.clip_factor(run.workers))

    def clip(*_: Any) -> None:
        clip_grad_norm_(model.parameters(), largest)

    if case.clip_norm:
        optimizer.register_step_pre_hook(clip)
    schedule = {"seed": run.seed, "batch_size": BATCH_SIZE, "steps": run.steps}
    for point in Trainee(model, wrapped, optimizer, data, ProcessGroupComm(), **schedule).curve(run.steps, EVERY):
        write(job["out"], **point | {"sent_bytes": max(gather(point["sent_bytes"]))})
    check_weights(model)


def train(run: Run) -> list[Row]:
    """Train in processes; return rows of the CSV file."""
    points, _ = run_ranks("benchmarks.confirmation", {"run": run}, run.workers)
    return [CASES[run.case]._asdict() | point for point in points]


if __name__ == "__main__":
    args = results.command_line(__doc__, figure=False).parse_args()
    path = args.out / "confirmation.csv"
    results.save_each(path, results.missing(results.load(path), TRIED), train, digits=7)
