"""How optimizers' updates are exchanged: after how many steps, with which momentum, and what is made of their mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.context import State, StateSpec
from lightning_sparse.layout import Segment
from lightning_sparse.momentum import ADAM_LIKE, moments_of
from lightning_sparse.options import Overlap, check

OUTER_MOMENTUM = "outer_momentum"
RuleOverlap = Literal["none", "next_step"]


@dataclass(frozen=True)
class UpdateRule:
    """The part of a method that matters only where updates are exchanged, see `lightning_sparse.updates`.

    Attributes:
        local_steps: H, the number of optimizer steps before each exchange (local SGD, Stich 2019, arXiv 1805.09767).
        momentum: how the optimizer's momentum is treated where entries are sent. "pay_out": unspent momentum is sent
            and the momentum cleared, if density · H < 1 − β; see `lightning_sparse.momentum`. "mask": the
            momentum is cleared (momentum factor masking, Lin et al. 2018). "keep": it stays.
        rescale: whether updates are made as large as those of dense training, whose optimizer sees the batches of all
            ranks: by up to √P, see `lightning_sparse.momentum`.
        outer_lr: factor on the mean of the updates.
        outer_momentum: Nesterov momentum of the means, on all ranks alike (DiLoCo, Douillard et al. 2023, arXiv
            2311.08105): with m ← μm + mean, weights change by outer_lr · (mean + μm).
        overlap: "next_step": ranks take the next step while they exchange. Each applies its own entries until the mean
            is there at the next exchange; see `lightning_sparse.updates.segment`. "none": they wait for the mean.

    Raises:
        ValueError: a value out of range, outer momentum without local steps, or an outer step with overlap="next_step".
    """

    local_steps: int = 1
    momentum: Literal["pay_out", "mask", "keep"] = "pay_out"
    rescale: bool = True
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    overlap: RuleOverlap = "none"

    def __post_init__(self) -> None:
        for name in ("local_steps", "momentum", "rescale", "outer_lr", "outer_momentum", "overlap"):
            object.__setattr__(self, name, check(name, getattr(self, name), "UpdateRule"))
        if self.overlap not in get_args(RuleOverlap):
            raise ValueError(
                f"UpdateRule(overlap={self.overlap!r}): the strategy overlaps updates with backward, not the rule of a "
                f"method. Leave overlap out, or set overlap='next_step'."
            )
        if self.local_steps == 1 and self.outer_momentum:
            raise ValueError(
                f"UpdateRule(local_steps=1, outer_momentum={self.outer_momentum:g}): the optimizer has its own "
                f"momentum in every step, and a second one on top delays it. Take several local steps, local_steps=8 "
                f"for example, or outer_momentum=0."
            )
        if self.delayed and self.has_outer_step:
            raise ValueError(
                f"UpdateRule(overlap='next_step', outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g}): "
                f"until the mean is there, a rank goes on by what it has sent itself, which an outer step would "
                f"change. Leave overlap out, or take a rule without an outer step."
            )

    @property
    def delayed(self) -> bool:
        """Whether an exchange ends with the next one."""
        return self.overlap == "next_step"

    def changed(self, local_steps: int | None, overlap: Overlap) -> UpdateRule:
        """Return the rule with another number of steps, unless None, and with `overlap` if it is "next_step"."""
        steps = self.local_steps if local_steps is None else local_steps
        return replace(self, local_steps=steps, overlap="next_step" if overlap == "next_step" else self.overlap)

    def rescales(self, optimizer: Optimizer, size: int) -> bool:
        """Return whether updates of one rank's batches are smaller than those of the batches of all `size` would be."""
        kind = moments_of(optimizer)
        if kind is None or kind.second is None or not self.rescale or size == 1:
            return False
        # Without a first moment there is no telling signal from noise; and several steps are not one of dense training.
        return self.local_steps == 1 and min(map(kind.beta, optimizer.param_groups)) > 0

    def clears_momentum(self, optimizer: Optimizer, density: float | None) -> bool:
        """Return whether there is momentum whose delay adds to that of a residual; `density` None: there is none."""
        kind = moments_of(optimizer)
        if kind is None or density is None or self.momentum == "keep":
            return False
        beta = max(map(kind.beta, optimizer.param_groups))
        # Entries that are sent about as often as momentum decays have no delay to make up for. After several steps
        # there is less of it, since weights have moved by momentum meanwhile; "every 5" of `benchmarks.updates`.
        return beta > 0 and (self.momentum == "mask" or density * self.local_steps < 1 - beta)

    def note(self, optimizers: Collection[Optimizer], density: float | None, size: int) -> str:
        """Return one sentence about what is exchanged.

        Args:
            optimizers: whose updates.
            density: after a warm-up; None where no entries wait in a residual.
            size: P, the number of ranks.
        """
        text = f"Each rank steps its own {_names(optimizers)}, and the updates are exchanged"
        if self.local_steps > 1:
            text += f" after every {self.local_steps} steps"
        if self.delayed:
            text += " while the next step goes on"
        torchs = [optimizer for optimizer in optimizers if moments_of(optimizer) not in (None, ADAM_LIKE)]
        if cleared := [optimizer for optimizer in torchs if self.clears_momentum(optimizer, density)]:
            text += f"; momentum of {_names(cleared)} is "
            text += f"{'paid out' if self.momentum == 'pay_out' else 'set to zero'} where entries are sent"
        if rescaled := [optimizer for optimizer in torchs if self.rescales(optimizer, size)]:
            text += f"; updates of {_names(rescaled)} are made up to √{size} times as large, as of all ranks' batches"
        others = [optimizer for optimizer in optimizers if moments_of(optimizer) is ADAM_LIKE]
        if any(self.clears_momentum(optimizer, density) or self.rescales(optimizer, size) for optimizer in others):
            text += f"; {_names(others)} is treated as Adam is, if its state has Adam's exp_avg and exp_avg_sq"
        unknown = [optimizer for optimizer in optimizers if moments_of(optimizer) is None]
        if unknown and self.momentum != "keep" and density is not None:
            text += f"; {_names(unknown)} is left alone, as where it keeps momentum is not known"
        return f"{text}."

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


def _names(optimizers: Collection[Optimizer]) -> str:
    """Return the names of optimizers' classes, each once."""
    return " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
