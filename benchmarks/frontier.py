"""Finds out how few bytes exchanged updates need: value formats, densities, warm-ups, and untested ideas.

The GPT, the data, the schedule and the controls are those of `benchmarks.updates`, with ranks as threads. This module
contains only the differences. The controls are in `updates.csv`: dense training, one rank alone, and fp32 values.

    python -m benchmarks.frontier            # do the trainings of `TRIED` that `frontier.csv` lacks, in order
    python -m benchmarks.frontier --figure   # draw the figure; print steps, losses and bytes
    python -m benchmarks.frontier --seconds  # time a step with each value format
"""

import functools
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.harness import plots, results
from benchmarks.harness.baselines import Wrapped
from benchmarks.harness.results import Row
from benchmarks.harness.timing import in_turns, spread
from benchmarks.harness.training import Data, Trainee, attach_thread, factor, text, train_threads
from benchmarks.language import BATCH_SIZE, LENGTH, VAL_SEQUENCES, best_rates
from benchmarks.updates import EVERY, STEPS, Run, Trial, Variant, summary
from examples.models.gpt import GPT
from lightning_sparse import Comm, Method, Reducer, UpdateRule, method
from lightning_sparse.aggregators import Aggregator, Mean, TwoLevel, TwoPass
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.base import Entries, Payload, Update, add_
from lightning_sparse.compressors.encoding import (
    decode_indices,
    decode_values,
    encode_indices,
    encode_values,
    value_parts,
)
from lightning_sparse.context import Context
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.native import uses_native
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.layout import Segment
from lightning_sparse.memory import DecayingResidual, Residual
from lightning_sparse.methods import WARMUP_FACTORS, WARMUP_STEPS, update_density
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.kernels import Echo

ROW = 64
"""Number of one-bit values that share a magnitude."""


@dataclass(frozen=True)
class OneBit(TopK):
    """Sends top-k entries as one sign each, and the mean magnitude of 64 entries in bf16: 1.25 bits per value."""

    exposes_nonfinite = False

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Entries]:
        entries, numel = self.entries(u, ctx), ctx.segment.numel
        capacity = self.capacity(numel, ctx.density)
        rows = nn.functional.pad(entries.values, (0, -capacity % ROW)).view(-1, ROW)
        magnitudes = (rows.abs().sum(1) / (rows != 0).sum(1).clamp(min=1)).bfloat16()
        bits = (rows < 0).to(torch.uint8).view(-1, 8) << torch.arange(8, dtype=torch.uint8)
        count = torch.tensor([len(entries.indices)], dtype=torch.int32)
        indices = encode_indices(entries.indices, numel, capacity, self.index_format)
        payload = (count, magnitudes, bits.sum(1, dtype=torch.uint8), *indices)
        return payload, self.decode(payload, ctx)

    def decode(self, payload: Payload, ctx: Context) -> Entries:
        count, magnitudes, packed, *parts = payload
        numel = ctx.segment.numel
        capacity = self.capacity(numel, ctx.density)
        negative = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
        signs = (1 - 2 * negative.float()).unflatten(-1, (-1, ROW))
        values = (signs * magnitudes.float().unsqueeze(-1)).flatten(-2)[..., :capacity]
        return Entries(decode_indices(tuple(parts), count, numel, capacity, self.index_format), values)


@dataclass(frozen=True)
class Neighbours(TopK):
    """Selects the groups of neighbouring elements with the largest norms. One index stands for a whole group."""

    value_format: Any = "int2"
    group: int = 4

    exposes_nonfinite = False

    def _groups(self, numel: int, density: float | None) -> tuple[int, int]:
        many = -(-numel // self.group)
        return many, self.count(many, density)

    def compress(self, u: Tensor, ctx: Context) -> tuple[Payload, Update]:
        many, k = self._groups(len(u), ctx.density)
        rows = nn.functional.pad(u, (0, -len(u) % self.group)).view(many, self.group)
        chosen = topk_indices(rows.square().sum(1), k)
        values = encode_values(rows[chosen].flatten(), k * self.group, self.value_format)
        payload = (torch.tensor([k], dtype=torch.int32), *values, *encode_indices(chosen, many, k, self.index_format))
        return payload, self.decode(payload, ctx)

    def decode(self, payload: Payload, ctx: Context) -> Entries:
        numel = ctx.segment.numel
        many, k = self._groups(numel, ctx.density)
        split = 1 + value_parts(k * self.group, self.value_format)
        chosen = decode_indices(payload[split:], payload[0], many, k, self.index_format)
        values = decode_values(payload[1:split], k * self.group, self.value_format)
        indices = (chosen.unsqueeze(-1) * self.group + torch.arange(self.group)).flatten(-2)
        return Entries(indices.clamp(max=numel), torch.where(indices < numel, values, 0))


@dataclass(frozen=True)
class Slices(TopK):
    """Selects entries from one slice of the elements per step, in turn. Indices within a slice take fewer bits."""

    slices: int = 8

    exposes_nonfinite = False

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        turn, many = ctx.step % self.slices, len(u)
        start, stop = many * turn // self.slices, many * (turn + 1) // self.slices
        found = topk_indices(u[start:stop].clone(), min(k, stop - start)) + start
        return nn.functional.pad(found, (0, k - len(found)), value=many)

    def block_stats(self, numel: int, density: float | None = None) -> None:
        return None


@dataclass(frozen=True)
class Shared(Aggregator[TopK]):
    """All ranks send their values at every entry that one of them selects. The bytes hardly grow with P.

    1. All ranks gather the indices that each has selected.
    2. Each rank sends its values at all these indices, in 2 bits, to the owners of P equal parts.
    3. The owners send the means, in 4 bits. They keep P times their rounding error in the residual.
    """

    def __call__(self, u: Tensor, compressor: TopK, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        numel, size, form = len(u), exchange.size, compressor.value_format
        k = compressor.count(numel, ctx.density)
        exchange.check_finite(u)
        chosen = encode_indices(compressor.choose(u, k, ctx), numel, k, compressor.index_format)
        counts, *gathered = exchange.all_gather((torch.tensor([k], dtype=torch.int32), *chosen))
        shared = decode_indices(tuple(gathered), counts, numel, k, compressor.index_format).unique()
        count, part = len(shared), -(-len(shared) // size)
        values = encode_values(nn.functional.pad(u[shared], (0, part * size - count)).view(size, part), part, form)
        sent = decode_values(values, part, form)
        mean = decode_values(exchange.all_to_all(values), part, form).mean(0)
        result = decode_values(exchange.all_gather(encode_values(mean, part, "int4")), part, "int4")
        sent[exchange.rank] -= (mean - result[exchange.rank]) * size
        return Entries(shared, result.flatten()[:count]), Entries(shared, sent.flatten()[:count])

    def nbytes(self, compressor: TopK, segment: Segment, density: float | None, size: int) -> float:
        return compressor.nbytes(segment, density) * size

    def messages(self, size: int) -> int:
        return 3 * (size - 1)


@dataclass(frozen=True)
class Shrinking(Residual):
    """Error feedback whose residual shrinks with the learning rate, as if it contained gradients."""

    depends_on_step = True

    def compensate(self, grads: list[Tensor], ctx: Context) -> Tensor:
        if ctx.step and (ratio := factor(ctx.step, STEPS) / factor(ctx.step - 1, STEPS)) < 1:
            ctx.state["residual"].mul_(ratio)
        return super().compensate(grads, ctx)


@dataclass(frozen=True)
class Prepaid(Residual):
    """Error feedback that pays momentum in advance: after u = g + e + p, the residual of a sent entry becomes −p.

    The optimizer's momentum stays as it is, and its later changes repay −p. So all changes of a rank are sent, once.
    """

    depends_on_step = False

    def update(self, u: Tensor, applied: Update, rounding_error: Update | None, ctx: Context) -> None:
        add_(ctx.state["residual"], applied, -1)
        if rounding_error is not None:
            add_(ctx.state["residual"], rounding_error)


WARMED = tuple(WARMUP_FACTORS), WARMUP_STEPS
"""The default density warm-up: factors on the density, and number of exchanges for each."""


class Idea(NamedTuple):
    """A way to send updates: compressor, value format, density warm-up, and other changes to the rule."""

    compressor: type[TopK] = TopK
    value_format: str = "int2"
    warmup: tuple[tuple[float, ...], int] = ((), 1)  # factors on the density, and number of exchanges for each
    variant: Variant = Variant()  # variant of `benchmarks.updates`: its rule, aggregator and √P
    memory: Residual = Residual()
    flush: int = 0  # number of steps after which all entries are sent; 0: never
    bf16: bool = False  # weights and optimizer states are bf16
    sequences: int = BATCH_SIZE  # of a rank in each step
    sgd: bool = False  # exchange gradients of SGD with momentum instead of AdamW's updates
    dense: bool = False  # average gradients densely


ROOT = Variant(rule=UpdateRule(rescale=False), root=True)
PREPAID = "2-bit values, warm-up, momentum paid in advance"
SHARED = "values of all ranks at every selected entry, 2-bit values, warm-up"
TWICE = "two passes, the second {} times as dense, 2-bit values, warm-up"
BY_NODE = "nodes of {}, 2-bit values, warm-up"
STEP_ALONE = "nodes of 8 whose ranks step alone, 2-bit values, warm-up"
IDEAS: dict[str, Idea | None] = {
    **{f"{bits}-bit values": Idea(value_format=f"int{bits}") for bits in (4, 2)},
    "1-bit values": Idea(OneBit),
    "fp32 values, warm-up": Idea(value_format="float32", warmup=WARMED),
    "4-bit values, warm-up": Idea(value_format="int4", warmup=WARMED),
    "2-bit values, warm-up": Idea(warmup=WARMED),
    "1-bit values, warm-up": Idea(OneBit, warmup=WARMED),
    PREPAID: Idea(warmup=WARMED, variant=Variant(cleared=False), memory=Prepaid()),
    "2-bit values, warm-up, √P": Idea(warmup=WARMED, variant=ROOT),
    "1-bit values, √P": Idea(OneBit, variant=ROOT),
    "dense": Idea(dense=True),
    "dense, batches of 64": Idea(dense=True, sequences=64),
    "2-bit values, warm-up, batches of 64": Idea(warmup=WARMED, sequences=64),
    "2-bit values, warm-up, batches of 64, √P": Idea(warmup=WARMED, sequences=64, variant=ROOT),
    "2-bit values, warm-up, payout by the change": None,
    "2-bit values, warm-up, bf16 weights": Idea(warmup=WARMED, bf16=True),
    "2-bit values, warm-up, bf16 weights, payout by the change": None,
    **{
        TWICE.format(second): Idea(warmup=WARMED, variant=Variant(aggregator=TwoPass(second=second)))
        for second in (3, 8)
    },
    SHARED: Idea(warmup=WARMED, variant=Variant(aggregator=Shared())),
    **{
        BY_NODE.format(count): Idea(warmup=WARMED, variant=Variant(aggregator=TwoLevel(ranks_per_node=count)))
        for count in (8, 4, 2)
    },
    STEP_ALONE: None,
    **{
        f"gradients under SGD, {name} values": Idea(value_format=form, sgd=True)
        for name, form in (("fp32", "float32"), ("4-bit", "int4"), ("2-bit", "int2"))
    },
    "groups of 4, 2-bit values": Idea(Neighbours),
    "slices in turn, 4-bit values": Idea(Slices, "int4"),
    "chosen by |u| · v^¼, 2-bit values": None,
    "residual decays by 0.99, 1-bit values": Idea(OneBit, memory=DecayingResidual(0.99)),
    "residual decays by 0.999, 1-bit values": Idea(OneBit, memory=DecayingResidual(0.999)),
    "residual shrinks with the rate, 2-bit values, warm-up": Idea(warmup=WARMED, memory=Shrinking()),
    "all sent every 100 steps, 1-bit values": Idea(OneBit, flush=100),
}
"""None was measured with an earlier version: the default payout followed from formulas, one per optimizer. Or the ranks
of a node stepped on their own gradients."""
MECHANISMS = "√P", "payout by the change"
TRIED = [
    Run(idea, ranks, density, lr, seed, steps)
    for ranks, steps, lr, seeds, density, ideas in (
        (2, 300, 0.002, [0], 0.003, ["4-bit values", "2-bit values", "1-bit values"]),
        (2, 300, 0.002, [0], 0.0015, ["1-bit values"]),
        (2, 300, 0.002, [0], 0.01, ["1-bit values"]),
        (2, 300, 0.002, [0], 0.006, ["1-bit values", "groups of 4, 2-bit values"]),
        (2, 300, 0.002, [0], 0.003, [f"{form} values, warm-up" for form in ("fp32", "4-bit", "2-bit", "1-bit")]),
        (2, 300, 0.002, [0], 0.003, ["slices in turn, 4-bit values", "chosen by |u| · v^¼, 2-bit values"]),
        (
            2,
            300,
            0.002,
            [0],
            0.003,
            ["residual decays by 0.99, 1-bit values", "residual decays by 0.999, 1-bit values"],
        ),
        (2, 300, 0.002, [0], 0.003, ["all sent every 100 steps, 1-bit values"]),
        (2, 300, 0.002, [0], 0.001, ["2-bit values", "2-bit values, warm-up"]),
        (2, 300, 0.002, [1, 2], 0.003, ["2-bit values, warm-up"]),
        (
            2,
            300,
            0.002,
            [0, 1, 2],
            0.003,
            [f"2-bit values, warm-up, {what}" for what in MECHANISMS],
        ),
        (4, 300, 0.002, [0], 0.003, ["2-bit values, warm-up"]),
        (4, 300, 0.002, [0], 0.003, [f"2-bit values, warm-up, {what}" for what in MECHANISMS]),
        (
            2,
            300,
            0.002,
            [0, 1],
            0.003,
            [f"2-bit values, warm-up, bf16 weights{what}" for what in ("", ", payout by the change")],
        ),
        (2, 300, 0.02, [0], 0.01, [f"gradients under SGD, {form} values" for form in ("fp32", "4-bit", "2-bit")]),
        (2, 300, 0.02, [0], 0.003, ["gradients under SGD, 4-bit values"]),
        (8, 300, 0.002, [0], 0.003, ["1-bit values", "1-bit values, √P"]),
        (4, 300, 0.002, [0], 0.003, ["1-bit values, √P"]),
        (16, 300, 0.002, [0], update_density(16), ["2-bit values, warm-up"]),
        (8, 300, 0.002, [0], 0.003, ["2-bit values, warm-up", "2-bit values, warm-up, √P"]),
        (
            2,
            1000,
            0.002,
            [0],
            0.001,
            ["2-bit values, warm-up", "residual shrinks with the rate, 2-bit values, warm-up"],
        ),
        (4, 300, 0.004, [0], 0.003, [f"2-bit values, warm-up, batches of 64{root}" for root in ("", ", √P")]),
        (2, 300, 0.004, [0], 0.003, ["2-bit values, warm-up, batches of 64"]),
        *((ranks, 300, 0.004, [0], 1.0, ["dense, batches of 64"]) for ranks in (2, 4)),
        (8, 300, 0.002, [0], 0.00165, ["2-bit values, warm-up, √P"]),
        (8, 1000, 0.004, [0], 0.00165, ["2-bit values, warm-up, √P"]),
        (
            8,
            300,
            0.002,
            [0],
            0.003,
            [TWICE.format(second) for second in (3, 8)],
        ),
        (8, 300, 0.008, [0], round(update_density(8), 9), ["2-bit values, warm-up"]),
        (4, 1000, 0.004, [0], 0.003, [PREPAID, "2-bit values, warm-up"]),
        (8, 1000, 0.004, [0], round(update_density(8), 9), [PREPAID, "2-bit values, warm-up"]),
        (8, 300, 0.004, [0], 0.0015, [SHARED, "2-bit values, warm-up"]),
        (16, 300, 0.002, [0], 0.003, [STEP_ALONE, BY_NODE.format(8)]),
        (16, 300, 0.004, [0], 0.003, [STEP_ALONE]),
        (16, 1000, 0.004, [0], 0.003, [BY_NODE.format(8)]),
        (16, 1000, 0.004, [0], 1.0, ["dense"]),
        (16, 300, 0.004, [1], 0.003, [BY_NODE.format(8)]),
        (16, 300, 0.004, [0], 0.003, [BY_NODE.format(4)]),
        (16, 1000, 0.004, [0], round(update_density(8), 9), [BY_NODE.format(2)]),
        (16, 300, 0.004, [1], 1.0, ["dense"]),
        (4, 1000, 0.004, [0], 0.003, ["residual shrinks with the rate, 2-bit values, warm-up"]),
        (16, 300, 0.002, [0], round(update_density(16) * 8**0.5, 8), [STEP_ALONE]),
    )
    for seed in seeds
    for idea in ideas
]
"""The trainings to do, in this order."""

NAMED = {
    "ddp": "ddp",
    "bf16": "bf16",
    "powersgd": "PowerSGD",
    "topk updates": "TopUp, denser, fp32",
    "topk by default": "TopUp",
    "local_sgd": "local SGD",
    "sparseloco": "SparseLoCo",
}
"""Methods that the figure shows, with their labels. The table has all."""
LOWEST, HIGHEST = -10, 25  # per cent above ddp, of the figure


class Flushing(Reducer):
    """A reducer that sends all entries in every `flush`-th step."""

    flush = 0

    @property
    def density(self) -> float | None:
        return 1.0 if self.flush and (self.step + 1) % self.flush == 0 else super().density


def train(run: Run, data: Data) -> list[Row]:
    """Train with ranks as threads; return the loss and a rank's sent bytes, every `EVERY` steps."""
    idea = IDEAS[run.variant]
    assert idea is not None, f"{run.variant!r} was measured with an earlier version"
    (factors, each), variant = idea.warmup, idea.variant
    compressor = idea.compressor(run.density, value_format=idea.value_format)  # type: ignore[arg-type]
    made = Method(compressor, idea.memory, variant.aggregator or Mean(), None if idea.sgd else variant.rule)
    made = method("dense") if idea.dense else made
    trial = functools.partial(Trial, variant=variant, factors=[])
    kind = type("Flushing", (Flushing,), {"flush": idea.flush})
    warmup = (
        {"density_warmup": [factor * run.density for factor in factors], "density_warmup_steps": each}
        if factors
        else {}
    )

    def trainee(model: nn.Module, comm: Comm) -> Trainee:
        params = model.parameters()
        optimizer = torch.optim.SGD(params, run.lr, momentum=0.9) if idea.sgd else torch.optim.AdamW(params, run.lr)
        wrapped: Wrapped = attach_thread(model, [optimizer], made, comm, updates=trial, kind=kind, **warmup)
        return Trainee(model, wrapped, optimizer, data, comm, seed=run.seed, batch_size=idea.sequences, steps=STEPS)

    dtype = torch.bfloat16 if idea.bf16 else torch.float32
    return train_threads(lambda: GPT(context=LENGTH).to(dtype), trainee, run.workers, run.seed, run.steps, EVERY)


def missing_runs(path: Path) -> list[Run]:
    """Return the runs of `TRIED` that a CSV file lacks, except for ideas that only an earlier version had."""
    return [run for run in results.missing(results.load(path), TRIED) if IDEAS[run.variant] is not None]


def times(numel: int = 6_500_000, repetitions: int = 9) -> list[Row]:
    """Time steps of one rank in ms, for each value format and density in turn: AdamW updates, in C and in torch.

    The rank compresses, frames, and sums its own payload and another rank's. No link is used. A first step checks that
    the weights of the sent entries change, and no others.
    """
    rows: list[Row] = []
    if not uses_native(torch.zeros(1)):
        raise SystemExit("The loops in C are not used here, so nothing is measured. Install the package with gcc.")
    for kernels in ("C", "torch"):
        with mock.patch.dict(os.environ, {"LIGHTNING_SPARSE_KERNELS": "torch"} if kernels == "torch" else {}):
            steps = {}
            for density, form in itertools.product((0.003, 0.01), ("float32", "int4", "int2")):
                net = nn.ParameterDict({"w": nn.Parameter(torch.randn(numel // 1000, 1000))})
                optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
                chosen = Method(TopK(density, value_format=form), update_rule=UpdateRule())  # type: ignore[arg-type]
                reducer = Reducer(chosen, Echo(2), granularity="model", exchanged="update")
                exchanged = DeltaExchange(reducer, net, [optimizer])

                def step(net: Any = net, optimizer: Any = optimizer, exchanged: Any = exchanged) -> None:
                    exchanged.begin(optimizer)
                    optimizer.step()
                    exchanged.exchange(optimizer)

                net["w"].grad, before = torch.randn_like(net["w"]), net["w"].detach().clone()
                step()
                changed = int((net["w"] != before).sum())
                if not 0.9 * density * numel <= changed <= density * numel + 1:
                    raise SystemExit(f"{form} values change {changed:,} of {numel:,} weights, so nothing is measured.")
                steps[f"{form},{density:g}"] = step
            for (name, cache), ms in in_turns(steps, repetitions).items():
                if cache == "warm":
                    form, density = name.split(",")
                    columns = spread(ms)
                    rows.append({"kernels": kernels, "value_format": form, "density": float(density), **columns})
    return rows


def contestants(folder: Path, ranks: int) -> pd.DataFrame:
    """Return each method's loss after 1,000 steps, in % above dense training, and its bytes in % of dense bytes.

    The loss is the mean over the method's seeds, each compared with dense training of the same seed. The data are from
    `language.csv`. For the rate of each method see `best_rates`.
    """
    table = results.load(folder / "language.csv").query("optimizer == 'adamw' and step == 1000")
    table = table[table.part == {2: "final", 4: "four", 8: "eight"}[ranks]]
    chosen = table[table["lr"] == table["method"].map(best_rates(table))]
    loss = chosen.pivot(index="method", columns="seed", values="val_loss")
    sent = chosen.groupby("method")["sent_bytes_per_worker"].mean()
    above = 100 * (loss / loss.loc["ddp"] - 1).mean(axis=1)
    return pd.DataFrame({"loss": above, "bytes": 100 * sent / sent["ddp"]})


def draw(folder: Path) -> Any:
    """Draw the losses after 1,000 steps against bytes, for two, four and eight ranks."""
    figure, (panels,) = plots.panels(1, 3, 4.1, sharey=True)
    default, least = "topk by default", []
    for panel, ranks in zip(panels, (2, 4, 8), strict=True):
        found = contestants(folder, ranks)
        shown = found[found.index.isin(NAMED) & (found.loss < HIGHEST)]
        panel.axhspan(LOWEST, 1, color="0.94", zorder=0)
        panel.axhline(0, color="black", lw=0.6)
        labels = []
        for name, row in shown.iterrows():
            big = {"markersize": 9} if name == default else {}
            panel.plot(row.bytes, row.loss, "o", color=plots.color(str(name)), **big)
            if name == "bf16":  # to the right of it is ddp
                left = {"xytext": (-7, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
                panel.annotate(name, (row.bytes, row.loss), color=plots.color(name), **left)
                continue
            labels.append((row.bytes, row.loss, NAMED[str(name)], plots.color(str(name))))
        if above := above_of(found):
            text = "above:\n" + "\n".join(f"{each} {found.loss[name]:+.0f} %" for each, name in above)
            panel.text(0.03, 0.87, text, transform=panel.transAxes, va="top", color=plots.MUTED)
        panel.set(xscale="log", title=f"{ranks} workers", xlim=(0.02, 700), ylim=(LOWEST, HIGHEST))
        panel.set_xlabel("bytes, % of dense (log scale)")
        panel.set_xticks([0.1, 1, 10, 100], labels=["0.1", "1", "10", "100"])
        panel.minorticks_off()
        plots.ends(panel, labels, reach=6)
        near = found[found.loss <= 1].bytes.sort_values()
        who = "TopUp by default" if near.index[0] == default else str(near.index[0])
        least.append((who, f"{near.iloc[0]:.2g} % with {ranks} workers"))
    panels[0].set_ylabel("loss after 1,000 steps, % above ddp")
    who = " or ".join(dict.fromkeys(name for name, _ in least))
    shares = ", ".join(share for _, share in least)
    finding = f"{who} sends the fewest bytes for a loss at most 1 % above ddp's (grey): {shares}"
    task = (
        "GPT of 0.84 M parameters, AdamW, 1,000 steps; bytes in % of dense fp32 all-reduce. Each method at its "
        "best learning rate of a grid (TopUp: at that of ddp), against ddp of the same seeds. Local SGD exchanges "
        "every 50 steps, SparseLoCo every 25."
    )
    plots.headline(figure, finding, task)
    return figure


def above_of(found: pd.DataFrame) -> list[tuple[str, str]]:
    """Return labels and names of methods whose losses are above the figure."""
    return [(NAMED[str(name)], str(name)) for name in found.index if name in NAMED and found.loss[name] >= HIGHEST]


FIGURES = [plots.Figure("frontier", draw, ("language",))]

if __name__ == "__main__":
    parser = results.command_line(__doc__)
    parser.add_argument("--seconds", action="store_true", help="time value formats instead; needs an idle machine")
    args = parser.parse_args()
    path = args.out / "frontier.csv"
    torch.set_num_threads(1)  # ranks run in parallel
    if args.seconds:
        rows = [row | results.origin() for row in times()]
        results.save(args.out / "frontier_seconds.csv", rows, ["kernels", "value_format", "density"], digits=4)
        print(pd.DataFrame(rows).to_string(index=False))
        sys.exit()
    if not args.figure:
        data = text(LENGTH, VAL_SEQUENCES)
        results.save_each(path, missing_runs(path), lambda run: train(run, data), digits=7)
    print(summary(results.load(path)).to_string(index=False, float_format="{:.4g}".format))
    for figure in FIGURES:
        figure.write(args.out)
