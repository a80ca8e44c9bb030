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
        self._betas: dict[Optimizer, list[tuple[dict[str, Any], Any, Any]]] = {}  # group, its betas, and the others
        self._hooks: list[Any] = []
        for optimizer in optimizers:  # a checkpoint may be saved within a step, or after an error in it
            with contextlib.suppress(AttributeError):  # of a wrapper that does not call torch's constructor
                self._hooks.append(optimizer.register_state_dict_post_hook(self._save))

    def lengthen(self, optimizer: Optimizer, size: int) -> None:
        """Give an optimizer the β₂ for gradients of one of `size` ranks, until `restore`."""
        self.restore(optimizer)  # after a step that an error has ended
        given = [(group, group["betas"]) for group in optimizer.param_groups]
        self._betas[optimizer] = [(x, betas, (betas[0], second_decay(betas[1], size))) for x, betas in given]
        for group, _, longer in self._betas[optimizer]:
            group["betas"] = longer

    def restore(self, *optimizers: Optimizer) -> None:
        """Give optimizers their own betas back, except to a group that has got new ones since `lengthen`."""
        for optimizer in optimizers:
            for group, betas, longer in self._betas.pop(optimizer, ()):
                group["betas"] = _own(group["betas"], betas, longer)

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for saved, (_, betas, longer) in zip(state["param_groups"], self._betas.get(optimizer, ()), strict=False):
            saved["betas"] = _own(saved["betas"], betas, longer)

    def close(self) -> None:
        """Give all optimizers their own betas back, and leave them."""
        self.restore(*self._betas)
        for hook in self._hooks:
            hook.remove()


def _own(present: Any, betas: Any, longer: Any) -> Any:
    """Return present betas with an optimizer's own β₂ in place of the longer one, if they have that."""
    if present is longer:
        return betas
    # A scheduler that changes β₁ copies β₂, after an error in a step the longer one.
    return (present[0], betas[1], *present[2:]) if present[1] is longer[1] else present
