"""A method's input besides its tensors (`Context`), and the state that it declares (`StateSpec`).

Methods are frozen configuration. All values that change during training are in a `Context`. No code replaces its
fields, but methods change the tensors of `state` and `stats` in place. A method declares in advance the state that it
keeps between steps, so that checkpoints are independent of the method.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.graphs import NO_GRAPHS, Graphs
from lightning_sparse.kernels.payout import Payout
from lightning_sparse.layout import Segment

GOLDEN = 2654435769  # 2³² over the golden ratio
State = dict[str, Tensor]
"""One segment's state: tensors by the name of their `StateSpec`."""


@dataclass(frozen=True)
class StateSpec:
    """Declares one tensor per segment that a memory, an aggregator or a compressor keeps.

    Attributes:
        name: key in the segment's `State`.
        per: kind of tensor. "element": a 1-D fp32 tensor of the segment's length, initially zero. It is saved parameter
            by parameter, so that another granularity can load it. "segment": a tensor of any shape that the method
            creates; it is lost if the partition changes. "scratch": an fp32 buffer of the segment's length that is not
            saved.
        resize: effect of a new number of ranks on the tensors. "sum": the mean over the ranks is preserved (error
            feedback). "mean": a new rank takes the mean over some old ranks, or an old rank's (momentum). "replicate":
            the tensor is equal on all ranks and is copied to new ranks. "drop": it starts at zero, or absent.
    """

    name: str
    per: Literal["element", "segment", "scratch"] = "element"
    resize: Literal["sum", "mean", "replicate", "drop"] = "sum"


class Replayable:
    """A part of a method whose kernels may be replayed as CUDA graphs."""

    depends_on_step: bool = True
    """Whether kernels depend on more than their tensors, the segment and the density, such as random numbers, the step,
    or values that the host reads. If not, they are replayed. Subclasses do not inherit the value."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "depends_on_step" not in vars(cls):
            cls.depends_on_step = True


@dataclass(frozen=True)
class Context:
    """One segment in one step.

    Attributes:
        segment: the exchanged elements.
        step: number of reductions before this one.
        density: fraction of entries to send in this step; None selects the compressor's own.
        scale: factor on the gradients before they are added to the residual: 1 / loss scale times local clipping.
        state: the segment's state; methods change its tensors in place.
        seed: seed of the run, equal on all ranks.
        rank: this rank.
        stats: block statistics of u, which the memory fills in while it computes u; None if the compressor needs none.
        payout: momentum payout, if optimizer updates are exchanged: the weight change that the momentum of this rank's
            optimizer would still make without new gradients. The memory adds it to u. The momentum of
            applied entries is set to zero. None: there is no payout.
        graphs: CUDA graphs of this segment's kernels.
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
    graphs: Graphs = NO_GRAPHS

    @staticmethod
    def of(numel: int, **fields: Any) -> Context:
        """Return a context for a vector of `numel` elements outside training."""
        return Context(Segment(0, ("u",), ((numel,),), 0), **fields)

    def turn(self, count: int) -> int:
        """Return the number, from 0 to `count` − 1, whose turn this step is; each has one turn in every `count` steps.

        Turns stay balanced even if the segment is exchanged only in every n-th step, so that `step % count` may be
        constant. This happens if several optimizers exchange in turn. Each round therefore starts at another number: an
        offset by multiples of the golden ratio, which are spread evenly (Weyl 1916).
        """
        rounds, place = divmod(self.step, count)
        return (place + self.segment.index + (rounds * GOLDEN % 2**32 * count >> 32)) % count

    def key(self, *, shared: bool) -> int:
        """Return a 64-bit random seed: a function of (seed, step, segment) and, unless `shared`, of the rank.

        The random numbers need no saved state and do not use the global generator.
        """
        # Parts of a segment have equal indices but different starts, so each draws different numbers.
        key = (self.seed, self.step, self.segment.index, self.segment.start, "shared" if shared else self.rank)
        # The upper half only spreads the lower one over 64 bits: crc32 is linear, so both determine each other.
        low, high = zlib.crc32(repr(key).encode()), zlib.crc32(repr(("high", *key)).encode())
        return high << 32 | low

    def generator(self, *, shared: bool) -> torch.Generator:
        """Return a generator on the host, seeded with `key`; `add_uniform_` draws on the device."""
        return torch.Generator().manual_seed(self.key(shared=shared))
