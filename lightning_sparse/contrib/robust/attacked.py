"""Attacked: some ranks send falsified gradients, to test the robustness of an aggregator.

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
"""Changes a context's key, so that an attacker's random numbers differ from those of compressors."""


@dataclass(frozen=True)
class Attacked(Aggregator[Any]):
    """Simulates an attack on another aggregator: the last ⌊share · P⌋ ranks multiply their u before they send it.

    The attacks are the three of Bernstein et al. 2019, arXiv 1810.05291, section 3.3. An attacker knows only its own
    gradient.

    - "scale" multiplies u by one number per step and segment, drawn log-uniformly from 0.01 to 100.
    - "flip" multiplies each element by +1 or −1 at random.
    - "negate" multiplies u by −1.

    An attacker keeps the same residual as an honest rank: that of its original u. With two passes, gTopK and OkTopk its
    residual also holds entries of other ranks, which are multiplied, too. The result does not count as a mean, so there
    is no fallback to dense, and updates are not supported. A number that is not finite still raises an error on all
    ranks, also if it is an attacker's.

    Attributes:
        aggregator: aggregator of all ranks.
        attack: "scale", "flip" or "negate".
        share: α, the share of ranks that attack, in [0, 0.5).

    Raises:
        TypeError: `aggregator` is not an Aggregator.
        ValueError: the attack is unknown, or the share is out of range.
    """

    aggregator: Aggregator[Any]
    attack: Attack
    share: float

    averages = False
    shards_segment = True  # an attacker does not compress u, so statistics of u do not apply

    def __post_init__(self) -> None:
        if not isinstance(self.aggregator, Aggregator):
            raise TypeError(f"Attacked(aggregator={self.aggregator!r}): aggregator must be an Aggregator.")
        if self.attack not in get_args(Attack):
            raise ValueError(f"Attacked(attack={self.attack!r}): choose from {', '.join(get_args(Attack))}.")
        object.__setattr__(self, "share", check("share", self.share, "Attacked"))

    @property
    def state(self) -> tuple[StateSpec, ...]:  # type: ignore[override]
        """State of `aggregator`."""
        return self.aggregator.state

    @property
    def ranks_per_link(self) -> int:  # type: ignore[override]
        """Value of `aggregator`."""
        return self.aggregator.ranks_per_link

    def __call__(self, u: Tensor, compressor: Compressor, exchange: Exchange, ctx: Context) -> tuple[Update, Update]:
        if exchange.rank < exchange.size - share_of(self.share, exchange.size):
            return self.aggregator(u, compressor, exchange, ctx)
        factor = self.factor(u, ctx)
        sent = u * factor
        update, applied = self.aggregator(sent, compressor, exchange, ctx)
        if applied is sent:  # all of u; the aggregator may have overwritten `sent`
            return update, u
        # Convert the applied part to a part of u.
        back = factor.reciprocal()
        if isinstance(applied, Tensor):
            return update, applied * back
        if self.attack == "flip":
            back = gather(back, applied.indices)
        return update, Entries(applied.indices, applied.values * back)

    def factor(self, u: Tensor, ctx: Context) -> Tensor:
        """Return an attacker's fp32 factors on `u` in this step: one per element of `u`, or one in total."""
        if self.attack == "negate":
            return torch.full((1,), -1.0, dtype=torch.float32, device=u.device)
        count = u.numel() if self.attack == "flip" else 1
        numbers = torch.zeros(count, dtype=torch.float32, device=u.device)
        # In (-1/2, 1/2), none of them 0.
        add_uniform_(numbers, ctx.key(shared=False) ^ OTHER_NUMBERS)
        return numbers.sign_() if self.attack == "flip" else torch.pow(10, 4 * numbers)

    def nbytes(self, compressor: Compressor, segment: Segment, density: float | None, size: int) -> float:
        return self.aggregator.nbytes(compressor, segment, density, size)

    def messages(self, size: int) -> int:
        return self.aggregator.messages(size)

    def capacity(self, compressor: Any, numel: int, density: float | None, size: int) -> int:
        return self.aggregator.capacity(compressor, numel, density, size)

    def supports(self, compressor: Compressor) -> bool:
        return self.aggregator.supports(compressor)

    def check_size(self, size: int) -> None:
        self.aggregator.check_size(size)
