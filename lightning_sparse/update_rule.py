"""How optimizers' updates are exchanged: after how many steps, with which momentum, and what is made of their mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lightning_sparse.context import State, StateSpec
from lightning_sparse.layout import Segment
from lightning_sparse.options import check

OUTER_MOMENTUM = "outer_momentum"


@dataclass(frozen=True)
class UpdateRule:
    """The part of a method that matters only where updates are exchanged, see `lightning_sparse.updates`.

    Attributes:
        every: H, the number of optimizer steps before each exchange (local SGD, Stich 2019, arXiv 1805.09767).
        momentum: what becomes of the optimizer's momentum where entries are sent. "pay_out": what it would still add is
            sent, too, and it is set to zero, if density · H < 1 − β; see `lightning_sparse.moments`. "mask": it is set
            to zero (momentum factor masking, Lin et al. 2018). "keep": nothing.
        rescale: whether updates are made as large as those of dense training, whose optimizer sees the batches of all
            ranks: by up to √P, see `lightning_sparse.moments`.
        outer_lr: factor on the mean of the updates.
        outer_momentum: Nesterov momentum of the means, on all ranks alike (DiLoCo, Douillard et al. 2023, arXiv
            2311.08105): with m ← μm + mean, weights change by outer_lr · (mean + μm).

    Raises:
        ValueError: a value out of range, or outer momentum without local steps.
    """

    every: int = 1
    momentum: Literal["pay_out", "mask", "keep"] = "pay_out"
    rescale: bool = True
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("every", "momentum", "rescale", "outer_lr", "outer_momentum"):
            object.__setattr__(self, name, check(name, getattr(self, name), "UpdateRule"))
        if self.every == 1 and self.outer_momentum:
            raise ValueError(
                f"UpdateRule(every=1, outer_momentum={self.outer_momentum:g}): the optimizer has its own momentum in "
                f"every step, and a second one on top delays it. Take several local steps, every=8 for example, or "
                f"outer_momentum=0."
            )

    def with_every(self, every: int | None) -> UpdateRule:
        """Return the rule with another number of steps; None keeps it."""
        return self if every is None else replace(self, every=every)

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """What it keeps in each segment's state."""
        return (StateSpec(OUTER_MOMENTUM, resize="replicate"),) if self.outer_momentum else ()

    @property
    def has_outer_step(self) -> bool:
        """Whether weights do not simply change by the mean of the updates."""
        return self.outer_lr != 1 or self.outer_momentum != 0

    def outer_step_(self, means: Sequence[Tensor], segment: Segment, state: State, frozen: Collection[str]) -> None:
        """Replace the mean updates of a segment's parameters (1-D, fp32) by what weights change by, in place.

        The momentum of frozen parameters, given by name, rests.
        """
        if self.outer_momentum:
            for name, mean, momentum in zip(segment.names, means, segment.views(state[OUTER_MOMENTUM]), strict=True):
                if name not in frozen:
                    momentum.mul_(self.outer_momentum).add_(mean)
                    mean.add_(momentum, alpha=self.outer_momentum)
        if self.outer_lr != 1:
            for mean in means:
                mean.mul_(self.outer_lr)
