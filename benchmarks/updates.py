"""Which form of exchanging updates needs the fewest steps? Variants of the rule, each beside its controls.

The GPT, the data, their order and the schedule are those of `benchmarks.language`, with AdamW. Ranks are threads of
this process, so that a machine with few cores can train eight of them; what they send to each other is counted, not
timed. Dense AdamW and one worker alone are the controls, at the same rates.

    python -m benchmarks.updates            # train what `updates.csv` lacks of `TRIED`, in its order
    python -m benchmarks.updates --figure   # draw, and print steps and losses

A run of fewer steps than `STEPS` is the start of a training of `STEPS`: its schedule is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch.nn import functional
from torch.utils.data import default_collate

from benchmarks.harness import plots, results
from benchmarks.harness.results import Row
from benchmarks.language import BATCH_SIZE, LENGTH, TARGET, VAL_SEQUENCES, factor
from examples.data.text import StandardLibrary
from examples.models.gpt import GPT
from lightning_sparse import Method, Reducer, UpdateRule, simulate
from lightning_sparse.aggregators import Aggregator, TwoPass
from lightning_sparse.comm import Comm
from lightning_sparse.kernels.payout import Payout
from lightning_sparse.layout import Segment
from lightning_sparse.methods import method
from lightning_sparse.moments import SegmentMoments
from lightning_sparse.updates import Updates

STEPS, EVERY = 1000, 25
"""Steps of the schedule, and between two evaluations."""


COLORS = [*(f"C{index}" for index in range(10)), "navy", "gold", "deeppink", "teal", "lime", "sienna"]
"""Of the variants in the figure."""


class Variant(NamedTuple):
    """A way to make one training of what several ranks' gradients say.

    Attributes:
        exchanged: "update", "gradient" of all ranks, or "nothing": one rank alone, with its share of the data.
        method: name of the method.
        options: of the method, but for the density.
        rule: how updates are exchanged.
        aggregator: in place of the method's own.
        beta1: of AdamW.
        factor: what each rank's update is multiplied with beside `rule`: "root", √P; "payout too", as the rule's
            `rescale`, and what momentum would still deliver as well.
        payout: share of what momentum would still deliver that is paid out.
        weight_decay: of AdamW.
        decay_outside: whether weights decay after the exchange, on all ranks alike, and not in the update.
        late: whether weights change by the mean of the step before, so that the exchange could take place during the
            next step.
    """

    exchanged: str = "update"
    method: str = "topk"
    options: Mapping[str, Any] = MappingProxyType({})
    rule: UpdateRule = UpdateRule()
    aggregator: Aggregator[Any] | None = None
    beta1: float = 0.9
    factor: str = ""
    payout: float = 1.0
    weight_decay: float = 0.01
    decay_outside: bool = False
    late: bool = False


KEEP = UpdateRule(momentum="keep", rescale=False)
VARIANTS = {
    "dense": Variant("gradient", "dense"),
    "alone": Variant("nothing", "dense"),
    "topk of gradients": Variant("gradient"),
    "topk": Variant(),
    "neither": Variant(rule=KEEP),
    "beta1 0.5": Variant(rule=KEEP, beta1=0.5),
    "not rescaled": Variant(rule=UpdateRule(rescale=False)),
    "not paid out": Variant(rule=UpdateRule(momentum="keep")),
    "masked": Variant(rule=UpdateRule(momentum="mask")),
    "times root P": Variant(rule=UpdateRule(rescale=False), factor="root"),
    "payout rescaled too": Variant(factor="payout too"),
    "half paid out": Variant(payout=0.5),
    "two passes": Variant(aggregator=TwoPass()),
    "two passes, the second 3 times as dense": Variant(aggregator=TwoPass(second=3)),
    "gaussiank": Variant(method="gaussiank"),
    "gtopk": Variant(method="gtopk"),
    "oktopk": Variant(method="oktopk"),
    "scalecom": Variant(method="scalecom"),
    "randk": Variant(method="randk"),
    "dense, decay 0.1": Variant("gradient", "dense", weight_decay=0.1),
    "decay 0.1": Variant(weight_decay=0.1),
    "decay 0.1 outside": Variant(weight_decay=0.1, decay_outside=True),
    "late": Variant(late=True),
    "bf16 values": Variant(options={"value_format": "bfloat16"}),
    "8-bit values": Variant(options={"value_format": "int8"}),
    "4-bit values": Variant(options={"value_format": "int4"}),
    "chunks, 2-bit values": Variant(method="chunktopk", options={"value_format": "int2"}),
    "every 10": Variant(rule=UpdateRule(every=10)),
}


class Run(NamedTuple):
    """One training: a variant, the number of ranks, density, learning rate, seed and the number of steps."""

    variant: str
    workers: int
    density: float
    lr: float
    seed: int
    steps: int


TRIED = [
    Run("dense", 4, 1.0, 0.002, 0, 1000),
    Run("two passes", 4, 0.01, 0.002, 0, 1000),
    Run("topk", 4, 0.0075, 0.002, 0, 1000),
    Run("not rescaled", 4, 0.01, 0.002, 0, 300),
    Run("topk", 4, 0.01, 0.002, 0, 300),
    Run("payout rescaled too", 4, 0.01, 0.002, 0, 300),
    *(Run(*what, 0.002, seed, 1000) for seed in (1, 2) for what in (("dense", 4, 1.0), ("topk", 4, 0.0075))),
    *(Run(*what, 0.002, seed, 1000) for seed in (0, 1, 2) for what in (("topk", 2, 0.001), ("alone", 2, 1.0))),
    Run("dense", 8, 1.0, 0.002, 0, 1000),
    Run("two passes", 8, 0.01, 0.002, 0, 1000),
    Run("topk", 8, 0.0038, 0.002, 0, 1000),
    Run("two passes, the second 3 times as dense", 8, 0.0075, 0.002, 0, 1000),
    *(
        Run(*what, 0.002, seed, 1000)
        for seed in (1, 2)
        for what in (("dense", 8, 1.0), ("two passes, the second 3 times as dense", 8, 0.0075))
    ),
    Run("dense", 2, 1.0, 0.002, 0, 1000),
    Run("topk", 2, 0.01, 0.002, 0, 300),
    Run("bf16 values", 2, 0.0165, 0.002, 0, 300),
    Run("8-bit values", 2, 0.024, 0.002, 0, 300),
    Run("4-bit values", 2, 0.031, 0.002, 0, 300),
    Run("chunks, 2-bit values", 2, 0.0285, 0.002, 0, 300),
    *(Run(name, 2, 0.01, 0.002, 0, 300) for name in ("every 10", "late", "neither", "beta1 0.5")),
    *(Run(name, 2, 0.01, 0.002, 0, 300) for name in ("not paid out", "half paid out", "not rescaled", "times root P")),
    *(Run(name, 2, 0.01, 0.002, 0, 300) for name in ("masked", "gtopk", "oktopk", "scalecom", "randk", "gaussiank")),
    *(Run(name, 2, 0.01, 0.002, 0, 300) for name in ("two passes", "decay 0.1", "decay 0.1 outside")),
    Run("dense, decay 0.1", 2, 1.0, 0.002, 0, 300),
    *(Run("dense", 2, 1.0, 0.002, seed, 300) for seed in (1, 2)),
    *(Run(*what, 0.004, 0, 300) for what in (("dense", 4, 1.0), ("topk", 4, 0.0075))),
]
"""What to train, in this order."""


class Trial(Updates):
    """Updates by a rule, with the variations of `Variant`."""

    def __init__(self, *args: Any, variant: Variant) -> None:
        super().__init__(*args)
        self.variant = variant
        self.waiting = {name: torch.zeros_like(param) for name, param in self._params.items()}

    def _moments(self, segment: Segment, *args: Any) -> SegmentMoments:
        moments, size = super()._moments(segment, *args), self._reducer.comm.size
        made, factors = moments.payout, torch.ones(len(segment.names))

        def varied() -> Payout | None:
            payout = made()
            if payout is None:
                return None
            coefficients = payout.coefficients.clone()
            coefficients[0] *= self.variant.payout * factors
            return replace(payout, coefficients=coefficients)

        if self.variant.factor == "payout too":
            found = moments.rescaling([0] * len(segment.names), size)
            factors = factors if found is None else found[0]
        if self.variant.payout != 1 or self.variant.factor == "payout too":
            moments.payout = varied  # type: ignore[method-assign]
        return moments

    def exchange(self, optimizer: torch.optim.Optimizer) -> None:
        if self.variant.factor == "root":
            with torch.no_grad():
                for name, param in self._params.items():
                    param.lerp_(self._weights[name], 1 - self._reducer.comm.size**0.5)
        if not self.variant.late:
            super().exchange(optimizer)
            return
        before = {name: x.clone() for name, x in self._weights.items()}
        super().exchange(optimizer)
        for name, param in self._params.items():
            mean = before[name] - param.detach()
            param.data.copy_(before[name] - self.waiting[name])
            self.waiting[name] = mean


class Trainee:
    """A model in training on one rank of several.

    Args:
        run: what to train.
        text: the data, set up.
        model: of this rank.
        comm: to the other ranks.
    """

    def __init__(self, run: Run, text: StandardLibrary, model: GPT, comm: Comm) -> None:
        self.run, self.text, self.model, self.comm, self.variant = run, text, model, comm, VARIANTS[run.variant]
        variant, self.params = self.variant, dict(model.named_parameters())
        decay = 0.0 if variant.decay_outside else variant.weight_decay
        betas = (variant.beta1, 0.999)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=betas, weight_decay=decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: factor(step, STEPS))
        self.order = torch.randperm(len(text.train_set), generator=torch.Generator().manual_seed(run.seed))
        self.done = 0
        if variant.exchanged == "update":
            self.reducer = Reducer(make(run), comm, exchanged="update")
            self.updates = Trial(self.reducer, model, [self.optimizer], variant=variant)
        elif variant.exchanged == "gradient":
            self.reducer = Reducer(make(run), comm)

    def step(self) -> None:
        """Train on the next batch."""
        first = (self.done * self.run.workers + self.comm.rank) * BATCH_SIZE
        batch = [self.text.train_set[index] for index in self.order[first : first + BATCH_SIZE]]
        tokens, following = default_collate(batch)
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten()).backward()
        if self.variant.exchanged == "update":
            if self.done % self.variant.rule.every == 0:
                self.updates.begin(self.optimizer)
            self.optimizer.step()
            if (self.done + 1) % self.variant.rule.every == 0:
                self.updates.exchange(self.optimizer)
        else:
            if self.variant.exchanged == "gradient":
                self.reducer.reduce_({name: param.grad for name, param in self.params.items()})  # type: ignore[misc]
            self.optimizer.step()
        if self.variant.decay_outside:
            shrunk = 1 - self.optimizer.param_groups[0]["lr"] * self.variant.weight_decay
            torch._foreach_mul_([param.data for param in self.params.values()], shrunk)
        self.schedule.step()
        self.done += 1

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss over the held-out sequences, nats per byte, the same on all ranks."""
        held_out = self.text.val_set
        chosen = torch.linspace(0, len(held_out) - 1, VAL_SEQUENCES).long()[self.comm.rank :: self.comm.size]
        total = torch.zeros(1, dtype=torch.float64)
        for part in chosen.split(32):
            tokens, following = default_collate([held_out[index] for index in part])
            total += functional.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten(), reduction="sum")
        return self.comm.all_reduce(total).item() / (VAL_SEQUENCES * LENGTH)


def make(run: Run) -> Method:
    """Return the method of a run."""
    variant = VARIANTS[run.variant]
    rule = variant.rule if variant.exchanged == "update" else None
    made = method(variant.method, density=None if variant.method == "dense" else run.density, **variant.options)
    return replace(made, aggregator=variant.aggregator or made.aggregator, update_rule=rule)


def train(run: Run, text: StandardLibrary) -> list[Row]:
    """Train with ranks as threads; return the loss and the bytes that a rank has sent, every `EVERY` steps."""
    torch.manual_seed(run.seed)
    first = GPT(context=LENGTH)
    ranks = 1 if VARIANTS[run.variant].exchanged == "nothing" else run.workers
    models = [GPT(context=LENGTH) for _ in range(ranks)]
    for model in models:
        model.load_state_dict(first.state_dict())

    def rank(comm: Comm) -> list[Row]:
        trainee = Trainee(run, text, models[comm.rank], comm)
        points, sent = [{"step": 0, "val_loss": trainee.loss(), "sent_bytes": 0}], 0
        while trainee.done < run.steps:
            sent_before = comm.sent_bytes
            trainee.step()
            sent += comm.sent_bytes - sent_before
            if trainee.done % EVERY == 0:
                points.append({"step": trainee.done, "val_loss": trainee.loss(), "sent_bytes": sent})
        return points

    points = simulate(ranks, rank)[0]
    for model in models[1:]:
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            if not torch.equal(one, other):
                raise SystemExit(f"{run}: weights of two ranks differ.")
    return points


def missing_runs(table: pd.DataFrame) -> list[Run]:
    """Return the runs of `TRIED` that a table does not have."""
    found = set() if table.empty else set(table[list(Run._fields)].itertuples(index=False, name=None))
    return [run for run in TRIED if run not in found]


def steps_to(curve: pd.DataFrame, target: float = TARGET) -> float:
    """Return after how many steps a curve reaches a loss, by linear interpolation; NaN if it does not."""
    below = curve["val_loss"].to_numpy() <= target
    if not below.any():
        return math.nan
    at = int(below.argmax())
    (a, high), (b, low) = curve[["step", "val_loss"]].iloc[[at - 1, at]].to_numpy()
    return float(a + (b - a) * (high - target) / (high - low))


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return steps to the target, the last loss, and the share of dense fp32 all-reduce's bytes, of each run.

    Longer runs are listed beside shorter ones of as many ranks, too, as they were after as many steps.
    """
    rows = []
    dense = 2 * 4 * sum(param.numel() for param in GPT(context=LENGTH).parameters())
    for workers, steps in sorted(set(table[["workers", "steps"]].itertuples(index=False, name=None))):
        group = table.query("workers == @workers and steps >= @steps and step <= @steps")
        for key, curve in group.groupby(list(Run._fields), sort=False):
            run, last = Run(*key)._replace(steps=steps), curve.iloc[-1]
            whole = dense * (workers - 1) / workers * steps
            rows.append(
                run._asdict()
                | {"steps_to_target": steps_to(curve), "val_loss": last["val_loss"]}
                | {"percent": 100 * last["sent_bytes"] / whole}
            )
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw all losses against steps, minus those of dense training with as many ranks, in a panel for each number."""
    sizes = sorted(table.query("variant == 'dense'")["workers"].unique())
    figure, panels = plots.panels(1, len(sizes), (5 * len(sizes), 6.5), sharey=True)
    variants = [variant for variant in table["variant"].unique() if variant != "dense"]
    colors = {"dense": "black"} | {variant: COLORS[index % len(COLORS)] for index, variant in enumerate(variants)}
    for panel, size in zip(panels[0], sizes, strict=True):
        runs = table.query("workers == @size and step > 0")
        dense = runs.query("variant == 'dense' and lr == 0.002").groupby("step")["val_loss"].mean()
        for (variant, density, lr), curves in runs.groupby(["variant", "density", "lr"], sort=False):
            losses = curves.groupby("step")["val_loss"].mean()
            label = f"{variant}, rate {lr:g}" + (f", density {density:g}" if density < 1 else "")
            style = "-" if density in (0.01, 1.0) else "--"
            difference = losses - dense.reindex(losses.index)
            panel.plot(losses.index, difference, style, color=colors[variant], label=label)
        panel.set(title=f"{size} ranks", xlabel="steps", ylim=(-0.15, 0.25))
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))
    panels[0][0].set_ylabel("validation loss minus that of dense training, nats per byte")
    plots.write(figure, path)


def main() -> None:
    """Read the command line and run."""
    args = results.command_line(__doc__).parse_args()
    path = args.out / "updates.csv"
    if not args.figure:
        torch.set_num_threads(1)  # ranks run side by side
        text = StandardLibrary(LENGTH, BATCH_SIZE)
        text.setup()
        for run in missing_runs(results.load(path)):
            started = time.time()
            points = train(run, text)
            rows = [run._asdict() | point | results.origin() for point in points]
            results.save(path, rows, Run._fields, digits=7)
            print(f"{run}: {points[-1]['val_loss']:.4f}, {time.time() - started:.0f} s", flush=True)
    table = results.load(path)
    print(summary(table).to_string(index=False, float_format="{:.4g}".format))
    draw(table, args.out / "updates.png")


if __name__ == "__main__":
    main()
