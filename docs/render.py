"""Make all tables and figures of README and docs/ from the CSV files of the benchmarks, and from `METHODS`.

    python docs/render.py           # write the tables, and draw the figures: a minute
    python docs/render.py --tables  # write the tables only
    python docs/render.py --check   # write nothing; fail if a page or a figure is out of date

A page says where a table goes, `<!-- table: name -->` and `<!-- end -->`, each on a line of its own; `TABLES` says how
to make it. So no number of a table is typed. A figure is drawn by its benchmark, which computes the title, too.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import lightning_sparse  # noqa: E402
from benchmarks import comparison as comparisons  # noqa: E402
from benchmarks import frontier as frontiers  # noqa: E402
from benchmarks import language as languages  # noqa: E402
from benchmarks import map as maps  # noqa: E402
from benchmarks import network as networks  # noqa: E402
from benchmarks import scaling as scalings  # noqa: E402
from benchmarks import selection as selections  # noqa: E402
from benchmarks import updates as variants  # noqa: E402
from benchmarks.comparison import STEPS, TASKS, finals  # noqa: E402
from benchmarks.frontier import BY_NODE, STEP_ALONE  # noqa: E402
from benchmarks.harness.baselines import RANK  # noqa: E402
from benchmarks.harness.table import load  # noqa: E402
from benchmarks.language import (  # noqa: E402
    AT_SITES,
    DEFAULT,
    DELAYED,
    EARLY,
    EQUAL,
    FAR,
    GAUSSIANK,
    LENGTH,
    LOCAL,
    PARTS,
    REPEATED,
)
from benchmarks.optimizers import DEFAULT as BY_DEFAULT  # noqa: E402
from benchmarks.optimizers import summary as optimizers_summary  # noqa: E402
from benchmarks.scaling import FITTED_TO  # noqa: E402
from benchmarks.updates import BEGUN, steps_to, summary  # noqa: E402
from examples.models.gpt import GPT  # noqa: E402
from lightning_sparse import cost  # noqa: E402
from lightning_sparse.contrib.majority_vote import MajorityVote  # noqa: E402
from lightning_sparse.contrib.methods import CONTRIB  # noqa: E402
from lightning_sparse.contrib.order_statistics import CoordinateMedian, TrimmedMean  # noqa: E402
from lightning_sparse.memory import Momentum  # noqa: E402
from lightning_sparse.methods import WARMUP_FACTORS, WARMUP_STEPS, resolve_updates  # noqa: E402
from reproductions import FINDINGS, memsgd  # noqa: E402
from reproductions.command import finding  # noqa: E402
from reproductions.digits import best_rates  # noqa: E402

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[-+−–↓↑\d.,%/ ]*|not in \d+")
NAMES = {
    "none": "no communication",
    "idle_hook": "DDP with a hook that does nothing",
    "ddp": "stock `ddp`",
    "fp16": "torch's fp16 hook",
    "bf16": "bf16 hook",
    "powersgd": "torch's PowerSGD, rank 4",
    "naive_topk": "a naive top-k hook",
    "topk": "**`topk`**",
    "gaussiank": "**`gaussiank`**",
    "int4": "**`int4`**",
    "topk updates": "**`topk` updates**",
    "gaussiank updates": "**`gaussiank` updates**",
    "gtopk": "**`gtopk`**",
    "oktopk": "**`oktopk`**",
    "scalecom": "**`scalecom`**",
    "randk": "`randk`",
    "topk_two_level": "`topk`, hierarchical",
    "local_sgd": "local SGD with the bytes of `topk`",
    "ddp_accumulated": "accumulated gradients with the bytes of `topk`",
}
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "loopback": "no limit (loopback)"}
OURS = ["topk", "gaussiank", "gtopk", "oktopk", "scalecom"]
UPDATES = ["topk by default", "topk updates", DELAYED, "gaussiank updates", "local_sgd", EQUAL, "diloco", "sparseloco"]
SENDS = {
    "topk": ("the k largest entries, exactly", "2k(P − 1)"),
    "gaussiank": ("2k/3 to 4k/3 entries above a threshold; the first threshold assumes Gaussian u", "2⌈4k/3⌉(P − 1)"),
    "sidco": ("2k/3 to 4k/3 entries above a threshold from a fitted distribution", "2⌈4k/3⌉(P − 1)"),
    "mstopk": ("k entries by a bisected threshold", "2k(P − 1)"),
    "chunktopk": ("the largest entries of each chunk of 4,096, k in total, with 12-bit indices", "2k(P − 1)"),
    "gtopk": ("the k largest entries of the sum, merged in pairs", "2k log₂ P, and 4k more if P is no power of two"),
    "oktopk": ("the k/P largest sums in each of P regions", "about 6k(P − 1)/P"),
    "scalecom": ("its values at k indices that one rank selects; ranks take turns", "at most 3k"),
    "randk": ("k random entries, the same on all ranks", "2k(P − 1)/P"),
    "doublesqueeze": (
        "the k/P largest entries of each of P regions; the owner of a region returns the k/P largest of its mean",
        "about 4k(P − 1)/P",
    ),
    "int8": ("each value in 8 bits, with one scale per 64 values; the mean likewise", "about 0.52d(P − 1)/P"),
    "int4": ("each value in 4 bits, with one scale per 64 values; the mean likewise", "about 0.27d(P − 1)/P"),
    "powersgd": (
        "two factors of r columns for each n × m matrix; other parameters uncompressed",
        "2Σ(n + m)r(P − 1)/P",
    ),
    "onebit": (
        "each sign in 1 bit, and two values per column: the means of both signs; the mean likewise",
        "about d(P − 1)/16P",
    ),
    "efsignsgd": ("each sign of an update in 1 bit, and the mean magnitude of each parameter", "d(P − 1)/32"),
    "qsgd": ("each value rounded at random to one of 31 levels, in 5 bits", "about 5d(P − 1)/32"),
    "terngrad": (
        "each value rounded at random to −s, 0 or s, in 2 bits; all ranks share one scale s per parameter",
        "(2 + ⌈log₂(2P + 1)⌉)d(P − 1)/32P",
    ),
    "signsgd": ("each sign in 1 bit; the result is the majority sign, in 1 bit", "d(P − 1)/16P"),
    "signum": ("the signs of its momentum, voted as in `signsgd`", "d(P − 1)/16P"),
    "median": ("everything; the result is the median per coordinate", "2d(P − 1)/P"),
    "trimmed_mean": ("everything; the mean per coordinate excludes a quarter of the ranks at each end", "2d(P − 1)/P"),
    "memsgd": ("`topk` on updates; momentum unchanged", "2k(P − 1)"),
    "dgc": (
        "0.8k to 1.3k entries of updates above a sampled threshold; their momentum is cleared",
        "2⌈4k/3⌉(P − 1)",
    ),
    "sparseloco": (
        "after 30 local steps: the 64 largest deltas of each 4,096, in 2.5 bits, with 12-bit indices; k = d/64",
        "about 0.45k(P − 1)/30",
    ),
    "local_sgd": ("after 8 local steps: all deltas", "2d(P − 1)/8P"),
    "diloco": ("after 500 local steps: all deltas, for an outer Nesterov step", "2d(P − 1)/500P"),
    "dense": ("everything, by all-reduce, like `ddp`", "2d(P − 1)/P"),
}
"""Method to its payload and words per step; a method without an entry gets its compressor's first line."""
RESULTS = {MajorityVote: "a vote", CoordinateMedian: "a median", TrimmedMean: "a trimmed mean"}
"""Results of aggregators other than the mean."""
SPEED_UP = {
    "SGD": ("1.8", "15.0", "1.1", "13.4"),
    "top": ("1.8", "16.1", "1.9", "18.3"),
    "random": ("1.8", "18.4", "2.0", "16.2"),
}
"""Stich et al. 2018: epsilon with k = 10, RCV1 with k = 50, each on 2 cores and on 24; medians of three runs."""
FEEDBACK = {
    "SGD": ("93.38 %", "75.35 %", "74.91 %"),
    "sign": ("−0.94", "−3.15", "−6.6"),
    "scaled sign": ("−1.31", "−2.21", "−36.35"),
    "scaled sign, feedback": ("−0.68", "−0.92", "−0.64"),
    "top": ("", "", ""),
    "top, feedback": ("", "", ""),
}
"""Karimireddy et al. 2019: test accuracy on CIFAR-10, and on CIFAR-100 with batches of 128 and of 8."""
BITS = {
    "QSGD, s = 1": "AlexNet on ImageNet: 1.73 points lower (2 bits, buckets of 64)",
    "QSGD, s = 3": "",
    "QSGD, s = 15": "AlexNet on ImageNet: 59.50 → 60.05 %, ResNet-110 on CIFAR-10: 93.86 → 94.19 % (4 bits)",
    "QSGD, s = 127": "ResNet-152 on ImageNet: 77.0 → 76.74 % (8 bits)",
    "TernGrad": "AlexNet on ImageNet, 2, 4, 8 workers: 57.33 → 57.61, 57.32 → 57.28, 56.62 → 57.54 %",
    "1-bit": "Switchboard: diverges",
    "1-bit, feedback": "Switchboard: word error rate 16.5 → 16.3 %",
}
"""Alistarh et al. 2017, Wen et al. 2017, Seide et al. 2014: from full precision to so few bits."""
LAYER_WISE = {
    "topk": "ResNet-50: better, 1.25 to 1.63 times the accuracy; CIFAR-10: equal, but worse at 10 % and less",
    "randk": "CIFAR-10: equal, but better at 0.1 %",
    "gaussiank": "",
    "qsgd": "better; ResNet-50: 1.52 times the accuracy",
    "terngrad": "better",
    "efsignsgd": "",
}
"""Dutta et al. 2020: layer by layer, against the whole model at once."""
MODEL_NAMES = {
    "resnet20": "ResNet-20",
    "vgg16": "VGG-16",
    "resnet50": "ResNet-50",
    "alexnet": "AlexNet",
    "lstm_ptb": "LSTM-PTB",
    "gpt2": "GPT-2 small",
}
CLAIMS = {
    "topk": "no loss at density 0.01",
    "gaussiank": "as good as TopK, cheaper to select",
    "sidco": "as good as TopK, cheaper to select",
    "mstopk": "as good as TopK, cheaper to select",
    "chunktopk": "none: the selection is that of DeMo",
    "gtopk": "as good as TopK",
    "oktopk": "as good as dense",
    "scalecom": "as good as dense",
    "doublesqueeze": "the second compression costs nothing",
    "randk": "converges, up to d/k times slower",
    "int8": "as good as dense, without tuning",
    "int4": "as good as dense, without tuning",
    "qsgd": "as good as SGD",
    "terngrad": "less than 2 points of accuracy lost",
    "onebit": "no loss, with error feedback",
    "efsignsgd": "as good as SGD",
    "signsgd": "as good as SGD, or faster",
    "signum": "better than signSGD",
    "powersgd": "as good as SGD",
    "memsgd": "as good as SGD",
    "dgc": "no loss at density 0.001, with a warm-up",
    "local_sgd": "as good as SGD, with fewer exchanges",
    "diloco": "as good as dense, with 1/500 of the exchanges",
    "sparseloco": "better than DiLoCo, with 1 to 3 % of the entries in two bits",
}
"""The claim of each method's paper."""
HEADINGS = {"digits_sgd": "digits, SGD", "gpt_adamw": "GPT, AdamW", "gpt_sgd": "GPT, SGD"}
FEW_BYTES = 0.02
"""`comparison-fast` lists the methods that send at most this share of dense training's bytes."""


def read(name: str) -> pd.DataFrame:
    """Return one of the benchmarks' results."""
    return pd.read_csv(ROOT / "benchmarks" / "results" / f"{name}.csv")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; columns of numbers are aligned to the right."""
    head, body = list(header), [list(row) for row in rows]
    numbers = [all(NUMBER.fullmatch(row[column]) for row in body) for column in range(len(head))]
    lines = [head, ["---:" if right else "---" for right in numbers], *body]
    cells = ([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in line] for line in lines)  # a bare bar ends a cell
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def under_adamw(name: str) -> str:
    """Return a method's name for a table about AdamW: the bare name of the CSV file means gradients."""
    return re.sub(rf"^(\**`?)({'|'.join(OURS)})(`?)(?=$|,|\**$)", r"\1\2\3 gradients", name)


def beside_gradients(names: Iterable[str]) -> dict[str, str]:
    """Map names to "<name> updates" if the same table also has "<name> gradients"."""
    found = list(names)
    return {name: f"{name} updates" if f"{name} gradients" in found else name for name in found}


def digits(value: float, significant: int = 3) -> str:
    """Return a number with so many significant digits, all of those before the point, and no zeros at the end."""
    return f"{value:.0f}" if value >= 10**significant else f"{value:.{significant}g}"


def network() -> str:
    """Median step of every contestant on every link, four workers."""
    runs = read("network").query("workload == 'mlp' and workers == 4 and ranks_per_host == 1")
    steps = runs.set_index(["contestant", "rate"])
    rows = []
    for name in [name for name in NAMES if name in set(runs.contestant)]:
        row = [NAMES[name]]
        for rate in RATES:
            run = steps.loc[name, rate]
            times = run.times_faster_than_ddp
            row += [f"{run.median_ms:,.0f}", "" if pd.isna(times) else f"{times:.1f}"]
        rows.append(row)
    return table(["", *(column for rate in RATES.values() for column in (rate, "× ddp"))], rows)


def network_adamw() -> str:
    """Median step with AdamW, four workers, and the most memory that a worker had."""
    steps = read("network").query("workload == 'mlp_adamw'").set_index(["contestant", "rate"])
    rates = {rate: label for rate, label in RATES.items() if rate in steps.index.get_level_values("rate")}
    rows = []
    for name in [name for name in NAMES if name in steps.index]:
        medians = [f"{steps.median_ms[name, rate]:,.0f}" for rate in rates]
        rows.append([under_adamw(NAMES[name]), *medians, f"{steps.peak_mb[name].max():,.0f}"])
    return table(["", *rates.values(), "MB"], rows)


def within_backward() -> str:
    """Median step and its range of exchanged updates, after backward and within it, and of gradients; four workers."""
    runs = read("within_backward")
    names = {"topk updates": "after the step", "topk updates within backward": "within backward", "topk": "gradients"}
    kinds = {"mlp_adamw": "compute the model", "mlp_paced": "wait, as for an accelerator"}
    rows = []
    for (kind, rate), steps in runs.groupby(["workload", "rate"], sort=False):
        found = steps.set_index("contestant")
        cells = [
            f"{found.median_ms[name]:,.0f} ({found.p20_ms[name]:,.0f} to {found.p80_ms[name]:,.0f})"
            if name in found.index
            else ""
            for name in names
        ]
        memory = " / ".join(f"{found.peak_mb[name]:,.0f}" for name in [*names][:2])
        rows.append([f"{kinds[kind]}, {RATES[rate]}", *cells, memory])
    return table(["processors", *names.values(), "MB after / within"], rows)


def network_workers() -> str:
    """Median step at 1 Gbit/s for other numbers of workers."""
    runs = read("network").query("workload == 'mlp' and rate == '1gbit'")
    steps = runs.set_index(["contestant", "workers", "ranks_per_host"]).median_ms
    places = {"2 workers": (2, 1), "4 workers": (4, 1), "8 workers": (8, 1), "4 workers, 2 a node": (4, 2)}
    names = ["none", "ddp", "topk", "topk_two_level", "gtopk", "oktopk", "scalecom"]
    return table(
        ["", *places],
        (
            [NAMES[name], *(f"{steps[(name, *at)]:,.0f}" if (name, *at) in steps else "" for at in places.values())]
            for name in names
        ),
    )


def network_10gbit() -> str:
    """Median step at 10 Gbit/s, in slow motion."""
    runs = read("network_paced").query("workload == 'mlp_paced'").set_index("contestant")
    rows = []
    for name in [name for name in NAMES if name in runs.index]:
        times = runs.times_faster_than_ddp[name]
        rows.append([NAMES[name], f"{runs.median_ms[name]:,.0f}", "" if pd.isna(times) else f"{times:.1f}"])
    return table(["", "10 Gbit/s", "× ddp"], rows)


def seconds() -> str:
    """Seconds until the test loss is below 0.2, and how many steps that took."""
    runs = read("network_real")
    places = [("real", "100mbit"), ("real", "1gbit"), ("real", "loopback")]
    places += [("real_resnet20", "100mbit"), ("real_resnet20", "1gbit")]
    rows = []
    for name in ["ddp", "bf16", "powersgd", *OURS, "local_sgd", "ddp_accumulated"]:
        row = [NAMES[name].replace("torch's ", "")]
        for workload, rate in places:
            if rate == "100mbit":
                row.append(_rate_and_steps(runs, name, workload))
            run = runs.query("contestant == @name and workload == @workload and rate == @rate")
            reached = run.query("test_loss < 0.2")
            if run.empty:
                row.append("")
            elif reached.empty:
                row.append(f"not in {run.seconds.max():.0f}")
            else:
                row.append(f"{reached.seconds.iloc[0]:.1f}")
        rows.append(row)
    return table(
        ["", *["rate, steps", "100 Mbit/s", "1 Gbit/s", "loopback", "rate, steps", "100 Mbit/s", "1 Gbit/s"]], rows
    )


def _rate_and_steps(runs: pd.DataFrame, name: str, workload: str) -> str:
    reached = runs.query("contestant == @name and workload == @workload and test_loss < 0.2")
    if reached.empty:
        return ""
    steps = reached.groupby("rate").step.min()
    if steps.nunique() > 1:
        raise ValueError(f"{name} takes {dict(steps)} steps to the loss on {workload}: not the same on all links.")
    return f"{reached.learning_rate.iloc[0]:g}, {steps.iloc[0]:,}"


def scaling() -> str:
    """Scaling efficiency of published models, 4 workers and 32."""
    sizes = {
        "resnet20": "0.27 M, 146 ms",
        "vgg16": "14.7 M, 140 ms",
        "resnet50": "25.6 M, 4.88 s",
        "alexnet": "61 M, 257 ms",
        "lstm_ptb": "66 M, 118 ms",
        "gpt2": "124 M, 250 ms",
    }
    models = {model: f"{name}, {sizes[model]}" for model, name in MODEL_NAMES.items()}
    found = read("scaling").set_index(["model", "method", "workers"])
    rows = []
    for model, label in models.items():
        shares = [[100 * found.efficiency[model, method, workers] for workers in (4, 32)] for method in ["ddp", *OURS]]
        row = [re.sub(r"(?<=\d) ", "\u00a0", label), *(f"{four:.0f} / {many:.0f}" for four, many in shares)]
        # They are decimals: 9.35 is 9.4, although as a binary number it lies below.
        published = [100 * found.published[model, method, 32] + 1e-9 for method in ("ddp", "topk", "gtopk")]
        row.append(", ".join(f"{share:.1f}" if share < 10 else f"{share:.0f}" for share in published if share == share))
        rows.append(row)
    return table(["", "dense `ddp`, 4 / 32", *OURS, "published at 32: dense, TopK, gTopK"], rows)


def scaling_gains() -> str:
    """How many times faster gTopK is with 32 workers than TopK and than dense training."""
    found = read("scaling").set_index(["model", "method", "workers"])

    def gain(column: str, model: str, other: str) -> str:
        value = float(found[column][model, "gtopk", 32]) / float(found[column][model, other, 32])
        return "" if math.isnan(value) else f"{value:.1f}"

    rows = [
        [name, gain("efficiency", model, "topk"), gain("published", model, "topk"), gain("efficiency", model, "ddp")]
        for model, name in MODEL_NAMES.items()
    ]
    return table(["32 workers", "gTopK over TopK", "published", "gTopK over dense"], rows)


def scaling_error() -> str:
    """By how much the cost model is off on the measured cases to which it was not fitted."""
    found = read("scaling").query("source == 'measured'")
    fitted = [case in FITTED_TO for case in zip(found.model, found.workers, strict=True)]
    off = (found.efficiency / found.by_cost_model - 1).abs()[[not known for known in fitted]]
    return (
        f"- The cost model is fitted to {len(FITTED_TO)} cases. On the other {len(off)} measured steps its error is"
        f" {100 * off.median():.0f} % in the median\n  and {100 * off.max():.0f} % at most.\n"
    )


def accuracy() -> str:
    """Digits: accuracy after four epochs, beside dense training with the same seeds."""
    runs = read("convergence").query("epochs == 4").copy()
    runs["order"] = runs.method.map(["ddp", "topk", "gaussiank", "randk"].index)
    rows = []
    runs["warm"] = runs.warmup.notna()
    runs["random"] = runs.method == "randk"
    for run in runs.sort_values(
        ["random", "density", "order", "warm"], ascending=[True, False, True, True]
    ).itertuples():
        dense = run.method == "ddp"
        rows.append(
            [
                "dense (`ddp`)" if dense else run.method + (", warm-up" if run.warm else ""),
                f"{run.density:g}",
                f"{run.mean_accuracy_percent:.1f} %",
                "" if dense else f"{run.gap_points:.1f}",
                "" if dense else f"{run.gap_upper_95_points:.1f}",
                f"{run.bytes_per_step_last_epoch:,}",
            ]
        )
    return table(["method", "density", "accuracy", "gap", "at most", "bytes per step"], rows)


def best_run(optimizer: str, method: str, workers: int) -> pd.DataFrame:
    """Return the GPT's training of a contestant at its best rate, the default at that of `ddp`, with seed 0.

    It is empty if there is none.
    """
    runs = read("language").query("optimizer == @optimizer and method in [@method, 'ddp'] and seed == 0")
    runs = runs[runs["part"].isin({2: ["final", "equal"], 4: ["four"]}[workers])].sort_values("step")
    tuned = runs[runs.method == ("ddp" if method == DEFAULT else method)].groupby("lr").val_loss.last()
    return runs[(runs.method == method) & (runs.lr == (math.nan if tuned.empty else tuned.idxmin()))]


def language(workers: int = 2) -> str:
    """Byte-level GPT: each optimizer and method at its best rate."""
    labels = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}
    methods = ["ddp", "bf16", "powersgd", "int4", *OURS, *UPDATES]
    medians = read("language_seconds").query("workers == @workers").set_index(["rate", "optimizer", "method"]).median_ms
    rows = []
    for optimizer, method in product(labels, methods):
        run = best_run(optimizer, method, workers)
        if run.empty:
            continue
        steps = [steps_to(run, target) for target in (2.6, 2.0)]
        label = "torch's PowerSGD" if method == "powersgd" else method
        label = under_adamw(label) if optimizer == "adamw" else label
        rows.append(
            [
                f"{label}, {labels[optimizer]}",
                f"{run.lr.iloc[0]:g}",
                f"{run.val_loss.iloc[-1]:.2f}",
                f"{run.sent_bytes_per_worker.iloc[-1] / run.step.iloc[-1] / 1e3:,.1f}",
                pair(*steps),
                *(pair(*(n * medians[rate, optimizer, method] / 1e3 for n in steps)) for rate in ("1gbit", "100mbit")),
            ]
        )
    heads = ["", "rate", "loss at the end", "kB per step", "steps to 2.6 / 2.0", "s, 1 Gbit/s", "s, 100 Mbit/s"]
    return table(heads, rows)


def language_ratios() -> str:
    """Byte-level GPT, AdamW: seconds to a loss over those of `topk updates`."""
    medians = read("language_seconds").query("optimizer == 'adamw'").set_index(["workers", "rate", "method"]).median_ms
    cases = [(workers, rate, target) for workers in (2, 4) for rate in ("100mbit", "1gbit") for target in (2.6, 2.0)]

    def seconds(method: str, workers: int, rate: str, target: float) -> float:
        run = best_run("adamw", method, workers)
        return math.nan if run.empty else steps_to(run, target) * medians[workers, rate, method]

    def cell(method: str, case: tuple[int, str, float]) -> str:
        ratio = seconds(method, *case) / seconds("topk updates", *case)
        return "" if math.isnan(ratio) else f"{ratio:.2f}"

    others = ["ddp", "bf16", "powersgd", "int4", *(method for method in UPDATES if method != "topk updates")]
    heads = [f"{workers} workers, {RATES[rate]}, to {target}" for workers, rate, target in cases]
    return table(["", *heads], [[method, *(cell(method, case) for case in cases)] for method in others])


def language_far() -> str:
    """Byte-level GPT, AdamW, over links with a round trip of 50 ms: ms of a step, and seconds to a loss."""
    seconds = read("language_seconds")
    medians = seconds[seconds["rate"] == FAR].set_index(["workers", "method"]).median_ms
    rows = []
    for method in AT_SITES:
        cells = []
        for workers in (2, 4):
            run, ms = best_run("adamw", method, workers), medians[workers, method]
            steps = [math.nan if run.empty else steps_to(run, target) for target in (2.6, 2.0)]
            cells += [f"{ms:.0f}", pair(*(n * ms / 1e3 for n in steps))]
        rows.append([method, *cells])
    return table(["", *(f"{n} workers, {what}" for n in (2, 4) for what in ("ms per step", "s to 2.6 / 2.0"))], rows)


def start() -> str:
    """Seconds from `fit` to the first batch, by whether ranks have the same weights."""
    medians = read("start").set_index(["contestant", "start"]).ms / 1e3
    names = {name: under_adamw(NAMES[name]) for name in ("ddp", "topk", "topk updates")}
    starts = list(dict.fromkeys(medians.index.get_level_values("start")))
    return table(["", *starts], [[text, *(f"{medians[name, x]:.1f}" for x in starts)] for name, text in names.items()])


def sites() -> str:
    """Trainer over links with a round trip of 50 ms: ms of a step, without and with Lightning's broadcast."""
    medians = read("sites").set_index("contestant").ms
    rows = [
        ["ddp", "–", digits(medians["ddp"])],  # Lightning's own, which always broadcasts
        *(
            [label, *(digits(medians[name + end]) for end in ("", ", with broadcast"))]
            for name, label in (
                ("topk", "topk updates"),
                ("topk, every 8", "topk updates, every 8"),
                ("sparseloco", "sparseloco"),
            )
        ),
    ]
    return table(["", "ms per step", "with Lightning's broadcast"], rows)


def pair(*numbers: float) -> str:
    """Write numbers side by side, a dash where there is none."""
    return " / ".join("–" if math.isnan(number) else f"{number:.0f}" for number in numbers)


SEED_HEADS = ["workers", "", "rate", "% of dense bytes", "seeds", "loss after 1,000 steps", "against `ddp`, by seed"]
SEED_HEADS += ["steps to 2.6", "steps to 2.0"]


def language_seeds() -> str:
    """Byte-level GPT, one rate for each number of workers: loss at the end, steps to 2.6 and 2.0, mean and range."""
    return table(SEED_HEADS, seed_rows())


def seed_rows() -> list[list[str]]:
    """Return the rows of `language_seeds`."""
    trained = read("language").query("optimizer == 'adamw'")
    rows, dense, losses = [], 1.0, {}
    chosen_runs = {**REPEATED, ("final", "adamw", GAUSSIANK): REPEATED["final", "adamw", "ddp"]}
    for (part, _, method), lr in sorted(chosen_runs.items(), key=lambda item: PARTS[item[0][0]].workers):
        same = trained[(trained["method"] == method) & (trained["lr"] == lr)].sort_values("step")
        chosen, begun = same[same["part"] == part], same[same["part"] == EARLY[part]]
        runs, starts = ([run for _, run in found.groupby("seed")] for found in (chosen, begun))
        ends = chosen.groupby("seed").val_loss.last()
        sent = runs[0].sent_bytes_per_worker.iloc[-1]
        if method == "ddp":
            dense, losses[part] = sent or dense, ends  # one worker sends nothing
        to = [[steps_to(run, target) for run in found] for found, target in ((starts, 2.6), (runs, 2.0))]
        places = zip((list(ends), *to), (3, 0, 0), strict=True)
        loss, *steps = (mean_and_range(found, decimals) if found else "" for found, decimals in places)
        cells = [loss, "" if method == "ddp" else against(ends, losses.get(part)), *steps]
        workers = str(chosen["workers"].iloc[0])
        method = {"thin": f"{method}, density 0.001", "alone": "nobody else"}.get(part, method)
        rows.append([workers, method, f"{lr:g}", digits(100 * sent / dense), str(len(runs)), *cells])
    return rows


def against(ends: pd.Series, dense: pd.Series | None) -> str:
    """Write by how many per cent losses differ from dense ones: the mean, and the difference of each seed."""
    if dense is None:
        return ""
    above = (100 * (ends / dense - 1)).dropna().sort_index()
    by_seed = f" ({', '.join(f'{each:+.1f}' for each in above)})" if len(above) > 1 else ""
    return f"{above.mean():+.1f} %{by_seed}"


def front() -> str:
    """The rows of `ddp` and of the default, for the front page."""
    rows = [row for row in seed_rows() if row[1] in ("ddp", DEFAULT)]
    heads, *rows = ([*row[:2], *row[3:-1]] for row in [SEED_HEADS, *rows])
    return table(heads, rows)


def front_result() -> str:
    """The result of the front page, in a paragraph."""
    rows = [row for row in seed_rows() if row[1] == DEFAULT]
    differences = [float(row[6].split()[0]) for row in rows]
    found, rate = paced(), "100mbit"
    text = (
        f"**Result.** With AdamW and {rows[0][0]} to {rows[-1][0]} workers, `topk_ddp` sends {rows[0][3]} to"
        f" {rows[-1][3]} % of the bytes of `ddp`. The loss of a small GPT ends {abs(min(differences)):.1f} % below to"
        f" {max(differences):.1f} % above that of `ddp` ([table](#results)). For GPT-2 small, four workers and"
        f" {PACED_LINKS[rate]}, we estimate {found[WITHIN].total[rate]:,.0f} s to a loss of 2.0. `ddp` takes"
        f" {found['ddp'].total[rate]:,.0f} s, and a bf16 hook {found['bf16'].total[rate]:,.0f} s."
    )
    return textwrap.fill(text, 140, break_on_hyphens=False) + "\n"


def growth() -> str:
    """The bytes of the default with more workers, after the density warm-up."""
    params, link = sum(param.numel() for param in GPT(LENGTH).parameters()), cost.Link(1e9)
    shares = {}
    for workers in (16, 32, 64):
        method, _ = resolve_updates("topk", None, ranks=workers)
        work = cost.Workload.even(params, 0.0, 0.0)
        ours, dense = (cost.step(each, work, workers, link, cost.Costs()).sent_bytes for each in (method, cost.DENSE))
        shares[workers] = 100 * ours / dense
    sixteen, *more = (f"{share:.0f} % with {workers}" for workers, share in shares.items())
    return (
        f"The share of the default grows with the number of workers: {sixteen}, {' and '.join(more)}. Sixteen"
        " were trained\nfor 300 steps only, and more were not trained.\n"
    )


def confirmed() -> pd.DataFrame:
    """The last losses and bytes of all confirmations, each training of `topk` beside its `ddp`."""
    last = read("confirmation").query("step == steps")
    keys = ["case", "workers", "steps", "lr", "seed"]
    dense = last.query("method == 'ddp'")[[*keys, "val_loss", "sent_bytes"]]
    ours = last.query("method != 'ddp'").merge(dense, on=keys, suffixes=("", "_of_ddp"))
    return ours.assign(above=100 * (ours.val_loss / ours.val_loss_of_ddp - 1))


def confirmation() -> str:
    """The default beside `ddp` with other settings: paired differences of the seeds."""
    names = {
        "clipped": "β₂ 0.95, clipped to norm 1",
        "other text": "C++ headers, new seeds",
    }
    rows = []
    found = confirmed().assign(place=lambda x: x["case"].map([*names].index))
    for key, runs in found.groupby(["place", "workers", "steps", "lr", "method"]):
        place, workers, steps, rate, method = key
        share = 100 * (runs.sent_bytes / runs.sent_bytes_of_ddp).mean()
        cells = (mean_and_range(list(losses), 3) for losses in (runs.val_loss_of_ddp, runs.val_loss))
        difference = f"{runs.above.mean():+.1f} % ({', '.join(f'{each:+.1f}' for each in runs.above)})"
        changed = [*names.values()][place]
        rows.append([changed, f"{workers}", f"{steps:,}", f"{rate:g}", method, f"{share:.2g}", *cells, difference])
    heads = [
        "changed",
        "workers",
        "steps",
        "rate",
        "method",
        "% of dense bytes",
        "loss of `ddp`",
        "loss",
        "against `ddp`, by seed",
    ]
    return table(heads, rows)


def front_confirmation() -> str:
    """The differences from `ddp` with other settings, in sentences."""
    found = confirmed().query("method == @DEFAULT")
    other = found.query("case == 'other text'").above
    parts = []
    for workers, x in found.query("case == 'clipped'").groupby("workers").above.agg(["min", "max"]).iterrows():
        least = f"{x['min']:+.1f} to " if x["min"] < x["max"] else ""
        parts.append(f"{least}{x['max']:+.1f} % with {workers}")
    page = "docs/frontier.md#other-text-seeds-and-clipping"
    return (
        f"The default was chosen with this text and these seeds. [Elsewhere]({page}), the loss of two workers differed"
        f" by {other.mean():+.1f} % with another\ntext ({other.size} seeds). Language models are often trained with"
        " gradients clipped to norm 1 and β₂ = 0.95. Then the differences were"
        f" {', '.join(parts[:-1])} and {parts[-1]} workers. These are one or two seeds, and 1,000 or 3,000 steps."
        " With four workers one seed of `ddp` had a sudden rise of its loss.\n"
    )


def front_batches() -> str:
    """The differences from dense training with larger batches, in a sentence."""
    above = [f"{100 * (ours / stock - 1):+.1f} % with {workers}" for workers, stock, ours in batch_losses()]
    return (
        f"With [eight times the batch](docs/frontier.md#larger-batches) and 300 steps, the loss differs by"
        f" {' and '.join(above)} workers (one seed).\n"
    )


def front_largest() -> str:
    """The largest trained model, in a sentence."""
    found = read("gpu_training")
    largest = found[(found.params == found.params.max()) & (found.method == DEFAULT)]
    last, seeds = largest.loc[largest.step.idxmax()], largest.seed.nunique()
    return (
        f"The largest model that was trained has {last.params / 1e6:.0f} M parameters, with {last.workers}"
        f" workers, [{seeds} seed](docs/gpu.md#trainings) and {last.step} of {last.steps:,} steps.\n"
    )


def fewer_bytes() -> str:
    """TopUp, SparseLoCo and DiLoCo with two workers by bytes, each at the best of its rates; one seed."""
    trained = read("language").query("optimizer == 'adamw' and workers <= 2 and seed == 0 and step == 1000")
    trained = trained[trained.part != "rates"]  # a finer grid than that of the other methods
    dense = trained.query("part == 'final' and method == 'ddp'").sort_values("val_loss").iloc[0]
    chosen = trained.method.str.contains("by default|loco") & (trained.method != GAUSSIANK)
    rows = []
    for _, runs in trained[chosen | (trained.workers == 1)].groupby(["method", "density"]):
        best = runs.loc[runs.val_loss.idxmin()]
        name, _, interval = best.method.partition(", every ")
        own = f"every {interval or LOCAL[name]} steps" if name in LOCAL else f"density {best.density:g}"
        name = "one worker alone" if best.workers == 1 else f"{name.split()[0]}, {own}"
        share = 100 * best.sent_bytes_per_worker / dense.sent_bytes_per_worker
        rates = ", ".join(f"{rate:g}" for rate in sorted(runs.lr))
        above = f"{100 * (best.val_loss / dense.val_loss - 1):+.1f} %"
        cells = digits(share, 2), f"{best.lr:g} of {rates}", f"{best.val_loss:.3f}", above
        rows.append((share, [name, *cells]))
    heads = ["", "% of dense bytes", "rate", "loss after 1,000 steps", "against `ddp`"]
    return table(heads, [row for _, row in sorted(rows, reverse=True)])


def lengths() -> str:
    """Final losses of trainings with other numbers of steps: `ddp`, the default, and other densities, by seed."""
    trained = read("language").query("part.str.contains('^[0-9]+ steps')")
    ends, rows = trained[trained.step == trained.steps], []
    for (steps, rate), runs in ends.groupby(["steps", "lr"]):
        dense = runs[runs.method == "ddp"].set_index("seed")
        kinds = runs.assign(is_dense=runs.method == "ddp").groupby(["is_dense", "density"], sort=False)
        for (is_dense, density), of_kind in sorted(kinds, key=lambda each: -each[1].sent_bytes_per_worker.max()):
            seeds = of_kind.set_index("seed")
            share = 100 * (seeds.sent_bytes_per_worker / dense.sent_bytes_per_worker).mean()
            above = 100 * (seeds.val_loss / dense.val_loss - 1).dropna()
            differences = f" ({', '.join(f'{each:+.1f}' for each in above)})" if len(above) > 1 and not is_dense else ""
            name = "ddp" if is_dense else f"topk, density {density:g}"
            cells = f"{rate:g}", digits(share, 2), mean_and_range(list(seeds.val_loss), 3)
            rows.append([f"{steps:,}", name, *cells, f"{above.mean():+.1f} %{differences}"])
    heads = ["steps", "", "rate", "% of dense bytes", "loss after the last step", "against `ddp`, by seed"]
    return table(heads, rows)


def rates() -> str:
    """Final losses of `ddp` and of the default at several learning rates; seed 0."""
    trained = read("language").query(
        "seed == 0 and optimizer == 'adamw' and method in ['ddp', 'topk by default']"
        " and part in ['final', 'four', 'eight', 'rates'] and step == steps"
    )
    rows = []
    for (workers, rate), runs in trained.groupby(["workers", "lr"]):
        loss = runs.groupby("method").val_loss.first()
        if len(loss) == 2:
            above = f"{100 * (loss['topk by default'] / loss['ddp'] - 1):+.1f} %"
            rows.append([f"{workers}", f"{rate:g}", f"{loss['ddp']:.3f}", f"{loss['topk by default']:.3f}", above])
    return table(["workers", "rate", "`ddp`", "topk by default", "against `ddp`"], rows)


def frontier() -> str:
    """Formats, warm-ups and ideas: steps to 2.6, loss, and bytes, of one seed or several."""
    rows = []
    runs = summary(read("frontier"))
    for (workers, steps), group in runs.groupby(["workers", "steps"]):
        by_rate = group.sort_values("val_loss").groupby(["variant", "density", "lr"], sort=False)
        for (idea, density, rate), seeds in by_rate:
            reached = seeds.steps_to_target
            rows.append(
                [
                    f"{workers}, {steps}",
                    f"{idea}, rate {rate:g}" if rate in (0.004, 0.008) else idea,
                    digits(density),
                    "–" if reached.isna().any() else mean_and_range(list(reached), 0),
                    mean_and_range(list(seeds.val_loss), 3),
                    digits(seeds.percent.mean()),
                ]
            )
    return table(["ranks, steps", "variant", "density", "steps to 2.6", "loss", "% of bytes"], rows)


def tails() -> str:
    """The change of the loss in the last 50 steps, of the default and of `ddp`, in a sentence."""
    runs = read("language").query("optimizer == 'adamw' and lr == 0.004 and part in ['final', 'four', 'eight']")
    loss = runs.pivot_table(index=["method", "part", "seed"], columns="step", values="val_loss")
    ours, stock = ((loss[1000] - loss[950])[name] for name in (DEFAULT, "ddp"))
    return (
        f"From step 950 to 1,000 the loss of the default rises by {ours.min():.3f} to {ours.max():.3f} in"
        f" {len(ours)} trainings. That of `ddp` falls by\n{-stock.max():.3f} to {-stock.min():.3f}. The residual then"
        " sends updates of the higher rates of earlier steps.\n"
    )


def by_node() -> str:
    """Losses of 16 ranks with and without nodes, beside dense training with the same seeds."""
    runs = [read(name).query("workers == 16") for name in ("frontier", "updates")]
    found = pd.concat(runs).query("density < 0.01 or variant == 'dense'")
    kinds = {"2-bit values, warm-up": ("16 × 1", 1), STEP_ALONE: ("2 × 8, ranks step alone", 8)}
    kinds |= {BY_NODE.format(count): (f"{16 // count} × {count}", count) for count in (8, 4, 2)}
    rows = []
    for lr, step in ((0.002, 300), (0.004, 300), (0.004, 1000)):
        ends = found.query("lr == @lr and step == @step").set_index(["variant", "seed"])
        stock = ends.loc["dense"]
        for variant, (name, ranks) in kinds.items():
            if variant not in ends.index:
                continue
            ours = ends.loc[variant]
            seeds = ours.index.intersection(stock.index)
            loss, dense = ours.val_loss[seeds].mean(), stock.val_loss[seeds].mean()
            # Each rank of a node sends its part of the node's payload.
            of_dense = 100 * ranks * ours.sent_bytes[seeds].mean() / stock.sent_bytes[seeds].mean()
            difference = f"{100 * (loss / dense - 1):+.1f} %"
            rows.append([f"{lr:g}, {step:,}", name, f"{len(seeds)}", f"{loss:.3f}", difference, digits(of_dense, 2)])
    return table(["rate, steps", "nodes × ranks", "seeds", "loss", "beside dense", "% of bytes"], rows)


def batches() -> str:
    """Losses of dense training and of the default with 64 sequences per rank; one seed."""
    rows = [
        [f"{workers}", f"{stock:.3f}", f"{ours:.3f}", f"{100 * (ours / stock - 1):+.1f} %"]
        for workers, stock, ours in batch_losses()
    ]
    return table(["workers", "dense", "topk by default", "difference"], rows)


def batch_losses() -> Iterator[tuple[int, float, float]]:
    """Yield the number of workers, and the losses of dense training and of the default, with 64 sequences per rank."""
    ends = read("frontier").query("seed == 0 and step == steps").set_index(["workers", "variant"]).val_loss
    for workers in (2, 4):
        stock, ours = (ends[workers, f"{name}, batches of 64"] for name in ("dense", "2-bit values, warm-up"))
        yield workers, stock, ours


def index_bits() -> str:
    """Bits of an index if its place were predicted."""
    found = read("index_bits").sort_values("step")
    first, last = found.iloc[0], found.iloc[-1]
    best, message = found[["best", "history"]].min(axis=1), found.sent + 2.5  # with the bits of a value
    shorter = 100 * (found.sent - best) / message
    return (
        f"- **Predicted indices.** An index takes {last.sent:.1f} bits. Entries are more frequent in some tensors, rows"
        f" and columns. If ranks used that\n  for a shorter code, an index would take {best.iloc[0]:.1f} bits after"
        f" {first.step} steps and {best.iloc[-1]:.1f} after {last.step}. So a message would be\n"
        f"  {shorter.iloc[0]:.0f} % shorter at first and {shorter.iloc[-1]:.0f} % at the end."
        f" (`python -m benchmarks.index_bits`)\n"
    )


def frontier_seconds() -> str:
    """Milliseconds of a step of updates, by format of values: median, and the middle three fifths."""
    rows = []
    for (kernels, density), group in read("frontier_seconds").groupby(["kernels", "density"], sort=False):
        by_format = group.set_index("value_format")
        cells = [f"{x.ms:.0f} ({x.ms_p20:.0f} to {x.ms_p80:.0f})" for _, x in by_format.loc[FORMATS].iterrows()]
        rows.append([kernels, f"{density:g}", *cells])
    return table(["loops in", "density", *FORMATS], rows)


FORMATS = ["float32", "int4", "int2"]


def auto(file: str = "auto") -> str:
    """Milliseconds of a step of `auto_ddp` and of its candidates: medians of the rounds, and its range."""
    found = read(file)
    names = [name for name in dict.fromkeys(found.strategy) if name != "auto"]
    rows = []
    for case, runs in found.groupby(AUTO_CASE, sort=False):
        workers, million, ours = case[2], case[1], runs.set_index("strategy").loc["auto"]
        cells = [f"{ms:.0f}" for ms in runs.set_index("strategy").ms[names]]
        spread = f" ({ours.to_best_min:.2f} to {ours.to_best_max:.2f})" if ours.to_best_min > 0 else ""
        measured = [f"{ours.ms:.0f} ({ours.ms_min:.0f} to {ours.ms_max:.0f})", f"{ours.to_best:.2f}{spread}"]
        rows.append([f"{workers}", auto_link(*case), f"{million:g}", *cells, *measured, str(ours.choice)])
    header = ["workers", "link", "million parameters", *(f"`{name}`" for name in names), "`auto`", "to the fastest"]
    return table([*header, "choice"], rows)


AUTO_CASE = ["rate", "million", "workers", "event"]


def auto_losses() -> str:
    """Final losses of `ddp` and of `auto_ddp` over a link that changes, and the choice every 50 steps."""
    found, rows = read("auto_losses"), []
    for seed, runs in found.groupby("seed"):
        ends = runs[runs.step == runs.steps].set_index("strategy").val_loss
        spans, mine = [], runs[runs.strategy == "auto"]
        for _, same in mine.groupby((mine.choice != mine.choice.shift()).cumsum()):
            spans.append(f"`{same.choice.iloc[0]}` at {same.step.iloc[0]} to {same.step.iloc[-1]}")
        above = f"{100 * (ends.auto / ends.ddp - 1):+.1f} %"
        rows.append([str(seed), f"{ends.ddp:.3f}", f"{ends.auto:.3f}", above, ", ".join(spans)])
    return table(["seed", "`ddp`", "`auto_ddp`", "against `ddp`", "choice, every 50 steps"], rows)


def auto_link(rate: str, million: float, workers: int, event: str) -> str:
    """Write the link of a case, and its event."""
    return rate if event == "no event" else event if "bit" in event else f"{rate}, {event}"


def auto_worst() -> str:
    """The largest ratios of `auto_ddp` to the fastest candidate and to stock `ddp`."""
    ours = read("auto").query("strategy == 'auto'")
    lines = []
    for column, other in (("to_best", "the fastest candidate"), ("to_ddp", "`ddp`")):
        worst = ours.loc[ours[column].idxmax()]
        case = f"{auto_link(*worst[AUTO_CASE])}, {worst.million:g} million parameters, {worst.workers} workers"
        rounds = f"{worst.rounds:.0f} rounds"
        text = f"The step time of `auto_ddp` was at most {worst[column]:.2f} of that of {other}"
        lines.append(f"- {text} ({case}, {rounds}).\n")
    return "".join(lines)


def auto_processors() -> str:
    """The processors of the rows."""
    ours = read("auto").query("strategy == 'auto'")
    texts = []
    for rows, which in ((ours[ours.to_best_min > 0], "with a range"), (ours[ours.to_best_min.isna()], "without")):
        found = [f"{len(same)} on {name}" for name, same in rows.groupby("cpu", sort=False)]
        texts += [f"{' and '.join(found)}, {which}"] if found else []
    return f"Measured rows: {'; '.join(texts)}.\n"


def sharded() -> str:
    """Final losses of replicas and shards, and bytes to other replicas."""
    found, rows = read("sharded"), []
    for name, runs in found[found.step == found.steps].groupby("contestant", sort=False):
        first = runs.iloc[0]
        sent = runs.sent_bytes_per_rank.mean() / first.steps
        shape = f"{first.replicas} × {first.shards}"
        rows.append([shape, str(name), mean_and_range(list(runs.val_loss), 3), f"{len(runs)}", f"{sent:,.0f}"])
    return table(["replicas × shards", "", "loss after 1,000 steps", "seeds", "bytes per step and rank"], rows)


def sharded_seconds() -> str:
    """Milliseconds of a step between two nodes, by link: median, and the middle three fifths."""
    rows = []
    for name, runs in read("sharded_seconds").groupby("contestant", sort=False):
        by_rate = runs.set_index("rate")
        cells = [f"{x.median_ms:.0f} ({x.p20_ms:.0f} to {x.p80_ms:.0f})" for _, x in by_rate.iterrows()]
        rows.append([str(name), *cells, f"{runs.sent_bytes_per_step.iloc[0]:,.0f}"])
    rates = [f"ms over {rate}" for rate in read("sharded_seconds").rate.unique()]
    return table(["four ranks on two nodes", *rates, "bytes per step and rank"], rows)


def sharded_memory() -> str:
    """Peak memory of a rank."""
    rows = [
        [each.contestant, f"{each.parameters / 1e6:.1f} million", f"{each.peak_mb:,.0f} MB"]
        for _, each in read("sharded_memory").iterrows()
    ]
    return table(["two replicas of two shards", "parameters", "peak memory of a rank"], rows)


class Paced(NamedTuple):
    """A method at a GPU's pace: steps to a loss, and by link the seconds of a step, to the loss, and at the start."""

    steps: float
    step: dict[str, float]
    total: dict[str, float]
    slowed: str


PACED_LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
WITHIN, AFTER, POWERSGD = "topk by default, within backward", "topk by default", f"torch's PowerSGD, rank {RANK}"


def paced() -> dict[str, Paced]:
    """Return the methods at a GPU's pace: steps of the GPT's trainings, and times with GPT-2 small's shapes."""
    # Name in trainings, name over links, steps between exchanges.
    pairs = [
        ("ddp", "ddp", 1),
        ("bf16", "bf16", 1),
        ("int4", "int4", 1),
        ("powersgd", "powersgd", 1),
        ("local_sgd", "ddp", 50),
        ("diloco", "ddp", 50),
        ("topk by default", "topk updates, int2", 1),
        ("topk by default", "topk updates, int2, within backward", 1),
    ]
    runs = read("network_gpt2").sort_values("dilate", ascending=False)
    runs = runs.drop_duplicates(["rate", "contestant"]).set_index(["rate", "contestant"])
    medians, found = runs.median_ms / 1e3, {}
    # Over 100 Mbit/s its first two steps, which are dense, would take half an hour: its bytes take longer there.
    nbytes = runs.tx_bytes_per_step["1gbit", "powersgd"]
    medians["100mbit", "powersgd"] = medians["1gbit", "powersgd"] + 8 * nbytes * (1 / 1e8 - 1 / 1e9)
    more = WARMUP_STEPS * sum(factor - 1 for factor in WARMUP_FACTORS)  # exchanges, in the density warm-up
    for method, timed, every in pairs:
        steps = steps_to(best_run("adamw", method, 4), 2.0)
        step, total = {}, {}
        for rate, bits in (("1gbit", 1e9), ("100mbit", 1e8)):
            step[rate] = medians[rate, timed] / every + medians[rate, "none"] * (1 - 1 / every)
            start = 2 * (medians[rate, "ddp"] - step[rate]) if method == "powersgd" else 0.0
            if timed.startswith("topk"):
                start = more * 8 * runs.tx_bytes_per_step[rate, timed] / bits
            total[rate] = steps * step[rate] + start
        slowed = " and ".join(f"{runs.dilate.get((rate, timed), runs.dilate['1gbit', timed]):g}" for rate in step)
        how = timed.rpartition(", ")[2] if "," in timed and not timed.endswith("int2") else ""
        name = POWERSGD if method == "powersgd" else method
        found[f"{name}, {how}" if how and how not in name else name] = Paced(steps, step, total, slowed)
    return found


def gpu_paced() -> str:
    """Seconds to a loss at a GPU's pace."""
    rows = []
    for name, each in paced().items():
        cells = []
        for rate in PACED_LINKS:
            cells += [digits(each.step[rate]), f"{each.total[rate]:,.0f}"]
        rows.append([name, f"{each.steps:.0f}", *cells, each.slowed])
    heads = ["", "steps to 2.0", "s a step, 1 Gbit/s", "s to 2.0", "s a step, 100 Mbit/s", "s to 2.0", "slowed down"]
    return table(heads, rows)


def gpu_paced_ratios() -> str:
    """Say how much faster the default is than the best of the others at a GPU's pace."""
    found, lines = paced(), []
    for rate, link in reversed(PACED_LINKS.items()):
        others = {name: each.total[rate] for name, each in found.items() if name not in (WITHIN, AFTER)}
        best = min(others, key=lambda name: others[name])
        within, after = (found[name].total[rate] / others[best] for name in (WITHIN, AFTER))
        lines.append(
            f"- Over {link} the default takes {100 * within:.0f} % of the time of {best}, the fastest of the others."
            f"\n  If it exchanges after the step, it takes {100 * after:.0f} %.\n"
        )
    nbytes = read("network_gpt2").query("contestant == 'int4' and rate == '100mbit'").tx_bytes_per_step.iloc[0]
    took = found["int4"].step["100mbit"]
    lines.append(
        f"- `int4` over 100 Mbit/s ran at full speed, so four ranks on two processors took {took:.1f} s a step. Its"
        f" bytes alone\n  take {8 * nbytes / 1e8:.1f} s.\n"
    )
    return "".join(lines)


def front_seconds() -> str:
    """Seconds to a loss at a GPU's pace, in a list."""
    found = paced()
    names = {
        "ddp": "`ddp`",
        "bf16": "a bf16 hook",
        POWERSGD: "torch's PowerSGD after backward",
        "local_sgd": "`local_sgd`",
    }
    return "".join(
        f"- {link}: `topk_ddp` {found[WITHIN].total[rate]:,.0f} ({found[AFTER].total[rate]:,.0f} if it exchanges after "
        "the step), "
        f"{', '.join(f'{shown} {found[name].total[rate]:,.0f}' for name, shown in names.items())}.\n"
        for rate, link in PACED_LINKS.items()
    )


def mean_and_range(numbers: Sequence[float], places: int) -> str:
    """Write the mean, and of several numbers the least and the largest."""
    mean = f"{sum(numbers) / len(numbers):.{places}f}"
    return mean if len(numbers) == 1 else f"{mean} ({min(numbers):.{places}f} to {max(numbers):.{places}f})"


def language_large() -> str:
    """The larger GPT: loss after about 1,000, 2,000 and 3,000 steps, steps to two losses, bytes of a step."""
    rows = []
    for method, runs in read("language").query("part == 'large'").groupby("method", sort=False):
        seeds = [run for _, run in runs.groupby("seed")]
        ends = [
            mean_and_range([run.set_index("step").val_loss[step] for run in seeds], 3) for step in (1050, 1950, 3000)
        ]
        steps = [mean_and_range([steps_to(run, target) for run in seeds], 0) for target in (2.0, 1.6)]
        sent = runs.sent_bytes_per_worker.iloc[-1] / runs.step.iloc[-1] / 1e3
        rows.append([under_adamw(str(method)), str(len(seeds)), *ends, *steps, f"{sent:,.1f}"])
    heads = ["", "seeds", "after 1,050 steps", "after 1,950", "after 3,000", "steps to 2.0", "to 1.6", "kB per step"]
    return table(heads, rows)


def momentum() -> str:
    """Digits, ResNet-20, SGD with momentum 0.9: gradients against updates, each at the better of two rates."""
    key = ["method", "exchange", "density", "max_lr"]
    runs = read("convergence_momentum").groupby(key, sort=False)
    means = runs["val_loss"].agg(["mean", "min", "max"]).join(runs["val_accuracy_percent"].mean())
    best = means.sort_values("mean").groupby(level=key[:3], sort=False).head(1).reset_index()
    rows = [
        [
            run.method,
            f"{run.exchange}s",
            f"{run.density:g}",
            f"{run.max_lr:g}",
            f"{run.mean:.3f} ({run.min:.3f} to {run.max:.3f})",
            f"{run.val_accuracy_percent:.1f} %",
        ]
        for run in best.sort_values(["density", "mean"], ascending=[False, True]).itertuples()
    ]
    return table(["method", "exchanges", "density", "rate", "loss", "accuracy"], rows)


def comparison(task: str) -> str:
    """All methods on one task, by loss: best rate, last loss, accuracy, bytes, seconds of 300 steps over two links."""
    found = finals(read(f"comparison_{task}")).sort_values("loss")
    times = read("comparison_seconds").query("task == @task").set_index(["rate", "contestant"])["median_ms"]
    rows, named = [], beside_gradients(found.contestant)
    for run in found.itertuples():
        seconds = [times[rate, run.contestant] * STEPS / 1e3 for rate in ("1gbit", "100mbit")]
        ends = "diverged" if math.isinf(run.loss) else f"{run.loss:.3f} ({run.low:.3f} to {run.high:.3f})"
        accuracy = "" if math.isinf(run.loss) else f"{run.accuracy:.1f} %"
        end = {TASKS[task].rates[0]: "↓ ", TASKS[task].rates[-1]: "↑ "}.get(run.lr, "")
        cells = [f"{end}{run.lr:g}", ends, accuracy, digits(run.sent_bytes / 1e6), *(digits(s) for s in seconds)]
        rows.append([named[run.contestant], *cells])
    heads = ["", "rate", "loss", "accuracy", "MB sent", "s, 1 Gbit/s", "s, 100 Mbit/s"]
    return table(heads, rows)


def comparison_fast() -> str:
    """Tasks to the methods that end at dense training's loss or below, with few of its bytes, and their seconds."""
    rows = []
    for task, heading in HEADINGS.items():
        found = finals(read(f"comparison_{task}")).set_index("contestant")
        dense = found.loc["dense"]
        few = found[(found.loss <= dense.loss) & (found.sent_bytes <= FEW_BYTES * dense.sent_bytes)]
        times = read("comparison_seconds").query("task == @task").set_index(["rate", "contestant"])["median_ms"]
        cells = []
        for rate in ("100mbit", "1gbit"):
            seconds = [digits(times[rate, name] * STEPS / 1e3) for name in few.index]
            span = f"{min(seconds, key=float)} to {max(seconds, key=float)}"
            cells += [digits(times[rate, "dense"] * STEPS / 1e3), span]
        named = beside_gradients(found.index)
        rows.append([heading, ", ".join(f"`{named[name]}`" for name in few.sort_values("loss").index), *cells])
    links = ("100 Mbit/s", "1 Gbit/s")
    heads = [f"s, {link}: {which}" for link in links for which in ("dense", "these methods")]
    return table(["task", "methods", *heads], rows)


def comparison_claims() -> str:
    """Each method's claim, and by how much its mean loss on each task differs from dense training's."""
    losses = {task: finals(read(f"comparison_{task}")).set_index("contestant")["loss"] for task in HEADINGS}

    def difference(task: str, name: str) -> str:
        if name not in losses[task]:
            return ""
        value = round(losses[task][name] - losses[task]["dense"], 2)
        return f"{value:+.2f}".replace("-", "−") if value else "0.00"

    def row(name: str, kind: str) -> list[str]:
        differences = [difference(task, name + kind) for task in HEADINGS]
        return [f"`{name}`{kind}", "" if kind else CLAIMS[name], *differences]

    present = {name for found in losses.values() for name in found.index}
    kinds = [(name, kind) for name in CLAIMS for kind in ("", " gradients", " updates") if name + kind in present]
    rows = [row(*both) for both in kinds]
    return table(["method", "the paper's claim", *HEADINGS.values()], rows)


def updates() -> str:
    """Variants of the exchange of updates: the mean over seeds, and their range."""
    rows = []
    runs = summary(read("updates").query("steps > @BEGUN"))
    for (workers, steps), group in runs.groupby(["workers", "steps"]):
        for (variant, density, lr), seeds in group.groupby(["variant", "density", "lr"], sort=False):
            reached = seeds.steps_to_target
            rows.append(
                [
                    f"{workers}, {steps}",
                    variant,
                    f"{density:g}",
                    f"{lr:g}",
                    str(len(seeds)),
                    "" if reached.isna().any() else mean_and_range(reached, 0),
                    mean_and_range(seeds.val_loss, 3),
                    digits(seeds.percent.mean()),
                ]
            )
    return table(["ranks, steps", "variant", "density", "rate", "seeds", "steps to 2.6", "loss", "% of bytes"], rows)


def optimizers() -> str:
    """Each optimizer at the rate that is best for dense training; gradients at the better of that rate and its half."""
    rows = []
    for name, runs in optimizers_summary(read("optimizers")).groupby("optimizer", sort=False):
        best = runs.loc[runs.groupby("exchanged").val_loss.idxmin()].set_index("exchanged")
        cells = [f"{best.lr['dense']:g}", f"{best.val_loss['dense']:.3f}"]
        for exchanged in ("updates", "gradients"):
            steps = best.dense_steps[exchanged]
            if math.isinf(best.val_loss[exchanged]):
                cells += ["–", ""]
                continue
            cells += [f"{best.val_loss[exchanged]:.3f}", "more" if math.isnan(steps) else f"{steps:.0f}"]
        by_default = best.val_loss.get(BY_DEFAULT)
        rows.append([str(name), *cells, f"{by_default:.3f}" if by_default else ""])
    heads = ["", "rate", "dense", "updates", "step", "gradients", "step", BY_DEFAULT]
    return table(heads, rows)


def updates_by_ranks() -> str:
    """Variants that were tried with 2, 4 and 8 ranks, of as many steps each: the mean over seeds, and their range."""
    begun = read("updates").query("step <= @BEGUN and lr == 0.002 and workers <= 8").assign(steps=BEGUN)
    runs, ranks, rows = summary(begun), (2, 4, 8), []
    for (variant, density), group in runs.groupby(["variant", "density"], sort=False):
        seeds = [group[group["workers"] == workers] for workers in ranks]
        if all(map(len, seeds)):
            cells = [
                (
                    "–" if each.steps_to_target.isna().any() else mean_and_range(each.steps_to_target, 0),
                    mean_and_range(each.val_loss, 3),
                )
                for each in seeds
            ]
            rows.append([variant, f"{density:g}", "/".join(str(len(each)) for each in seeds), *sum(cells, ())])
    heads = [f"{workers} ranks: {what}" for workers in ranks for what in ("steps to 2.6", f"loss after {BEGUN}")]
    return table(["variant", "density", "seeds", *heads], rows)


def volume() -> str:
    """Bytes that the busiest worker sends in a step."""
    formulas = {
        "dense": "2d(P − 1)/P",
        "topk": "2k(P − 1)",
        "gaussiank": "2k(P − 1), and room for 4k/3",
        "randk": "2k(P − 1)/P",
        "gtopk": "4k log₂P",
        "oktopk": "6k(P − 1)/P",
        "scalecom": "k + 2k(P − 1)/P",
        "topk, 8 a node": "2(k/8)(P/8 − 1)",
    }
    found = read("volume").query("index_format != 'int32'").set_index(["method", "ranks"]).busiest_bytes / 1e3

    def kilobytes(method: str, ranks: int) -> str:
        if (method, ranks) not in found:
            return ""
        value = found[method, ranks]
        return f"{value:.1f}" if value < 100 else f"{value:,.0f}"

    ranks = [2, 8, 32, 64]
    return table(
        ["", *(f"P = {number}" for number in ranks), "formula, in words"],
        ([method, *(kilobytes(method, number) for number in ranks), words] for method, words in formulas.items()),
    )


def selection() -> str:
    """Milliseconds of selection, input not in cache."""
    runs = read("selection_cpu").query("input == 'Gaussian' and density == 0.001 and cache == 'cold'")
    found = runs.set_index(["part", "contestant", "numel"]).ms
    contestants = {
        ("selection", "read (sum)"): "read once",
        ("selection", "torch.topk"): "`torch.topk(u.abs(), k)`",
        ("selection", "numpy partition"): "numpy partition and compare",
        ("selection", "GaussianK as published"): "GaussianK as published",
        ("selection", "TopK"): "**TopK**, exact",
        ("selection", "GaussianK"): "**GaussianK**",
        ("step", "add_"): "`e.add_(g)`",
        ("step", "torch.topk"): "whole step with torch.topk",
        ("step", "TopK"): "**whole step with TopK**: add, select, zero",
    }
    sizes = {1_000_000: "1 M", 10_000_000: "10 M", 25_000_000: "25 M", 100_000_000: "100 M"}
    return table(
        ["", *sizes.values()],
        ([label, *(digits(found[(*key, numel)]) for numel in sizes)] for key, label in contestants.items()),
    )


def soak() -> str:
    """Each long training with kills: the largest error, how fast the others ended, and how memory grows."""
    rows = []
    for kind, name in {"gradients": "soak", "updates": "soak_updates", "updates, delayed": "soak_delayed"}.items():
        runs = read(name)
        killed = runs[runs.outcome != "done"]
        last = runs[(runs.life == runs.life.max()) & (runs.fit >= 3)]
        growth = max(memory.iloc[-1] - memory.iloc[0] for _, memory in last.groupby("rank")["memory_mb"])
        share = (runs.error / runs.error_bound).max()
        cells = [f"{runs.last_step.max():,}", str(killed.life.nunique()), f"{killed.seconds_to_end.max():.1f}"]
        rows.append([kind, *cells, f"{runs.error.max():.1e}", f"{share:.1%}".replace("%", " %"), f"{growth:.1f}"])
    heads = [
        "exchange",
        "steps",
        "kills",
        "s until the others ended",
        "largest error",
        "of the rounding bound",
        "memory growth, MB",
    ]
    return table(heads, rows)


def callbacks() -> str:
    """Milliseconds that callbacks add to a step that logs."""
    runs = read("callbacks").query("step == 'logs'")
    step = runs.query("callback == 'none'").ms.item()
    return table(
        ["callback", f"ms added to a step of {step:.0f} ms that logs"],
        (
            [f"`{run.callback}`" if "all" not in run.callback else run.callback, f"{run.extra_ms:.0f}"]
            for run in runs.itertuples()
            if run.callback != "none"
        ),
    )


def launches() -> str:
    """Launches of a segment by method and number of ranks, and what they were before."""
    found = read("launches").set_index(["method", "exchanged", "gradients", "ranks", "state"]).launches
    cases = [
        ("gradient", "float32", 2),
        ("gradient", "float32", 8),
        ("gradient", "bfloat16", 2),
        ("update", "float32", 2),
        ("update, fused", "float32", 2),
    ]

    def cell(name: str, case: tuple[str, str, int], state: str) -> str:
        return str(found[(name, *case, state)]) if (name, *case, state) in found else ""

    heads = ["P = 2", "P = 8", "bf16 gradients", "updates, P = 2"]
    return table(
        ["method", *(head for case in heads for head in (case, "before")), "fused AdamW"],
        (
            [f"`{name}`", *(cell(name, case, state) for case in cases for state in ("now", "before"))][:-1]
            for name in lightning_sparse.METHODS
            if any((name, *case, "now") in found for case in cases)
        ),
    )


def clients() -> str:
    """Trainings with other packages, beside stock ddp."""
    found = read("clients")
    rows = []
    for row in found.itertuples():
        ours, stock = (str(value).replace("nan", "") for value in (row.resumed, row.ddp_resumed))
        resumed = {"True": "yes", "": "not tried", "False": "no" if stock == "True" else "no, nor with `ddp`"}[ours]
        seeds = f", {row.seeds:.0f} seeds" if row.seeds > 1 else ""
        losses = [digits(getattr(row, column)) for column in ("start", "ddp", "ours")]
        name = f"{row.client.removeprefix('optimizer-')} ({row.package} {row.version})"
        cells = [name, f"`{row.change}`" if "=" in row.change else row.change, f"{row.steps:.0f}{seeds}"]
        rows.append([*cells, *losses, "yes" if row.equal in (True, "True") else "no", resumed])
    heads = ["trained with", "changed", "steps", "first loss", "`ddp`", "ours", "equal weights", "resumes bit for bit"]
    return table(heads, rows)


def gpu_promises() -> str:
    """What a GPU has shown, by promise."""
    found = read("gpu")
    return table(
        ["promise", "part", "verdict", "date"],
        (
            [
                row.promise,
                f"`{row.part}`",
                f"**{row.verdict}**" if row.verdict == "does not hold" else row.verdict,
                f"{pd.Timestamp(row.date):%-d %B}",
            ]
            for row in found.itertuples()
        ),
    )


def gpu_segment() -> str:
    """Microseconds that a segment takes of a GPU and of its host."""
    found = read("segment").sort_values(["ranks", "method"], kind="stable")
    columns = ["plain_device_us", "device_us", "plain_host_us", "host_us", "beside_us"]
    return table(
        ["method", "ranks", "device, μs", "with graphs", "host, μs", "with graphs", "as fast", "beside products, μs"],
        (
            [f"`{row.method}`", f"{row.ranks}", *numbers[:4], f"{row.plain_host_us / row.host_us:.1f} ×", numbers[4]]
            for row in found[found.ranks > 1].itertuples()
            for numbers in [[f"{getattr(row, name):,.0f}" for name in columns]]
        ),
    )


def gpu_host() -> str:
    """How CUDA graphs change the host's time."""
    row = read("segment").set_index(["method", "ranks"]).loc[("topk", 2)]
    host = f"{row.plain_host_us:,.0f} to {row.host_us:,.0f} μs"
    device = f"{row.plain_device_us:.0f} to {row.device_us:.0f} μs"
    return f"""For `topk` with two ranks, graphs reduced the host's time from {host}.
The device's time fell from {device}, because the gaps between kernels are shorter. Other programs shared the
host, so compare the two columns of a row.
"""


def gpu_selection() -> str:
    """Milliseconds of a whole step of selection on a GPU."""
    found = read("selection_cuda").query("part == 'step' and density == 0.001")
    rows = []
    for numel, group in found.groupby("numel"):
        by = group.set_index("contestant")
        for name in ("torch.topk", "TopK", "TopK, CUDA graph", "GaussianK, CUDA graph"):
            row = by.loc[name]
            faster = by.ms["torch.topk"] / row.ms
            cells = [f"{row.ms:.3g}", f"{row.times_floor:.2f}", f"{row.limit:g}" if "graph" in name else ""]
            rows.append([f"{numel / 1e6:.0f} M", name, *cells, f"{faster:.1f} ×"])
    return table(["elements", "step", "ms", "floors", "limit", "as fast as torch.topk"], rows).replace("nan", "")


def gpt_steps() -> pd.DataFrame:
    """Return the steps of GPT-2 small on a GPU in bf16-mixed. `make gpu` also measures bf16-true."""
    return read("gpt_cuda").query("precision == 'bf16-mixed'")


def gpu_line() -> str:
    """What a GPU has shown, in a line."""
    found = gpt_steps().set_index("contestant")
    percent = 100 * found.added_ms / found.ms["ddp"]
    line = (
        f"**Status.** Run on one {found.device['topk']}, over NCCL with one rank. There `topk` adds"
        f" {percent['topk updates']:.0f} to {percent['topk updates within backward']:.0f} % to a step of GPT-2 small"
        " with AdamW, at density 0.001 and before any communication ([GPU status](docs/gpu.md)). Several GPUs have not"
        " been run. FSDP2 has only been run on CPUs."
    )
    return textwrap.fill(line, 140, break_on_hyphens=False) + "\n"


def gpu_gpt() -> str:
    """What methods add to a step of GPT-2 small on a GPU."""
    return table(
        ["contestant", "ms a step", "added, ms", "limit, ms"],
        (
            [under_adamw(row.contestant), f"{row.ms:.1f} ({row.ms_p20:.1f} to {row.ms_p80:.1f})"]
            + (["", ""] if row.contestant == "ddp" else [f"{row.added_ms:.2f}", f"{row.limit_ms:.2f}"])
            for row in gpt_steps().itertuples()
        ),
    )


def gpu_graphs() -> str:
    """The device memory that CUDA graphs take, beside the residual."""
    found = gpt_steps().set_index("contestant")
    shares = 100 * found.graph_bytes / (4 * found.params)
    return (
        f"- Graphs take memory: {shares['topk']:.0f} % of the residual's bytes for GPT-2 small, and"
        f" {shares['topk, whole model']:.0f} % if the whole model\n"
        "  is one segment. Blocks have 2 or 20 MB. If messages of many ranks would take more than"
        " 5 %, they are\n  unpacked without a graph.\n"
    )


def gpu_losses() -> str:
    """Losses of trainings with several ranks on one GPU, at the last step that both have reached."""
    found, rows = read("gpu_training"), []
    for (part, _, _), group in found.groupby(["part", "lr", "seed"]):
        by = group.set_index(["method", "step"])
        steps = {name: set(group[group.method == name].step) for name in group.method}
        last = max(set.intersection(*steps.values()))
        ours, dense = by.loc[("topk by default", last)], by.loc[("dense", last)]
        share = 100 * ours.sent_bytes / last / (2 * (ours.workers - 1) / ours.workers * 4 * ours.params)
        change = 100 * (ours.val_loss / dense.val_loss - 1)
        cells = [part, f"{ours.lr:g}", f"{last} of {ours.steps}", f"{dense.val_loss:.3f}", f"{ours.val_loss:.3f}"]
        rows.append([*cells, f"{change:+.1f} %".replace("-", "−"), f"{share:.2f} %"])
    heads = ["parameters, ranks", "learning rate", "after steps", "dense", "by default", "difference", "of dense bytes"]
    return table(heads, rows)


def gpu_links() -> str:
    """Step times of two ranks on one GPU over gloo."""
    found = read("gpu_links")
    rows = []
    for rate, group in found.groupby("rate"):
        ddp = group.set_index("method").median_ms["ddp"]
        for row in group.sort_values("median_ms", ascending=False).itertuples():
            times = f"{row.median_ms:.0f} ({row.p20_ms:.0f} to {row.p80_ms:.0f})"
            rows.append([rate, row.method, times, f"{ddp / row.median_ms:.1f} ×", f"{row.sent_bytes / 1e6:.1f}"])
    return table(["link", "method", "ms a step", "as fast", "MB a step"], rows)


def methods() -> str:
    """Payload, memory and source of each method."""
    rows = []
    for name in [*SENDS, *(name for name in lightning_sparse.METHODS if name not in SENDS)]:
        spec = lightning_sparse.METHODS[name]
        sends, words = SENDS.get(name, ((spec.make.__doc__ or "").partition("\n")[0].rstrip("."), ""))
        keeps = "residual" if spec.memory.error_feedback else "nothing"
        keeps = "momentum" if isinstance(spec.memory, Momentum) else keeps
        keeps += ", and entries that merges drop" * (name == "gtopk") + " (error feedback)" * (name == "topk")
        keeps += ", which decays" * (not spec.traits.conserves and spec.memory.error_feedback)
        place = "contrib" if name in CONTRIB else "core"
        rows.append([f"`{name}`", sends, words, keeps, spec.citation.partition(":")[0], place])
    return table(["method", "sends", "words per step and worker", "keeps", "source", "module"], rows)


def traits() -> str:
    """Properties of each method, from its row in `METHODS`."""
    rows = []
    for name, spec in lightning_sparse.METHODS.items():
        exact = spec.traits.exact
        options = None if exact is None else ", ".join(f"`{key}={value}`" for key, value in exact.items())
        rows.append(
            [
                f"`{name}`",
                f"`{lightning_sparse.method(name)}`",
                "yes" if spec.aggregator.averages else "no",
                "yes" if spec.traits.conserves else "no",
                "never" if options is None else options or "always",
            ]
        )
    return table(["method", "parts", "averages", "loses nothing", "equals the mean with"], rows)


def costs() -> str:
    """Bytes, time, memory and guarantees of each method."""
    measured = read("methods").set_index("method")
    rows = []
    for name, spec in lightning_sparse.METHODS.items():
        chosen, run = lightning_sparse.method(name), measured.loc[name]
        parts = (
            chosen.memory,
            chosen.aggregator,
            chosen.compressor,
            *([chosen.update_rule] if chosen.update_rule else []),
        )
        buffers = sum(spec.per != "segment" for part in parts for spec in part.state)
        # Updates also need a copy of the weights.
        needs = [f"{4 * (buffers + (chosen.update_rule is not None))} bytes"]
        needs += [f"{chosen.local_steps} steps"] * (chosen.local_steps > 1)
        needs += ["a separate learning rate"] * isinstance(spec.aggregator, MajorityVote)
        guarantees = ["a mean" if spec.aggregator.averages else RESULTS[type(spec.aggregator)]]
        guarantees += ["nothing lost"] * spec.traits.conserves
        if spec.traits.exact is not None:
            options = ", ".join(f"`{key}={value}`" for key, value in spec.traits.exact.items())
            guarantees.append(f"exact with {options}" if options else "exact")
        sends = run.bytes / 1e6
        rows.append(
            [
                f"`{name}`",
                digits(sends),
                digits(run.dense_bytes / run.bytes),
                digits(round(run.compress_ms, 1)),
                digits(round(run.compress_ms / run.copy_ms, 1), 2),
                digits(round(run.step_ms / run.copy_ms, 1), 2),
                ", ".join(needs),
                ", ".join(guarantees),
            ]
        )
    header = [
        "MB per step",
        "× fewer bytes",
        "ms to compress",
        "copies",
        "step, copies",
        "needs per element",
        "guarantees",
    ]
    return table(["method", *header], rows)


def robust() -> str:
    """Test accuracy of aggregators and election coding, with and without attacks."""
    found = read("signsgd").fillna("").set_index(["contestant", "attack", "alpha"]).accuracy_percent
    places = {"no attack": ("", 0.0)}
    for attack, label in (("negate", "negated"), ("flip", "flipped"), ("scale", "scaled")):
        places |= {f"{label}, α = {alpha:g}": (attack, alpha) for alpha in (0.25, 0.45)}
    names = found.index.get_level_values("contestant").unique()
    return table(["", *places], ([name, *(f"{found[(name, *at)]:.0f}" for at in places.values())] for name in names))


def capital(sentence: str) -> str:
    """Return a sentence with a capital letter, unless it begins with a letter of a formula."""
    return sentence[0].upper() + sentence[1:] if sentence[1].isalpha() else sentence


def verdict(name: str) -> str:
    """Whether a paper's finding held: a list of sentences after each "Held here" or "Did not hold here"."""
    said = finding(name).verdict(load(finding(name).path(ROOT / "benchmarks" / "results")))
    lines = []
    for part in re.split(r"(Held here|Did not hold here): ", said)[1:]:
        if part in ("Held here", "Did not hold here"):
            lines += ["", f"**{part}:**", ""]
        else:
            lines += [f"- {capital(sentence)}" for sentence in re.split(r"(?<=\.) (?=[A-Z])", part.strip())]
    return "\n".join(lines[1:]) + "\n"


def memsgd_errors() -> str:
    """Final errors of Mem-SGD and other methods, and the bits that SGD needs for them, as a ratio."""
    found = load(ROOT / "benchmarks" / "results" / "memsgd.csv")
    data = list(found["problem"].unique())
    curves = {place: memsgd.curves(found, place) for place in data}
    saved = {place: [memsgd.savings(found, place, to=to) for to in ("SGD", "itself")] for place in data}
    rows = []
    for name in dict.fromkeys(label for place in data for label in curves[place]):
        row = [name]
        for place in data:
            curve = curves[place].get(name)
            last = None if curve is None else curve.iloc[-1]
            row += [""] * 5 if last is None else [f"{last.error:.3f}", f"{last.error_last:.3f}"]
            row += [] if last is None else [f"{last.bits / 8e3:,.0f}", *(digits(to[name]) for to in saved[place])]
        rows.append(row)
    columns = ("error", "error of the last weights", "kB sent", "bits of SGD, ×", "bits of SGD to its final error, ×")
    return table(["", *(f"{name}: {column}" for name in data for column in columns)], rows)


def memsgd_speed_up() -> str:
    """Speed-up of several processes on one vector, published and here."""
    found = load(ROOT / "benchmarks" / "results" / "memsgd.csv")
    ours = [memsgd.speed_up(found, data) for data in found["problem"].unique()]
    heads = ["", "epsilon, 2 cores", "epsilon, 24", "RCV1, 2", "RCV1, 24"]
    heads += [f"here, {data}, {found['processes'].max()} processes" for data in found["problem"].unique()]
    rows = []
    for name, there in SPEED_UP.items():
        cells = [", ".join(f"{times:.1f}" for label, times in each.items() if label.startswith(name)) for each in ours]
        rows.append([name if name == "SGD" else f"{name} k", *there, *cells])
    return table(heads, rows)


def best_of(name: str, key: Sequence[str]) -> pd.DataFrame:
    """Return a finding's accuracy and loss on the digits, each method at its best rate."""
    found = load(ROOT / "benchmarks" / "results" / f"{name}.csv")
    return best_rates(found[found["accuracy_percent"].notna()], key)


def points(value: float) -> str:
    """Write a difference in per cent, with its sign."""
    return f"{value:+.1f}".replace("-", "−")


def error_feedback() -> str:
    """Accuracy with error feedback and without, published and here: SGD's, and what the others differ from it by."""
    ours = best_of("error-feedback", ["method"]).accuracy_percent
    cells = {name: points(ours[name] - ours["SGD"]) for name in FEEDBACK} | {"SGD": f"{ours['SGD']:.1f} %"}
    places = ["VGG-19, CIFAR-10", "ResNet-18, CIFAR-100", "the same, batches of 8", "here, digits"]
    return table(["", *places], ([name, *there, cells[name]] for name, there in FEEDBACK.items()))


def bits() -> str:
    """Accuracy by bits, published and here."""
    ours = best_of("terngrad-qsgd", ["method"]).accuracy_percent
    sent = read("terngrad-qsgd").groupby("method").bits.first()
    head = ["", "published", "bits here", f"here, against {ours['SGD']:.1f} %"]
    return table(
        head, ([name, there, f"{sent[name]:.1f}", points(ours[name] - ours["SGD"])] for name, there in BITS.items())
    )


def layer_wise() -> str:
    """What layer by layer gains, published and here."""
    ours = best_of("layer-wise", ["method", "compressed"])
    rows = []
    for name, there in LAYER_WISE.items():
        layer, model = ours.loc[(name, "layer")], ours.loc[(name, "model")]
        gain = points(layer.accuracy_percent - model.accuracy_percent)
        rows.append([f"`{name}`", there, gain, f"{digits(layer.loss)} / {digits(model.loss)}"])
    return table(["", "published", "points of accuracy here", "loss here, layer / model"], rows)


def private() -> str:
    """Private names of torch and Lightning, from the functions of `_compat.py` that use them."""
    rows = []
    tree = ast.parse((ROOT / "lightning_sparse" / "_compat.py").read_text())
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        doc = ast.get_docstring(function) or ""
        names = {}  # in the order of the text
        for node in ast.walk(function):
            texts = [getattr(node, key, None) for key in ("attr", "value", "module")]
            found = [re.search(r"(?<!\w)_[a-zA-Z]\w+$", text) for text in texts if isinstance(text, str)]
            names |= dict.fromkeys(name[0] for name in found if name)
        library = re.search(r"private in (torch|Lightning) ([\d.]+\d)\D+ ([\d.]+\d)", doc, re.IGNORECASE)
        names.pop("_getframe", None)  # Python's
        if names and not library:
            raise ValueError(f"_compat.{function.name} uses {[*names]}: state 'Private in torch 2.8 to 2.15', or so.")
        if library:
            purpose = re.sub(r" Private in .*", "", doc.partition("\n")[0])
            where = "PyTorch" if library[1] == "torch" else "Lightning"
            listed = ", ".join(f"`{name}`" for name in names) or "–"
            rows.append([where, listed, purpose, f"{library[2]} to {library[3]}"])
    return table(["of", "names", "purpose", "tested"], sorted(rows, key=lambda row: row[0] != "PyTorch"))


DRAWING = (comparisons, frontiers, languages, maps, networks, scalings, variants)
TABLES: dict[str, Callable[[], str]] = {
    "front": front,
    "front-result": front_result,
    "front-limits": lambda: (
        textwrap.fill(growth() + front_confirmation() + front_batches() + front_largest(), 140, break_on_hyphens=False)
        + "\n"
    ),
    "confirmation": confirmation,
    "front-seconds": front_seconds,
    "fewer-bytes": fewer_bytes,
    "lengths": lengths,
    "rates": rates,
    "frontier": frontier,
    "by-node": by_node,
    "batches": batches,
    "tails": tails,
    "index-bits": index_bits,
    "auto": auto,
    "auto-hsdp": partial(auto, "auto_hsdp"),
    "auto-worst": auto_worst,
    "auto-processors": auto_processors,
    "auto-losses": auto_losses,
    "sharded": sharded,
    "sharded-memory": sharded_memory,
    "sharded-seconds": sharded_seconds,
    "frontier-seconds": frontier_seconds,
    "gpu-paced": gpu_paced,
    "gpu-paced-ratios": gpu_paced_ratios,
    "network": network,
    "network-adamw": network_adamw,
    "network-workers": network_workers,
    "network-10gbit": network_10gbit,
    "seconds": seconds,
    "scaling": scaling,
    "scaling-gains": scaling_gains,
    "scaling-error": scaling_error,
    "accuracy": accuracy,
    "language": language,
    "language-seeds": language_seeds,
    "language-ratios": language_ratios,
    "language-far": language_far,
    "sites": sites,
    "start": start,
    "momentum": momentum,
    "language-four": partial(language, workers=4),
    "language-large": language_large,
    "within-backward": within_backward,
    **{f"comparison-{task}": partial(comparison, task) for task in TASKS},
    "comparison-fast": comparison_fast,
    "comparison-claims": comparison_claims,
    "updates": updates,
    "optimizers": optimizers,
    "updates-by-ranks": updates_by_ranks,
    "volume": volume,
    "selection": selection,
    "soak": soak,
    "callbacks": callbacks,
    "clients": clients,
    "launches": launches,
    "gpu-promises": gpu_promises,
    "gpu-segment": gpu_segment,
    "gpu-host": gpu_host,
    "gpu-selection": gpu_selection,
    "gpu-gpt": gpu_gpt,
    "gpu-graphs": gpu_graphs,
    "gpu-losses": gpu_losses,
    "gpu-links": gpu_links,
    "gpu-line": gpu_line,
    "methods": methods,
    "traits": traits,
    "costs": costs,
    "private": private,
    "robust": robust,
    "memsgd": memsgd_errors,
    "memsgd-speed-up": memsgd_speed_up,
    "error-feedback": error_feedback,
    "bits": bits,
    "layer-wise": layer_wise,
    **{f"reproduce-{name}": partial(verdict, name) for name in FINDINGS},
}


FIGURES = [
    *(figure for part in DRAWING for figure in part.FIGURES),
    *(figure for figure in selections.figures() if figure.name == "selection_cpu"),
    *(finding(name).figure for name in FINDINGS),
]
"""All figures of the pages, in benchmarks/results/."""


def filled(text: str) -> str:
    """Return a page with its tables as the CSV files and `METHODS` have them."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main() -> None:
    """Write the pages and figures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page or a figure is out of date")
    parser.add_argument("--tables", action="store_true", help="leave the figures as they are")
    args = parser.parse_args()
    check = args.check
    results = ROOT / "benchmarks" / "results"
    stale = [f"benchmarks/results/{figure.name}.png" for figure in FIGURES if not figure.is_current(results)]
    for figure in [] if check or args.tables else FIGURES:
        figure.write(results, strict=True)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        if (new := filled(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new)
    if check and stale:
        raise SystemExit(f"Out of date: {', '.join(stale)}. Run: python docs/render.py")


if __name__ == "__main__":
    main()
