"""How few bytes do exchanged updates need? Formats of values, densities, warm-ups, and ideas that nobody had tried.

The GPT, the data, the schedule and the controls are those of `benchmarks.updates`, with ranks as threads; only what
differs is here. `updates.csv` has the controls: dense training, one rank alone, and fp32 values.

    python -m benchmarks.frontier            # train what `frontier.csv` lacks of `TRIED`, in its order
    python -m benchmarks.frontier --figure   # draw, and print steps, losses and bytes
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks import updates
from benchmarks.harness import plots, results
from benchmarks.harness.baselines import Wrapped
from benchmarks.harness.results import Row
from benchmarks.harness.training import Data, Trainee, attach_thread, text, train_threads
from benchmarks.language import BATCH_SIZE, LENGTH, VAL_SEQUENCES
from benchmarks.updates import EVERY, STEPS, Run, Trial, Variant
from examples.models.gpt import GPT
from lightning_sparse import Comm, Method, Residual, TwoPass, UpdateRule
from lightning_sparse.compressors import ChunkTopK, TopK
from lightning_sparse.compressors.base import Entries, Payload, Update
from lightning_sparse.compressors.encoding import decode_indices, decode_values, encode_indices, encode_values, value_bytes
from lightning_sparse.context import Context
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.memory import DecayingResidual
from lightning_sparse.methods import METHODS, WARMUP_FACTORS, WARMUP_STEPS

ROW = 64
"""Values that share a magnitude in one bit."""


@dataclass(frozen=True)
class OneBit(TopK):
    """Top-k entries as a sign each, and the mean magnitude of 64 of them, in bf16: 1.25 bits."""

    exposes_nonfinite = False

    def encode(self, entries: Entries, ctx: Context) -> tuple[Payload, Entries]:
        numel = ctx.segment.numel
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
    """Groups of neighbouring elements, those of the largest norm: an index stands for all of a group."""

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
        chosen = decode_indices(payload[3:], payload[0], many, k, self.index_format)
        values = decode_values(payload[1:3], k * self.group, self.value_format)
        indices = (chosen.unsqueeze(-1) * self.group + torch.arange(self.group)).flatten(-2)
        return Entries(indices.clamp(max=numel), torch.where(indices < numel, values, 0))


@dataclass(frozen=True)
class Slices(TopK):
    """In each step entries of one slice of the elements only, in turn: indices of a slice take fewer bits."""

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
class Scored(TopK):
    """Entries of the largest |u| · v^power, with Adam's second moment v: where a change of the loss is largest."""

    power: float = 0.25

    exposes_nonfinite = False

    def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
        second = ctx.payout.second if ctx.payout is not None else None
        if second is None or any(v is None for v in second):
            return topk_indices(u, k)
        moments = torch.cat([v.flatten() for v in second if v is not None])
        return topk_indices(u.abs() * moments.pow(self.power), k)

    def block_stats(self, numel: int, density: float | None = None) -> None:
        return None


WARMED = tuple(WARMUP_FACTORS), WARMUP_STEPS
"""The default warm-up: factors on the density, and exchanges for each."""


@dataclass(frozen=True)
class Idea:
    """A method, what density it has at first, and what else differs."""

    compressor: Callable[..., Any] = functools.partial(TopK, value_format="int2")
    warmup: tuple[tuple[float, ...], int] = ((), 1)  # factors on the density, and exchanges for each
    variant: Variant = Variant()  # of `benchmarks.updates`: its rule, aggregator, √P and payout
    decay: float = 1.0  # what a residual is multiplied with in each step
    flush: int = 0  # after so many steps everything is sent


def values(form: str, **options: Any) -> Idea:
    return Idea(functools.partial(TopK, value_format=form), **options)


ROOT = Variant(rule=UpdateRule(rescale=False), root=True)
IDEAS = {
    **{f"{bits}-bit values": values(f"int{bits}") for bits in (8, 4, 2)},
    "1-bit values": Idea(OneBit),
    "bf16 values": values("bfloat16"),
    "fp32 values, warm-up": values("float32", warmup=WARMED),
    "4-bit values, warm-up": values("int4", warmup=WARMED),
    "2-bit values, warm-up": Idea(warmup=WARMED),
    "1-bit values, warm-up": Idea(OneBit, warmup=WARMED),
    "2-bit values, warm-up, √P": Idea(warmup=WARMED, variant=ROOT),
    "1-bit values, √P": Idea(OneBit, variant=ROOT),
    **{
        f"two passes, the second {second} times as dense, 2-bit values, warm-up": Idea(
            warmup=WARMED, variant=Variant(aggregator=TwoPass(second=second))
        )
        for second in (1, 3, 8)
    },
    "groups of 4, 2-bit values": Idea(Neighbours),
    "slices in turn, 4-bit values": Idea(functools.partial(Slices, value_format="int4")),
    "chosen by |u| · v^¼, 1-bit values": Idea(Scored),
    "residual decays by 0.99": Idea(decay=0.99),
    "residual decays by 0.999": Idea(decay=0.999),
    "all sent every 100 steps": Idea(flush=100),
}
