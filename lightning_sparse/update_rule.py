"""Rules for the exchange of optimizer updates: local steps, momentum, rescaling, and an outer step on the mean."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.context import State, StateSpec
from lightning_sparse.layout import Segment
from lightning_sparse.momentum import ADAM_LIKE, moments_of, second_decay
from lightning_sparse.options import Overlap, check

OUTER_MOMENTUM, SIGNAL = "outer_momentum", "signal"
RuleOverlap = Literal["none", "next_step"]


@dataclass(frozen=True)
class UpdateRule:
    """The part of a method that applies only to the exchange of updates, see `lightning_sparse.updates`.

    Attributes:
        local_steps: H, the number of optimizer steps before each exchange (local SGD, Stich 2019, arXiv 1805.09767).
        momentum: treatment of the optimizer's momentum at sent entries. "pay_out": momentum payout if
            density · H < 1 − β, see `lightning_sparse.momentum`. "mask": the momentum is cleared (momentum factor
            masking, Lin et al. 2018). "keep": the momentum stays.
        rescale: whether updates are rescaled, by up to √P, to the size of updates in dense training, and β₂ is larger
            while ranks step. The optimizer of dense training gets the mean gradient of all ranks. See
            `lightning_sparse.momentum`.
        outer_lr: factor on the mean of the updates.
        outer_momentum: μ, Nesterov momentum of the means, equal on all ranks (DiLoCo, Douillard et al. 2023, arXiv
            2311.08105). With m ← μm + mean, weights change by outer_lr · (mean + μm).
        overlap: "next_step": ranks take the next step while they exchange. Each applies its own entries until the next
            exchange applies the mean; see `lightning_sparse.updates.segment`. "none": they wait for the mean.

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
                f"a rank applies its own entries until the mean arrives, and an outer step would change them. Leave "
                f"overlap out, or take a rule without an outer step."
            )

    @property
    def delayed(self) -> bool:
        """Whether an exchange completes in the next one."""
        return self.overlap == "next_step"

    def changed(self, local_steps: int | None, overlap: Overlap) -> UpdateRule:
        """Return the rule with `local_steps`, unless it is None, and with `overlap` if that is "next_step"."""
        steps = self.local_steps if local_steps is None else local_steps
        return replace(self, local_steps=steps, overlap="next_step" if overlap == "next_step" else self.overlap)

    def rescales(self, optimizer: Optimizer, size: int) -> bool:
        """Return whether to rescale updates, which are smaller on one rank than in dense training on `size` ranks."""
        kind = moments_of(optimizer)
        if kind is None or kind.second is None or not self.rescale or size == 1:
            return False
        return self.local_steps == 1  # several local steps are not one step of dense training

    def clip_factor(self, size: int) -> float:
        """Return the factor on a threshold for clipping the mean gradient of `size` ranks, to clip that of one rank.

        If noise dominates, the gradient of one rank is longer than the mean of P ranks, by √P (Lin et al. 2018, arXiv
        1712.01887). Methods with local steps clip as their papers do: factor 1.
        """
        return math.sqrt(size) if self.local_steps == 1 else 1.0

    def clears_momentum(self, optimizer: Optimizer, density: float | None) -> bool:
        """Return whether to clear the optimizer's momentum at sent entries; `density` None means no residual."""
        kind = moments_of(optimizer)
        if kind is None or density is None or self.momentum == "keep":
            return False
        beta = max(map(kind.beta, optimizer.param_groups))
        # If entries are sent about once in 1/(1 - beta) steps, momentum causes no second delay. Local steps reduce this
        # delay, because the weights have moved by the momentum meanwhile; see "every 5" of `benchmarks.updates`.
        return beta > 0 and (self.momentum == "mask" or density * self.local_steps < 1 - beta)

    def note(self, optimizers: Collection[Optimizer], density: float | None, size: int, worker: str = "rank") -> str:
        """Return one sentence about the exchange.

        Args:
            optimizers: the optimizers whose updates are exchanged.
            density: the density after the warm-up; None if no entries wait in a residual.
            size: P, the number of workers.
            worker: the kind of a worker, "rank" or "node".
        """
        text = f"Each {worker} steps its own {_names(optimizers)}, and the updates are exchanged"
        if self.local_steps > 1:
            text += f" after every {self.local_steps} steps"
        if self.delayed:
            text += " while the next step runs"
        torchs = [optimizer for optimizer in optimizers if moments_of(optimizer) not in (None, ADAM_LIKE)]
        if cleared := [optimizer for optimizer in torchs if self.clears_momentum(optimizer, density)]:
            text += f"; momentum of {_names(cleared)} is "
            text += f"{'paid out and cleared' if self.momentum == 'pay_out' else 'cleared'} at sent entries"
        if rescaled := [optimizer for optimizer in torchs if self.rescales(optimizer, size)]:
            text += f"; updates of {_names(rescaled)} are rescaled by up to √{size}"
        others = [optimizer for optimizer in optimizers if moments_of(optimizer) is ADAM_LIKE]
        if any(self.clears_momentum(optimizer, density) or self.rescales(optimizer, size) for optimizer in others):
            text += f"; {_names(others)} is treated like Adam if its state has Adam's exp_avg and exp_avg_sq"
        lengthened = [optimizer for optimizer in optimizers if self.rescales(optimizer, size)]
        betas = {float(group["betas"][1]) for optimizer in lengthened for group in optimizer.param_groups}
        if longer := [f"{second_decay(beta, size):g}" for beta in sorted(betas) if second_decay(beta, size) != beta]:
            text += f"; while a {worker} steps, β₂ is {' or '.join(longer)}"
        unknown = [optimizer for optimizer in optimizers if moments_of(optimizer) is None]
        if unknown and self.momentum != "keep" and density is not None:
            text += f"; momentum of {_names(unknown)} is unchanged, because its place in the state is unknown"
        return f"{text}."

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """Tensors that the rule keeps in each segment's state."""
        outer = (StateSpec(OUTER_MOMENTUM, resize="replicate"),) if self.outer_momentum else ()
        rescales = self.rescale and self.local_steps == 1
        return (*outer, StateSpec(SIGNAL, per="segment", resize="replicate")) if rescales else outer

    @property
    def has_outer_step(self) -> bool:
        """Whether the weight change differs from the mean of the updates."""
        return self.outer_lr != 1 or self.outer_momentum != 0

    @property
    def outer_gain(self) -> float:
        """The total weight change, over all steps, by a mean update of 1."""
        return self.outer_lr / (1 - self.outer_momentum)

    def outer_step_(self, means: Sequence[Tensor], segment: Segment, state: State, frozen: Collection[str]) -> None:
        """Replace the mean updates of a segment's parameters (1-D, fp32) by the weight changes, in place.

        Frozen parameters, given by name, keep their outer momentum.
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
    """Return the class names of optimizers, without duplicates."""
    return " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))


DEFAULT_RULE = UpdateRule()
"""The rule of a method that has none."""
