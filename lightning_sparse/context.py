"""The input of a method beside its tensors (`Context`), and the state it declares to keep (`StateSpec`).

Methods are frozen configuration. Whatever changes with time comes in a `Context`: no part replaces its fields, but the
tensors in state and stats are changed in place. Whatever is kept from step to step lies in the segment's state,
declared beforehand, so that checkpoints need not know the method.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.payout import Payout
from lightning_sparse.layout import Segment

GOLDEN = 2654435769  # 2³² over the golden ratio
State = dict[str, Tensor]
"""One segment's state: name of a `StateSpec` to tensor."""


@dataclass(frozen=True)
class StateSpec:
    """Declares one tensor per segment that a memory, an aggregator or a compressor keeps.

    Attributes:
        name: key in the segment's `State`.
        per: "element" is a 1-D fp32 tensor of the segment's length, zeros at first, saved parameter by parameter, so
            that another granularity can load it. "segment" is a tensor of any shape that the method itself puts there;
            it is lost when the partition changes. "scratch" is an fp32 buffer of the segment's length that is not
            saved.
        resize: what a change of the number of ranks does to the tensors. "sum": the mean over the ranks is kept (error
            feedback). "replicate": equal on all ranks, and copied to new ones.
            "drop": starts at zero, or absent.
    """

    name: str
    per: Literal["element", "segment", "scratch"] = "element"
    resize: Literal["sum", "replicate", "drop"] = "sum"


@dataclass(frozen=True)
class Context:
    """One segment in one step.

    Attributes:
        segment: which elements are exchanged.
        step: number of reductions done before this one.
        density: fraction of entries to send now; None asks the compressor for its own.
        scale: factor on the gradients before they are added to the residual: 1 / loss scale times local clipping.
        state: the segment's state; methods change its tensors in place.
        seed: the run's seed, equal on all ranks.
        rank: this rank.
        stats: block statistics of u, filled in by the memory while it forms u; None where the compressor asks for none.
        payout: where optimizers' updates are exchanged: the sum of all later updates that the momentum of this rank's
            optimizer would make without new gradients. The memory adds it to u; where entries are applied, the momentum
            is set to zero. None: nothing is paid out.
    """

    segment: Segment
    step: int = 0
    density: float | None = None
    scale: float = 1.0
    state: State = field(default_factory=dict)
    seed: int = 0
    rank: int = 0
    stats: BlockStats | None = None
    payout: Payout | None = None

    @staticmethod
    def of(numel: int, **fields: Any) -> Context:
        """Return the context of a vector of `numel` elements outside of training."""
        return Context(Segment(0, ("u",), ((numel,),), 0), **fields)

    def turn(self, count: int) -> int:
        """Return whose turn it is, of `count`: each once in every `count` steps.

        Each has as many turns, too, in every n-th step alone, where step % count might never change: where several
        optimizers exchange in turn, a segment sees no other steps. For that the order begins elsewhere in each round,
        by multiples of the golden ratio, which are spread evenly (Weyl 1916).
        """
        rounds, place = divmod(self.step, count)
        return (place + self.segment.index + (rounds * GOLDEN % 2**32 * count >> 32)) % count

    def key(self, *, shared: bool) -> int:
        """Return 64 bits to draw random numbers by, a function of (seed, step, segment) and, unless `shared`, the rank.

        Nothing about such numbers needs saving, and the global generator is not touched.
        """
        # A part of a segment has the segment's index, and draws its own numbers.
        key = (self.seed, self.step, self.segment.index, self.segment.start, "shared" if shared else self.rank)
        # Two checksums of different text give 64 bits; crc32 alone would give every 2³² th key the same numbers.
        low, high = zlib.crc32(repr(key).encode()), zlib.crc32(repr(("high", *key)).encode())
        return high << 32 | low

    def generator(self, *, shared: bool) -> torch.Generator:
        """Return a generator on the host, seeded with `key`; `add_uniform_` draws on the device."""
        return torch.Generator().manual_seed(self.key(shared=shared))
