"""Attacked: some ranks send something else than their gradients, to see what an aggregator withstands.

Method(Sign(), NoMemory(), Attacked(MajorityVote(), "negate", share=0.3))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_sparse.aggregators.base import Aggregator
from lightning_sparse.compressors.base import Compressor, Entries, Update
from lightning_sparse.context import Context, StateSpec
from lightning_sparse.contrib.options import check
from lightning_sparse.contrib.order_statistics import share_of
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.pack import gather
from lightning_sparse.kernels.uniform import add_uniform_
from lightning_sparse.layout import Segment

Attack = Literal["scale", "flip", "negate"]
OTHER_NUMBERS = 0x9E3779B97F4A7C15
"""Makes another key of a context's, by which compressors draw their own random numbers."""


@dataclass(frozen=True)
class Attacked(Aggregator[Any]):
    """Another aggregator, under attack: the last ⌊share · P⌋ ranks multiply their u by something before they send it.

    The three attacks of Bernstein et al. 2019, arXiv 1810.05291, section 3.3. An attacker knows its own gradient only.

    - "scale": by one number for each step and segment, drawn from 0.01 to 100, its logarithm uniform.
    - "flip": each element by +1 or −1 at random.
    - "negate": by −1.

    An attacker keeps what an honest rank would: its residual is that of its own u. The result is not taken for a mean,
    so no dense mean takes its place, and no updates are exchanged. A number that is not finite still is an error on all
    ranks, an attacker's too.

    Attributes:
        aggregator: what all ranks do with what they are sent.
        attack: "scale", "flip" or "negate".
        share: α, the share of the ranks that attack, in [0, 0.5).

    Raises:
        TypeError: `aggregator` is none.
        ValueError: an attack that is not known, or a share out of range.
    """

    aggregator: Aggregator[Any]
    attack: Attack
    share: float

    averages = False
    divides = True  # statistics of u are not those of what an attacker compresses

    def __post_init__(self) -> None:
        if not isinstance(self.aggregator, Aggregator):
            raise TypeError(f"Attacked(aggregator={self.aggregator!r}): aggregator must be an Aggregator.")
        if self.attack not in get_args(Attack):
            raise ValueError(f"Attacked(attack={self.attack!r}): choose from {', '.join(get_args(Attack))}.")
        object.__setattr__(self, "share", check("share", self.share, "Attacked"))

    @property
    def state(self) -> tuple[StateSpec, ...]:  # type: ignore[override]
        """What `aggregator` keeps."""
        return self.aggregator.state

    @property
    def ranks_per_link(self) -> int:  # type: ignore[override]
        """As `aggregator`."""
        return self.aggregator.ranks_per_link

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        if exchange.rank < exchange.size - share_of(self.share, exchange.size):
            return self.aggregator(u, compressor, exchange, ctx)
        factor = self.factor(u, ctx)
        sent = u * factor
        update, applied = self.aggregator(sent, compressor, exchange, ctx)
        if applied is sent:  # all of it; an aggregator may have overwritten it since
            return update, u
        # What went into the result, in terms of u.
        back = factor.reciprocal()
        if isinstance(applied, Tensor):
            return update, applied * back
        if self.attack == "flip":
            back = gather(back, applied.indices)
        return update, Entries(applied.indices, applied.values * back)

    def factor(self, u: Tensor, ctx: Context) -> Tensor:
        """Return what an attacker multiplies `u` by in this step, fp32: as many numbers as `u` has, or one."""
        if self.attack == "negate":
            return torch.full((1,), -1.0, device=u.device)
        numbers = torch.zeros(u.numel() if self.attack == "flip" else 1, device=u.device)
        # In (-1/2, 1/2), none of them 0.
        add_uniform_(numbers, ctx.key(shared=False) ^ OTHER_NUMBERS)
        return numbers.sign_() if self.attack == "flip" else torch.pow(10, 4 * numbers)

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return self.aggregator.nbytes(compressor, segment, density, size)

    def messages(self, size: int) -> int:
        return self.aggregator.messages(size)

    def supports(self, compressor: Compressor) -> bool:
        return self.aggregator.supports(compressor)

    def check_size(self, size: int) -> None:
        self.aggregator.check_size(size)
