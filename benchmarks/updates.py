"""Compares variants of the rule for exchanging updates, and their controls, by the number of steps to a loss.

The GPT, the data, their order and the schedule are those of `benchmarks.language`, with AdamW. Ranks are threads of
this process, so that a machine with few cores can train eight of them. Their bytes are counted, but their communication
is not timed. The controls are dense AdamW and one worker alone, at the same learning rates.

    python -m benchmarks.updates            # do the trainings of `TRIED` that `updates.csv` lacks, in order
    python -m benchmarks.updates --figure   # draw the figure; print steps and losses

A run of fewer steps than `STEPS` is the start of a training of `STEPS` steps, with the same schedule.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.harness import plots, results
from benchmarks.harness.baselines import Wrapped
from benchmarks.harness.results import Row
from benchmarks.harness.training import Data, Trainee, attach_thread, text, train_threads
from benchmarks.language import BATCH_SIZE, LENGTH, TARGET, VAL_SEQUENCES
from examples.models.gpt import GPT
from lightning_sparse import METHODS, Comm, UpdateRule, method
from lightning_sparse.aggregators import Aggregator, Mean, TwoPass
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import Entries, Update, add_
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.payout import Payout
from lightning_sparse.momentum import SegmentMoments
from lightning_sparse.updates.exchange import DeltaExchange
from lightning_sparse.updates.segment import UpdateSegment

STEPS, EVERY = 1000, 25  # steps of the schedule, and steps between evaluations
BEGUN = 100  # steps of the shortest runs, in which most variants reach the target

PARTS = {
    "topk": "TopUp",
    "times root P": "rescaled by √P",
    "not rescaled": "not rescaled",
    "not paid out": "momentum not paid out",
    "masked": "momentum only cleared",
    "neither": "neither paid out nor rescaled",
    "alone": "one worker alone",
}
"""Lines of the figure: the rule, variants without parts of it, and a control."""


@dataclass(frozen=True)
class Guess(Mean):
    """A mean that guesses missing entries: if a rank did not send an entry, it counts with a share of the others' mean.

    The rank's residual keeps the difference, so nothing is lost. Each rank sends its share with its entries. The share
    is the least-squares fit of its residual in the last exchanges.
    """

    decay: float = 0.9  # factor on both sums of the fit at each exchange

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        payload, applied = exchange.compress(u, compressor)
        products, squares = ctx.state.setdefault("guess", torch.zeros(2, dtype=torch.float64)).tolist()
        share = min(max(products / squares, 0.0), 1.0) if squares > 0 else 0.0
        *rows, shares = exchange.all_gather((*payload, torch.tensor([share])))
        total, senders, sent = torch.zeros(3, len(u))  # sent: the shares of the senders, added up
        for rank, its in enumerate(shares.view(-1)):
            entries = compressor.decode(tuple(part[rank] for part in rows), ctx)
            assert isinstance(entries, Entries)
            add_(total, entries)
            senders[entries.indices] += 1
            sent[entries.indices] += its
        mean = total / senders.clamp(min=1)
        assert isinstance(applied, Entries)
        senders[applied.indices] = 0
        foreign = senders.nonzero().squeeze(1)
        residual, guess = ctx.state["residual"], mean[foreign]
        fit = [float((residual[foreign] * guess).sum()), float((guess * guess).sum())]
        ctx.state["guess"].mul_(self.decay).add_(torch.tensor(fit, dtype=torch.float64))
        residual[foreign] -= shares[exchange.rank] * guess
        return total / exchange.size + mean * (shares.sum() - sent) / exchange.size, applied


class Variant(NamedTuple):
    """A variant of data-parallel training."""

    method: str = "topk"
    rule: UpdateRule | None = UpdateRule()  # rule for exchanging updates; None exchanges gradients
    alone: bool = False  # only one rank trains, with its share of the data
    value_format: str = ""
    aggregator: Aggregator[Any] | None = None  # replaces the method's own
    beta1: float = 0.9
    root: bool = False  # multiply each rank's update by √P
    payout: float | None = 1.0  # share of the unspent momentum in the payout; None: rescaled like the update
    cleared: bool = True  # clear the momentum of sent entries
    pays_always: bool = False  # use momentum payout at any density, and with any number of local steps
    weight_decay: float = 0.01
    decay_outside: bool = False  # apply weight decay after the exchange, equally on all ranks, not in the update
    late: bool = False  # apply the mean of the previous step, as if the exchange overlapped with the next step


DENSE, KEEP = Variant("dense", rule=None), UpdateRule(momentum="keep", rescale=False)
DENSER = "two passes, the second 3 times as dense"
VARIANTS = {
    "dense": DENSE,
    "alone": DENSE._replace(alone=True),
    "dense, decay 0.1": DENSE._replace(weight_decay=0.1),
    "topk": Variant(),
    "neither": Variant(rule=KEEP),
    "beta1 0.5": Variant(rule=KEEP, beta1=0.5),
    "not rescaled": Variant(rule=UpdateRule(rescale=False)),
    "not paid out": Variant(rule=UpdateRule(momentum="keep")),
    "masked": Variant(rule=UpdateRule(momentum="mask")),
    "times root P": Variant(rule=UpdateRule(rescale=False), root=True),
    "payout rescaled too": Variant(payout=None),
    "half paid out": Variant(payout=0.5),
    "guessed": Variant(aggregator=Guess()),
    "two passes": Variant(aggregator=TwoPass()),
    DENSER: Variant(aggregator=TwoPass(second=3)),
    **{name: Variant(name) for name in ("gaussiank", "gtopk", "oktopk", "scalecom", "randk")},
    "decay 0.1": Variant(weight_decay=0.1),
    "decay 0.1 outside": Variant(weight_decay=0.1, decay_outside=True),
    "late": Variant(late=True),
    "delayed": Variant(rule=UpdateRule(overlap="next_step")),
    "every 10, delayed": Variant(rule=UpdateRule(overlap="next_step", local_steps=10)),
    "bf16 values": Variant(value_format="bfloat16"),
    "8-bit values": Variant(value_format="int8"),
    "4-bit values": Variant(value_format="int4"),
    "2-bit values": Variant(value_format="int2"),
    "chunks, 2-bit values": Variant("chunktopk", value_format="int2"),
    "always paid out": Variant(pays_always=True),
    **{f"every {H}, paid out": Variant(rule=UpdateRule(local_steps=H), pays_always=True) for H in (2, 5, 10)},
    **{f"every {H}, not paid out": Variant(rule=UpdateRule(local_steps=H, momentum="keep")) for H in (2, 5, 10)},
    "int8, every 20": Variant("int8", rule=KEEP.changed(20, "none")),  # quantized local SGD with the same bytes as topk
}


class Run(NamedTuple):
    """One training: a variant, the number of ranks, density, learning rate, seed and the number of steps."""

    variant: str
    workers: int
    density: float
    lr: float
    seed: int
    steps: int


SHORT = ["topk", "every 10, paid out", "late", "neither", "beta1 0.5", "not paid out", "half paid out", "not rescaled"]
SHORT += ["times root P", "masked", "two passes", "gtopk", "oktopk", "scalecom", "gaussiank", "randk"]
DECAY = ["decay 0.1", "decay 0.1 outside"]
ROUNDED = [(0.0165, ["bf16 values"]), (0.024, ["8-bit values"]), (0.031, ["4-bit values"]), (0.045, ["2-bit values"])]
ROUNDED += [(0.0285, ["chunks, 2-bit values"])]  # about the same number of bytes
TRIED = [
    Run(variant, workers, density, lr, seed, steps)
    for workers, steps, lr, seeds, density, variants in (
        (2, 1000, 0.002, [0], 1.0, ["dense"]),
        (2, 1000, 0.002, [0, 1, 2], 0.001, ["topk"]),
        (2, 300, 0.002, [0, 1, 2], 0.001, ["guessed", "not rescaled"]),
        (2, 1000, 0.002, [0], 0.003, ["topk"]),
        (2, 1000, 0.002, [0], 0.0003, ["topk"]),
        (2, 300, 0.002, [0], 0.01, ["guessed"]),
        (2, 1000, 0.002, [0, 1, 2], 1.0, ["alone"]),
        (2, 1000, 0.002, [0, 1, 2], 0.01, DECAY),
        (2, 1000, 0.002, [0, 1, 2], 1.0, ["dense, decay 0.1"]),
        (2, 300, 0.002, [0], 0.01, SHORT),
        *((2, 300, 0.002, [0], *values) for values in ROUNDED),
        (2, 300, 0.002, [0], 1.0, ["int8, every 20"]),
        (2, 300, 0.002, [1, 2], 1.0, ["dense", "int8, every 20"]),
        (2, 300, 0.002, [1, 2], 0.01, SHORT[:11]),
        *((4, 1000, 0.002, [0, 1, 2], *variant) for variant in ((1.0, ["dense"]), (0.0075, ["topk"]))),
        (4, 1000, 0.002, [0], 0.01, ["two passes"]),
        (4, 300, 0.002, [0], 0.01, ["not rescaled", "topk", "payout rescaled too"]),
        *((4, 300, 0.004, [0], *variant) for variant in ((1.0, ["dense"]), (0.0075, ["topk"]))),
        *((8, 1000, 0.002, [0, 1, 2], *variant) for variant in ((1.0, ["dense"]), (0.0075, [DENSER]))),
        (8, 1000, 0.002, [0], 0.01, ["two passes"]),
        (8, 1000, 0.002, [0], 0.0038, ["topk"]),
        (8, 300, 0.002, [0], 0.0038, ["guessed"]),
        (8, 300, 0.002, [0], 0.01, ["topk", "not paid out", "not rescaled", "times root P", "masked"]),
        (8, BEGUN, 0.002, [1, 2], 0.01, ["topk", "not paid out", "not rescaled", "times root P", "masked"]),
        (8, BEGUN, 0.002, [0, 1, 2], 0.01, ["beta1 0.5", *DECAY]),
        (4, BEGUN, 0.002, [1, 2], 0.01, ["topk", "not rescaled"]),
        (4, BEGUN, 0.002, [0, 1, 2], 0.01, ["not paid out", "times root P", "masked", "beta1 0.5", *DECAY]),
        *((2, 300, 0.002, [1, 2], *values) for values in ROUNDED),
        (2, 300, 0.002, [1, 2], 0.01, SHORT[11:]),
        (2, 1000, 0.002, [1, 2], 0.003, ["topk"]),
        (2, 1000, 0.002, [1, 2], 0.0003, ["topk"]),
        *((ranks, BEGUN, 0.002, [0, 1, 2], *values) for ranks in (4, 8) for values in ROUNDED),
        *((ranks, BEGUN, 0.002, [0, 1, 2], 0.01, ["every 10, paid out", *SHORT[11:]]) for ranks in (4, 8)),
        *((ranks, BEGUN, 0.002, [0, 1, 2], density, ["topk"]) for ranks in (4, 8) for density in (0.001, 0.003)),
        *((ranks, BEGUN, 0.002, [1, 2], 0.01, ["two passes"]) for ranks in (4, 8)),
        (8, BEGUN, 0.002, [1, 2], 0.0038, ["topk", "guessed"]),
        *((ranks, BEGUN, 0.002, [0, 1, 2], 1.0, ["int8, every 20"]) for ranks in (4, 8)),
        *((ranks, BEGUN, 0.002, [0, 1, 2], 0.01, ["late", "neither", "half paid out"]) for ranks in (4, 8)),
        *((16, 300, 0.002, [0, 1, 2], *variant) for variant in ((1.0, ["dense"]), (0.0075, [DENSER]))),
        (16, 300, 0.002, [0], 0.0019, ["topk"]),
        *((2, 300, 0.002, [0, 1, 2], 0.05, [f"every 5, {paid}"]) for paid in ("paid out", "not paid out")),
        *((2, 300, 0.002, [0], 0.01, [f"every {H}, {paid}"]) for H in (2, 5) for paid in ("paid out", "not paid out")),
        *((2, 300, 0.002, [0], 0.03, [f"every 10, {paid}"]) for paid in ("paid out", "not paid out")),
        (2, 300, 0.002, [0, 1, 2], 0.01, ["every 10, not paid out"]),
        (2, 300, 0.002, [0], 0.05, ["topk", "not paid out"]),
        (2, 300, 0.002, [0], 0.1, ["topk", "always paid out"]),
        (2, 300, 0.002, [0], 0.3, ["topk"]),
        (2, 300, 0.002, [0, 1, 2], 0.01, ["delayed"]),
        (2, 300, 0.002, [0], 0.01, ["every 10, delayed"]),
        *((ranks, BEGUN, 0.002, [0, 1, 2], 0.01, ["delayed"]) for ranks in (4, 8)),
    )
    for seed in seeds
    for variant in variants
]
"""The trainings to do, in this order."""


class TrialSegment(UpdateSegment):
    """A segment whose payout and rescaling are modified by a `Variant`."""

    variant: Variant
    factors: list[float]
    """Mean factor of each rescaling, on rank 0."""

    def _moments(self, groups: Mapping[int, Any]) -> SegmentMoments:
        moments, share = super()._moments(groups), self.variant.payout
        rescaling, made = moments.rescaling, moments.payout

        def varied(*args: Any) -> Payout | None:
            payout = made(*args)
            if payout is None or share is None:  # rescaled as the update is
                return payout and replace(payout, factors=None)
            return replace(payout, coefficients=payout.coefficients * share)

        def recorded(excess: Tensor) -> Any:
            found = rescaling(excess)
            if found and self._reducer.comm.rank == 0:
                self.factors.append(float(found[0].mean()))
            return found

        if not self.variant.cleared:
            moments.clear_ = lambda applied: None  # type: ignore[method-assign]
        moments.payout, moments.rescaling = varied, recorded  # type: ignore[method-assign]
        return moments

    @property
    def _clears(self) -> bool:
        return self.variant.pays_always or super()._clears


class Trial(DeltaExchange):
    """Updates by a rule, varied as `Variant` says; rank 0 adds the mean factor of each rescaling to `factors`."""

    def __init__(self, *args: Any, variant: Variant, factors: list[float]) -> None:
        self.variant = variant
        self.segment_kind = type("Segment", (TrialSegment,), {"variant": variant, "factors": factors})
        super().__init__(*args)
        self.waiting = {name: torch.zeros_like(param) for name, param in self.parameters.items()}

    def exchange(self, optimizer: torch.optim.Optimizer, *, stepped: bool | None = True, write: bool = True) -> None:
        before = {name: w.clone() for each in self.segments for name, w in each.weights.items()}
        if self.variant.root:
            with torch.no_grad():
                for name, param in self.parameters.items():
                    param.lerp_(before[name], 1 - self._reducer.comm.size**0.5)
        super().exchange(optimizer, stepped=stepped, write=write)
        if self.variant.late:
            for name, param in self.parameters.items():
                mean = before[name] - param.detach()
                param.data.copy_(before[name] - self.waiting[name])
                self.waiting[name] = mean


def train(run: Run, data: Data) -> list[Row]:
    """Train with ranks as threads; return a row every `EVERY` steps.

    A row has the loss, a rank's sent bytes, and the mean factor on the updates since the previous row.
    """
    variant, factors = VARIANTS[run.variant], list[float]()
    options: dict[str, Any] = {"value_format": variant.value_format} if variant.value_format else {}
    if "density" in METHODS[variant.method].options:
        options["density"] = run.density
    made = method(variant.method, **options)
    made = replace(made, aggregator=variant.aggregator or made.aggregator, update_rule=variant.rule)

    trial = functools.partial(Trial, variant=variant, factors=factors)

    def trainee(model: nn.Module, comm: Comm) -> Trainee:
        decay = 0.0 if variant.decay_outside else variant.weight_decay
        optimizer = torch.optim.AdamW(model.parameters(), run.lr, (variant.beta1, 0.999), weight_decay=decay)
        wrapped = Wrapped(model)
        if not variant.alone:
            wrapped = attach_thread(model, [optimizer], made, comm, updates=trial)

        def decay_all(*_: Any) -> None:
            shrunk = 1 - optimizer.param_groups[0]["lr"] * variant.weight_decay
            torch._foreach_mul_([param.data for param in model.parameters()], shrunk)

        if variant.decay_outside:
            optimizer.register_step_post_hook(decay_all)
        found = Trainee(model, wrapped, optimizer, data, comm, seed=run.seed, batch_size=BATCH_SIZE, steps=STEPS)
        found.ranks = run.workers  # also if one rank trains alone
        return found

    ranks = 1 if variant.alone else run.workers
    rows = train_threads(lambda: GPT(context=LENGTH), trainee, ranks, run.seed, run.steps, EVERY)
    for row in rows[1:] if factors else []:
        row["mean_factor"] = sum(factors[row["step"] - EVERY : row["step"]]) / EVERY
    return rows


def steps_to(curve: pd.DataFrame, target: float = TARGET) -> float:
    """Return the number of steps at which a curve reaches a loss, by linear interpolation; NaN if it does not."""
    below = curve["val_loss"].to_numpy() <= target
    if not below.any():
        return math.nan
    at = int(below.argmax())
    (a, high), (b, low) = curve[["step", "val_loss"]].iloc[[at - 1, at]].to_numpy()
    return float(a + (b - a) * (high - target) / (high - low))


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return, for each run: steps to the target, final loss, and bytes in per cent of a dense fp32 all-reduce.

    A longer run is also listed with shorter runs of the same number of ranks, with its values after their steps.
    """
    rows = []
    dense = 2 * 4 * sum(param.numel() for param in GPT(context=LENGTH).parameters())
    for workers, steps in sorted(set(table[["workers", "steps"]].itertuples(index=False, name=None))):
        group = table.query("workers == @workers and steps >= @steps and step <= @steps")
        for key, curve in group.groupby(list(Run._fields), sort=False):
            run, last = Run(*key)._replace(steps=steps), curve.iloc[-1]
            percent = 100 * last["sent_bytes"] / (dense * (workers - 1) / workers * steps)
            found = {"steps_to_target": steps_to(curve), "val_loss": last["val_loss"], "percent": percent}
            rows.append(run._asdict() | found)
    return pd.DataFrame(rows)


def above_dense(runs: pd.DataFrame) -> pd.DataFrame:
    """Return final losses minus that of dense training with the same seed, by variant (rows) and seed (columns)."""
    loss = runs.pivot(index="variant", columns="seed", values="val_loss")
    return loss - loss.loc["dense"]


def draw(folder: Path) -> Any:
    """Draw final losses relative to dense training with the same number of ranks: the rule and its parts."""
    runs = summary(results.load(folder / "updates.csv")).query("steps == 300 and lr == 0.002")
    figure, (panels,) = plots.panels(1, 3, 3.9, sharex=True, sharey=True)
    gaps = {}
    for panel, ranks in zip(panels, (2, 4, 8), strict=True):
        found = above_dense(runs.query("workers == @ranks and density in [0.01, 1]"))
        right: Any = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": 9}
        for place, name in enumerate(PARTS):
            if name not in found.index:
                panel.annotate("not tried", (0.99, place), color=plots.MUTED, **right)
                continue
            low, mean, high = found.loc[name].agg(["min", "mean", "max"])
            gaps[name, ranks] = mean
            color = plots.color("dense" if name == "alone" else "topk updates")
            panel.hlines(place, low, high, lw=5, alpha=0.4, color=color)
            panel.plot(mean, place, "o", ms=6, color=color)
            panel.annotate(plots.signed(mean), (0.99, place), **right)
        panel.axvline(0, color="black", lw=0.8)
        panel.set(title=f"{ranks} workers", xlabel="loss minus that of dense")
    panels[0].set_yticks(range(len(PARTS)), list(PARTS.values()))
    panels[0].set(ylim=(len(PARTS) - 0.5, -0.5), xlim=(-0.12, 0.55))
    ours, kept = [gaps["topk", ranks] for ranks in (2, 4, 8)], [gaps["not paid out", ranks] for ranks in (2, 8)]
    finding = (
        f"TopUp ends {-max(ours):.2f} to {-min(ours):.2f} nats below dense AdamW; without the momentum payout it would "
        f"end {min(kept):.2f} to {max(kept):.2f} above"
    )
    task = (
        "GPT of 0.84 M parameters, AdamW, density 0.01, the first 300 of 1,000 steps, learning rate 0.002; nats per "
        "byte above dense with the same seed; dots: means, bars: ranges of three seeds, no bar: one seed. updates.csv "
        "has all."
    )
    plots.headline(figure, finding, task)
    return figure


FIGURES = [plots.Figure("updates", draw, ("updates",))]

if __name__ == "__main__":
    args = results.command_line(__doc__).parse_args()
    path = args.out / "updates.csv"
    if not args.figure:
        torch.set_num_threads(1)  # ranks run in parallel
        data = text(LENGTH, VAL_SEQUENCES)
        results.save_each(path, results.missing(results.load(path), TRIED), lambda run: train(run, data), digits=7)
    table = results.load(path)
    print(summary(table).to_string(index=False, float_format="{:.4g}".format))
    for figure in FIGURES:
        figure.write(args.out)
