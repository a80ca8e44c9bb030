"""What a method is told about the moment (`Context`) and what it may remember (`Entry`, `State`).

Methods are frozen configuration. Whatever changes with time comes in a `Context`; whatever is kept from step to step
is an entry of the segment's state, declared beforehand so that checkpoints can be written without knowing the method.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_sparse.kernels.scan import Scan

State = dict[str, Tensor]
"""One segment's state: entry name to tensor."""


@dataclass(frozen=True)
class Entry:
    """Declares one thing that a memory, an aggregator or a compressor keeps.

    Attributes:
        name: key in the segment's `State`.
        per: "element" is a 1-D fp32 tensor of the segment's length, zeros at first, saved parameter by parameter, so
            that another granularity can load it. "segment" is a tensor of any shape that the method itself puts there;
            it is lost when the partition changes. "scratch" is an fp32 buffer of the segment's length that nobody
            saves.
        resize: what a change of the number of workers P to P' does to it. "sum": the sum over all ranks, divided by
            the number of ranks, stays (error feedback). "replicate": equal on all ranks, stays so. "drop": starts
            anew.
    """

    name: str
    per: Literal["element", "segment", "scratch"] = "element"
    resize: Literal["sum", "replicate", "drop"] = "sum"


@dataclass
class Context:
    """What a method may know beside its input, for one segment in one step.

    Attributes:
        step: number of reductions done before this one.
        density: fraction of entries to send now; None asks the compressor for its own.
        lr: learning rate that the optimizer will apply, where the user gave one.
        scale: factor on the gradients before anything is added: 1 / loss scale, and what local clipping asks for.
        state: the segment's state; methods change it in place.
        seed: the run's seed, equal on all ranks.
        segment: index of the segment.
        rank: this rank.
        fingerprint: 32-bit checksum of method, seed, step, density, learning rate, segment, layout and `settled`, which
            ranks compare.
        settled: whether the ranks have exchanged this segment by the same aggregator the last time, since their state
            was set up, loaded or reset. Then they count steps alike; density and learning rate may still differ.
        scan: what the compressor wants to know of u; filled in by a memory that makes u in one pass.
        cache: what a part wants to find again within the same step.
        sent: the payload that a sparsifier has made, and the entries that come out of it.
        broken: on CUDA, what the compressor knows of elements that are not finite: see `aggregators/checks.py`.
        sound: on CUDA, whether all that this rank has heard says that the step can be taken, a bool scalar on the
            device. None where the host knows that.
        later: what the host has to look at one step later, because it would have to wait for it now.
    """

    step: int = 0
    density: float | None = None
    lr: float | None = None
    scale: float = 1.0
    state: State = field(default_factory=dict)
    seed: int = 0
    segment: int = 0
    rank: int = 0
    fingerprint: int = 0
    settled: bool = False
    scan: Scan | None = None
    cache: dict[str, Tensor] = field(default_factory=dict)
    sent: tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]] | None = None
    broken: Tensor | None = None
    sound: Tensor | None = None
    later: list[Callable[[], None]] = field(default_factory=list)

    def generator(self, *, shared: bool) -> torch.Generator:
        """Return random numbers that are a function of (seed, step, segment) and, unless `shared`, of the rank.

        They are made on the host. Nothing about them needs saving, and the global generator is not touched.
        """
        key = (self.seed, self.step, self.segment, "shared" if shared else self.rank)
        # Two checksums of different text give 64 bits; crc32 alone would give every 2³² th key the same numbers.
        low, high = zlib.crc32(repr(key).encode()), zlib.crc32(repr(("high", *key)).encode())
        return torch.Generator().manual_seed(high << 32 | low)
