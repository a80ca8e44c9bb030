"""Gives an optimizer a longer window of the second moment while it steps, see `lightning_sparse.momentum`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.momentum import second_decay


class Windows:
    """The betas of optimizers, while these have others. A saved state of an optimizer has its own betas.

    Args:
        optimizers: the optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._betas: dict[Optimizer, list[tuple[dict[str, Any], Any]]] = {}  # of each parameter group
        self._hooks: list[Any] = []
        for optimizer in optimizers:  # a checkpoint may be saved after an error within a step
            with contextlib.suppress(AttributeError):  # of a wrapper that does not call torch's constructor
                self._hooks.append(optimizer.register_state_dict_pre_hook(self.restore))

    def lengthen(self, optimizer: Optimizer, size: int) -> None:
        """Give an optimizer the β₂ for gradients of one of `size` ranks, until `restore`."""
        self.restore(optimizer)  # after a step that an error has ended
        self._betas[optimizer] = [(group, group["betas"]) for group in optimizer.param_groups]
        for group, (beta, beta_of_second) in self._betas[optimizer]:
            group["betas"] = beta, second_decay(beta_of_second, size)

    def restore(self, *optimizers: Optimizer) -> None:
        """Give optimizers their own betas back."""
        for optimizer in optimizers:
            for group, betas in self._betas.pop(optimizer, ()):
                group["betas"] = betas

    def close(self) -> None:
        """Give all optimizers their own betas back, and leave them."""
        self.restore(*self._betas)
        for hook in self._hooks:
            hook.remove()
