"""Handles loss scales, skipped steps and clipping by norm, which need all gradients before the first is added."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.exchange import NOT_FINITE, NonFiniteGradient
from lightning_sparse.layout import Layout
from lightning_sparse.options import ReducerOptions

log = logging.getLogger(__name__)


class GradientCheck:
    """Decides what happens if gradients are not finite or too large, before any gradient is added to a residual.

    Args:
        options: the reducer's options; only `loss_scale`, `on_nonfinite` and `clip_norm` are used.

    Attributes:
        get_scale: the function `options.loss_scale`; it may be replaced between two steps.
        loss_scale: current loss scale, 1 without one.
        scale: factor on the gradients before they are added: the clipping factor divided by the loss scale.
        skipped: number of skipped steps.
    """

    def __init__(self, options: ReducerOptions) -> None:
        self.get_scale = options.loss_scale
        self._on_nonfinite, self._clip_norm = options.on_nonfinite, options.clip_norm
        self.scale = self.loss_scale = 1.0
        self.skipped = 0

    @property
    def needs_all_gradients(self) -> bool:
        """Whether a step needs all gradients before the first is added. If so, no exchange overlaps with backward."""
        return self.get_scale is not None or self._on_nonfinite == "skip" or self._clip_norm is not None

    def agree_to_step(
        self,
        grads: Mapping[str, Tensor],
        unused: Collection[str],
        layout: Layout,
        comm: Comm,
        step: int,
    ) -> bool:
        """Agree with all ranks whether to take a step, before any gradient is added to a residual.

        Args:
            grads: gradients by parameter name. If the step is skipped, they are filled with NaN, as a GradScaler
                expects.
            unused: names of parameters without a gradient in this backward pass.
            step: number of reductions so far; ranks compare it.

        Returns:
            Whether to take the step; equal on all ranks.

        Raises:
            NonFiniteGradient: a gradient is not finite on any rank, and such steps are not skipped.
            RankFailure: ranks are at different steps.
        """
        self.loss_scale = 1.0 if self.get_scale is None else self.get_scale()
        # Parameters are numbered in the order of the layout, which is equal on all ranks.
        names = [name for name in layout.names if name not in unused]
        # Norms of 16-bit gradients would otherwise be rounded to 16 bits, and in fp16 they would overflow early.
        norms = torch._foreach_norm([grads[name] for name in names], 2, torch.float32) if names else ()
        norm = math.hypot(*comm.to_host_async(torch.stack(norms))()) if norms else 0.0
        nonfinite: str | None = None
        if not math.isfinite(norm):
            # The norm of finite numbers may overflow too, so check the elements.
            nonfinite = next((name for name in names if not grads[name].isfinite().all()), None)
            norm = math.sqrt(sum(float(grads[name].double().norm()) ** 2 for name in names))
        word = torch.tensor([0 if nonfinite is None else 1 + layout.names.index(nonfinite), step], device="cpu")
        device = next(iter(grads.values())).device
        words = comm.to_host_async(comm.all_gather(word.to(device)))()
        for rank, (_, their_step) in enumerate(words):
            if their_step != step:
                raise RankFailure(
                    f"Ranks are out of step: rank {comm.ranks[rank]} is at step {their_step}, this one at {step}."
                )
        found = {comm.ranks[rank]: layout.names[index - 1] for rank, (index, _) in enumerate(words) if index}
        if not found:
            clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm * self.loss_scale / max(norm, 1e-30))
            self.scale = clip / self.loss_scale
            return True
        if self.get_scale is None:
            # Name the same parameter as an exchange segment by segment: in the first segment, the lowest rank's.
            rank, name = next(
                (rank, name) for segment in layout.segments for rank, name in found.items() if name in segment.names
            )
            what = f"The gradient of {name!r} is not finite on rank {rank} at step {step}."
            if self._on_nonfinite == "raise":
                raise NonFiniteGradient(f"{what} {NOT_FINITE}")
            if comm.rank == 0:
                log.warning(f"{what} All ranks skip this step; {self.skipped + 1} skipped so far.")
        self.skipped += 1
        torch._foreach_mul_(list(grads.values()), math.nan)
        return False
